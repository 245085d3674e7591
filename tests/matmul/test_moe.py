"""`quantized_moe`: results compared with each expert, derivatives, and sharded experts."""

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dequantize, quantize
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from meshes import assert_close, put

from jaxlowbit import INT4, MXFP4, Format, quantized_moe

P = jax.P
TOKENS, K, HIDDEN, EXPERTS, TOP = 7, 128, 64, 8, 2
RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return (RNG.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1)).astype(dtype)


GATE_UP = quantize(normal(2, EXPERTS, K, HIDDEN), INT4)
DOWN = quantize(normal(EXPERTS, HIDDEN, K), Format(8))
X = jnp.asarray(4 * normal(TOKENS, K))
EXPERT = jnp.asarray(np.argsort(RNG.random((TOKENS, EXPERTS)))[:, :TOP], jnp.int32)
WEIGHT = jnp.asarray(RNG.uniform(0.1, 1, (TOKENS, TOP)), jnp.float32)
BIASES = {
    "gate_up_bias": jnp.asarray(normal(2, EXPERTS, HIDDEN)),
    "down_bias": jnp.asarray(normal(EXPERTS, K)),
}
STATIC = ("activation", "lhs_qtype", "preferred_element_type", "backend")
moe = jax.jit(quantized_moe, static_argnames=STATIC)


def reference(
    x: Any,
    expert: Any,
    weight: Any,
    gate_up: Any,
    down: Any,
    activation: str = "silu",
    gate_up_bias: Any = None,
    down_bias: Any = None,
) -> Any:
    """Every expert for every token, in floats; `expert` and `weight` select and weigh them."""
    a, b = jnp.einsum("tk,pekh->peth", x, gate_up)
    if gate_up_bias is not None:
        a, b = a + gate_up_bias[0][:, None], b + gate_up_bias[1][:, None]
    if activation == "gpt_oss":
        a, b = jnp.minimum(a, 7), jnp.clip(b, -7, 7)
        hidden = a * jax.nn.sigmoid(1.702 * a) * (b + 1)
    else:
        hidden = getattr(jax.nn, activation)(a) * b
    out = jnp.einsum("eth,ehn->etn", hidden, down)
    if down_bias is not None:
        out += down_bias[:, None]
    inside = (expert >= 0) & (expert < len(down))
    picked = jnp.take_along_axis(out, jnp.where(inside, expert, 0).T[..., None], axis=0)
    return jnp.einsum("it,itn->tn", jnp.where(inside, weight, 0).T, picked)


def floats(array: Any) -> Any:
    return jnp.asarray(dequantize(array).value, jnp.float32)


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    tokens, top = draw(st.sampled_from([0, 1, 2, 7, 33])), draw(st.sampled_from([0, 1, 2, 4, 9]))
    kind = draw(st.sampled_from(["random", "one", "outside"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    expert = rng.integers(0, EXPERTS, (tokens, top))
    if kind == "one":
        expert[:] = rng.integers(EXPERTS)
    if kind == "outside":
        expert = rng.integers(-3, EXPERTS + 3, (tokens, top))
    return {
        "x": jnp.asarray(rng.normal(size=(tokens, K)), jnp.float32),
        "expert": expert.astype(np.int32),
        "weight": rng.uniform(-1, 1, (tokens, top)).astype(np.float32),
        "activation": draw(st.sampled_from(["silu", "relu", "gpt_oss"])),
        **(BIASES if draw(st.booleans()) else {}),
    }


@hypothesis.given(choices())
@hypothesis.settings(
    max_examples=12 if hypothesis.settings().derandomize else 500,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
def test_random_choices(given):
    got = moe(gate_up=GATE_UP, down=DOWN, **given)
    want = reference(gate_up=floats(GATE_UP), down=floats(DOWN), **given)
    assert got.shape == want.shape and got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=2e-5 * (1 + np.abs(want).max(initial=0)))


def test_dtypes_and_leading_axes():
    half = X.astype(jnp.bfloat16)
    got = moe(half, EXPERT, WEIGHT, GATE_UP, DOWN)
    assert got.dtype == jnp.bfloat16
    wide = moe(half, EXPERT, WEIGHT, GATE_UP, DOWN, preferred_element_type="float32")
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))
    shaped = (x.reshape(1, TOKENS, -1) for x in (half, EXPERT, WEIGHT))
    np.testing.assert_array_equal(moe(*shaped, GATE_UP, DOWN)[0], got)
    one = moe(half[0], EXPERT[0], WEIGHT[0], GATE_UP, DOWN, preferred_element_type="float32")
    np.testing.assert_allclose(one, wide[0], rtol=1e-2, atol=1e-2)


def test_absent_experts_contribute_nothing():
    """Their weights, even NaN, have no effect; an expert that occurs twice counts twice."""
    expert = EXPERT.at[0, 0].set(EXPERTS).at[1, 1].set(-1).at[2].set(3)
    weight = WEIGHT.at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf)
    got = moe(X, expert, weight, GATE_UP, DOWN)
    args = floats(GATE_UP), floats(DOWN)
    assert_close(got, reference(X, expert, jnp.nan_to_num(weight), *args))
    alone = moe(X, expert[:, :1], WEIGHT.sum(1, keepdims=True), GATE_UP, DOWN)
    np.testing.assert_allclose(got[2], alone[2], rtol=1e-4, atol=1e-5)


