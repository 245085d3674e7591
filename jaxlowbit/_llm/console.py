"""Reads texts and prints replies for the commands of language models."""

import json
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from .generate import Generation

MODEL = "a GGUF file, a Hugging Face folder, quantized or not, or a folder of packed weights"
PATIENCE = 2.0  # seconds before a notice


def text_of(option: str, source: str) -> str:
    """The text of a file, or of standard input for "-", with line ends of "\\n".

    **Raises:** `ValueError` with the name of the file if it cannot be read or is not UTF-8.
    """
    name = f"{option} {source}"
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"{name}: {reason}; name a text file, or - for standard input.") from None
    return decode(name, data).replace("\r\n", "\n")


def decode(name: str, data: bytes) -> str:
    """Decodes UTF-8, without a byte order mark.

    **Raises:** `ValueError` that begins with `name`.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = error.start
        raise ValueError(
            f"{name} is not UTF-8: byte {at} is {error.object[at]:#04x}; convert it, such as with "
            "iconv -f LATIN1 -t UTF-8."
        ) from None


def check_unicode(option: str, text: str) -> str:
    """Returns an argument of the command line; Python decodes invalid bytes to surrogates.

    **Raises:** `ValueError` if it contains any.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{option} is not UTF-8; set the terminal to it.") from None
    return text


def show(pieces: Iterator[str], said: list[str]) -> Generation:
    """Prints pieces of `stream` as they come, appends them to `said`, and ends the line.

    A terminal gets a notice if the first piece takes long: a new length may compile a program.
    """
    waiting = threading.Timer(PATIENCE, say, ["reading the prompt; a new length compiles once"])
    waiting.daemon = True
    if sys.stderr.isatty():
        waiting.start()
    try:
        while True:
            said.append(next(pieces))
            waiting.cancel()
            print(said[-1], end="", flush=True)
    except StopIteration as end:
        print(flush=True)
        return end.value
    finally:
        waiting.cancel()


def say(message: str) -> None:
    """Prints a notice on standard error, since it is not part of the output."""
    print(f"[{message}]", file=sys.stderr, flush=True)


def statistics(result: Generation, max_new_tokens: int, nbytes: int) -> str:
    """The numbers of a reply, in a line."""
    limit = "--max-new-tokens" if len(result.tokens) >= max_new_tokens else "the context"
    ends = {"length": f", cut by {limit}", "nan": ", cut by logits that are NaN"}
    return (
        f"{result.prompt_tokens} + {len(result.tokens)} tokens{ends.get(result.finish, '')}, "
        f"{result.tokens_per_second:.1f} tokens/s, weights {nbytes / 1e6:,.0f} MB{_peak()}"
    )


def logprobs(tokenizer: Any, result: Generation) -> Iterator[str]:
    """Lines with the log-probability of each token, and with the top tokens and theirs."""
    assert result.logprobs is not None
    rows = zip(result.tokens, result.logprobs.chosen, result.logprobs.top, strict=True)
    for token, chosen, top in rows:
        pairs = [(token, chosen), *top.items()]
        yield "  ".join(f"{value:8.3f} {_name(tokenizer, token)}" for token, value in pairs)


def _name(tokenizer: Any, token: int) -> str:
    return f"{tokenizer.decode([token], special=True)!r:12}"


def _peak() -> str:
    """The peak of memory in use, if the device reports it."""
    found: Any = jax.local_devices()[0].memory_stats() or {}
    peak = found.get("peak_bytes_in_use")
    return "" if peak is None else f", device at most {peak / 1e6:,.0f} MB"


def print_json(value: Any) -> None:
    """Prints a value as one line of JSON, which has no infinity and no NaN: these become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(finite(value), allow_nan=False))
