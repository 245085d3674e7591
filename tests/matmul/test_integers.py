"""Integer products are exact under transformations and sharding, or raise."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLATFORM, calls, described
from integer_weights import FORMATS, exact, values, weights
from jax.sharding import AxisType
from meshes import make_mesh, put

from jaxlowbit import (
    DISABLED_EXPORT_CHECKS,
    FP8,
    INT4,
    INT8,
    Format,
    QuantizedActivations,
    QuantizedArray,
    integer_matmul,
    quantize,
    quantized_matmul,
)
from jaxlowbit._backends import extension
from jaxlowbit._backends.target import Target
from jaxlowbit._core import layout
from jaxlowbit._core.format import format_name
from jaxlowbit._matmul import integers as module
from jaxlowbit._matmul import quantized_lhs
from jaxlowbit._matmul.options import Options

formats = pytest.mark.parametrize("format", FORMATS, ids=format_name)
VNNI = extension.BUILD["cpu_isa"][0] == "vnni" and PLATFORM == "cpu"


def definition(x: Any, rhs: QuantizedArray) -> Any:
    """The reference implementation."""
    options = Options(preferred_element_type=jnp.int32)
    return module.multiply(x, rhs._with(tensor_scale=None), options)


ways = pytest.mark.parametrize("multiply", [integer_matmul, definition])


SIZES = (1, 1, 1), (3, 257, 130)
SUMS = [(integer_matmul, format, *size) for format in FORMATS for size in SIZES]
SUMS += [(definition, format, *SIZES[i % 2]) for i, format in enumerate(FORMATS)]


@pytest.mark.parametrize(("multiply", "format", "m", "k", "n"), SUMS)
def test_every_sum_is_exact(multiply, format, m, k, n):
    integers, rhs = weights(format, k, n)
    x = values(m, k)
    found = multiply(x, rhs)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, exact(x, integers))
    np.testing.assert_array_equal(multiply(x[0], rhs), exact(x[:1], integers)[0])


@ways
@formats
@pytest.mark.parametrize("extreme", [-1, 1])
@pytest.mark.parametrize("of_values", [-1, 1])
def test_extremes(multiply, format, extreme, of_values):
    integers, rhs = weights(format, 300, 5, extreme=extreme)
    assert abs(integers).max() <= format.max_integer
    x = values(2, 300, extreme=of_values)
    np.testing.assert_array_equal(multiply(x, rhs), exact(x, integers))


@pytest.mark.skipif(not VNNI, reason="this CPU has no AVX-512 VNNI, or AMX")
@pytest.mark.parametrize("m", [1, 3, 20])
@pytest.mark.parametrize(
    ("format", "k"), [(Format(4), 2**14), (Format(8), 2**10), (Format(4, zero="integer"), 8738)]
)
def test_the_longest_sums_that_vnni_adds(m, format, k):
    """The maximum K of the VNNI kernel is exact in float32; K + 1 runs the definition."""
    integers, rhs = weights(format, k, 70, extreme=-1)
    x = values(m, k, extreme=-1).at[0, 0].set(-127)
    assert calls(integer_matmul, x, rhs, platform="cpu") == ["quantized_activations"]
    np.testing.assert_array_equal(integer_matmul(x, rhs), exact(x, integers))
    integers, rhs = weights(format, k + 1, 70)
    x = values(m, k + 1)
    assert calls(integer_matmul, x, rhs, platform="cpu") == []
    np.testing.assert_array_equal(integer_matmul(x, rhs), exact(x, integers))


@pytest.mark.parametrize("format", [Format(8), Format(8, zero="integer")], ids=format_name)
def test_the_longest_sums_fit(format):
    """The maximum K is exact in int32; K + 1 might overflow and raises."""
    most = module.max_k(format)
    assert 128 * format.max_integer * most < 2**31 <= 128 * format.max_integer * (most + 1)
    integers, rhs = weights(format, most, 1, extreme=-1)
    x = values(1, most, extreme=-1)
    np.testing.assert_array_equal(integer_matmul(x, rhs), exact(x, integers))
    _, longer = weights(format, most + 1, 1)
    with pytest.raises(ValueError, match=f"k is {most + 1}, but sums of int8 .* beyond k={most};"):
        integer_matmul(values(1, most + 1), longer)


def test_results_are_multiplied_by_scales():
    """`quantized_matmul` equals the integer product times the scales of tokens and channels."""
    _, rhs = weights(Format(4), 64, 70)
    x, scale = values(5, 64), jnp.full((5, 1), 0.5)
    product = quantized_matmul(QuantizedActivations(x, scale, jnp.float32), rhs)
    channels = np.asarray(layout.unpack_groups(rhs.scale))[:, :70]
    want = np.asarray(integer_matmul(x, rhs)) * (np.asarray(scale) * channels)
    # The product rounds weights to bfloat16.
    bound = 2.0**-7 * np.abs(np.int64(x)) @ np.abs(np.asarray(rhs.dequantize(jnp.float32)))
    assert (np.abs(np.asarray(product) - want) <= bound).all()


def test_groups_that_span_k():
    rhs = quantize(jnp.ones((100, 64)), INT4)
    np.testing.assert_array_equal(integer_matmul(values(1, 100, extreme=1), rhs), 127 * 7 * 100)


@pytest.mark.parametrize("format", [Format(4), Format(4, 64, scale="int8")], ids=format_name)
def test_permutations_of_rows_and_shards(format):
    order = np.random.default_rng(0).permutation(128)
    x = values(3, 128)
    integers, rhs = weights(format, 128, 70)
    if format.scale is None:
        integers, rhs = weights(format, 128, 70, permutation=order)
        np.testing.assert_array_equal(integer_matmul(x, rhs), exact(x, integers))
        integers, rhs = weights(format, 100, 70, shards=(2, 2))
        x = values(3, 100)
    np.testing.assert_array_equal(integer_matmul(x, rhs), exact(x, integers))


def test_stacks():
    integers, stack = weights(Format(4), 128, 70, 3)
    x = values(3, 5, 128)
    want = np.stack([exact(x[i], integers[i]) for i in range(3)])
    np.testing.assert_array_equal(integer_matmul(x, stack), want)
    np.testing.assert_array_equal(integer_matmul(x[0], stack.select(1)), exact(x[0], integers[1]))
    both = integer_matmul(x[0], stack)
    np.testing.assert_array_equal(both, np.stack([exact(x[0], own) for own in integers]))


def test_vmap_over_rows_and_over_weights():
    integers, stack = weights(Format(4), 128, 70, 3)
    x = values(3, 5, 128)
    want = np.stack([exact(x[i], integers[i]) for i in range(3)])
    np.testing.assert_array_equal(jax.vmap(integer_matmul)(x, stack), want)
    one = stack[1]
    batch = jax.vmap(integer_matmul, (0, None))
    np.testing.assert_array_equal(batch(x, one), exact(x, integers[1]))
    assert calls(batch, x, one, platform="cuda") == []  # an unknown GPU might not be Hopper
    rows = jax.vmap(lambda x: integer_matmul(x, stack))(x)  # as many rows as the stack has matrices
    np.testing.assert_array_equal(rows, np.einsum("bmk,skn->bsmn", np.int64(x), integers))


def test_shapes_without_values():
    rhs = jax.eval_shape(lambda: quantize(jnp.ones((256, 70)), INT8))
    found = jax.eval_shape(integer_matmul, jax.ShapeDtypeStruct((2, 5, 256), jnp.int8), rhs)
    assert (found.shape, found.dtype) == ((2, 5, 70), jnp.int32)
    none = integer_matmul(jnp.ones((0, 256), jnp.int8), quantize(jnp.ones((256, 7)), INT8))
    assert none.shape == (0, 7)


def test_integers_have_no_derivatives():
    _, rhs = weights(Format(4), 64, 70)
    x = values(5, 64)

    def loss(scale: Any) -> Any:
        sums = integer_matmul(x, rhs._with(scale=scale))
        return jnp.sum(sums.astype(jnp.float32) * scale[0, 0, 0])

    total = float(jnp.sum(integer_matmul(x, rhs)))
    np.testing.assert_allclose(jax.grad(loss)(rhs.scale)[0, 0, 0], total)
    assert np.count_nonzero(jax.grad(loss)(rhs.scale)) <= 1
    with pytest.raises(TypeError, match="int8"):
        jax.grad(lambda x: jnp.sum(integer_matmul(x, rhs)).astype(jnp.float32))(x)
    out, tangent = jax.jvp(
        lambda x: integer_matmul(x, rhs), (x,), (np.zeros(x.shape, jax.dtypes.float0),)
    )
    assert out.dtype == jnp.int32 and tangent.dtype == jax.dtypes.float0


@pytest.mark.parametrize("format", [Format(8), Format(4, 64, scale="int8")], ids=format_name)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("k", "n"), [("a", "b"), (None, "a"), ("b", None)])
def test_on_a_mesh(format, kind, k, n):
    mesh = make_mesh(kind)
    integers, rhs = weights(format, 512, 512)
    x = values(6, 512)
    placed = put(rhs, mesh, rhs.partition_spec(mesh, k=k, n=n))
    lhs = put(x, mesh, jax.P(None, k))
    options = {"out_sharding": jax.P(None, n)} if kind is AxisType.Explicit else {}
    found = jax.jit(lambda x, rhs: integer_matmul(x, rhs, **options))(lhs, placed)
    np.testing.assert_array_equal(found, exact(x, integers))


def test_exported_programs():
    integers, rhs = weights(Format(4, 64, scale="int8"), 128, 70)
    x = values(3, 128)
    program = jax.export.export(jax.jit(integer_matmul), disabled_checks=DISABLED_EXPORT_CHECKS)(
        x, rhs
    )
    again = jax.export.deserialize(program.serialize())
    np.testing.assert_array_equal(again.call(x, rhs), exact(x, integers))


HOPPER = Target("cuda", frozenset({90}))


def test_products_supported_by_the_hopper_call(cuda, monkeypatch):
    monkeypatch.setattr(quantized_lhs, "unread", lambda *_: None)
    sums = module.IntegerSums(None, Options())

    def takes(format: Format, m: Any = 1, k: int = 512, stack: tuple[int, ...] = ()) -> bool:
        rhs: Any = jax.eval_shape(lambda: quantize(jnp.ones((*stack, k, 64)), format))
        values = jax.ShapeDtypeStruct((m, k), jnp.int8)
        return sums.unsupported((values,), (rhs,), HOPPER) is None

    assert takes(Format(4)) and takes(Format(8), 1000) and takes(Format(4, 64, scale="int8"))
    assert not takes(Format(4), 0) and not takes(Format(3)) and not takes(Format(4), stack=(2,))
    assert takes(Format(8), k=2**17 - 1) and not takes(Format(4), k=2**17)


def test_the_call_of_hopper_has_no_scales():
    """Its result is int32, and it has no operands for the scales of tokens and channels."""
    from jaxlowbit._backends import cuda_calls

    for format in (Format(4), Format(4, 64, scale="int8")):
        _, rhs = weights(format, 100, 70)
        rhs = rhs._with(tensor_scale=None)

        def program(x: Any, rhs: QuantizedArray = rhs) -> Any:
            return cuda_calls.quantized(x, None, rhs, out_dtype=jnp.dtype("int32"))

        traced = jax.jit(program).trace(values(5, 100))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        (found,) = described(text)
        assert found.name == "quantized_activations" and len(found.operands) == 3
        assert found.results[0] == "tensor<1x5x70xi32>"


ONES = jnp.ones((2, 64), jnp.int8)
WRONG = [
    (
        lambda: integer_matmul(jnp.ones((2, 64)), quantize(jnp.ones((64, 8)), INT8)),
        "lhs is float32, but integers are multiplied in int8; cast it, or use quantized_m",
    ),
    (
        lambda: integer_matmul(jnp.ones((2, 256), jnp.int8), quantize(jnp.ones((256, 8)), INT4)),
        "rhs, int4-g128, has 2 groups of k with float scales of their own, so that no sum",
    ),
    (
        lambda: integer_matmul(ONES, quantize(jnp.ones((64, 8)), FP8)),
        "rhs, e4m3, stands for the numbers of a codebook, so that",
    ),
    (
        lambda: integer_matmul(ONES, quantize(jnp.ones((64, 8)), Format(4, -1, "float"))),
        "adds a float zero to its integers",
    ),
    (
        lambda: integer_matmul(ONES[:, :32], quantize(jnp.ones((64, 8)), INT8)),
        "the last axis of lhs must be k=64",
    ),
    (
        lambda: quantized_matmul(ONES, quantize(jnp.ones((64, 8)), INT8)),
        "lhs is int8, but activations are .*; cast them, or call integer_matmul",
    ),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG)
def test_errors(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        wrong()


def test_values_other_than_arrays_raise():
    rhs = quantize(jnp.ones((64, 8)), INT8)
    with pytest.raises(TypeError, match="lhs is a QuantizedActivations"):
        integer_matmul(QuantizedActivations(ONES, jnp.ones((2, 1))), rhs)
    with pytest.raises(TypeError, match=r"rhs is .*, but it must be a QuantizedArray"):
        integer_matmul(ONES, cast(Any, jnp.ones((64, 8))))
