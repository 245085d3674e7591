"""`quantized_ragged_dot`: random cases against the oracle, and transformations."""

import dataclasses
import functools
from typing import Any

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
    quantized_glu,
    quantized_matmul,
    quantized_ragged_dot,
)

P = jax.P
EPILOGUES = ("none", "none", "bias", "silu", "gelu", "pair", "pair with bias", "gpt_oss")


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged product: a stack of matrices or pairs, sizes of all groups, and the first local
    group if there are others."""

    problem: Problem
    sizes: tuple[int, ...]
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


@st.composite
def cases(draw: st.DrawFn) -> Case:
    experts = draw(st.sampled_from([1, 2, 3, 4, 8, 20]))
    m = draw(st.sampled_from([0, 1, 2, 3, 5, 8, 9, 17, 40, 70]))
    offset = draw(st.sampled_from([None, None, 0, 1, 3, -1]))
    groups = experts if offset is None else experts + draw(st.integers(0, 3))
    size = st.one_of(st.just(0), st.just(0), st.integers(0, 4), st.just(m), st.integers(-3, m))
    sizes = draw(st.lists(size, min_size=groups, max_size=groups).map(tuple))
    kind = draw(st.sampled_from(["integers", "integers", "codebook", "narrow"]))
    fields: dict[str, Any] = {
        "bits": draw(st.integers(1, 8)),
        "zero": draw(st.sampled_from(["none", "integer", "float"])),
    }
    if kind == "codebook":
        fields = {"bits": 4, "codebook": draw(st.sampled_from(["nf4", "e2m1"]))}
    if kind == "narrow":
        narrow = draw(st.sampled_from(["e8m0", "e4m3", "int8"]))
        fields = {"bits": 4, "narrow": narrow}
        fields |= {} if narrow == "int8" else {"codebook": "e2m1"}
    epilogue = draw(st.sampled_from(EPILOGUES))
    lhs = draw(st.sampled_from(["bfloat16", "float16", "float32", "int8", "float8_e4m3fn"]))
    dtype = "bfloat16" if lhs in ("int8", "float8_e4m3fn") else lhs
    pairs = (2,) if epilogue in ("pair", "pair with bias", "gpt_oss") else ()
    problem = Problem(
        name=f"seed {draw(st.integers(0, 2**32 - 1))}",
        m=m,
        k=draw(st.sampled_from([64, 72, 128])),
        n=draw(st.sampled_from([8, 64, 70])),
        group_size=draw(st.sampled_from([-1, 32, 64])),
        dtype=dtype,
        out_dtype=draw(st.sampled_from([None, "float32"])),
        stack=(*pairs, experts),
        scale=2.0**-5,
        permuted=draw(st.integers(0, 5)) == 0,
        **fields,
    )
    default = backends(dtype, problem.format)[0]
    backend = draw(st.sampled_from([default, default, "xla"]))
    return Case(problem, sizes, offset, epilogue, lhs, backend)


product = jax.jit(  # one program per call: eager ones compile one per operation
    quantized_ragged_dot,
    static_argnames=("activation", "preferred_element_type", "backend", "lhs_qtype"),
)


def gpt_oss(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate = np.minimum(gate, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)


def oracle(case: Case, lhs: Any, rhs: Any, bias: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The exact result with a bound: each row times the matrix of its group; 0 +- 0 for none."""
    scale = 1.0
    if isinstance(lhs, QuantizedActivations):
        scale, lhs = np.asarray(lhs.scale), np.asarray(lhs.values).astype(jnp.bfloat16)
    every = Oracle.of(lhs, dequantize(rhs)).scaled(scale)
    group = owners(case.sizes, len(lhs)) - (case.offset or 0)
    has = (group >= 0) & (group < rhs.shape[-3]) & (owners(case.sizes, len(lhs)) >= 0)
    expert, row = np.where(has, group, 0), np.arange(len(lhs))
    own = Oracle(*(x[..., expert, row, :] for x in every))
    bias = None if bias is None else np.asarray(bias)[..., expert, :]
    if case.epilogue == "gpt_oss":
        (gate, gate_bound), (up, up_bound) = (
            finished(Oracle(*(x[i] for x in own)), "float32", bias=bias[i]) for i in range(2)
        )
        exact = gpt_oss(gate, up)
        # The gate's factor is at most 7, with slopes up to 1.1; the factor of up is at most 8.
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
    return np.where(has[:, None], exact, 0), np.where(has[:, None], bound, 2.0**-149)


