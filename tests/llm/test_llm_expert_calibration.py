"""Calibration of language models with experts: routed rows, folded factors, unused experts."""

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from golden_architectures import CASES  # noqa: E402
from golden_files import hf_weights  # noqa: E402
from model_files import write_folder  # noqa: E402

from jaxlowbit import llm, quantize  # noqa: E402
from jaxlowbit._core.array import QuantizedArray  # noqa: E402
from jaxlowbit._llm import experts  # noqa: E402
from jaxlowbit._llm.block import Block  # noqa: E402
from jaxlowbit._llm.huggingface import config_of  # noqa: E402
from jaxlowbit.quantizers import Statistics  # noqa: E402

TOKENS = np.random.default_rng(0).integers(0, 100, (8, 24))
RULES = {"embedding|head": None, "[qkvo]$": None}
NAMES = ["mixtral", "qwen3_moe", "gpt_oss"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    @functools.cache
    def write(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        entries = CASES[name] | {"num_hidden_layers": 1}
        entries |= {"layer_types": ["sliding_attention"]} if "layer_types" in entries else {}
        (path / "config.json").write_text(json.dumps(entries))
        return write_folder(path, entries, hf_weights(config_of(path)))

    return write


def loaded(path: Path, format: Any, quantizer: Any = None, given: Any = TOKENS) -> Any:
    options = {"quantizer": quantizer, "calibration": given if quantizer else None}
    options |= {"rules": RULES} if format else {}
    return llm.load(path, format=format, dtype="float32", progress=False, **options)


def logits(model: Any) -> np.ndarray:
    return np.asarray(model.decoder(jnp.asarray(TOKENS)))


def stacks(model: Any) -> list[QuantizedArray]:
    """Gate, up and down of the block."""
    block = model.decoder.blocks[0]
    gate_up = block.gate_up[0].get_value()
    return [gate_up[0], gate_up[1], block.down.get_value()]


@pytest.mark.filterwarnings("ignore:load. calibration has .* rows")
@pytest.mark.parametrize("name", NAMES)
def test_gptq_reads_the_rows_of_each_expert(folder, name, monkeypatch):
    floats = loaded(folder(name), None)
    found = stacks(loaded(folder(name), "int3-g32", "gptq"))
    seen = {}

    def seeing(config: Any, x: Any, *operands: Any) -> Any:
        seen["x"], (seen["expert"], weight) = x, route(config, x, *operands)
        return seen["expert"], weight

    route = experts.route
    monkeypatch.setattr(experts, "route", seeing)
    floats.decoder(jnp.asarray(TOKENS))
    x, expert = (np.asarray(seen[key]).reshape(TOKENS.size, -1) for key in ("x", "expert"))
    gate = floats.decoder.blocks[0].gate_up[0].get_value()
    for i in (0, 3):
        rows = x[(expert == i).any(-1)]
        statistics = Statistics.of(rows, full=True)
        wanted = quantize(gate[i], "int3-g32", quantizer="gptq", statistics=statistics)
        same = jnp.isclose(found[0][i].dequantize(), wanted.dequantize(), rtol=1e-3, atol=1e-5)
        assert same.mean() > 0.97
