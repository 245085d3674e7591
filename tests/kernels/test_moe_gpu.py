"""`quantized_moe` as one CUDA custom call: exact numbers, its composition, and CUDA graphs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_problems import normal
from helpers import calls, quantize

from jaxlowbit import INT4, MXFP4, Format, QuantizedArray, quantized_moe

pytestmark = pytest.mark.gpu

K, HIDDEN, N = 128, 72, 200  # neither hidden features nor n are whole strips
WHOLE = 128  # hidden features in whole strips, so that up to 64 choices are not grouped


def integers(seed: int, *shape: int, top: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-top, top + 1, shape)


def matrices(values: np.ndarray) -> QuantizedArray:
    """A matrix of integers, unchanged."""
    groups = -(-values.shape[-2] // 64)
    scale = jnp.ones((*values.shape[:-2], groups, values.shape[-1]), jnp.bfloat16)
    return QuantizedArray.from_integers(jnp.asarray(values, jnp.int4), scale, format=Format(4, 64))


@functools.cache
def weights(experts: int, hidden: int = HIDDEN) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and biases of integers whose products are exact, as operands and as numbers."""
    numbers = {
        "gate_up": integers(1, 2, experts, K, hidden, top=2),
        "down": integers(2, experts, hidden, N, top=7),
        "gate_up_bias": integers(3, 2, experts, hidden, top=1),
        "down_bias": integers(4, experts, N, top=9),
    }
    operands: dict[str, Any] = {name: matrices(numbers[name]) for name in ("gate_up", "down")}
    operands |= {
        name: jnp.asarray(numbers[name], jnp.bfloat16) for name in ("gate_up_bias", "down_bias")
    }
    return operands, numbers


def exact(
    x: np.ndarray, expert: np.ndarray, weight: np.ndarray, offset: int, numbers: dict[str, Any]
) -> np.ndarray:
    """The result in float64; all numbers are multiples of 1/8 that float32 holds."""
    experts = len(numbers["down"])
    out = np.zeros((len(x), N))
    local = expert.astype(np.int64) - offset
    for e in range(experts):
        tokens, i = np.nonzero((local == e) & (expert >= 0))
        gate, up = (
            x[tokens] @ numbers["gate_up"][j, e] + numbers["gate_up_bias"][j, e] for j in range(2)
        )
        rows = (np.maximum(gate, 0) * up) @ numbers["down"][e] + numbers["down_bias"][e]
        np.add.at(out, tokens, weight[tokens, i, None].astype(np.float64) * rows)
    return out


def sparse(tokens: int, seed: int) -> np.ndarray:
    """Rows with two ones: their products with small integers have few bits."""
    rng = np.random.default_rng(seed)
    x = np.zeros((tokens, K))
    for _ in range(2):
        x[np.arange(tokens), rng.integers(0, K, tokens)] = rng.choice([-1, 1], tokens)
    return x


def chosen(kind: str, tokens: int, top: int, experts: int, offset: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape, most = (tokens, top), 2**31 - 1
    if kind == "one":  # all tokens choose one expert, several times
        return np.full(shape, offset + experts // 2, np.int32)
    if kind == "none":
        return rng.choice(np.array([-1, -(2**31), most, offset + experts]), shape).astype(np.int32)
    low, high = (-3, experts + 3) if kind == "outside" else (0, experts)
    if kind == "few":  # most experts have no choice
        low, high = experts // 3, experts // 3 + 2
    return (offset + rng.integers(low, high, shape)).astype(np.int32)


SIZES = [  # tokens, top, experts
    (1, 1, 1),
    (1, 8, 128),
    (3, 2, 8),
    (16, 4, 32),
    (37, 9, 5),
    (64, 8, 128),
    (50, 10, 512),
    (256, 8, 60),  # the largest number of choices that are compared
    (683, 3, 60),  # one more
    (1500, 7, 33),
    (4096, 8, 128),
]
LISTED = [(1, 1, 1), (1, 8, 128), (3, 2, 8), (5, 12, 512), (8, 8, 20), (13, 5, 9), (64, 1, 40)]
KINDS = ("all", "one", "few", "outside", "none")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "sizes", [*((*s, HIDDEN) for s in SIZES), *((*s, WHOLE) for s in LISTED)], ids=str
)
def test_results_are_exact(sizes, dtype):
    tokens, top, experts, hidden = sizes
    operands, numbers = weights(experts, hidden)
    f = jax.jit(
        functools.partial(quantized_moe, activation="relu", preferred_element_type=jnp.float32)
    )
    x = sparse(tokens, seed=5)
    for seed, kind in enumerate(KINDS):
        offset = (0, 0, 3, 7, -2)[seed]
        expert = chosen(kind, tokens, top, experts, offset, seed)
        weight = np.random.default_rng(seed).choice([-0.5, 0.125, 1, 2], (tokens, top))
        want = exact(x, expert, weight, offset, numbers)
        local = (expert >= max(offset, 0)) & (expert.astype(np.int64) < offset + experts)
        given = jnp.asarray(np.where(local, weight, np.nan), (jnp.float32, dtype)[seed % 2])
        rows = jnp.asarray(x, dtype), jnp.asarray(expert), given
        got = f(*rows, **operands, group_offset=jnp.int32(offset))
        np.testing.assert_array_equal(got, want, err_msg=kind)


def test_it_is_one_call():
    x, expert, weight = normal(4, K), jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 2))
    operands, _ = weights(8)

    def f(*rows: Any, **options: Any) -> Any:
        return quantized_moe(*rows, **operands, **options)

    assert calls(f, x, expert, weight) == ["quantized_moe"]
    rounded = functools.partial(f, lhs_qtype=jnp.int8)
    assert "quantized_moe" not in calls(rounded, x, expert, weight)


