"""Mixtures of experts on GPUs; `test_llm_experts.py` covers files and meshes on the CPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlowbit import INT4, MXFP4
from jaxlowbit.llm import Config, Decoder, RopeScaling, generate, init, shard

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


@pytest.mark.parametrize("name", CASES)
def test_two_devices_give_the_tokens_of_one(name):
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip(f"needs 2 GPUs, JAX sees {len(devices)}")
    config, format = CASES[name]
    one = init(config, format, dtype=jnp.float32)
    two = shard(one, jax.make_mesh((2,), ("model",), devices=devices[:2]))
    found, want = (generate(model, PROMPTS[:2], max_new_tokens=16) for model in (two, one))
    assert [x.tokens for x in found] == [x.tokens for x in want]
