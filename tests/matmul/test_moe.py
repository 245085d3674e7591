"""`quantized_moe`: results compared with each expert, derivatives, and sharded experts."""

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dequantize, described, quantize
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from meshes import assert_close, put

from jaxlowbit import INT4, MXFP4, Format, quantized_moe
from jaxlowbit._backends.extension import ffi
from jaxlowbit._backends.target import Target
from jaxlowbit._composite import moe as moe_module

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
    gate_up_bias: Any = 0,
    down_bias: Any = 0,
    module: Any = np,
) -> Any:
    """Every expert for every token, in floats; `expert` and `weight` select and weigh them."""
    a, b = module.einsum("tk,pekh->pteh", x, gate_up) + gate_up_bias[:, None]
    up = b
    if activation == "gpt_oss":
        a, up = module.minimum(a, 7), module.clip(b, -7, 7) + 1
    slope = {"silu": 1, "gpt_oss": 1.702}.get(activation)
    hidden = up * (a / (1 + module.exp(-slope * a)) if slope else module.maximum(a, 0))
    out = module.einsum("teh,ehn->ten", hidden, down) + down_bias
    inside = (expert >= 0) & (expert < len(down))
    rows = module.arange(len(x))[:, None]
    picked = out[rows, module.where(inside, expert, 0)]
    return module.einsum("ti,tin->tn", module.where(inside, weight, 0), picked)


def floats(array: Any) -> np.ndarray:
    return dequantize(array).value


NO_BIASES = {"gate_up_bias": np.zeros((2, 1, 1)), "down_bias": np.zeros(1)}


def wanted(x: Any, expert: Any, weight: Any, gate_up: Any, down: Any, **options: Any) -> np.ndarray:
    rows = (np.asarray(x, np.float64), np.asarray(expert), np.asarray(weight, np.float64))
    biases: dict[str, Any] = {
        name: np.asarray(options.pop(name, bias)) for name, bias in NO_BIASES.items()
    }
    return reference(*rows, floats(gate_up), floats(down), **biases, **options)


SHAPES: Any = [  # tokens, top, activation, biases
    (0, 1, "silu", {}),
    (1, 8, "silu", BIASES),
    (7, 0, "silu", {}),
    (33, 4, "gpt_oss", BIASES),
    (7, 9, "relu", {}),
]


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    tokens, top, activation, biases = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["random", "one", "outside"]))
    least, most = {"random": (0, EXPERTS), "one": (3, 4), "outside": (-3, EXPERTS + 3)}[kind]
    return {
        "x": rng.normal(size=(tokens, K)).astype(np.float32),
        "expert": rng.integers(least, most, (tokens, top)).astype(np.int32),
        "weight": rng.uniform(-1, 1, (tokens, top)).astype(np.float32),
        "activation": activation,
        **biases,
    }


@hypothesis.given(choices())
@hypothesis.settings(max_examples=25 if hypothesis.settings().derandomize else 500)
def test_random_choices(given):
    x, expert, weight = (given.pop(name) for name in ("x", "expert", "weight"))
    args = x, expert, weight, GATE_UP, DOWN
    got, want = moe(*args, **given), wanted(*args, **given)
    assert got.shape == want.shape and got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=2e-5 * (1 + np.abs(want).max(initial=0)))


@pytest.mark.parametrize("compared", [0, 100])
def test_choices_are_sorted_by_expert(monkeypatch, compared):
    monkeypatch.setattr(moe_module, "COMPARED", compared)
    experts = np.random.default_rng(0).integers(0, 9, 100).astype(np.int32)
    places = jax.jit(moe_module._places)(experts)
    np.testing.assert_array_equal(np.argsort(places), np.argsort(experts, stable=True))


def test_dtypes_and_leading_axes():
    rows = (X.astype(jnp.bfloat16), EXPERT, WEIGHT)
    got = moe(*rows, GATE_UP, DOWN)
    shaped = (x.reshape(1, TOKENS, -1) for x in rows)
    wide = moe(*shaped, GATE_UP, DOWN, preferred_element_type="float32")
    assert got.dtype == jnp.bfloat16 and wide.dtype == jnp.float32
    np.testing.assert_array_equal(got, wide[0].astype(jnp.bfloat16))
    one = jax.eval_shape(quantized_moe, *(x[0] for x in rows), GATE_UP, DOWN)
    assert (one.shape, one.dtype) == ((K,), jnp.bfloat16)


def test_absent_experts_contribute_nothing():
    """Their weights may be NaN. An expert that occurs twice counts twice."""
    expert = EXPERT.at[0, 0].set(EXPERTS).at[1, 1].set(-1).at[2].set(3)
    weight = WEIGHT.at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf)
    got = moe(X, expert, weight, GATE_UP, DOWN)
    assert_close(got, wanted(X, expert, weight, GATE_UP, DOWN))
    np.testing.assert_array_equal(moe(X, expert, weight, GATE_UP, DOWN), got)


def test_microscaling_experts_with_rounded_rows():
    gate_up = quantize(normal(2, EXPERTS, K, HIDDEN), MXFP4)
    down = quantize(normal(EXPERTS, HIDDEN, K), MXFP4)
    args = X, EXPERT, WEIGHT, gate_up, down
    want = wanted(*args, activation="gpt_oss")
    error = np.abs(moe(*args, activation="gpt_oss", lhs_qtype=jnp.int8) - want)
    assert 1e-4 < error.max() / np.abs(want).max() < 0.05


