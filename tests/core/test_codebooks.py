"""Codebooks: their entries, quantization to them, and errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import dequantized
from scipy import special

from jaxlowbit import (
    DISABLED_EXPORT_CHECKS,
    FP8,
    NF4,
    Format,
    QuantizedArray,
    quantize,
    quantized_matmul,
    supported_backends,
)
from jaxlowbit._backends import call, registry
from jaxlowbit._core.format import format_name, parse_format

NAMES = {"nf4": 4, "fp4": 4, "e2m1": 4, "e4m3": 8, "e5m2": 8}
ODD = (0.5, -2.0, 0.5, 3.0)  # unsorted, one entry twice, none 0


FORMATS = [
    *(Format(bits, 32, codebook=name) for name, bits in NAMES.items()),
    Format(2, 16, codebook=ODD),
]


def numbers(format):
    return np.array(format.values, np.float32)


def test_nf4_are_quantiles():
    """Quantiles of a normal distribution, 8 per sign around an exact 0 (QLoRA, section 3)."""
    ends = 0.9677083
    above = special.ndtri(np.linspace(ends, 0.5, 9)[:-1])
    below = -special.ndtri(np.linspace(ends, 0.5, 8)[:-1])
    expected = np.sort(np.concatenate([above, np.zeros(1), below]))
    np.testing.assert_allclose(NF4.values, expected / expected.max(), atol=2e-7)


def test_fp4_are_a_sign_a_float_and_one_small_number():
    magnitudes = [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
    expected = [*magnitudes, *(-x for x in magnitudes)]
    np.testing.assert_allclose(Format(4, codebook="fp4").values, expected, rtol=1e-7)


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e5m2"])
def test_small_floats_match_ml_dtypes(name):
    dtype = {"e2m1": "float4_e2m1fn", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[name]
    bits = NAMES[name]
    expected = np.arange(2**bits, dtype=np.uint8).view(getattr(ml_dtypes, dtype))
    found = numbers(Format(bits, codebook=name))
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    finite = np.isfinite(found)
    np.testing.assert_array_equal(np.signbit(found[finite]), np.arange(2**bits)[finite] >> bits - 1)


@pytest.mark.parametrize("format", FORMATS, ids=format_name)
def test_every_code_represents_its_number(format):
    table = numbers(format)
    codes = np.flatnonzero(np.isfinite(table)).astype(np.uint8)
    values = np.tile(codes[:, None], (1, 3))
    groups = -(-len(codes) // format.group_size)
    scale = np.array([2.0, 1.0, 0.375], np.float32) * np.ones((groups, 1), np.float32)
    array = QuantizedArray.from_integers(values, scale, format=format)
    expected = table[codes][:, None] * scale[:1]
    np.testing.assert_array_equal(dequantized(array, jnp.float32), expected)
    identity = jnp.eye(len(codes), dtype=jnp.float32)
    np.testing.assert_array_equal(identity @ array, expected)


@pytest.mark.parametrize("quantizer", ["absmax", "mse"])
@pytest.mark.parametrize("format", FORMATS, ids=format_name)
def test_quantize_rounds_to_the_nearest_entry(format, quantizer):
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(96, 70)).astype(np.float32)
    array = quantize(weight, format, quantizer=quantizer)
    scale = np.repeat(np.asarray(unpacked(array)), format.group_size, axis=0)
    table = numbers(format)
    table = table[np.isfinite(table)]
    exact = weight.astype(np.float64) / scale
    best = np.abs(exact[..., None] - table).min(axis=-1)
    found = np.asarray(dequantized(array, jnp.float32)) / scale.astype(np.float64)
    assert (np.abs(found - exact) <= best + 2.0**-20 * (1 + np.abs(exact))).all()
    if quantizer == "absmax":  # no weight is beyond the codebook
        assert (exact <= table.max() * (1 + 1e-6)).all()
        assert (exact >= table.min() * (1 + 1e-6)).all()


def unpacked(array):
    """The scales (groups, n) of an array without padding along k."""
    n = np.arange(64)
    scale = np.asarray(array.scale)[..., n // 16 * 16 + n % 8 * 2 + n // 8 % 2]
    groups = -(-array.k // array.format.group_size)
    return np.moveaxis(scale, 0, 1).reshape(scale.shape[1], -1)[:groups, : array.n]


@pytest.mark.parametrize("format", FORMATS, ids=format_name)
def test_groups_without_extent(format):
    """Groups of zeros, of -0, and of one normal or tiny value."""
    weight = np.zeros((64, 4), np.float32)
    weight[:, 1], weight[:, 2], weight[:, 3] = -0.0, 0.75, 1e-30
    found = np.asarray(dequantized(quantize(weight, format), jnp.float32))
    np.testing.assert_array_equal(found[:, :2], 0)
    np.testing.assert_allclose(found[:, 2:], weight[:, 2:], rtol=1e-6)


def test_padding_is_the_number_nearest_to_zero():
    array = quantize(np.ones((40, 8), np.float32), Format(2, 16, codebook=ODD))
    again = QuantizedArray(**{**vars(array), "k": 64, "whole": None})
    padding = np.asarray(dequantized(again, jnp.float32))[40:]
    assert (np.abs(padding) <= 0.5).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_eight_bit_floats_are_unchanged(name):
    dtype = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[name]
    weight = jax.random.normal(jax.random.key(0), (70, 33)).astype(dtype)
    scale = jnp.full((1, 33), 0.5)
    array = QuantizedArray.from_integers(weight, scale, format=f"{name}-channel")
    expected = weight.astype(jnp.float32) * 0.5
    np.testing.assert_array_equal(dequantized(array, jnp.float32), expected)
    traced = jax.jit(lambda w: QuantizedArray.from_integers(w, scale, format=name))(weight)
    np.testing.assert_array_equal(traced.packed, array.packed)


def test_derivatives_match_the_floats():
    rng = np.random.default_rng(2)
    lhs = rng.normal(size=(3, 64)).astype(np.float32)
    array = quantize(rng.normal(size=(64, 64)).astype(np.float32), NF4)

    def product(lhs, scale):
        return jnp.sum(jnp.sin(lhs @ array._with(scale=scale)))

    def floats(lhs, scale):
        return jnp.sum(jnp.sin(jnp.dot(lhs, array._with(scale=scale).dequantize())))

    found = jax.grad(product, (0, 1))(jnp.asarray(lhs), array.scale)
    expected = jax.grad(floats, (0, 1))(jnp.asarray(lhs), array.scale)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("format", [NF4, Format(2, 16, codebook=ODD)], ids=format_name)
def test_exported_programs_keep_the_codebook(format):
    array = quantize(np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32), format)
    lhs = jnp.ones((2, 64))
    exported = jax.export.export(
        jax.jit(lambda x, q: x @ q), disabled_checks=DISABLED_EXPORT_CHECKS
    )(lhs, array)
    stored = exported.serialize()
    again = jax.export.deserialize(stored)
    np.testing.assert_array_equal(again.call(lhs, array), lhs @ array)
    assert again.in_tree == exported.in_tree
    assert b'"form": 2' in stored  # a library without codebooks raises


NAMED = [
    ("nf4", NF4),
    ("nf4-g128", Format(4, 128, codebook="nf4")),
    ("FP4-channel", Format(4, -1, codebook="fp4")),
    ("e2m1", Format(4, 32, codebook="e2m1")),
    ("e4m3", FP8),
    ("e5m2-g64", Format(8, 64, codebook="e5m2")),
]


@pytest.mark.parametrize(("name", "format"), NAMED)
def test_names(name, format):
    assert parse_format(name) == format
    assert parse_format(format_name(format)) == format


def test_numbers_may_be_an_array_or_a_list():
    numbers: Any = np.array(ODD)
    array = Format(2, codebook=numbers)
    assert array == Format(2, codebook=list(ODD)) == Format(2, codebook=ODD)
    assert hash(array) == hash(Format(2, codebook=ODD))
    assert format_name(array) == "codebook2-channel"


WRONG = [
    ({"bits": 4, "codebook": "nf3"}, ValueError, "codebook='nf3' is unknown; it is one of 'nf4'"),
    ({"bits": 8, "codebook": "nf4"}, ValueError, "whose values have 4 bits; use bits=4"),
    ({"bits": 4, "codebook": "nf4", "zero": "float"}, ValueError, "leave zero out"),
    ({"bits": 2, "codebook": (1.0, 2.0)}, ValueError, "has 2 numbers, but 2 bits represent 4"),
    ({"bits": 1, "codebook": (1.0, np.nan)}, ValueError, "number 1 of the codebook is nan"),
    ({"bits": 1, "codebook": (1e39, 1.0)}, ValueError, "number 0 of the codebook is 1e\\+39"),
    ({"bits": 1, "codebook": (0.0, -0.0)}, ValueError, "all numbers of the codebook are 0"),
    ({"bits": 1, "codebook": 3.0}, TypeError, "codebook is 3.0, but it must be a name"),
    ({"bits": 1, "codebook": ("a", "b")}, TypeError, "or a sequence of 2 numbers"),
]


@pytest.mark.parametrize(("fields", "error", "sentence"), WRONG)
def test_wrong_codebooks(fields, error, sentence):
    with pytest.raises(error, match=sentence):
        Format(**fields)


def test_values_that_are_not_numbers_raise():
    scale = jnp.ones((1, 1))
    nan = np.full((16, 1), 0x7F, np.uint8)
    with pytest.raises(
        ValueError, match=r"16 that represent NaN or infinity, the first at \(0, 0\)"
    ):
        QuantizedArray.from_integers(nan, scale, format=FP8)
    with pytest.raises(ValueError, match="represent NaN or infinity"):
        QuantizedArray.from_integers(
            jnp.full((1, 1), jnp.inf, jnp.float8_e5m2), scale, format="e5m2"
        )
    with pytest.raises(ValueError, match="codebook indices are unsigned"):
        QuantizedArray.from_integers(np.ones((16, 1), np.int8), scale, format="nf4-channel")
    with pytest.raises(ValueError, match="4 bits represent 0 to 15"):
        QuantizedArray.from_integers(np.full((16, 1), 16, np.uint8), scale, format="nf4-channel")


def test_kernels_of_integers_raise_for_codebooks():
    array = quantize(np.ones((64, 64), np.float32), NF4)
    reasons = supported_backends(jnp.ones((1, 64)), array)
    assert reasons["cpu"] is None and reasons["pallas"] == call.NO_CODEBOOK
    unsupported = functools.partial(registry.unsupported, "cuda", built=False)
    assert unsupported(jnp.dtype("bfloat16"), NF4) is None
    reason = (
        "with float32 lhs the kernels take integers with scales of 16 or 32 bits, and no float "
        "zero or transposed product"
    )
    assert unsupported(jnp.dtype("float32"), NF4) == reason
    wide = Format(bits=6, codebook=tuple(range(64)))
    reason = "the kernels look up numbers of codebooks of up to 5 bits, the format has 6"
    assert unsupported(jnp.dtype("bfloat16"), wide) == reason
    with pytest.raises(ValueError, match="its kernels read integers, the format has a codebook"):
        quantized_matmul(jnp.ones((1, 64)), array, backend="pallas")
    pytest.importorskip("qwix", reason="qwix is not installed")
    with pytest.raises(ValueError, match="to_qarray: the format has a codebook"):
        array.to_qarray()
