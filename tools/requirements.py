"""Prints the requirements of the build, of the package and of the named extras, one per line.

Unlike `pip install ".[extra]"`, installing these requirements builds nothing.
"""

import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    """**Raises:** `KeyError` for an extra that pyproject.toml does not have."""
    tables = tomllib.loads(
        (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    )
    project = tables["project"]
    found = [*tables["build-system"]["requires"], *project["dependencies"]]
    return found + [r for extra in extras for r in project["optional-dependencies"][extra]]


if __name__ == "__main__":
    print(*requirements(sys.argv[1:]), sep="\n")
