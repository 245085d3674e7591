"""GGUF files: loaded models of every type and architecture, and errors for damaged files."""

import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import (
    ARCHITECTURES,
    TOKENS,
    TYPES,
    floats,
    load,
    metadata,
    same_bits,
    tensors,
    write_gguf,
    write_tiny,
)

from jaxlowbit import INT4, INT8, Format, QuantizedArray, quantize

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
for package in ("jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")


from jaxlowbit import llm  # noqa: E402
from jaxlowbit._llm import gguf as files  # noqa: E402
from jaxlowbit._llm import memory  # noqa: E402
from jaxlowbit._llm.tokenizer import Tokenizer  # noqa: E402

MIXTURE = ("Q4_K", "Q6_K", "Q8_0", "Q4_1", "F16")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


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
        expected = gguf.quants.dequantize(array, number)
        zero = np.float32(0)  # without signs: e2m1 has -0, which ggml reads as 0
        same_bits(np.asarray(floats(weight)) + zero, expected + zero)
    packed = isinstance(checkpoint.weights["layers.0.q"], QuantizedArray)
    assert packed == (kind in TYPES)


def test_scales_of_tensors(tmp_path):
    """Files of NVIDIA's recipe have a scale for the matrix and one for its inputs."""
    stored = tensors("llama", ["NVFP4"])
    factors = {"scale": np.full(1, 0.25, np.float32), "input_scale": np.ones(1, np.float32)}
    beside = {f"blk.0.attn_q.{name}": ("F32", value) for name, value in factors.items()}
    path = write_gguf(tmp_path / "model.gguf", metadata("llama"), stored | beside)
    weights: Any = load(path).weights
    assert float(weights["layers.0.q"].tensor_scale) == 0.25
    assert float(weights["layers.0.k"].tensor_scale) == 1
    expected = gguf.quants.dequantize(
        stored["blk.0.attn_q.weight"][1], gguf.GGMLQuantizationType.NVFP4
    )
    zero = np.float32(0)
    same_bits(floats(weights["layers.0.q"]) + zero, expected * np.float32(0.25) + zero)
    coarse: Any = load(path, format=INT4, dtype=jnp.float32).weights["layers.0.q"]
    again = quantize(floats(weights["layers.0.q"]).T, INT4)
    np.testing.assert_array_equal(coarse.packed, again.packed)


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
    assert config.qk_norm == ("head" if architecture in ("qwen3", "gemma3") else None)
    assert (config.bos, config.eos) == (len(TOKENS) - 2, (len(TOKENS) - 1, len(TOKENS) - 3))
    if architecture == "gemma3":
        assert config.norm_placement == "pre_and_post" and config.activation == "gelu_tanh"
        assert (config.window, config.window_layers, config.local_rope_base) == (128, (), 1e4)
        assert (config.embedding_scale, config.norm_offset) == (16.0, 0.0)
    assert {tensor.stored for tensor in report.tensors} == {"F32", *MIXTURE}
    assert report.nbytes == sum(w.nbytes for w in weights.values())
    table = str(report)
    assert table == repr(report) and "Q6_K" in table and "6 bits, groups of 16" in table


def test_metadata_describes_the_computation_of_decoders(tmp_path):
    """Scaling of the rotation, from keys and from the tensor of llama 3.1."""
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


def halved(weight, format, statistics, **options):
    """A user-defined quantizer."""
    return quantize(weight / 2, format, **options)


def permuted(weight, format, statistics, **options):
    return quantize(weight, format, permutation=jnp.arange(weight.shape[-2]), **options)