# HYPOTHESIS_PROFILE=thorough runs 2,000. Each example compiles a program.
COUNT = 40 if hypothesis.settings().derandomize else 2000


@hypothesis.given(cases())
@hypothesis.settings(max_examples=COUNT, suppress_health_check=[hypothesis.HealthCheck.too_slow])
def test_random_products_are_within_their_error_bound(case):
    p, rng = case.problem, generator(case.problem)
    rhs = weights(p, rng)
    if case.lhs in ("int8", "float8_e4m3fn"):
        values = jnp.asarray(rng.integers(-127, 128, (p.m, p.k)).astype(jnp.dtype(case.lhs)))
        scale = jnp.asarray(rng.uniform(0.5, 1.5, (p.m, 1)) / 64, jnp.float32)
        lhs: Any = QuantizedActivations(values, scale, jnp.dtype(p.dtype))
    else:
        lhs = jnp.asarray(rng.normal(size=(p.m, p.k)).astype(jnp.dtype(p.dtype)))
    bias = None
    if case.epilogue in ("bias", "pair with bias", "gpt_oss"):
        bias = jnp.asarray(rng.normal(size=(*p.stack, p.n)).astype(jnp.dtype(p.dtype)))
    dtype = jnp.dtype(p.out_dtype or p.dtype)
    got = product(
        lhs,
        rhs,
        np.array(case.sizes, np.int32),
        group_offset=case.offset,
        bias=bias,
        activation=case.activation,
        preferred_element_type=dtype,
        backend=case.backend,
    )
    assert got.dtype == dtype and got.shape == (p.m, p.n)
    exact, bound = oracle(case, lhs, rhs, bias, dtype)
    assert_within(got, exact, bound)
    assert not np.asarray(got)[bound[:, 0] == 2.0**-149].any()


# --- the definition -------------------------------------------------------------------------------

M, K, N = 11, 128, 70
RNG = np.random.default_rng(0)
LHS = jnp.asarray(RNG.normal(size=(M, K)) / 16, jnp.float32)
STACK = quantize(RNG.normal(size=(4, K, N)).astype(np.float32), INT4)
PAIRS = quantize(RNG.normal(size=(2, 4, K, N)).astype(np.float32), UINT4)
SIZES = jnp.array([3, 0, 5, 1], jnp.int32)
ragged = functools.partial(product, rhs=STACK, group_sizes=SIZES)


def reference(lhs: Any, rhs: Any = STACK, sizes: Any = SIZES) -> Any:
    return lax.ragged_dot(lhs, rhs.dequantize(lhs.dtype), sizes)


def test_matches_ragged_dot_of_the_dequantized_stack():
    assert_close(ragged(LHS), reference(LHS))


@pytest.mark.parametrize(
    "sizes",
    [
        [M, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 99],
        [-7, 4, -1, 3],
        [2**31 - 1] * 4,
        [2, 2, 2, 2**31 - 1],
    ],
    ids=str,
)
def test_invalid_group_sizes_are_clamped(sizes):
    """Sizes beyond the rows and negative ones give the documented rows."""
    got = np.asarray(product(LHS, STACK, np.array(sizes, np.int32)))
    every = np.asarray(LHS @ STACK)
    for row, group in enumerate(owners(sizes, M)):
        np.testing.assert_allclose(got[row], every[group, row] if group >= 0 else 0, atol=1e-4)


def test_group_sizes_of_any_integer_dtype():
    want = np.asarray(ragged(LHS))
    for sizes in ([3, 0, 5, 1], np.array([3, 0, 5, 1], np.uint8), np.array([3, -(2**60), 5, 1])):
        np.testing.assert_array_equal(ragged(LHS, group_sizes=sizes), want)


def test_no_rows_and_no_experts():
    assert ragged(LHS[:0]).shape == (0, N)
    none = quantized_ragged_dot(LHS, STACK[:0], jnp.zeros(2, jnp.int32), group_offset=1)
    assert none.shape == (M, N) and not none.any()


def test_parts_of_the_experts_add_up():
    want = ragged(LHS)
    part = jax.jit(lambda rhs, offset: ragged(LHS, rhs=rhs, group_offset=offset))
    parts = [part(STACK[i : i + 2], jnp.array([i])) for i in (0, 2)]
    np.testing.assert_array_equal(parts[0] + parts[1], want)
    for offset in (4, -2, 2**31 - 1, -(2**31)):
        assert not part(STACK[:2], jnp.array(offset, jnp.int32)).any()


