"""Several products in one call: their values, and when they lower to one call.

`test_cuda_calls.py` runs them on a GPU.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import JAX_ACTIVATIONS, calls, described, quantize, scaled_matrices
from jax import export
from jax.sharding import AxisType
from meshes import REDUCE, assert_close, collectives, make_mesh, put

import jaxlowbit
from jaxlowbit import (
    INT4,
    NVFP4,
    UINT4,
    Format,
    quantized_block,
    quantized_glu,
    quantized_matmul,
    quantized_matmuls,
    quantized_mlp,
)

P = jax.P
K, F, N = 128, 192, 70
MATMULS, MLP, MATMUL = "quantized_matmuls", "quantized_mlp", "quantized_matmul"
BLOCK, FUSED = "quantized_block", "quantized_matmul_fused"
UNREAD = Format(6, codebook=tuple(range(64)))  # unsupported by GPU kernels


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def normal(*shape, seed=0, dtype="float32"):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values / np.sqrt(shape[-2]), dtype)


LHS = normal(5, K)
QKV = tuple(quantize(normal(K, n, seed=n), UINT4) for n in (F, 64, N))
GATE_UP, DOWN = quantize(normal(2, K, F, seed=1), INT4), quantize(normal(F, N, seed=2), Format(8))


# A block with K features after an attention with F; its down projection returns to K features.
ATTENDED, NORM = normal(5, F, seed=3), 1 + normal(K, 1, seed=4)[:, 0]
OUT, BACK = quantize(normal(F, K, seed=5), UINT4), quantize(normal(F, K, seed=6), Format(8))


def block(attended, x, following=(2 * NORM, QKV), **options):
    return quantized_block(
        attended, x, out=OUT, norm=NORM, gate_up=GATE_UP, down=BACK, following=following, **options
    )


def any_mlp(x: Any, gate_up: Any, down: Any, **options: Any) -> Any:
    return quantized_mlp(x, gate_up=gate_up, down=down, **options)


def mlp(x):
    return any_mlp(x, GATE_UP, DOWN)


def matmuls(x):
    return quantized_matmuls(x, QKV)


def reference(x, gate_up, down, activation=jax.nn.silu):
    gate, up = gate_up.dequantize(jnp.float32)
    return (activation(x @ gate) * (x @ up)) @ down.dequantize(jnp.float32)


def normalize(x, scales):
    scales = scales.reshape((1,) * (x.ndim - 1) + (-1,))
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scales


def block_reference(attended, x, out=OUT):
    x = x + attended @ out.dequantize()
    x = x + reference(normalize(x, NORM), GATE_UP, BACK)
    return x, tuple(normalize(x, 2 * NORM) @ weight.dequantize() for weight in QKV)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(K,), (5, K), (2, 3, K)], ids=str)
def test_several_products_are_each_of_them(shape):
    lhs = normal(5, *shape, dtype="bfloat16")[0]
    for got, rhs in zip(quantized_matmuls(lhs, QKV), QKV, strict=True):
        np.testing.assert_array_equal(got, quantized_matmul(lhs, rhs))
    wide = quantized_matmuls(lhs, list(QKV), preferred_element_type="float32", backend="xla")
    for got, rhs in zip(wide, QKV, strict=True):
        want = quantized_matmul(lhs, rhs, preferred_element_type=jnp.float32, backend="xla")
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_block_of_rounded_rows_is_its_products(dtype):
    """Compares values and derivatives of both residual streams."""
    product = functools.partial(quantized_matmul, lhs_qtype=dtype)

    def composed(attended, x):
        x = x + product(attended, OUT)
        normed = normalize(x, NORM)
        gate, up = (product(normed, GATE_UP.select(i)) for i in range(2))
        x = x + product(jax.nn.silu(gate) * up, BACK)
        normed = normalize(x, 2 * NORM)
        return x, tuple(product(normed, weight) for weight in QKV)

    rounded = functools.partial(block, lhs_qtype=dtype)
    got, pullback = jax.vjp(rounded, ATTENDED, LHS)
    want, expected = jax.vjp(composed, ATTENDED, LHS)
    jax.tree.map(assert_close, (got, pullback(want)), (want, expected(want)))
    assert not np.array_equal(got[0], block(ATTENDED, LHS)[0])


@pytest.mark.parametrize("name", [*filter(None, JAX_ACTIVATIONS)])
def test_mlp(name):
    lhs = normal(2, 3, K)
    got = quantized_mlp(lhs, gate_up=GATE_UP, down=DOWN, activation=name)
    assert_close(got, reference(lhs, GATE_UP, DOWN, JAX_ACTIVATIONS[name]))
    assert_close(quantized_mlp(lhs[0, 0], gate_up=GATE_UP, down=DOWN, activation=name), got[0, 0])


def test_mlp_rounds_to_the_dtype_of_lhs():
    lhs = LHS.astype(jnp.bfloat16)
    wide = functools.partial(quantized_matmul, preferred_element_type=jnp.float32)
    gate, up = (wide(lhs, weight) for weight in GATE_UP)
    hidden = (jax.nn.silu(gate) * up).astype(jnp.bfloat16)
    assert_close(
        quantized_mlp(lhs, gate_up=GATE_UP, down=DOWN, preferred_element_type=jnp.float32),
        quantized_matmul(hidden, DOWN, preferred_element_type=jnp.float32),
    )
    assert mlp(lhs).dtype == jnp.bfloat16


@pytest.mark.parametrize("lead", [(), (5,), (5, 1)], ids=str)
def test_block(lead):
    attended, x = ATTENDED.reshape(5, -1)[: math.prod(lead)], LHS[: math.prod(lead)]
    attended, x = attended.reshape(*lead, F), x.reshape(*lead, K)
    got, want = block(attended, x), block_reference(attended, x)
    assert_close(got, want)
    assert_close(block(attended, x, following=None), want[0])
    half_way = block(half(attended), half(x))
    assert {y.dtype for y in jax.tree.leaves(half_way)} == {jnp.dtype("float16")}


def test_permuted_rows_and_shards():
    order = jnp.asarray(np.random.default_rng(0).permutation(K), jnp.int32)
    permuted = jaxlowbit.quantize(normal(K, F), INT4, permutation=order)
    got, _ = quantized_matmuls(LHS, (permuted, GATE_UP[0]))
    assert_close(got, LHS @ permuted)
    gate_up = quantize(normal(2, K, F), INT4, shards=(1, 2))
    down = quantize(normal(F, N), INT4, shards=(2, 1))
    assert_close(quantized_mlp(LHS, gate_up=gate_up, down=down), reference(LHS, gate_up, down))


# --- transformations ------------------------------------------------------------------------------


def test_gradients():
    def loss(f):
        return lambda x, s, t: jnp.sum(
            jnp.sin(
                f(
                    x,
                    dataclasses.replace(GATE_UP, scale=s),
                    dataclasses.replace(DOWN, scale=t),
                )
            )
        )

    args = LHS, GATE_UP.scale, DOWN.scale
    assert_close(
        jax.jit(jax.grad(loss(any_mlp), (0, 1, 2)))(*args),
        jax.jit(jax.grad(loss(reference), (0, 1, 2)))(*args),
    )


def test_gradients_of_a_block():
    def loss(f):
        def total(attended, x, scale):
            x, products = f(attended, x, dataclasses.replace(OUT, scale=scale))
            return jnp.sum(jnp.sin(x)) + sum(jnp.sum(jnp.sin(y)) for y in products)

        return total

    def call(attended, x, out):
        following = 2 * NORM, QKV
        return quantized_block(
            attended, x, out=out, norm=NORM, gate_up=GATE_UP, down=BACK, following=following
        )

    args = ATTENDED, LHS, OUT.scale
    assert_close(
        jax.jit(jax.grad(loss(call), (0, 1, 2)))(*args),
        jax.jit(jax.grad(loss(block_reference), (0, 1, 2)))(*args),
    )


def test_forward_mode_of_several_products():
    got, dots = jax.jvp(matmuls, (LHS,), (LHS + 1,))
    assert_close(got, [LHS @ rhs for rhs in QKV])
    assert_close(dots, [(LHS + 1) @ rhs for rhs in QKV])


def test_vmap():
    lhs = normal(5, 4, K)
    np.testing.assert_array_equal(jax.vmap(mlp, in_axes=1, out_axes=1)(lhs), mlp(lhs))
    stacks = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (GATE_UP, DOWN))
    got = jax.vmap(any_mlp)(lhs[:2], *stacks)
    assert_close(got, mlp(lhs[:2]))


def test_vmap_of_a_block():
    attended, x = normal(4, 5, F), normal(5, K)
    got = jax.vmap(block, in_axes=(0, None))(attended, x)
    assert_close(got, block_reference(attended, jnp.broadcast_to(x, (4, 5, K))))


# --- one call -------------------------------------------------------------------------------------


def test_results_of_one_call_in_float32(cuda):
    def f(x):
        wide = functools.partial(quantized_matmuls, preferred_element_type=jnp.float32)
        return wide(x, QKV[:1])[0], quantized_mlp(
            x, gate_up=GATE_UP, down=DOWN, preferred_element_type="float32"
        )

    text = jax.jit(f).trace(half()).lower(lowering_platforms=("cuda",)).as_text()
    assert f"tensor<1x5x{F}xf32>" in text and f"tensor<1x5x{N}xf32>" in text
    assert f"tensor<1x5x{F}xf16>" in text


def half(x=LHS):
    return x.astype(jnp.float16)


def test_one_call_for_cuda(cuda):
    assert calls(matmuls, half()) == [MATMULS]
    assert calls(mlp, half()) == [MLP]
    assert calls(jax.vmap(mlp), half()) == [MLP]
    assert calls(mlp, half(), platform="cpu") == [MATMUL] * 2
    assert calls(mlp, half()[:0]) == []
    assert calls(block, half(ATTENDED), half()) == [BLOCK]
    assert calls(jax.vmap(block, (0, None)), half(ATTENDED), half()[0]) == [BLOCK]
    assert calls(block, ATTENDED, LHS) == [MATMUL] * 6


UNITS = [NVFP4, Format(4, 64, scale="int8")]


def of_units(format):
    """Functions of weights with tensor scales and their operands, by the target they lower to."""
    shapes = {"q": (K, N), "pair": (2, K, F), "out": (F, K), "down": (F, K)}
    w = {name: quantize(normal(*shape), format) for name, shape in shapes.items()}
    x, attended = LHS.astype(jnp.bfloat16), ATTENDED.astype(jnp.bfloat16)
    bias = normal(N, 1)[:, 0]
    return {
        MATMULS: (lambda x, w: quantized_matmuls(x, (w["q"], w["q"])), x, w),
        MLP: (lambda x, w: quantized_mlp(x, gate_up=w["pair"], down=w["down"]), x, w),
        FUSED: (lambda x, w: quantized_matmul(x, w["q"], bias=bias), x, w),
        FUSED + " gated": (lambda x, w: quantized_glu(x, w["pair"]), x, w),
        BLOCK: (
            lambda x, w: quantized_block(
                x,
                LHS.astype(jnp.bfloat16),
                out=w["out"],
                norm=NORM,
                gate_up=w["pair"],
                down=w["down"],
                following=(NORM, (w["q"], w["q"])),
            ),
            attended,
            w,
        ),
    }


@pytest.mark.parametrize("format", UNITS, ids=str)
@pytest.mark.parametrize("name", [MATMULS, MLP, FUSED, FUSED + " gated", BLOCK])
def test_tensor_scales_are_operands_of_one_call(cuda, name, format):
    """They are passed in their stored shape."""
    f, *operands = of_units(format)[name]
    assert calls(f, *operands) == [name.split()[0]]
    text = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    n = (F if name in (MLP, BLOCK) or "gated" in name else N,) if format.scales_channels else ()
    leading = 1 if n == (N,) or name in (MATMULS, FUSED) else 2
    shape = "x".join(map(str, (leading, *n)))
    assert f"tensor<{shape}xf32>" in described(text)[0].operands


@pytest.mark.parametrize("format", UNITS, ids=str)
def test_one_call_has_correct_derivatives_and_batches(format):
    """Checks values, derivatives of a tensor scale and a batch over weights."""
    gate_up, down = quantize(normal(2, K, F), format), quantize(normal(F, N), format)

    def f(unit):
        return quantized_mlp(LHS, gate_up=gate_up._with(tensor_scale=unit), down=down)

    unit: Any = scaled_matrices(gate_up, [2, 3]).tensor_scale
    assert_close(f(unit), reference(LHS, gate_up._with(tensor_scale=unit), down))
    slope = jax.grad(lambda unit: jnp.sum(jnp.sin(f(unit))))(unit)

    def exact(unit):
        return jnp.sum(jnp.sin(reference(LHS, gate_up._with(tensor_scale=unit), down)))

    assert_close(slope, jax.grad(exact)(unit))
    both = jax.tree.map(lambda x: jnp.stack([x, x]), gate_up)
    both = both._with(tensor_scale=jnp.stack([unit, 2 * unit]))
    got = jax.vmap(lambda pair: quantized_mlp(LHS, gate_up=pair, down=down))(both)
    assert_close(got[1], reference(LHS, both[1], down))


def test_one_call_for_each_layer_of_a_scan(cuda):
    stack = quantize(normal(6, K, F), INT4)

    def layer(x, i):
        gate_up = stack.select(jnp.stack([2 * i, 2 * i + 1]))
        (y,) = quantized_matmuls(x, (stack.select(i),))
        return x, (quantized_mlp(x, gate_up=gate_up, down=DOWN), y)

    def layers(x):
        return jax.lax.scan(layer, x, jnp.arange(3))[1]

    assert sorted(calls(layers, half())) == [MATMULS, MLP]
    hidden, products = layers(LHS)
    assert_close(hidden[2], reference(LHS, stack[4:], DOWN))
    assert_close(products[1], LHS @ stack[1])


@pytest.mark.parametrize(
    ("f", "x", "count"),
    [
        (mlp, LHS, 2),
        (jax.grad(lambda x: mlp(x).sum()), half(), 3),
        (lambda x: quantized_mlp(x, gate_up=GATE_UP, down=DOWN, backend="xla"), half(), 0),
        (lambda x: quantized_matmuls(x, [jaxlowbit.quantize(normal(K, N), UNREAD)]), half(), 0),
        (
            lambda x: quantized_mlp(
                x, gate_up=jaxlowbit.quantize(normal(2, K, F), INT4, shards=(1, 2)), down=DOWN
            ),
            half(),
            2,
        ),
    ],
    ids=["float32", "gradient", "backend", "no kernel", "shards"],
)
@pytest.mark.ways("f")
def test_a_call_for_each_product_otherwise(cuda, f, x, count):
    assert calls(f, x) == [MATMUL] * count


def test_export(cuda):
    (m,) = export.symbolic_shape("m")
    exported = export.export(
        jax.jit(mlp),
        platforms=["cpu", "cuda"],
        disabled_checks=jaxlowbit.DISABLED_EXPORT_CHECKS,
    )(jax.ShapeDtypeStruct((m, K), jnp.float16))
    np.testing.assert_array_equal(exported.call(half()), mlp(half()))


# --- meshes ---------------------------------------------------------------------------------------


def sharded(mesh):
    """Tensor parallel weights, and lhs sharded by rows."""
    down = quantize(normal(4 * K, N, seed=2), INT4, shards=(4, 1))
    gate_up = quantize(normal(2, K, 4 * K, seed=1), INT4)
    specs = gate_up.partition_spec(mesh, n="b"), down.partition_spec(mesh, k="b")
    arrays = (normal(8, K), gate_up, down)
    return arrays, put(arrays, mesh, (P("a"), *specs)), (P("a"), *specs)


def test_tensor_parallel_mlp():
    arrays, parts, _ = sharded(make_mesh(AxisType.Auto))
    assert_close(jax.jit(any_mlp)(*parts), reference(*arrays))
    assert collectives(any_mlp, *parts) == [REDUCE]


def test_tensor_parallel_mlp_with_explicit_axes():
    mesh = make_mesh(AxisType.Explicit)
    arrays, parts, _ = sharded(mesh)
    with jax.set_mesh(mesh):
        out = jax.jit(functools.partial(any_mlp, out_sharding=P("a")))(*parts)
        (product,) = quantized_matmuls(parts[0], [parts[1][0]])
    assert_close(out, reference(*arrays))
    assert jax.typeof(product).sharding.spec == P("a", "b")


def test_one_call_inside_shard_map(cuda):
    mesh = make_mesh(AxisType.Auto)
    arrays, parts, specs = sharded(mesh)

    def local(*args):
        return jax.lax.psum(any_mlp(*args), "b")

    f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("a"))
    assert_close(jax.jit(f)(*parts), reference(*arrays))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parts)
    x = jax.ShapeDtypeStruct(parts[0].shape, jnp.bfloat16)
    assert calls(f, x, *shapes[1:]) == [MLP]


# --- errors ---------------------------------------------------------------------------------------


any_matmuls: Any = quantized_matmuls


def any_block(residual, out, norm, gate_up, down):
    return quantized_block(LHS, residual, out=out, norm=norm, gate_up=gate_up, down=down)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda: any_matmuls(LHS, []), "rhss is empty"),
        (
            lambda: any_matmuls(LHS, QKV[0]),
            "rhss is of class QuantizedArray, but it must be a sequence",
        ),
        (lambda: any_matmuls(LHS, [LHS]), r"rhss\[0\] is float32\[5, 128\], but it must be"),
        (lambda: any_matmuls(LHS, [GATE_UP]), r"rhss\[0\] has shape \(2, 128, 192\), but"),
        (lambda: any_matmuls(LHS, [QKV[0], GATE_UP[0]]), r"rhss\[1\] has .* and rhss\[0\]"),
        (lambda: any_matmuls(LHS[:, 1:], QKV), "must be k=128"),
        (lambda: any_matmuls(LHS, QKV, out_sharding=P()), "are on no mesh with Explicit"),
        (lambda: any_mlp(LHS, GATE_UP, DOWN, activation="tanh"), "activation='tanh' is unkn"),
        (lambda: any_mlp(LHS, DOWN, DOWN), r"gate_up has shape \(192, 70\), but it must be two"),
        (
            lambda: any_mlp(LHS, GATE_UP, QKV[0]),
            r"down has .* with f=192, .* \(2, 128, 192\)",
        ),
        (lambda: any_mlp(LHS, GATE_UP, LHS), r"down is float32\[5, 128\], but it"),
        (lambda: any_mlp(LHS, GATE_UP, DOWN, preferred_element_type="int8"), "is int8, but"),
        (lambda: any_mlp(LHS, GATE_UP, DOWN, backend="gpu"), "backend='gpu' is unknown"),
        (lambda: any_block(LHS.astype("bfloat16"), OUT, NORM, GATE_UP, BACK), "have one dtype, an"),
        (
            lambda: quantized_block(1.0, 1.0, out=OUT, norm=NORM, gate_up=GATE_UP, down=BACK),
            "an axis of features",
        ),
        (lambda: any_block(LHS, OUT, NORM, GATE_UP, BACK), r"out has .* so it is \(128, 128\)"),
        (lambda: block(ATTENDED, LHS, (NORM[1:], QKV)), r"following\[0\] has shape \(127,\)"),
        (lambda: block(ATTENDED, LHS, (NORM, [BACK])), r"following\[1\]\[0\] has shape \(192,"),
        (lambda: block(ATTENDED, LHS, (NORM, [LHS])), r"following\[1\]\[0\] is float32\[5, 128\]"),
        (
            lambda: block(ATTENDED, LHS, lhs_qtype="int4"),
            "lhs_qtype is int4, but act",
        ),
        (lambda: mlp(LHS.astype(int)), "activations are float32, bfloat16 or float16"),
    ],
)
def test_errors_are_sentences(f, message):
    with pytest.raises((TypeError, ValueError), match=rf"^quantized_\w+: .*{message}.*\.(\n|$)"):
        f()


def test_another_platform_raises():
    with pytest.raises(ValueError, match="'cuda'"):
        jax.block_until_ready(quantized_mlp(half(), gate_up=GATE_UP, down=DOWN, backend="cuda"))