def test_formats_round_the_weights_of_a_file(tiny):
    coarse = Format(3, 64)
    rules = {"embedding": INT8, r"\.down$": None, "layers": coarse}
    weights: Any = load(tiny, rules=rules).weights
    stored: Any = load(tiny).weights
    assert weights["embedding"].format == INT8 and weights["layers.0.q"].format == coarse
    assert weights["layers.1.down"].format == stored["layers.1.down"].format
    expected = quantize(jnp.asarray(floats(stored["layers.0.q"]).T), coarse)
    np.testing.assert_array_equal(weights["layers.0.q"].packed, expected.packed)
    fine: Any = load(tiny, format=INT4, quantizer=halved).weights
    expected = quantize(jnp.asarray(floats(stored["layers.0.q"]).T) / 2, INT4)
    np.testing.assert_array_equal(fine["layers.0.q"].scale, expected.scale)
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
        ({"format": 4}, TypeError, "format is 4"),
        ({"format": "int9"}, ValueError, "bits=9"),
        ({"format": INT4, "quantizer": "no"}, ValueError, "load: quantizer='no' is unknown"),
        ({"quantizer": "mse"}, ValueError, "load: quantizer is 'mse', but no weight is rounded"),
        (
            {"format": Format(1), "quantizer": "mse"},
            ValueError,
            "load: the quantizer 'mse' does not support",
        ),
        ({"format": INT4, "quantizer": lambda *_: None}, TypeError, "argument 'scale_dtype'"),
        ({"format": INT4, "quantizer": permuted}, ValueError, "a decoder takes them as they are"),
        ({"dtype": jnp.int8}, ValueError, "dtype is int8"),
        ({"scale_dtype": jnp.float64}, ValueError, "scale_dtype is"),
    ],
)
def test_options_raise(options, error, match, tiny):
    with pytest.raises(error, match=match):
        load(tiny, **options)


def test_weights_too_large_for_memory_are_not_read(tiny, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 1000)
    config = llm.Config("llama", 1, 64, 2, 1, 32, 128, 256, 128)
    for make in (lambda: load(tiny), lambda: llm.init(config)):
        with pytest.raises(ValueError, match=r": the weights need .* bytes, but 1,000 are left"):
            make()


def test_paths_raise(tmp_path, tiny):
    with pytest.raises(FileNotFoundError, match=r"does not exist; name a \.gguf file"):
        load(tmp_path / "missing.gguf")
    with pytest.raises(FileNotFoundError, match="the empty path does not exist"):
        load("")
    with pytest.raises(ValueError, match=r"GGUF files and no config.json; name a file, such as"):
        load(tiny.parent)
    (tmp_path / "text").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"begins with b'text', .* name a \.gguf file"):
        load(tmp_path / "text")


# --- split files ----------------------------------------------------------------------------------


def write_split(folder, counts, stored, **changes):
    """The files of a split model, each with so many tensors; changes are of the last one's keys."""
    names, paths = list(stored), []
    for i, count in enumerate(counts):
        own = {name: stored[name] for name in names[:count]}
        del names[:count]
        keys = {"split.no": i, "split.count": len(counts), "split.tensors.count": len(stored)}
        entries = metadata("llama") if i == 0 else {"general.architecture": "llama"}
        keys |= {f"split.{key}": value for key, value in changes.items() if i == len(counts) - 1}
        path = folder / f"model-{i + 1:05}-of-{len(counts):05}.gguf"
        paths.append(write_gguf(path, entries | keys, own))
    return paths


def test_split_files_are_one_model(tmp_path):
    stored = tensors("llama", MIXTURE)
    whole = load(write_gguf(tmp_path / "whole.gguf", metadata("llama"), stored))
    paths = write_split(tmp_path, [0, 7, len(stored) - 7], stored)
    for path in (paths[0], paths[2]):
        found = load(path)
        assert found.config == whole.config and found.report.nbytes == whole.report.nbytes
    for name, weight in whole.weights.items():
        same_bits(floats(found.weights[name]), np.ascontiguousarray(floats(weight)))


def test_split_files_raise(tmp_path):
    stored = tensors("llama")
    first, _ = write_split(tmp_path, [5, len(stored) - 5], stored, no=0)
    with pytest.raises(ValueError, match=r"00002-of-00002.gguf: 'split.no' is 0, but by its name"):
        load(first)
    first, _ = write_split(tmp_path, [5, len(stored) - 6], stored)
    with pytest.raises(ValueError, match=r"'split.tensors.count' is 20, but its 2 files have 19"):
        load(first)
    first, second = write_split(tmp_path, [5, 5], stored)
    write_gguf(second, {"general.architecture": "llama", "split.no": 1, "split.count": 2}, stored)
    with pytest.raises(ValueError, match=r"tensor '[\w.]+' is also in model-00001-of-00002.gguf"):
        load(first)
    second.unlink()
    with pytest.raises(ValueError, match=r"00002-of-00002.gguf is missing, but the model is split"):
        load(first)
    whole = write_gguf(tmp_path / "model-00001-of-00001.gguf", metadata("llama"), stored)
    assert load(whole).config.layers == 2


