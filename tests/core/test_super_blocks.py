"""Two-level scales: rounding, byte layout and products."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import Combination, operands
from flax import nnx
from helpers import PLATFORM, TARGET, dequantize, dequantized
from jax import export
from jax.sharding import AxisType
from meshes import assert_close, assert_divides, make_mesh, product

from jaxlowbit import (
    DISABLED_EXPORT_CHECKS,
    Format,
    QuantizedArray,
    quantize,
    quantized_glu,
    quantized_matmul,
    quantized_matmuls,
    quantized_mlp,
    scan,
)
from jaxlowbit import nnx as jl_nnx
from jaxlowbit._backends import cuda
from jaxlowbit._core import layout, super_blocks
from jaxlowbit._core.columns import take_columns
from jaxlowbit._core.format import format_name, parse_format
from jaxlowbit._flax.weights import check_values

Q2_K = Format(2, 16, "float", scale="two_level")
Q4_K = Format(4, 32, "float", scale="two_level")
Q6_K = Format(6, 16, scale="two_level")
IQ4_XS = Format(4, 32, codebook="nf4", scale="two_level")
FORMATS = [Q2_K, Q4_K, Q6_K, IQ4_XS]
formats = pytest.mark.parametrize("format", FORMATS, ids=format_name)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@formats
def test_names(format):
    assert parse_format(format_name(format)) == format


def test_rows_of_bytes():
    """The byte order of docs/layout.md: per super-block the integers of its groups, then the low
    and the high bytes of its floats."""
    integers = jnp.arange(-16, 16, dtype=jnp.int8).reshape(16, 2)
    floats = jnp.array([[1.0, -2.0], [0.5, 3.0]], jnp.float16)
    found = super_blocks.packed(integers, floats, Q4_K)
    assert found.shape == (20, 2) and found.dtype == jnp.uint8
    np.testing.assert_array_equal(found[:8], np.arange(-16, 0).astype(np.uint8).reshape(8, 2))
    np.testing.assert_array_equal(found[8:10], [[0x00, 0x00], [0x3C, 0xC0]])
    np.testing.assert_array_equal(found[18:], [[0x00, 0x00], [0x38, 0x42]])
    back = super_blocks.unpacked(found, Q4_K)
    for own, other in zip(back, (integers, floats), strict=True):
        np.testing.assert_array_equal(own, other)


@formats
def test_no_weight_is_off_by_more_than_half_a_scale(format):
    """Up to float32 rounding. Two-level scales are slightly coarser than float scales."""
    k = 320
    weight = random(k, 40)
    array = quantize(weight, format, quantizer="absmax")
    assert (
        array.scale.dtype == jnp.uint8
        and array.scale.shape[-2] == super_blocks.stored_shapes(k, 40, format)[1][1]
    )
    missed = np.abs(np.asarray(dequantized(array, jnp.float32)) - weight)
    if format.codebook is None:
        scale, zero, _ = super_blocks.expanded(array.scale, array.zero, format, k)
        step = np.asarray(layout.unpack_groups(scale)).repeat(format.group_size, 0)[:k, :40]
        assert (missed <= 0.5001 * step).all()
        assert (zero is None) == (format.zero == "none")
    floats = dequantized(quantize(weight, format.expanded, quantizer="absmax"), jnp.float32)
    assert np.linalg.norm(missed) < 1.1 * np.linalg.norm(np.asarray(floats) - weight)


def test_zeros_of_the_weight_and_a_wide_range():
    """A super-block of zeros stays zero; small groups next to large ones keep their signs."""
    weight = random(512, 64)
    weight[:256] = 0
    weight[256:288] *= 1e-3
    array = quantize(weight, Q6_K)
    found = np.asarray(dequantized(array, jnp.float32))
    assert (found[:256] == 0).all() and np.isfinite(found).all()
    assert np.abs(found - weight).max() <= np.abs(weight).max() / 31


@formats
def test_transformations(format):
    stack = quantize(random(2, 256, 256), format)
    x = jnp.asarray(random(2, 3, 256, seed=1))
    floats = dequantized(stack, jnp.float32)
    whole = x @ stack
    assert_close(whole, x @ floats)
    assert_close(jax.vmap(product)(x, stack), whole)
    assert_close(jax.vmap(lambda i: x[0] @ stack.select(i))(jnp.arange(2)), x[0] @ stack)
    assert_close(
        scan(lambda h, layer: (h @ layer, None), x[0], stack)[0], x[0] @ stack[0] @ stack[1]
    )

    def loss(x: Any, weight: Any) -> Any:
        return jnp.sum(jnp.sin(x @ weight))

    assert_close(jax.grad(loss)(x, stack), jax.grad(loss)(x, floats))
    gradient = jax.grad(loss, argnums=1, allow_int=True)(x, stack)
    assert gradient.scale.dtype == jax.dtypes.float0


@formats
def test_columns_and_padded_parts(format):
    whole, array = (quantize(random(512, 160), format, shards=s) for s in ((1, 1), (2, 2)))
    np.testing.assert_array_equal(array.dequantize(), whole.dequantize())
    columns = jnp.array([0, 159, 70, 8])
    found = take_columns(array, columns, jnp.float32)
    np.testing.assert_array_equal(found, np.asarray(dequantized(whole, jnp.float32)).T[columns])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("k", "axis", "shards"),
    [(256, "n", (1, 1)), (1024, "k", (1, 1)), (512, "k", (1, 1)), (640, "k", (4, 1))],
)
def test_meshes(kind, k, axis, shards):
    """If shards of k split super-blocks, each device has all scales, unless k is padded."""
    mesh, x = make_mesh(kind), jnp.asarray(random(4, k, seed=1))
    array = quantize(random(k, 512), Q4_K, shards=shards)
    specs = array.partition_spec(mesh, **{axis: "b"})
    entry = "b" if axis == "k" and k != 512 else None
    assert specs.scale == specs.zero == jax.P("b" if axis == "n" else None, entry, None)
    assert_divides(mesh, kind, axis, specs, x, array)


def test_layers():
    @nnx.vmap
    def make(key: Any) -> Any:
        return jl_nnx.QuantizedLinear(256, 64, format=Q4_K, rngs=nnx.Rngs(key))

    layers = make(jax.random.split(jax.random.key(0), 3))
    x = jnp.asarray(random(3, 2, 256))
    found = nnx.vmap(lambda layer, x: layer(x))(layers, x)
    assert_close(found, x @ layers.kernel)
    with pytest.raises(ValueError, match="leave scale='two_level' out of the format"):
        check_values(jnp.full((256, 64), 1e9), Q4_K)


def test_exported_programs_know_the_format():
    array = quantize(random(256, 64), Q4_K)
    x = jnp.asarray(random(3, 256))
    program = export.export(jax.jit(product), disabled_checks=DISABLED_EXPORT_CHECKS)(x, array)
    assert_close(export.deserialize(program.serialize()).call(x, array), x @ array)


def test_the_call_reads_floats_if_no_kernel_reads_bytes():
    """On the CPU, XLA expands the scales before the call; the words are passed unchanged."""
    array = quantize(random(256, 64), Q4_K)
    lowered = jax.jit(product).lower(jnp.ones((3, 256), jnp.bfloat16), array)
    text = lowered.as_text()
    call = next(line for line in text.splitlines() if TARGET in line)
    assert "tensor<1x1x8x64xf32>" in call and "ui8" not in call.split("->")[0].split("xf32>")[0]


@pytest.mark.parametrize(
    ("format", "m", "k", "lhs", "reads"),
    [
        (Q4_K, 1, 4096, "bfloat16", True),
        (Q4_K, 16, 4096, "float16", True),
        (Q6_K, 16, 320, "bfloat16", True),
        (Q4_K, 17, 4096, "bfloat16", False),
        (Q4_K, 1, 200, "bfloat16", False),
        (Q4_K, 1, 4096, "float32", False),
        (IQ4_XS, 1, 4096, "bfloat16", False),
    ],
)
def test_which_products_read_bytes_on_hopper(format, m, k, lhs, reads):
    assert cuda.reads_super_blocks(jnp.dtype(lhs), m, k, 4096, format) == reads


COMBINATIONS = [
    Combination(weights, "two_level", lhs, zero, group, epilogue, rows, shape, result)
    for weights, lhs, zero, group, epilogue, rows, shape, result in (
        ("int4", "bfloat16", "float", 32, "gated", 1, (512, 320), "lhs"),
        ("int4", "bfloat16", "float", 32, "all", 1, (256, 192), "float32"),
        ("int4", "float16", "none", 16, "gated", 5, (512, 320), "float32"),
        ("int6", "bfloat16", "none", 16, "gelu", 5, (256, 192), "lhs"),
        ("int2", "bfloat16", "float", 16, "residual", 1, (512, 320), "lhs"),
        ("int5", "float16", "float", 64, "gated", 1, (256, 192), "lhs"),
        ("int3", "bfloat16", "none", 128, "silu", 40, (512, 320), "lhs"),
        ("int8", "bfloat16", "float", 128, "bias", 5, (328, 200), "lhs"),
        ("int4", "float32", "none", 64, "relu", 5, (259, 193), "lhs"),
        ("int4", "int8", "none", 32, "bias", 5, (512, 320), "lhs"),
        ("e4m3", "float8_e4m3fn", "none", 128, "none", 200, (256, 192), "float32"),
        ("table of 16", "bfloat16", "none", 32, "gelu_tanh", 1, (512, 320), "lhs"),
    )
]


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: c.name)
@pytest.mark.parametrize("backend", [PLATFORM, "xla"])
def test_combinations(combination, backend):
    """With epilogues, quantized activations and other options, element by element."""
    c = combination
    lhs, rhs, epilogue, exact, bound = operands(c)
    dtype = jnp.dtype("float32") if c.result == "float32" else None
    multiply = jax.jit(
        functools.partial(
            quantized_glu if c.gated else quantized_matmul,
            backend=backend,
            preferred_element_type=dtype,
        ),
        static_argnames="activation",
    )
    missed = np.abs(np.asarray(multiply(lhs, rhs, **epilogue)).astype(np.float64) - exact)
    assert (missed <= bound).all()


@pytest.mark.parametrize("m", [1, 6, 30])
def test_calls_of_several_products(m):
    gate_up, down, other = (
        quantize(random(*shape, seed=i), Q4_K)
        for i, shape in enumerate([(2, 256, 512), (512, 256), (256, 128)])
    )
    x = jnp.asarray(random(m, 256)).astype(jnp.bfloat16)
    floats = [dequantized(w, jnp.float32) for w in (gate_up, down, other)]
    wide = np.asarray(x, np.float32)
    found = jax.jit(quantized_matmuls)(x, (other, other))
    for product_of in found:
        np.testing.assert_allclose(
            np.asarray(product_of, np.float32), wide @ floats[2], rtol=0.02, atol=0.5
        )
    hidden = np.asarray(jax.nn.silu(wide @ floats[0][0]) * (wide @ floats[0][1]))
    want = hidden @ np.asarray(floats[1])
    mlp = jax.jit(functools.partial(quantized_mlp, activation="silu"))
    got = np.asarray(mlp(x, gate_up=gate_up, down=down), np.float32)
    np.testing.assert_allclose(got, want, rtol=0.05, atol=0.02 * np.abs(want).max())


def test_from_integers_matches_its_documentation():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 16, (320, 70), np.uint8)
    scale, zero = (rng.integers(-128, 128, (10, 70), np.int8) for _ in range(2))
    floats = [rng.uniform(0.5, 1, (2, 70)).astype(np.float16) for _ in range(2)]
    array = QuantizedArray.from_integers(values, scale, zero, format=Q4_K, super_scale=floats)
    wide = [
        x.astype(np.float32) * f.astype(np.float32).repeat(8, 0)[:10]
        for x, f in zip((scale, zero), floats, strict=True)
    ]
    expected = values * wide[0].repeat(32, 0) + wide[1].repeat(32, 0)
    np.testing.assert_array_equal(dequantized(array, jnp.float32), expected)
    np.testing.assert_allclose(dequantize(array).value, expected, rtol=1e-6)


def test_unsupported_files_raise():
    with pytest.raises(ValueError, match="group_size=48 with scale='two_level', but a super-block"):
        Format(4, 48, scale="two_level")
    with pytest.raises(ValueError, match="group_size=-1 with scale='two_level'"):
        Format(4, scale="two_level")
    with pytest.raises(
        ValueError, match="zero='integer' with scale='two_level', whose zeros must be"
    ):
        Format(4, 32, "integer", scale="two_level")
    values, scale = jnp.zeros((256, 8), jnp.uint8), jnp.ones((8, 8), jnp.int8)
    floats = jnp.ones((1, 8))
    pack = functools.partial(QuantizedArray.from_integers, values, format=Q4_K)
    with pytest.raises(ValueError, match="scale is 'two_level', but super_scale is missing"):
        pack(scale, scale)
    with pytest.raises(TypeError, match="but with zeros it is a pair"):
        pack(scale, scale, super_scale=floats)
    with pytest.raises(
        ValueError,
        match=r"super_scale\[1\] is float32\[2, 8\], but it must be "
        r"floats",
    ):
        pack(scale, scale, super_scale=(floats, jnp.ones((2, 8))))
    with pytest.raises(ValueError, match=r"super_scale\[0\] has 8 values that are NaN or infinite"):
        pack(scale, scale, super_scale=(1e6 * floats, floats))
    with pytest.raises(
        ValueError, match="scale reaches from 200 to 200, but with two-level scales"
    ):
        pack(200 * scale.astype(jnp.int32), scale, super_scale=(floats, floats))
    with pytest.raises(
        ValueError, match="zero is float32, but two-level scales are 8-bit integers"
    ):
        pack(scale, scale.astype(jnp.float32), super_scale=(floats, floats))
    with pytest.raises(ValueError, match=r"values are int4, but .* must be unsigned codes"):
        QuantizedArray.from_integers(
            values.astype(jnp.int4), scale, scale, format=Q4_K, super_scale=(floats, floats)
        )
    with pytest.raises(ValueError, match="is None, but super_scale is given"):
        QuantizedArray.from_integers(
            values,
            floats.repeat(8, 0),
            floats.repeat(8, 0),
            format=Q4_K.expanded,
            super_scale=floats,
        )
    with pytest.raises(
        ValueError, match="larger than that of float16 scales; leave scale='two_level' out"
    ):
        quantize(jnp.full((256, 8), 1e9).at[0].set(-1e9), Q4_K)
    with pytest.raises(ValueError, match="most groups of a matrix; leave scale='two_level' out"):
        quantize(1e-9 * random(256, 8), Q4_K)
