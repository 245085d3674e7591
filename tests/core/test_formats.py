"""`Format`: comparison by value, and checks at construction."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxlowbit import INT4, INT8, UINT4, UINT8, Format, quantize
from jaxlowbit._core.format import format_name, parse_format


def test_equal_formats_are_one_value():
    assert Format(4, 128) == INT4
    assert len({Format(4, 128), INT4, Format(bits=4, group_size=128, zero="none")}) == 1
    assert Format(4) != INT4


def test_presets():
    assert (INT4.bits, INT4.group_size, INT4.zero) == (4, 128, "none")
    assert UINT4.replace(zero="none") == INT4
    assert Format(8) == INT8
    assert Format(8, zero="integer") == UINT8


def test_replace_changes_and_checks():
    assert INT4.replace(group_size=64) == Format(4, 64)
    with pytest.raises(ValueError, match="group_size=20"):
        INT4.replace(group_size=20)


def test_format_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        INT4.bits = 8  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("bits", range(1, 9))
def test_offset_is_the_code_of_zero(bits):
    assert Format(bits).offset == 2 ** (bits - 1)


@pytest.mark.parametrize("group_size", [-1, 16, 48, 4096])
def test_group_sizes(group_size):
    assert Format(4, group_size).group_size == group_size


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("int4", INT4),
        ("INT8", INT8),
        ("uint4", UINT4),
        ("uint8", UINT8),
        ("int3", Format(3, 128)),
        ("int4-channel", Format(4)),
        ("int4-g64", Format(4, 64)),
        ("int4-g128-integer", UINT4),
        ("int2-g32-float", Format(2, 32, "float")),
    ],
)
def test_formats_have_names(name, format):
    assert parse_format(name) == format
    assert parse_format(format_name(format)) == format
    weight = jnp.ones((128, 64))
    assert quantize(weight, name).format == format


@pytest.mark.parametrize("name", ["", "4", "int", "int4g128", "uint4-integer", "fp8", "nf5"])
def test_other_words_are_not_names(name):
    with pytest.raises(ValueError, match=f"^quantize: '{name}' names no format; write"):
        quantize(jnp.ones((128, 64)), name)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_few_bits_are_clipped_by_default(bits):
    weight = jax.random.normal(jax.random.key(0), (256, 64))
    format = Format(bits, 64)
    quantizer = "mse" if bits < 4 else "absmax"
    chosen, default = quantize(weight, format, quantizer=quantizer), quantize(weight, format)
    assert jnp.array_equal(default.packed, chosen.packed)
    assert jnp.array_equal(default.scale, chosen.scale)
