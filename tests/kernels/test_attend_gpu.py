"""Attention of a decode step by our kernel (`cuda/ops/attend.cu`) against XLA in float32."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import CONFIGS, PARTS, random
from gpu_problems import rounding
from helpers import call_names
from jax import lax

from jaxlowbit import INT8
from jaxlowbit._backends import cuda_attend
from jaxlowbit._backends.cuda_attend import Operands, Options
from jaxlowbit._composite.rms_norm import rms_norm
from jaxlowbit._core.activations import reach as reach_of
from jaxlowbit._core.activations import rounded_tokens
from jaxlowbit._llm import attention, block_steps, rope
from jaxlowbit._llm.cache import make_cache
from jaxlowbit.llm import Decoder, init

pytestmark = pytest.mark.gpu

EPSILON = 1e-6


def native(operands, *, pairs="halves", reach=None, window=None, scale=1.0):
    reach = operands.keys.shape[1] if reach is None else reach
    return cuda_attend.attend(operands, Options(pairs, EPSILON, reach, window, scale))


def appended(operands, pairs="halves"):
    """XLA reference: rotated queries, and the cache with the new keys and values."""
    q, k, v = (x[:, None] for x in operands[:3])
    norms = operands.norms or (None, None)
    normalized = (
        x if norm is None else rms_norm(x, norm, EPSILON)
        for x, norm in zip((q, k), norms, strict=True)
    )
    cos, sin = (x[:, None, None] for x in operands.rotation)
    q, k = (rope.rotate(x, (cos, sin), pairs) for x in normalized)
    at = (0, operands.slot, 0, 0)
    caches = ((operands.keys, k), (operands.values, v))
    return q, *(lax.dynamic_update_slice(cache, new, at) for cache, new in caches)


def by_xla(operands, *, pairs="halves", window=None, scale=1.0, reach=None, magnitude=False):
    """Attention in float32, or of absolute values, which bounds the magnitude of the terms."""
    q, k, v = (x.astype(jnp.float32) for x in appended(operands, pairs))
    reach = k.shape[1] if reach is None else reach
    position, held = operands.position[:, None], operands.positions
    seen = attention.mask(position, held[:, :reach], window)[:, 0]
    k, v = hidden(k, seen, 0), hidden(v, seen, 0)
    options: dict[str, Any] = {"window": window, "scale": scale, "reach": reach}
    options["sinks"] = operands.sinks
    v = jnp.abs(v) if magnitude else v
    out = attention.attend(q, k, v, position, held, implementation="xla", **options)
    out = out.reshape(operands.query.shape)
    return jnp.where(seen.any(axis=1)[:, None, None], out, 0)


def normal(*shape, dtype, seed):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values.astype(np.float32)).astype(dtype)


def hidden(cache, seen, value):
    """Fills the unseen positions of the cache with a value."""
    seen = jnp.pad(seen, ((0, 0), (0, cache.shape[1] - seen.shape[1])))
    return jnp.where(seen[:, :, None, None], cache, jnp.asarray(value, cache.dtype))


def assert_right(got, operands, **options):
    """Bound: weights and results each round once, to the dtype of the result."""
    out, keys, values = got

    @jax.jit
    def reference(operands):
        _, *caches = appended(operands, options["pairs"])
        return caches, *(by_xla(operands, magnitude=x, **options) for x in (False, True))

    caches, *found = reference(operands)
    for one, other in zip((keys, values), caches, strict=True):
        assert jnp.array_equal(one, other, equal_nan=True)
    want, size = map(np.asarray, found)
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[str(out.dtype)]
    assert out.shape == want.shape and out.dtype == operands.query.dtype
    error = np.abs(np.asarray(out).astype(np.float64) - want)
    worst = np.nan_to_num(error / ((2.2 * rounding + 1e-4) * size + 1e-5), nan=np.inf).max()
    assert worst <= 1, worst


def problem(batch, heads, kv_heads, size, slots, dtype, seed=0, slot=None):
    """Random operands; the cache holds the positions of its slots, and the last is written."""
    rng = np.random.default_rng(seed)
    cache = (batch, slots, kv_heads, size)
    shapes = (batch, heads, size), *[(batch, kv_heads, size)] * 2, cache, cache
    query, key, value, keys, values = (
        normal(*shape, dtype=dtype, seed=5 * seed + i) for i, shape in enumerate(shapes)
    )
    # Multiples of 1/4, so that rotation is exact.
    cos, sin = (
        jnp.asarray(rng.integers(-4, 5, (batch, size // 2)) / 4, jnp.float32) for _ in range(2)
    )
    held = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, slots))
    slot = jnp.int32(slots - 1 if slot is None else slot)
    position = jnp.full(batch, slots - 1, jnp.int32)
    rotation = cos, sin
    return Operands(query, key, value, rotation, None, keys, values, slot, position, held)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [64, 128, 256, 80])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (32, 8), (9, 3), (16, 1)])
def test_attention_matches_xla(heads, kv_heads, size, dtype):
    for seed, (batch, reach) in enumerate([(2, 7), (5, 256), (1, 1000), (16, 1024)]):
        slots = reach + 8 * (seed % 2)
        rng = np.random.default_rng(seed)
        slot = int(rng.integers(0, reach))
        given = problem(batch, heads, kv_heads, size, slots, dtype, seed, slot)
        held = np.asarray(given.positions).copy()
        held[rng.uniform(size=held.shape) < 0.1] = -1  # holes
        given = given._replace(
            positions=jnp.asarray(held),
            position=jnp.asarray(rng.integers(0, reach, batch, np.int32)),
        )
        window = (None, 1, 100, 4096)[seed % 4]
        options: dict[str, Any] = {"window": window, "scale": size**-0.5, "reach": reach}
        options["pairs"] = ("halves", "neighbours")[seed % 2]
        seen = attention.mask(given.position[:, None], given.positions[:, :reach], window)[:, 0]
        seen = seen.at[:, slot].set(False)  # overwritten by the step
        caches = {name: hidden(getattr(given, name), seen, jnp.nan) for name in ("keys", "values")}
        given = given._replace(**caches)
        assert_right(jax.jit(functools.partial(native, **options))(given), given, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 8, 64), (64, 8, 64), (9, 3, 128), (16, 1, 256)]
)
def test_sinks_match_xla(heads, kv_heads, size, batch, dtype):
    """One split and several; some see no slot."""
    for seed, (slots, window) in enumerate([(7, None), (256, 1), (1000, None), (4096, 128)]):
        given = problem(batch, heads, kv_heads, size, slots, dtype, seed)
        given = given._replace(sinks=sinks_of(heads, seed))
        options: dict[str, Any] = {"window": window, "scale": size**-0.5, "pairs": "halves"}
        assert_right(jax.jit(functools.partial(native, **options))(given), given, **options)


def sinks_of(heads, seed):
    """Sinks of all magnitudes, one without weight."""
    sinks = 3 * normal(heads, dtype="float32", seed=seed)
    return sinks.at[0].set(20).at[-1].set(-jnp.inf)


def test_sinks_take_their_part_of_the_weights():
    """Once, in one split and in several: scores and values are 0 and 1."""
    for batch, slots in ((1, 16), (1, 8000), (16, 500), (64, 100)):
        given = problem(batch, 8, 2, 64, slots, "float16")
        given = given._replace(
            query=0 * given.query,
            value=jnp.ones_like(given.value),
            values=jnp.ones_like(given.values),
            sinks=jnp.log(jnp.arange(8, dtype=jnp.float32) * slots),
        )
        out = np.float32(jax.jit(native)(given)[0])
        expected = np.broadcast_to(1 / (1 + np.arange(8)[None, :, None]), out.shape)
        np.testing.assert_allclose(out, expected, rtol=2e-3)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_sees_nothing_gets_zeros(sinks):
    given = problem(2, 32, 8, 128, 1024, "bfloat16")
    given = given._replace(sinks=sinks_of(32, 0) if sinks else None)
    given = jax.tree.map(lambda x: x * jnp.nan if x.dtype == jnp.bfloat16 else x, given)
    none = jnp.full((2, 1024), -1)
    for position, held in ((-1, given.positions), (9, none)):
        blind = given._replace(position=jnp.full(2, position), positions=held)
        assert not np.asarray(jax.jit(native)(blind)[0]).astype(np.float32).any()


def test_a_slot_out_of_range_is_not_written():
    for slot in (-1, 64, 2**31 - 1):
        given = problem(1, 4, 2, 64, 64, "bfloat16")._replace(slot=jnp.int32(slot))
        _, keys, values = jax.jit(native)(given)
        assert jnp.array_equal(keys, given.keys) and jnp.array_equal(values, given.values)


def test_runs_repeat_their_bits():
    given = problem(3, 32, 8, 128, 4000, "bfloat16")
    program = jax.jit(functools.partial(native, scale=0.1))
    one = np.asarray(program(given)[0]).tobytes()
    for _ in range(100):
        assert np.asarray(program(given)[0]).tobytes() == one


def test_runs_with_sinks_and_biases_repeat_their_bits():
    given = problem(3, 32, 8, 128, 4000, "bfloat16")
    given = given._replace(sinks=sinks_of(32, 1), biases=biases_of(given))
    program = jax.jit(functools.partial(native, scale=0.1))
    one = np.asarray(program(given)[0]).tobytes()
    for _ in range(100):
        assert np.asarray(program(given)[0]).tobytes() == one


def biases_of(operands):
    rows = operands[:3]
    return tuple(normal(*x[0].shape, dtype="float32", seed=i).ravel() for i, x in enumerate(rows))


def in_bytes(operands, dtype):
    """The operands with a cache of 8 bits."""
    rows = [rounded_tokens(x, reach_of(x), jnp.dtype(dtype)) for x in operands[5:7]]
    scales = tuple(row.scale[..., 0] for row in rows)
    return operands._replace(keys=rows[0].values, values=rows[1].values, scales=scales)


@pytest.mark.parametrize("cache_dtype", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_biases_give_the_bits_of_biased_rows(batch, dtype, cache_dtype):
    """`Block.heads` rounds biases, and their sums with rows."""
    sizes = (8, 2, 64, 40), (12, 4, 80, 1000), (16, 1, 128, 300), (4, 2, 256, 65), (64, 8, 64, 2000)
    for seed, (heads, kv_heads, size, slots) in enumerate(sizes):
        given = problem(batch, heads, kv_heads, size, slots, dtype, seed, slot=slots // 2)
        given = given if cache_dtype is None else in_bytes(given, cache_dtype)
        if seed % 2 == 1:
            norms = tuple(normal(size, dtype="float32", seed=seed) for seed in (7, 8))
            given = given._replace(norms=norms)
        if seed > 2:
            given = given._replace(sinks=sinks_of(heads, seed))
        biases = biases_of(given)
        # Outside of `jit`, so that XLA rounds each sum.
        rows = [
            x + bias.astype(x.dtype).reshape(1, *x.shape[1:])
            for x, bias in zip(given[:3], biases, strict=True)
        ]
        run = jax.jit(functools.partial(native, scale=size**-0.5, window=(None, 30)[seed % 2]))
        found = run(given._replace(biases=biases))
        wanted = run(given._replace(query=rows[0], key=rows[1], value=rows[2]))
        for one, other in zip(found, wanted, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("size", [64, 128, 96])
def test_heads_are_normalized(size):
    given = problem(2, 16, 4, size, 300, "bfloat16")
    norms = tuple(normal(size, dtype="float32", seed=seed) for seed in (7, 8))
    given = given._replace(norms=norms)
    out, keys, values = jax.jit(functools.partial(native, scale=0.2))(given)
    _, *caches = jax.jit(appended)(given)
    # A normalized element may round the other way, which also changes the rotated one.
    np.testing.assert_allclose(*(np.float32(x) for x in (keys, caches[0])), rtol=0.02, atol=0.06)
    assert jnp.array_equal(values, caches[1])
    want = jax.jit(functools.partial(by_xla, scale=0.2))(given)
    np.testing.assert_allclose(np.float32(out), np.asarray(want), rtol=0.03, atol=0.03)


BATCH, SLOTS, REACH, HEADS, KV_HEADS, SIZE, STEPS = 2, 320, 256, 32, 8, 128, 40


def loop(attend, cache, queries, keys, values, rotation):
    """Runs consecutive steps like a decoder; returns the cache and the result of each step."""

    def step(state):
        i, (k, v, held), outs = state
        held = lax.dynamic_update_slice(held, jnp.full((BATCH, 1), i), (0, i))
        q, key, value = (
            lax.dynamic_index_in_dim(x, i, 1, keepdims=False) for x in (queries, keys, values)
        )
        position = jnp.full(BATCH, i)
        given = Operands(q, key, value, rotation, None, k, v, i, position, held)
        out, k, v = attend(given, scale=0.1, reach=REACH)
        outs = lax.dynamic_update_slice(outs, out[:, None], (0, i, 0, 0))
        return i + 1, (k, v, held), outs

    outs = jnp.zeros((BATCH, STEPS, HEADS, SIZE), queries.dtype)
    start = jnp.int32(0), cache, outs
    _, cache, outs = lax.while_loop(lambda state: state[0] < STEPS, step, start)
    return cache, outs


def loop_of_xla(*given):
    def attend(operands, **options):
        _, *caches = appended(operands)
        return by_xla(operands, **options).astype(operands.query.dtype), *caches

    return loop(attend, *given)


def empty(dtype):
    k, v = (jnp.zeros((BATCH, SLOTS, KV_HEADS, SIZE), dtype) for _ in range(2))
    return k, v, jnp.full((BATCH, SLOTS), -1, jnp.int32)


def tokens(dtype):
    queries = normal(BATCH, STEPS, HEADS, SIZE, dtype=dtype, seed=1)
    keys, values = (normal(BATCH, STEPS, KV_HEADS, SIZE, dtype=dtype, seed=seed) for seed in (2, 3))
    return queries, keys, values, problem(BATCH, 1, 1, SIZE, 1, dtype).rotation


def test_in_a_loop_that_carries_a_donated_cache():
    given = tokens("bfloat16")
    program = jax.jit(functools.partial(loop, native), donate_argnums=0)
    cache, outs = program(empty("bfloat16"), *given)
    expected, wanted = jax.jit(loop_of_xla)(empty("bfloat16"), *given)
    for one, other in zip(cache, expected, strict=True):
        assert jnp.array_equal(one, other)
    error = np.abs(np.asarray(outs).astype(np.float32) - np.asarray(wanted).astype(np.float32))
    assert error.max() < 0.04


def test_a_cache_that_is_not_donated_is_unchanged():
    given = problem(2, 8, 4, 64, 100, "bfloat16", slot=3)
    before = np.asarray(given.keys).tobytes()
    _, keys, _ = jax.jit(native)(given)
    assert np.asarray(given.keys).tobytes() == before != np.asarray(keys).tobytes()


def test_a_loop_writes_the_cache_in_place():
    program = jax.jit(functools.partial(loop, native), donate_argnums=0)
    text = program.lower(empty("bfloat16"), *tokens("bfloat16")).compile().as_text() or ""
    assert call_names(text) == ["attend"]
    shape = rf"bf16\[{BATCH},{SLOTS},{KV_HEADS},{SIZE}\]\S*"
    assert re.search(shape, text)
    moves = "copy|copy-start|slice|dynamic-slice|dynamic-update-slice|transpose|convert|fusion"
    assert not re.findall(rf"= {shape} (?:{moves})\(", text)
    assert f"bf16[{BATCH},{REACH},{KV_HEADS},{SIZE}]" not in text


def test_caches_of_a_stack():
    """XLA may pass pointers into the stack for each layer."""
    layers = 3
    given = [problem(BATCH, 12, 4, 40, 37, "float16", seed, slot=5) for seed in range(layers)]
    options: dict[str, Any] = {"window": 20, "scale": 0.2, "pairs": "halves"}

    @jax.jit
    def attend(stacked):
        return lax.scan(lambda _, x: (None, native(x, **options)), None, stacked)[1]

    got = attend(jax.tree.map(lambda *x: jnp.stack(x), *given))
    for i, one in enumerate(given):
        assert_right(jax.tree.map(lambda x, i=i: x[i], got), one, **options)


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("sizes", "slot", "window"),
    [
        ((1, 32, 8, 128, 1000), None, None),
        ((16, 32, 8, 128, 2000), 1999, None),
        ((3, 4, 2, 64, 33), 7, 5),
        ((2, 16, 1, 256, 300), None, None),
        ((2, 12, 2, 80, 97), 50, None),
    ],
)
def test_a_cache_in_8_bits(sizes, slot, window, dtype, cache_dtype):
    """Values and scales of the new row are exact, except for the sign of zero. Hidden slots have
    scales NaN."""
    plain = problem(*sizes, dtype=dtype, slot=slot)
    if sizes[0] > 1:
        plain = plain._replace(sinks=sinks_of(sizes[1], 0))
    held = plain.positions.at[:, 3:6].set(-1)
    rows = [rounded_tokens(x, reach_of(x), jnp.dtype(cache_dtype)) for x in plain[5:7]]
    hidden_scales = jnp.where(held[..., None] < 0, jnp.nan, 1)
    scales = tuple(row.scale[..., 0] * hidden_scales for row in rows)
    operands = plain._replace(positions=held, scales=scales)
    operands = operands._replace(keys=rows[0].values, values=rows[1].values)
    scale = sizes[3] ** -0.5

    q, *new = jax.jit(appended)(plain._replace(keys=0 * plain.keys, values=0 * plain.values))
    caches = []
    for row, own, alone in zip(rows, scales, new, strict=True):
        values, new_scale = rounding(alone[:, plain.slot], cache_dtype)
        codes = row.values.at[:, plain.slot].set(values.astype(row.values.dtype))
        caches.append((codes, own.at[:, plain.slot].set(new_scale[..., 0])))

    @jax.jit
    def reference(q, caches):
        floats = [
            codes.astype(jnp.float32) * jnp.nan_to_num(own)[..., None] for codes, own in caches
        ]
        options: dict[str, Any] = {"window": window, "scale": scale, "implementation": "xla"}
        options["sinks"] = plain.sinks
        results = []
        for values in (floats[1], jnp.abs(floats[1])):
            arrays = q.astype(jnp.float32), floats[0], values, plain.position[:, None], held
            results.append(attention.attend(*arrays, **options).reshape(plain.query.shape))
        return results

    want, size = reference(q, caches)
    out, *cache = jax.jit(functools.partial(native, window=window, scale=scale))(operands)
    (keys, key_scales), (values, value_scales) = caches
    for one, other in zip(cache, (keys, values, key_scales, value_scales), strict=True):
        assert one.dtype == other.dtype
        found, wanted = (np.asarray(x).astype(np.float32) for x in (one, other))
        np.testing.assert_array_equal(found, wanted)
    # Weights round to bfloat16, the result to `dtype`.
    error = np.abs(np.asarray(out).astype(np.float64) - np.asarray(want))
    worst = np.nan_to_num(error / ((2.2 * 2.0**-8 + 1e-4) * size + 1e-5), nan=np.inf).max()
    assert worst <= 1, worst


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_decoder_chooses_it(name):
    config = CONFIGS[name]
    decoder = init(config, INT8, dtype=jnp.bfloat16).decoder
    cache = make_cache(config, 2, 256, jnp.bfloat16)
    one = jnp.zeros(2, jnp.int32)
    program = jax.jit(lambda tokens, cache: decoder.decode(tokens, one, cache))
    text = program.lower(one, cache).as_text()
    together = {"gemma3": "attend"}.get(name, "decode_blocks")
    assert call_names(text).count(together) == (1 if together == "decode_blocks" else config.layers)
    assert "quantized_block" not in call_names(text)


@pytest.mark.parametrize(
    ("name", "cache_dtype"),
    [
        *((name, None) for name in ("llama", "qwen2", "qwen3", "gemma3", "olmo3", "granite")),
        ("llama", jnp.int8),
        ("gemma3", jnp.int8),
        ("qwen3", jnp.float8_e4m3fn),
    ],
)
def test_a_decoder_is_unaffected(name, cache_dtype, monkeypatch):
    """Logits of tokens processed one at a time."""
    config = (CONFIGS | PARTS)[name]
    if name in PARTS:
        config = config.replace(rope_size=None, rope_scaling=None, attention_softcap=None)
    decoder = init(config, INT8, dtype=jnp.bfloat16, cache_dtype=cache_dtype).decoder

    def logits():
        @jax.jit
        def step(token, position, cache):
            logits, cache = decoder.decode(token, position, cache)
            return decoder.joined(logits), cache

        cache, found = decoder.make_cache(2, 256), []
        for i in range(12):
            token, position = jnp.full(2, 3 * i % config.vocabulary), jnp.full(2, i)
            out, cache = step(token, position, cache)
            found.append(np.asarray(out))
        return np.stack(found)

    ours = logits()
    monkeypatch.setattr(attention, "native", lambda *_: False)
    of_xla = logits()
    assert np.abs(ours - of_xla).max() < 0.05 * np.abs(of_xla).max()


BIASED = CONFIGS["qwen2"].replace(
    output_bias=True, sinks=True, window=5, window_layers=(True, False)
)
ADDED = {
    "qwen2": CONFIGS["qwen2"],
    "biased": BIASED,
    "normalized": BIASED.replace(qk_norm="head"),
    "mlp biases": BIASED.replace(mlp_bias=True),  # several calls for each block
}


@pytest.mark.parametrize("cache_dtype", [None, jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("name", ADDED)
def test_biases_and_sinks_of_a_decoder(name, batch, cache_dtype, monkeypatch):
    """Logits of tokens processed one at a time."""
    config = ADDED[name]
    weights = random(config, INT8)
    decoder = Decoder(config, weights, dtype=jnp.bfloat16, cache_dtype=cache_dtype)

    def logits(calls):
        @jax.jit
        def step(token, position, cache):
            logits, cache = decoder.decode(token, position, cache)
            return decoder.joined(logits), cache

        cache, found = decoder.make_cache(batch, 256), []
        one = jnp.zeros(batch, jnp.int32)
        assert set(calls) <= set(call_names(step.lower(one, one, cache).as_text()))
        for i in range(12):
            token, position = jnp.full_like(one, 3 * i % config.vocabulary), jnp.full_like(one, i)
            out, cache = step(token, position, cache)
            found.append(np.asarray(out))
        return np.stack(found)

    ours = logits(["attend"] if name == "mlp biases" else ["decode_blocks"])
    monkeypatch.setattr(attention, "native", lambda *_: False)
    of_xla = logits([])
    assert np.abs(ours - of_xla).max() < 0.05 * np.abs(of_xla).max()


@pytest.mark.parametrize("name", ["llama", "qwen2", "biased", "qwen3"])
def test_blocks_in_one_call_give_the_bits_of_a_call_each(name, monkeypatch):
    """Attention starts while the kernels of the block before run."""
    config = (CONFIGS | ADDED)[name].replace(layers=5, window_layers=())
    decoder = Decoder(config, random(config, INT8), dtype=jnp.bfloat16)

    def logits(calls):
        @functools.partial(jax.jit, donate_argnums=2)
        def step(token, position, cache):
            logits, cache = decoder.decode(token, position, cache)
            return decoder.joined(logits), cache

        cache, found = make_cache(config, 3, 256, jnp.bfloat16), []
        one = jnp.zeros(3, jnp.int32)
        text = step.lower(one, one, cache).as_text()
        assert call_names(text).count("decode_block" if calls > 1 else "decode_blocks") == calls
        for i in range(200):
            token, position = jnp.full_like(one, 3 * i % config.vocabulary), jnp.full_like(one, i)
            out, cache = step(token, position, cache)
            found.append(out)
        return np.stack(jax.device_get(found))

    together = logits(1)
    monkeypatch.setattr(block_steps, "together", lambda *_: 1)
    assert together.tobytes() == logits(config.layers).tobytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": ((2, 64, 2, 32), "float16")}, "keys is f16 but must be the type of query"),
        ({"query": ((2, 4, 32), "float32")}, "query is f32 but must be bf16 or f16"),
        (
            {"values": ((2, 63, 2, 32), "bfloat16")},
            r"values has shape \[2, 63, 2, 32\] but must be",
        ),
        ({"key": ((2, 3, 32), "bfloat16")}, r"key has shape \[2, 3, 32\] but must have"),
        ({"cos": ((2, 32), "float32")}, r"cos has shape \[2, 32\] but must be"),
        ({"sin": ((2, 16), "bfloat16")}, "sin is bf16 but must be f32"),
        ({"query_norm": ((31,), "float32")}, r"query_norm has shape \[31\] but must be"),
        ({"slot": ((1,), "int32")}, r"slot has shape \[1\] but must be \[\]"),
        ({"position": ((3,), "int32")}, r"position has shape \[3\] but must be \[batch\] = \[2\]"),
        ({"positions": ((2, 64), "uint32")}, "positions is u32 but must be s32"),
        ({"query_bias": ((64,), "float32")}, r"query_bias has shape \[64\] but must have heads"),
        ({"value_bias": ((65,), "float32")}, r"value_bias has shape \[65\] but must have kv_heads"),
        ({"sinks": ((2,), "float32")}, r"sinks has shape \[2\] but must have heads = 4"),
        ({"query": ((2, 3, 32), "bfloat16")}, "query has 3 heads and keys have 2 but"),
        ({"query": ((2, 34, 32), "bfloat16")}, "query has 34 heads and keys have 2 but from 1 to"),
        ({"reach": 65}, "reach is 65 but must be from 0 to the 64 slots"),
        ({"window": -1}, "window is -1 but must be positive"),
    ],
)
def test_invalid_statistics_raise(changes, message):
    specs = {
        "query": ((2, 4, 32), "bfloat16"),
        "key": ((2, 2, 32), "bfloat16"),
        "value": ((2, 2, 32), "bfloat16"),
        "cos": ((2, 16), "float32"),
        "sin": ((2, 16), "float32"),
        "query_norm": ((32,), "float32"),
        "key_norm": ((32,), "float32"),
        "keys": ((2, 64, 2, 32), "bfloat16"),
        "values": ((2, 64, 2, 32), "bfloat16"),
        "slot": ((), "int32"),
        "position": ((2,), "int32"),
        "positions": ((2, 64), "int32"),
        "query_bias": ((128,), "float32"),
        "key_bias": ((64,), "float32"),
        "value_bias": ((64,), "float32"),
        "sinks": ((4,), "float32"),
    }
    options: dict[str, Any] = {"reach": 64, "window": None}
    options |= {name: changes[name] for name in changes.keys() & options.keys()}
    specs |= {name: changes[name] for name in changes.keys() & specs.keys()}
    q, k, v, cos, sin, q_norm, k_norm, keys, values, *numbers = (
        jnp.zeros(shape, jnp.dtype(dtype)) for shape, dtype in specs.values()
    )
    slot, position, positions, *biases, sinks = numbers
    cache = keys, values, slot, position, positions
    added = {"biases": tuple(biases), "sinks": sinks}
    operands = Operands(q, k, v, (cos, sin), (q_norm, k_norm), *cache, **added)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"attend: {message}.*\."):
        jax.block_until_ready(native(operands, **options))
