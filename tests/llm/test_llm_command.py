"""The commands for language models, run in this process with a small model."""

import contextlib
import dataclasses
import importlib.util
import inspect
import io
import json
import math
import os
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from language_models import Letters, model

from jaxlowbit import _llm
from jaxlowbit._command import main
from jaxlowbit._llm import chat, command, console
from jaxlowbit._requirements import require_extra
from jaxlowbit.llm import generate, perplexity

ROOT = Path(__file__).parents[2]
GREEDY = ["--temperature", "0", "--max-new-tokens", "4"]


class ChatLetters(Letters):
    """A byte tokenizer whose template raises for one role."""

    has_chat = True

    def chat(self, messages, add_generation_prompt=True, *, template_options=None):
        if messages[0]["role"] == "system" and messages[0]["content"] == "refused":
            raise ValueError("Tokenizer.chat: no system message")
        options = "".join(f"{k}={v}\n" for k, v in (template_options or {}).items())
        return self.encode(options) + super().chat(messages)


def small(**changes):
    return dataclasses.replace(model(**changes), tokenizer=ChatLetters())


@pytest.fixture
def loads(monkeypatch):
    """Records the loaded paths; every path loads a small model."""
    found = []

    def load(path, **options):
        found.append(path)
        return small()

    monkeypatch.setattr(command, "load", load)
    monkeypatch.setattr(command, "open_file", lambda path: small())
    monkeypatch.setattr(command, "keep_programs", lambda: None)
    return found


@pytest.fixture(autouse=True)
def loaded(loads):
    pass


def given(monkeypatch, data):
    """Makes standard input a pipe with these bytes."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))


def failed(arguments, capsys):
    """The exit status and the last line of standard error."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code, capsys.readouterr().err.splitlines()[-1]


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# --- generate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [True, False])
def test_generate(raw, capsys):
    arguments = ["generate", "m.gguf", "--prompt", "hi", "--max-new-tokens", "12", "--json"]
    main(arguments + ["--raw"] * raw)
    found = last_line(capsys)
    expected = generate(model(), "hi" if raw else "user:hi\n", max_new_tokens=12)
    assert found["tokens_per_second"] > 0
    for name in ("text", "tokens", "prompt_tokens"):
        assert found[name] == getattr(expected, name)


def test_a_prompt_from_standard_input(monkeypatch, capsys):
    given(monkeypatch, b"a\r\nb\n")
    main(["generate", "m", "--raw", "--prompt", "-", "--json", *GREEDY])
    assert last_line(capsys)["prompt_tokens"] == len("a\nb")


def test_variables_of_the_template(capsys):
    options = ["--template-option", "x=false", "--template-option", 'name="a=b"']
    main(["generate", "m", "--prompt", "hi", "--json", *GREEDY, *options])
    assert last_line(capsys)["prompt_tokens"] == len("x=False\nname=a=b\nuser:hi\n")


DRAWING = {
    "temperature": 0.9,
    "top_k": 90,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "seed": 7,
    "stop": ["x", "yy"],
    "max_new_tokens": 3,
}


def test_every_option_of_drawing_matches_generate(monkeypatch, capsys):
    flags = []
    for name, value in DRAWING.items():
        for one in value if isinstance(value, list) else [value]:
            flags += [f"--{name.replace('_', '-')}", str(one)]
    others = {"model", "prompt", "n", "logprobs", "schema", "template_options"}
    assert inspect.signature(generate).parameters.keys() - others == DRAWING.keys()
    main(["generate", "m", "--raw", "--prompt", "hi", "--n", "2", "--json", *flags])
    expected = generate(model(), "hi", n=2, **DRAWING)
    assert [found["tokens"] for found in last_line(capsys)] == [x.tokens for x in expected]
    given = []
    monkeypatch.setattr(command, "chat", lambda *arguments: given.append(arguments[2]))
    main(["chat", "m", *flags])
    assert given == [DRAWING]


def test_log_probabilities(capsys):
    arguments = ["generate", "m", "--raw", "--prompt", "hi", "--logprobs", "2", "--json"]
    main([*arguments, *GREEDY])
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    expected = generate(model(), "hi", max_new_tokens=4, logprobs=2).logprobs
    assert found["logprobs"]["chosen"] == expected.chosen
    assert [{int(k): v for k, v in x.items()} for x in found["logprobs"]["top"]] == expected.top
    assert len(lines) == 1 + 4 + 1
    assert [float(line.split()[0]) for line in lines[1:5]] == pytest.approx(
        expected.chosen, abs=1e-3
    )


