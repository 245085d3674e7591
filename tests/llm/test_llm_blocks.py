"""GGUF blocks: unpacked and packed weights equal ggml's dequantized weights exactly."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_files import TYPES, random_blocks

import jaxlowbit
from jaxlowbit import INT4, NVFP4, QuantizedArray, quantize
from jaxlowbit._llm import ggml_grids, ggml_types
from jaxlowbit.checkpoint import _packing as packing

gguf = pytest.importorskip("gguf", reason="gguf is not installed")


def expected(name, rows):
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])


def without_signs(found):
    """Replaces -0 by 0: e2m1 has -0, which ggml reads as 0."""
    return np.asarray(found) + np.float32(0)


def same_bits(found, expected):
    found = np.ascontiguousarray(found)
    assert found.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", TYPES)
def test_sizes_match_ggml(name):
    kind = ggml_types.TYPES[name]
    assert (kind.size, kind.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("seed", range(3))
def test_floats_match_ggml(name, seed):
    rows = random_blocks(name, 40, 512, seed)
    same_bits(without_signs(ggml_types.floats(name, rows)), without_signs(expected(name, rows)))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("blocks_of_row", [1, 3])
def test_packed_weights_match_ggml(name, blocks_of_row):
    """70 channels leave a partial atom, and so do some numbers of rows with blocks of 32."""
    rows = random_blocks(name, 70, blocks_of_row * ggml_types.TYPES[name].size)
    array = ggml_types.pack(name, rows)
    kind = ggml_types.TYPES[name]
    assert array.format == kind.format and array.scale.dtype == kind.scale_dtype
    found = np.asarray(array.dequantize(jnp.float32)).T
    same_bits(without_signs(found), without_signs(expected(name, rows)))


@pytest.mark.parametrize("name", ggml_grids.GRIDS)
def test_types_of_grids_match_ggml(name):
    """IQ1 to IQ3: all of their numbers are in the codebook, so that nothing is rounded."""
    kind, rows = ggml_types.TYPES[name], random_blocks(name, 70, 512)
    assert (kind.size, kind.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    weight = expected(name, rows)
    same_bits(ggml_types.floats(name, rows), weight)
    array = ggml_types.pack(name, rows)
    assert array.format == kind.format and array.format.scale == "two_level"
    same_bits(np.asarray(array.dequantize(jnp.float32)).T, weight)
    used = np.unique(ggml_types.unpack(name, rows).qvalue)
    assert set(used) == {i for i, x in enumerate(kind.format.values) if x}


@pytest.mark.parametrize(("name", "bits", "numbers"), [("Q1_0", 1, (-1, 1)), ("Q2_0", 2, (-1, 2))])
def test_types_that_the_package_cannot_dequantize(name, bits, numbers):
    """By llama.cpp's `dequantize_row_q1_0` and `dequantize_row_q2_0`, bit by bit."""
    kind, rows = ggml_types.TYPES[name], random_blocks(name, 3, 256)
    blocks = rows.reshape(-1, kind.nbytes)
    d = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    digits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").reshape(len(blocks), -1, bits)
    values = np.linspace(numbers[0], numbers[1], 2**bits, dtype=np.float32)[
        digits @ (1 << np.arange(bits))
    ]
    same_bits(ggml_types.floats(name, rows) + 0, (values * d).reshape(3, 256) + 0)
    array = ggml_types.pack(name, rows)
    same_bits(np.asarray(array.dequantize(jnp.float32)).T + 0, (values * d).reshape(3, 256) + 0)


@pytest.mark.parametrize("name", TYPES)
def test_packing_matches_from_integers(name):
    rows = random_blocks(name, 64, 256)
    qvalue, scale, zero, *floats = ggml_types.unpack(name, rows)
    format = ggml_types.TYPES[name].format
    if zero is not None:
        zero = zero.T
    elif format.codebook is None:
        qvalue = (qvalue.astype(np.int16) - format.offset).astype(np.int8)
    unit = 1.0 if name == "NVFP4" else None
    pair: Any = tuple(x.T for x in floats if x is not None)
    array = QuantizedArray.from_integers(
        qvalue.T,
        scale.T,
        zero,
        format=format,
        tensor_scale=unit,
        super_scale=(pair if len(pair) > 1 else pair[0]) if pair else None,
    )
    packed = ggml_types.pack(name, rows)
    np.testing.assert_array_equal(packed.packed, array.packed)
    np.testing.assert_array_equal(packed.scale, array.scale)
    if zero is not None:
        np.testing.assert_array_equal(packed.zero, array.zero)
    assert packed.shape == array.shape


