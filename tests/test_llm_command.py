"""`python -m jaxlowbit.llm`."""

import json
import subprocess
import sys

import pytest
from test_llm_generate import SHORT, Letters, model

from jaxlowbit._llm import command
from jaxlowbit.llm import generate, perplexity

TEXT = Letters().decode(SHORT * 30)


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    monkeypatch.setattr(command, "load", lambda *args, **options: model())


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("raw", [True, False])
def test_generate(raw, capsys):
    arguments = ["generate", "m.gguf", "--prompt", "hi", "--max-new-tokens", "12", "--json"]
    command.main(arguments + ["--raw"] * raw)
    found = last_line(capsys)
    expected = generate(model(), "hi" if raw else "user:hi\n", max_new_tokens=12)
    assert found["tokens_per_second"] > 0
    for name in ("text", "tokens", "prompt_tokens"):
        assert found[name] == getattr(expected, name)


def test_chat_remembers(monkeypatch, capsys):
    lines = iter(["a", "b", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    arguments = ["chat", "m", "--system", "s", "--max-new-tokens", "4", "--temperature", "0"]
    command.main(arguments)
    history = "system:s\nuser:a\n"
    first = generate(model(), history, max_new_tokens=4).text
    second = generate(model(), f"{history}assistant:{first}\nuser:b\n", max_new_tokens=4).text
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_perplexity(tmp_path, capsys):
    file = tmp_path / "text"
    file.write_text("some words, " * 9)
    command.main(["perplexity", "m", "--text", str(file), "--context", "32", "--json"])
    found = last_line(capsys)
    expected = perplexity(model(), Letters().encode("some words, " * 9), context=32)
    assert found == expected._asdict()
    assert found["tokens"] == 107


def test_bench(capsys):
    arguments = ["bench", "m", "--batch", "1", "2", "--prompt-tokens", "20", "--new-tokens", "3"]
    command.main([*arguments, "--repeats", "1", "--json"])
    rows = last_line(capsys)
    assert [row["batch"] for row in rows] == [1, 2]
    assert all(row["prefill"] > 0 and row["decode"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "m", "--prompt", ""], "the prompt is empty"),
        (["generate", "m", "--prompt", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "m", "--prompt", "x", "--format", "int99"], "bits=99"),
        (["perplexity", "m", "--text", "/nowhere"], "No such file"),
        (["chat"], "required: MODEL"),
    ],
)
def test_errors_are_sentences(arguments, sentence, capsys):
    if "" in arguments:
        arguments = [*arguments, "--raw"]
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert sentence in capsys.readouterr().err


def test_the_module_is_a_command():
    run = subprocess.run(
        [sys.executable, "-m", "jaxlowbit.llm", "generate", "/nowhere", "--prompt", "x"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert "error: /nowhere does not exist" in run.stderr