def test_a_truncated_reply_names_the_limit(capsys):
    main(["generate", "m", "--raw", "--prompt", "hi", *GREEDY])
    assert "[2 + 4 tokens, cut by --max-new-tokens, " in capsys.readouterr().err
    arguments = ["generate", "m", "--raw", "--prompt", "x" * (model().config.context - 3)]
    main([*arguments, "--temperature", "0"])
    assert "+ 3 tokens, cut by the context, " in capsys.readouterr().err


# --- chat -----------------------------------------------------------------------------------------


def talked(monkeypatch, capsys, lines, *arguments):
    """Standard output and error of a chat."""
    given(monkeypatch, lines if isinstance(lines, bytes) else lines.encode())
    main(["chat", "m", *GREEDY, *arguments])
    return capsys.readouterr()


def test_chat_remembers(monkeypatch, capsys):
    found = talked(monkeypatch, capsys, "a\n\nb\n", "--system", "s")
    history = "system:s\nuser:a\n"
    first = generate(model(), history, max_new_tokens=4).text
    second = generate(model(), f"{history}assistant:{first}\nuser:b\n", max_new_tokens=4).text
    assert found.out == f"{first}\n{second}\n"


def test_each_turn_has_another_seed(monkeypatch, capsys):
    seeds = []

    class Session:
        def __init__(self, model):
            pass

        def stream(self, prompt, *, seed, **options):
            seeds.append(seed)
            yield "x"
            return generate(model(), "a", max_new_tokens=1)

    monkeypatch.setattr(chat, "Session", Session)
    talked(monkeypatch, capsys, "a\na\n", "--seed", "5")
    talked(monkeypatch, capsys, "a\na\n", "--seed", str(2**63 - 1))
    assert seeds == [5, 6, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"caf\xe9", "[the line is not UTF-8: byte 3 is 0xe9; "),
        (b"x" * 900, "[the line has 906 tokens with the template and the system message, but "),
    ],
)
def test_a_line_that_cannot_be_answered_is_ignored(line, said, monkeypatch, capsys):
    found = talked(monkeypatch, capsys, b"a\n" + line + b"\nb\n")
    assert said in found.err
    assert found.out == talked(monkeypatch, capsys, "a\nb\n").out


def conversation(system=None, room=4):
    return chat.Conversation(ChatLetters().chat, 100, system, room)


def test_a_full_context_forgets_the_oldest_turns():
    talk, text = conversation("s"), ""
    for i in range(20):
        tokens, dropped = talk.ask(f"question {i}")
        text = bytes(tokens).decode()
        assert text.startswith("system:s\nuser:") and text.endswith(f"user:question {i}\n")
        assert len(tokens) <= (96 if dropped == 0 else 50)
        talk.answer("yes")
    assert 0 < text.count("user:") < 6


def test_a_line_that_does_not_fit_changes_nothing():
    talk = conversation()
    before, _ = talk.ask("a")
    talk.answer(None)
    with pytest.raises(ValueError, match=r"the line has 106 tokens .* context has 100, with"):
        talk.ask("x" * 100)
    assert talk.ask("a") == (before, 0)
    talk.answer("yes")
    assert talk.ask("x" * 80)[1] == 1  # fits if the previous turn is dropped


def interrupted(pieces):
    """A reply that Ctrl-C interrupts after these pieces."""

    class Session:
        def __init__(self, model):
            pass

        def stream(self, prompt, **options):
            prompts.append(bytes(prompt).decode())
            yield from pieces
            raise KeyboardInterrupt

    prompts = []
    return Session, prompts


@pytest.mark.parametrize(
    ("pieces", "after"),
    [(["so ", "far"], "user:a\nassistant:so far\nuser:b\n"), ([], "user:b\n")],
)
def test_ctrl_c_ends_a_reply_and_preserves_its_text(pieces, after, monkeypatch, capsys):
    session, prompts = interrupted(pieces)
    monkeypatch.setattr(chat, "Session", session)
    found = talked(monkeypatch, capsys, "a\nb\n")
    assert prompts == ["user:a\n", after]
    assert found.out == 2 * f"{''.join(pieces)}\n" and "[interrupted]" in found.err


