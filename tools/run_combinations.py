"""Computes the combinations of tests/support/combinations.py, and writes the table of their errors.

    python tools/run_combinations.py --out cpu.jsonl               # all, on the backends here
    python tools/run_combinations.py --out gpu.jsonl --workers 12
    python tools/run_combinations.py --only "int8 by int4" --out x.jsonl
    python tools/run_combinations.py --table                       # the page, from the kept results
    python tools/run_combinations.py --table --check               # whether it has that table

Appends a line per combination and backend as soon as it is computed; a second run continues where
the first one ended. Kept results are `benchmarks/results/combinations/DEVICE.jsonl.gz`; the page is
`docs/measurements/combinations.md`. On the CPU, Pallas is interpreted and computes only some of the
combinations. The exit status is 1 if a result is wrong.
"""

import argparse
import datetime
import gzip
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/measurements/combinations.md"
RESULTS = ROOT / "benchmarks/results/combinations"
INTERPRETED = 24  # combinations that Pallas computes on the CPU
_PATHS = [str(ROOT / "tests/support"), str(ROOT / "tools")]
_KEPT_PROGRAMS = 20  # combinations between clearing compiled programs
_MARKED = re.compile(r"(<!-- combinations -->\n).*?(<!-- /combinations -->)", re.DOTALL)

Line = dict[str, Any]


# --- runs -----------------------------------------------------------------------------------------


def run(combinations: Any, out: Path, only: str, part: int, parts: int) -> None:
    """Appends lines for the combinations missing in the file."""
    import jax

    done = {(line["name"], line["backend"]) for line in _lines(out) if "name" in line}
    chosen = [x for x in combinations.COMBINATIONS if only in x.name][part::parts]
    interpreted = {x.name for x in combinations.interpreted(INTERPRETED)}
    for number, combination in enumerate(chosen, 1):
        for backend in combinations.claimed(combination):
            slow = backend == "pallas" and combinations.PLATFORM == "cpu"
            left_out = slow and combination.name not in interpreted
            if not left_out and (combination.name, backend) not in done:
                _append(out, line_of(combinations, combination, backend))
        if number % _KEPT_PROGRAMS == 0:
            jax.clear_caches()


def line_of(combinations: Any, combination: Any, backend: str) -> Line:
    """The result of a combination, or its error."""
    line = {"name": combination.name, "backend": backend}
    try:
        return line | combinations.check(combination, backend)._asdict()
    except Exception as error:
        return line | {"failed": f"{type(error).__name__}: {str(error)[:500]}"}


def right(line: Line) -> bool:
    if "failed" in line:
        return False
    return line["error"] <= 1 and not line["weights"] and not line["sums"]


