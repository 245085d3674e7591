"""Rounding to a format, and `QuantizedArray` as an array and as a pytree."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import backends, dequantize, dequantized, matmul, positions, unpack, unpack_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

import jaxlowbit
from jaxlowbit import INT4, INT8, UINT4, Format, QuantizedArray
from jaxlowbit._core.columns import take_columns

quantize = jax.jit(jaxlowbit.quantize, static_argnames=("format", "quantizer", "scale_dtype"))
FORMATS = [
    Format(bits, zero=zero)
    for bits in range(1, 9)
    for zero in ("none", "integer", "float")
    if (bits, zero) != (1, "none")
]
DTYPES = ["float32", "bfloat16", "float16"]
# (group size, dtype), assigned to formats in turn such that each kind of zero meets all of them:
# grouping does not depend on the width. The tests of all formats share these programs.
WAYS = [(16, "float32"), (48, "bfloat16"), (128, "float16"), (-1, "float32")]
ZEROS: list[Any] = ["none", "integer", "float"]
CASES = [
    (format.replace(group_size=group_size), dtype)
    for format in FORMATS
    for group_size, dtype in [WAYS[(format.bits + ZEROS.index(format.zero)) % 4]]
]
every_case = pytest.mark.parametrize(
    ("format", "dtype"), CASES, ids=lambda x: f"{x.bits}-{x.zero}" if isinstance(x, Format) else x
)


def normal(shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype)))


def scales(array: QuantizedArray) -> np.ndarray:
    """The scale of each element, in float64."""
    values = unpack_groups(np.asarray(array.scale).astype(np.float64))
    size = array.k if array.format.group_size == -1 else array.format.group_size
    return np.repeat(values, size, axis=-2)[..., : array.k, : array.n]


def codes(array: QuantizedArray) -> np.ndarray:
    return unpack(np.asarray(array.packed), array.format.bits)[..., : array.k, : array.n]


def assert_round_trip(weight, array):
    """Each element is off by at most half a scale, up to float32 rounding."""
    weight = np.asarray(weight).astype(np.float64)
    error = np.abs(weight - dequantize(array).value) / scales(array)
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error[worst] <= 0.5 + 1e-4, (
        f"{error[worst]} scales off at {worst}: {dequantize(array).value[worst]} for "
        f"{weight[worst]}"
    )


# --- rounding -------------------------------------------------------------------------------------


@every_case
def test_round_trip_is_within_half_a_scale(format, dtype):
    weight = normal((100, 70), dtype)
    array = quantize(weight, format, quantizer="absmax")
    assert array.shape == weight.shape and array.dtype == weight.dtype
    assert_round_trip(weight, array)


@pytest.mark.parametrize(
    ("dtype", "scale_dtype", "zero"),  # a pairwise cover
    [(x, y, ZEROS[(i + j) % 3]) for i, x in enumerate(DTYPES) for j, y in enumerate(DTYPES)],
)
def test_round_trip_with_other_scales(dtype, scale_dtype, zero):
    weight = normal((100, 70), dtype)
    format, dtype = Format(8, 32, zero), jnp.dtype(scale_dtype)
    array = quantize(weight, format, quantizer="absmax", scale_dtype=dtype)
    assert array.scale.dtype == scale_dtype
    assert_round_trip(weight, array)


@given(
    st.sampled_from([format for format, dtype in CASES if dtype != "float16"]),
    st.integers(0, 2**32 - 1),
    st.floats(-30, 30),
    st.floats(-100, 100),
)
@settings(max_examples=60)
def test_round_trip_of_any_magnitude(format, seed, exponent, offset):
    rng = np.random.default_rng(seed)
    weight = (2.0**exponent * (rng.standard_cauchy((100, 70)) + offset)).astype(np.float32)
    array = quantize(weight, format, quantizer="absmax")
    assert_round_trip(weight, array)


@every_case
def test_zeros_stay_zero(format, dtype):
    weight = np.array(normal((100, 70), dtype))
    weight[::3], weight[:, 5] = 0, 0
    value = dequantize(quantize(weight, format, quantizer="absmax")).value
    if format.zero == "float":  # only if the whole group is zero
        assert not value[:, 5].any()
    else:
        assert not value[::3].any() and not value[:, 5].any()


@every_case
def test_groups_of_one_value(format, dtype):
    """Groups of a constant, of its negative, of zeros and of -0."""
    weight = np.full((100, 70), 0.75, jnp.dtype(dtype))
    weight[:, 1], weight[:, 2], weight[:, 3] = -0.75, 0.0, -0.0
    array = quantize(jnp.asarray(weight), format, quantizer="absmax")
    assert_round_trip(weight, array)
    value = dequantize(array).value
    assert not value[:, 2:4].any() and (scales(array)[:, 2:4] == 1).all()
    if format.zero == "float":
        np.testing.assert_array_equal(value, weight.astype(np.float64))


@every_case
def test_extremes_map_to_the_end_codes(format, dtype):
    symmetric = format.zero == "none"
    low, high = (-5.0, 5.0) if symmetric else (-4.0, 5.0)
    # A scale in bfloat16 may be too large by more than half of 1/255.
    weight = np.array(normal((100, 70), "float32" if dtype == "bfloat16" else dtype))
    weight[0], weight[1] = low, high
    found = codes(quantize(weight, format, quantizer="absmax"))
    assert (found[0] == int(symmetric)).all() and (found[1] == 2**format.bits - 1).all()


@pytest.mark.parametrize("format", [f for f, _ in CASES if f.zero == "integer"], ids=str)
def test_integer_zeros_at_both_ends(format):
    """Weights of one sign put the zero point at the first or last code."""
    dtype = dict(CASES)[format]
    dtype = "float32" if dtype == "bfloat16" else dtype  # as above
    weight = np.abs(np.array(normal((100, 70), dtype))) + np.asarray(0.5, jnp.dtype(dtype))
    weight[:, ::2] *= -1
    array = quantize(jnp.asarray(weight), format, quantizer="absmax")
    zero = unpack_groups(np.asarray(array.zero))[:, :70]
    assert (zero[:, ::2] == 2**format.bits - 1).all() and (zero[:, 1::2] == 0).all()
    assert_round_trip(weight, array)
    lhs = jnp.eye(100, dtype=jnp.dtype(dtype))
    np.testing.assert_array_equal(lhs @ array, array.dequantize())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("zero", ["none", "integer", "float"])
def test_scales_are_rounded_up(dtype, zero):
    """Rounding to nearest would make half of the scales too small to reach the extremes."""
    format = Format(4, zero=zero)
    weight = np.asarray(normal((64, 1000)), np.float64)
    array = quantize(jnp.asarray(weight, jnp.float32), format, scale_dtype=jnp.dtype(dtype))
    scale = unpack_groups(np.asarray(array.scale).astype(np.float64))[0, :1000]
    low, high = weight.min(axis=0), weight.max(axis=0)
    if zero == "none":
        reach, extent = 7 * scale, np.maximum(-low, high)
    elif zero == "integer":
        reach, extent = 15 * scale, high - low
    else:
        least = unpack_groups(np.asarray(array.zero).astype(np.float64))[0, :1000]
        assert (least <= low).all()
        reach, extent = 15 * scale, high - least
    assert (reach >= extent * (1 - 1e-6)).all()
    assert (reach <= extent * (1 + 2.01 * float(jnp.finfo(dtype).eps))).all()


@pytest.mark.parametrize("quantizer", ["absmax", "mse"])
@pytest.mark.parametrize("zero", ["none", "integer", "float"])
def test_the_largest_scales_still_divide(zero, quantizer):
    """Their reciprocals are subnormal."""
    weight = np.where(np.random.default_rng(0).random((100, 70)) < 0.5, 3.2e38, 0)
    array = quantize(jnp.asarray(weight, jnp.float32), Format(2, zero=zero), quantizer=quantizer)
    assert_round_trip(weight, array)


@pytest.mark.parametrize("format", [INT4, UINT4, INT4.replace(zero="float")])
@pytest.mark.parametrize("value", [1e-45, 1e-38, 1e-30, 1e30, 1e38])
def test_extreme_magnitudes_stay_finite(format, value):
    weight = np.full((100, 70), value, np.float32)
    weight[::2] *= -0.5
    found = dequantize(quantize(weight, format)).value
    assert np.isfinite(found).all()
    assert np.abs(found - np.asarray(weight, np.float64)).max() <= max(value / 10, 2.0**-126)


@pytest.mark.parametrize(
    ("zero", "deviation", "dtype"), pairwise(ZEROS, [1e-3, 1e-4, 1e-5], ["float16", "float32"])
)
def test_float16_scales_are_small_enough_for_small_weights(dtype, deviation, zero):
    """Errors are at most half a scale; scales are too large by at most 2^-24 or one rounding."""
    format = Format(8, 64, zero)
    weight = (deviation * normal((128, 70))).astype(dtype)
    array = jaxlowbit.quantize(weight, format, scale_dtype=jnp.float16)
    assert_round_trip(weight, array)
    exact = jaxlowbit.quantize(weight, format, scale_dtype=jnp.float32)
    assert (scales(array) <= scales(exact) * (1 + 2.0**-9) + 2.0**-23).all()


@pytest.mark.parametrize("zero", ["none", "integer", "float"])
def test_float16_scales_represent_the_smallest_float16_weights_exactly(zero):
    steps = np.random.default_rng(0).integers(-7, 8, (100, 70))
    weight = jnp.asarray(steps * 2.0**-24, jnp.float16)
    array = jaxlowbit.quantize(weight, Format(4, 16, zero))
    np.testing.assert_array_equal(array.dequantize(), weight)


def test_a_few_groups_may_be_too_small_for_their_scales():
    weight = normal((64, 70)).at[:, ::3].multiply(1e-12).at[:, 1::3].set(0)
    array = jaxlowbit.quantize(weight, Format(8), scale_dtype=jnp.float16)
    assert not array.dequantize()[:, ::3].any()
    jaxlowbit.quantize(jnp.zeros((64, 70)), Format(8), scale_dtype=jnp.float16)


def test_default_scales_have_the_dtype_of_the_weight():
    assert quantize(normal((16, 4), "bfloat16"), INT4).scale.dtype == jnp.bfloat16


def test_groups_are_independent():
    weight = normal((128, 8)).at[64:].multiply(1000)
    alone = quantize(weight[:64], Format(4, 64)).dequantize()
    np.testing.assert_array_equal(quantize(weight, Format(4, 64)).dequantize()[:64], alone)


def test_jit_gives_the_same_words():
    weight = normal((100, 70))
    eager, jitted = jaxlowbit.quantize(weight, UINT4), quantize(weight, UINT4)
    jax.tree.map(np.testing.assert_array_equal, eager, jitted)


def test_dequantize_function_and_dtypes():
    array = quantize(normal((64, 70), "bfloat16"), INT4)
    assert array.dequantize().dtype == jnp.bfloat16
    exact = array.dequantize(jnp.float32)
    assert exact.dtype == jnp.float32
    np.testing.assert_array_equal(exact.astype(jnp.bfloat16), array.dequantize())
    np.testing.assert_array_equal(np.asarray(exact, np.float64), dequantize(array).value)


# --- integers that are quantized already ----------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bits"), [("int4", 4), ("int8", 8), ("int8", 5), ("int32", 8), ("int2", 2)]
)
def test_from_signed_integers(dtype, bits):
    rng = np.random.default_rng(0)
    values = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (100, 70))
    scale = rng.uniform(1, 2, (4, 70)).astype(np.float32)
    array = QuantizedArray.from_integers(
        jnp.asarray(values, jnp.dtype(dtype)), scale, format=Format(bits, 32)
    )
    want = values * np.repeat(scale, 32, axis=0)[:100].astype(np.float64)
    np.testing.assert_array_equal(dequantize(array).value, want)


@pytest.mark.parametrize(("dtype", "bits"), [("uint4", 4), ("uint8", 8), ("uint8", 3)])
@pytest.mark.parametrize("zero", ["integer", "float"])
def test_from_unsigned_integers(dtype, bits, zero):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**bits, (100, 70))
    scale = rng.uniform(1, 2, (1, 70)).astype(np.float32)
    integer = zero == "integer"
    zeros = rng.integers(0, 2**bits, (1, 70)) if integer else rng.normal(size=(1, 70))
    array = QuantizedArray.from_integers(
        jnp.asarray(values, jnp.dtype(dtype)),
        scale,
        jnp.asarray(zeros, jnp.dtype(dtype) if integer else jnp.float32),
        format=Format(bits, zero=zero),
    )
    wide = scale.astype(np.float64)
    want = (values - zeros) * wide if integer else values * wide + np.float32(zeros)
    np.testing.assert_array_equal(dequantize(array).value, want)


def test_from_signed_integers_with_signed_zeros():
    values, zero = jnp.array([[-8, 7], [0, 3]], jnp.int4), jnp.array([[-8, 2]], jnp.int4)
    scale = jnp.full((1, 2), 0.5)
    array = QuantizedArray.from_integers(values, scale, zero, format=Format(4, zero="integer"))
    assert array.dequantize().tolist() == [[0.0, 2.5], [4.0, 0.5]]


def test_from_integers_of_a_stack():
    values = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (3, 100, 70)), jnp.int4)
    array = QuantizedArray.from_integers(values, jnp.ones((3, 1, 70)), format=Format(4))
    assert array.shape == (3, 100, 70)
    np.testing.assert_array_equal(array.dequantize(jnp.float32), values.astype(jnp.float32))


@pytest.mark.parametrize("zero", ["integer", "none"])
def test_integers_beyond_the_width_are_clipped_while_tracing(zero):
    signed = zero == "none"
    wide = np.array([[2**31 - 1, 300], [-(2**31), 3]], np.int32)
    values = jnp.asarray(wide if signed else wide.astype(np.uint32))
    zeros = None if signed else jnp.full((1, 2), 2**32 - 1, jnp.uint32)
    pack = jax.jit(functools.partial(QuantizedArray.from_integers, format=Format(4, zero=zero)))
    found = pack(values, jnp.ones((1, 2)), zeros).dequantize()
    want = [[7, 7], [-8, 3]] if signed else [[0, 0], [0, 3 - 15]]
    assert found.tolist() == want


# --- empty stacks and long groups -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "shards", "quantizer"), pairwise(ZEROS, [(1, 1), (2, 2)], ["absmax", "mse"])
)
def test_empty_stacks(zero, shards, quantizer):
    empty = jaxlowbit.quantize(
        jnp.zeros((0, 100, 70)),
        Format(4, 32, zero),
        quantizer=quantizer,
        shards=shards,
        permutation=np.tile(np.arange(100 // shards[0])[::-1], shards[0]),
    )
    assert empty.shape == (0, 100, 70) and list(empty) == []
    assert empty.dequantize().shape == (0, 100, 70)
    assert (jnp.ones((3, 100)) @ empty).shape == (0, 3, 70)
    assert (jnp.ones((0, 3, 100)) @ empty).shape == (0, 3, 70)
    assert (jnp.ones((2, 1, 3, 100)) @ jax.tree.map(lambda x: x[None], empty)).shape == (
        2,
        0,
        3,
        70,
    )
    nothing = empty.select(jnp.zeros(0, jnp.int32))
    assert nothing.dequantize().shape == (0, 100, 70)
    assert (jnp.ones((0, 3, 100)) @ nothing).shape == (0, 3, 70)


def test_empty_stacks_of_integers():
    values, scale = np.zeros((0, 100, 70), np.int8), np.zeros((0, 4, 70), np.float32)
    array = QuantizedArray.from_integers(values, scale, format=Format(8, 32))
    assert array.dequantize().shape == (0, 100, 70)


def test_scanning_an_empty_stack():
    empty = jaxlowbit.quantize(jnp.zeros((0, 64, 64)), INT4)
    out, ys = jaxlowbit.scan(lambda x, layer: (x @ layer, x), jnp.ones((2, 64)), empty)
    assert (out == 1).all() and ys.shape == (0, 2, 64)


@pytest.mark.parametrize(
    ("zero", "size"),  # sizes at the limits of integer types, each with every kind of zero
    [("none", 2**31), ("none", 2**63), ("none", 2**64), ("integer", 2**32), ("float", 2**18)],
)
def test_a_group_beyond_k_is_the_channel(zero, size):
    weight, lhs = normal((100, 70)), normal((3, 100))
    channel = quantize(weight, Format(4, zero=zero), quantizer="absmax")
    array = quantize(weight, Format(4, size, zero), quantizer="absmax")
    long, short = (dataclasses.replace(x, format=channel.format) for x in (array, channel))
    jax.tree.map(np.testing.assert_array_equal, long, short)
    np.testing.assert_array_equal(dequantized(array), dequantized(channel))
    computing = backends("float32", array.format)
    for backend in computing if size == 2**64 else computing[:1]:
        got, want = (matmul(lhs, x, backend=backend) for x in (array, channel))
        np.testing.assert_array_equal(got, want)
    integers = np.ones((100, 70), np.int8), np.ones((1, 70), np.float32)
    ones = QuantizedArray.from_integers(*integers, format=Format(4, size))
    assert dequantized(ones).all()


def test_a_group_beyond_k_takes_no_memory():
    weight = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    for quantizer in ("absmax", "mse"):
        program = quantize.lower(weight, Format(4, 2**18), quantizer=quantizer).compile()
        analysis = program.memory_analysis()
        assert analysis is not None
        assert analysis.temp_size_in_bytes <= 4 * 4 * weight.size

    array = jax.eval_shape(lambda w: quantize(w, Format(4, 2**18)), weight)
    program = jax.make_jaxpr(lambda q: q.dequantize())(array)
    shapes = [getattr(var.aval, "shape", ()) for eqn in program.eqns for var in eqn.outvars]
    assert max(map(math.prod, shapes)) <= 2 * weight.size


# --- the array ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stack() -> QuantizedArray:
    return quantize(normal((3, 100, 70)), UINT4)


@pytest.mark.parametrize("format", FORMATS[::3], ids=lambda f: f"{f.bits}-{f.zero}")
def test_nbytes_counts_the_leaves(format):
    weight = normal((2, 100, 130), "bfloat16")
    array = quantize(weight, format.replace(group_size=32), quantizer="absmax")
    atoms = 2 * 3 * 2
    words, groups = atoms * 512 * format.bits, atoms * 2 * 64
    zero_bytes = {"none": 0, "integer": 1, "float": 2}[format.zero]
    assert array.nbytes == words + groups * (2 + zero_bytes) + 2 * 4
    assert array.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(array))


def test_array_properties(stack):
    assert (stack.shape, stack.ndim, stack.dtype) == ((3, 100, 70), 3, jnp.float32)
    assert stack[0].shape == (100, 70)


@pytest.mark.parametrize("key", [1, -1, slice(1, 3), np.array([2, 0, 0]), None], ids=repr)
def test_indexing_leading_axes(stack, key):
    key = jnp.int32(2) if key is None else key
    np.testing.assert_array_equal(stack[key].dequantize(), stack.dequantize()[key])


def test_indexing_two_leading_axes():
    array = quantize(normal((2, 3, 20, 70)), INT4)
    value = array.dequantize()
    np.testing.assert_array_equal(array[1, 2].dequantize(), value[1, 2])
    np.testing.assert_array_equal(array[:, 1].dequantize(), value[:, 1])
    np.testing.assert_array_equal(array[1].dequantize(), value[1])


def test_iterating_gives_the_elements(stack):
    layers = list(stack)
    assert [layer.shape for layer in layers] == [(100, 70)] * 3
    np.testing.assert_array_equal(layers[2].dequantize(), stack.dequantize()[2])


@pytest.mark.parametrize("index", [1, -1, 7, [2, 0, 0], [[0, 9], [-3, 1]]], ids=str)
def test_select_is_a_clamped_view(stack, index):
    view = stack.select(np.asarray(index, np.int16))
    want = stack.dequantize()[positions(index, 3)]
    assert view.shape == want.shape
    np.testing.assert_array_equal(view.dequantize(), want)
    assert view.packed is stack.packed
    assert view.nbytes == stack.nbytes + 4 * np.size(index)


INDEX_DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


def indices(dtype: str, depth: int) -> np.ndarray:
    """Indices around the limits of the stack and of integer types, as far as `dtype` has them.

    All dtypes get the same number of indices, so that they share programs.
    """
    ends = [depth, *(2**bits for bits in (7, 8, 15, 16, 31, 32, 63))]
    near = [end + step for end in (0, *ends, *(-end for end in ends)) for step in (-1, 0, 1)]
    limits = np.iinfo(dtype)
    known = np.array([i for i in near if limits.min <= i <= limits.max], dtype)
    return np.resize(known, len(near))


@pytest.fixture(scope="module")
def deep() -> QuantizedArray:
    """A stack with more matrices than int8 can index; matrix i contains the value i."""
    numbers = np.arange(200, dtype=np.float32)[:, None, None]
    return QuantizedArray.from_integers(
        np.ones((200, 16, 1), np.int8), np.broadcast_to(numbers, (200, 1, 1)), format=INT8
    )


@pytest.mark.parametrize("x64", [False, True], ids=["", "x64"])
@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_select_reads_indices_of_every_dtype(deep, dtype, x64):
    """Like `jax.lax.dynamic_index_in_dim` with the same dtype, eagerly and traced."""
    index = indices(dtype, 200)
    want = positions(index, 200)
    with jax.enable_x64(x64):
        view = deep.select(index)
        assert view.index.dtype == jnp.int32
        np.testing.assert_array_equal(view.dequantize()[:, 0, 0], want)
        product = jnp.ones((1, 16), jnp.float32) @ view
        np.testing.assert_array_equal(product[:, 0, 0], 16 * want)
        scalar = [float(deep.select(i).dequantize()[0, 0]) for i in index[[0, 1, -1]]]
        np.testing.assert_array_equal(scalar, want[[0, 1, -1]])
        if x64 or index.dtype.itemsize < 8:
            select = jax.jit(lambda q, i: q.select(i).dequantize()[:, 0, 0])
            np.testing.assert_array_equal(select(deep, jnp.asarray(index)), want)


@pytest.mark.parametrize("index", [-1, -200, -201, 199, 200, 2**40, -(2**40)])
def test_select_reads_integers_of_python(deep, index):
    want = positions(index, 200)
    assert float(deep.select(index).dequantize()[0, 0]) == want
    assert float(deep.select([index]).dequantize()[0, 0, 0]) == want


def test_select_agrees_with_dynamic_index_in_dim(deep):
    value = deep.dequantize()
    for i in map(jnp.int32, (-1, -200, -500, 0, 199, 500)):
        want = jax.lax.dynamic_index_in_dim(value, i, keepdims=False)
        np.testing.assert_array_equal(deep.select(i).dequantize(), want)


def test_selecting_adds_no_operation(deep):
    program = jax.make_jaxpr(lambda q, i: q.select(i).index)(deep, jnp.int32(0))
    assert not program.eqns


# --- the pytree -----------------------------------------------------------------------------------


def test_tree_paths():
    flat, _ = jax.tree_util.tree_flatten_with_path({"w": quantize(normal((20, 3)), UINT4)})
    paths = [jax.tree_util.keystr(path) for path, _ in flat]
    assert paths == ["['w'].packed", "['w'].scale", "['w'].zero", "['w'].version"]


def test_flatten_and_unflatten(stack):
    leaves, treedef = jax.tree.flatten(stack)
    again = jax.tree.unflatten(treedef, leaves)
    assert (again.format, again.k, again.n) == (stack.format, stack.k, stack.n)
    assert jax.tree.structure(stack[0]) == treedef
    jax.tree.unflatten(treedef, [object()] * len(leaves))  # placeholders are not checked


def test_jit_takes_and_returns_arrays(stack):
    doubled = jax.jit(lambda q: dataclasses.replace(q, scale=q.scale * 2))(stack)
    np.testing.assert_array_equal(doubled.dequantize(), 2 * stack.dequantize())


def test_vmap_maps_over_the_stack(stack):
    weight = normal((3, 100, 70))
    mapped = jax.vmap(lambda w: quantize(w, UINT4))(weight)
    jax.tree.map(np.testing.assert_array_equal, mapped, stack)
    values = jax.vmap(lambda q: q.dequantize())(stack)
    np.testing.assert_array_equal(values, stack.dequantize())


def test_lax_scan_maps_over_the_stack(stack):
    total, values = jax.lax.scan(
        lambda carry, q: (carry + q.dequantize(), q.dequantize()), jnp.zeros((100, 70)), stack
    )
    np.testing.assert_array_equal(values, stack.dequantize())
    np.testing.assert_allclose(total, stack.dequantize().sum(axis=0), atol=1e-6)


def test_donated_words_are_reused():
    array = quantize(normal((64, 64)), INT8)
    words, want = array.packed, np.asarray(2 * array.dequantize())
    double = jax.jit(lambda q: dataclasses.replace(q, scale=q.scale * 2), donate_argnums=0)
    np.testing.assert_array_equal(double(array).dequantize(), want)
    assert words.is_deleted()


def test_eval_shape_gives_an_abstract_array():
    abstract = jax.eval_shape(
        lambda w: quantize(w, INT4), jax.ShapeDtypeStruct((100, 70), jnp.bfloat16)
    )
    assert abstract.shape == (100, 70) and abstract.dtype == jnp.bfloat16
    assert abstract.packed.shape == (2, 2, 512) and abstract.packed.dtype == jnp.uint32


def test_version_of_arrays_from_outside_is_checked(stack):
    leaves, treedef = jax.tree.flatten(stack)
    stored = jax.tree.unflatten(treedef, [*leaves[:-1], jnp.full(3, 2, jnp.uint32)])
    with pytest.raises(ValueError, match=r"layout version \[2\], but this library reads version 1"):
        stored.check_words()
    stack.check_words()
    jax.eval_shape(lambda q: q.check_words(), stored)


def test_words_of_another_version_are_not_used(stack):
    """Restoring a pytree does not check the version, so every function that reads words does."""
    leaves, treedef = jax.tree.flatten(stack)
    stored = jax.tree.unflatten(treedef, [*leaves[:-1], jnp.array([1, 2, 1], jnp.uint32)])
    matrix = jax.tree.map(lambda leaf: leaf[1], stored)
    uses = {
        "product": lambda: jnp.ones(100) @ stored,
        "dequantize": stored.dequantize,
        "select": lambda: stored.select(0),
        "index": lambda: stored[1:],
        "iteration": lambda: list(stored),
        "columns": lambda: take_columns(matrix, jnp.arange(3), jnp.float32),
    }
    for name, use in uses.items():
        with pytest.raises(ValueError, match=r"layout version \[.*2\], but this library"):
            use()
            pytest.fail(f"{name} reads words of version 2")
    jax.eval_shape(lambda x, q: x @ q, jnp.ones(100), stored)  # not while tracing
