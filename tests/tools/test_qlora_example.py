"""`examples/qlora.py`: the loss falls, base words stay, and the adapter is saved and merged."""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from model_files import write_tiny

from jaxlowbit import llm

EXAMPLE = Path(__file__).parents[2] / "examples" / "qlora.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("qlora", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_adapter_learns_a_text(example, tmp_path, capsys):
    path, text = write_tiny(tmp_path), tmp_path / "text"
    text.write_text("some words and others, " * 40)
    adapter, merged, figures = (tmp_path / name for name in ("adapter", "merged", "json"))
    arguments = ["--model", path, "--text", text, "--steps", 8, "--batch", 2, "--length", 16]
    arguments += ["--rate", 0.05, "--output", adapter, "--merge", merged, "--json", figures]
    with jax.numpy_dtype_promotion("standard"):  # optax depends on it
        example.main(list(map(str, arguments)))
    found = json.loads(figures.read_text())
    assert found["losses"][-1] < found["losses"][0] - 0.03
    assert found["after"] < found["before"] - 0.03
    assert "ms with float32 weights" in capsys.readouterr().out
    # Base words are checked by the example. A loaded adapter gives the same loss.
    base = llm.load(path, progress=False)
    model = llm.adapt(base, adapter)
    tokens = np.asarray(base.tokenizer.encode(text.read_text()), np.int32)
    _, test = example.split(tokens, 16)
    assert example.evaluated(model.decoder, test) == pytest.approx(found["after"], rel=1e-6)
    assert example.digest(model.decoder) == example.digest(llm.adapt(base, adapter).decoder)
    assert len(jax.tree.leaves(llm.load(merged, progress=False).decoder.embedding)) > 0


def test_wrong_arguments(example, tmp_path):
    path, text = write_tiny(tmp_path), tmp_path / "text"
    text.write_text("short")
    with pytest.raises(SystemExit, match=r"qlora.py: the text has \d+ tokens, but two windows"):
        example.main(["--model", str(path), "--text", str(text)])