def _append(path: Path, line: Line) -> None:
    """Appends in one write, so that lines of several processes do not mix."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _lines(path: Path) -> list[Line]:
    if not path.exists():
        return []
    text = (
        gzip.decompress(path.read_bytes()).decode()
        if path.suffix == ".gz"
        else path.read_text(encoding="utf-8")
    )
    return [json.loads(line) for line in text.splitlines()]


def environment() -> Line:
    """The device, versions and date of results."""
    import jax

    import jaxlowbit
    from jaxlowbit._backends.extension import BUILD

    device = jax.devices()[0]
    cpu = f"CPU ({BUILD['cpu_isa'][0]})"
    return {
        "device": cpu if device.platform == "cpu" else device.device_kind,
        "jax": jax.__version__,
        "jaxlowbit": jaxlowbit.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


# --- the table ------------------------------------------------------------------------------------


class Results(NamedTuple):
    environment: Line
    lines: Sequence[Line]


def kept(folder: Path = RESULTS) -> list[Results]:
    """Reads the results in the repository, one file per device."""
    found = []
    for path in sorted(folder.glob("*.jsonl.gz")):
        first, *lines = _lines(path)
        found.append(Results(first, lines))
    return found


def filled(text: str, combinations: Any, results: Iterable[Results]) -> str:
    """Inserts the tables of these results into the page."""
    tables = "\n\n".join(markdown(combinations, found) for found in results)
    return _MARKED.sub(lambda match: f"{match[1]}\n{tables}\n\n{match[2]}", text)


def markdown(combinations: Any, results: Results) -> str:
    by_name = {x.name: x for x in combinations.COMBINATIONS}
    lines = [(by_name[line["name"]], line) for line in results.lines]
    backends = sorted({line["backend"] for _, line in lines})
    about = results.environment

    def table(name: str) -> str:
        rows = [(name, *backends), ("---",) * (1 + len(backends))]
        for value in combinations.DIMENSIONS[name]:
            own = [line for x, line in lines if getattr(x, name) == value]
            cells = [_cell([x for x in own if x["backend"] == backend]) for backend in backends]
            if own:
                rows.append((str(value), *cells))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    return "\n\n".join(
        [
            f"## {about['device']}",
            f"jaxlowbit {about['jaxlowbit']}, jax {about['jax']}, {about['date']}.",
            _summary(backends, [line for _, line in lines]),
            table("weights"),
            table("scales"),
            table("lhs"),
            table("epilogue"),
            table("rows"),
        ]
    )


def _summary(backends: Iterable[str], lines: Sequence[Line]) -> str:
    head = ("backend", "combinations", "wrong", "worst error", "with exact sums of integers")
    rows = [head, ("---",) * len(head)]
    for backend in backends:
        own = [line for line in lines if line["backend"] == backend]
        errors = [line["error"] for line in own if "failed" not in line]
        sums = sum(line.get("sums") == 0 for line in own)
        wrong = sum(not right(line) for line in own)
        rows.append((backend, str(len(own)), str(wrong), _worst(errors), str(sums)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _worst(errors: Sequence[float]) -> str:
    return f"{max(errors):.2g}" if errors else "none"


def _cell(lines: Sequence[Line]) -> str:
    """Formats the maximum ratio of error to bound, the count, and the number of wrong results."""
    if not lines:
        return ""
    errors = [line["error"] for line in lines if "failed" not in line]
    wrong = sum(not right(line) for line in lines)
    return f"{_worst(errors)} of {len(lines)}" + (f", {wrong} wrong" if wrong else "")


# --- the command ----------------------------------------------------------------------------------


def load() -> Any:
    """Imports the module `combinations` of the tests."""
    sys.path[:0] = [path for path in _PATHS if path not in sys.path]
    return importlib.import_module("combinations")


def main() -> None:
    parser = argparse.ArgumentParser(description="Computes combinations, and writes their table.")
    parser.add_argument("--out", type=Path, help="lines of JSON, appended to")
    parser.add_argument("--only", default="", help="combinations with this in their names")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help="write the page of the kept results")
    parser.add_argument("--check", action="store_true", help="with --table: change nothing")
    options = parser.parse_args()
    if options.table:
        sys.exit(_write_page(options.check))
    if options.out is None:
        parser.error("--out names the file that results go to")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ["JAXLOWBIT_TUNED"] = ""
    if options.part is None and options.workers > 1:
        sys.exit(_share(options))
    import jax

    # Disables TF32.
    jax.config.update("jax_default_matmul_precision", "highest")
    combinations = load()
    if options.part is None and not _lines(options.out):
        _append(options.out, environment())
    run(combinations, options.out, options.only, options.part or 0, options.workers)
    if options.part is None:
        sys.exit(_report(options.out))


def _share(options: argparse.Namespace) -> int:
    """Runs processes that each compute a part."""
    if not _lines(options.out):
        code = "import json, run_combinations; print(json.dumps(run_combinations.environment()))"
        paths: Mapping[str, str] = {
            "PYTHONPATH": os.pathsep.join(filter(None, [*_PATHS, os.environ.get("PYTHONPATH")]))
        }
        asked = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **paths},
            check=True,
            stdout=subprocess.PIPE,
        )
        _append(options.out, json.loads(asked.stdout.splitlines()[-1]))
    command = [sys.executable, *sys.argv]
    workers = [subprocess.Popen([*command, "--part", str(part)]) for part in range(options.workers)]
    ended = [worker.wait() for worker in workers]
    for part, status in enumerate(ended):
        if status:
            print(f"process {part} ended with {status}: run this again for what it left")
    return _report(options.out) or int(any(ended))


def _report(out: Path) -> int:
    _, *lines = _lines(out)
    wrong = [line for line in lines if not right(line)]
    for line in wrong:
        print(json.dumps(line))
    print(_summary(sorted({line["backend"] for line in lines}), lines))
    return 1 if wrong else 0


def _write_page(check: bool) -> int:
    text = PAGE.read_text(encoding="utf-8")
    new = filled(text, load(), kept())
    if not check:
        PAGE.write_text(new, encoding="utf-8")
    changed = "another table" if check else "written"
    print(f"{PAGE.relative_to(ROOT)}: {changed if new != text else 'as it is'}")
    return int(check and new != text)


if __name__ == "__main__":
    main()