@pytest.mark.parametrize("count", [320, 330])
def test_strips_join_to_the_whole(count, monkeypatch):
    rows = random_blocks("Q4_1", count, 256)
    whole = ggml_types.pack("Q4_1", rows)
    monkeypatch.setattr(packing, "_STRIP", 128 * 256)
    bounds = list(packing.strips(count, 256))
    assert len(bounds) > 2 and bounds[-1][1] == count
    assert all(start % 64 == 0 and stop > start for start, stop in bounds)
    parts = ggml_types.pack("Q4_1", rows)
    for name in ("packed", "scale", "zero"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    weight = ggml_types.floats("Q4_1", rows)
    quantized = packing.quantize_rows(lambda i, j: weight[i:j], weight.shape, INT4, jnp.bfloat16)
    alone = quantize(weight.T, INT4, scale_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(quantized.packed, alone.packed)
    np.testing.assert_array_equal(quantized.scale, alone.scale)
    floats = packing.transposed_rows(lambda i, j: weight[i:j], weight.shape, jnp.float16)
    np.testing.assert_array_equal(floats, weight.T.astype(np.float16))


def test_a_tensor_scale_multiplies_all_weights(monkeypatch):
    rows = random_blocks("NVFP4", 130, 128)
    unit = np.float32(0.3)
    monkeypatch.setattr(packing, "_STRIP", 64 * 128)
    array = ggml_types.pack("NVFP4", rows, None, 0.3)
    weight = ggml_types.floats("NVFP4", rows, 0.3)
    same_bits(np.asarray(array.dequantize(jnp.float32)).T, weight)
    same_bits(without_signs(weight), without_signs(expected("NVFP4", rows) * unit))
    wide = ggml_types.pack("NVFP4", rows, jnp.float32, 0.3)
    assert wide.format == NVFP4.replace(scale=None) and wide.scale.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(wide.dequantize()).T, weight, rtol=1e-6)
    # All strips share one tensor scale.
    found = packing.quantize_rows(lambda i, j: weight[i:j], weight.shape, NVFP4, jnp.bfloat16)
    alone = quantize(weight.T, NVFP4)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(own, other)


def test_scales_round_to_a_given_dtype():
    rows = random_blocks("Q4_K", 64, 256)
    array = ggml_types.pack("Q4_K", rows, jnp.bfloat16)
    exact = ggml_types.unpack("Q4_K", rows).expanded()
    assert array.zero is not None and exact.zero is not None
    assert array.scale.dtype == array.zero.dtype == jnp.bfloat16
    rounded = exact.scale.astype(jnp.bfloat16).astype(np.float32)
    weight = exact.qvalue.reshape(64, -1, 32) * rounded[..., None]
    weight += exact.zero.astype(jnp.bfloat16).astype(np.float32)[..., None]
    same_bits(np.asarray(array.dequantize(jnp.float32)).T, weight.reshape(64, -1))


SIZES = {"Q2_K": 3.125, "Q3_K": 3.5625, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625}
SIZES |= {"IQ4_XS": 4.3125}


@pytest.mark.parametrize("name", SIZES)
def test_bits_of_a_weight_in_two_levels(name):
    """Memory is as stated in docs/llm_files.md; with float32 scales the weights are the same."""
    rows = random_blocks(name, 64, 512)
    array, wide = ggml_types.pack(name, rows), ggml_types.pack(name, rows, jnp.float32)
    assert (array.nbytes - 4) * 8 / (64 * 512) == SIZES[name]
    assert wide.format == array.format.expanded and wide.scale.dtype == jnp.float32
    weight = np.asarray(array.dequantize(jnp.float32))
    same_bits(weight, np.asarray(wide.dequantize(jnp.float32)))


def test_scales_beyond_a_dtype_raise():
    rows = random_blocks("Q4_K", 1, 256)
    rows[:, :2] = np.frombuffer(np.float16(60000).tobytes(), np.uint8)
    with pytest.raises(
        ValueError, match=r"beyond the range of float16; use scale_dtype=jnp.float32"
    ):
        ggml_types.pack("Q4_K", rows, jnp.float16)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_scales_that_are_not_finite_raise(name, wrong):
    rows = random_blocks(name, 3, 512)
    nbytes = ggml_types.TYPES[name].nbytes
    if name in ("MXFP4", "NVFP4"):
        rows[2, nbytes] = 255  # in the second block
    else:
        start = nbytes + TYPES[name][0]
        rows[2, start : start + 2] = np.frombuffer(np.float16(wrong).tobytes(), np.uint8)
    with pytest.raises(ValueError, match=r"the scale of block 1 in row 2 is .*the file is damaged"):
        ggml_types.unpack(name, rows)


def test_products_of_packed_blocks():
    rows = random_blocks("Q6_K", 96, 256, seed=1)
    lhs = np.linspace(-1, 1, 3 * 256, dtype=np.float32).reshape(3, 256)
    exact = lhs.astype(np.float64) @ expected("Q6_K", rows).T.astype(np.float64)
    found = jaxlowbit.quantized_matmul(jnp.asarray(lhs), ggml_types.pack("Q6_K", rows))
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())
