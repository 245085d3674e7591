"""Whole small models that libraries quantized: the logits of transformers."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import model_files
import numpy as np
import pytest
from flax import nnx

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from jaxlowbit import INT8, QuantizedArray, llm  # noqa: E402
from jaxlowbit.checkpoint._files import read_file  # noqa: E402

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 200, 100, 50, 25]])


def folder(name: str, path: Path) -> Path:
    """A golden folder, with the tokenizer of the tests."""
    shutil.copytree(DATA / name, path, dirs_exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(model_files.tokenizer_json()))
    return path


def logits(model: llm.LanguageModel) -> np.ndarray:
    graph, state = nnx.split(model.decoder)
    return np.asarray(jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, TOKENS))


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        ("llama_gptq", {}, 1e-4),  # in an order by activation that differs between matrices
        ("llama_w4a16", {}, 2**-8),  # transformers rounds weights to bfloat16
        ("llama_nf4", {}, 1e-4),
        ("llama_torchao", {}, 1e-4),
        # The library's steps of 8 bits are 127.5 to the largest input, ours 127.
        ("llama_w8a8", {"lhs_qtype": "file"}, 2**-4),
    ],
)
def test_logits_match_transformers(name, options, tolerance, tmp_path):
    model = llm.load(folder(name, tmp_path), dtype=jnp.float32, progress=False, **options)
    assert model.decoder.lhs_qtype == ("int8" if options else None)
    quantized = [x for x in model.report.tensors if x.format is not None]
    assert len(quantized) == 7  # all but the embedding
    (expected,), _ = read_file(DATA / name / "logits.safetensors")
    expected = np.array(expected.array())
    found = logits(model)
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def test_models_of_checkpoints_generate_and_round_on_request(tmp_path):
    path = folder("llama_w4a16", tmp_path)
    model = llm.load(path, rules={"embedding": INT8, "down": "int8"}, progress=False)
    block = model.decoder.blocks[0]
    assert len(block.gate_up) == 1  # both are one stack
    down = block.down.get_value()
    assert isinstance(down, QuantizedArray) and down.format == INT8
    found = llm.generate(model, TOKENS[0].tolist(), max_new_tokens=3)
    assert len(found.tokens) <= 3
