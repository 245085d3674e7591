"""Kills `jaxlowbit quantize` and `convert` at random moments, and checks that targets are whole.

    python tools/kill_writers.py MODEL [--times 50] [--seed 0]

The target is the old folder or the complete new one: `jaxlowbit verify` accepts it.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "jaxlowbit", *arguments]


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills writers of models at random moments.")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    target = Path(tempfile.mkdtemp()) / "target"
    ways = [
        command("quantize", options.model, str(target), "--format", "int4-g64", "--overwrite"),
        command("convert", options.model, str(target), "--overwrite"),
    ]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    lengths = []
    for way in ways:
        start = time.monotonic()
        subprocess.run(way, check=True, **quiet)
        lengths.append(time.monotonic() - start)
    for i in range(options.times):
        process = subprocess.Popen(ways[i % 2], **quiet)
        try:
            # Most moments lie in the second half, when the target is written.
            process.wait(lengths[i % 2] * (1 - draw.random() ** 2))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        subprocess.run(command("verify", str(target)), check=True, **quiet)
        print(f"{i + 1} of {options.times}: whole, exit {process.returncode}", flush=True)


if __name__ == "__main__":
    main()
