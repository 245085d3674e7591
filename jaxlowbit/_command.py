"""The command `jaxlowbit`, also `python -m jaxlowbit`: its subcommands, errors and signals.

`jaxlowbit/__init__.py` imports this module first. If the process is the command, help and a wrong
subcommand end it there, before JAX is imported, and so does Ctrl-C until the subcommand runs.
"""

import argparse
import functools
import importlib
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ._version import __version__


class Subcommand(NamedTuple):
    """A subcommand NAME, whose module is imported only when it is requested.

    Function `add_NAME` of the module adds the arguments to a parser, and returns the function that
    runs them: it takes the parsed arguments and returns the exit status, or None for 0.
    """

    module: str
    summary: str
    example: str


SUBCOMMANDS = {
    "info": Subcommand(
        "_tuning.info",
        "Prints the build, the devices of this machine and the formats.",
        "jaxlowbit info",
    ),
    "explain": Subcommand(
        "_tuning.explain",
        "Prints the backend, kernel and tile of a product, and why.",
        "jaxlowbit explain --shapes 14336x4096 --tokens 1 512 --format int4-g128 --device H200",
    ),
    "tune": Subcommand(
        "_tuning.tune",
        "Measures CUDA kernels on the weights of a model, for this GPU.",
        "jaxlowbit tune --shapes 6144x4096 4096x4096 --tokens 1 16 --format int4-g128",
    ),
    "compile": Subcommand(
        "_tuning.compiling",
        "Compiles CUDA kernels that the build lacks, without a GPU.",
        "jaxlowbit compile --format int2-g128 --device H200",
    ),
    "quantize": Subcommand(
        "_llm.files_command",
        "Rounds the weights of a model to a format, and writes them.",
        "jaxlowbit quantize Llama-3.1-8B-Instruct llama-int4 --format int4-g64 --rule head=int8",
    ),
    "convert": Subcommand(
        "_llm.files_command",
        "Writes a model as another kind of file, without rounding its weights.",
        "jaxlowbit convert Llama-3.1-8B-Instruct-GPTQ llama-packed",
    ),
    "inspect": Subcommand(
        "_llm.files_command",
        "Lists the tensors of a model file with their types and sizes.",
        "jaxlowbit inspect model.gguf",
    ),
    "verify": Subcommand(
        "_llm.files_command",
        "Checks a folder of packed weights: hashes, and a product with each matrix.",
        "jaxlowbit verify llama-int4",
    ),
    "chat": Subcommand(
        "_llm.command",
        "Chats with a language model until the end of the input.",
        "jaxlowbit chat model.gguf --system 'Answer in one sentence.'",
    ),
    "generate": Subcommand(
        "_llm.command",
        "Answers one prompt with a language model.",
        "jaxlowbit generate model.gguf --prompt 'What is the capital of France?'",
    ),
    "perplexity": Subcommand(
        "_llm.command",
        "Measures how well a language model predicts a text.",
        "jaxlowbit perplexity model.gguf --text book.txt --context 512",
    ),
    "evaluate": Subcommand(
        "_llm.command",
        "Compares perplexity, divergence and size of a language model in several formats.",
        "jaxlowbit evaluate model.gguf --text book.txt --formats int4 int3-g64",
    ),
    "plan": Subcommand(
        "_llm.plan_command",
        "Chooses a format for each matrix, for a target of bits per weight.",
        "jaxlowbit plan model.gguf --bits 3.5 --calibration book.txt --output plan.json",
    ),
    "bench": Subcommand(
        "_llm.command",
        "Measures the tokens per second of a language model.",
        "jaxlowbit bench llama3-8b --format int4-g128 --batch 1 16",
    ),
}


