"""Calibration of language models with experts: routed rows, folded factors, unused experts."""

import functools
import json
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
from jaxlowbit._llm.huggingface import config_of  # noqa: E402
from jaxlowbit.quantizers import Statistics  # noqa: E402

TOKENS = np.random.default_rng(0).integers(0, 40, (16, 16))
RULES = {"embedding|head": None, "[qkvo]$": None}
FORMAT = "int3-g32"
NAMES = ["mixtral", "gpt_oss"]


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
    return np.asarray(jax.jit(lambda tokens: model.decoder(tokens))(TOKENS))


def stacks(model: Any) -> list[QuantizedArray]:
    """Gate, up and down of the block."""
    block = model.decoder.blocks[0]
    gate_up = block.gate_up[0].get_value()
    return [gate_up[0], gate_up[1], block.down.get_value()]


def routed(model: Any, tokens: Any, monkeypatch: Any) -> list[np.ndarray]:
    """The inputs (rows, k) of the router, and the experts (rows, n) that it chooses."""
    route, seen = experts.route, []

    def seeing(config: Any, x: Any, *operands: Any) -> Any:
        expert, weight = route(config, x, *operands)
        seen[:] = [x, expert]
        return expert, weight

    with monkeypatch.context() as context:
        context.setattr(experts, "route", seeing)
        found = jax.jit(lambda tokens: (model.decoder(tokens), list(seen))[1])(tokens)
    return [np.asarray(x).reshape(-1, x.shape[-1]) for x in found]


def same(found: Any, wanted: Any) -> bool:
    """Equal words but for ties, which sums in another order may change."""
    pair = found.dequantize(), wanted.dequantize()
    return float(jnp.isclose(*pair, rtol=1e-3, atol=1e-5).mean()) > 0.97


@pytest.mark.filterwarnings("ignore:load. calibration has 32 rows")
def test_gptq_reads_the_rows_of_each_expert(folder, monkeypatch):
    """A repeated token leaves experts without rows: they are rounded as without inputs."""
    tokens, path = np.full((2, 16), 7), folder("qwen3_moe")
    floats = loaded(path, None)
    x, expert = routed(floats, tokens, monkeypatch)
    unused = sorted({*range(floats.config.experts)} - {*expert.ravel().tolist()})
    listed = ", ".join(map(str, unused))
    with pytest.warns(UserWarning, match=f"reaches {listed} of the stack layers.0.gate; each"):
        model = loaded(path, FORMAT, "gptq", tokens)
    gate, found = floats.decoder.blocks[0].gate_up[0].get_value(), stacks(model)[0]
    for i in expert[0]:
        statistics = Statistics.of(x[(expert == i).any(-1)], full=True)
        assert same(found[i], quantize(gate[i], FORMAT, quantizer="gptq", statistics=statistics))
    assert unused
    for i in unused[:2]:
        assert same(found[i], quantize(gate[i], FORMAT, quantizer="mse"))


@pytest.mark.parametrize("name", NAMES)
def test_factors_of_experts_are_folded_without_a_change(folder, name):
    """Into the norm and the router, and into the columns of up but for gpt-oss."""
    floats, model = loaded(folder(name), None), loaded(folder(name), "int8", "smoothquant")
    wanted = logits(floats)
    assert np.linalg.norm(logits(model) - wanted) < 0.03 * np.linalg.norm(wanted)
    blocks = [x.decoder.blocks[0] for x in (floats, model)]
    norm, router = (
        [np.asarray(getattr(block, part).get_value()) for block in blocks]
        for part in ("mlp_norm", "router")
    )
    assert np.abs(norm[0] / norm[1] - 1).max() > 0.05
    np.testing.assert_allclose(router[1], router[0] * (norm[0] / norm[1])[:, None], rtol=1e-4)
    up, folded = blocks[0].gate_up[1].get_value(), stacks(model)[1].dequantize()
    change = np.linalg.norm(folded / (norm[0] / norm[1])[None, :, None] - up) / np.linalg.norm(up)
    assert change < 0.02 if name == "gpt_oss" else change > 0.02