def test_views_of_longer_stacks():
    layers = quantize(RNG.normal(size=(12, K, N)).astype(np.float32), INT4)
    view = layers.select(4 * jnp.int32(1) + jnp.arange(4, dtype=jnp.int32))
    np.testing.assert_array_equal(ragged(LHS, rhs=view), ragged(LHS, rhs=layers[4:8]))
    index = jnp.array([[4, 5, 6, 7], [8, 9, 10, 11]], jnp.int32)
    got = ragged(LHS, rhs=layers.select(index), activation="silu")
    gate, up = ragged(LHS, rhs=layers[4:8]), ragged(LHS, rhs=layers[8:12])
    assert_close(got, jax.nn.silu(gate) * up)


def test_groups_are_independent():
    """A NaN stays in its row, also in gradients of the scales of other experts."""
    lhs = LHS.at[4].set(jnp.nan)
    assert np.isnan(ragged(lhs)).any(axis=1).tolist() == [row == 4 for row in range(M)]

    def loss(scale):
        return jnp.sum(ragged(lhs, rhs=STACK._with(scale=scale))[:3])

    gradient = jax.grad(loss)(STACK.scale)
    assert np.isfinite(gradient[:1]).all() and np.isfinite(gradient[3:]).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_rounded_rows(dtype):
    got = ragged(LHS, lhs_qtype=dtype)
    wide = functools.partial(quantized_matmul, lhs_qtype=dtype)
    for row, group in enumerate(owners(SIZES, M)[:9]):
        np.testing.assert_allclose(got[row], wide(LHS[row], STACK[group]), rtol=1e-5, atol=1e-4)
    pair = ragged(LHS, rhs=PAIRS, lhs_qtype=dtype, activation="relu")
    gate, up = (ragged(LHS, rhs=PAIRS[i], lhs_qtype=dtype) for i in range(2))
    assert_close(pair, jax.nn.relu(gate) * up)


def test_a_group_equals_a_product_of_its_rows():
    """Groups of one block have the bits of `quantized_matmul` and `quantized_glu`."""
    lhs = LHS.astype(jnp.bfloat16)
    got = ragged(lhs, bias=jnp.ones((4, N)), activation="gelu")
    want = quantized_matmul(lhs[3:8], STACK[2], bias=jnp.ones(N), activation="gelu")
    np.testing.assert_array_equal(got[3:8], want)
    got = ragged(lhs, rhs=PAIRS, activation="silu")
    np.testing.assert_array_equal(got[3:8], quantized_glu(lhs[3:8], PAIRS[:, 2]))


def test_floats_match_one_expert():
    """The definition dequantizes one matrix at a time, for any number of experts."""
    stack = quantize(np.ones((64, K, N), np.float32), Format(4))
    lhs = jnp.ones((256, K), jnp.float32)
    sizes = jnp.full(64, 4, jnp.int32)

    f = functools.partial(quantized_ragged_dot, backend="xla")
    text = jax.jit(f).lower(lhs, stack, sizes).as_text()
    assert f"tensor<{K}x{N}xf32>" in text or f"tensor<{K}x128xf32>" in text
    assert f"tensor<64x{K}x" not in text
    grad = jax.jit(jax.grad(lambda x: jnp.sum(f(x, stack, sizes)))).lower(lhs).as_text()
    assert f"tensor<64x{K}x" not in grad


# --- transformations ------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [False, True])
def test_gradients(pairs):
    rhs = PAIRS if pairs else STACK
    bias = jnp.asarray(RNG.normal(size=(*rhs.shape[:-2], N)), jnp.float32)
    group = owners(SIZES, M)

    def got(x, rhs, bias):
        return ragged(x, rhs=rhs, bias=bias, activation="silu")

    def want(x, rhs, bias):
        weight, bias = (rhs.dequantize(), bias) if pairs else (rhs.dequantize()[None], bias[None])
        gate, *up = (
            lax.ragged_dot(x, w, SIZES) + jnp.where(group[:, None] >= 0, b[group], 0)
            for w, b in zip(weight, bias, strict=True)
        )
        return jax.nn.silu(gate) * (up[0] if up else 1)

    def derivatives(f):
        def loss(x, scale, bias):
            return jnp.sum(jnp.sin(f(x, rhs._with(scale=scale), bias)))

        args = LHS, rhs.scale, bias
        tangents = tuple(jnp.full_like(x, 0.1) for x in args)
        return jax.grad(loss, (0, 1, 2))(*args), jax.jvp(loss, args, tangents)[1][None]

    assert_close(*(jax.jit(functools.partial(derivatives, f))() for f in (got, want)))


