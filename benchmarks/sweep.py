"""Times our kernels against dense bfloat16 and lists slower cells.

    make driver
    python benchmarks/sweep.py --driver build/driver/driver --shapes unseen --out sweep.json
    python benchmarks/sweep.py --driver build/driver/driver --shapes standard unseen random-40 \\
        --m 8-512/8 random-30 --quick --out sweep.json --plot sweep.svg
    python benchmarks/sweep.py --read sweep.json

The driver times the selected kernels, PyTorch times the dense product (cuBLAS), both in CUDA graphs
with cold weights (`timing.py`). Prints the speed-up over dense by number of tokens, a line per
shape, then the violations (`violations.py`) and the worst twenty cells. The exit status is 1 if
there are violations. `benchmark.py --read` also reads the results.
"""

import argparse
import os
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# PyTorch and the driver need some of the GPU's memory too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import dense
import driver
import measure
import plot
import results
import shapes
import timing
import violations
import weights
from violations import Cell

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
# Shapes per turn. The two alternate, so that clock drift affects both, but start few processes.
SHAPES_AT_A_TIME = 20
MOST_TOKENS = 4096  # upper limit of random numbers of tokens
WORST = 20
CALLS = 16
COLD_BYTES = 500_000_000  # quick sweeps use half of it, four times the L2 of an H200


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times our kernels next to dense bfloat16.")
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--driver", type=Path, help="the program of make driver")
    source.add_argument("--read", type=Path, help="check these results and measure nothing")
    add("--shapes", nargs="+", default=["unseen"], help="as for benchmark.py; by default unseen")
    add(
        "--m",
        type=_tokens,
        nargs="+",
        default=[TOKENS],
        help="tokens: numbers, ranges such as 8-512/8, and random-30 for thirty random ones",
    )
    add("--format", default="int4-g128", help="as for benchmark.py, 4 or 8 bits")
    add("--quick", action="store_true", help="half of the weights and a third of the replays")
    add("--out", type=Path, help="write results here")
    add("--plot", type=Path, help="draw a heat map here, an SVG file")
    options = parser.parse_args(arguments)
    try:
        results.require_folder(options.plot and options.plot.parent)
        cells = _read(options.read) if options.read else _measure(options)
        if options.plot:
            plot.heat_map(cells, options.plot)
        sys.exit(_judge(cells))
    except (results.InputError, ValueError) as error:
        parser.error(str(error))


def _tokens(text: str) -> list[int]:
    """Parses an argument to numbers of tokens."""
    if drawn := re.fullmatch(r"random-([1-9]\d{0,3})", text):
        return random.Random(0).sample(range(1, MOST_TOKENS + 1), int(drawn[1]))
    if bounds := re.fullmatch(r"([1-9]\d*)-([1-9]\d*)/([1-9]\d*)", text):
        first, last, step = map(int, bounds.groups())
        if last < first:
            raise argparse.ArgumentTypeError(f"{text} is empty; a range begins with its minimum.")
        return list(range(first, last + 1, step))
    return [results.positive(text)]


def _read(path: Path) -> list[Cell]:
    found = results.read(path)
    cells = violations.cells(found["rows"])
    tokens = sorted({cell.m for cell in cells})
    _print_head(found["environment"], tokens)
    _print_lines(cells, tokens)
    return cells


def _measure(options: argparse.Namespace) -> list[Cell]:
    results.require_folder(options.out and options.out.parent)
    # Equal shapes of several layers are measured once.
    distinct = {shape[1:]: shape for name in options.shapes for shape in shapes.find(name)}
    plan = measure.Plan(
        shapes=list(distinct.values()),
        tokens=sorted({m for several in options.m for m in several}),
        formats=[weights.parse_format(options.format)],
        dtype="bfloat16",
        backends=[],
        calls=CALLS,
        cold_bytes=COLD_BYTES // 2 if options.quick else COLD_BYTES,
        effort=timing.QUICK if options.quick else timing.THOROUGH,
    )
    cublas = dense.Cublas(plan)
    found: dict[str, Any] = {"environment": results.environment()}
    found |= {"rows": [], "skipped": [], "wrong": []}
    _print_head(found["environment"], plan.tokens)
    for first in range(0, len(plan.shapes), SHAPES_AT_A_TIME):
        part = plan._replace(shapes=plan.shapes[first : first + SHAPES_AT_A_TIME])
        rows = [*driver.measure(options.driver, part), *cublas.measure(part)]
        found["rows"] += rows
        if options.out:  # an interrupted run keeps its rows
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
    falls, jumps = list(violations.falls(cells)), list(violations.jumps(cells))
    objections = {
        f"slower than dense by more than {violations.SLOWER_BY:.0%}, or, with fewer than "
        f"{violations.SMALL / 1e6:g} million weights, {violations.SMALL_SLOWER_BY:.0%} (!)": slower,
        f"slower than with more tokens by more than {violations.FALLS_BY:.0%}": falls,
        f"faster than with up to {violations.STEP} more tokens by more than "
        f"{violations.JUMPS_BY:.0%}": jumps,
    }
    for objection, found in objections.items():
        print(f"\n{len(found)} of {len(cells)} cells are {objection}", *found, sep="\n  ")
    worst = sorted(cells, key=lambda cell: cell.speed_up)[:WORST]
    print(f"\nthe worst {len(worst)}", *worst, sep="\n  ")
    mean = violations.mean_speed_up(cells)
    print(f"\ngeometric mean: {mean:.2f} times as fast as dense")
    return int(bool(slower or falls or jumps))


if __name__ == "__main__":
    main()
