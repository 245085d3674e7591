"""Tiny models of every architecture: the logits are transformers', from safetensors and from GGUF.

Weights, names and keys of the GGUF files are written as llama.cpp's converter does.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from golden_architectures import CASES, PATH, TOKENS  # noqa: E402
from golden_files import RENAMED, hf_weights, keys_of, tensors_of  # noqa: E402
from model_files import load, write_folder, write_gguf  # noqa: E402

from jaxlowbit._llm.huggingface import config_of  # noqa: E402
from jaxlowbit.llm import Decoder  # noqa: E402

LOGITS = np.load(PATH)
# Architectures without GGUF files: llama.cpp has none, or its files lack the layers with a window.
FOLDERS_ONLY = ("ministral", "qwen2, windows")


def folder_of(folder, name):
    """A folder of a model; the one of Ministral 3 has images, too."""
    entries = CASES[name] | {"transformers_version": "5.23.0"}
    folder.mkdir()
    write_folder(folder, entries, {})
    weights = hf_weights(config_of(folder))
    if name == "ministral3":
        entries = {"model_type": "mistral3", "text_config": entries, "image_token_index": 10}
        weights = {f"language_model.{key}": value for key, value in weights.items()}
        weights["vision_tower.patch_conv.weight"] = np.ones((2, 2), np.float32)
    return write_folder(folder, entries, weights)


def check_logits(checkpoint, name):
    decoder = Decoder(checkpoint.config, checkpoint.weights, dtype=jnp.float32)
    found = np.asarray(decoder(jnp.array([TOKENS])))[0]
    expected = LOGITS[name]
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", CASES)
def test_a_folder_gives_the_logits_of_transformers(name, tmp_path):
    check_logits(load(folder_of(tmp_path / "model", name)), name)


# --- GGUF -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CASES if name not in FOLDERS_ONLY])
def test_a_gguf_file_gives_the_logits_of_transformers(name, tmp_path):
    kind: Any = CASES[name]["model_type"]
    architecture: Any = RENAMED.get(kind, kind)
    folder = tmp_path / "model"
    folder.mkdir()
    write_folder(folder, CASES[name], {})
    weights = hf_weights(config_of(folder))
    entries, stored = keys_of(name, architecture), tensors_of(name, architecture, weights)
    check_logits(load(write_gguf(tmp_path / "model.gguf", entries, stored)), name)


def test_fused_tensors_of_another_shape_raise(tmp_path):
    name = "model.layers.1.self_attn.qkv_proj.weight"
    folder = folder_of(tmp_path / "model", "phi3")
    weights = hf_weights(config_of(folder))
    write_folder(folder, CASES["phi3"], weights | {name: weights[name][1:]})
    with pytest.raises(ValueError, match=rf"{name}' is F32 of shape \(127, 64\), but"):
        load(folder)
    q = {"blk.1.attn_q.weight": ("F32", np.ones((64, 64), np.float32))}
    stored = tensors_of("phi3", "phi3", weights) | q
    with pytest.raises(ValueError, match=r"attn_q.weight' and 'blk.1.attn_qkv.weight' have the"):
        load(write_gguf(tmp_path / "model.gguf", keys_of("phi3", "phi3"), stored))
