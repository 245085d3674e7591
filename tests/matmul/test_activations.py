"""Quantized activations: rounding, products and errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Oracle, call_names, calls, dequantize, dequantized, described
from pairwise import pairwise

from jaxlowbit import (
    DISABLED_EXPORT_CHECKS,
    FP8,
    INT4,
    INT8,
    MXFP4,
    MXFP8,
    NF4,
    NVFP4,
    Format,
    QuantizedActivations,
    QuantizedArray,
    quantize,
    quantize_activations,
    quantized_glu,
    quantized_matmul,
    quantized_matmuls,
    quantized_mlp,
    supported_backends,
)
from jaxlowbit._backends import extension
from jaxlowbit._backends.target import Target
from jaxlowbit._matmul import quantized_lhs
from jaxlowbit._matmul.options import Options
from jaxlowbit.quantizers import smoothing_factor

DTYPES = (jnp.int8, jnp.float8_e4m3fn)
FLOATS = ("float32", "bfloat16", "float16")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=("int8", "float8"))


def activations(shape: tuple[int, ...] = (5, 100), dtype: str = "float32", seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def weight(k: int = 100, n: int = 70, format: Any = INT4, dtype: str = "float32") -> Any:
    return quantize(activations((k, n), dtype, seed=1), format)


@dtypes
@pytest.mark.parametrize("kind", FLOATS)
def test_every_value_is_the_nearest(dtype, kind):
    x = activations((7, 300), kind) * 3
    found = quantize_activations(x, dtype)
    assert (found.shape, found.dtype, found.values.dtype) == (x.shape, kind, dtype)
    exact = np.asarray(x).astype(np.float64)
    scale = np.asarray(found.scale).astype(np.float64)
    most = 127 if dtype == jnp.int8 else 448
    np.testing.assert_allclose(scale, np.abs(exact).max(-1, keepdims=True) / most, rtol=2e-7)
    values = np.arange(-127.0, 128) if dtype == jnp.int8 else _all_floats()
    best = np.abs(exact[..., None] / scale[..., None] - values).min(-1)
    missed = np.abs(np.asarray(found.values).astype(np.float64) - exact / scale)
    assert (missed <= best + 1e-4).all()
    floats = np.asarray(found.values).astype(np.float32) * np.asarray(found.scale)
    np.testing.assert_array_equal(found.dequantize(jnp.float32), floats)


def _all_floats() -> np.ndarray:
    values = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
    return values[np.isfinite(values)]


@dtypes
def test_tokens_of_zeros_and_without_digits(dtype):
    x = jnp.zeros((5, 64)).at[1, 3].set(jnp.nan).at[2, 0].set(-jnp.inf).at[3].set(1e-40)
    x = x.at[4].set(3e38)
    found = quantize_activations(x, dtype)
    assert (np.asarray(found.scale)[[0, 3]] > 0).all() and found.scale[0, 0] == 1
    products = np.asarray(found @ weight(64))
    np.testing.assert_array_equal(products[0], 0)
    assert np.isnan(products[1:3]).all()
    assert np.isfinite(products[3]).all()
    np.testing.assert_allclose(found.dequantize()[4], x[4], rtol=1e-6)
    minus = quantize_activations(jnp.full((5, 64), -0.0), dtype)
    assert (np.asarray(minus.scale) == 1).all()
    np.testing.assert_array_equal(minus.values.astype(jnp.float32), 0)


def test_long_tokens_without_digits():
    x = activations((3, 4096)).at[1, 2048].set(jnp.nan)
    found = np.isnan(np.asarray(quantize_activations(x).scale))
    np.testing.assert_array_equal(found, [[False], [True], [False]])


@pytest.mark.parametrize(
    ("format", "kind", "dtype"), pairwise([INT4, NF4, Format(8, 32, "float")], FLOATS, DTYPES)
)
def test_products_are_within_the_bound(dtype, format, kind):
    """Values are exact in bfloat16; their scales round twice in float32."""
    x, rhs = activations((5, 100), kind), weight(format=format, dtype=kind)
    lhs = quantize_activations(x, dtype)
    values = lhs.values.astype(jnp.bfloat16)
    oracle = Oracle.of(values, dequantize(rhs))
    scale = np.asarray(lhs.scale).astype(np.float64)
    exact = oracle.exact * scale
    bound = oracle.bound(jnp.float32) * scale
    bound += float(jnp.finfo(kind).eps) * (np.abs(exact) + bound) + float(jnp.finfo(kind).tiny)
    for found in (lhs @ rhs, quantized_matmul(x, rhs, lhs_qtype=dtype)):
        assert found.dtype == kind
        assert (np.abs(np.asarray(found).astype(np.float64) - exact) <= bound).all()
    wide = quantized_matmul(lhs, rhs, preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32


@dtypes
def test_identity_gives_the_weights(dtype):
    """Each token has a single value, and weights are exact in bfloat16."""
    values = np.random.default_rng(0).integers(-128, 128, (64, 64), np.int8)
    rhs = QuantizedArray.from_integers(values, jnp.full((1, 64), 0.25), format=Format(8))
    exact = dequantized(rhs, jnp.float32)
    lhs = QuantizedActivations(jnp.eye(64).astype(dtype), jnp.full((64, 1), 0.5), jnp.float32)
    np.testing.assert_array_equal(lhs @ rhs, 0.5 * exact)


@dtypes
def test_an_epilogue_follows_the_scales(dtype):
    x, rhs = activations(), weight()
    bias, residual = activations((70,), seed=3), activations((5, 70), seed=4)
    options: dict[str, Any] = {"bias": bias, "activation": "silu", "residual": residual}
    plain = quantized_matmul(x, rhs, lhs_qtype=dtype)
    expected = jax.nn.silu(plain + bias[None]) + residual
    found = quantized_matmul(x, rhs, lhs_qtype=dtype, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    given = quantized_matmul(quantize_activations(x, dtype), rhs, **options)
    np.testing.assert_array_equal(given, found)


@dtypes
def test_rows_mapped_together_with_a_stack(dtype):
    """Every matrix multiplies the mapped rows, even if both have the same count."""
    stack = quantize(activations((3, 64, 70), seed=2), INT4)
    x = activations((3, 5, 64))

    def product(x: Any) -> Any:
        return quantized_matmul(x, stack, lhs_qtype=dtype)

    each = jnp.stack([product(rows) for rows in x])
    assert each.shape == (3, 3, 5, 70)
    np.testing.assert_allclose(jax.vmap(product)(x), each, rtol=1e-5, atol=1e-5)


@dtypes
def test_derivatives_pass_the_rounding(dtype):
    """Gradients of activations and scales equal the gradients for dequantized activations."""
    x, rhs = activations((3, 64)), weight(64, 64)

    def found(x, scale):
        product = quantized_matmul(x, rhs._with(scale=scale), lhs_qtype=dtype)
        return jnp.sum(jnp.sin(product))

    rounded = quantize_activations(x, dtype).dequantize()
    inner = quantized_matmul(x, rhs, lhs_qtype=dtype)
    along = jnp.cos(inner)  # cotangent of sin

    def expected(x, scale):
        return jnp.sum((x @ rhs._with(scale=scale)) * along)

    own = jax.grad(found, (0, 1))(x, rhs.scale)
    others = jax.grad(expected, (0, 1))(rounded, rhs.scale)
    for a, b in zip(own, others, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2 * float(jnp.abs(b).max()))
    tangent = activations((3, 64), seed=5)
    moved = jax.jvp(lambda x: quantized_matmul(x, rhs, lhs_qtype=dtype), (x,), (tangent,))[1]
    np.testing.assert_allclose(moved, tangent @ rhs, rtol=1e-5, atol=1e-5)


@dtypes
def test_transformations(dtype):
    """Kernels round weights to bfloat16 depending on M."""
    x, rhs = activations((4, 3, 64)), weight(64)
    whole = quantized_matmul(x, rhs, lhs_qtype=dtype)
    rounding = 2.0**-7 * float(jnp.abs(whole).max())
    product = jax.jit(lambda x, rhs: quantized_matmul(x, rhs, lhs_qtype=dtype))
    np.testing.assert_allclose(product(x, rhs), whole, rtol=0, atol=rounding)
    mapped = jax.vmap(product, (0, None))(x, rhs)
    np.testing.assert_allclose(mapped, whole, rtol=0, atol=rounding)
    stack = quantize(activations((2, 64, 70), seed=2), INT4)
    both = jax.vmap(product, (None, 0))(x[0], stack)
    each = [quantized_matmul(x[0], stack[i], lhs_qtype=dtype) for i in range(2)]
    np.testing.assert_allclose(both, jnp.stack(each), rtol=0, atol=rounding)
    lhs = quantize_activations(x, dtype)
    given = jax.jit(lambda lhs, rhs: lhs @ rhs)(lhs, rhs)
    np.testing.assert_allclose(given, whole, rtol=0, atol=rounding)
    vector = quantized_matmul(x[0, 0], rhs, lhs_qtype=dtype)
    np.testing.assert_allclose(vector, whole[0, 0], rtol=0, atol=rounding)
    assert quantized_matmul(x[:, :0], rhs, lhs_qtype=dtype).shape == (4, 0, 70)
    assert repr(lhs) == f"QuantizedActivations((4, 3, 64), {jnp.dtype(dtype)}, float32)"


# --- rounding inside the call ---------------------------------------------------------------------

ROUNDED, PRODUCT = ["rounded_activations"], ["quantized_matmul"]


@pytest.fixture
def hopper(cuda, monkeypatch):
    """Lowers as if for Hopper GPUs."""
    monkeypatch.setattr(Target, "is_only", lambda *_: True)


def like(*shape: int, dtype: str = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def weight_like(k: int, n: int, format: Any) -> Any:
    return jax.eval_shape(lambda w: quantize(w, format), like(k, n))


def lowered(f: Any, *args: Any) -> str:
    program = jax.jit(lambda *args: f(*args)).trace(*args)
    return program.lower(lowering_platforms=("cuda",)).as_text()


CASES = [("bfloat16", jnp.int8, INT4, "i8"), ("float16", jnp.int8, Format(4), "i8")]
CASES += [("float32", jnp.float8_e4m3fn, FP8, "f8E4M3FN")]


@pytest.mark.parametrize(("kind", "dtype", "format", "name"), CASES)
def test_operands_and_results_of_the_call(hopper, kind, dtype, format, name):
    m, k, n = 200, 1000, 70
    x, rhs = like(2, m // 2, k, dtype=kind), weight_like(k, n, format)
    product = functools.partial(quantized_matmul, lhs_qtype=dtype)
    text = lowered(product, x, rhs)
    (found,) = described(text)
    assert found.name == "rounded_activations"
    letters = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
    out = "f32" if kind == "float16" else letters[kind]
    assert found.operands[0] == f"tensor<1x{m}x{k}x{letters[kind]}>"
    assert found.operands[1].startswith("tensor<1x2x16x")
    results = [f"tensor<1x{m}x{n}x{out}>", f"tensor<1x{m}x1008x{name}>", f"tensor<1x{m}xf32>"]
    assert found.results[:3] == results
    divided = functools.partial(product, lhs_factor=jnp.ones(k))
    (found,) = described(lowered(divided, x, rhs))
    assert found.operands[1] == f"tensor<{k}xf32>"


def test_the_call_rounds_activations(hopper):
    def found(x: Any, rhs: Any, dtype: Any = jnp.int8, **options: Any) -> list[str]:
        product = functools.partial(quantized_matmul, lhs_qtype=dtype, **options)
        return calls(product, x, rhs)

    rhs, channels = weight_like(256, 64, INT4), weight_like(256, 64, Format(4))
    wide = like(192, 256, dtype="float32")
    assert found(wide, rhs) == found(wide, rhs, backend="cuda") == ROUNDED
    odd = weight_like(200, 64, Format(4))
    assert found(like(191, 256), rhs) == found(like(31, 200), odd) == PRODUCT
    assert found(like(32, 256), channels) == found(like(4, 2, 4, 256), channels) == ROUNDED
    assert found(like(192, 256), weight_like(256, 64, NF4)) == PRODUCT
    # Small M is multiplied in bfloat16, for all formats.
    few = [(1, INT4), (32, INT4), (16, INT8), (8, NF4), (16, MXFP8), (1, Format(3, 64, "float"))]
    assert all(found(like(m, 256), weight_like(256, 64, format)) == ROUNDED for m, format in few)
    lacking = [(33, INT4), (17, INT8), (1, Format(4, 48)), (1, NVFP4), (0, INT4)]
    for m, format in lacking:
        assert found(like(m, 256), weight_like(256, 64, format)) == PRODUCT * (m > 0), (m, format)
    assert found(like(192, 256), rhs, jnp.float8_e4m3fn) == PRODUCT
    assert found(like(192, 256), rhs, backend="xla") == []
    epilogue = {"bias": jnp.ones(64, jnp.bfloat16), "activation": "silu"}
    assert found(like(192, 256), rhs, **epilogue) == ROUNDED
    product = functools.partial(quantized_matmul, lhs_qtype=jnp.int8)
    assert calls(jax.vmap(product, (0, None)), like(8, 24, 256), rhs) == ROUNDED
    stack = jax.eval_shape(lambda w: quantize(w, INT4), like(2, 256, 64))
    assert calls(jax.vmap(product, (None, 0)), like(192, 256), stack) == PRODUCT


def test_programs_that_do_not_know_their_gpu_round_apart(cuda):
    product = jax.jit(functools.partial(quantized_matmul, lhs_qtype=jnp.int8))
    exported = jax.export.export(
        product, platforms=["cuda"], disabled_checks=DISABLED_EXPORT_CHECKS
    )
    text = exported(like(256, 256), weight_like(256, 64, INT4)).mlir_module()
    assert call_names(text) == ["quantized_matmul"]


def test_a_mesh_that_divides_k_rounds_whole_tokens(hopper):
    """XLA computes scales across devices; in `jax.shard_map` each device has separate tokens."""
    mesh = jax.make_mesh(
        (2,), ("k",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2]
    )
    x, rhs = outliers((64, 128)), weight(128, 64, INT4.replace(group_size=64))
    placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, "k")))
    words = jax.NamedSharding(mesh, jax.P(None, "k"))
    divided = rhs._with(packed=jax.device_put(rhs.packed, words))
    product = functools.partial(quantized_matmul, lhs_qtype=jnp.int8)
    found = jax.jit(product)(placed, divided)
    np.testing.assert_allclose(found, product(x, rhs), rtol=1e-5, atol=1e-4)
    assert "rounded_activations" not in call_names(lowered(product, placed, divided))
    inner = jax.shard_map(
        product, mesh=mesh, in_specs=(jax.P("k"), jax.P()), out_specs=jax.P("k"), check_vma=False
    )
    rows, whole = like(512, 128), weight_like(128, 64, INT4.replace(group_size=64))
    assert "rounded_activations" in call_names(lowered(inner, rows, whole))


# --- the bound of int32 ---------------------------------------------------------------------------


def test_sums_of_8_bit_products_stay_in_int32(cuda, monkeypatch):
    """Larger K is multiplied in bfloat16, including on Hopper."""
    most = extension.ffi.MAX_K_OF_8_BITS
    assert 128 * 128 * most < 2**31 <= 128 * 128 * (most + 1)
    monkeypatch.setattr(quantized_lhs, "unread", lambda *_: None)
    call, hopper = quantized_lhs.Scaled(None, Options()), Target("cuda", frozenset({90}))
    found = []
    for k in (most, most + 1):
        values = jax.ShapeDtypeStruct((256, k), jnp.int8)
        rhs: Any = jax.eval_shape(lambda k=k: quantize(jnp.ones((k, 64)), Format(8)))
        found.append(call.unsupported((values,), (rhs,), hopper) is None)
    assert found == [True, False]


def test_the_longest_sums_are_right():
    """With every product at its maximum, 2^17 of them reach the limit of int32."""
    k = extension.ffi.MAX_K_OF_8_BITS + 1
    rhs = QuantizedArray.from_integers(
        np.full((k, 64), -128, np.int8), jnp.ones((1, 64)), format=Format(8)
    )
    lhs = QuantizedActivations(jnp.full((1, k), -128, jnp.int8), jnp.ones((1, 1)), jnp.float32)
    np.testing.assert_allclose(lhs @ rhs, 128 * 128 * k, rtol=1e-5)


# --- factors of channels --------------------------------------------------------------------------


def outliers(shape: tuple[int, ...] = (16, 128), seed: int = 0) -> Any:
    """Activations with four channels scaled by 50."""
    return activations(shape, seed=seed).at[:, 3:128:32].multiply(50)


@dtypes
@pytest.mark.parametrize("kind", FLOATS)
def test_a_factor_divides_in_float32_before_the_rounding(dtype, kind):
    x, factor = activations((5, 100), kind), jnp.exp(activations((100,), seed=1))
    found = quantize_activations(x, dtype, factor=factor)
    wide = quantize_activations(x.astype(jnp.float32) / factor[None], dtype)
    assert (found.dtype, found.values.dtype) == (kind, dtype)
    np.testing.assert_array_equal(found.values, wide.values)
    np.testing.assert_array_equal(found.scale, wide.scale)
    rhs, bias = weight(dtype=kind), activations((70,), kind, seed=3)
    options: dict[str, Any] = {"bias": bias, "activation": "relu"}
    whole = quantized_matmul(x, rhs, lhs_qtype=dtype, lhs_factor=factor, **options)
    np.testing.assert_array_equal(whole, quantized_matmul(found, rhs, **options))
    vector = quantize_activations(x[2], dtype, factor=factor)
    np.testing.assert_array_equal(vector.values, found.values[2])


def test_the_factor_matches_smoothquant():
    w = activations((6, 4), seed=1).at[2].set(0)
    absmax = jnp.array([1.0, 100.0, 3.0, 0.0, 1e-40, 3e38])
    rows = np.abs(np.asarray(w)).max(1)
    usual = np.array([0, 1, 5])
    for alpha in (0, 0.25, 0.5, 1):
        found = np.asarray(smoothing_factor(absmax, w, alpha=alpha))
        expected = np.asarray(absmax)[usual] ** alpha / rows[usual] ** (1 - alpha)
        np.testing.assert_allclose(found[usual], expected, rtol=1e-5)
        np.testing.assert_array_equal(found[2:5], 1)  # weights 0, or activations 0 or subnormal
    both = smoothing_factor(absmax[:2], jnp.concatenate([w, 2 * w], axis=1)[:2])
    np.testing.assert_allclose(both, smoothing_factor(absmax[:2], 2 * w[:2]))
    compiled = jax.jit(functools.partial(smoothing_factor, alpha=1))(absmax, w)
    np.testing.assert_allclose(compiled, found, rtol=1e-6)
    tiny = smoothing_factor(jnp.full(2, 2.0**-126), jnp.full((2, 1), 3e38))
    assert (np.asarray(tiny) > 0).all() and np.isfinite(1 / np.asarray(tiny)).all()


def test_outliers_move_into_the_weight():
    x, w = outliers(), activations((128, 96), seed=1)
    factor = smoothing_factor(jnp.max(jnp.abs(x), axis=0), w)
    exact = np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64)

    def error(w: Any, factor: Any) -> float:
        q = quantize(w, Format(8))
        found = quantized_matmul(x, q, lhs_qtype=jnp.int8, lhs_factor=factor)
        return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))

    assert error(w * factor[:, None], factor) < 0.6 * error(w, None)


@dtypes
def test_derivatives_pass_the_rounding_and_the_factor(dtype):
    x, rhs = activations((3, 64)), weight(64, 64)
    factor = jnp.exp(activations((64,), seed=2))

    def found(x, factor, scale):
        array = rhs._with(scale=scale)
        product = quantized_matmul(x, array, lhs_qtype=dtype, lhs_factor=factor)
        return jnp.sum(product * jnp.arange(64.0)[None])

    def expected(x, factor, scale):
        weights = jax.lax.stop_gradient(rhs._with(scale=scale))
        return jnp.sum(((x / factor[None]) @ weights) * jnp.arange(64.0)[None])

    own = jax.jit(jax.grad(found, (0, 1, 2)))(x, factor, rhs.scale)
    others = jax.jit(jax.grad(expected, (0, 1)))(x, factor, rhs.scale)
    for a, b in zip(own[:2], others, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max()))
    rounded = quantize_activations(x, dtype, factor=factor).dequantize()
    scales = jax.grad(lambda x: jnp.sum((rounded @ rhs._with(scale=x)) * jnp.arange(64.0)[None]))
    want = scales(rhs.scale)
    np.testing.assert_allclose(own[2], want, rtol=1e-4, atol=1e-5 * float(jnp.abs(want).max()))


def test_a_factor_on_a_mesh_that_divides_k():
    devices = jax.devices("cpu")[:2]
    mesh = jax.make_mesh((2,), ("k",), (jax.sharding.AxisType.Explicit,), devices=devices)
    x, rhs, factor = outliers(), weight(128, 64, INT4.replace(group_size=64)), jnp.arange(1.0, 129)
    options: dict[str, Any] = {"lhs_qtype": jnp.int8}
    want = quantized_matmul(x, rhs, lhs_factor=factor, **options)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, jax.P(None, "k"))
        for parts in (jax.P(), jax.P("k")):
            given = jax.device_put(factor, parts)
            found = quantized_matmul(placed, rhs, lhs_factor=given, out_sharding=jax.P(), **options)
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-4)


ONES, SCALE = jnp.ones((2, 64), jnp.int8), jnp.ones((2, 1))
WRONG = [
    (lambda: quantize_activations(jnp.ones((2, 64)), jnp.int4), "dtype is int4, but activations"),
    (lambda: quantize_activations(jnp.ones((2, 64), jnp.int32)), "activations are int32"),
    (lambda: quantize_activations(jnp.ones((2, 0))), r"float32\[2, 0\], but they must be"),
    (lambda: quantize_activations(jnp.float32(1)), "k from 1; cast or reshape them"),
    (lambda: QuantizedActivations(jnp.ones((2, 64)), SCALE), "use quantize_activations for floats"),
    (lambda: QuantizedActivations(ONES, SCALE[:1]), r"have float32\[2, 1\], one for each token"),
    (lambda: QuantizedActivations(ONES, SCALE.astype(jnp.bfloat16)), "reshape or cast it"),
    (lambda: QuantizedActivations(ONES, SCALE, jnp.int8), "dtype is int8, but it must be float32"),
    (
        lambda: quantized_matmul(ONES, weight(64), lhs_qtype=jnp.int8),
        "lhs is int8, but activations are",
    ),
    (
        lambda: quantized_matmul(jnp.ones((2, 64)), weight(64), lhs_qtype="int4"),
        "lhs_qtype is int4, but activations are quantized to int8 or float8_e4m3fn",
    ),
    (
        lambda: quantized_matmul(QuantizedActivations(ONES, SCALE), weight(64), lhs_qtype=jnp.int8),
        "lhs is quantized already; leave lhs_qtype out",
    ),
    (
        lambda: quantized_matmul(
            QuantizedActivations(ONES, SCALE), weight(64), lhs_factor=jnp.ones(64)
        ),
        r"lhs_factor is float32\[64\], but lhs is quantized already; leave",
    ),
    (
        lambda: quantized_matmul(SCALE, weight(1), lhs_factor=jnp.ones(1)),
        r"lhs_factor is float32\[1\], but without lhs_qtype nothing is rounded",
    ),
    (
        lambda: quantized_matmul(SCALE, weight(1), lhs_qtype=jnp.int8, lhs_factor=jnp.ones((1, 1))),
        r"lhs_factor is float32\[1, 1\], but it must be floats \(1,\), one for each",
    ),
    (
        lambda: quantize_activations(SCALE, factor=jnp.zeros(1)),
        r"factor has 1 values that are not finite and positive, .* or more, the first at 0 \(0.0\)",
    ),
    (lambda: quantize_activations(SCALE, factor=jnp.full(1, jnp.inf)), "not finite and positive"),
    (lambda: quantize_activations(SCALE, factor=jnp.ones(1, jnp.int32)), "but it must be floats"),
    (lambda: smoothing_factor(SCALE[0], ONES), r"weight is int8\[2, 64\], but it must be float32"),
    (
        lambda: smoothing_factor(SCALE[0], SCALE),
        r"absmax is float32\[1\], but it must be floats "
        r"\(2,\)",
    ),
    (lambda: smoothing_factor(-SCALE[:, 0], SCALE), "absmax has 2 values that are not finite and"),
    (lambda: smoothing_factor(SCALE[:, 0], SCALE * jnp.nan), "weight has 2 values that are NaN"),
    (
        lambda: smoothing_factor(SCALE[:, 0], SCALE, alpha=1.5),
        "alpha is 1.5, but it must be from 0 to 1",
    ),
    (lambda: QuantizedActivations(ONES, SCALE) @ weight(100), r"last axis of lhs must be k=100"),
    (
        lambda: quantized_matmul(
            QuantizedActivations(ONES, SCALE), weight(64), preferred_element_type=jnp.float16
        ),
        "preferred_element_type is float16, but the result has the dtype of lhs",
    ),
    (
        lambda: quantized_matmul(
            QuantizedActivations(ONES, SCALE, jnp.float16),
            weight(64),
            precision=jax.lax.DotAlgorithmPreset.F16_F16_F16,
        ),
        "multiplied in bfloat16 with float32 sums; leave precision out",
    ),
    (
        lambda: quantized_matmul(
            QuantizedActivations(ONES, SCALE), weight(64, format=MXFP4), backend="pallas"
        ),
        "backend 'pallas' cannot compute this product: its kernels read scales of 16 or 32 bits",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), WRONG)
def test_wrong_activations(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_backends_of_quantized_activations():
    """Every format has the same backends as with bfloat16 activations."""
    lhs, floats = quantize_activations(activations()), jnp.ones((5, 100), jnp.bfloat16)
    for format in (INT4, FP8, Format(6, codebook=tuple(range(64)))):
        rhs = weight(format=format)
        assert supported_backends(lhs, rhs) == supported_backends(floats, rhs)
    assert "lhs is int8, but" in str(supported_backends(lhs.values, rhs)["cpu"])


def test_other_products_take_no_quantized_activations():
    lhs, rhs = quantize_activations(activations()), weight()
    pair = quantize(activations((2, 100, 70)), INT4)
    sentence = "lhs is a QuantizedActivations, .*; quantized_matmul takes .* dequantize.. gives"
    for call in (
        lambda: quantized_glu(lhs, pair),
        lambda: quantized_matmuls(lhs, [rhs, rhs]),
        lambda: quantized_mlp(lhs, gate_up=pair, down=weight(70, 100)),
    ):
        with pytest.raises(TypeError, match=sentence):
            call()


def test_values_other_than_arrays_raise():
    with pytest.raises(TypeError, match="activations is 'x', but it must be floats"):
        quantize_activations("x")
    with pytest.raises(TypeError, match="names no dtype"):
        quantize_activations(jnp.ones((2, 64)), 8)
    with pytest.raises(TypeError, match="QuantizedActivations: values is 3"):
        QuantizedActivations(3, SCALE)
