"""Caches of 8-bit keys and values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import LLAMA

from jaxlowbit import INT8, quantize_activations
from jaxlowbit._llm.cache import make_cache, nbytes
from jaxlowbit.llm import Session, generate, init, shard

DTYPES = [jnp.int8, jnp.float8_e4m3fn]


def normal(*shape, seed):
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jnp.asarray(values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_token_and_head_has_a_scale(dtype):
    """`quantize_activations` defines the rows, also in a copy of the cache."""
    cache = make_cache(LLAMA, 2, 8, dtype)
    k, v = (normal(2, 3, 2, 16, seed=i) for i in range(2))
    positions = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (2, 3))
    cache = cache.advance(positions).write(1, k, v)
    cache = cache.copied_to(make_cache(LLAMA, 2, 16, dtype)).repeated(2)
    assert {x.dtype for x in (*cache.keys, *cache.values)} == {jnp.dtype(dtype)}
    assert cache.key_scales[1].shape == (4, 16, 2)
    *found, held = cache.read(1, 5, jnp.float32)
    assert held.tolist() == [[0, 1, 2, -1, -1]] * 4
    for rows, floats in zip(found, (k, v), strict=True):
        want = quantize_activations(floats, dtype).dequantize()
        assert jnp.array_equal(rows[:, :3], jnp.repeat(want, 2, axis=0))


def test_a_cache_in_8_bits_is_small():
    assert nbytes(LLAMA, 2, 64, jnp.int8) == 2 * 2 * 2 * 64 * 2 * (16 + 4) + 2 * 64 * 4 + 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_close(dtype):
    """Read at once, and one token at a time; on the CPU by our kernel for attention."""
    tokens = np.random.default_rng(0).integers(0, LLAMA.vocabulary, (2, 12)).astype(np.int32)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), tokens.shape)

    def logits(cache_dtype, size):
        decoder = init(LLAMA, INT8, dtype=jnp.float32, cache_dtype=cache_dtype).decoder
        assert decoder.cache_dtype == (cache_dtype or jnp.float32)
        forward = jax.jit(lambda *x: decoder.forward(*x, reach=16))
        cache, found = decoder.make_cache(2, 32), []
        for i in range(0, 12, size):
            x, cache = forward(tokens[:, i : i + size], positions[:, i : i + size], cache)
            found.append(decoder.logits(x))
        return np.concatenate(found, axis=1)

    exact, whole, parts = logits(None, 12), logits(dtype, 12), logits(dtype, 1)
    assert np.abs(whole - parts).max() < 1e-3 * np.abs(exact).max()
    error = np.abs(whole - exact).max() / np.abs(exact).max()
    assert 1e-5 < error < (0.02 if dtype == jnp.int8 else 0.1)


def test_a_session_continues_from_a_file(tmp_path):
    model = init(LLAMA, INT8, dtype=jnp.bfloat16, cache_dtype=jnp.int8)
    session, path, prompt = Session(model), tmp_path / "session", [3, 1, 4, 1, 5]
    longer = prompt + session.generate(prompt, max_new_tokens=4).tokens + [9, 2]
    session.save(path)
    other = Session(model)
    other.load(path)
    want = session.generate(longer, max_new_tokens=6).tokens
    assert other.generate(longer, max_new_tokens=6).tokens == want
    plain = Session(init(LLAMA, INT8, dtype=jnp.bfloat16))
    with pytest.raises(ValueError, match="is a session of another model"):
        plain.load(path)


def test_sequences_of_a_batch_share_a_cache():
    model = init(LLAMA, INT8, dtype=jnp.float32, cache_dtype=jnp.int8)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    together = [x.tokens for x in generate(model, prompts, max_new_tokens=5)]
    assert together == [generate(model, x, max_new_tokens=5).tokens for x in prompts]


def test_devices_share_a_cache_by_heads():
    config = LLAMA.replace(width=64, head_size=64, hidden=256)
    model = init(config, INT8, dtype=jnp.float32, cache_dtype=jnp.int8)
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices("cpu")[:2])
    sharded = shard(model, mesh)
    cache = sharded.decoder.make_cache(1, 32)
    assert cache.key_scales[0].sharding.shard_shape((1, 32, 2)) == (1, 32, 1)
    prompt = [3, 1, 4, 1, 5]
    want = generate(model, prompt, max_new_tokens=4).tokens
    assert generate(sharded, prompt, max_new_tokens=4).tokens == want


def test_other_dtypes_raise():
    with pytest.raises(ValueError, match="init: cache_dtype is float16, but it must be int8 or"):
        init(LLAMA, INT8, cache_dtype=jnp.float16)
    with pytest.raises(TypeError, match="cache_dtype"):
        init(LLAMA, INT8, cache_dtype="many")
