"""Formats with 8-bit scales (MXFP4, MXFP8, NVFP4): their values, scales and errors."""

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, serialization
from helpers import PLATFORM, Oracle, assert_within, dequantize, dequantized, from_codes, matmul
from jax.sharding import AxisType
from meshes import assert_close, make_mesh, product, put

from jaxlowbit import (
    DISABLED_EXPORT_CHECKS,
    INT4,
    MXFP4,
    MXFP8,
    NVFP4,
    Format,
    QuantizedArray,
    explain,
    quantize,
    quantized_matmul,
    scan,
    supported_backends,
)
from jaxlowbit import linen as jl_linen
from jaxlowbit import nnx as jl_nnx
from jaxlowbit._backends import registry
from jaxlowbit._core.format import format_name, parse_format
from jaxlowbit._tuning.weights import find, untuned

E5M2 = Format(8, 32, codebook="e5m2", scale="e8m0")
E8M0, E4M3 = jnp.float8_e8m0fnu, jnp.float8_e4m3fn
NAMES = {
    "mxfp4": MXFP4,
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
    "e5m2-g32-e8m0": E5M2,
    "int8-g32-e8m0": Format(8, 32, scale="e8m0"),
    "nf4-g16-e4m3": Format(4, 16, codebook="nf4", scale="e4m3"),
}
OTHERS = [MXFP8, E5M2, NAMES["int8-g32-e8m0"], MXFP4.replace(group_size=16)]
BACKENDS = ["cpu", "xla"] if PLATFORM == "cpu" else ["xla"]
formats = pytest.mark.parametrize("format", NAMES.values(), ids=NAMES)
two = pytest.mark.parametrize("format", [MXFP4, NVFP4], ids=format_name)
three = pytest.mark.parametrize("format", [MXFP4, MXFP8, NVFP4], ids=format_name)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)


def groups_of(weight: np.ndarray, size: int) -> np.ndarray:
    return weight.reshape(-1, size, weight.shape[-1])


@formats
def test_names(format):
    assert parse_format(format_name(format)) == format
    assert format_name(format) in NAMES


@pytest.mark.parametrize(
    ("format", "element"),
    [(MXFP4, "float4_e2m1fn"), (MXFP8, "float8_e4m3fn"), (E5M2, "float8_e5m2")],
    ids=["mxfp4", "mxfp8", "e5m2"],
)
def test_mx_matches_the_specification(format, element):
    """OCP Microscaling Formats 1.0, section 6.3: the scale is the largest power of two of the
    group over the largest of the element type; elements round to nearest, ties to even, and
    saturate."""
    weight = random(128, 40) * np.exp2(random(4, 1, 40, seed=1) * 8).repeat(32, 0).reshape(128, 40)
    weight[1:32] = np.round(weight[1:32] * 4) / 4  # many ties
    dtype = getattr(ml_dtypes, element)
    info = ml_dtypes.finfo(dtype)
    grouped = groups_of(weight, 32)
    exponent = np.floor(np.log2(np.abs(grouped).max(1, keepdims=True)))
    scale = np.exp2(exponent - np.floor(np.log2(float(info.max))))
    scaled = np.clip(grouped / scale, -float(info.max), float(info.max))
    expected = scaled.astype(dtype).astype(np.float32) * scale
    found = dequantized(quantize(weight, format), jnp.float32)
    np.testing.assert_array_equal(found, expected.reshape(weight.shape))


