"""Runs the command lines of the package: their errors, closed pipes and Ctrl-C."""

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence


def run_command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int | None],
    arguments: Sequence[str] | None = None,
) -> None:
    """Parses the arguments and calls `run` with them; ends the process if that fails.

    `run` returns an exit status, or None for 0. After an `ImportError`, `OSError` or `ValueError`
    the status is 1, and the error's text is one line on standard error, after the name of the
    command, `options.prog` if a subcommand sets it. (Wrong arguments are 2, with the usage.) After
    Ctrl-C it is 130, and if the reader of the output closes its pipe, as `head` does, 141: the
    numbers that shells give to the signals. `run` must not catch `BrokenPipeError`, which is an
    `OSError`.
    """
    options = parser.parse_args(arguments)
    message = None
    try:
        status = run(options)
        sys.stdout.flush()  # a closed pipe may be noticed only here
    except BrokenPipeError:
        status = 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        status, message = 128 + signal.SIGINT, "\n"
    except (ImportError, OSError, ValueError) as error:
        name = getattr(options, "prog", parser.prog).removeprefix("python -m ")
        status, message = 1, f"{name}: {sentence(error)}\n"
    if status:
        _drop_unwritten()
        parser.exit(status, message)


def sentence(error: Exception) -> str:
    """The text of an error in one line, without the name of the function that begins it."""
    return re.sub(r"^[A-Za-z]\w*(\.\w+)?: ", "", " ".join(str(error).split()))


def _drop_unwritten() -> None:
    """Discards output that cannot be written: Python would write it again as it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
