"""Packed layout, version 1: compared with golden words in this file."""

import functools
import hashlib

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

import jaxlowbit
from jaxlowbit import Format, QuantizedArray
from jaxlowbit._core import layout

WIDTHS = range(1, 9)
pack = jax.jit(layout.pack, static_argnums=1)
unpack = jax.jit(layout.unpack, static_argnums=1)


def pattern(bits: int) -> np.ndarray:
    """Fixed codes (100, 70); every bit takes both values."""
    values = np.arange(7000, dtype=np.uint64) * 2654435761 % 2**32 >> 11
    return (values % 2**bits).astype(np.uint8).reshape(100, 70)


# The first words of the packed pattern, and a prefix of the SHA-256 of all words.
GOLDEN = {
    1: (("d0f40f42", "43d03d0f", "0f43f43d", "3d0fd0f4"), "42af82e4ec71c541"),
    2: (("7d383824", "d382827d", "d382827d", "382727d3"), "edc3b3804dc7cc3b"),
    3: (("4fe40e90", "e40e9339", "e40e9339", "0e93394f"), "aea2091eb8fb5d74"),
    4: (("8f280690", "5bf5c36c", "28c29f39", "f58f6c06"), "bcd6d8bd3f654df4"),
    5: (("82f80960", "5fb5c63c", "2c8293f9", "f85f60c6"), "2d2bf7c3dd25f03b"),
    6: (("82f80960", "5fb5c63c", "2c8293f9", "f85f60c6"), "b979cfe0d385dae3"),
    7: (("82f80960", "5fb5c63c", "2c8293f9", "f85f60c6"), "a84153b3f4f4cc66"),
    8: (("e2687900", "28afc046", "6ff5068c", "b53b4cd3"), "fb65615ec5c6f96a"),
}


@pytest.mark.parametrize("bits", WIDTHS)
def test_golden_words(bits):
    packed = np.asarray(pack(pattern(bits), bits))
    assert packed.shape == (2, 2, 128 * bits) and packed.dtype == np.uint32
    digest = hashlib.sha256(packed.astype("<u4").tobytes()).hexdigest()
    first = tuple(f"{word:08x}" for word in packed[0, 0, :4])
    assert (first, digest[:16]) == GOLDEN[bits]


# Codes in the first word of lane 0 of warp 0, lowest bits first, as (k, n) in the atom.
FIRST_WORD = {
    8: [(0, 0), (0, 8), (1, 0), (1, 8)],
    4: [(0, 0), (0, 8), (8, 0), (8, 8), (1, 0), (1, 8), (9, 0), (9, 8)],
}


@pytest.mark.parametrize(("bits", "word"), [(8, 0x03020100), (4, 0x76543210)])
def test_first_word_as_drawn(bits, word):
    codes = np.zeros((64, 64), np.uint8)
    for code, position in enumerate(FIRST_WORD[bits]):
        codes[position] = code
    packed = np.asarray(pack(codes, bits))
    assert packed[0, 0, 0] == word
    assert not packed[0, 0, 1:].any()


def test_atoms_follow_k_then_n():
    codes = np.zeros((128, 192), np.uint8)
    codes[64, 128] = 9
    packed = np.asarray(pack(codes, 4))
    assert packed.shape == (3, 2, 512)
    assert np.argwhere(packed).tolist() == [[2, 1, 0]]
    assert packed[2, 1, 0] == 9


@pytest.mark.parametrize(
    ("bits", "planes"), [(3, (2, 1)), (5, (4, 1)), (6, (4, 2)), (7, (4, 2, 1))]
)
def test_planes_start_with_the_low_bits(bits, planes):
    start = shift = 0
    for plane in planes:
        codes = np.full((64, 64), (2**plane - 1) << shift, np.uint8)
        packed = np.asarray(pack(codes, bits))[0, 0]
        inside = np.zeros(packed.size, bool)
        inside[start : start + 128 * plane] = True
        assert (packed[inside] == 0xFFFFFFFF).all() and not packed[~inside].any()
        start, shift = start + 128 * plane, shift + plane


@pytest.mark.parametrize("bits", WIDTHS)
def test_packing_agrees_with_numpy(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (2, 128, 128), np.uint8)
    packed = np.asarray(pack(codes, bits))
    np.testing.assert_array_equal(packed, helpers.pack(codes, bits))
    np.testing.assert_array_equal(helpers.unpack(packed, bits), codes)
    np.testing.assert_array_equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_packing_is_a_permutation_of_bits(bits):
    """Each packed bit corresponds to exactly one bit of one code."""
    ones = functools.reduce(
        np.bitwise_xor,
        (helpers.pack(np.full((64, 64), 1 << bit), bits) for bit in range(bits)),
    )
    assert (ones == 0xFFFFFFFF).all()
    code = np.zeros((64, 64), np.uint8)
    code[37, 21] = 1 << (bits - 1)
    assert sum(int(word).bit_count() for word in np.asarray(pack(code, bits)).flat) == 1