def test_a_terminal_shows_a_notice_during_a_long_wait(monkeypatch, capsys):
    said = threading.Event()
    monkeypatch.setattr(console, "PATIENCE", 0.0)
    monkeypatch.setattr(console, "say", lambda text: said.set())

    def pieces():
        found.append(said.wait(5 if terminal else 0))
        yield "x"

    found: list[bool] = []
    for terminal in (True, False):
        said.clear()
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)  # noqa: B023
        console.show(pieces(), [])
    assert found == [True, False] and capsys.readouterr().out == 2 * "x\n"


def test_a_failed_reply_removes_the_line(monkeypatch, capsys):
    class Session(chat.Session):
        def stream(self, prompt: Any, **options):
            prompts.append(bytes(prompt).decode())
            if len(prompts) == 1:
                raise ValueError("Session.stream: the cache does not fit")
            return super().stream(prompt, **options)

    prompts = []
    monkeypatch.setattr(chat, "Session", Session)
    found = talked(monkeypatch, capsys, "a\nb\n")
    assert prompts == ["user:a\n", "user:b\n"]
    assert found.err.startswith("[the cache does not fit]\n")


CTRL_C, CTRL_D = KeyboardInterrupt, EOFError


@pytest.mark.parametrize(
    ("keys", "status"), [([CTRL_D], None), ([CTRL_C, "a", CTRL_C, CTRL_C], 130)]
)
def test_keys_at_the_prompt_of_a_terminal(keys, status, monkeypatch, capsys):
    asked = iter(["a", *keys])

    def answer(prompt):
        key = next(asked)
        if isinstance(key, str):
            return key
        raise key

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    arguments = ["chat", "m", *GREEDY]
    if status is None:
        main(arguments)
    else:
        assert failed(arguments, capsys)[0] == status
    assert next(asked, None) is None


# --- measurements ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["file", "-"])
def test_perplexity(name, tmp_path, monkeypatch, capsys):
    text = "some words, " * 9
    if name == "file":
        name = str(tmp_path / "text")
        (tmp_path / "text").write_text(text)
    given(monkeypatch, text.encode())
    main(["perplexity", "m", "--text", name, "--context", "32", "--json"])
    found = last_line(capsys)
    expected = perplexity(model(), Letters().encode(text), context=32)
    assert found == expected._asdict()
    assert found["tokens"] == 107


def test_numbers_that_json_lacks_are_null(capsys):
    console.print_json({"perplexity": math.inf, "top": [{1: -math.inf}, (math.nan, 0.5)]})
    assert last_line(capsys) == {"perplexity": None, "top": [{"1": None}, [None, 0.5]]}


def test_bench(capsys):
    arguments = ["bench", "m", "--batch", "1", "2", "--prompt-tokens", "20", "--new-tokens", "3"]
    main([*arguments, "--repeats", "1", "--json"])
    *lines, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)
    assert [row["batch"] for row in rows] == [1, 2]
    column = lines[0].replace(" tokens/s", "").split().index("positions")
    assert [line.split()[column] for line in lines[1:]] == [str(row["positions"]) for row in rows]
    assert all(row["prefill"] > 0 and row["decode"] > 0 for row in rows)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "m", "--prompt", ""], "--prompt is empty"),
        (["generate", "m", "--prompt", "x", "--lhs-min-rows", "4"], "--lhs-min-rows 4 chan"),
        (["generate", "m", "--prompt", "x", "--temperature", "-1"], "--temperature is -1.0"),
        (["generate", "m", "--prompt", "x", "--format", "int99"], "bits=99"),
        (["generate", "m", "--prompt", "x", "--raw", "--system", "s"], "--system and --template"),
        (["generate", "m", "--prompt", "caf\udce9"], "--prompt is not UTF-8"),
        (["generate", "m", "--prompt", "x", "--template-option", "a"], "--template-option a is"),
        (["generate", "m", "--prompt", "x", "--template-option", "a=b"], "--template-option a=b"),
        (["chat", "m", "--system", "refused"], "no system message"),
        (["perplexity", "m", "--text", "/nowhere"], "--text /nowhere: no such file or directory"),
        (["perplexity", "m", "--text", "/"], "--text /: is a directory"),
        (["perplexity", "m", "--text", __file__, "--context", "999999"], "--context is 999999"),
        (["bench", "m", "--batch", "0", "--prompt-tokens", "9"], "--batch is 0"),
        (["bench", "m", "--prompt-tokens", "100", "--new-tokens", "9999"], "--new-tokens is 9999"),
        (["bench", "smollm2-135m", "--quantizer", "mse"], "--quantizer mse, but the weights of"),
    ],
)
def test_errors_are_one_line_before_weights_are_loaded(arguments, sentence, loads, capsys):
    status, line = failed(arguments, capsys)
    assert status == 1 and loads == []
    assert line.startswith(f"jaxlowbit {arguments[0]}: {sentence}")


