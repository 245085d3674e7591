"""Weights and activations that are not finite raise with every quantizer, experts included."""

import json
from typing import Any

import numpy as np
import pytest

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from golden_architectures import CASES  # noqa: E402
from golden_files import hf_weights  # noqa: E402
from model_files import write_folder  # noqa: E402

from jaxlowbit import llm  # noqa: E402
from jaxlowbit._llm.huggingface import config_of  # noqa: E402
from jaxlowbit.quantizers import _registry  # noqa: E402

TOKENS = np.random.default_rng(0).integers(0, 40, (16, 16))
RULES = {"embedding|head": None}
EXPERTS = RULES | {"[qkvo]$": None}
CALIBRATED = [name for name in _registry.NAMES if _registry.statistics_of(name)]
DENSE, MOE = "llama", "qwen3_moe"


def load(folder: Any, architecture: str, method: str, tensor: str, place: Any, value: float) -> Any:
    """Loads a model of one block after replacing a number of a tensor."""
    entries = CASES[architecture] | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(entries))
    weights = hf_weights(config_of(folder))
    weights[tensor] = weights[tensor].copy()
    weights[tensor][place] = value
    write_folder(folder, entries, weights)
    calibration = TOKENS if method in CALIBRATED else None
    options: Any = {"quantizer": method, "calibration": calibration}
    options["rules"] = RULES if architecture == DENSE else EXPERTS
    return llm.load(folder, format="int3-g32", dtype="float32", progress=False, **options)


@pytest.mark.parametrize("method", _registry.NAMES)
@pytest.mark.parametrize(
    ("architecture", "tensor", "value"),
    [
        (DENSE, "model.layers.0.self_attn.q_proj.weight", -np.inf),
        (MOE, "model.layers.0.mlp.experts.3.gate_proj.weight", np.nan),
    ],
)
def test_weights(tmp_path, method, architecture, tensor, value):
    """The error names the tensor of the file, in a stack the tensor of the expert."""
    with pytest.raises(ValueError, match=rf"^load: \S+ tensor '{tensor}' \(F32\): .*NaN or inf"):
        load(tmp_path, architecture, method, tensor, (3, 5), value)


@pytest.mark.parametrize("method", CALIBRATED)
@pytest.mark.parametrize(
    ("architecture", "norm", "value", "message"),
    [
        (DENSE, "input_layernorm", 3e38, "layers.0.q in the calibration are NaN or infinite"),
        (MOE, "post_attention_layernorm", 1e30, "layers.0.gate in .* reach .*e.30, and their sq"),
    ],
)
def test_activations(tmp_path, method, architecture, norm, value, message):
    """The error names the first matrix with such inputs."""
    with pytest.raises(ValueError, match=f"load: the inputs of {message}"):
        load(tmp_path, architecture, method, f"model.layers.0.{norm}.weight", 3, value)