FORMATS = (INT4, Format(4, 64, zero="integer"), Format(8), MXFP4)


@pytest.mark.parametrize("activation", ["silu", "gpt_oss"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_it_is_its_composition(format, activation):
    """They differ by the rounding of hidden features and results."""
    experts = 20
    gate_up = quantize(normal(2, experts, 256, 128, seed=1), format)
    down = quantize(normal(experts, 128, 202, seed=2), format)
    biases = {
        "gate_up_bias": normal(2, experts, 128, seed=6),
        "down_bias": normal(experts, 202, seed=7).astype(jnp.float32),
    }
    for tokens in (1, 5, 40, 300):
        x = normal(tokens, 256, seed=3)
        weight, expert = jax.lax.top_k(jax.nn.softmax(normal(tokens, experts, seed=4)), 4)

        def mixture(backend: Any, rows: Any = (x, expert, weight)) -> np.ndarray:
            f = functools.partial(quantized_moe, activation=activation, backend=backend, **biases)
            return np.asarray(jax.jit(f)(*rows, gate_up, down), np.float64)

        got, want = mixture(None), mixture("xla")
        assert np.abs(got - want).max() <= 2.0**-6 * np.abs(want).max(), tokens


@pytest.mark.parametrize(
    ("tokens", "hidden"), [(1, WHOLE), (8, WHOLE), (1, HIDDEN), (16, HIDDEN), (300, HIDDEN)]
)
def test_replays_with_other_choices(tokens, hidden):
    """One captured program of several calls serves all choices, and repeats its bits."""
    operands, _ = weights(32, hidden)

    def several(x: Any, expert: Any, weight: Any) -> Any:
        results = []
        for _ in range(6):  # enough calls for a CUDA graph
            results.append(quantized_moe(x, expert, weight, **operands))
            x = x + jnp.tanh(results[-1])[:, :K]
        return results

    f = jax.jit(several)
    weight = jnp.full((tokens, 8), 0.125, jnp.float32)
    rows = [
        (normal(tokens, K, seed=i), jnp.asarray(chosen(kind, tokens, 8, 32, 0, i)), weight)
        for i, kind in enumerate(KINDS)
    ]
    before = [jax.tree.map(np.asarray, f(*row)) for row in rows]
    for _ in range(20):
        for row, want in zip(reversed(rows), reversed(before), strict=True):
            for got, one in zip(f(*row), want, strict=True):
                assert np.asarray(got).tobytes() == one.tobytes()
    for (x, expert, weight), want in zip(rows, before, strict=True):
        single = jax.jit(quantized_moe)(x, expert, weight, **operands)
        np.testing.assert_array_equal(single, want[0])


def test_listed_choices_are_grouped_ones():
    """A token's result does not depend on the other tokens, so neither on whether it is grouped."""
    experts = 24
    gate_up = quantize(normal(2, experts, 256, 128, seed=1), INT4)
    down = quantize(normal(experts, 128, 200, seed=2), INT4)
    x = normal(40, 256, seed=3)
    weight, expert = jax.lax.top_k(jax.nn.softmax(normal(40, experts, seed=4)), 4)
    f = jax.jit(functools.partial(quantized_moe, preferred_element_type=jnp.float32))
    grouped = np.asarray(f(x, expert, weight, gate_up, down))
    listed = [
        np.asarray(f(x[i : i + 8], expert[i : i + 8], weight[i : i + 8], gate_up, down))
        for i in range(0, 40, 8)
    ]
    # Sums along k may be in another order.
    assert np.abs(np.concatenate(listed) - grouped).max() <= 2.0**-7 * np.abs(grouped).max()


def test_leading_axes_and_vmap():
    operands, _ = weights(8)
    x, weight = normal(3, 2, 5, K), jnp.ones((3, 2, 5, 2))
    expert = jnp.asarray(chosen("all", 30, 2, 8, 0, 0).reshape(3, 2, 5, 2))
    f = functools.partial(quantized_moe, **operands)
    got = jax.jit(f)(x, expert, weight)
    assert got.shape == (3, 2, 5, N)
    flat = (a.reshape(30, -1) for a in (x, expert, weight))
    np.testing.assert_array_equal(got.reshape(30, N), jax.jit(f)(*flat))
    assert calls(jax.vmap(f), x, expert, weight) == ["quantized_moe"]
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(x, expert, weight), got)
