"""Mixtures of experts on GPUs; `test_llm_experts.py` covers files and meshes on the CPU."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import call_names

from jaxlowbit import INT4, MXFP4
from jaxlowbit._llm import block_steps
from jaxlowbit._llm.random_weights import random_weights
from jaxlowbit.llm import Config, Decoder, LanguageModel, RopeScaling, generate, init, shard

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {
    "layers": 3, "width": 512, "heads": 8, "kv_heads": 2, "hidden": 384, "vocabulary": 4224,
    "context": 1024,
}  # fmt: skip
CASES = {
    "mixtral": (Config("mixtral", **SIZES, head_size=128, experts=8, experts_per_token=2), INT4),
    "qwen3_moe": (
        Config(
            "qwen3_moe", **SIZES, head_size=128, experts=32, experts_per_token=8, qk_norm="head"
        ),
        INT4,
    ),
    "gpt_oss": (
        Config(
            "gpt_oss", **SIZES, head_size=64, experts=16, experts_per_token=4, attention_bias=True,
            output_bias=True, mlp_bias=True, router_bias=True, sinks=True, activation="gpt_oss",
            window=16, window_layers=(True, False, True),
            rope_scaling=RopeScaling("yarn", 4.0, original_context=256, truncate=False),
        ),
        MXFP4,
    ),
}  # fmt: skip
PROMPTS = [
    np.random.default_rng(i).integers(0, 4224, size).tolist()
    for i, size in enumerate((40, 9, *range(5, 19)))
]
NEAR = 0.05  # effect of bfloat16 rounding, which changes choices of experts, too


def logits(decoder: Decoder, tokens: Any) -> np.ndarray:
    graph, state = nnx.split(decoder)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    return np.asarray(call(state, np.asarray(tokens, np.int32)))


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("name", CASES)
def test_decode_steps_give_the_tokens_of_prompts(name, batch):
    """Each token's logit is the largest up to rounding, given the tokens before it."""
    config, format = CASES[name]
    model = init(config, format, dtype=jnp.bfloat16)
    wide = init(config, format, dtype=jnp.float32)
    results = generate(model, PROMPTS[:batch], max_new_tokens=24)
    for i in {0, batch - 1}:
        prompt, result = PROMPTS[i], results[i]
        found = logits(wide.decoder, [prompt + result.tokens])[0, len(prompt) - 1 : -1]
        chosen = found[np.arange(24), result.tokens]
        behind = (found.max(axis=-1) - chosen) / np.abs(found).max()
        assert np.median(behind) < NEAR / 5 and (behind < NEAR).mean() > 0.9


# --- decode steps in one call ---------------------------------------------------------------------

ONE_CALL = {
    **CASES,
    "unnormalized": (
        CASES["mixtral"][0].replace(experts=16, router_bias=True, normalized_experts=False),
        INT4,
    ),
    "biases": (CASES["mixtral"][0].replace(router_bias=True, mlp_bias=True), MXFP4),
}


@functools.cache
def decoder(name: str, dtype: Any = jnp.bfloat16, kv_heads: int = 2) -> Decoder:
    """Router and biases are random; a router is bfloat16 if it has a bias. `dtype`: of activations;
    weights are the same."""
    config, format = ONE_CALL[name]
    config = config.replace(kv_heads=kv_heads)
    weights: dict[str, Any] = random_weights(config, format, dtype=jnp.bfloat16)
    for i, (key, x) in enumerate(weights.items()):
        if key.endswith("router") and config.router_bias:
            weights[key] = x.astype(jnp.bfloat16)
        if key.endswith(("_bias", "sinks")):
            weights[key] = jax.random.normal(jax.random.key(i), x.shape, x.dtype) / 4
    return Decoder(config, weights, dtype=dtype)


