"""Modules that the libraries packed (tools/golden_checkpoints): their own dequantized weights."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

for package in ("safetensors", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from jaxlowbit import Format, QuantizedArray, checkpoint  # noqa: E402
from jaxlowbit.checkpoint._files import _read_file  # noqa: E402
from jaxlowbit.checkpoint._load import open_folder  # noqa: E402

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
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
def test_weights_are_what_the_library_dequantizes_to(folder):
    """In float32, rounded to the dtype in which the library computes."""
    contents = open_folder(DATA / folder)
    expected, _ = _read_file(DATA / folder / "expected.safetensors")
    assert {tensor.name for tensor in expected} == contents.matrices.keys()
    for tensor in expected:
        matrix, weight = contents.matrices[tensor.name], np.array(tensor.array())
        assert matrix.shape == weight.shape
        packed = matrix.pack()
        assert packed.format == matrix.format
        for found in (matrix.rows(0, weight.shape[0]), np.asarray(packed.dequantize("f4")).T):
            np.testing.assert_array_equal(found.astype(weight.dtype), weight, tensor.name)
        part = matrix.rows(3, 21).astype(weight.dtype)
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
    """Stored zeros of 2^(bits - 1) are those of a format without zeros."""
    for folder, name in (("gptq", "w4"), ("gptq_p", "w6"), ("awq_gemm", "sym")):
        format = open_folder(DATA / folder).matrices[f"m.{name}.weight"].format
        assert format is not None and format.zero == "none", name


def test_every_kind_is_listed():
    methods = {
        json.loads((DATA / folder / "config.json").read_text())["quantization_config"][
            "quant_method"
        ]
        for folder in FOLDERS
    }
    assert methods <= checkpoint.kinds().keys()
