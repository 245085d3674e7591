"""Rows from the C++ driver, which times the kernels in CUDA graphs without JAX."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import weights
from measure import Plan
from results import InputError

from jaxlowbit import Format

_LINE = re.compile(r"m=(\d+)\s+n=(\d+)\s+k=(\d+) .* ([\d.]+) us ")


def measure(path: Path, plan: Plan) -> Iterator[dict[str, Any]]:
    """A row per shape, format and number of tokens; the driver checks each before it times it.

    **Raises:** `InputError` for a driver that cannot run, finds a product wrong, or has no such
    kernel.
    """
    for format in plan.formats:
        for shape in plan.shapes:
            command = [str(path), "time", *_options(plan, format)]
            command += ["--n", str(shape.n), "--k", str(shape.k)]
            for m, us in _run(command):
                yield {
                    "shape": shape.name,
                    "n": shape.n,
                    "k": shape.k,
                    "format": weights.name(format),
                    "dtype": plan.dtype,
                    "backend": "jaxlowbit",
                    "m": m,
                    "method": "driver",
                    "us": us,
                    "quartiles_us": None,
                    "bytes": weights.num_bytes(shape.n, shape.k, format, plan.dtype),
                    "copies": None,
                    "calls": None,
                    "error_over_bound": None,
                }


def _options(plan: Plan, format: Format) -> list[str]:
    if plan.dtype == "float32":
        raise InputError("the driver times bfloat16 and float16; leave out --driver for float32.")
    zero = {"none": [], "integer": ["--zero"], "float": ["--float-zero"]}[format.zero]
    return [
        "--m",
        ",".join(map(str, plan.tokens)),
        "--bits",
        str(format.bits),
        "--group",
        str(format.group_size),
        *zero,
        *(["--f16"] if plan.dtype == "float16" else []),
    ]


def _run(command: list[str]) -> Iterator[tuple[int, float]]:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise InputError(f"the driver {command[0]} cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise InputError(f"{' '.join(command)} failed: {' '.join(last)}")
    for line in done.stdout.splitlines():
        if found := _LINE.match(line):
            yield int(found[1]), float(found[4])
