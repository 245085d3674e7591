"""`quantized_ragged_dot`: random cases against the oracle, and transformations."""

import dataclasses
import functools
import math
import random
import re
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Oracle,
    assert_within,
    backends,
    dequantize,
    finished,
    quantize,
)
from hypothesis import strategies as st
from jax import export, lax
from jax.sharding import AxisType
from meshes import assert_close, collectives, put
from problems import Problem, generator, weights

from jaxlowbit import (
    DISABLED_EXPORT_CHECKS,
    INT4,
    UINT4,
    Format,
    QuantizedActivations,
    quantize_activations,
    quantized_ragged_dot,
)
from jaxlowbit._composite import ragged_dot

P = jax.P
EPILOGUES = ("none", "pair", "bias", "gpt_oss", "silu", "pair with bias", "gelu", "none")
TYPES = ("bfloat16", "int8", "float32", "float16", "bfloat16", "float8_e4m3fn", "float32")


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged product: a stack of matrices or pairs, sizes of all groups, and the first local
    group if there are others."""

    problem: Problem
    groups: int
    offset: int | None
    epilogue: str
    lhs: str  # the dtype of lhs, or the 8-bit dtype of quantized activations
    backend: str | None

    @property
    def pairs(self) -> bool:
        return self.epilogue in ("pair", "pair with bias", "gpt_oss")

    @property
    def activation(self) -> str | None:
        return {"pair": "silu", "pair with bias": "relu"}.get(
            self.epilogue, None if self.epilogue in ("none", "bias") else self.epilogue
        )


def owners(sizes: Any, m: int) -> np.ndarray:
    """The group of each row, -1 for none, computed group by group."""
    found, start = np.full(m, -1), 0
    for group, size in enumerate(sizes):
        end = min(start + max(int(size), 0), m)
        found[start:end] = group
        start = end
    return found


@functools.cache
def case(number: int) -> Case:
    """A case of a number; a few numbers cover every epilogue and dtype."""
    rng = random.Random(number)
    experts = rng.choice([1, 2, 3, 4, 8, 20])
    offset = rng.choice([None, None, 0, 1, 3, -1])
    fields: dict[str, Any] = {
        "integers": {"bits": rng.randint(1, 8), "zero": rng.choice(["none", "integer", "float"])},
        "codebook": {"bits": 4, "codebook": rng.choice(["nf4", "e2m1"])},
        "narrow": {"bits": 4, "codebook": "e2m1", "narrow": rng.choice(["e8m0", "e4m3"])},
        "units": {"bits": 4, "narrow": "int8"},
    }[rng.choice(["integers", "integers", "integers", "codebook", "narrow", "units"])]
    epilogue, lhs = EPILOGUES[number % len(EPILOGUES)], TYPES[number % len(TYPES)]
    dtype = "bfloat16" if lhs in ("int8", "float8_e4m3fn") else lhs
    pairs = (2,) if epilogue in ("pair", "pair with bias", "gpt_oss") else ()
    problem = Problem(
        name=f"ragged {number}",
        m=rng.choice([1, 2, 5, 8, 9, 17, 40, 70]),
        k=rng.choice([64, 72, 128]),
        n=rng.choice([8, 64, 70]),
        group_size=rng.choice([-1, 32, 64]),
        dtype=dtype,
        out_dtype=rng.choice([None, "float32"]),
        stack=(*pairs, experts),
        scale=2.0**-5,
        permuted=rng.random() < 0.2,
        **fields,
    )
    groups = experts if offset is None else experts + rng.randrange(4)
    default = backends(dtype, problem.format)[0]
    return Case(problem, groups, offset, epilogue, lhs, rng.choice([default, default, "xla"]))


class Given(NamedTuple):
    lhs: Any
    rhs: Any
    bias: Any
    every: Oracle  # every row times every matrix, and pair


@functools.lru_cache(maxsize=32)
def operands(case: Case) -> Given:
    p, rng = case.problem, generator(case.problem)
    rhs, scale, bias = weights(p, rng), 1.0, None
    if case.lhs in ("int8", "float8_e4m3fn"):
        values = rng.integers(-127, 128, (p.m, p.k)).astype(jnp.dtype(case.lhs))
        scale = (rng.uniform(0.5, 1.5, (p.m, 1)) / 64).astype(np.float32)
        lhs: Any = QuantizedActivations(jnp.asarray(values), jnp.asarray(scale), jnp.dtype(p.dtype))
        exact = values.astype(jnp.bfloat16)
    else:
        exact = rng.normal(size=(p.m, p.k)).astype(jnp.dtype(p.dtype))
        lhs = jnp.asarray(exact)
    if case.epilogue in ("bias", "pair with bias", "gpt_oss"):
        bias = rng.normal(size=(*p.stack, p.n)).astype(jnp.dtype(p.dtype))
    return Given(lhs, rhs, bias, Oracle.of(exact, dequantize(rhs)).scaled(scale))


product = jax.jit(  # one program per call: eager ones compile one per operation
    quantized_ragged_dot,
    static_argnames=("activation", "preferred_element_type", "backend", "lhs_qtype"),
)


def gpt_oss(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate = np.minimum(gate, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)


def exact_and_bound(case: Case, sizes: Any) -> tuple[np.ndarray, np.ndarray]:
    """The exact result and its bound: each row times the matrix of its group; 0 +- 0 for none."""
    bias: Any
    *_, bias, every = operands(case)
    owner, dtype = owners(sizes, case.problem.m), case.problem.result_dtype
    group = owner - (case.offset or 0)
    has = (group >= 0) & (group < case.problem.stack[-1]) & (owner >= 0)
    expert, row = np.where(has, group, 0), np.arange(len(owner))
    own = Oracle(*(x[..., expert, row, :] for x in every))
    bias = None if bias is None else bias[..., expert, :]
    if case.epilogue == "gpt_oss":
        (gate, gate_bound), (up, up_bound) = (
            finished(Oracle(*(x[i] for x in own)), "float32", bias=bias[i]) for i in range(2)
        )
        exact = gpt_oss(gate, up)
        # The gate's factor is at most 7, with slopes up to 1.1; the other factor is at most 8.
        bound = 1.1 * 8 * gate_bound + 7 * up_bound + 2.0**-20 * (np.abs(exact) + 8)
        bound += float(jnp.finfo(dtype).eps) * (np.abs(exact) + bound)
        bound += float(jnp.finfo(dtype).smallest_subnormal)
    elif case.pairs:
        gate, up = (Oracle(*(x[i] for x in own)) for i in range(2))
        gate_bias, up_bias = (None, None) if bias is None else bias
        options: dict[str, Any] = {"bias": gate_bias, "activation": case.activation}
        exact, bound = finished(gate, dtype, up=(up, up_bias), **options)
    else:
        exact, bound = finished(own, dtype, bias=bias, activation=case.activation)
    return np.where(has[:, None], exact, 0), np.where(has[:, None], bound, NONE)


NONE = 2.0**-149  # below every number of the results


@st.composite
def sizes_of(draw: st.DrawFn, case: Case) -> tuple[int, ...]:
    m = case.problem.m
    size = st.one_of(st.just(0), st.just(0), st.integers(0, 4), st.just(m), st.integers(-3, m))
    return tuple(draw(st.lists(size, min_size=case.groups, max_size=case.groups)))


# HYPOTHESIS_PROFILE=thorough draws 2,000 cases; the gate compiles only some of them.
PROGRAMS, COUNT = (10, 80) if hypothesis.settings().derandomize else (1500, 2000)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=COUNT, suppress_health_check=[hypothesis.HealthCheck.too_slow])
def test_random_products_are_within_their_error_bound(data):
    # Hypothesis prefers small and repeated numbers.
    seed = data.draw(st.integers(0, 2**32 - 1))
    drawn = case(random.Random(seed).randrange(PROGRAMS))
    sizes = data.draw(sizes_of(drawn))
    lhs, rhs, bias, _ = operands(drawn)
    got = product(
        lhs,
        rhs,
        np.array(sizes, np.int32),
        group_offset=drawn.offset,
        bias=bias,
        activation=drawn.activation,
        preferred_element_type=drawn.problem.result_dtype,
        backend=drawn.backend,
    )
    exact, bound = exact_and_bound(drawn, sizes)
    assert got.dtype == drawn.problem.result_dtype
    assert_within(got, exact, bound)
    assert not np.asarray(got)[bound[:, 0] == NONE].any()


# --- the definition -------------------------------------------------------------------------------

M, K, N = 11, 128, 70
RNG = np.random.default_rng(0)
LHS = jnp.asarray(RNG.normal(size=(M, K)) / 16, jnp.float32)
STACK = quantize(RNG.normal(size=(4, K, N)).astype(np.float32), INT4)
PAIRS = quantize(RNG.normal(size=(2, 4, K, N)).astype(np.float32), UINT4)
SIZES = np.array([3, 0, 5, 1], np.int32)


def ragged(lhs: Any = LHS, rhs: Any = STACK, sizes: Any = SIZES, **options: Any) -> Any:
    return product(lhs, rhs, sizes, **options)


def reference(lhs: Any, rhs: Any = STACK, sizes: Any = SIZES) -> Any:
    return lax.ragged_dot(lhs, rhs.dequantize(lhs.dtype), sizes)


def exact(rhs: Any = STACK, sizes: Any = SIZES, lhs: Any = LHS) -> np.ndarray:
    """The result in float64, row by row, for a stack of matrices."""
    weight, group = dequantize(rhs).value, owners(sizes, len(lhs))
    rows = np.asarray(lhs, np.float64)
    return np.stack(
        [x @ weight[g] if g >= 0 else np.zeros(N) for x, g in zip(rows, group, strict=True)]
    )


def test_matches_ragged_dot_of_the_dequantized_stack():
    weight = jnp.asarray(dequantize(STACK).value, jnp.float32)
    assert_close(ragged(), lax.ragged_dot(LHS, weight, jnp.asarray(SIZES)))


@pytest.mark.parametrize(
    "sizes",
    [[M, 0, 0, 0], [0, 0, 0, 99], [-7, 4, -1, 3], [2**31 - 1] * 4, [2, 2, 2, 2**31 - 1]],
    ids=str,
)
def test_invalid_group_sizes_are_clamped(sizes):
    """Sizes beyond the rows and negative ones give the documented rows, and nothing else."""
    assert_close(ragged(sizes=np.array(sizes, np.int32)), exact(sizes=sizes))


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([2, -5, 3, 100], [0, 0, 2, 2, 2, 3]),
        ([1, 0, 1], [0, 2, 2, 2, 2, 2]),
        ([2**31 - 1] * 2, [0] * 6),
    ],
)
def test_groups_of_rows_of_invalid_sizes(sizes, groups):
    found = ragged_dot.groups_of_rows(jnp.asarray(sizes, jnp.int32), 6)
    assert found.dtype == jnp.int32 and found.tolist() == groups


def test_group_sizes_of_any_integer_dtype():
    for sizes in (
        [3, 0, 5, 1],
        np.array([3, 0, 5, 1], np.uint8),
        np.array([3, -(2**60), 5, 2**60]),
    ):
        checked = ragged_dot._checked_sizes(sizes, 4, None)
        assert checked.dtype == jnp.int32
        np.testing.assert_array_equal(checked, np.clip(sizes, -(2**31), 2**31 - 1))


def test_no_rows_and_no_experts():
    assert ragged(LHS[:0]).shape == (0, N)
    none = ragged(rhs=STACK[:0], sizes=np.zeros(2, np.int32), group_offset=1)
    assert none.shape == (M, N) and not none.any()


def test_parts_of_the_experts_add_up():
    parts = [ragged(rhs=STACK[i : i + 2], group_offset=np.array([i])) for i in (0, 2)]
    np.testing.assert_array_equal(parts[0] + parts[1], ragged())
    for offset in (4, -2, 2**31 - 1, -(2**31)):
        assert not ragged(rhs=STACK[:2], group_offset=np.array([offset])).any()


def test_views_of_longer_stacks():
    layers = quantize(RNG.normal(size=(12, K, N)).astype(np.float32), INT4)
    index = jnp.array([[4, 5, 6, 7], [8, 9, 10, 11]], jnp.int32)
    assert_close(ragged(rhs=layers.select(index[0])), exact(layers[4:8]))
    got = ragged(rhs=layers.select(index), activation="relu")
    assert_close(got, np.maximum(exact(layers[4:8]), 0) * exact(layers[8:12]))


def test_groups_are_independent():
    """A NaN stays in its row, and out of gradients of the scales of other experts."""
    lhs = LHS.at[4].set(jnp.nan)
    assert np.isnan(ragged(lhs)).any(axis=1).tolist() == [row == 4 for row in range(M)]

    def loss(scale):
        return jnp.sum(ragged(lhs, STACK._with(scale=scale))[:3])

    gradient = np.asarray(jax.jit(jax.grad(loss))(STACK.scale))
    assert np.isfinite(gradient[[0, 1, 3]]).all()


def test_rounded_rows():
    rounded = jax.jit(quantize_activations)(LHS)  # int8
    np.testing.assert_array_equal(ragged(lhs_qtype=jnp.int8), ragged(rounded))


def test_memory_is_one_float_expert():
    """The definition dequantizes one matrix at a time."""
    stack = quantize(np.ones((64, K, N), np.float32), Format(4))
    lhs, sizes = jnp.ones((256, K), jnp.float32), jnp.full(64, 4, jnp.int32)

    def total(x):
        return jnp.sum(ragged(x, stack, sizes, backend="xla"))

    for function in (total, jax.grad(total)):
        text = jax.jit(function).lower(lhs).as_text()
        floats = re.findall(r"tensor<((?:\d+x)+)f32>", text)
        sizes_of = [math.prod(map(int, shape[:-1].split("x"))) for shape in floats]
        assert K * N <= max(sizes_of) <= 4 * K * 128


# --- transformations ------------------------------------------------------------------------------


def test_gradients_of_pairs():
    bias = jnp.asarray(RNG.normal(size=(2, 4, N)), jnp.float32)
    group = owners(SIZES, M)

    def got(x, rhs, bias):
        return ragged(x, rhs, bias=bias, activation="silu")

    def want(x, rhs, bias):
        gate, up = (
            lax.ragged_dot(x, w, jnp.asarray(SIZES)) + jnp.where(group[:, None] >= 0, b[group], 0)
            for w, b in zip(rhs.dequantize(), bias, strict=True)
        )
        return jax.nn.silu(gate) * up

    def derivatives(f):
        def loss(x, scale, bias):
            return jnp.sum(jnp.sin(f(x, PAIRS._with(scale=scale), bias)))

        args = LHS, PAIRS.scale, bias
        tangents = tuple(jnp.full_like(x, 0.1) for x in args)
        return jax.grad(loss, (0, 1, 2))(*args), jax.jvp(loss, args, tangents)[1][None]

    assert_close(*(jax.jit(functools.partial(derivatives, f))() for f in (got, want)))


def test_vmap_and_its_gradient():
    lhs = jnp.stack([LHS, LHS[::-1]])
    sizes = np.array([[3, 0, 5, 1], [0, 11, 0, 0]], np.int32)
    stacks = quantize(RNG.normal(size=(2, 4, K, N)).astype(np.float32), INT4)

    def total(f):
        return lambda x, *sizes: jnp.sum(jnp.sin(f(x, STACK, *sizes)))

    @jax.jit
    def got(lhs, sizes, stacks):
        return (
            jax.vmap(lambda x, s: ragged(x, sizes=s))(lhs, sizes),
            jax.vmap(lambda rhs: ragged(rhs=rhs))(stacks),
            jax.grad(total(jax.vmap(ragged, in_axes=(0, None))))(lhs),
            jax.vmap(jax.grad(total(ragged)))(lhs, sizes),
        )

    gradient = jax.jit(jax.grad(total(reference)))
    want = (
        np.stack([exact(sizes=s, lhs=x) for x, s in zip(lhs, sizes, strict=True)]),
        np.stack([exact(stacks[i]) for i in range(2)]),
        np.stack([gradient(x, SIZES) for x in lhs]),
        np.stack([gradient(x, s) for x, s in zip(lhs, sizes, strict=True)]),
    )
    assert_close(got(lhs, sizes, stacks), want)


def test_export():
    given = {"platforms": ["cpu", "cuda"], "disabled_checks": DISABLED_EXPORT_CHECKS}
    exported = export.export(jax.jit(ragged), **given)(LHS)
    assert_close(export.deserialize(exported.serialize()).call(LHS), exact())


# --- meshes ---------------------------------------------------------------------------------------


def mesh(count: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = jax.devices("cpu")[:count]
    return jax.make_mesh((count,), ("model",), axis_types=(kind,), devices=devices)


@pytest.mark.parametrize("count", [2, 4])
def test_experts_sharded_by_group_offset(count):
    """Each device has some of the experts; the sum over devices is the result."""
    devices = mesh(count)
    specs = STACK.partition_spec(devices, lead=("model",))

    def part(lhs, rhs, sizes):
        offset = lax.axis_index("model") * rhs.shape[0]
        own = quantized_ragged_dot(lhs, rhs, sizes, group_offset=offset)
        return lax.psum(own, "model")

    f = jax.shard_map(part, mesh=devices, in_specs=(P(), specs, P()), out_specs=P())
    args = LHS, put(STACK, devices, specs), SIZES
    if count == 4:
        assert_close(jax.jit(f)(*args), exact())
        return

    def loss(f):
        return lambda x, *others: jnp.sum(jnp.sin(f(x, *others)))

    got, gradient = jax.jit(lambda *args: (f(*args), jax.grad(loss(f))(*args)))(*args)
    assert_close(got, exact())
    assert_close(gradient, jax.jit(jax.grad(loss(reference)))(LHS))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axis", ["k", "n"])
def test_matrices_sharded_over_a_mesh(axis, kind):
    stack = quantize(RNG.normal(size=(4, K, 128)).astype(np.float32), INT4)
    weight, group = dequantize(stack).value, owners(SIZES, M)
    want = np.einsum("mk,mkn->mn", LHS, weight[group] * (group >= 0)[:, None, None])
    devices = mesh(2, kind)
    with jax.set_mesh(devices):
        placed = put(stack, devices, stack.partition_spec(devices, **{axis: "model"}))
        out = P() if kind is AxisType.Explicit and axis == "k" else None
        f = jax.jit(functools.partial(quantized_ragged_dot, out_sharding=out))
        got = f(LHS, placed, SIZES)
        assert_close(got, want)
        assert not [name for name in collectives(f, LHS, placed, SIZES) if "u32" in name]
        if kind is AxisType.Explicit and axis == "n":
            assert jax.typeof(got).sharding.spec == P(None, "model")
