"""Mixtures of experts: quantized stacks, files of several kinds, meshes and random models."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from decoders import INT4_G32, TINY, floats, random  # noqa: E402
from flax import nnx  # noqa: E402
from golden_architectures import CASES, PATH, TOKENS, mxfp4  # noqa: E402
from golden_files import hf_weights, keys_of, tensors_of  # noqa: E402
from model_files import load, write_folder, write_gguf  # noqa: E402

from jaxlowbit import INT8, MXFP4, Format  # noqa: E402
from jaxlowbit._llm.bench import SHAPES  # noqa: E402
from jaxlowbit._llm.huggingface import config_of  # noqa: E402
from jaxlowbit.llm import Config, Decoder, LanguageModel, generate, init, save, shard  # noqa: E402
from jaxlowbit.llm import load as load_model  # noqa: E402

# On four devices, each has whole heads and whole atoms of the output projection.
SIZES: dict[str, Any] = TINY | {"heads": 8, "kv_heads": 4, "head_size": 64}
GPT_OSS = Config(
    "gpt_oss", **SIZES, experts=8, experts_per_token=3, attention_bias=True, output_bias=True,
    mlp_bias=True, router_bias=True, sinks=True, window=5, window_layers=(True, False),
    activation="gpt_oss",
)  # fmt: skip
QWEN3 = Config(
    "qwen3_moe", **SIZES, experts=8, experts_per_token=2, qk_norm="head", normalized_experts=False
)
PROMPTS = [[3, 1, 4, 1, 5], list(range(20, 40))]


def logits(decoder: Decoder) -> np.ndarray:
    graph, state = nnx.split(decoder)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    return np.asarray(call(state, np.array([TOKENS])))[0]


def near(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max())


@functools.cache
def weights(config: Config, format: Format) -> dict[str, Any]:
    return random(config, format)


@functools.cache
def expected(config: Config, format: Format) -> np.ndarray:
    """Logits by the same weights as floats; other tests compare these with transformers."""
    dense = {name: jnp.asarray(x, jnp.float32) for name, x in floats(weights(config, format)).items()}
    return logits(Decoder(config, dense, dtype=jnp.float32))


@pytest.mark.parametrize(("config", "format"), [(QWEN3, INT4_G32), (GPT_OSS, MXFP4)])
def test_quantized_experts_multiply_as_floats(config, format):
    decoder = Decoder(config, weights(config, format), dtype=jnp.float32)
    assert decoder.blocks[0].gate_up[0].get_value().shape == (2, 8, 64, 96)
    assert near(logits(decoder), expected(config, format))


def test_formats_of_experts_may_be_mixed():
    mixed = dict(weights(GPT_OSS, MXFP4))
    others = weights(GPT_OSS, INT8)
    mixed |= {name: others[name] for name in ("layers.0.gate", "layers.1.down")}
    mixed["layers.0.down"] = mixed["layers.0.down"].dequantize(jnp.float32)
    dense = {name: jnp.asarray(x, jnp.float32) for name, x in floats(mixed).items()}
    found, want = (Decoder(GPT_OSS, x, dtype=jnp.float32) for x in (mixed, dense))
    assert near(logits(found), logits(want))


# --- files ----------------------------------------------------------------------------------------


def of_case(name: str, folder):
    """The entries of config.json and the tensors of a folder of a golden model."""
    write_folder(folder, CASES[name], {})
    return CASES[name], hf_weights(config_of(folder))


def check(checkpoint, name: str, format: Format | None = None) -> None:
    found = [checkpoint.weights[f"layers.{i}.{x}"] for i in (0, 1) for x in ("gate", "up", "down")]
    assert {getattr(x, "format", None) for x in found} == {format}
    decoder = Decoder(checkpoint.config, checkpoint.weights, dtype=jnp.float32)
    assert near(logits(decoder), np.load(PATH)[name])


def packed_folder(folder):
    """gpt-oss as it is released: stacks of experts in MXFP4."""
    entries, tensors = of_case("gpt_oss", folder)
    for key in [key for key, value in tensors.items() if value.ndim == 3]:
        _, codes, exponents = mxfp4(key, tensors.pop(key).shape)
        blocks = codes.reshape(*codes.shape[:-1], -1, 16, 2)
        tensors[f"{key}_blocks"] = blocks[..., 0] | blocks[..., 1] << 4
        tensors[f"{key}_scales"] = np.ascontiguousarray(exponents[..., ::32])
    quantization = {"quantization_config": {"quant_method": "mxfp4"}}
    return write_folder(folder, entries | quantization, tensors)


def test_stacks_in_mxfp4_give_the_logits_of_transformers(tmp_path):
    check(load(packed_folder(tmp_path / "model")), "gpt_oss", MXFP4)


def test_mxfp4_of_gguf_gives_the_logits_of_transformers(tmp_path):
    _, tensors = of_case("gpt_oss", tmp_path / "model")
    stored = tensors_of("gpt_oss", "gpt-oss", tensors)
    for key, (_, values) in list(stored.items()):
        if values.ndim == 3:
            packed = gguf_mxfp4(values)
            stored[key] = ("MXFP4", packed)
    path = write_gguf(tmp_path / "model.gguf", keys_of("gpt_oss", "gpt-oss"), stored)
    check(load(path), "gpt_oss", Format(4, group_size=32, codebook="e2m1"))


def gguf_mxfp4(values: np.ndarray) -> np.ndarray:
    import gguf

    return gguf.quants.quantize(values, gguf.GGMLQuantizationType.MXFP4)
