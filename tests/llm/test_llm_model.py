"""The decoder of `jaxlowbit.llm`: logits and errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import CONFIGS, LLAMA, PARTS, floats, random, reference
from flax import nnx
from helpers import dequantized

from jaxlowbit import Format, QuantizedArray
from jaxlowbit._llm import attention
from jaxlowbit._llm.cache import bucket, make_cache, nbytes
from jaxlowbit._llm.random_weights import random_weights
from jaxlowbit.llm import Decoder, init
from jaxlowbit.nnx import QuantizedVariable

TOKENS = np.random.default_rng(1).integers(0, LLAMA.vocabulary, (1, 48))


def logits(decoder):
    graph, state = nnx.split(decoder)
    return jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, TOKENS)


def compare(config, weights):
    decoder = Decoder(config, weights, dtype=jnp.float32)
    found = np.asarray(logits(decoder))[0]
    expected = reference(config, floats(weights), TOKENS[0])
    assert found.shape == expected.shape == (TOKENS.size, config.vocabulary)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    return decoder


@pytest.mark.parametrize("name", [*CONFIGS, *PARTS])
def test_logits_match_a_plain_program(name):
    config = (CONFIGS | PARTS)[name]
    decoder = compare(config, random(config))
    x = jnp.zeros((1, 1, config.width))
    fused = name != "gemma3" and name not in PARTS
    assert all(block.fused(x) == fused for block in decoder.blocks)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_formats_may_be_mixed_and_weights_floats(name):
    config = CONFIGS[name]
    weights = random(config)
    others = random(config, Format(6, group_size=16, zero="float"))
    for i, changed in enumerate((("v", "down"), ("gate", "embedding"))):
        weights |= {key: others[key] for key in weights if key.endswith(changed)}
        kept = f"layers.{i}.", "embedding"
        weights |= {
            key: dequantized(others[key])
            for key in weights
            if key.startswith(kept) and key.endswith(changed[1:])
        }
    compare(config, weights)


def test_bfloat16_is_near():
    weights = random(LLAMA)
    found = logits(Decoder(LLAMA, weights))
    expected = reference(LLAMA, floats(weights), TOKENS[0])
    assert found.dtype == jnp.float32
    assert np.abs(np.asarray(found)[0] - expected).max() < 0.03 * np.abs(expected).max()


def test_quantized_weights_are_variables():
    decoder = init(LLAMA, Format(4, group_size=32)).decoder
    quantized = nnx.to_pure_dict(nnx.state(decoder, QuantizedVariable))
    assert set(quantized) == {"blocks", "embedding", "head"}
    assert decoder.blocks[0].gate_up[0].get_value().shape == (2, LLAMA.width, LLAMA.hidden)


@pytest.mark.parametrize("zero", ["none", "integer", "float"])
def test_random_weights_are_never_floats(zero):
    """Only packed words have the size of a matrix."""
    config = LLAMA.replace(width=1024, hidden=2048, vocabulary=4096)
    format = Format(4, group_size=128, zero=zero)
    jaxpr = jax.make_jaxpr(lambda: random_weights(config, format))()
    made: list[Any] = [v.aval for eqn in jaxpr.eqns for v in eqn.outvars]
    sizes = [x.size for x in made if jnp.issubdtype(x.dtype, jnp.floating)]
    assert max(sizes) == config.width * config.vocabulary // 128
    weight = random_weights(config, format)["layers.0.q"]
    assert isinstance(weight, QuantizedArray)
    assert np.std(np.asarray(weight.dequantize(jnp.float32))) == pytest.approx(1024**-0.5, rel=0.05)


@pytest.mark.parametrize("k", [64, 72, 100])
def test_random_weights_multiply_like_their_dequantized_values(k):
    config = LLAMA.replace(width=k, head_size=16)
    weight = random_weights(config, Format(4, group_size=16), dtype=jnp.float32)["layers.0.q"]
    assert isinstance(weight, QuantizedArray)
    x = jax.random.normal(jax.random.key(0), (3, k))
    assert jnp.allclose(x @ weight, x @ weight.dequantize(), atol=1e-5)


# --- errors ---------------------------------------------------------------------------------------


def test_missing_unknown_and_misshapen_weights_are_named():
    weights = random(LLAMA)
    without = {name: x for name, x in weights.items() if name not in ("head", "layers.1.q")}
    with pytest.raises(ValueError, match=r"2 weights are missing: head, layers\.1\.q\."):
        Decoder(LLAMA, without)
    with pytest.raises(ValueError, match=r"1 weights are not of llama: layers\.0\.q_bias\."):
        Decoder(LLAMA, weights | {"layers.0.q_bias": jnp.ones(64)})
    with pytest.raises(ValueError, match=r"layers\.1\.k has shape \(64, 64\), .* \(64, 32\)"):
        Decoder(LLAMA, weights | {"layers.1.k": weights["layers.1.q"]})


@pytest.mark.parametrize("tokens", [jnp.ones((1, 2)), jnp.ones(2, jnp.int32)])
def test_tokens_of_another_kind_raise(tokens):
    with pytest.raises(ValueError, match="they must be integers"):
        init(LLAMA, Format(4, group_size=32)).decoder(tokens)


# --- attention and cache --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "dtype", "batch", "queries", "size", "native", "expected"),
    [
        ("gpu", "bfloat16", 1, 1, 128, True, "native"),
        ("gpu", "float16", 16, 1, 64, True, "native"),
        ("gpu", "bfloat16", 1, 1, 128, False, "xla"),
        ("gpu", "bfloat16", 16, 1, 128, False, "cudnn"),
        ("gpu", "float16", 1, 512, 64, True, "cudnn"),
        ("gpu", "bfloat16", 1, 16, 128, True, "xla"),
        ("gpu", "float32", 16, 1, 128, True, "xla"),
        ("gpu", "float32", 16, 512, 128, True, "xla"),
        ("gpu", "bfloat16", 16, 512, 512, True, "xla"),
        ("gpu", "bfloat16", 16, 512, 100, True, "xla"),
        ("cpu", "bfloat16", 16, 1, 128, True, "xla"),
        ("cpu", "bfloat16", 16, 512, 128, False, "xla"),
    ],
)
def test_the_implementation_is_chosen_by_batch_and_length(
    platform, dtype, batch, queries, size, native, expected
):
    sizes = {"batch": batch, "queries": queries, "length": 1024, "head_size": size}
    assert attention.choose(platform, jnp.dtype(dtype), **sizes, native=native) == expected


def test_a_query_sees_earlier_positions_in_its_window():
    keys = jnp.array([[-1, 0, 1, 2, 3, -1]])
    queries = jnp.array([[2, -1]])
    seen = attention.mask(queries, keys, None)[0].astype(int).tolist()
    assert seen == [[0, 1, 1, 1, 0, 0], [0] * 6]
    assert attention.mask(queries, keys, 2)[0, 0].astype(int).tolist() == [0, 0, 1, 1, 0, 0]


def test_a_row_that_sees_nothing_is_finite():
    x = jnp.ones((1, 2, 4, 16))
    nothing = jnp.full((1, 2), -1)
    how: Any = {"window": None, "scale": 1.0, "implementation": "xla"}
    out = attention.attend(x, x, x, nothing, nothing, **how)
    assert jnp.isfinite(out).all()


def test_attention_matches_jax():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, 6, n, 16)) for key, n in zip(keys, (4, 2, 2), strict=True)
    )
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    how: Any = {"window": None, "scale": 0.25, "implementation": "xla"}
    found = attention.attend(q, k, v, positions, positions, **how)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=0.25)
    assert jnp.allclose(found, expected.reshape(found.shape), atol=1e-5)


def test_buckets_are_powers_of_two_up_to_the_context():
    assert [bucket(n, 5000) for n in (1, 256, 257, 4096, 4097, 5000)] == [
        256, 256, 512, 4096, 5000, 5000,
    ]  # fmt: skip
    assert bucket(5001, 5000) == 5120  # padding may exceed the context
    assert bucket(100, 128) == 128


def test_the_size_of_a_cache_is_known_before_allocation():
    cache = make_cache(LLAMA, 2, 64, jnp.bfloat16)
    found = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert nbytes(LLAMA, 2, 64, jnp.bfloat16) == found == 2 * 2 * 2 * 64 * 32 * 2 + 2 * 64 * 4 + 4


def test_a_decoder_may_empty_its_dict_of_weights():
    weights = random(LLAMA)
    kept = Decoder(LLAMA, weights)
    names = set(weights)
    taken = Decoder(LLAMA, weights, consume=True)
    assert names == set(LLAMA.shapes()) and not weights
    for one, other in zip(*(jax.tree.leaves(nnx.state(x)) for x in (kept, taken)), strict=True):
        assert jnp.array_equal(one, other)
