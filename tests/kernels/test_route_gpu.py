"""The router of a decode step as a step of a CUDA custom call (`cuda/ops/route_choices.h`)."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowbit._backends.call import Call
from jaxlowbit._llm import experts

pytestmark = pytest.mark.gpu

SIZES = [  # tokens, width, experts, top
    (1, 2048, 128, 8),
    (3, 4096, 8, 2),
    (16, 2880, 32, 4),
    (2, 2880, 128, 4),
    (5, 64, 512, 32),
    (40, 512, 16, 16),
]


def route(x: Any, router: Any, bias: Any, top: int, normalized: bool) -> tuple[Any, Any]:
    calls, choices = Call("route"), (x.shape[1], top)
    places = {"x": calls.operand(x), "scales": calls.operand(router)}
    if bias is not None:
        places["addend"] = calls.operand(bias)
    places["expert"] = calls.result(choices, jnp.int32)
    places["out"] = calls.result(choices, jnp.float32)
    calls.step("route", **places, normalized=normalized)
    expert, weight = calls.run()
    return expert, weight


def want(x: Any, router: Any, bias: Any, top: int, normalized: bool) -> tuple[Any, Any]:
    config: Any = types.SimpleNamespace(experts_per_token=top, normalized_experts=normalized)
    expert, weight = experts.route(config, x, router, bias)
    return expert[0], weight[0]


def operands(sizes: Any, dtype: Any, router: Any, bias: Any, seed: int) -> Any:
    """Multiples of 1/8 whose products and sums are exact; many logits are equal."""
    tokens, width, count, _ = sizes
    rng = np.random.default_rng(seed)
    x = np.zeros((1, tokens, width))
    for _ in range(9):
        x[0, np.arange(tokens), rng.integers(0, width, tokens)] = rng.integers(-2, 3, tokens)
    weights = rng.integers(-8, 9, (width, count)) / 8
    addend = None if bias is None else jnp.asarray(rng.integers(-4, 5, count), bias)
    return jnp.asarray(x, dtype), jnp.asarray(weights, router), addend


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_choices_are_those_of_the_definition(sizes, dtype, normalized):
    top = sizes[3]
    types_ = ("float32", None), ("float32", "bfloat16"), (dtype, "float32"), ("float16", "float16")
    for seed, (router, bias) in enumerate(types_):
        given = operands(sizes, dtype, router, bias, seed)
        got = jax.jit(route, static_argnums=(3, 4))(*given, top, normalized)
        expert, weight = jax.jit(want, static_argnums=(3, 4))(*given, top, normalized)
        np.testing.assert_array_equal(got[0], expert)
        np.testing.assert_allclose(got[1], weight, rtol=1e-5, atol=1e-30)


def test_nan_is_the_largest_logit():
    x, router, _ = operands((2, 512, 16, 3), "bfloat16", "float32", None, 0)
    router = router.at[7, 11].set(jnp.nan)
    expert, weight = jax.jit(route, static_argnums=(3, 4))(x, router, None, 3, True)
    others, _ = want(x, router.at[:, 11].set(-100), None, 3, True)
    assert (np.asarray(expert)[:, 0] == 11).all() and np.isnan(np.asarray(weight)).all()
    rest = np.asarray(others)
    rest = np.stack([row[row != 11][:2] for row in rest])
    np.testing.assert_array_equal(np.asarray(expert)[:, 1:], rest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": ((1, 2, 64), "float32")}, "x is f32 but must be bf16 or f16"),
        ({"x": ((1, 3, 64), "bfloat16")}, r"x has shape \[1, 3, 64\] but must be .* = \[1, 2, 64"),
        ({"router": ((64, 8), "int32")}, "router is s32 but must be f32, bf16 or f16"),
        ({"router": ((72, 8), "float32")}, r"router has shape \[72, 8\] .* = \[64, 8\]"),
        (
            {"router": ((64, 24), "float32"), "bias": ((24,), "float32")},
            "a power of two from 8 to 512 of experts",
        ),
        ({"bias": ((9,), "float32")}, r"bias has shape \[9\] but must be \[experts\] = \[8\]"),
        ({"top": 9}, "from 1 to 32 choices of a token"),
        ({"x": ((1, 2, 20), "bfloat16"), "router": ((20, 8), "float32")}, "a multiple of 8"),
    ],
)
def test_invalid_operands_raise(changes, message):
    given = {
        "x": ((1, 2, 64), "bfloat16"),
        "router": ((64, 8), "float32"),
        "bias": ((8,), "float32"),
    }
    given |= {name: value for name, value in changes.items() if name != "top"}
    arrays = [jnp.zeros(shape, dtype) for shape, dtype in given.values()]

    def f(x: Any, router: Any, bias: Any) -> Any:
        calls, choices = Call("route"), (2, changes.get("top", 2))
        places = zip(("x", "scales", "addend"), map(calls.operand, (x, router, bias)), strict=True)
        results = {"expert": calls.result(choices, jnp.int32)}
        results["out"] = calls.result(choices, jnp.float32)
        calls.step("route", **dict(places), **results)
        return calls.run()

    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"route: .*{message}"):
        jax.block_until_ready(jax.jit(f)(*arrays))
