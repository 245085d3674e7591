"""Attention by our own kernel (`cuda/ops/attend.cu`) against XLA's in float32."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import LLAMA
from jax import lax

from jaxlowbit import INT8
from jaxlowbit._backends import cuda_attend
from jaxlowbit._llm import attention
from jaxlowbit._llm.cache import make_cache
from jaxlowbit.llm import init

pytestmark = pytest.mark.gpu

native: Any = functools.partial(attention.attend, implementation="native")
xla: Any = functools.partial(attention.attend, implementation="xla")


def normal(*shape, dtype, seed):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values.astype(np.float32)).astype(dtype)


def hidden(cache, seen, value):
    """The cache with a value wherever it is not seen."""
    seen = jnp.pad(seen, ((0, 0), (0, cache.shape[1] - seen.shape[1])))
    return jnp.where(seen[:, :, None, None], cache, jnp.asarray(value, cache.dtype))


def assert_right(got, q, k, v, positions, held, **options):
    """Of weights and results that are rounded once each, to the dtype of the result."""
    reach = options.get("reach") or k.shape[1]
    seen = attention.mask(positions, held[:, :reach], options["window"])[:, 0]
    wide = [x.astype(jnp.float32) for x in (q, hidden(k, seen, 0), hidden(v, seen, 0))]
    want = xla(*wide, positions, held, **options)
    size = xla(*wide[:2], jnp.abs(wide[2]), positions, held, **options)
    some = seen.any(axis=1)[:, None, None]
    want, size = (np.asarray(jnp.where(some, x, 0)).astype(np.float64) for x in (want, size))
    rounding = {"bfloat16": 2.0**-9, "float16": 2.0**-12}[str(got.dtype)]
    assert got.shape == want.shape and got.dtype == q.dtype
    error = np.abs(np.asarray(got).astype(np.float64) - want)
    worst = np.nan_to_num(error / ((2.2 * rounding + 1e-4) * size + 1e-5), nan=np.inf).max()
    assert worst <= 1, worst


def problem(batch, heads, kv_heads, size, slots, dtype, seed=0):
    q = normal(batch, 1, heads, size, dtype=dtype, seed=3 * seed)
    k, v = (normal(batch, slots, kv_heads, size, dtype=dtype, seed=3 * seed + i) for i in (1, 2))
    return q, k, v


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [64, 128, 256, 80])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (32, 8), (9, 3), (16, 1)])
def test_it_is_that_of_xla(heads, kv_heads, size, dtype):
    for seed, (batch, reach) in enumerate(
        [(1, 1), (2, 7), (5, 256), (1, 1000), (2, 1024), (16, 1024), (1, 4096)]
    ):
        slots = reach + 8 * (seed % 2)
        q, k, v = problem(batch, heads, kv_heads, size, slots, dtype, seed)
        rng = np.random.default_rng(seed)
        held = np.broadcast_to(np.arange(slots, dtype=np.int32), (batch, slots)).copy()
        held[rng.uniform(size=held.shape) < 0.1] = -1  # holes
        positions = jnp.asarray(rng.integers(0, reach, (batch, 1), np.int32))
        window = (None, 1, 100, 4096)[seed % 4]
        options = {"window": window, "scale": size**-0.5, "reach": reach}
        held = jnp.asarray(held)
        seen = attention.mask(positions, held[:, :reach], window)[:, 0]
        unseen = (hidden(x, seen, jnp.nan) for x in (k, v))
        got = jax.jit(functools.partial(native, **options))(q, *unseen, positions, held)
        assert_right(got, q, k, v, positions, held, **options)


def test_a_query_that_sees_nothing_gets_zeros():
    q, k, v = (x * jnp.nan for x in problem(2, 32, 8, 128, 1024, "bfloat16"))
    some = jnp.broadcast_to(jnp.arange(1024, dtype=jnp.int32), (2, 1024))
    none = jnp.full((2, 1024), -1)
    program = jax.jit(functools.partial(native, window=None, scale=1.0))
    for position, held in ((-1, some), (9, none)):
        got = program(q, k, v, jnp.full((2, 1), position), held)
        assert not np.asarray(got).astype(np.float32).any()


def test_runs_repeat_their_bits():
    q, k, v = problem(3, 32, 8, 128, 4000, "bfloat16")
    held = jnp.broadcast_to(jnp.arange(4000, dtype=jnp.int32), (3, 4000))
    program = jax.jit(functools.partial(native, window=None, scale=0.1))
    one = np.asarray(program(q, k, v, jnp.full((3, 1), 3999), held)).tobytes()
    for _ in range(100):
        again = program(q, k, v, jnp.full((3, 1), 3999), held)
        assert np.asarray(again).tobytes() == one


BATCH, SLOTS, REACH, HEADS, KV_HEADS, SIZE, STEPS = 2, 320, 256, 32, 8, 128, 40


def loop(attend, cache, queries, keys, values):
    """Appends and attends, a step after the other, as a decoder does; what every step returns."""

    def step(state):
        i, (k, v, held), outs = state
        k = lax.dynamic_update_slice(k, lax.dynamic_slice_in_dim(keys, i, 1, 1), (0, i, 0, 0))
        v = lax.dynamic_update_slice(v, lax.dynamic_slice_in_dim(values, i, 1, 1), (0, i, 0, 0))
        positions = jnp.full((BATCH, 1), i)
        held = lax.dynamic_update_slice(held, positions, (0, i))
        q = lax.dynamic_slice_in_dim(queries, i, 1, 1)
        out = attend(q, k, v, positions, held, window=None, scale=0.1, reach=REACH)
        return i + 1, (k, v, held), lax.dynamic_update_slice(outs, out, (0, i, 0))

    outs = jnp.zeros((BATCH, STEPS, HEADS * SIZE), queries.dtype)
    start = jnp.int32(0), cache, outs
    _, cache, outs = lax.while_loop(lambda state: state[0] < STEPS, step, start)
    return cache, outs


def empty(dtype):
    k, v = (jnp.zeros((BATCH, SLOTS, KV_HEADS, SIZE), dtype) for _ in range(2))
    return k, v, jnp.full((BATCH, SLOTS), -1, jnp.int32)


def tokens(dtype):
    queries = normal(BATCH, STEPS, HEADS, SIZE, dtype=dtype, seed=1)
    keys, values = (normal(BATCH, STEPS, KV_HEADS, SIZE, dtype=dtype, seed=seed) for seed in (2, 3))
    return queries, keys, values


def test_in_a_loop_that_carries_a_donated_cache():
    given = tokens("bfloat16")
    program = jax.jit(functools.partial(loop, native), donate_argnums=0)
    cache, outs = program(empty("bfloat16"), *given)
    wide = [x.astype(jnp.float32) for x in given]
    expected, wanted = jax.jit(functools.partial(loop, xla))(empty("float32"), *wide)
    for one, other in zip(cache, expected, strict=True):
        assert jnp.array_equal(one.astype(other.dtype), other)
    error = np.abs(np.asarray(outs).astype(np.float32) - np.asarray(wanted))
    assert error.max() < 0.03


def test_a_loop_reads_the_cache_in_place():
    program = jax.jit(functools.partial(loop, native), donate_argnums=0)
    text = program.lower(empty("bfloat16"), *tokens("bfloat16")).compile().as_text() or ""
    assert text.count('custom_call_target="jaxlowbit_attend"') == 1
    shape = rf"bf16\[{BATCH},{SLOTS},{KV_HEADS},{SIZE}\]\S*"
    assert re.search(shape, text)
    assert not re.findall(rf"= {shape} (?:copy|slice|dynamic-slice|transpose|convert)\(", text)
    assert f"bf16[{BATCH},{REACH},{KV_HEADS},{SIZE}]" not in text


def test_caches_of_a_stack():
    """XLA may hand over each layer's part of the stack where it lies."""
    layers = 3
    q, k, v = problem(layers * BATCH, 12, 4, 40, 37, "float16")
    held = jnp.broadcast_to(jnp.arange(37, dtype=jnp.int32), (BATCH, 37))
    positions = jnp.full((BATCH, 1), 30)
    stacks = [x.reshape(layers, BATCH, *x.shape[1:]) for x in (q, k, v)]
    options: dict[str, Any] = {"window": 20, "scale": 0.2}

    @jax.jit
    def attend(stacks):
        def body(_, x):
            return None, native(*x, positions, held, **options)

        return lax.scan(body, None, stacks)[1]

    for i, got in enumerate(attend(stacks)):
        q, k, v = (x[i] for x in stacks)
        assert_right(got, q, k, v, positions, held, **options)