def test_strings_that_are_not_utf8(tmp_path):
    """They raise an error only if they are read."""
    path = write_gguf(tmp_path / "a.gguf", metadata("llama") | {"x.y": "?1"}, tensors("llama"))
    path.write_bytes(path.read_bytes().replace(b"?1", b"\xff1"))
    assert load(path).config.layers == 2
    for key, match in (
        ("tokenizer.ggml.pre", "is b'.xff1', but it must be a string"),
        ("?1", "no UTF"),
    ):
        write_gguf(path, metadata("llama") | {key: "?1"}, tensors("llama"))
        path.write_bytes(path.read_bytes().replace(b"?1", b"\xff1"))
        with pytest.raises(ValueError, match=match):
            load(path)


# --- damaged GGUF files ---------------------------------------------------------------------------


def without(entries, key):
    return {name: value for name, value in entries.items() if name != key}


METADATA = [
    ({"general.architecture": "mamba"}, "'mamba', but the decoder here knows llama"),
    ({"llama.block_count": None}, "lacks 'llama.block_count', an integer"),
    ({"llama.block_count": "two"}, "'llama.block_count' is 'two', but it must be an integer"),
    ({"llama.block_count": True}, "'llama.block_count' is True, but it must be an integer"),
    ({"llama.block_count": 3}, "9 weights of 29 are missing, the first is 'layers.2.q'"),
    ({"llama.block_count": 1}, "is beyond what the metadata says, 1 layers"),
    ({"llama.block_count": 2**31}, "layers=2147483648, but it must be an integer from 1 to 10000"),
    ({"llama.embedding_length": 512}, "has the shape .* but the metadata asks for"),
    ({"llama.attention.head_count": 0}, "heads=0, but it must be an integer from 1"),
    ({"llama.attention.head_count_kv": 3}, "kv_heads=3, but heads of queries share"),
    ({"llama.attention.head_count_kv": [2, 1]}, r"\[2, 1\], but the layers of the decoder"),
    ({"llama.rope.dimension_count": 33}, "rope_size=33, but elements rotate in pairs"),
    ({"llama.rope.dimension_count_swa": 32}, "is 32, but it must be 64 for attention"),
    ({"llama.expert_shared_count": 8}, "8, but the decoder here has no such experts"),
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'"),
    ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "norm_epsilon=-1.0, but it must be above 0"),
    ({"general.type": "adapter"}, "general.type is 'adapter', but a whole model is read; merge"),
    ({"split.count": 3}, r"split into 3 files, but this name .*-00001-of-00003.gguf.*--merge"),
    ({"tokenizer.ggml.model": "bert"}, "'bert', but 'gpt2', 'llama' and 'gemma4' are read"),
    ({"tokenizer.ggml.pre": "unheard-of"}, "'unheard-of', but no pre-tokenizer"),
    ({"tokenizer.ggml.tokens": None}, "lacks 'tokenizer.ggml.tokens', a list"),
    ({"tokenizer.ggml.tokens": [1, 2]}, "it must be a list of strings"),
    ({"tokenizer.ggml.token_type": [1]}, "has 1 entries, but an integer belongs to each"),
    ({"tokenizer.ggml.merges": ["h e", "z"]}, "has 'z ', but a merge is of two tokens"),
    ({"tokenizer.ggml.eos_token_id": 9999}, "eos has the token 9999, but tokens are"),
]


@pytest.mark.parametrize(("changes", "match"), METADATA)
def test_metadata_raises(changes, match, tmp_path):
    entries = metadata("llama") | changes
    entries = {key: value for key, value in entries.items() if value is not None}
    path = write_gguf(tmp_path / "model.gguf", entries, tensors("llama"))
    with pytest.raises(ValueError, match=match) as raised:
        load(path)
    assert str(path) in str(raised.value)


