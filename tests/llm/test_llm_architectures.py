"""The table of architectures: a new architecture from known parts needs one entry."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import model_files  # noqa: E402

from jaxlowbit._llm.architectures import ARCHITECTURES, fused, weight_name  # noqa: E402
from jaxlowbit.llm import Config, Decoder  # noqa: E402

KNOWN: Any = ARCHITECTURES["gemma3"]
TENSORS = {
    "blk.": "h.",
    "layers.": "h.",
    "attn_q.": "query.",
    "self_attn.": "attn.",
    "token_embd": "wte",
    "embed_tokens": "wte",
}
ENTRIES = {"hidden_size": "n_embd", "hidden_act": "activation_function"}


def other(name: str) -> str:
    for old, new in TENSORS.items():
        name = name.replace(old, new)
    return name


def other_names(table):
    return {other(name): ours for name, ours in table.items()}


@pytest.fixture
def table(monkeypatch):
    """The table with an added entry that has the parts of gemma3 under different names."""
    names, folder = KNOWN.gguf, KNOWN.huggingface
    entry = dataclasses.replace(
        KNOWN,
        gguf=dataclasses.replace(names, name="made-up", tensors=other_names(names.tensors)),
        huggingface=dataclasses.replace(
            folder,
            model_types=("made_up",),
            tensors=other_names(folder.tensors),
            defaults={},
            names=ENTRIES,
        ),
    )
    monkeypatch.setitem(ARCHITECTURES, "made_up", entry)


def check_same(found, expected):
    """Configurations are equal except for the name, and logits are equal."""
    assert found.config.architecture == "made_up"
    assert found.config.replace(architecture="gemma3") == expected.config
    tokens = jnp.array([[3, 1, 4, 1, 5]])

    def logits(checkpoint):
        decoder = Decoder(checkpoint.config, checkpoint.weights, dtype=jnp.float32)
        return np.asarray(decoder(tokens))

    np.testing.assert_array_equal(logits(found), logits(expected))


def test_a_gguf_file_of_a_new_entry(table, tmp_path):
    stored, entries = model_files.tensors("gemma3", ["F32"]), model_files.metadata("gemma3")
    expected = model_files.write_gguf(tmp_path / "known.gguf", entries, stored)
    entries = {key.replace("gemma3.", "made-up."): value for key, value in entries.items()}
    entries["general.architecture"] = "made-up"
    stored = {other(name): tensor for name, tensor in stored.items()}
    found = model_files.write_gguf(tmp_path / "new.gguf", entries, stored)
    check_same(model_files.load(found), model_files.load(expected))


def test_a_folder_of_a_new_entry(table, tmp_path):
    weights, config = model_files.hf_weights("gemma3"), model_files.hf_config("gemma3")
    config |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
    config |= {"sliding_window": 128}
    expected = model_files.write_folder(tmp_path / "known", config, weights)
    config |= {"model_type": "made_up", "n_embd": config.pop("hidden_size")}
    config["activation_function"] = config.pop("hidden_activation")
    weights = {other(name): weight for name, weight in weights.items()}
    found = model_files.write_folder(tmp_path / "new", config, weights)
    check_same(model_files.load(found), model_files.load(expected))


def test_names_of_weights():
    names = KNOWN.gguf.tensors
    assert weight_name("blk.12.attn_q.weight", names) == "layers.12.q"
    assert weight_name("output.weight", names) == "head"
    assert weight_name("blk.3.ffn_up.12.weight", {"blk.N.ffn_up.E.weight": "layers.N.up.E"}) == (
        "layers.3.up.12"
    )
    for name in ("blk.x.attn_q.weight", "blk.1.2.attn_q.weight", "blk.1.output.weight"):
        assert weight_name(name, names) is None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_entry_names_every_weight_of_its_parts(name):
    entry = ARCHITECTURES[name]
    has_experts = entry.huggingface is not None and entry.huggingface.experts
    experts = {"experts": 4, "experts_per_token": 2} if has_experts else {}
    sizes = 1, 64, 2, 1, 32, 128, 256, 128
    shapes = Config(name, *sizes, **experts, **entry.fields(64)).shapes()
    for files in (entry.gguf, entry.huggingface):
        if files is not None:
            named = [x.replace("N", "0").removesuffix(".E") for x in files.tensors.values()]
            assert shapes.keys() <= {part for name in named for part in fused(name) or (name,)}