def test_a_decoder_chooses_it():
    decoder = init(LLAMA, INT8, dtype=jnp.bfloat16).decoder
    cache = make_cache(LLAMA, 2, 256, jnp.bfloat16)
    one = jnp.zeros((2, 1), jnp.int32)
    text = jax.jit(lambda cache: decoder.forward(one, one, cache)).lower(cache).as_text()
    assert text.count("custom_call @jaxlowbit_attend") == LLAMA.layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": ((2, 64, 2, 32), "float16")}, "key is f16 but must be the type of query"),
        ({"query": ((2, 4, 32), "float32")}, "query is f32 but must be bf16 or f16"),
        ({"value": ((2, 63, 2, 32), "bfloat16")}, r"value has shape \[2, 63, 2, 32\] but must be"),
        ({"position": ((3,), "int32")}, r"position has shape \[3\] but must be \[batch\] = \[2\]"),
        ({"positions": ((2, 64), "uint32")}, "positions is u32 but must be s32"),
        ({"query": ((2, 3, 32), "bfloat16")}, "query has 3 heads and key has 2 but"),
        ({"query": ((2, 34, 32), "bfloat16")}, "query has 34 heads and key has 2 but from 1 to 16"),
        ({"reach": 65}, "reach is 65 but must be from 0 to the 64 slots"),
        ({"window": -1}, "window is -1 but must be positive"),
    ],
)
def test_what_breaks_the_contract_is_refused(changes, message):
    specs = {
        "query": ((2, 4, 32), "bfloat16"),
        "key": ((2, 64, 2, 32), "bfloat16"),
        "value": ((2, 64, 2, 32), "bfloat16"),
        "position": ((2,), "int32"),
        "positions": ((2, 64), "int32"),
    }
    options: dict[str, Any] = {"reach": 64, "window": None, "scale": 1.0}
    options |= {name: changes[name] for name in changes.keys() & options.keys()}
    specs |= {name: changes[name] for name in changes.keys() & specs.keys()}
    operands = [jnp.zeros(shape, jnp.dtype(dtype)) for shape, dtype in specs.values()]
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"attend: {message}.*\."):
        jax.block_until_ready(cuda_attend.attend(*operands, **options))
