"""Times our kernels beside dense bfloat16, shape by shape, and lists where they lose.

    make driver
    python benchmarks/sweep.py --driver build/driver/driver --shapes unseen --out sweep.json
    python benchmarks/sweep.py --read sweep.json

The driver times what the selection chooses, and PyTorch the dense product, cuBLAS, both in CUDA
graphs over cold weights (`timing.py`). A line per shape says how many times as fast as dense each
number of tokens is; then come the cells that `violations.py` objects to. The exit status is 1 if
there are any. `benchmark.py --read` reads the results too.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# PyTorch and the driver need some of the GPU's memory too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import dense
import driver
import measure
import results
import shapes
import violations
import weights
from violations import Cell

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
# Both take turns with so many: clocks drift alike for both, and few processes start.
SHAPES_AT_A_TIME = 20
CALLS = 16
COLD_BYTES = 500_000_000


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times our kernels beside dense bfloat16.")
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--driver", type=Path, help="the program of make driver")
    source.add_argument("--read", type=Path, help="judge these results and measure nothing")
    add("--shapes", nargs="+", default=["unseen"], help="as for benchmark.py; by default unseen")
    add("--m", type=results.positive, nargs="+", default=TOKENS, help="tokens")
    add("--format", default="int4-g128", help="as for benchmark.py, 4 or 8 bits")
    add("--out", type=Path, help="write what is measured here")
    options = parser.parse_args(arguments)
    try:
        cells = _read(options.read) if options.read else _measure(options)
        sys.exit(_judge(cells))
    except (results.InputError, ValueError) as error:
        parser.error(str(error))


def _read(path: Path) -> list[Cell]:
    found = results.read(path)
    cells = violations.cells(found["rows"])
    tokens = sorted({cell.m for cell in cells})
    _print_head(found["environment"], tokens)
    _print_lines(cells, tokens)
    return cells


def _measure(options: argparse.Namespace) -> list[Cell]:
    results.require_folder(options.out and options.out.parent)
    # A size that two layers have is measured once.
    distinct = {shape[1:]: shape for name in options.shapes for shape in shapes.find(name)}
    plan = measure.Plan(
        shapes=list(distinct.values()),
        tokens=sorted(set(options.m)),
        formats=[weights.parse_format(options.format)],
        dtype="bfloat16",
        backends=[],
        calls=CALLS,
        cold_bytes=COLD_BYTES,
    )
    cublas = dense.Cublas(plan)
    found: dict[str, Any] = {"environment": results.environment()}
    found |= {"rows": [], "skipped": [], "wrong": []}
    _print_head(found["environment"], plan.tokens)
    for first in range(0, len(plan.shapes), SHAPES_AT_A_TIME):
        part = plan._replace(shapes=plan.shapes[first : first + SHAPES_AT_A_TIME])
        rows = [*driver.measure(options.driver, part), *cublas.measure(part)]
        found["rows"] += rows
        if options.out:  # so that an interrupted run keeps what it has
            results.write(options.out, found)
        _print_lines(violations.cells(rows), plan.tokens)
    return violations.cells(found["rows"])


def _print_head(environment: dict[str, Any], tokens: Sequence[int]) -> None:
    print(results.describe(environment))
    print(f"{'times as fast as dense':24s}{''.join(f'{m:7d}' for m in tokens)}", flush=True)


def _print_lines(cells: list[Cell], tokens: Sequence[int]) -> None:
    for shape in dict.fromkeys(cell.shape for cell in cells):
        line = {
            cell.m: f"{cell.speed_up:.2f}{'!' if cell.slower else ' '}"
            for cell in cells
            if cell.shape == shape
        }
        print(f"{shape:24s}" + "".join(f"{line.get(m, ''):>7s}" for m in tokens), flush=True)


def _judge(cells: list[Cell]) -> int:
    slower = [cell for cell in cells if cell.slower]
    falls = list(violations.falls(cells))
    objections = {
        f"slower than dense by more than {violations.SLOWER_BY:.0%}, or, with fewer than "
        f"{violations.SMALL / 1e6:g} million weights, {violations.SMALL_SLOWER_BY:.0%} (!)": slower,
        f"slower than with more tokens by more than {violations.FALLS_BY:.0%}": falls,
    }
    for objection, found in objections.items():
        print(f"\n{len(found)} of {len(cells)} cells are {objection}", *found, sep="\n  ")
    mean = violations.mean_speed_up(cells)
    print(f"\ngeometric mean: {mean:.2f} times as fast as dense")
    return int(bool(slower or falls))


if __name__ == "__main__":
    main()