@pytest.mark.parametrize(
    "arguments", [["perplexity", "m", "--text"], ["generate", "m", "--prompt"]]
)
def test_a_text_that_is_not_utf8_is_named(arguments, tmp_path, monkeypatch, capsys):
    given(monkeypatch, b"caf\xe9")
    _, line = failed([*arguments, "-"], capsys)
    assert f"{arguments[-1]} - is not UTF-8: byte 3 is 0xe9" in line
    if arguments[-1] == "--text":
        (tmp_path / "latin1").write_bytes(b"\xef\xbb\xbfcaf\xe9")
        _, line = failed([*arguments, str(tmp_path / "latin1")], capsys)
        assert f"--text {tmp_path}/latin1 is not UTF-8: byte 3 is 0xe9" in line


@pytest.mark.parametrize("arguments", [["chat", "m"], ["generate", "m", "--prompt", "x"]])
def test_a_missing_template_raises_before_weights_are_loaded(arguments, loads, monkeypatch, capsys):
    monkeypatch.setattr(ChatLetters, "has_chat", False)
    status, line = failed(arguments, capsys)
    assert status == 1 and "m has no chat template" in line and "generate with --raw" in line
    assert loads == []


@pytest.mark.parametrize("arguments", [["chat", "m"], ["generate", "m", "--prompt", "x"]])
def test_a_closed_pipe_ends_a_reply_quietly(arguments, monkeypatch, capsys):
    given(monkeypatch, b"a\nb\n")
    reader, writer = os.pipe()
    os.close(reader)
    unread = os.fdopen(writer, "w")
    with unread, contextlib.redirect_stdout(unread), pytest.raises(SystemExit) as end:
        main([*arguments, *GREEDY])
    assert end.value.code == 141 and capsys.readouterr().err == ""


def test_wrong_arguments_show_the_usage(capsys):
    with pytest.raises(SystemExit) as end:
        main(["chat"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "required: MODEL" in said and said.startswith("usage: ")


def test_packages_that_are_missing_are_named(monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = [name.partition(">")[0] for name in project["optional-dependencies"]["llm"]]
    assert sorted(extra) == sorted(["flax", *_llm.PACKAGES])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jinja2" else 1)
    with pytest.raises(ImportError, match=r"jinja2 is not .* pip install \"jaxlowbit\[llm\]\""):
        require_extra("llm", *_llm.PACKAGES)


def test_the_module_is_a_command():
    """`python -m jaxlowbit` runs the command; errors print one line."""
    program = [sys.executable, "-m", "jaxlowbit", "generate", "/nowhere", "--prompt", "x"]
    run = subprocess.run(program, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    assert run.returncode == 1
    assert run.stderr.startswith("jaxlowbit generate: /nowhere does not exist; ")
    assert run.stderr.count("\n") == 1


def test_chat_continues_a_session(monkeypatch, capsys, tmp_path):
    path = str(tmp_path / "session")
    for turns in (0, 1):
        given(monkeypatch, b"hi\n")
        main(["chat", "m", "--session", path, *GREEDY])
        notices = capsys.readouterr().err
        assert (f"continues {path}; turns: {turns}" in notices) == (turns > 0)
    status, message = failed(["chat", "m", "--session", str(tmp_path / "no" / "x")], capsys)
    assert status == 1 and "does not exist" in message
    (tmp_path / "session").write_bytes(b"x")
    status, message = failed(["chat", "m", "--session", path], capsys)
    assert status == 1 and "start a new session" in message