def test_gradients_and_vmap():
    args = X, WEIGHT, GATE_UP.scale, DOWN.scale, *BIASES.values()

    def product(x, weight, gate_up, down, *biases):
        gate_up, down = GATE_UP._with(scale=gate_up), DOWN._with(scale=down)
        return moe(x, EXPERT, weight, gate_up, down, **dict(zip(BIASES, biases, strict=True)))

    def want(x, weight, gate_up, down, *biases):
        gate_up = GATE_UP._with(scale=gate_up).dequantize()
        down = DOWN._with(scale=down).dequantize()
        return reference(x, EXPERT, weight, gate_up, down, "silu", *biases, module=jnp)

    def gradients(f):
        numbers = tuple(range(len(args)))
        return jax.jit(jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), numbers))(*args)

    with jax.numpy_rank_promotion("allow"):
        assert_close(gradients(product), gradients(want))
    rows = [jnp.stack([x, x[::-1]]) for x in (X, EXPERT, WEIGHT)]
    got = jax.vmap(lambda *rows: moe(*rows, GATE_UP, DOWN))(*rows)
    assert_close(
        got, np.stack([wanted(x, e, w, GATE_UP, DOWN) for x, e, w in zip(*rows, strict=True)])
    )


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("capabilities", [{80}, {100}, {80, 90}])
def test_products_are_calls_on_other_gpus(capabilities, monkeypatch):
    """The kernels that group choices and add them run only on compute capability 9.0."""
    target = Target("cuda", frozenset(capabilities))
    monkeypatch.setattr(Target, "of", classmethod(lambda *_: target))
    monkeypatch.setattr(Target, "unfit", None)
    product = jax.jit(lambda x: quantized_moe(x, EXPERT, WEIGHT, GATE_UP, DOWN))
    lowered = product.trace(X.astype(jnp.bfloat16)).lower(lowering_platforms=("cuda",))
    callers = [call.caller for call in described(lowered.as_text())]
    assert callers == ["quantized_ragged_dot"] * 2


@pytest.mark.usefixtures("cuda")
def test_one_call_on_hopper(monkeypatch):
    """Each step reads the results of the step in front of it."""
    hopper = Target("cuda", frozenset({90}))
    monkeypatch.setattr(Target, "of", classmethod(lambda *_: hopper))

    def steps(*rows: Any, **options: Any) -> list[Any]:
        def product(x: Any, expert: Any, weight: Any) -> Any:
            return quantized_moe(x, expert, weight, GATE_UP, DOWN, **BIASES, **options)

        f = jax.jit(product)
        return described(f.trace(*rows).lower(lowering_platforms=("cuda",)).as_text())

    x, kind = X.astype(jnp.bfloat16), ffi.STEP_FIELDS.index("kind")
    (call,) = steps(x, EXPERT, WEIGHT)
    kinds = [ffi.step(kind=name)[kind] for name in ("group", "multiply", "multiply", "combine")]
    assert [step["kind"] for step in call.steps] == kinds
    group, *_, combine = call.steps
    gate_up, down = call.products
    assert (group["first"], group["count"]) == (0, 2)
    assert call.caller == "quantized_moe" and gate_up["gated"] and not down["gated"]
    assert (group["out"], gate_up["out_at"]) == (gate_up["lhs_at"], down["lhs_at"])
    assert (down["out_at"], group["place"]) == (combine["x"], combine["place"])
    assert group["sizes"] == gate_up["group_sizes_at"] == down["group_sizes_at"]
    assert gate_up["groups_of_rows"] == down["groups_of_rows"] == EXPERTS
    assert combine["out"] == -1 and gate_up["m"] == down["m"] == TOKENS * TOP
    composed = [(X, EXPERT, WEIGHT), (x, EXPERT[:, :0], WEIGHT[:, :0])]
    for rows in composed:  # float32 rows, or no choices
        assert "quantized_moe" not in [call.caller for call in steps(*rows)]
    assert "quantized_moe" not in [
        call.caller for call in steps(x, EXPERT, WEIGHT, lhs_qtype=jnp.int8)
    ]


def test_experts_sharded_over_devices():
    count = 4
    mesh = jax.make_mesh((count,), ("model",), devices=jax.devices("cpu")[:count])
    specs = (
        GATE_UP.partition_spec(mesh, lead=(None, "model")),
        DOWN.partition_spec(mesh, lead=("model",)),
    )
    weights = [put(x, mesh, spec) for x, spec in zip((GATE_UP, DOWN), specs, strict=True)]

    def part(x, expert, weight, gate_up, down):
        offset = lax.axis_index("model") * down.shape[0]
        own = functools.partial(quantized_moe, group_offset=offset, num_experts=EXPERTS)
        return lax.psum(own(x, expert, weight, gate_up, down), "model")

    rows = (P(), P(), P())
    f = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=(*rows, *specs), out_specs=P()))
    assert_close(f(X, EXPERT, WEIGHT, *weights), wanted(X, EXPERT, WEIGHT, GATE_UP, DOWN))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_hidden_features_sharded_over_a_mesh(kind):
    """Tensor parallel: columns of gate and up, and rows of down, with one all-reduce."""
    gate_up = quantize(normal(2, 2, K, 128), INT4)
    down = quantize(normal(2, 128, K), Format(4, 64))
    expert, want = EXPERT % 2, wanted(X, EXPERT % 2, WEIGHT, gate_up, down)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(kind,), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh):
        placed = (
            put(gate_up, mesh, gate_up.partition_spec(mesh, n="model")),
            put(down, mesh, down.partition_spec(mesh, k="model")),
        )
        out = P() if kind is AxisType.Explicit else None
        f = jax.jit(functools.partial(quantized_moe, out_sharding=out))
        assert_close(f(X, expert, WEIGHT, *placed), want)
