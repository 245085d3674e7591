"""Kills `jaxlowbit quantize` and `convert` at random moments, and checks that targets are whole.

    python tools/kill_writers.py MODEL [--times 50] [--seed 0]

Each command is killed `--times` times. After each kill, the target must be the old folder or the
complete new one: `jaxlowbit verify` accepts it, and its other files agree. Half of the moments are
in the last fifth of a command, when it writes.
"""

import argparse
import collections
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path

# A server that has imported the library forks the commands, so a run takes no time to start.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["jaxlowbit._llm.files_command"])


def run(arguments: list[str]) -> None:
    """Runs a command without output, in a process."""
    from jaxlowbit._command import main

    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  as it ends
    main(arguments)


def ended(arguments: list[str], seconds: float | None = None) -> int | None:
    """Starts a command, and kills it after some seconds; returns its exit status."""
    process = SERVER.Process(target=run, args=(arguments,))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode


def state(target: Path) -> str:
    """The command that wrote the target, by a format and by its other files."""
    if status := ended(["verify", str(target)]):
        sys.exit(f"verify {target} ended with {status}")
    from jaxlowbit.checkpoint._saved import read_saved

    found = read_saved(target)
    formats = {
        json.dumps(description["format"], sort_keys=True)
        for description in found.descriptions.values()
    }
    files = sorted(path.name for path in target.iterdir())
    return json.dumps(
        [sorted(formats), files, (target / "config.json").read_text(encoding="utf-8")]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills writers of models at random moments.")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kill(options.model, Path(folder) / "target", options.times, random.Random(options.seed))


def kill(model: str, target: Path, times: int, draw: random.Random) -> None:
    commands = {
        "quantize": ["quantize", model, str(target), "--format", "int4-g64", "--overwrite"],
        "convert": ["convert", model, str(target), "--overwrite"],
    }
    ended(["info"])  # starts the server
    seconds, states = {}, {}
    for name, arguments in commands.items():
        ended(arguments)  # compiles its programs
        start = time.monotonic()
        if status := ended(arguments):
            sys.exit(f"{name} ended with {status}")
        seconds[name], states[name] = time.monotonic() - start, state(target)
    counts = {name: collections.Counter[str]() for name in commands}
    before = states["convert"]
    while (rest := {name: times - x["killed"] for name, x in counts.items()}) and any(
        rest.values()
    ):
        name = max(rest, key=lambda name: rest[name])
        share = draw.random() if draw.random() < 0.5 else 0.8 + 0.25 * draw.random()
        status = ended(commands[name], seconds[name] * share)
        after = state(target)
        if after not in (before, states[name]):
            sys.exit(f"the target is neither the old nor the new one after {name}: {after}")
        found = ["ended" if status == 0 else "killed", "new" if after == states[name] else "old"]
        if (target.parent / f".{target.name}.incomplete").exists():
            found.append("with a partial folder")
        counts[name].update(found if status else found[:1])
        before = after
        print(f"{name}: {', '.join(found)}", flush=True)
    for name, count in counts.items():
        print(f"{name}: {dict(count)}")


if __name__ == "__main__":
    main()
