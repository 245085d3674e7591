"""Codebooks and 8-bit scales on a GPU: every code, and scales at both ends."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_problems import normal

from jaxlowbit import (
    FP8,
    MXFP4,
    MXFP8,
    NF4,
    NVFP4,
    Format,
    QuantizedArray,
    quantized_matmul,
)

pytestmark = pytest.mark.gpu
NUMBERS = tuple(np.random.default_rng(0).normal(size=32).tolist())
FORMATS = (
    NF4,
    Format(4, 32, codebook="fp4"),
    Format(4, 64, codebook="e2m1"),
    Format(4, -1, codebook="e2m1"),
    MXFP4,
    NVFP4,
    FP8,
    Format(8, -1, codebook="e5m2"),
    Format(8, 128, codebook="e5m2"),
    MXFP8,
    Format(8, 16, codebook="e5m2", scale="e4m3"),
    Format(8, 32, scale="e8m0"),
    Format(4, 16, scale="e4m3"),
    Format(1, 64, codebook=NUMBERS[:2]),
    Format(2, 64, codebook=NUMBERS[:4], scale="e8m0"),
    Format(3, -1, codebook=NUMBERS[:8]),
    Format(5, 16, codebook=NUMBERS),
    Format(4, 128, scale="int8"),
    Format(3, 32, scale="int8"),
    Format(2, 64, scale="int8"),
)
K, N = 256, 192


def array_of(format: Format, scales: np.ndarray, dtype: str) -> QuantizedArray:
    """Every finite code, with the given scales (groups, n)."""
    codes = np.arange(K)[:, None] + 7 * np.arange(N)
    codes = (codes % 2**format.bits).astype(np.uint8)
    if format.codebook is not None:
        codes[~np.isfinite(np.array(format.values)[codes])] = 0
    if format.codebook is None:
        codes = (codes.astype(np.int16) - format.offset).astype(np.int8)
    tensor = jnp.float32(0.5) if format.has_tensor_scale else None
    if format.scale == "int8":
        scales = np.ceil(scales * format.max_scale)
    scale = jnp.asarray(scales).astype(format.scale_dtype or dtype)
    return QuantizedArray.from_integers(codes, scale, tensor_scale=tensor, format=format)


def scales_of(format: Format, low: float, high: float) -> np.ndarray:
    groups = 1 if format.group_size == -1 else K // format.group_size
    return 2.0 ** np.random.default_rng(1).uniform(low, high, size=(groups, N))


def by(backend: Any, lhs: jax.Array, rhs: QuantizedArray) -> np.ndarray:
    out = jax.jit(functools.partial(quantized_matmul, backend=backend))(lhs, rhs)
    return np.asarray(out).astype(np.float64)


@pytest.mark.parametrize(
    ("format", "dtype"),
    [(x, "bfloat16") for x in FORMATS]
    + [(x, "float16") for x in FORMATS if not x.outgrows_float16],
    ids=str,
)
def test_every_number(format, dtype):
    """Products with an identity give the weights; some columns are NaN or infinite.

    Scales are at most 1: a code of e5m2 times a larger scale may overflow float16, while a kernel
    that applies the scales of channels to accumulators would not.
    """
    array = array_of(format, scales_of(format, -4, 0), dtype)
    if format.float_dtype is not None:
        array = array._with(
            packed=array.packed.at[..., 0].set(0xFFFFFFFF).at[..., 1].set(0x7C7C7C7C)
        )
    eye = jnp.eye(K, dtype=dtype)
    want = by("xla", eye, array)
    for rows in (slice(0, 1), slice(5, 13), slice(0, 48), slice(0, K)):
        found = by("cuda", eye[rows], array)
        np.testing.assert_array_equal(found, want[rows], err_msg=str(rows))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("format", [MXFP4, NVFP4, MXFP8, NF4, FP8, Format(4, 64, codebook="e2m1")])
def test_extreme_scales(format, dtype):
    """Scales at both ends of the range of weights, including 0 and NaN."""
    low, high = {"e8m0": (-14.0, 6.0), "e4m3": (-9.0, 8.0), None: (-14.0, 5.0)}[format.scale]
    scales = scales_of(format, low, high)
    scales[:, ::5], scales[:, 1::5] = 2.0**low, 2.0**high
    scales[:, 3::5] *= format.scale == "e8m0"  # e8m0 has no 0
    array = array_of(format, scales, dtype)
    numbers = np.array(array.scale)
    numbers[..., 7] = np.nan  # one channel in 64
    array = array._with(scale=jnp.asarray(numbers))
    magnitudes = np.abs(np.asarray(array.dequantize(jnp.float32)).astype(np.float64))
    for rows in (1, 9, 40, 200):
        lhs = normal(rows, K).astype(dtype)
        found, want = by("cuda", lhs, array), by("xla", lhs, array)
        nan = np.isnan(magnitudes).any(0)
        assert nan.sum() == N // 64 and np.isnan(found[:, nan]).all()
        bound = np.abs(np.asarray(lhs).astype(np.float64)) @ np.nan_to_num(magnitudes)
        unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
        kept = np.isfinite(want)
        assert kept[:, ::5][:, ~nan[::5]].all()
        assert (np.abs(found - want)[kept] <= (4 * unit * bound + 2.0**-22)[kept]).all()


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("format", [MXFP4, NVFP4, MXFP8], ids=str)
def test_scales_of_a_stage(format, large):
    """Every scale that one multiplication can apply; `large` adds larger ones to one channel.

    Hopper's tiles of 32 or more rows load the scales of a stage once. Strips of 64 channels and
    splits of k with large scales multiply twice.
    """
    k, n = 1024, 320
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 2**format.bits, (k, n), np.uint8)
    codes[~np.isfinite(np.array(format.values)[codes])] = 0
    most = {"e8m0": 132, "e4m3": 127}[format.scale]
    scales = rng.integers(0, most, (k // format.group_size, n), np.uint8)
    scales[:, 1], scales[:, 2] = 0, most - 1
    if large:
        scales[-3:, 130] = {"e8m0": 235, "e4m3": 126}[format.scale]
    scales = scales.view(np.dtype(format.scale_dtype))
    tensor = np.float32(0.5) if format.has_tensor_scale else None
    array = QuantizedArray.from_integers(
        codes, jnp.asarray(scales), tensor_scale=tensor, format=format
    )
    weights = np.array(format.values)[codes] * scales.astype(np.float64).repeat(
        format.group_size, axis=0
    )
    want = (weights * (1 if tensor is None else tensor)).astype(jnp.bfloat16)
    eye = jnp.eye(k, dtype=jnp.bfloat16)
    for rows in (24, 48, 64, 96, 128, 200, 256):
        some = np.append(rng.permutation(k)[: rows - 1], k - 1)
        found = by("cuda", eye[some], array)
        np.testing.assert_array_equal(found, want[some].astype(np.float64), err_msg=str(rows))


@pytest.mark.parametrize("format", [MXFP8, FP8, Format(4, 32, codebook="e2m1", scale="e8m0")])
def test_scales_beyond_float16(format):
    """In bfloat16 the largest and smallest scales neither overflow nor vanish."""
    for exponent in (-100, -20, 60, 110):
        scales = np.full_like(scales_of(format, 0, 1), 2.0**exponent)
        array = array_of(format, scales, "bfloat16")
        for rows in (1, 9, 40, 200):
            lhs = normal(rows, K)
            found, want = by("cuda", lhs, array), by("xla", lhs, array)
            kept = np.isfinite(want)
            assert kept.any()
            np.testing.assert_allclose(
                found[kept], want[kept], rtol=0.02, atol=2.0**exponent, err_msg=str(exponent)
            )
