"""Hugging Face folders: what they load to, and how wrong ones are refused."""

from typing import Any

import jax.numpy as jnp
import model_files
import numpy as np
import pytest
from model_files import (
    load,
)

from jaxlowbit import INT4, QuantizedArray, quantize

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")


from jaxlowbit._llm import huggingface  # noqa: E402
from jaxlowbit._llm.config import RopeScaling  # noqa: E402

HF = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


@pytest.mark.parametrize("architecture", HF)
@pytest.mark.parametrize("shards", [1, 3])
def test_folders_load(architecture, shards, tmp_path):
    weights = model_files.hf_weights(architecture)
    config = model_files.hf_config(architecture)
    folder = model_files.write_folder(tmp_path / "model", config, weights, shards)
    found = load(folder)
    assert found.config.rope_pairs == "halves" and found.config.architecture == architecture
    assert found.config.tied_head == (architecture == "gemma3")
    assert found.config.norm_offset == (1.0 if architecture == "gemma3" else 0.0)
    assert {name: w.shape for name, w in found.weights.items()} == found.config.shapes()
    part = "layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(found.weights["layers.1.down"], weights[f"model.{part}"].T)
    norm = "pre_feedforward" if architecture == "gemma3" else "post_attention"
    np.testing.assert_array_equal(
        found.weights["layers.1.mlp_norm"], weights[f"model.layers.1.{norm}_layernorm.weight"]
    )
    rounded = load(folder, format=INT4, rules={"embedding|head": None}, dtype=jnp.bfloat16)
    q: Any = rounded.weights["layers.0.q"]
    expected = quantize(
        jnp.asarray(weights["model.layers.0.self_attn.q_proj.weight"].T),
        INT4,
        scale_dtype=jnp.bfloat16,
    )
    np.testing.assert_array_equal(q.packed, expected.packed)
    np.testing.assert_array_equal(q.scale, expected.scale)
    assert rounded.weights["embedding"].dtype == jnp.bfloat16
    assert not isinstance(rounded.weights["embedding"], QuantizedArray)


def test_bfloat16_folders_load(tmp_path):
    weights = {
        name: np.asarray(jnp.asarray(weight, jnp.bfloat16))
        for name, weight in model_files.hf_weights("llama").items()
    }
    folder = model_files.write_folder(tmp_path / "model", model_files.hf_config("llama"), weights)
    found = load(folder, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(found.weights["head"], weights["lm_head.weight"].T)
    assert {tensor.stored for tensor in found.report.tensors} == {"BF16"}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("newer", [False, True])
def test_scaling_of_folders(newer, tmp_path):
    """In `rope_scaling`, and in `rope_parameters` as newer files have it."""
    config = model_files.hf_config("llama")
    if newer:
        base = config.pop("rope_theta")
        config["rope_parameters"] = LLAMA3 | {"rope_theta": base}
    else:
        config["rope_scaling"] = LLAMA3
    folder = model_files.write_folder(tmp_path / "m", config, model_files.hf_weights("llama"))
    found = huggingface.config_of(folder)
    assert found.rope_base == 500000.0
    assert found.rope_scaling == RopeScaling("llama3", 8.0, 8192, low=1.0, high=4.0)
    ratio = found.replace(rope_scaling=None).rope_frequencies() / found.rope_frequencies()
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(8) and (np.diff(ratio) > -1e-6).all()


def test_images_and_defaults_of_gemma3(tmp_path):
    """A model that sees: its text alone is read, and entries that are missing are as usual."""
    config = {
        key: value
        for key, value in model_files.hf_config("gemma3").items()
        if key not in ("head_dim", "model_type", "tie_word_embeddings")
    }
    config |= {
        "head_dim": 64,
        "sliding_window": 32,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    outer = {"model_type": "gemma3", "text_config": config, "eos_token_id": [1, 106]}
    weights = {
        f"language_model.{name}": value for name, value in model_files.hf_weights("gemma3").items()
    }
    weights["vision_tower.embeddings.weight"] = np.ones((2, 2), np.float32)
    folder = model_files.write_folder(tmp_path / "model", outer, weights)
    found = load(folder).config
    assert (found.window, found.window_pattern, found.norm_offset) == (32, 6, 1.0)
    assert found.attention_scale == 256**-0.5 and found.tied_head and found.eos[:2] == (1, 106)
    assert found.rope_scaling == RopeScaling("linear", 8.0)
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(found.rope_frequencies(local=True), plain, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "gpt2"}, "'model_type' is 'gpt2', but the decoder here knows llama"),
        ({"hidden_size": None}, "lacks 'hidden_size', an integer"),
        ({"hidden_size": "256"}, "'hidden_size' is '256', but it is an integer"),
        ({"num_hidden_layers": 3}, "9 weights of 30 are missing, the first is 'layers.2.q'"),
        ({"num_hidden_layers": 1}, "is no part of llama with 1 layers"),
        ({"intermediate_size": 128}, r"config.json asks for floats .* of \(128, 256\)"),
        ({"hidden_act": "relu"}, "the activation is 'relu'"),
        ({"attention_bias": True}, "only qwen2 has biases"),
        ({"quantization_config": {"bits": 4}}, "'quant_method' is None, but of quantized folders"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "scaling is 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks 'factor', a number"),
        ({"eos_token_id": "end"}, "'eos_token_id' is"),
    ],
)
def test_config_json_is_refused(changes, match, tmp_path):
    config = model_files.hf_config("llama") | changes
    folder = model_files.write_folder(tmp_path / "model", config, model_files.hf_weights("llama"))
    with pytest.raises(ValueError, match=match):
        load(folder)


def test_folders_are_refused(tmp_path):
    config, weights = model_files.hf_config("llama"), model_files.hf_weights("llama")
    folder = model_files.write_folder(tmp_path / "model", config, weights)
    file = folder / "model.safetensors"
    data = file.read_bytes()

    def refused(match):
        with pytest.raises(ValueError, match=match):
            load(folder)

    for size in (0, 7, 100, len(data) - 1):
        file.write_bytes(data[:size])
        refused("is no safetensors file, or it is cut off")
    file.unlink()
    refused(r"model.safetensors is missing")
    file.write_bytes(data)
    for name in ("config.json", "tokenizer.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text[: len(text) // 2])
        refused(f"{name} is no JSON")
        (folder / name).write_text("[]")
        refused(f"{name} holds list")
        (folder / name).unlink()
        refused(f"{name} is missing")
        (folder / name).write_text(text)
    index = folder / "model.safetensors.index.json"
    file.unlink()
    index.write_text('{"weight_map": {"lm_head.weight": "../model.safetensors"}}')
    refused("names the file '../model.safetensors', but shards lie beside it")
    index.unlink()
    wrong = weights | {"lm_head.weight": np.ones(weights["lm_head.weight"].shape, np.int32)}
    model_files.write_folder(folder, config, wrong)
    refused("'lm_head.weight' is I32 of shape .*, but config.json asks for floats")