def test_results_repeat_and_do_not_depend_on_the_order_of_tokens():
    first = np.asarray(moe(X, EXPERT, WEIGHT, GATE_UP, DOWN))
    np.testing.assert_array_equal(moe(X, EXPERT, WEIGHT, GATE_UP, DOWN), first)
    turned = moe(X[::-1], EXPERT[::-1], WEIGHT[::-1], GATE_UP, DOWN)
    np.testing.assert_allclose(turned[::-1], first, rtol=1e-5, atol=1e-5)


def test_microscaling_experts_with_rounded_rows():
    gate_up = quantize(normal(2, EXPERTS, K, HIDDEN), MXFP4)
    down = quantize(normal(EXPERTS, HIDDEN, K), MXFP4)
    want = moe(X, EXPERT, WEIGHT, gate_up, down, activation="gpt_oss")
    args = floats(gate_up), floats(down)
    assert_close(want, reference(X, EXPERT, WEIGHT, *args, activation="gpt_oss"))
    got = moe(X, EXPERT, WEIGHT, gate_up, down, activation="gpt_oss", lhs_qtype=jnp.int8)
    error = np.abs(got - want)
    assert 0 < error.max() < 0.05 * np.abs(want).max()


def test_gradients_and_vmap():
    args = X, WEIGHT, GATE_UP.scale, DOWN.scale, *BIASES.values()

    def product(x, weight, gate_up, down, *biases):
        gate_up, down = GATE_UP._with(scale=gate_up), DOWN._with(scale=down)
        return moe(x, EXPERT, weight, gate_up, down, **dict(zip(BIASES, biases, strict=True)))

    def want(x, weight, gate_up, down, *biases):
        gate_up, down = (
            array._with(scale=scale).dequantize()
            for array, scale in ((GATE_UP, gate_up), (DOWN, down))
        )
        return reference(x, EXPERT, weight, gate_up, down, "silu", *biases)

    def gradients(f):
        numbers = tuple(range(len(args)))
        return jax.jit(jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), numbers))(*args)

    assert_close(gradients(product), gradients(want))
    batch = (jnp.stack([x, x[::-1]]) for x in (X, EXPERT, WEIGHT))
    got = jax.vmap(lambda *rows: moe(*rows, GATE_UP, DOWN))(*batch)
    assert_close(got[0], moe(X, EXPERT, WEIGHT, GATE_UP, DOWN))
    assert_close(got[1], got[0][::-1])


@pytest.mark.parametrize("count", [2, 4])
def test_experts_sharded_over_devices(count):
    mesh = jax.make_mesh((count,), ("model",), devices=jax.devices("cpu")[:count])
    specs = (
        GATE_UP.partition_spec(mesh, lead=(None, "model")),
        DOWN.partition_spec(mesh, lead=("model",)),
    )
    weights = [put(x, mesh, spec) for x, spec in zip((GATE_UP, DOWN), specs, strict=True)]

    def part(x, expert, weight, gate_up, down):
        offset = lax.axis_index("model") * down.shape[0]
        own = functools.partial(quantized_moe, group_offset=offset)
        return lax.psum(own(x, expert, weight, gate_up, down), "model")

    rows = (P(), P(), P())
    f = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=(*rows, *specs), out_specs=P()))
    assert_close(f(X, EXPERT, WEIGHT, *weights), moe(X, EXPERT, WEIGHT, GATE_UP, DOWN))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_hidden_features_sharded_over_a_mesh(kind):
    """Tensor parallel: columns of gate and up, and rows of down, with one all-reduce."""
    gate_up = quantize(normal(2, 2, K, 128), INT4)
    down = quantize(normal(2, 128, K), Format(4, 64))
    expert, want = EXPERT % 2, moe(X, EXPERT % 2, WEIGHT, gate_up, down)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(kind,), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh):
        placed = (
            put(gate_up, mesh, gate_up.partition_spec(mesh, n="model")),
            put(down, mesh, down.partition_spec(mesh, k="model")),
        )
        out = P() if kind is AxisType.Explicit else None
        f = jax.jit(functools.partial(quantized_moe, out_sharding=out))
        assert_close(f(X, expert, WEIGHT, *placed), want)
