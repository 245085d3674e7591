"""CPU kernels against float64, around the values of M that change their code path."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    PLATFORM,
    Oracle,
    assert_within,
    dequantize,
    from_codes,
    matmul,
    pack,
    unpack,
    unpack_groups,
)
from problems import Problem, operands, weights

from jaxlowbit import Format, QuantizedArray, quantize, quantized_matmul
from jaxlowbit._core.format import parse_format

pytestmark = pytest.mark.skipif(PLATFORM != "cpu", reason="the kernels of the CPU")

ROWS = (1, 2, 3, 4, 15, 16, 17, 32, 33, 48, 70)  # one, two, odd and even numbers of tiles
ZEROS = ("none", "integer", "float")


@jax.jit
def products(inputs: list[jax.Array], rhs: QuantizedArray) -> list[jax.Array]:
    """Multiplies all inputs in one program, to compile only once."""
    return [quantized_matmul(lhs, rhs, backend="cpu") for lhs in inputs]


# 16 rows; two groups per block of 64; boundaries inside some blocks; one per block; one in all.
@pytest.mark.parametrize("group_size", [16, 32, 48, 96, 64, -1])
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_way_is_within_its_error_bound(bits, group_size):
    name, zero = f"{bits} bits, group {group_size}", ZEROS[bits % 3]
    problem = Problem(name, max(ROWS), 201, 70, bits, group_size, zero, scale_dtype="float32")
    lhs, rhs, oracle = operands(problem)
    bound = oracle.bound(lhs.dtype)
    for m, got in zip(ROWS, products([lhs[:m] for m in ROWS], rhs), strict=True):
        assert_within(got, oracle.exact[:m], bound[:m])


def mostly_cancelled(rhs: QuantizedArray, rng: np.random.Generator) -> QuantizedArray:
    """Changes codes and zeros so that nine of ten weights are 0, up to rounding."""
    bits, size = rhs.format.bits, rhs.format.group_size
    scale, codes = np.asarray(rhs.scale), unpack(np.asarray(rhs.packed), rhs.format.bits)
    cancelled = rng.integers(0, 2**bits, scale.shape)
    of_rows = np.repeat(unpack_groups(cancelled), len(codes) if size < 0 else size, axis=-2)
    codes = np.where(rng.random(codes.shape) < 0.9, of_rows[: len(codes)], codes)
    zero = -(scale * cancelled.astype(scale.dtype))
    return dataclasses.replace(rhs, packed=jnp.asarray(pack(codes, bits)), zero=jnp.asarray(zero))


@jax.jit
def separate_products(pairs: list[tuple[jax.Array, QuantizedArray]]) -> list[jax.Array]:
    return [quantized_matmul(lhs, rhs, backend="cpu") for lhs, rhs in pairs]


# For one row, bits look up sums of activations; scales and zeros are applied afterwards.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("zero", ["none", "float", "cancels", "codebook"])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_sums_that_bits_look_up_are_within_their_bound(bits, zero, dtype):
    rng = np.random.default_rng(bits)
    kind = "none" if zero in ("none", "codebook") else "float"
    numbers = tuple(rng.standard_normal(2**bits).tolist()) if zero == "codebook" else None
    pairs = []
    for k, size in ((1, -1), (70, 32), (201, 48), (384, 128), (1000, -1), (256, 16), (300, 96)):
        problem = Problem(*("", 1, k, 70, bits, size, kind, numbers), dtype=dtype)
        rhs = weights(problem, rng)
        if zero == "cancels":
            rhs = mostly_cancelled(rhs, rng)
        lhs = np.abs(rng.standard_normal((1, k))) * 2.0 ** rng.integers(-9, 9, k)
        pairs.append((lhs.astype(jnp.dtype(dtype)), rhs))
    for (lhs, rhs), got in zip(pairs, separate_products(pairs), strict=True):
        oracle = Oracle.of(lhs, dequantize(rhs))
        assert_within(got, oracle.exact, oracle.bound(lhs.dtype))


@pytest.mark.parametrize(("bits", "zero"), [(1, "float"), (2, "none"), (3, "none")])
def test_sums_of_weights_that_are_zero(bits, zero):
    codes = "least" if zero == "float" else "zero"
    rhs = weights(Problem("", 1, 300, 70, bits, 128, zero, codes=codes), np.random.default_rng(0))
    if zero == "float":
        rhs = dataclasses.replace(rhs, zero=jnp.zeros_like(rhs.scale))
    lhs = np.random.default_rng(1).standard_normal((1, 300), np.float32)
    assert not np.asarray(quantized_matmul(jnp.asarray(lhs), rhs, backend="cpu")).any()


def assert_every_way_is_within_its_bound(rhs: QuantizedArray) -> None:
    rows = (1, 5, 17, 40)
    rng = np.random.default_rng(1)
    lhs = jnp.asarray(rng.standard_normal((max(rows), rhs.k)), jnp.bfloat16)
    oracle = Oracle.of(lhs, dequantize(rhs))
    bound = oracle.bound(lhs.dtype)
    for m, got in zip(rows, products([lhs[:m] for m in rows], rhs), strict=True):
        assert_within(got, oracle.exact[:m], bound[:m])


# Tables of one register, two and more; exact and inexact in bfloat16.
@pytest.mark.parametrize("group_size", [48, -1])
@pytest.mark.parametrize("codebook", [2, 4, 5, 6, 7, 8, "e2m1", "e4m3", "e5m2"])
def test_every_way_of_a_codebook_is_within_its_error_bound(codebook, group_size):
    rng = np.random.default_rng(0)
    if isinstance(codebook, int):
        numbers = tuple(rng.standard_normal(2**codebook).tolist())
        format = Format(codebook, group_size, codebook=numbers)
    else:
        format = parse_format(codebook).replace(group_size=group_size)
    codes = np.flatnonzero(np.isfinite(format.values)).astype(np.uint8)
    scale = rng.uniform(0.5, 1, (-(-201 // group_size) if group_size > 0 else 1, 70))
    values = codes[rng.integers(0, len(codes), (201, 70))]
    assert_every_way_is_within_its_bound(from_codes(values, scale.astype(np.float16), None, format))


# Power-of-two and 8-bit float scales with register lookups, byte lookups and integers.
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "nvfp4", "int3-g48-e4m3", "int8-channel-e8m0"])
def test_every_way_of_8_bit_scales_is_within_its_error_bound(name):
    weight = np.random.default_rng(0).standard_normal((201, 70), dtype=np.float32)
    assert_every_way_is_within_its_bound(quantize(jnp.asarray(weight), parse_format(name)))


@pytest.mark.parametrize("group_size", [48, 128])
def test_tasks_of_several_strips_in_blocks_of_rows(group_size):
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.standard_normal((1000, 2250), dtype=np.float32))
    rhs = quantize(weight, Format(4, group_size))
    lhs = jnp.asarray(rng.standard_normal((300, 1000)), jnp.bfloat16)
    oracle = Oracle.of(lhs, dequantize(rhs))
    got = np.asarray(matmul(lhs, rhs, backend="cpu"))
    assert_within(got, oracle.exact, oracle.bound(lhs.dtype))


@pytest.mark.parametrize("m", ROWS)
def test_nonfinite_values_stay_in_their_row(m):
    """NaN and infinity do not affect other rows of the tile, or its padding."""
    rng = np.random.default_rng(0)
    rhs = quantize(jnp.asarray(rng.standard_normal((100, 70), dtype=np.float32)), Format(4, 48))
    lhs = rng.standard_normal((m, 100)).astype(jnp.bfloat16)
    oracle = Oracle.of(lhs, dequantize(rhs))
    lhs[m // 2, 99] = np.nan
    got = np.asarray(matmul(jnp.asarray(lhs), rhs, backend="cpu"))
    others = np.arange(m) != m // 2
    assert np.isnan(got[m // 2].astype(np.float32)).all()
    assert_within(got[others], oracle.exact[others], oracle.bound(lhs.dtype)[others])
