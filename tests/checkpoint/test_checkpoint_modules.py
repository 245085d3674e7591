"""Modules that the libraries packed (tools/golden_checkpoints): their own dequantized weights."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

for package in ("safetensors", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from safetensors.numpy import save_file  # noqa: E402

from jaxlowbit import Format, QuantizedArray, checkpoint  # noqa: E402
from jaxlowbit.checkpoint._files import read_file  # noqa: E402
from jaxlowbit.checkpoint._kinds import gptq  # noqa: E402
from jaxlowbit.checkpoint._load import open_folder  # noqa: E402
from jaxlowbit.checkpoint._registry import MODULES  # noqa: E402

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data/checkpoints"
FOLDERS = (
    "auto_round",
    "auto_round_auto_gptq",
    "awq_gemm",
    "awq_gemv",
    "awq_gemv_fast",
    "compressed_tensors",
    "gptq",
    "gptq_p",
    "gptq_v2",
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_weights_match_the_library(folder):
    """In float32, rounded to the library's dtype.

    test_checkpoint_libraries.py compares them after packing.
    """
    contents = open_folder(DATA / folder)
    expected, _ = read_file(DATA / folder / "expected.safetensors")
    assert {tensor.name for tensor in expected} == contents.matrices.keys()
    for tensor in expected:
        matrix, weight = contents.matrices[tensor.name], np.array(tensor.array())
        assert matrix.shape == weight.shape
        found = matrix.rows(0, weight.shape[0]).astype(weight.dtype)
        np.testing.assert_array_equal(found, weight, tensor.name)
        part = matrix.part(2, 24).rows(1, 19).astype(weight.dtype)
        np.testing.assert_array_equal(part, weight[3:21], tensor.name)


def test_load_gives_packed_matrices_and_floats_by_the_names_of_the_checkpoint():
    tree = checkpoint.load(DATA / "gptq")
    assert isinstance(tree["m.float.weight"], jnp.ndarray)
    assert tree["m.float.weight"].dtype == jnp.float16
    quantized = tree["m.w4_asym.weight"]
    assert isinstance(quantized, QuantizedArray)
    assert quantized.format == Format(4, 32, "integer") and quantized.permutation is not None
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    expected = x @ np.asarray(quantized.dequantize("f4"))
    np.testing.assert_allclose(x @ quantized, expected, rtol=1e-5, atol=1e-5)
    cast = checkpoint.load(DATA / "gptq", dtype="bfloat16", scale_dtype="bfloat16")
    assert {x.dtype for x in cast.values()} == {jnp.dtype("bfloat16")}


def test_activation_schemes_are_known():
    matrices = open_folder(DATA / "compressed_tensors").matrices
    found = {name.split(".")[1]: x.activation_dtype for name, x in matrices.items()}
    by_token = {"w8a8": "int8", "w4a8": "int8", "w8a8_asym": "int8", "fp8_channel": "float8_e4m3fn"}
    by_token["fp8_block"] = "float8_e4m3fn"
    assert {k: jnp.dtype(x).name for k, x in found.items() if x is not None} == by_token


def test_symmetric_checkpoints_have_no_zeros():
    """A format without zeros represents zeros of 2^(bits - 1)."""
    for folder, name in (("gptq", "w4"), ("gptq_p", "w6"), ("awq_gemm", "sym")):
        format = open_folder(DATA / folder).matrices[f"m.{name}.weight"].format
        assert format is not None and format.zero == "none", name


def test_the_page_has_every_kind():
    rows = (ROOT / "docs/checkpoints.md").read_text().split("\n## ")[1]
    for module in MODULES.values():
        assert module.SUMMARY and any(f"`{method}`" in rows for method in module.METHODS)


def test_paths_without_a_checkpoint_raise(tmp_path):
    with pytest.raises(TypeError, match="path is 3, but it must be the path of a folder"):
        checkpoint.load(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FileNotFoundError, match="x does not exist"):
        checkpoint.load(tmp_path / "x")
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ValueError, match=r"is a file, but .*llm\.load reads \.gguf files"):
        checkpoint.load(file)
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"quant_method": "exl3"}, "'quant_method' is 'exl3', but the .* are .*'awq'.*'gptq'"),
        ({"quant_method": None}, "has no 'quant_method'"),
        ({"format": "marlin"}, "the format of GPTQ is 'marlin', but gptq, gptq_v2, gptq_p are"),
        ({"bits": 5}, "'bits' is 5, but of gptq 2, 3, 4, 8 are read"),
        ({"rotation": "hadamard"}, "'rotation' is 'hadamard', an entry of a quantized checkpoint"),
        ({"dynamic": {"-:.*w2$": {}}}, r"m\.w2\.qweight' is quantized, but by 'dynamic'"),
        ({"dynamic": {"+:(": {"bits": 2}}}, r"'dynamic' has '\(', which is no regular expression"),
        ({"dynamic": {".*": {"bits": 4, "rank": 8}}}, "'rank' is 8, an entry of a"),
        ({"group_size": 16}, r"qzeros' is I32 of shape .*, but by its configuration"),
    ],
)
def test_configs_that_are_not_read_raise(changes, sentence, tmp_path):
    config = json.loads((DATA / "gptq/config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(DATA / "gptq/model.safetensors")
    with pytest.raises(ValueError, match=sentence) as raised:
        checkpoint.load(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_adding_one_to_zeros_of_gptq_carries_across_words(tmp_path):
    """GPTQModel subtracts 1 of whole words, AutoGPTQ sets all higher bits for a zero of 0."""
    layout = gptq.Layout(4, 32, stored_zero=True)
    words = np.array([[0x11111110]], np.uint32) - np.uint32(0x11111111)
    np.testing.assert_array_equal(layout.zeros(words, 8), [[0, 1, 1, 1, 1, 1, 1, 1]])


def test_invalid_groups_of_inputs_raise(tmp_path):
    tensors = {x.name: np.array(x.array()) for x in read_file(DATA / "gptq/model.safetensors")[0]}
    tensors["m.w4.g_idx"][:] = 0
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(DATA / "gptq/config.json", tmp_path)
    with pytest.raises(ValueError, match=r"tensor 'm\.w4\.g_idx': .*group 0 .* has 64 rows"):
        checkpoint.load(tmp_path)


NAMES = {"m.w4.qweight": "a.safetensors", "m.w4.qzeros": "b.safetensors"}


@pytest.mark.parametrize(
    ("places", "sentence"),
    [
        (NAMES | {"m.w4.qzeros": "../b.safetensors"}, r"names the file '\.\./b\.safetensors', but"),
        (NAMES | {"m.w4.qzeros": "/etc/passwd"}, "names the file '/etc/passwd', but shards must"),
        (NAMES | {"m.w4.qzeros": ".."}, r"names the file '\.\.', but shards must"),
        (NAMES | {"m.w4.qzeros": "x" * 300}, "names the file of class str, but shards must"),
        (NAMES | {"m.w4.qzeros": "\0"}, r"names the file '\\x00', but shards must"),
        (NAMES | {"m.w4.qzeros": "c.safetensors"}, r"c\.safetensors is missing"),
        (NAMES | {"m.w4.qzeros": 3}, "has no 'weight_map' of tensors to files"),
        ([], "has no 'weight_map' of tensors to files"),
        (
            NAMES | {"m.w4.scales": "a.safetensors"},
            "has tensor 'm.w4.scales' in a.safetensors",
        ),
        (
            NAMES | {"m.w4.qzeros": "a.safetensors"},
            "has tensor 'm.w4.qzeros' in a.safetensors",
        ),
        (NAMES | {"m.w4.g_idx": "c"}, "c is missing"),
        (NAMES, "'m.w4.scales' is missing, but 'm.w4' needs it"),
        (NAMES | {"m.w3.qweight": "twice.safetensors"}, r"'m\.w4\.qweight' is also in a\.safetens"),
    ],
)
def test_indices_that_name_other_files_or_tensors_raise(places, sentence, tmp_path):
    tensors = {x.name: np.array(x.array()) for x in read_file(DATA / "gptq/model.safetensors")[0]}
    for name, file in NAMES.items():
        save_file({name: tensors[name]}, tmp_path / file)
    both = {name: tensors[name] for name in ("m.w4.qweight", "m.w3.qweight")}
    save_file(both, tmp_path / "twice.safetensors")
    shutil.copy(DATA / "gptq/config.json", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match=sentence) as raised:
        open_folder(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_files_that_are_folders_raise(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        checkpoint.load(tmp_path)
