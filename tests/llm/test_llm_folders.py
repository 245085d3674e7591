"""Hugging Face folders: loaded models, and errors for invalid folders."""

import json
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


from jaxlowbit import llm  # noqa: E402
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
    """In `rope_scaling`, and in `rope_parameters` of newer files."""
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
    """Only the text part of a vision model is read; missing entries have their defaults."""
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
    assert (found.window, found.window_layers, found.norm_offset) == (32, (), 1.0)
    assert found.attention_scale == 256**-0.5 and found.tied_head and found.eos[:2] == (1, 106)
    assert found.rope_scaling == RopeScaling("linear", 8.0)
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(found.rope_frequencies(local=True), plain, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "gpt2"}, "'model_type' is 'gpt2', but the decoder here knows llama"),
        ({"hidden_size": None}, "lacks 'hidden_size', an integer"),
        ({"hidden_size": "256"}, "'hidden_size' is '256', but it must be an integer"),
        ({"num_hidden_layers": 3}, "9 weights of 30 are missing, the first is 'layers.2.q'"),
        ({"num_hidden_layers": 1}, "is no part of llama with 1 layers"),
        ({"intermediate_size": 128}, r"config.json asks for floats .* of \(128, 256\)"),
        ({"hidden_act": "relu"}, "the activation is 'relu'"),
        ({"attention_bias": True}, "6 weights of 29 are missing|layers.0.q_bias"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config' has no 'quant_method', and"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "lacks 'short_factor', a list"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks 'factor', a number"),
        ({"eos_token_id": "end"}, "'eos_token_id' is"),
    ],
)
def test_config_json_raises(changes, match, tmp_path):
    config = model_files.hf_config("llama") | changes
    folder = model_files.write_folder(tmp_path / "model", config, model_files.hf_weights("llama"))
    with pytest.raises(ValueError, match=match):
        load(folder)


def test_folders_raise(tmp_path):
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
        refused(f"{name} contains list")
        (folder / name).unlink()
        refused(f"{name} is missing")
        (folder / name).write_text(text)
    index = folder / "model.safetensors.index.json"
    file.unlink()
    index.write_text('{"weight_map": {"lm_head.weight": "../model.safetensors"}}')
    refused("names the file '../model.safetensors', but shards must be in the same folder")
    index.unlink()
    wrong = weights | {"lm_head.weight": np.ones(weights["lm_head.weight"].shape, np.int32)}
    model_files.write_folder(folder, config, wrong)
    refused("'lm_head.weight' is I32, but it is no part of a quantized weight")


OTHER_FOLDERS = {
    "a PEFT adapter": (
        {"adapter_config.json": '{"base_model_name_or_path": "org/base"}'},
        r"is a PEFT adapter of 'org/base' .*load its model .*--adapter",
    ),
    "PyTorch's weights": (
        {"config.json": "{}", "pytorch_model.bin": "", "tokenizer.json": "{}"},
        r"its weights in pytorch_model\.bin, .*not in safetensors; convert .*save_pretrained",
    ),
    "shards of PyTorch": (
        {"config.json": "{}", "pytorch_model-00001-of-00002.bin": ""},
        r"its weights in pytorch_model-00001-of-00002\.bin",
    ),
    "TensorFlow's weights": ({"config.json": "{}", "tf_model.h5": ""}, r"weights in tf_model\.h5"),
    "SentencePiece's tokenizer": (
        {"config.json": "{}", "model.safetensors": "", "tokenizer.model": ""},
        r"its tokenizer in tokenizer\.model, .*not in tokenizer\.json; convert .*AutoTokenizer",
    ),
    "GPT-2's tokenizer": (
        {"config.json": "{}", "model.safetensors": "", "vocab.json": "{}", "merges.txt": ""},
        r"its tokenizer in vocab\.json",
    ),
    "the authors' format": (
        {"params.json": "{}", "consolidated.00.pth": "", "tokenizer.model": ""},
        r"in the format of the model's authors \(params\.json\)",
    ),
    "weights in GGUF": (
        {"config.json": "{}", "tokenizer.json": "{}", "b.gguf": "", "a.gguf": ""},
        r"has its weights in GGUF files; name one, such as .*a\.gguf",
    ),
    "the hub's cache": (
        {"refs/main": "", "snapshots/0123/config.json": "{}"},
        r"cache of huggingface_hub, .*; name .*snapshots/0123",
    ),
}