def test_tensors_raise(tmp_path):
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
            stored | {name: ("I8", np.zeros((256, 256), np.int8))},
            "'blk.1.ffn_up.weight' is I8, which no format here represents. Quantize the model",
        ),
        (
            stored | {name.replace("weight", "scale"): ("F32", np.ones(1, np.float32))},
            "'blk.1.ffn_up.scale' is no part of llama",
        ),
        (
            stored
            | {
                name: ("NVFP4", np.zeros((256, 4 * 36), np.uint8)),
                name.replace("weight", "scale"): ("F32", np.ones(2, np.float32)),
            },
            r"'blk.1.ffn_up.scale' is F32 of shape \(2,\), but the scale of a tensor is one finite",
        ),
        (
            stored | {"output_norm.weight": ("Q8_0", np.zeros((1, 8 * 34), np.uint8))},
            "'output_norm.weight' (is Q8_0, but norms and biases are|has the shape)",
        ),
        (without(stored, "token_embd.weight"), "no matrix 'token_embd.weight'"),
    ]
    cases += [
        (stored | {"blk.00.ffn_up.weight": stored[name]}, "are one weight under two names"),
        (stored | {"cls.output.weight": stored[name]}, "'cls.output.weight' is no part of llama"),
        (stored | {"output.bias": ("F32", np.ones(264, np.float32))}, "'output.bias' is no part"),
    ]
    for tensors_, match in cases:
        write_gguf(path, metadata("llama"), tensors_)
        with pytest.raises(ValueError, match=match):
            load(path)


def test_weights_of_the_architecture_are_not_optional(tmp_path):
    """Missing head norms or biases raise: the file would describe a different model."""
    path = tmp_path / "model.gguf"
    for architecture, part in (("qwen3", "_norm"), ("gemma3", "_norm"), ("qwen2", ".bias")):
        stored = {
            name: value
            for name, value in tensors(architecture).items()
            if not (".attn_q" in name or ".attn_k" in name or ".attn_v" in name) or part not in name
        }
        write_gguf(path, metadata(architecture), stored)
        with pytest.raises(ValueError, match=r"weights of \d+ are missing, the first is 'layers.0"):
            load(path)


def test_weights_that_are_not_finite_raise(tmp_path):
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
def test_truncated_files_raise(part, tiny, tmp_path):
    data = tiny.read_bytes()
    sizes = {"header": header_bytes(tiny), "all but a byte": len(data) - 1}
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: sizes.get(part, part)])
    with pytest.raises(ValueError, match=r"fetch it again|name a \.gguf file"):
        load(path)


def open_file(path):
    """All steps before the first weight is read."""
    file = files.File(path)
    config = files.config_of(file)
    files.weights_of(file, config)
    Tokenizer.from_gguf(file)


@given(data=st.data())
@pytest.mark.filterwarnings("ignore:load:UserWarning")  # a token of unknown type
def test_flipped_bits_load_or_raise(data, tiny, tmp_path_factory):
    """A header with flipped bits loads or raises a sentence, and never hangs."""
    original = bytearray(tiny.read_bytes())
    end = header_bytes(tiny)
    # Half of the flips hit the first bytes or the list of tensors rather than the vocabulary.
    places = st.one_of(st.integers(0, 1500), st.integers(end - 1700, end - 1), st.integers(0, end))
    for _ in range(data.draw(st.integers(1, 3))):
        original[data.draw(places)] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("flipped") / "flipped.gguf"
    path.write_bytes(original)
    try:
        with warnings.catch_warnings():  # warnings about unknown keys
            warnings.simplefilter("ignore")
            open_file(path)
    except ValueError as error:
        assert str(path) in str(error) and len(str(error)) > 40


def test_numbers_beyond_the_file_raise(tmp_path):
    """Counts beyond the memory raise before anything is allocated."""
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


def test_other_files_raise(tmp_path):
    path = tmp_path / "model.gguf"
    for data, match in (
        (b"PK\3\4" + bytes(100), "begins with b'PK.*name a .gguf file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it is big-endian; convert"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1, but only versions 2 and 3"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=match):
            load(path)


# --- the package ----------------------------------------------------------------------------------


def test_importing_jaxlowbit_does_not_import_it():
    program = (
        "import sys, jaxlowbit; names = ['gguf', 'tokenizers', 'jinja2', 'safetensors', 'tqdm', "
        "'flax', 'jaxlowbit._llm']; assert not [n for n in names if n in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