@given(st.sampled_from(WIDTHS), st.sampled_from([(1, 1), (64, 64), (65, 130)]), st.data())
@settings(max_examples=60)
def test_unpack_is_the_inverse_of_pack(bits, shape, data):
    seed = data.draw(st.integers(0, 2**32 - 1))
    codes = np.random.default_rng(seed).integers(0, 2**bits, shape, np.uint8)
    whole = np.asarray(unpack(pack(codes, bits), bits))
    k, n = shape
    np.testing.assert_array_equal(whole[:k, :n], codes)
    assert not whole[k:].any() and not whole[:, n:].any()


@pytest.mark.parametrize(
    ("group_size", "zero", "shards"), pairwise([-1, 48, 192], ["none", "integer", "float"], [1, 3])
)
def test_padding_of_k_represents_the_value_nearest_to_0(group_size, zero, shards):
    """Kernels multiply the padding by zeros; an infinite weight there would give NaN."""
    rng, format = np.random.default_rng(0), Format(4, group_size, zero)
    weight = jnp.asarray(rng.normal(size=(99, 70)) + 3 * (zero == "float"), jnp.float32)
    groups = 1 if group_size == -1 else -(-99 // shards // group_size) * shards
    zeros = rng.integers(3, 9, (groups, 70))
    integers = QuantizedArray.from_integers(
        rng.integers(-8, 8, (99, 70))
        if zero == "none"
        else rng.integers(0, 16, (99, 70), np.uint8),
        rng.uniform(0.5, 1.5, (groups, 70)).astype(np.float32),
        {"none": None, "integer": zeros.astype(np.uint8), "float": -zeros.astype(np.float32)}[zero],
        format=format,
        shards=(shards, 1),
    )
    for array in (jaxlowbit.quantize(weight, format, shards=(shards, 1)), integers):
        rows = 64 * array.packed.shape[-2]
        padding = np.arange(rows) % (rows // shards) >= 99 // shards
        assert padding.sum() == rows - 99

        def per_row(values, rows=rows):
            values = helpers.unpack_groups(np.asarray(values, np.float32))
            return np.repeat(values, rows if group_size == -1 else group_size, axis=0)[:rows]

        def weights(codes, array=array, per_row=per_row):
            if array.zero is None:
                return (codes - 8) * per_row(array.scale)
            if zero == "integer":
                return (codes - per_row(array.zero)) * per_row(array.scale)
            return codes * per_row(array.scale) + per_row(array.zero)

        found = weights(helpers.unpack(np.asarray(array.packed), 4).astype(np.float32))
        nearest = np.min([np.abs(weights(np.float32(code))) for code in range(16)], axis=0)
        nearest, found = (x[padding, :70] for x in (nearest, found))
        np.testing.assert_allclose(np.abs(found), nearest, atol=1e-5)
        assert zero == "float" or not found.any()


def test_scales_of_rows_8_apart_are_neighbours():
    values = np.arange(2 * 130, dtype=np.float32).reshape(2, 130)
    packed = np.asarray(layout.pack_groups(jnp.asarray(values)))
    assert packed.shape == (3, 2, 64)
    assert packed[0, 0, :6].tolist() == [0, 8, 1, 9, 2, 10]
    assert packed[0, 1, 16:20].tolist() == [130 + 16, 130 + 24, 130 + 17, 130 + 25]
    assert packed[2, 0, :4].tolist() == [128, 0, 129, 0]
    np.testing.assert_array_equal(helpers.unpack_groups(packed)[:, :130], values)
    np.testing.assert_array_equal(layout.unpack_groups(jnp.asarray(packed))[:, :130], values)


@pytest.mark.parametrize(
    ("k", "group_size", "groups"),
    [(1, -1, 1), (1000, -1, 1), (1, 16, 4), (64, 64, 1), (65, 64, 2), (100, 48, 3), (65, 256, 1)],
)
def test_every_padded_row_has_a_scale(k, group_size, groups):
    array = jax.eval_shape(
        lambda: QuantizedArray.from_packed_groups(
            jnp.zeros((k, 70), jnp.uint8), jnp.ones((1, 70)), None, format=Format(4, group_size)
        )
    )
    assert array.scale.shape == (2, groups, 64)
    assert array.packed.shape == (2, -(-k // 64), 512)