@pytest.mark.parametrize("name", OTHER_FOLDERS)
def test_other_folders_are_named_with_a_way_out(name, tmp_path):
    files, match = OTHER_FOLDERS[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=match) as raised:
        load(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_an_adapter_next_to_a_model_raises(tmp_path):
    """transformers would merge the adapter into the weights."""
    config, weights = model_files.hf_config("llama"), model_files.hf_weights("llama")
    folder = model_files.write_folder(tmp_path / "model", config, weights)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": null}')
    with pytest.raises(ValueError, match="is a PEFT adapter of None"):
        load(folder)


def test_scales_that_config_json_does_not_tell_of_raise(tmp_path):
    config, weights = model_files.hf_config("llama"), model_files.hf_weights("llama")
    packed = weights | {"lm_head.scales": np.ones((4, 4), np.float32)}
    folder = model_files.write_folder(tmp_path / "a", config, packed)
    with pytest.raises(ValueError, match=r"'lm_head\.scales' is no part of llama with 2 layers"):
        load(folder)


def test_pointers_of_git_lfs_raise(tmp_path):
    config, weights = model_files.hf_config("llama"), model_files.hf_weights("llama")
    folder = model_files.write_folder(tmp_path / "model", config, weights)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4096\n"
    for path in (folder / "model.safetensors", tmp_path / "model.gguf"):
        path.write_text(pointer)
        with pytest.raises(ValueError, match=r"is a pointer of Git LFS .*run git lfs pull"):
            load(folder if path.parent == folder else path)


def test_tensors_that_nothing_reads_raise(tmp_path):
    """So do duplicate tensors, in two shards or under two names."""
    config, weights = model_files.hf_config("llama"), model_files.hf_weights("llama")
    table = weights["model.embed_tokens.weight"]
    for extra, match in (
        ({"embed_tokens.weight": table}, "are one weight under two names, 'embedding'"),
        (
            {"model.layers.00.input_layernorm.weight": np.ones(256, np.float32)},
            r"one weight under two names, 'layers\.0\.attention_norm'",
        ),
        ({"model.vision_tower.a.weight": table}, r"'model\.vision_tower\.a\.weight' is no part of"),
        ({"model.layers.0.self_attn.o_proj.bias": np.ones(256, np.float32)}, "is no part of llama"),
        ({"score.weight": table}, r"'score\.weight' is no part of llama"),
    ):
        folder = model_files.write_folder(tmp_path / "model", config, weights | extra)
        with pytest.raises(ValueError, match=match):
            load(folder)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(32, np.float32)}
    load(model_files.write_folder(tmp_path / "model", config, weights | buffer))


def test_indices_name_the_tensors_of_their_shards(tmp_path):
    config, weights = model_files.hf_config("llama"), model_files.hf_weights("llama")
    folder = model_files.write_folder(tmp_path / "model", config, weights, shards=2)
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    other = json.loads(text)
    other["weight_map"]["lm_head.bias"] = first
    index.write_text(json.dumps(other))
    with pytest.raises(ValueError, match=rf"has tensor 'lm_head.bias' in {first}, but the file"):
        load(folder)
    index.write_text(text.replace(first, "other").replace(second, first).replace("other", second))
    with pytest.raises(ValueError, match="but the file does not contain it"):
        load(folder)
    index.write_text(text)
    (folder / second).write_bytes((folder / first).read_bytes())
    with pytest.raises(ValueError, match=rf"is also in {first}"):
        load(folder)


def test_a_head_next_to_its_tied_table(tmp_path):
    config = model_files.hf_config("llama") | {"tie_word_embeddings": True}
    weights = model_files.hf_weights("llama")
    same = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].copy()}
    assert "head" not in load(model_files.write_folder(tmp_path / "a", config, same)).weights
    same["lm_head.weight"][-1, -1] += 1
    for head in (same["lm_head.weight"], same["lm_head.weight"][:-1]):
        folder = model_files.write_folder(
            tmp_path / "a", config, weights | {"lm_head.weight": head}
        )
        with pytest.raises(ValueError, match=r"differs from 'model.embed_tokens.weight', but conf"):
            load(folder)


def test_warnings_name_the_line_that_loads(tmp_path):
    config, weights = model_files.hf_config("llama"), model_files.hf_weights("llama")
    folder = model_files.write_folder(tmp_path / "model", config | {"new": 1}, weights)
    (folder / "generation_config.json").write_text('{"num_beams": 4}')
    entries = model_files.metadata("llama") | {"llama.new": 1}
    file = model_files.write_gguf(tmp_path / "m.gguf", entries, model_files.tensors("llama"))
    for path, names in ((folder, ["'num_beams': 4", "'new': 1"]), (file, ["'llama.new': 1"])):
        with pytest.warns(UserWarning) as warned:
            llm.load(path, progress=False)
        assert [warning.filename for warning in warned] == [__file__] * len(names)
        for warning, name in zip(warned, names, strict=True):
            assert str(warning.message).startswith("load: ") and name in str(warning.message)


def test_texts_without_an_end_in_the_file_end_as_in_transformers(tmp_path):
    config = model_files.hf_config("llama")
    del config["eos_token_id"]
    folder = model_files.write_folder(tmp_path / "m", config, model_files.hf_weights("llama"))
    assert huggingface.config_of(folder).eos == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert huggingface.config_of(folder).eos == (7,)
