"""Multi-kernel calls and epilogues on a GPU, compared with separate operations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu_problems import ROWS, normal
from helpers import (
    ACTIVATIONS,
    JAX_ACTIVATIONS,
    Oracle,
    assert_within,
    call_names,
    dequantize,
    finished,
    matmul,
    quantize,
)

import jaxlowbit
from jaxlowbit import (
    INT4,
    MXFP4,
    NF4,
    UINT4,
    Format,
    quantized_block,
    quantized_glu,
    quantized_matmul,
    quantized_matmuls,
    quantized_mlp,
)
from jaxlowbit._composite.normalized import normalized_matmuls, normalized_mlp

pytestmark = pytest.mark.gpu

# --- several products in one call -----------------------------------------------------------------

FORMATS = [INT4, UINT4, Format(4, 64, "float"), Format(8, 32, "integer"), NF4, MXFP4]
# Wide enough to select the small-M Hopper kernel for every weight.
WIDE = 1024


def mlp(x, gate_up, down, **options):
    return quantized_mlp(x, gate_up=gate_up, down=down, backend="cuda", **options)


def custom_calls(f, *args):
    text = jax.jit(f).lower(*args).compile().as_text()
    assert text is not None
    return call_names(text)


def mlp_weights(k, f, n, format):
    gate_up = quantize(jnp.stack([normal(k, f, seed=1), 4 * normal(k, f, seed=2)]), format)
    return gate_up, quantize(normal(f, n, seed=3), format)


def assert_is_mlp(got, lhs, gate_up, down, activation=jax.nn.silu):
    """`got` is within the bound for a hidden layer whose elements may be rounded up or down."""
    lhss = jnp.broadcast_to(lhs, (2, *lhs.shape))
    gate, up = matmul(lhss, gate_up, preferred_element_type=jnp.float32, backend="cuda")
    hidden = (activation(gate) * up).astype(lhs.dtype)
    weight = dequantize(down)
    oracle = Oracle.of(hidden, weight)
    ulp = float(ml_dtypes.finfo(lhs.dtype).eps)
    other = ulp * np.abs(np.asarray(hidden, np.float64)) @ np.abs(weight.value)
    assert_within(got, oracle.exact, oracle.bound(got.dtype) + other)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_several_products_in_one_call(format, dtype):
    """More products than fit one launch."""
    rhss = [quantize(normal(1024, n, seed=n), format) for n in (1024, 256, 200, 64, 130)]
    one_call = jax.jit(quantized_matmuls, static_argnames=("preferred_element_type", "backend"))
    for m in ROWS:
        lhs = normal(m, 1024).astype(dtype)
        options = {"preferred_element_type": jnp.float32 if m > 1 else dtype, "backend": "cuda"}
        for got, rhs in zip(one_call(lhs, rhss, **options), rhss, strict=True):
            oracle = Oracle.of(lhs, dequantize(rhs))
            assert_within(got, oracle.exact, oracle.bound(got.dtype))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_mlp_in_one_call(format, dtype):
    gate_up, down = mlp_weights(512, 1600, 512, format)
    for m in ROWS:
        lhs = normal(m, 512).astype(dtype)
        wide = functools.partial(mlp, preferred_element_type=jnp.float32 if m > 1 else None)
        assert_is_mlp(jax.jit(wide)(lhs, gate_up, down), lhs, gate_up, down)


@pytest.mark.parametrize("name", [*filter(None, JAX_ACTIVATIONS)])
def test_activations_of_mlp(name):
    """Sizes without 16-byte alignment, and gates far from zero."""
    gate_up, down = mlp_weights(72, 333, 40, UINT4)
    lhs = 30 * normal(9, 72)
    got = jax.jit(functools.partial(mlp, activation=name))(lhs, gate_up, down)
    assert_is_mlp(got, lhs, gate_up, down, JAX_ACTIVATIONS[name])


def test_programs_contain_one_call_each():
    gate_up, down = mlp_weights(512, 1024, 512, INT4)
    lhs, pair = normal(4, 512), list(gate_up)
    assert custom_calls(mlp, lhs, gate_up, down) == ["quantized_mlp"]
    assert custom_calls(quantized_matmuls, lhs, pair) == ["quantized_matmuls"]
    assert custom_calls(jax.vmap(mlp, (0, None, None)), lhs, gate_up, down) == ["quantized_mlp"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("width", [512, WIDE])
def test_blocks_in_one_call_each(width, m, dtype):
    """Consecutive blocks, replayed from a graph, against our products with XLA for the rest.

    Rounding differs only in a reciprocal square root and an exponential.
    """
    features, layers = 3 * width // 4, []
    for seed in range(3):
        gate_up, down = mlp_weights(width, 1536, width, FORMATS[seed])
        out = quantize(normal(features, width, seed=10 + seed), INT4)
        qkv = [quantize(normal(width, n, seed=n + seed), INT4) for n in (features, 200)]
        # Scales are float32, or rounded to the dtype of the rows.
        norm = (1 + normal(width, 1, seed=seed)[:, 0]).astype(dtype if seed == 1 else jnp.float32)
        layers.append((out, norm, gate_up, down, qkv))

    def steps(backend, x):
        attended = x[:, :features]
        for out, norm, gate_up, down, qkv in layers:
            following = 2 * norm, qkv
            x, (q, k) = quantized_block(
                attended,
                x,
                out=out,
                norm=norm,
                gate_up=gate_up,
                down=down,
                following=following,
                backend=backend,
            )
            attended = q + jnp.tanh(k)[:, :1]
        return x, attended

    def apart(x):
        def products(lhs, weight):
            return matmul(lhs, weight, backend="cuda")

        def normalize(x, scales):
            wide = x.astype(jnp.float32)
            factor = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
            return (wide * factor * scales.astype(jnp.float32)[None]).astype(dtype)

        attended = x[:, :features]
        for out, norm, gate_up, down, qkv in layers:
            x = x + products(attended, out)
            x = x + mlp(normalize(x, norm), gate_up, down)
            q, k = quantized_matmuls(normalize(x, 2 * norm), qkv, backend="cuda")
            attended = q + jnp.tanh(k)[:, :1]
        return x, attended

    lhs = normal(m, width).astype(dtype)
    program = jax.jit(functools.partial(steps, "cuda"))
    assert custom_calls(functools.partial(steps, "cuda"), lhs) == ["quantized_block"] * 3
    first = jax.tree.map(np.asarray, program(lhs))
    for _ in range(20):
        for got, want in zip(program(lhs), first, strict=True):
            assert np.asarray(got).tobytes() == want.tobytes()
    eps = float(ml_dtypes.finfo(dtype).eps)
    for got, want in zip(first, jax.jit(apart)(lhs), strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) <= eps * np.linalg.norm(want)


@pytest.mark.parametrize("addend", ["float32", "that of the rows"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("m", ROWS)
def test_products_of_normalized_rows_in_one_call_each(m, dtype, addend):
    """Against the same products with sum and normalization by XLA."""
    width = 1024
    gate_up, down = mlp_weights(width, 1536, 512, INT4)
    weights = [quantize(normal(width, n, seed=n), INT4) for n in (256, 200)]
    norm = (1 + normal(width, 1)[:, 0]).astype(jnp.float32)
    rows = normal(m, width, seed=1).astype(dtype)
    parts = normal(m, width, seed=2).astype(jnp.float32 if addend == "float32" else dtype)

    def calls(rows, parts):
        options: dict[str, Any] = {"activation": "silu", "epsilon": 1e-5, "dtype": jnp.float32}
        y, out = normalized_mlp(rows, parts, norm, gate_up, down, **options)
        z, products = normalized_matmuls(rows, parts, norm.astype(dtype), weights, epsilon=1e-5)
        return y, out, z, *products

    def apart(rows, parts):
        def normalize(scales):
            wide = y.astype(jnp.float32)
            factor = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
            return (wide * factor * scales.astype(jnp.float32)[None]).astype(dtype)

        y = rows + parts.astype(dtype)
        out = mlp(normalize(norm), gate_up, down, preferred_element_type=jnp.float32)
        products = quantized_matmuls(normalize(norm.astype(dtype)), weights, backend="cuda")
        return y, out, y, *products

    assert custom_calls(calls, rows, parts) == ["normalized", "normalized"]
    eps = float(ml_dtypes.finfo(dtype).eps)
    found, wanted = jax.jit(calls)(rows, parts), jax.jit(apart)(rows, parts)
    for i, (got, want) in enumerate(zip(found, wanted, strict=True)):
        assert got.dtype == want.dtype
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) <= (0 if i in (0, 2) else eps) * np.linalg.norm(want)


@pytest.mark.parametrize(("dtype", "large"), [(jnp.bfloat16, 1e25), (jnp.float16, 4e3)])
@pytest.mark.parametrize("m", [1, 5, 16])
def test_normalizations_of_a_block(m, dtype, large):
    """Rows of zeros, rows large for their dtype, and a NaN, which affects only its row.

    In bfloat16 large rows have infinite squares; in float16 elements times their scales would be
    infinite if they were not normalized first.
    """
    sizes = np.resize([1, 0, 100, large, 1], m)[:, None]
    attended, x = (
        jnp.asarray(sizes * np.sqrt(k) * np.asarray(normal(m, k, seed=k), np.float64), dtype)
        for k in (768, WIDE)
    )
    is_nan = np.arange(m) % 5 == 4
    x = jnp.where(is_nan[:, None] & (np.arange(WIDE) == 3)[None], jnp.asarray(np.nan, dtype), x)
    gate_up, down = mlp_weights(WIDE, 1536, WIDE, INT4)
    out, weight = quantize(normal(768, WIDE, seed=10), INT4), quantize(normal(WIDE, 200), UINT4)
    norm = 1 + normal(WIDE, 1)[:, 0]

    def normalize(rows, scales):
        mean = np.mean(np.square(rows.astype(np.float32)), -1, keepdims=True)
        return rows / np.sqrt(mean + 1e-5) * np.asarray(scales, np.float64)

    block = functools.partial(quantized_block, backend="cuda", following=(32 * norm, [weight]))
    weights = {"out": out, "norm": norm, "gate_up": gate_up, "down": down}
    y, (product,) = jax.jit(block)(attended, x, **weights)
    y, product = np.asarray(y, np.float64), np.asarray(product, np.float64)
    with np.errstate(over="ignore"):
        total = np.asarray(x, np.float64) + np.asarray(attended, np.float64) @ dequantize(out).value
        gate, up = normalize(total, norm) @ dequantize(gate_up).value
        total += gate / (1 + np.exp(-gate)) * up @ dequantize(down).value
        want = normalize(y, 32 * norm) @ dequantize(weight).value
    for rows, exact in ((y, total), (product, want)):
        assert np.isnan(rows[is_nan]).all()
        errors = np.linalg.norm((rows - exact)[~is_nan], axis=-1)
        eps = float(ml_dtypes.finfo(dtype).eps)
        assert (errors <= eps * np.linalg.norm(exact[~is_nan], axis=-1)).all()


@pytest.mark.parametrize("m", ROWS)
def test_mlp_and_one_call_repeat_their_bits(m):
    """Consecutive layers, replayed from a graph: no kernel starts before its inputs are ready."""
    layers = [mlp_weights(512, 1536 + 64 * i, 512, INT4) for i in range(4)]

    def step(call, x):
        for gate_up, down in layers:
            x = x + call(x, gate_up, down)
            gate, up = quantized_matmuls(x, [gate_up.select(0), gate_up.select(1)])
            x = x + (gate + up)[:, :512]
            wide = x.astype(jnp.float32)  # like the scale; rounding it would change every element
            x = (wide / jnp.sqrt(jnp.mean(jnp.square(wide)))).astype(x.dtype)
        return x

    def apart(x, gate_up, down):
        lhss = jnp.broadcast_to(x, (2, *x.shape))
        gate, up = quantized_matmul(lhss, gate_up, preferred_element_type=jnp.float32)
        return (jax.nn.silu(gate) * up).astype(x.dtype) @ down

    lhs = normal(m, 512)
    program = jax.jit(functools.partial(step, mlp))
    first = np.asarray(program(lhs))
    for _ in range(30):
        assert np.asarray(program(lhs)).tobytes() == first.tobytes()
    exact, rounded = (
        np.asarray(jax.jit(functools.partial(step, apart))(x), np.float32)
        for x in (lhs.astype(jnp.float32), lhs)
    )
    # Rounding errors grow from layer to layer, and differ between kernels.
    usual = np.linalg.norm(rounded - exact)
    assert usual < 0.03 * np.linalg.norm(exact)
    assert np.linalg.norm(first.astype(np.float32) - exact) < 1.5 * usual


def test_one_call_waits_for_weights_of_its_program():
    """The first kernel starts after their producer, and the others after the first."""
    lhs = normal(4, 1024)
    pair = jnp.stack([normal(1024, 4096, seed=1), normal(1024, 4096, seed=2)])
    last = normal(4096, 1024, seed=3)

    @jax.jit
    def program(x, pair, last):
        rhss = [jaxlowbit.quantize(last.T * 2**i, INT4) for i in range(3)]
        layer = jaxlowbit.quantize(pair * 1, INT4), jaxlowbit.quantize(last * 1, INT4)
        return mlp(x, *layer), quantized_matmuls(x, rhss), layer, rhss

    for _ in range(5):
        out, products, layer, rhss = program(lhs, pair, last)
        assert_is_mlp(out, lhs, *layer)
        for got, rhs in zip(products, rhss, strict=True):
            oracle = Oracle.of(lhs, dequantize(rhs))
            assert_within(got, oracle.exact, oracle.bound(lhs.dtype))


def test_one_call_reads_the_layers_of_a_stack():
    stack = quantize(normal(6, 512, 1024, seed=1), INT4)
    down = quantize(normal(1024, 512, seed=2), INT4)
    lhs = normal(3, 512)

    @jax.jit
    def layers(x, stack, down):
        def layer(x, i):
            gate_up = stack.select(jnp.stack([2 * i, 2 * i + 1]))
            return x, (mlp(x, gate_up, down), quantized_matmuls(x, [stack.select(i)])[0])

        return jax.lax.scan(layer, x, jnp.arange(3))[1]

    outs, products = layers(lhs, stack, down)
    for i in range(3):
        assert_is_mlp(outs[i], lhs, stack[2 * i : 2 * i + 2], down)
        want = matmul(lhs, stack[i], backend="cuda")
        assert np.asarray(products[i]).tobytes() == np.asarray(want).tobytes()


def test_gradients_of_mlp():
    gate_up, down = mlp_weights(256, 512, 256, INT4)
    lhs = normal(4, 256)

    def loss(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(f(x, gate_up, down).astype(jnp.float32) ** 2)))

    def reference(x, gate_up, down):
        gate, up = x.astype(jnp.float32) @ gate_up.dequantize(jnp.float32)
        return (jax.nn.silu(gate) * up) @ down.dequantize(jnp.float32)

    got, want = (np.asarray(loss(f)(lhs), np.float32) for f in (mlp, reference))
    assert np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)


# --- epilogues ------------------------------------------------------------------------------------

# Shapes that select each kernel, its edges and split k; on Hopper, small M, then large M.
EPILOGUE_SHAPES = [
    (1, 512, 8192),
    (5, 333, 512),
    (16, 4096, 1024),
    (32, 200, 640),
    (40, 264, 4096),
    (64, 8192, 256),
    (300, 1000, 512),
    (300, 333, 512),
    (1030, 4096, 128),
]


def epilogue(turn, m, n, dtype):
    """Draws one epilogue: optional addends, an activation and the dtype of the result."""
    types = (dtype, jnp.float32)
    bias = normal(1, n, seed=4)[0].astype(types[turn % 2])
    residual = normal(m, n, seed=5).astype(types[turn // 2 % 2])
    addends = {"bias": bias if turn % 3 else None, "residual": residual if turn % 4 else None}
    return addends, [*ACTIVATIONS][turn % 5], types[turn % 7 == 0]


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), EPILOGUE_SHAPES)
def test_epilogues(m, n, k, format):
    first = EPILOGUE_SHAPES.index((m, n, k)) + 3 * FORMATS.index(format)
    dtype = (jnp.bfloat16, jnp.float16)[first % 2]
    lhs, rhs = 10 * normal(m, k).astype(dtype), quantize(normal(k, n, seed=1), format)
    oracle = Oracle.of(lhs, dequantize(rhs))
    static = ("activation", "preferred_element_type", "backend")
    call = jax.jit(quantized_matmul, static_argnames=static)
    for turn in (first, first + 5, first + 21):
        addends: Any
        addends, activation, out = epilogue(turn, m, n, dtype)
        options: Any = {"activation": activation, "preferred_element_type": out, "backend": "cuda"}
        got = call(lhs, rhs, **addends, **options)
        assert_within(got, *finished(oracle, out, activation=activation, **addends))
        again = call(lhs, rhs, **addends, **options)
        assert np.asarray(again).tobytes() == np.asarray(got).tobytes()


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), EPILOGUE_SHAPES)
def test_gated_pairs(m, n, k, format):
    turn = EPILOGUE_SHAPES.index((m, n, k)) + FORMATS.index(format)
    dtype = (jnp.bfloat16, jnp.float16)[turn // 2 % 2]
    lhs = 10 * normal(m, k).astype(dtype)
    pair = quantize(jnp.stack([normal(k, n, seed=1), normal(k, n, seed=2)]), format)
    gate, up = (Oracle.of(lhs, dequantize(weight)) for weight in pair)
    bias = normal(2, n, seed=4).astype(dtype) if turn % 2 else None
    out = dtype if turn % 3 else jnp.float32
    activation = [*ACTIVATIONS][1 + turn % 4]
    options: Any = {"activation": activation, "preferred_element_type": out, "backend": "cuda"}
    got = jax.jit(functools.partial(quantized_glu, **options))(lhs, pair, bias=bias)
    biases = (None, None) if bias is None else bias
    exact = finished(gate, out, bias=biases[0], activation=activation, up=(up, biases[1]))
    assert_within(got, *exact)


def test_epilogues_of_stacks():
    """A bias per matrix of a stack, and pairs selected by an index."""
    lhs, stack = normal(3, 5, 512), quantize(normal(6, 512, 320), INT4)
    bias, residual = normal(3, 320, seed=1), normal(3, 5, 320, seed=2)

    @jax.jit
    def products(x, stack, bias, residual):
        view = stack.select(jnp.array([4, 0, 2]))
        pair = stack.select(jnp.array([5, 1]))
        return (
            quantized_matmul(x, view, bias=bias, residual=residual, activation="relu"),
            quantized_glu(x, pair),
        )

    out, gated = products(lhs, stack, bias, residual)
    for i, weight in enumerate((4, 0, 2)):
        oracle = Oracle.of(lhs[i], dequantize(stack[weight]))
        parts = {"bias": bias[i], "activation": "relu", "residual": residual[i]}
        assert_within(out[i], *finished(oracle, lhs.dtype, **parts))
    gate, up = (Oracle.of(lhs, dequantize(stack[i])) for i in (5, 1))
    assert_within(gated, *finished(gate, lhs.dtype, activation="silu", up=(up, None)))
    calls = custom_calls(products, lhs, stack, bias, residual)
    assert calls == ["quantized_matmul_fused"] * 2
