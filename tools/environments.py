"""Prints the environments that a step of .ci/run runs, such as `3.12 jax==0.10.2`."""

import sys
import tomllib
from pathlib import Path

LIST = Path(__file__).parents[1] / ".ci/environments.toml"


def environments(step: str) -> list[str]:
    rows = tomllib.loads(LIST.read_text(encoding="utf-8"))["environments"]
    wanted = [row for row in rows if row["step"] == step]
    return [
        f"{row['python']} jax" + ("" if row["jax"] == "newest" else f"=={row['jax']}")
        for row in wanted
    ]


if __name__ == "__main__":
    print(*environments(sys.argv[1]), sep="\n")
