"""The command lines of the package: closed pipes, Ctrl-C, errors."""

import argparse
import ast
import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxlowbit
from jaxlowbit import info
from jaxlowbit._command import run_command
from jaxlowbit._tuning import command, compiling

PACKAGE = Path(jaxlowbit.__file__).parent


def ended(run, capsys=None):
    """The exit status and standard error of a command that calls `run`."""
    with pytest.raises(SystemExit) as end:
        run_command(argparse.ArgumentParser("tool"), run, [])
    return end.value.code, capsys and capsys.readouterr().err


@contextlib.contextmanager
def closed_pipe():
    """Standard output is a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, contextlib.redirect_stdout(stream):
        yield


def test_a_closed_pipe_ends_a_command(monkeypatch):
    for module in (command, compiling):
        monkeypatch.setattr(module, "_run", lambda options: print("done"))
    for module in (info, command, compiling):
        with closed_pipe(), pytest.raises(SystemExit) as end:
            module.main([])
        assert end.value.code == 141


def test_nothing_is_printed_as_python_ends():
    """Python flushes its buffers once more at exit, and would report the error."""
    program = [sys.executable, "-m", "jaxlowbit.info"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("when", ["at once", "at the end"])
def test_output_that_cannot_be_written(when, capfd):
    def run(options):
        print("x", flush=when == "at once")

    with open("/dev/full", "w") as stream, contextlib.redirect_stdout(stream):
        status, _ = ended(run)
    assert status == 1
    assert capfd.readouterr().err == "tool: [Errno 28] No space left on device\n"


def test_what_a_command_ends_with(capsys):
    def raising(error):
        def run(options):
            raise error

        return run

    assert ended(raising(KeyboardInterrupt()), capsys) == (130, "\n")
    assert ended(raising(BrokenPipeError()), capsys) == (141, "")
    said = "tool: no such format\n"
    assert ended(raising(ValueError("parse_format: no such format")), capsys) == (1, said)
    assert ended(lambda options: 3, capsys) == (3, "")
    run_command(argparse.ArgumentParser("tool"), lambda options: None, [])
    with pytest.raises(ZeroDivisionError):  # a fault of ours keeps its traceback
        run_command(argparse.ArgumentParser("tool"), raising(ZeroDivisionError()), [])


def test_every_command_line_runs_through_it():
    parsing = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and re.match("parse_(known_)?args", node.attr)
    }
    assert parsing == {"_command.py"}