def decode(model: Decoder, batch: int, steps: int, expected: dict[str, int]) -> np.ndarray:
    """The logits of `steps` decode steps, whose program contains the calls `expected`."""

    options = {"xla_allow_excess_precision": False}  # a router reads rounded rows

    @functools.partial(jax.jit, donate_argnums=2, compiler_options=options)
    def step(token: Any, position: Any, cache: Any) -> Any:
        logits, cache = model.decode(token, position, cache)
        return model.joined(logits), cache

    cache, found = model.make_cache(batch, 256), []
    one = jnp.zeros(batch, jnp.int32)
    counts = collections.Counter(call_names(step.lower(one, one, cache).as_text()))
    assert {name: counts[name] for name in expected} == expected
    for i in range(steps):
        token = (37 * jnp.arange(batch, dtype=jnp.int32) + 3 * i) % 4224
        out, cache = step(token, jnp.full_like(one, i), cache)
        found.append(out)
    return np.stack(jax.device_get(found))


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("name", ONE_CALL)
def test_layers_in_one_call_give_the_bits_of_a_call_each(name, batch, monkeypatch):
    """The kernels of a layer start while the layer before runs."""
    layers = ONE_CALL[name][0].layers
    together = decode(decoder(name), batch, 100, {"decode_blocks": 1, "quantized_moe": 0})
    monkeypatch.setattr(block_steps, "together", lambda *_: 1)
    apart = decode(decoder(name), batch, 100, {"decode_block": layers, "quantized_moe": 0})
    assert together.tobytes() == apart.tobytes()


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("name", ONE_CALL)
def test_one_call_gives_the_logits_of_several(name, batch, monkeypatch):
    """XLA routes in the other program. The programs differ at most 1.5 times as much, and choose
    other experts at most as often, as one of them and float32 do. Nearly all tokens choose the
    experts of the other program or of float32 in all layers."""
    layers = ONE_CALL[name][0].layers
    ours = decode(decoder(name), batch, 24, {"decode_blocks": 1, "quantized_moe": 0})
    monkeypatch.setattr(block_steps, "together", lambda *_: 0)
    others = decode(decoder(name), batch, 24, {"quantized_moe": layers, "decode_blocks": 0})
    wide = decode(decoder(name, jnp.float32), batch, 24, {})
    size = np.abs(others).max(axis=-1)
    errors, error, rounding = (
        np.abs(x - y).max(axis=-1) / size for x, y in ((ours, others), (ours, wide), (others, wide))
    )
    assert np.median(errors) < max(NEAR / 5, 1.5 * np.median(rounding))
    assert (errors >= NEAR).mean() <= max(0.1, (rounding >= NEAR).mean())
    assert (np.minimum(errors, error) < NEAR).mean() > 0.9
    # The greedy token is the same, except where two logits are near.
    first, second = np.sort(others, axis=-1)[..., :-3:-1].transpose(2, 0, 1)
    clear = (first - second > NEAR / 2 * size) & (errors < NEAR / 5)
    assert (ours.argmax(axis=-1) == others.argmax(axis=-1))[clear].all()


def mesh_of(count: int) -> jax.sharding.Mesh:
    devices = jax.devices()
    if len(devices) < count:
        pytest.skip(f"needs {count} GPUs, JAX sees {len(devices)}")
    return jax.make_mesh((count,), ("model",), devices=devices[:count])


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_several_devices_give_the_tokens_of_one(name, count):
    config, format = CASES[name]
    one = init(config.replace(kv_heads=count), format, dtype=jnp.float32)
    several = shard(one, mesh_of(count))
    found, want = (generate(model, PROMPTS[:2], max_new_tokens=16) for model in (several, one))
    assert [x.tokens for x in found] == [x.tokens for x in want]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("name", ONE_CALL)
def test_several_devices_with_different_experts_share_a_call(name, batch, count):
    """Each token's logit is the largest up to rounding, given the tokens before it."""
    one = decoder(name, kv_heads=count)
    several = shard(LanguageModel(one), mesh_of(count))
    results = generate(several, PROMPTS[:batch], max_new_tokens=24)
    for i in {0, batch - 1}:
        prompt, result = PROMPTS[i], results[i]
        found = logits(one, [prompt + result.tokens])[0, len(prompt) - 1 : -1]
        chosen = found[np.arange(24), result.tokens]
        behind = (found.max(axis=-1) - chosen) / np.abs(found).max()
        assert np.median(behind) < NEAR / 5 and (behind < NEAR).mean() > 0.9