def test_nvfp4_matches_nvidia():
    """The tensor scale brings the largest group to 448; scales of groups and elements are nearest
    (NVIDIA, Pretraining Large Language Models with NVFP4, 2025, appendix B)."""
    weight = random(128, 40)
    array = quantize(weight, NVFP4)
    unit = np.float32(np.abs(weight).max() / np.float32(6 * 448))
    np.testing.assert_allclose(np.asarray(array.tensor_scale), unit, rtol=1e-6)
    unit = np.asarray(array.tensor_scale)
    grouped = groups_of(weight / unit, 16)
    scale = (np.abs(grouped).max(1, keepdims=True) / np.float32(6)).astype(ml_dtypes.float8_e4m3fn)
    scale = scale.astype(np.float32)
    assert scale.max() == 448
    elements = np.clip(grouped / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    expected = (elements * scale * unit).reshape(weight.shape)
    np.testing.assert_allclose(dequantized(array, jnp.float32), expected, rtol=1e-6)


@three
def test_groups_without_extent(format):
    """Zeros, -0 and equal values are preserved; no scale is 0 or NaN."""
    weight = np.zeros((64, 8), np.float32)
    weight[:, 1], weight[:, 2], weight[:32, 3] = -0.0, 0.75, 1.0
    found = np.asarray(dequantized(quantize(weight, format), jnp.float32))
    np.testing.assert_array_equal(found[:, :2], 0)
    np.testing.assert_allclose(found[:, 2:], weight[:, 2:], rtol=0.05)
    none = quantize(np.zeros((64, 8), np.float32), format)
    np.testing.assert_array_equal(dequantized(none, jnp.float32), 0)


@three
def test_the_ends_of_float32(format):
    """Large weights stay finite, and small weights that are accepted keep their accuracy."""
    for size in (3e38, 1e-33):
        weight = (random(64, 8).clip(-4, 4) / 4 * size).astype(np.float32)
        found = np.asarray(dequantized(quantize(weight, format), jnp.float32)).astype(np.float64)
        assert np.isfinite(found).all()
        error = np.linalg.norm(found / size - weight / size) / np.linalg.norm(weight / size)
        assert error < 0.15
    with pytest.raises(ValueError, match=r"need scales below 1\.17549e-38, the minimum of float"):
        quantize(np.full((64, 8), 1.5e-38, np.float32), format)


def test_an_outlier_beyond_the_scales_of_others_raises():
    weight = np.full((64, 8), 1e-6, np.float32)
    weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"1e\+06, is so far from the others that most of"):
        quantize(weight, NVFP4)
    found = dequantized(quantize(weight, MXFP4), jnp.float32)
    np.testing.assert_allclose(found[32:], weight[32:], rtol=0.1)


def array_of(
    codes: np.ndarray, scale: np.ndarray, format: Format, tensor_scale: Any = None
) -> QuantizedArray:
    """Packs codes. Unlike `from_integers`, it accepts NaN scales."""
    stored = codes if format.codebook is not None else codes.astype(np.int32) + 2**format.bits // 2
    return from_codes(stored, scale.view(format.scale_dtype), None, format, tensor_scale)