_GROUPS = {
    "model files": ("convert", "quantize", "plan", "inspect", "verify"),
    "language models": ("chat", "generate", "perplexity", "evaluate", "bench"),
    "kernels": ("info", "explain", "tune", "compile"),
}
_ENDING = """From a quantized model to a chat:
  jaxlowbit convert Llama-3.1-8B-Instruct-GPTQ llama-packed
  jaxlowbit chat llama-packed

jaxlowbit COMMAND --help lists the options of a command."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; None for `arguments` takes the arguments of the process."""
    _open_closed()
    given = sys.argv[1:] if arguments is None else list(arguments)
    name = " ".join(["jaxlowbit", *given[:1]])
    if arguments is None:
        warnings.showwarning = functools.partial(_say_warning, name)
    run_command(name, lambda: _run(given))


def run_command(name: str, run: Callable[[], int | None]) -> None:
    """Calls `run`, which returns an exit status or None; ends the process unless that is 0.

    After an `ImportError`, `OSError` or `ValueError` the status is 1, and standard error gets one
    line: `name` and the text of the error. After Ctrl-C the status is 130, and if the reader of the
    output closes its pipe, as `head` does, 141: the numbers that shells give to the signals. `run`
    must not catch `BrokenPipeError`, which is an `OSError`.
    """
    message = ""
    try:
        try:
            status = run()
        finally:
            sys.stdout.flush()  # a closed pipe may be noticed only here
    except BrokenPipeError:
        status = 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        status, message = 128 + signal.SIGINT, "\n"
    except (ImportError, OSError, ValueError) as error:
        status, message = 1, f"{name}: {sentence(error)}\n"
    if status:
        _drop_unwritten()
        sys.stderr.write(message)
        sys.exit(status)


def _open_closed() -> None:
    """Gives the process empty files for standard streams that its caller closed, as by `<&-`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  as they are


def _say_warning(name: str, message: Warning | str, *where: Any, **others: Any) -> None:
    """Prints a warning as one line, without the place in the source."""
    sys.stderr.write(f"{name}: warning: {sentence(message)}\n")


def sentence(error: Exception | str) -> str:
    """The text of an error in one line, without the name of the function that begins it."""
    return re.sub(r"^[A-Za-z]\w*(\.\w+)?: ", "", " ".join(str(error).split()))


def _run(given: Sequence[str]) -> int | None:
    listed = ""
    for group, names in _GROUPS.items():
        lines = (f"  {name:11} {SUBCOMMANDS[name].summary}\n" for name in names)
        listed += f"{group}:\n{''.join(lines)}\n"
    summary = "Low-bit matrix products for JAX: commands for language models and kernels."
    parser = _parser("jaxlowbit", summary, listed + _ENDING)
    parser.usage = "jaxlowbit [-h] [--version] COMMAND ..."
    parser.add_argument("--version", action="version", version=f"jaxlowbit {__version__}")
    parser.add_argument(
        "command", choices=list(SUBCOMMANDS), metavar="COMMAND", help=argparse.SUPPRESS
    )
    name = parser.parse_args(given[:1]).command  # exits for --help and for other names
    module, summary, example = SUBCOMMANDS[name]
    parser = _parser(f"jaxlowbit {name}", summary, f"example:\n  {example}")
    add = getattr(importlib.import_module(f".{module}", __package__), f"add_{name}")
    run = add(parser)
    options = parser.parse_args(given[1:])
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run(options)


def _parser(name: str, summary: str, ending: str) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(name, description=summary, epilog=ending, formatter_class=raw)


def _drop_unwritten() -> None:
    """Discards output that cannot be written: Python would write it again as it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())


def _is_command() -> bool:
    """Whether this process is the script `jaxlowbit` or `python -m jaxlowbit`."""
    program = "".join(sys.orig_argv[-len(sys.argv) :][:1])  # sys.argv[0] before Python changes it
    if sys.argv[:1] == ["-m"]:  # until Python has found the module
        return program.removeprefix("-m") == "jaxlowbit"
    return sys.argv[:1] == [program] and Path(program).name == "jaxlowbit"


if _is_command():
    # Ctrl-C ends the process without a traceback. A process that ignores SIGINT keeps doing so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not SUBCOMMANDS.keys() & set(sys.argv[1:2]):
        main()
