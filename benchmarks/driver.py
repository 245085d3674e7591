"""Rows of the C++ driver, which times the kernels in CUDA graphs without JAX."""

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timing
import weights
from measure import Plan
from results import InputError

from jaxlowbit import Format

_CODEBOOKS = ("e2m1", "e4m3", "e5m2")  # computed by kernels; others are tables
_LINE = re.compile(r"m=(\d+)\s+n=(\d+)\s+k=(\d+) .* ([\d.]+) us ")


def measure(path: Path, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yields a row per shape, format and number of tokens, with one process per format.

    The driver checks a sample of each product before it times it.

    **Raises:** `InputError` for a driver that cannot run, finds a wrong product, lacks the kernel,
    or prints unexpected times.
    """
    for format in plan.formats:
        command = [str(path), "time", *_options(plan, format)]
        command += ["--n", ",".join(str(shape.n) for shape in plan.shapes)]
        command += ["--k", ",".join(str(shape.k) for shape in plan.shapes)]
        times = _run(command)
        for m, shape in itertools.product(plan.tokens, plan.shapes):
            size, us = next(times, (None, 0.0))
            if size != (m, shape.n, shape.k):
                raise InputError(
                    f"{path} gave no time of m={m} and {shape.name}; it may be older than these "
                    "scripts: build it again (make driver)."
                )
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
        for _ in times:  # until its exit status is known
            pass


def _options(plan: Plan, format: Format) -> list[str]:
    if plan.dtype == "float32":
        raise InputError("the driver times bfloat16 and float16; leave out --driver for float32.")
    named = format.codebook if format.codebook in _CODEBOOKS else "table"
    codebook = [] if format.codebook is None else ["--codebook", str(named)]
    scale = [] if format.scale is None else ["--scale", format.scale]
    zero = {"none": [], "integer": ["--zero"], "float": ["--float-zero"]}[format.zero]
    return [
        "--m",
        ",".join(map(str, plan.tokens)),
        "--bits",
        str(format.bits),
        "--group",
        str(format.group_size),
        *zero,
        *codebook,
        *scale,
        *(["--f16"] if plan.dtype == "float16" else []),
        *(["--quick"] if plan.effort == timing.QUICK else []),
    ]


def _run(command: list[str]) -> Iterator[tuple[tuple[int, int, int], float]]:
    """Yields m, n, k and microseconds, as printed."""
    last = ""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise InputError(f"the driver {command[0]} cannot be run: {error.strerror}") from None
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := _LINE.match(line):
                m, n, k, us = found.groups()
                yield (int(m), int(n), int(k)), float(us)
            else:
                last = line.strip() or last
    if process.returncode != 0:
        raise InputError(f"{' '.join(command)} failed: {last}")
