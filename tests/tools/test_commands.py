"""The command `jaxlowbit`: help, closed pipes, Ctrl-C, errors."""

import argparse
import ast
import contextlib
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jaxlowbit
from jaxlowbit._command import SUBCOMMANDS, main, run_command

PACKAGE = Path(jaxlowbit.__file__).parent


def ended(run, capsys=None):
    """The exit status and standard error of a command that calls `run`."""
    with pytest.raises(SystemExit) as end:
        run_command("tool", run)
    return end.value.code, capsys and capsys.readouterr().err


@contextlib.contextmanager
def closed_pipe():
    """Makes standard output a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, contextlib.redirect_stdout(stream):
        yield


def started(*arguments, path=""):
    """Starts the command in a process that imports modules of a folder first."""
    paths = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "jaxlowbit", *arguments],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )


def test_help_lists_the_commands_without_jax(tmp_path):
    (tmp_path / "jax.py").write_text("raise RuntimeError")
    found = started("--help", path=tmp_path)
    assert found.returncode == 0, found.stderr
    for name, subcommand in SUBCOMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(subcommand.summary)}$", found.stdout, re.M)
    assert started("other", path=tmp_path).returncode == 2


def test_standard_streams_that_the_caller_closed(monkeypatch):
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, None)
    main(["info"])
    with sys.stdin, sys.stdout:
        assert sys.stdin.read() == ""


def test_ctrl_c_while_jax_is_imported(tmp_path):
    (tmp_path / "jax.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # or children may ignore it
    try:
        found = started("info", path=tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (found.returncode, found.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_examples_are_arguments(name):
    module, _, example = SUBCOMMANDS[name]
    parser = argparse.ArgumentParser(name)
    getattr(importlib.import_module(f"jaxlowbit.{module}"), f"add_{name}")(parser)
    program, command, *arguments = shlex.split(example)
    assert (program, command) == ("jaxlowbit", name) and parser.parse_args(arguments)


@pytest.mark.parametrize("arguments", [["info"], ["--help"], ["tune", "--help"]])
def test_a_closed_pipe_ends_a_command(arguments):
    with closed_pipe(), pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 141


def test_nothing_is_printed_as_python_ends():
    """Python flushes its buffers again at exit, and would report the error."""
    program = [sys.executable, "-m", "jaxlowbit", "info"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("when", ["at once", "at the end"])
def test_output_that_cannot_be_written(when, capfd):
    def run():
        print("x", flush=when == "at once")

    with open("/dev/full", "w") as stream, contextlib.redirect_stdout(stream):
        status, _ = ended(run)
    assert status == 1
    assert capfd.readouterr().err == "tool: [Errno 28] No space left on device\n"


def test_exit_status_of_commands(capsys):
    def raising(error):
        def run():
            raise error

        return run

    assert ended(raising(KeyboardInterrupt()), capsys) == (130, "\n")
    assert ended(raising(BrokenPipeError()), capsys) == (141, "")
    said = "tool: no such format\n"
    assert ended(raising(ValueError("parse_format: no such format")), capsys) == (1, said)
    assert ended(lambda: 3, capsys) == (3, "")
    run_command("tool", lambda: None)
    with pytest.raises(ZeroDivisionError):  # internal errors keep their traceback
        run_command("tool", raising(ZeroDivisionError()))


def test_a_missing_extra_is_one_line(monkeypatch, capsys):
    def missing(name, package):
        raise ModuleNotFoundError("jaxlowbit.llm: jinja2 is not installed; pip install it.")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["chat", "model.gguf"])
    said = "jaxlowbit chat: jinja2 is not installed; pip install it.\n"
    assert capsys.readouterr().err == said


def test_every_command_line_runs_through_it():
    parsing = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and re.match("parse_(known_)?args", node.attr)
    }
    assert parsing == {"_command.py"}