def test_vmap_and_its_gradient():
    lhs = jnp.stack([LHS, LHS[::-1]])
    sizes = jnp.array([[3, 0, 5, 1], [0, 11, 0, 0]], jnp.int32)
    stacks = quantize(RNG.normal(size=(2, 4, K, N)).astype(np.float32), INT4)

    def total(f):
        return lambda x, s: jnp.sum(jnp.sin(f(x, group_sizes=s)))

    def loop(f, *args):
        return jnp.stack([f(*xs) for xs in zip(*args, strict=True)])

    @jax.jit
    def got(lhs, sizes, stacks):
        batched = jax.vmap(ragged)
        return (
            jax.vmap(lambda x, s: ragged(x, group_sizes=s))(lhs, sizes),
            jax.vmap(lambda rhs: ragged(LHS, rhs=rhs))(stacks),
            jax.grad(total(lambda x, group_sizes: batched(x)))(lhs, sizes),
            jax.vmap(jax.grad(total(ragged)))(lhs, sizes),
        )

    @jax.jit
    def want(lhs, sizes, stacks):
        own = [
            jax.grad(lambda x, s=s: jnp.sum(jnp.sin(reference(x, sizes=s))))(x)
            for x, s in zip(lhs, sizes, strict=True)
        ]
        same = [jax.grad(lambda x: jnp.sum(jnp.sin(reference(x))))(x) for x in lhs]
        return (
            loop(lambda x, s: reference(x, sizes=s), lhs, sizes),
            loop(lambda i: reference(LHS, jax.tree.map(lambda leaf: leaf[i], stacks)), range(2)),
            jnp.stack(same),
            jnp.stack(own),
        )

    assert_close(got(lhs, sizes, stacks), want(lhs, sizes, stacks))


def test_export():
    platforms = ["cpu", "cuda"]
    checks = DISABLED_EXPORT_CHECKS
    exported = export.export(jax.jit(ragged), platforms=platforms, disabled_checks=checks)(LHS)
    restored = export.deserialize(exported.serialize())
    assert_close(restored.call(LHS), reference(LHS))


# --- meshes ---------------------------------------------------------------------------------------


def mesh(count: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh(
        (count,), ("model",), axis_types=(kind,), devices=jax.devices("cpu")[:count]
    )


@pytest.mark.parametrize("count", [2, 4])
def test_experts_sharded_by_group_offset(count):
    """Each device has some of the experts; the sum over devices is the result."""
    devices = mesh(count)
    specs = STACK.partition_spec(devices, lead=("model",))
    stack = put(STACK, devices, specs)

    def part(lhs, rhs, sizes):
        offset = lax.axis_index("model") * rhs.shape[0]
        own = quantized_ragged_dot(lhs, rhs, sizes, group_offset=offset)
        return lax.psum(own, "model")

    f = jax.jit(jax.shard_map(part, mesh=devices, in_specs=(P(), specs, P()), out_specs=P()))
    assert_close(f(LHS, stack, SIZES), reference(LHS))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(x, stack, SIZES)))))(LHS)
    assert_close(gradient, jax.grad(lambda x: jnp.sum(jnp.sin(reference(x))))(LHS))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axis", ["k", "n"])
def test_matrices_sharded_over_a_mesh(axis, kind):
    stack = quantize(RNG.normal(size=(4, K, 128)).astype(np.float32), INT4)
    want, devices = reference(LHS, stack), mesh(2, kind)
    with jax.set_mesh(devices):
        placed = put(stack, devices, stack.partition_spec(devices, **{axis: "model"}))
        out = P() if kind is AxisType.Explicit and axis == "k" else None
        f = jax.jit(functools.partial(quantized_ragged_dot, out_sharding=out))
        got = f(LHS, placed, SIZES)
        assert_close(got, want)
        assert not [name for name in collectives(f, LHS, placed, SIZES) if "u32" in name]
        if kind is AxisType.Explicit and axis == "n":
            assert jax.typeof(got).sharding.spec == P(None, "model")
