"""Checks and times quantized products against dense ones, and reports the results.

    python benchmarks/benchmark.py --shapes llama3-8b --m 1 16 64 256 --out results.json
    python benchmarks/benchmark.py --out new.json --compare old.json
    python benchmarks/benchmark.py --read results.json --plot plots --markdown docs/benchmarks.md

The method is in `timing.py`, shapes in `shapes.py`, backends in `contenders.py` and `peers/`. Wrong
products are reported and not timed. The exit status is 1 after a wrong product or a regression.
"""

import argparse
import itertools
import os
import sys
from pathlib import Path
from typing import Any

# PyTorch needs some of the GPU's memory too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import compare
import contenders
import driver
import measure
import peers
import plot
import report
import results
import shapes
import weights

DEFAULT_BACKENDS = ("jaxlowbit", *contenders.DENSE, contenders.READ)


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        sys.exit(_run(options))
    except (results.InputError, ValueError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    names = [*contenders.table(), contenders.READ]
    parser = argparse.ArgumentParser(description="Times quantized products over cold weights.")
    add = parser.add_argument
    add("--shapes", nargs="+", help="N x K, models, layers, sets: shapes.py; by default standard")
    add("--m", type=results.positive, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="tokens")
    add("--format", nargs="+", default=["int4-g128"], help="int4-g128-integer, int8, ...")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add(
        "--backends",
        nargs="+",
        choices=names,
        metavar="NAME",
        default=[*DEFAULT_BACKENDS, *(n for n in peers.PEERS if n not in DEFAULT_BACKENDS)],
        help=f"{', '.join(names)}; by default {', '.join(DEFAULT_BACKENDS)} and the other packages",
    )
    add("--calls", type=results.positive, default=16, help="minimum calls of the shorter program")
    add("--cold-mb", type=float, default=200, help="minimum size of all copies of a weight")
    add(
        "--driver",
        type=Path,
        help="time our kernels in this program (make driver) instead of in jit",
    )
    add("--out", type=Path, help="write results here")
    add("--read", type=Path, help="report on these results, or --shapes of them; measure nothing")
    add("--compare", type=Path, help="compare with these results")
    add("--threshold", type=float, default=5, help="percent by which a time may grow")
    add("--plot", type=Path, help="write plots into this folder")
    add("--markdown", type=Path, help="put the tables into this page, between its markers")
    return parser


def _run(options: argparse.Namespace) -> int:
    for folder in (options.out and options.out.parent, options.plot):
        results.require_folder(folder)
    old = results.read(options.compare) if options.compare else None
    found = _read(options) if options.read else _measure(options)
    text = report.markdown(found)
    print("", text, sep="\n")
    if options.markdown:
        report.embed(options.markdown, text)
    if options.plot:
        for path in plot.plot(found, options.plot):
            print(f"wrote {path}")
    failed = bool(found.get("wrong"))
    if old is not None:
        failed |= _compare(old, found, options.threshold)
    return int(failed)


def _shapes(options: argparse.Namespace) -> list[shapes.Shape]:
    return [shape for name in options.shapes or ["standard"] for shape in shapes.find(name)]


def _read(options: argparse.Namespace) -> dict[str, Any]:
    found = results.read(options.read)
    if not options.shapes:
        return found
    sizes = {(shape.n, shape.k) for shape in _shapes(options)}
    rows = [row for row in found["rows"] if (row["n"], row["k"]) in sizes]
    if not rows:
        raise results.InputError(f"{options.read} has no results of {' '.join(options.shapes)}.")
    return {**found, "rows": rows}


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    backends = [n for n in options.backends if not (options.driver and n == "jaxlowbit")]
    plan = measure.Plan(
        shapes=_shapes(options),
        tokens=options.m,
        formats=[weights.parse_format(text) for text in options.format],
        dtype=options.dtype,
        backends=backends,
        calls=options.calls,
        cold_bytes=int(1e6 * options.cold_mb),
    )
    found: dict[str, Any] = {"environment": results.environment()}
    found |= {"rows": [], "skipped": [], "wrong": []}
    print(results.describe(found["environment"]), flush=True)
    measured = measure.measure(plan)
    if options.driver:
        measured = itertools.chain(driver.measure(options.driver, plan), measured)
    for finding in measured:
        _record(found, finding)
        if options.out:  # an interrupted run keeps its rows
            results.write(options.out, found)
    return found


def _record(found: dict[str, Any], finding: Any) -> None:
    if isinstance(finding, measure.Skipped):
        found["skipped"].append(finding._asdict())
        print(f"skipped {finding.backend} {finding.format}: {finding.reason}", flush=True)
    elif isinstance(finding, measure.Wrong):
        found["wrong"].append(finding._asdict())
        print(
            f"WRONG, so not timed: {finding.backend} {finding.format} {finding.shape} "
            f"m={finding.m}: error over bound {finding.error_over_bound:.3g}",
            flush=True,
        )
    else:
        found["rows"].append(finding)
        print(_line(finding), flush=True)


def _line(row: dict[str, Any]) -> str:
    name = f"{row['shape']:32s} m={row['m'] or '-':<6} {row['format']:16s} {row['backend']:18s}"
    rate = f"{row['us']:10.2f} us {1e-6 * row['bytes'] / row['us']:6.2f} TB/s"
    spread = row["quartiles_us"]
    quartiles = f"  quartiles {spread[0]:.2f} to {spread[1]:.2f}" if spread else ""
    error = row["error_over_bound"]
    return f"{name} {rate}{quartiles}" + ("" if error is None else f"  error/bound {error:.2f}")


def _compare(old: dict[str, Any], new: dict[str, Any], percent: float) -> bool:
    print(f"old: {results.describe(old['environment'])}")
    print(f"new: {results.describe(new['environment'])}")
    found = compare.cells(old, new)
    print(f"{'':90s} {'old us':>10s} {'new us':>10s} {'new/old':>8s}")
    for cell in found:
        print(cell, "REGRESSED" if cell.regressed(percent) else "")
    count = sum(cell.regressed(percent) for cell in found)
    print(f"{count} of {len(found)} cells regressed by more than {percent:g} %")
    return count > 0


if __name__ == "__main__":
    main()
