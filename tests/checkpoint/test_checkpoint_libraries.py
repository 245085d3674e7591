"""Folders as other libraries write them give the weights that the library dequantizes them to.

The folders of tests/data/checkpoints come from the scripts in tools/golden_checkpoints.
"""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

for package in ("safetensors", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from safetensors import safe_open  # noqa: E402

from jaxlowbit import QuantizedArray, checkpoint  # noqa: E402
from jaxlowbit.checkpoint._load import open_folder  # noqa: E402

ROOT = Path(__file__).parents[1] / "data" / "checkpoints"
FOLDERS = sorted(path.parent.name for path in ROOT.glob("*-*/expected.safetensors"))
INEXACT = ("bitsandbytes-nf4-ragged", "hqq-axis0", "hqq-axis0-3bit")
INEXACT += ("modelopt-int4-awq", "modelopt-w4a8-awq", "modelopt-int8-smoothquant")
# Packing compiles programs for each format and shape, so that only some folders are packed.
PACKED = ("bitsandbytes-nf4-double", "hqq-3bit", "mlx-stack", "mlx-nvfp4", "modelopt-nvfp4")
PACKED += ("mxfp4-gpt-oss", "torchao-int3-asymmetric")
pytestmark = pytest.mark.filterwarnings("ignore:.* left out. here they are floats")


def expected_of(name):
    """The weights (out, in), or stacks of them, of a golden folder by name."""
    with safe_open(ROOT / name / "expected.safetensors", framework="flax") as file:
        return {key: np.asarray(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118


def dequantized(weight):
    """The float32 weights (out, in) of a packed matrix, or stack of them."""
    assert isinstance(weight, QuantizedArray)
    return np.swapaxes(np.asarray(weight.dequantize(jnp.float32)), -1, -2)


def assert_same(found, expected):
    """Equal in a narrower dtype; in float32 up to the last bit of the largest weight."""
    if expected.dtype == np.float32:
        most = 2.0**-23 * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=most)
    else:
        np.testing.assert_array_equal(found.astype(expected.dtype), expected)


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_match_the_library(name):
    expected = expected_of(name)
    matrices = open_folder(ROOT / name).matrices
    assert matrices.keys() == expected.keys()
    for key, own in expected.items():
        count = own.size // own.shape[-1]
        strips = [matrices[key].rows(i, min(i + 11, count)) for i in range(0, count, 11)]
        assert_same(np.concatenate(strips).reshape(own.shape), own)


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_match_the_library(name):
    tree = checkpoint.load(ROOT / name)
    for key, own in expected_of(name).items():
        assert_same(dequantized(tree[key]), own)


@pytest.mark.parametrize("name", INEXACT)
def test_weights_without_an_exact_format_raise(name):
    with pytest.raises(ValueError, match=r"held by no format exactly: .*requantize="):
        checkpoint.load(ROOT / name)


@pytest.mark.parametrize("name", ["hqq-axis0", "modelopt-int4-awq"])
def test_weights_without_an_exact_format_are_rounded_on_request(name):
    tree = checkpoint.load(ROOT / name, requantize="int8")
    for key, own in expected_of(name).items():
        found = dequantized(tree[key])
        assert np.abs(found - own).max() < 0.01 * np.abs(own).max()


def test_other_tensors_keep_their_names():
    tree = checkpoint.load(ROOT / "mlx-mxfp4")
    assert tree["floats.weight"].shape == (2, 128)
    tree = checkpoint.load(ROOT / "mxfp4-gpt-oss")
    assert tree["model.layers.0.mlp.experts.gate_up_proj_bias"].shape == (3, 32)
    assert tree["model.layers.0.mlp.experts.gate_up_proj"].shape == (3, 96, 32)


def test_static_scales_of_activations_warn():
    with pytest.warns(UserWarning, match=re.escape("modelopt-fp8") + ".*static scales"):
        checkpoint.load(ROOT / "modelopt-fp8")


def test_dtypes_of_inputs_with_a_scale_for_each_token_are_known():
    found = {
        name: dtype
        for name in FOLDERS
        for matrix in open_folder(ROOT / name).matrices.values()
        if (dtype := matrix.activation_dtype) is not None
    }
    assert found == {"modelopt-fp8-channel": jnp.float8_e4m3fn, "torchao-int8-dynamic": jnp.int8}


def test_unsupported_rounding_of_inputs_warns():
    with pytest.warns(UserWarning, match=r"torchao-int4-dynamic has activations .* left out"):
        checkpoint.load(ROOT / "torchao-int4-dynamic")
