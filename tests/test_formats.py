"""`Format`: a value, checked where it is made."""

import dataclasses

import pytest

from jaxlowbit import INT4, INT8, UINT4, UINT8, Format


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