def rows_of_the_identity(array: QuantizedArray, backend: str, dtype: Any) -> list[np.ndarray]:
    """The weights from products with small and large M, which use different kernel paths."""
    identity = jnp.eye(array.k, dtype=dtype)
    found = []
    for rows in (1, 8, array.k):
        parts = np.split(np.asarray(identity), array.k // rows)
        products = [matmul(part, array, backend=backend) for part in parts]
        found.append(np.concatenate(products).astype(np.float32))
    return found


# Kernels build tables for groups of 32 and 64 rows, not of 16.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", [MXFP4, MXFP4.replace(group_size=64), *OTHERS], ids=format_name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_of_powers_of_two(format, dtype, backend):
    """2^(code - 127), including subnormal float32 values; 255 is NaN."""
    columns = np.array([0, 1, 2, 126, 127, 238, 254, 255], np.uint8)
    codes = np.arange(64)[:, None].repeat(8, 1) + 60  # 8-bit codes up to the last finite one
    if format.codebook is None:
        numbers, codes = np.arange(128.0), codes.astype(np.int8)
    else:
        numbers, codes = np.array(format.values), (codes % 2**format.bits).astype(np.uint8)
    groups = 64 // format.group_size
    array = array_of(codes, columns[None].repeat(groups, 0), format)
    with np.errstate(over="ignore"):
        expected = (numbers[codes] * 2.0 ** (columns - 127.0)).astype(np.float32)
    expected[np.abs(expected) < 2.0**-126] = 0  # as float32 units flush them
    expected[:, 7] = np.nan
    found = np.asarray(dequantized(array, jnp.float32))
    np.testing.assert_array_equal(found, expected)
    assert found[:, 0].any()
    for found in rows_of_the_identity(array, backend, dtype):
        np.testing.assert_array_equal(found[:, :6], expected[:, :6])
        assert np.isnan(found[:, 7]).all()


@pytest.mark.parametrize("first", [1, 247 - 32])
@pytest.mark.parametrize("format", [MXFP8, E5M2], ids=format_name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_of_8_bit_floats_with_small_and_large_scales(format, backend, first):
    """No weight is subnormal or infinite, so results are exact."""
    columns = np.arange(first, first + 24, dtype=np.uint8)
    codes = np.arange(60, 124, dtype=np.uint8)[:, None].repeat(24, 1)
    array = array_of(codes, columns[None].repeat(2, 0), format)
    exponent = 100 if first == 1 else -100
    expected = np.array(format.values)[codes] * 2.0 ** (columns - 127.0 + exponent)
    for rows in (1, 2, 8, 32, 64):
        lhs = (np.eye(64)[-rows:] * 2.0**exponent).astype(np.float32)
        found = matmul(jnp.asarray(lhs), array, backend=backend)
        np.testing.assert_array_equal(found, expected[-rows:].astype(np.float32))


@pytest.mark.parametrize(
    ("codebook", "outgrown"), [("e4m3", True), ("e5m2", True), ("e2m1", False), (None, False)]
)
def test_products_with_scales_beyond_float16(codebook, outgrown):
    """In units of the tensor scale, weights near 1 are up to 448 times the largest number."""
    format = Format(4 if codebook == "e2m1" else 8, 32, codebook=codebook, scale="e4m3")
    array = quantize(random(256, 70), format)
    lhs = jnp.asarray(random(9, 256, seed=1)).astype(jnp.float16)
    oracle = Oracle.of(lhs, dequantize(array))
    for backend in BACKENDS:
        found = matmul(lhs, array, backend=backend)
        assert_within(found, oracle.exact, oracle.bound(jnp.float16))
        cotangent = jax.grad(lambda x, b=backend: matmul(x, array, backend=b).sum())(lhs)
        assert cotangent.dtype == jnp.float16 and bool(jnp.isfinite(cotangent).all())
    assert format.outgrows_float16 == outgrown
    reason = registry.unsupported("cuda", jnp.dtype("float16"), format, built=False)
    assert (reason is not None) == outgrown
    assert registry.unsupported("cuda", jnp.dtype("bfloat16"), format, built=False) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_of_8_bit_floats(dtype, backend):
    """Subnormal codes, the largest, and both NaNs, with signs."""
    columns = np.array([[0, 1, 7, 8, 0x7E, 0x81, 0x8F, 0x7F, 0xFF]], np.uint8)
    codes = np.arange(16, dtype=np.uint8)[:, None].repeat(9, 1)
    array = array_of(codes, columns, NVFP4, tensor_scale=np.float32(0.375))
    values = columns.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    expected = np.array(NVFP4.values, np.float32)[codes] * values * np.float32(0.375)
    np.testing.assert_array_equal(dequantized(array, jnp.float32), expected)
    assert np.isnan(expected).all(0).tolist() == [False] * 7 + [True] * 2
    for found in rows_of_the_identity(array, backend, dtype):
        np.testing.assert_array_equal(found, expected)


@two
def test_existing_tensors_are_packed(format):
    """Packs codes with scale bits, or with scales of the scale dtype, and unpacks them."""
    array = quantize(random(64, 70), format)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**format.bits - 2, (64, 70), np.uint8)
    codes[codes == 127] = 0  # NaN
    bits = rng.integers(100, 126, (64 // format.group_size, 70), np.uint8)
    unit = None if array.tensor_scale is None else 0.5
    pack = functools.partial(QuantizedArray.from_integers, format=format, tensor_scale=unit)
    given = jax.jit(pack)(codes, bits)
    again = jax.jit(pack)(codes, bits.view(format.scale_dtype))
    assert jax.tree.structure(given) == jax.tree.structure(array)
    np.testing.assert_array_equal(given.scale.view(jnp.uint8), again.scale.view(jnp.uint8))
    scale = bits.view(format.scale_dtype).astype(np.float32).repeat(format.group_size, 0)
    expected = np.array(format.values, np.float32)[codes] * scale * (unit or 1)
    np.testing.assert_array_equal(dequantized(given, jnp.float32), expected)
    assert given.dtype == given.dequantize().dtype == jnp.bfloat16


FLOATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@pytest.mark.parametrize(("name", "scales"), [("e4m3", np.float32), ("e5m2", E8M0)])
def test_scales_of_blocks(name, scales):
    """For a stack, with partial last blocks."""
    values = jnp.asarray(random(2, 300, 200)).astype(FLOATS[name])
    scale = jnp.exp2(jnp.asarray(random(2, 3, 2)).round()).astype(scales)
    array = jax.jit(QuantizedArray.from_blocks)(values, scale)
    assert format_name(array.format) == f"{name}-g128" + "-e8m0" * (scales == E8M0)
    spread = np.asarray(scale).astype(np.float32).repeat(128, 1).repeat(128, 2)[:, :300, :200]
    expected = np.asarray(values).astype(np.float32) * spread
    np.testing.assert_array_equal(dequantized(array, jnp.float32), expected)
    pack = functools.partial(QuantizedArray.from_blocks, block_size=(32, 8))
    small = jax.jit(pack)(values[0, :64, :8], scale[0, :2, :1])
    spread = np.asarray(scale)[0, :2, :1].astype(np.float32).repeat(32, 0)
    expected = np.asarray(values)[0, :64, :8].astype(np.float32) * spread
    np.testing.assert_array_equal(dequantized(small, jnp.float32), expected)


def test_leaves():
    """An absent array is no leaf of the tree."""
    assert len(jax.tree.leaves(quantize(random(64, 8), INT4))) == 3
    assert len(jax.tree.leaves(quantize(random(64, 8), MXFP4))) == 3
    array = quantize(random(3, 64, 8), NVFP4)
    leaves, static = array.tree_flatten()
    assert (leaves[-1].shape, leaves[-1].dtype) == ((3,), jnp.float32)
    assert array.nbytes == sum(leaf.nbytes for leaf in leaves if leaf is not None)
    assert QuantizedArray.tree_unflatten(static, leaves).tensor_scale is leaves[-1]


@two
def test_stored_and_exported(format):
    x, array = jnp.asarray(random(3, 64, seed=1)), quantize(random(64, 70), format)
    restored = pickle.loads(pickle.dumps(array))
    np.testing.assert_array_equal(restored == array, True)
    target = quantize(jnp.ones((64, 70)), format)
    restored = serialization.from_bytes(target, serialization.to_bytes(array))
    np.testing.assert_array_equal(restored == array, True)
    exported = jax.export.export(jax.jit(product), disabled_checks=DISABLED_EXPORT_CHECKS)(x, array)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(x, array), x @ array)


def test_transformations():
    stack = quantize(random(2, 64, 64), NVFP4)
    x = jnp.asarray(random(2, 3, 64, seed=1))
    whole = x @ stack
    assert_close(whole, x @ dequantized(stack, jnp.float32))
    assert_close(jax.vmap(product)(x, stack), whole)
    assert_close(jax.vmap(lambda i: x[0] @ stack.select(i))(jnp.arange(2)), x[0] @ stack)
    both = x[0] @ stack[0] @ stack[1]
    assert_close(scan(lambda h, layer: (h @ layer, None), x[0], stack)[0], both)
    assert_close(jax.lax.scan(lambda h, layer: (h @ layer, None), x[0], stack)[0], both)
    found = jax.grad(lambda x: jnp.sum(jnp.sin(x @ stack)))(x)
    floats = dequantized(stack, jnp.float32)
    assert_close(found, jax.grad(lambda x: jnp.sum(jnp.sin(x @ floats)))(x))
    rounded = quantized_matmul(x, stack, lhs_qtype=jnp.int8)
    np.testing.assert_allclose(rounded, whole, atol=0.05 * float(jnp.abs(whole).max()))
    slope = jax.grad(lambda x: quantized_matmul(x, stack, lhs_qtype=jnp.int8).sum())(x)
    assert_close(slope, jax.grad(lambda x: (x @ stack).sum())(x))
    silu = quantized_matmul(x, stack, bias=jnp.ones((2, 64)), activation="silu")
    assert_close(silu, jax.nn.silu(whole + 1))


def test_a_tensor_scale_has_a_derivative():
    array, x = quantize(random(64, 70), NVFP4), jnp.asarray(random(3, 64, seed=1))

    def loss(unit: Any) -> Any:
        return jnp.sum(x @ array._with(tensor_scale=unit))

    found = jax.grad(loss)(array.tensor_scale)
    assert_close(found, loss(array.tensor_scale) / array.tensor_scale)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes(kind):
    """Sharded columns, sharded k, and quantization of a sharded matrix in place."""
    mesh, x = make_mesh(kind), jnp.asarray(random(4, 256, seed=1))
    for name, shards in (("n", (1, 1)), ("k", (4, 1))):
        array = quantize(random(256, 512), NVFP4, shards=shards)
        placed = put(array, mesh, array.partition_spec(mesh, **{name: "b"}))
        out = jax.P() if kind is AxisType.Explicit and name == "k" else None
        multiply = functools.partial(quantized_matmul, out_sharding=out)
        with jax.set_mesh(mesh):
            assert_close(jax.jit(multiply)(x, placed), x @ array)
    sharded = jax.device_put(random(256, 512), jax.NamedSharding(mesh, jax.P(None, "b")))
    with jax.set_mesh(mesh):
        found = quantize(sharded, NVFP4)
    whole = quantize(random(256, 512), NVFP4)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(np.asarray(own), np.asarray(other))


def test_a_part_inside_shard_map():
    mesh, x = make_mesh(AxisType.Auto), jnp.asarray(random(4, 256, seed=1))
    array = quantize(random(256, 128), NVFP4)
    specs = array.partition_spec(mesh, k="b")
    step = jax.shard_map(
        lambda x, part: jax.lax.psum(x @ part, "b"),
        mesh=mesh,
        in_specs=(jax.P(None, "b"), specs),
        out_specs=jax.P(),
    )
    assert_close(jax.jit(step)(x, array), x @ array)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(128, 64, rngs=rngs)
        self.up = nnx.Linear(64, 128, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        return self.up(self.embed(tokens))


@pytest.mark.parametrize("format", [NVFP4, Format(4, 64, scale="int8")], ids=format_name)
def test_layers(format):
    """Layers keep the dtype of their parameters; 8-bit scales do not have it."""
    tokens = jnp.array([3, 1, 4])
    model = Model(nnx.Rngs(0))
    report = jl_nnx.quantize_model(model, {"": format})
    assert f"{format.scale} scales" in str(report) and model(tokens).dtype == jnp.float32
    layers: Any = (model.embed, model.up)
    table, kernel = (layer.kernel for layer in layers)
    rows = jnp.asarray(dequantize(table).value.T[np.asarray(tokens)], jnp.float32)
    assert_close(model.embed(tokens), rows)
    assert_close(model(tokens), rows @ dequantized(kernel, jnp.float32))
    graph, state = nnx.split(model)
    assert_close(nnx.merge(graph, state)(tokens), model(tokens))
    abstract = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    jl_nnx.quantize_model(abstract, {"": format})
    assert jax.tree.structure(nnx.state(abstract)) == jax.tree.structure(state)

    module = nn.Sequential([nn.Embed(128, 64), nn.Dense(128)])
    variables: Any = module.init(jax.random.key(0), tokens)
    quantized, held, _ = jl_linen.quantize_model(module, variables, {"": format}, tokens)
    assert quantized.apply(held, tokens).dtype == jnp.float32
    params = variables["params"]
    floats = dequantized(quantize(params["layers_1"]["kernel"], format), jnp.float32)
    table = dequantized(quantize(params["layers_0"]["embedding"].T, format), jnp.float32)
    assert_close(quantized.apply(held, tokens), table.T[tokens] @ floats)
    dense = jl_linen.QuantizedDense(128, format, param_dtype=jnp.bfloat16, use_bias=False)
    x = jnp.ones((3, 64), jnp.bfloat16)
    out: Any = dense.apply(dense.init(jax.random.key(0), x), x)
    assert out.dtype == jnp.bfloat16


def test_models_raise_before_they_change():
    model = Model(nnx.Rngs(0))
    model.up.kernel[...] = jnp.full((64, 128), 1e-6).at[0, 0].set(1e6)
    with pytest.raises(ValueError, match=r"in up: the largest weight, 1e\+06, is so far from"):
        jl_nnx.quantize_model(model, {"": NVFP4})
    assert isinstance(model.embed, nnx.Embed)


def test_stacked_layers():
    @nnx.vmap
    def make(key: Any) -> Any:
        return jl_nnx.QuantizedLinear(64, 64, format=NVFP4, rngs=nnx.Rngs(key))

    layers = make(jax.random.split(jax.random.key(0), 3))
    assert layers.kernel.tensor_scale.shape == (3,)
    x = jnp.asarray(random(3, 2, 64))
    found = nnx.vmap(lambda layer, x: layer(x))(layers, x)
    assert_close(found, x @ layers.kernel)


@two
def test_kernels_that_read_two_levels(format):
    x, array = jnp.ones((2, 64)), quantize(random(64, 70), format)
    reasons = supported_backends(x, array)
    sentence = "its kernels read scales of 16 or 32 bits, the format has 8-bit ones"
    assert (reasons["cpu"], reasons["pallas"], reasons["xla"]) == (None, sentence, None)
    # Independent of the kernels in this build:
    assert registry.unsupported("cuda", jnp.dtype("bfloat16"), format, built=False) is None
    only_integers = (
        "with float32 lhs the kernels take integers with scales of 16 or 32 bits, and no float "
        "zero or transposed product"
    )
    assert registry.unsupported("cuda", x.dtype, format, built=False) == only_integers
    assert f"codebook e2m1, {format.scale} scales\n" in explain(x, array, device="cpu")
    for tree in (array, nnx.state(jl_nnx.QuantizedLinear(64, 70, format=format, rngs=nnx.Rngs(0)))):
        with pytest.raises(ValueError, match=r"tune: .*(tables are for|has no quantized arrays)"):
            find(tree, [], "bfloat16", excluded=untuned)
    with pytest.raises(ValueError, match="backend 'pallas' cannot compute this product: its kern"):
        quantized_matmul(x, array, backend="pallas")


CODES, BITS = np.zeros((64, 8), np.uint8), np.full((2, 8), 127, np.uint8)
EIGHT, ONE = jnp.ones((64, 8), E4M3), jnp.ones((1, 1))
blocks = QuantizedArray.from_blocks
UNIT: dict[str, Any] = {"tensor_scale": 1.0}


def cast(tree: Any) -> Any:
    """Casts a tree to bfloat16, like a model."""

    def to(x: Any) -> Any:
        return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(to, tree)


WRONG: list[tuple[Any, str]] = [
    (lambda: INT4.replace(scale="e5m2"), r"scale='e5m2' is unknown; it is one of 'e8m0', 'e4m3'"),
    (lambda: Format(4, 32, "integer", scale="e8m0"), "values with 8-bit scales have no zero"),
    (lambda: Format(4, 24, codebook="e2m1", scale="e8m0"), "a positive multiple of 16"),
    (lambda: parse_format("mxfp6"), "names no format; .*'mxfp4', 'mxfp8', 'nvfp4'"),
    (
        lambda: quantize(np.ones((64, 8)), MXFP4, scale_dtype=jnp.float32),
        "scale_dtype is <class 'jax.numpy.float32'>, but the format has e8m0 scales; leave",
    ),
    (
        lambda: QuantizedArray.from_integers(CODES, BITS.astype(np.float32), format=MXFP4),
        "scale is float32, but the format has e8m0 scales, float8_e8m0fnu or their bits, uint8",
    ),
    (
        lambda: QuantizedArray.from_integers(CODES, BITS | 128, format=MXFP4),
        "scale has 16 values that are NaN or infinite",
    ),
    (
        lambda: QuantizedArray.from_integers(CODES, BITS, format=MXFP4, **UNIT),
        "format.scale is 'e8m0', but tensor_scale is given; make the two agree",
    ),
    (
        lambda: QuantizedArray.from_integers(CODES, BITS.repeat(2, 0) - 1, format=NVFP4),
        "format.scale is 'e4m3', but tensor_scale is missing; make the two agree",
    ),
    (
        lambda: QuantizedArray.from_integers(
            CODES, BITS.repeat(2, 0) - 1, format=NVFP4, tensor_scale=np.ones(3)
        ),
        r"tensor_scale is float32\[3\], but it must be one float, or floats of shape \(\)",
    ),
    (
        lambda: QuantizedArray.from_integers(
            CODES, BITS.repeat(2, 0) - 1, format=NVFP4, tensor_scale=np.nan
        ),
        "tensor_scale has 1 values that are NaN",
    ),
    (
        lambda: QuantizedArray(**{**vars(quantize(CODES * 1.0, NVFP4)), "tensor_scale": None}),
        "format.scale is 'e4m3', but the tensor scale is missing; make the two agree",
    ),
    (
        lambda: jnp.ones((1, 64)) @ cast(quantize(CODES * 1.0, MXFP4)),
        "scale is bfloat16, but the format has e8m0 scales, float8_e8m0fnu; a tree with it was",
    ),
    (lambda: blocks(EIGHT.astype(jnp.float32), ONE), "values is float32.*view the bits of a"),
    (lambda: blocks(EIGHT, jnp.ones((1, 2))), r"blocks of 128 x 128 have \(1, 1\); transpose both"),
    (lambda: blocks(EIGHT, ONE.astype(jnp.int32)), "scale is int32, but it must be float, or"),
    (lambda: blocks(EIGHT, ONE.astype(E4M3)), "scale is float8_e4m3fn, but it must be float, or"),
    (lambda: blocks(EIGHT, ONE * jnp.nan), "from_blocks: scale has 1 values that are NaN"),
    (lambda: blocks(EIGHT, np.full((1, 1), 255, np.uint8).view(E8M0)), "scale has 1 values that a"),
    (
        lambda: blocks(EIGHT.at[2, 1].set(jnp.nan), ONE),
        r"1 that represent NaN .* first at \(2, 1\)",
    ),
    (lambda: blocks(EIGHT, jnp.ones((4, 1)), block_size=(18, 8)), "group_size=18, but a group"),
    (
        lambda: blocks(EIGHT, ONE, block_size=(0, 8)),
        r"block_size\[0\] is 0, but it must be the "
        r"rows",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), WRONG)
def test_unsupported_files_raise(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
