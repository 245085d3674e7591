"""Lowering and the compiled library agree on the products that the CUDA kernels compute."""

import math
import random
from typing import Any

import jax
import jax.numpy as jnp
from helpers import weight_of

from jaxlowbit import Format, supported_backends
from jaxlowbit._backends import call
from jaxlowbit._backends.extension import ffi
from jaxlowbit._backends.problem import Operands, Problem
from jaxlowbit._backends.target import Target
from jaxlowbit._core.dtypes import FLOATS
from jaxlowbit._core.format import SCALES
from jaxlowbit._matmul import lowering, quantized_lhs

COUNT = 10_000
Shape: Any = jax.ShapeDtypeStruct
CAPABILITIES = (75, 80, 86, 90, 100)


def random_format(rng: random.Random) -> Format:
    pick: Any = rng.choice
    while True:
        bits = rng.randint(1, 8)
        table = tuple(range(1, 2**bits + 1))
        try:
            return Format(
                bits=bits,
                group_size=pick((-1, 16, 32, 48, 64, 128, 256)),
                zero=pick(("none", "none", "integer", "float")),
                codebook=pick((None, None, table, "nf4", "e2m1", "e4m3", "e5m2")),
                scale=pick((None, None, *SCALES)),
            )
        except ValueError:
            pass


def chosen(problem: Problem, operands: Operands, target: Target) -> str:
    """The name of the backend that a product is lowered to."""
    function: Any = lowering._product(problem, operands.present(), target)
    return function.func.__module__.rpartition(".")[2]


def test_lowering_agrees_with_the_library(cuda):
    rng = random.Random(0)
    formats = [random_format(rng) for _ in range(60)]
    sizes = [(rng.choice((64, 72, 512, 2**31)), rng.choice((8, 64, 320))) for _ in range(6)]
    reasons = set()
    for _ in range(COUNT):
        format, (k, n), lhs = rng.choice(formats), rng.choice(sizes), rng.choice(FLOATS)
        weight, m = weight_of(format, k, n), rng.choice((1, 16, 17, 300))
        transposed = rng.random() < 0.2
        capability = rng.choice(CAPABILITIES)
        rows = Shape((m, n if transposed else k), lhs)
        operands = Operands(rows, weight.packed, weight.scale, weight.zero, None, None)
        plain = (format, k if transposed else n, transposed, False, 0)
        problem = Problem(*plain, lhs, accumulate_float16=False, backend=None)
        backend = chosen(problem, operands, Target("cuda", frozenset({capability})))
        # The record of the call: XLA expands two-level scales unless a kernel reads them.
        read = format.expanded
        sums = lhs == jnp.float32
        dtypes = ("bfloat16", "float32") if sums else (str(lhs), str(lhs))
        fields = {"m": m, "k": k, "n": n, "transposed": transposed, "scale_accumulators": sums}
        reason = ffi.unsupported(call.record(read, *dtypes, **fields), capability)
        lost = (
            lhs == jnp.float16 and read.outgrows_float16
        )  # beyond the range of float16 in the call
        assert (backend == "cuda") == (reason == "" and not lost), (problem, rows, reason)
        reasons.add(reason)
        if not transposed and capability == 80:
            assert (supported_backends(rows, weight)["cuda"] is None) == (backend == "cuda")
    assert len(reasons) >= 5


def test_lowering_of_8_bit_products_agrees_with_the_library(cuda):
    rng = random.Random(1)
    formats = [random_format(rng) for _ in range(60)]
    hopper, found = Target("cuda", frozenset({90})), set()
    for _ in range(COUNT // 5):
        format, values = rng.choice(formats), rng.choice(("int8", "float8_e4m3fn"))
        most = ffi.MAX_K_OF_8_BITS
        weight = weight_of(format, rng.choice((64, 512, most, most + 1)), 64)
        rows = Shape((rng.choice((1, 31, 32, 191, 192)), weight.k), values)
        reason = quantized_lhs.slow_bytes(rows, weight, None, hopper)
        product = call.record(format, values, "bfloat16", k=math.ceil(weight.k / 16) * 16)
        supported = ffi.unsupported(product, 90, "qmm_sm90") == ""
        fast = supported and rows.shape[0] >= ffi.min_rows_for_8bit(product)
        assert (reason is None) == (fast and weight.k <= most), (format, rows, reason)
        found.add(reason is None)
    assert found == {False, True}
