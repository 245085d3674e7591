"""Checkpoints that libraries have written, with the weights that they dequantize them to."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxlowbit import QuantizedArray, checkpoint

ROOT = Path(__file__).parents[1] / "data" / "checkpoints"
FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/expected.safetensors"))


def expected_of(folder):
    with safe_open(folder / "expected.safetensors", framework="flax") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_are_those_of_the_library(name):
    tree = checkpoint.load(ROOT / name, requantize="int8")
    for key, own in expected_of(ROOT / name).items():
        assert isinstance(tree[key], QuantizedArray)
        found = np.swapaxes(np.asarray(tree[key].dequantize(jnp.float32)), -1, -2)
        own=np.asarray(own)
        print(name, key, tree[key].format, own.dtype, np.abs(found-own.astype(np.float32)).max(), (found.astype(own.dtype)!=own).mean(), np.abs(own).max())
