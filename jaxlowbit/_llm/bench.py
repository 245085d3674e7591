"""`bench`: tokens per second of prompts and generation, for a model or for random weights."""

import time
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from .._core import checks
from .architectures import ARCHITECTURES
from .cache import nbytes
from .config import Config, RopeScaling
from .language_model import LanguageModel, check_model
from .programs import run
from .sampling import Sampling

_GPT_OSS = Config(
    "gpt_oss", layers=36, width=2880, heads=64, kv_heads=8, head_size=64, hidden=2880,
    vocabulary=201088, context=131072, rope_base=1.5e5, experts=128, experts_per_token=4,
    rope_scaling=RopeScaling("yarn", factor=32.0, original_context=4096, truncate=False),
    attention_bias=True, output_bias=True, mlp_bias=True, router_bias=True, sinks=True,
    activation="gpt_oss", window=128, window_layers=(True, False) * 18,
)  # fmt: skip

# Models by their sizes, for random weights.
SHAPES = {
    "smollm2-135m": Config(
        "llama", layers=30, width=576, heads=9, kv_heads=3, head_size=64, hidden=1536,
        vocabulary=49152, context=8192, rope_base=1e5, rope_pairs="neighbours", tied_head=True,
    ),
    "llama3-8b": Config(
        "llama", layers=32, width=4096, heads=32, kv_heads=8, head_size=128, hidden=14336,
        vocabulary=128256, context=8192, rope_base=5e5,
    ),
    "llama3-70b": Config(
        "llama", layers=80, width=8192, heads=64, kv_heads=8, head_size=128, hidden=28672,
        vocabulary=128256, context=131072, rope_base=5e5,
        rope_scaling=RopeScaling("llama3", factor=8.0, original_context=8192),
    ),
    "qwen2.5-7b": Config(
        "qwen2", layers=28, width=3584, heads=28, kv_heads=4, head_size=128, hidden=18944,
        vocabulary=152064, context=32768, rope_base=1e6, norm_epsilon=1e-6, attention_bias=True,
    ),
    "qwen3-0.6b": Config(
        "qwen3", layers=28, width=1024, heads=16, kv_heads=8, head_size=128, hidden=3072,
        vocabulary=151936, context=40960, rope_base=1e6, qk_norm="head", tied_head=True,
        norm_epsilon=1e-6,
    ),
    "mixtral-8x7b": Config(
        "mixtral", layers=32, width=4096, heads=32, kv_heads=8, head_size=128, hidden=14336,
        vocabulary=32000, context=32768, rope_base=1e6, experts=8, experts_per_token=2,
    ),
    "qwen3-30b-a3b": Config(
        "qwen3_moe", layers=48, width=2048, heads=32, kv_heads=4, head_size=128, hidden=768,
        vocabulary=151936, context=40960, rope_base=1e6, qk_norm="head", norm_epsilon=1e-6,
        experts=128, experts_per_token=8,
    ),
    "gemma-4-26b-a4b": Config(
        "gemma4_moe", layers=30, width=2816, heads=16, kv_heads=8, head_size=256, hidden=704,
        vocabulary=262144, context=262144, global_head_size=512, global_kv_heads=2,
        keys_as_values=True, rope_base=1e6, local_rope_base=1e4, norm_epsilon=1e-6, tied_head=True,
        rope_scaling=RopeScaling("factors", factors=(1.0,) * 64 + (1e30,) * 192), window=1024,
        window_layers=((True,) * 5 + (False,)) * 5, experts=128, experts_per_token=8,
        dense_hidden=2112, logit_softcap=30.0, **ARCHITECTURES["gemma4_moe"].fields(2816),
    ),
    "gpt-oss-20b": _GPT_OSS.replace(layers=24, window_layers=(True, False) * 12, experts=32),
    "gpt-oss-120b": _GPT_OSS,
}  # fmt: skip


class Speed(NamedTuple):
    """Speeds in tokens per second, summed over the sequences of a batch, and bytes on all devices.

    `positions` is the mean number of positions that a decode step attends to, its own included.
    Steps take longer with more positions, so compare speeds only at similar numbers.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    prefill: float
    decode: float
    milliseconds_per_step: float
    weight_bytes: int
    cache_bytes: int
    devices: int
    positions: int


def bench(
    model: LanguageModel,
    *,
    batch: int = 1,
    prompt_tokens: int = 960,
    new_tokens: int = 64,
    repeats: int = 3,
) -> Speed:
    """Measures prompts of random tokens, then greedy generation; returns the best of `repeats`.

    Prompts are read into an empty cache. The decode steps attend to `prompt_tokens + 1` up to
    `prompt_tokens + new_tokens` positions; `Speed.positions` is the mean.

    The first run, which compiles, does not count. Times are wall-clock times, including work of the
    host between programs.

    **Returns:** a `Speed`.

    **Raises:** `TypeError` and `ValueError` for invalid numbers, or numbers beyond the context of
    the model, and the errors of `generate`.

    ```python
    model = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8)
    bench(model, prompt_tokens=16, new_tokens=4, repeats=1).decode
    ```
    """
    check_model("bench", model)
    config = model.config
    check_sizes(config, batch, prompt_tokens, new_tokens, repeats)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, config.vocabulary, (batch, prompt_tokens)).tolist()
    # Without an end of turn, all sequences go on.
    decoder = model.decoder
    prefill = decode = float("inf")
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        groups = run(model, prompts, new_tokens, Sampling(), 0, endless=True, caller="bench")
        next(groups)
        middle = time.perf_counter()
        for _ in groups:
            pass
        end = time.perf_counter()
        if repeat > 0:
            prefill, decode = min(prefill, middle - start), min(decode, end - middle)
    leaves = jax.tree.leaves(nnx.state(decoder))
    return Speed(
        batch,
        prompt_tokens,
        new_tokens,
        batch * prompt_tokens / prefill,
        batch * new_tokens / decode,
        1e3 * decode / new_tokens,
        sum(leaf.nbytes for leaf in leaves),
        nbytes(config, batch, prompt_tokens + new_tokens, decoder.cache_dtype),
        decoder.parts,
        prompt_tokens + (new_tokens + 1) // 2,
    )


def check_sizes(
    config: Config, batch: Any, prompt_tokens: Any, new_tokens: Any, repeats: Any
) -> None:
    """Checks the arguments of `bench` for a model of this configuration.

    **Raises:** `TypeError` and `ValueError`.
    """
    for name, value, most in (
        ("batch", batch, 1 << 20),
        ("prompt_tokens", prompt_tokens, config.context - 1),
        ("new_tokens", new_tokens, config.context - 1),
        ("repeats", repeats, 1000),
    ):
        checks.integer("bench", name, value, f"an integer from 1 to {most}", most=most)
    if prompt_tokens + new_tokens > config.context:
        raise ValueError(
            f"bench: new_tokens is {new_tokens}, but with {prompt_tokens} of the prompt the "
            f"context has {config.context} tokens; use {config.context - prompt_tokens} or fewer."
        )
