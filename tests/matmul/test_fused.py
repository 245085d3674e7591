"""Products with an epilogue: their values, and when the epilogue is part of the kernel.

`test_cuda_calls.py` runs them on a GPU.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import JAX_ACTIVATIONS, Oracle, assert_within, calls, dequantize, finished, quantize
from jax import export
from jax.sharding import AxisType
from meshes import REDUCE, assert_close, collectives, make_mesh, put

import jaxlowbit
from jaxlowbit import INT4, UINT4, Format, quantized_glu, quantized_matmul

P = jax.P
K, N = 128, 192
FUSED, MATMUL = "quantized_matmul_fused", "quantized_matmul"


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def normal(*shape, seed=0, dtype="float32"):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values / (np.sqrt(shape[-2]) if len(shape) > 1 else 1), dtype)


LHS, RHS = 11 * normal(5, K), quantize(normal(K, N, seed=1), UINT4)
BIAS, RESIDUAL = normal(N, seed=2), normal(5, N, seed=3)
PAIR, BIASES = quantize(normal(2, K, N, seed=4), INT4), normal(2, N, seed=5)


def layer(x, rhs, bias, residual, activation: Any = "silu"):
    return quantized_matmul(x, rhs, bias=bias, activation=activation, residual=residual)


def reference(x, rhs, bias, residual, activation="silu"):
    sums = x.astype(jnp.float32) @ rhs.dequantize(x.dtype).astype(jnp.float32)
    bias = bias[..., None, :].astype(jnp.float32)
    return JAX_ACTIVATIONS[activation](sums + jnp.broadcast_to(bias, sums.shape)) + residual


def glu(x, pair, bias):
    return quantized_glu(x, pair, bias=bias)


def glu_reference(x, pair, bias, activation="silu"):
    gate, up = x @ pair.dequantize(jnp.float32) + bias[:, None]
    return JAX_ACTIVATIONS[activation](gate) * up


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", JAX_ACTIVATIONS)
def test_activations(activation):
    want = reference(LHS, RHS, BIAS, RESIDUAL, activation)
    assert_close(layer(LHS, RHS, BIAS, RESIDUAL, activation), want)
    if activation is not None:
        got = quantized_glu(LHS, PAIR, bias=BIASES, activation=activation)
        assert_close(got, glu_reference(LHS, PAIR, BIASES, activation))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_results_are_rounded_once(dtype):
    """Within the bound of one rounding, and equal to the rounded float32 result."""
    lhs, bias = LHS.astype(dtype), BIAS.astype(dtype)
    rhs, pair = (dataclasses.replace(x, scale=x.scale.astype(dtype)) for x in (RHS, PAIR))
    wide = functools.partial(quantized_matmul, preferred_element_type=jnp.float32)
    got = layer(lhs, rhs, bias, RESIDUAL)
    oracle = Oracle.of(lhs, dequantize(rhs))
    epilogue: dict[str, Any] = {"bias": bias, "activation": "silu", "residual": RESIDUAL}
    assert_within(got, *finished(oracle, dtype, **epilogue))
    np.testing.assert_array_equal(got, wide(lhs, rhs, **epilogue).astype(dtype))
    gate, up = (Oracle.of(lhs, dequantize(weight)) for weight in pair)
    out = quantized_glu(lhs, pair, bias=BIASES)
    gated = finished(gate, dtype, bias=BIASES[0], activation="silu", up=(up, BIASES[1]))
    assert out.dtype == dtype
    assert_within(out, *gated)


@pytest.mark.parametrize("lhs", [(K,), (3, K), (2, 3, K), (4, 1, 3, K)], ids=str)
def test_shapes(lhs):
    """A bias has the leading axes of a stack, a residual has the shape of the result."""
    x, stack = normal(7, *lhs)[0], quantize(normal(2, K, N), Format(8))
    for rhs in (RHS, stack):
        sums = x @ rhs
        bias, residual = normal(*rhs.shape[:-2], N), normal(1, *sums.shape)[0]
        at_rows = bias if x.ndim == 1 else bias[..., None, :]
        got = quantized_matmul(x, rhs, bias=bias, residual=residual)
        assert_close(got, sums + jnp.broadcast_to(at_rows, sums.shape) + residual)
    assert quantized_glu(x, PAIR, bias=BIASES).shape == (*lhs[:-1], N)


def test_permuted_rows_and_shards():
    order = jnp.asarray(np.random.default_rng(0).permutation(K), jnp.int32)
    permuted = jaxlowbit.quantize(normal(K, N), INT4, permutation=order)
    sharded = quantize(normal(K, 100), INT4, shards=(2, 4))
    for rhs in (permuted, sharded):
        bias, residual = BIAS[: rhs.n], RESIDUAL[:, : rhs.n]
        assert_close(layer(LHS, rhs, bias, residual), reference(LHS, rhs, bias, residual))


# --- transformations ------------------------------------------------------------------------------


def test_derivatives():
    args = LHS / 11, RHS.scale, BIAS, RESIDUAL

    def loss(f):
        def of(x, scale, bias, residual):
            return jnp.sum(jnp.sin(f(x, with_scale(RHS, scale), bias, residual)))

        return jax.jit(jax.grad(of, (0, 1, 2, 3)))

    assert_close(loss(layer)(*args), loss(reference)(*args))
    glu_args = LHS / 11, PAIR.scale, BIASES

    def glu_loss(f):
        return jax.jit(
            jax.grad(lambda x, s, b: jnp.sum(jnp.sin(f(x, with_scale(PAIR, s), b))), (0, 1, 2))
        )

    assert_close(glu_loss(glu)(*glu_args), glu_loss(glu_reference)(*glu_args))
    dots = LHS + 1, BIAS + 1, RESIDUAL + 1
    tangents = [
        jax.jvp(lambda x, b, r, f=f: f(x, RHS, b, r), (LHS, BIAS, RESIDUAL), dots)
        for f in (layer, reference)
    ]
    assert_close(*tangents)


def with_scale(rhs, scale):
    return dataclasses.replace(rhs, scale=scale)


def test_derivatives_read_packed_weights(cuda):
    """Cotangents have the dtype of lhs, as the transposed product requires."""
    x = LHS.astype(jnp.bfloat16)

    def loss(x):
        return layer(x, RHS, BIAS, RESIDUAL).astype(jnp.float32).sum()

    assert calls(jax.grad(loss), x) == [MATMUL] * 2


def test_vmap(cuda):
    lhs, residual = normal(3, 5, K), normal(5, 3, N)
    want = reference(lhs, RHS, BIAS, jnp.moveaxis(residual, 1, 0))
    batched = jax.vmap(lambda x, r: layer(x, RHS, BIAS, r), (0, 1))
    assert_close(batched(lhs, residual), want)
    half = lhs.astype(jnp.bfloat16), residual
    assert calls(batched, *half) == [FUSED]
    # A shared residual, and a shared lhs.
    assert_close(
        jax.vmap(lambda x: layer(x, RHS, BIAS, RESIDUAL))(lhs),
        reference(lhs, RHS, BIAS, jnp.broadcast_to(RESIDUAL, (3, 5, N))),
    )
    many = jax.vmap(lambda r: layer(LHS, RHS, BIAS, r))(jnp.stack([RESIDUAL, -RESIDUAL]))
    assert_close(many[1], reference(LHS, RHS, BIAS, -RESIDUAL))
    pairs = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), PAIR)
    got = jax.vmap(glu, (None, 0, None))(LHS, pairs, BIASES)
    assert_close(got[1], glu_reference(LHS, PAIR, BIASES))
    stack = quantize(normal(2, K, N), INT4)
    got = jax.vmap(lambda x: quantized_matmul(x, stack, bias=BIASES))(normal(2, 3, K))
    assert_close(got, jnp.stack([x @ stack + BIASES[:, None] for x in normal(2, 3, K)]))


# --- one call -------------------------------------------------------------------------------------


def test_one_call_for_cuda(cuda):
    x, stack = LHS.astype(jnp.float16), quantize(normal(4, K, N), INT4)
    epilogue = {"bias": BIAS, "activation": "gelu", "residual": RESIDUAL}
    matmul = functools.partial(quantized_matmul, **epilogue)
    assert calls(matmul, x, RHS) == [FUSED]
    assert calls(lambda x: quantized_glu(x, stack.select(jnp.array([2, 3]))), x) == [FUSED]
    batched = functools.partial(quantized_matmul, bias=normal(4, N))
    assert calls(batched, jnp.stack([x] * 4), stack) == [FUSED]
    assert calls(batched, x, stack) == [FUSED]
    for other in (
        lambda x: quantized_matmul(x, RHS),
        lambda x: quantized_matmul(x.astype(jnp.float32), RHS, **epilogue),
        lambda x: batched(jnp.stack([x] * 3)[:, None], stack),
    ):
        assert calls(other, x) == [MATMUL]
    assert calls(matmul, x, RHS, platform="cpu") == [MATMUL]
    assert calls(lambda x: quantized_matmul(x, RHS, bias=BIAS), x[:0]) == []


def test_export(cuda):
    (m,) = export.symbolic_shape("m")

    def both(x, residual):
        out = quantized_matmul(x, RHS, bias=BIAS, residual=residual)
        return out, quantized_glu(x, PAIR)

    exported = export.export(
        jax.jit(both),
        platforms=["cpu", "cuda"],
        disabled_checks=jaxlowbit.DISABLED_EXPORT_CHECKS,
    )(jax.ShapeDtypeStruct((m, K), jnp.float16), jax.ShapeDtypeStruct((m, N), jnp.float32))
    args = LHS.astype(jnp.float16), RESIDUAL
    for got, want in zip(exported.call(*args), both(*args), strict=True):
        np.testing.assert_array_equal(got, want)


# --- meshes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "n", "sent"), [(None, "b", []), ("b", None, [REDUCE]), ("a", "b", [REDUCE])]
)
@pytest.mark.ways("sent")
def test_auto_mesh(k, n, sent):
    """Partial sums are reduced before the epilogue, which is computed once."""
    mesh = make_mesh(AxisType.Auto)
    lhs, rhs, pair = normal(8, 512), quantize(normal(512, 256), INT4), normal(2, 512, 256)
    bias, residual, pair = normal(256), normal(8, 256), quantize(pair, INT4)
    x, b, r = put((lhs, bias, residual), mesh, (P(None, k), P(n), P(None, n)))
    q = put(rhs, mesh, rhs.partition_spec(mesh, k=k, n=n))
    assert collectives(layer, x, q, b, r) == sent
    assert_close(jax.jit(layer)(x, q, b, r), reference(lhs, rhs, bias, residual))
    both = put(pair, mesh, pair.partition_spec(mesh, k=k, n=n))
    assert collectives(quantized_glu, x, both) == sent
    zeros = jnp.zeros((2, 256))
    assert_close(jax.jit(quantized_glu)(x, both), glu_reference(lhs, pair, zeros))


def test_explicit_mesh():
    mesh = make_mesh(AxisType.Explicit)
    rhs, pair = quantize(normal(512, 256), INT4), quantize(normal(2, 512, 256), INT4)
    lhs, bias, residual = normal(8, 512), normal(256), normal(8, 256)
    with jax.set_mesh(mesh):
        x, r = put((lhs, residual), mesh, (P("a"), P("a", "b")))
        b = jax.device_put(bias, jax.NamedSharding(mesh, P("b")))
        q = put(rhs, mesh, rhs.partition_spec(mesh, n="b"))
        got = jax.jit(layer)(x, q, b, r)
        assert jax.typeof(got).sharding.spec == P("a", "b")
        summed = put(pair, mesh, pair.partition_spec(mesh, k="b"))
        out = jax.jit(lambda *args: quantized_glu(*args, out_sharding=P("a")))(x, summed)
    assert_close(got, reference(lhs, rhs, bias, residual))
    assert_close(out, glu_reference(lhs, pair, jnp.zeros((2, 256))))


def test_one_call_inside_shard_map(cuda):
    mesh = make_mesh(AxisType.Auto)
    rhs = quantize(normal(K, 4 * N), INT4)
    args = normal(8, K), rhs, normal(4 * N), normal(8, 4 * N)
    specs = (P("a"), rhs.partition_spec(mesh, n="b"), P("b"), P("a", "b"))
    f = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("a", "b"))
    assert_close(jax.jit(f)(*put(args, mesh, specs)), reference(*args))
    x, *rest = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    half = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    assert calls(f, half, *rest) == [FUSED]


# --- errors ---------------------------------------------------------------------------------------

any_matmul: Any = quantized_matmul
any_glu: Any = quantized_glu


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda: any_matmul(LHS, RHS, activation="tanh"), "activation='tanh' .* 'relu', or None"),
        (lambda: any_matmul(LHS, RHS, bias=BIAS[1:]), r"bias has shape \(191,\), .* \(192,\)"),
        (lambda: any_matmul(LHS, RHS, bias=RESIDUAL), r"bias has shape \(5, 192\), but"),
        (
            lambda: any_matmul(LHS, RHS, bias=BIAS.astype(int)),
            "bias is int32, but it must be float32",
        ),
        (lambda: any_matmul(LHS, RHS, residual=BIAS), r"residual .* of the result, \(5, 192\)"),
        (lambda: any_matmul(LHS, RHS, residual=RESIDUAL > 0), "residual is bool, but"),
        (lambda: any_matmul(LHS[:, 1:], RHS, bias=BIAS), "must be k=128"),
        (lambda: any_matmul(LHS, RHS, bias=BIAS, out_sharding=P()), "are on no mesh with Expl"),
        (lambda: any_glu(LHS, LHS), "gate_up is float32.*, but it must be a QuantizedArray"),
        (lambda: any_glu(LHS, RHS), r"gate_up has shape \(128, 192\), but it must be two matrices"),
        (lambda: any_glu(LHS, PAIR, bias=BIAS), r"bias has shape \(192,\), but .* \(2, 192\)"),
        (lambda: any_glu(LHS, PAIR, activation=None), "activation=None .* 'relu'"),
        (lambda: any_glu(LHS, PAIR, preferred_element_type="int8"), "is int8, but"),
        (lambda: any_glu(LHS.astype(int), PAIR), "activations are float32, bfloat16 or float16"),
    ],
)
def test_errors_are_sentences(f, message):
    with pytest.raises((TypeError, ValueError), match=rf"^quantized_\w+: .*{message}.*\.(\n|$)"):
        f()
