"""The command `jaxlowbit chat`: a conversation with a language model."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from .._command import sentence
from . import console
from .session import Session

with contextlib.suppress(ImportError):  # absent from some builds of Python
    import readline  # noqa: F401  gives `input` a history and keys that edit the line

Encode = Callable[[list[dict[str, str]]], list[int]]


class Conversation:
    """The turns of a chat that fit in the context of a model, and its system message.

    `encode` converts messages to tokens. `room` tokens of the context are reserved for a reply. If
    the turns take more than the rest, the oldest are dropped until half of the context is free, so
    that the following turns need not drop any.
    """

    def __init__(self, encode: Encode, context: int, system: str | None, room: int):
        self._encode, self._context, self._room = encode, context, min(room, context // 4)
        self._system = [message("system", system)] if system else []
        self._turns: list[list[dict[str, str]]] = []

    def ask(self, line: str) -> tuple[list[int], int]:
        """Adds a line of the user.

        **Returns:** the tokens of the conversation, and the number of turns that were dropped.

        **Raises:** `ValueError` if the line and the system message exceed the context, and for
        errors in the template; the conversation is then unchanged.
        """
        turns = [*self._turns, [message("user", line)]]
        tokens, dropped = self._tokens(turns), 0
        if len(tokens) > self._context - self._room:
            while len(tokens) > self._context // 2 and dropped < len(turns) - 1:
                dropped += 1
                tokens = self._tokens(turns[dropped:])
        if len(tokens) >= self._context:
            raise ValueError(
                f"the line has {len(tokens)} tokens with the template and the system message, but "
                f"the context has {self._context}, with the reply; write a shorter one."
            )
        self._turns = turns[dropped:]
        return tokens, dropped

    def answer(self, text: str | None) -> None:
        """Adds the reply to the last line; None removes that line."""
        if text is None:
            self._turns.pop()
        else:
            self._turns[-1].append(message("assistant", text))

    @property
    def turns(self) -> list[list[dict[str, str]]]:
        """The messages of each turn, without the system message."""
        return self._turns

    def restore(self, turns: Any) -> None:
        """Continues after turns of another conversation.

        **Raises:** `ValueError` for an object that is no list of turns.
        """
        messages = [x for turn in turns for x in turn] if _nested(turns) else [None]
        for found in messages:
            fields = found if isinstance(found, dict) else {}
            if fields.keys() != {"role", "content"} or not all(
                isinstance(value, str) for value in fields.values()
            ):
                raise ValueError("the file of the session has no messages; start a new one.")
        self._turns = [list(turn) for turn in turns]

    def _tokens(self, turns: list[list[dict[str, str]]]) -> list[int]:
        return self._encode([*self._system, *(message for turn in turns for message in turn)])


def _nested(turns: Any) -> bool:
    return isinstance(turns, list) and all(isinstance(turn, list) for turn in turns)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chat(
    model: Any,
    conversation: Conversation,
    options: dict[str, Any],
    summary: Any,
    path: Path | None = None,
) -> None:
    """Talks until the input ends. Ctrl-C during a reply ends the reply.

    **Arguments:**

    - `options`: the options of `stream`; each turn adds 1 to the seed.
    - `summary`: a function from a `Generation` to the notice that follows it.
    - `path`: None, or the file of a session, which is continued if it exists, and written at the
      end.
    """
    session = Session(model)
    if path is not None and path.exists():
        conversation.restore(session._load(path))
        console.say(f"continues {path}; turns: {len(conversation.turns)}")
    try:
        _talk(session, conversation, options, summary)
    finally:
        if path is not None and conversation.turns:
            session._save(path, True, notes=conversation.turns)


def _talk(
    session: Session, conversation: Conversation, options: dict[str, Any], summary: Any
) -> None:
    seed = options["seed"]
    for turn, line in enumerate(_lines(), len(conversation.turns)):
        try:
            tokens, dropped = conversation.ask(line)
        except ValueError as error:
            console.say(sentence(error))
            continue
        if dropped:
            console.say(f"the context is full; oldest turns forgotten: {dropped}")
        said: list[str] = []
        result = None
        turn_seed = (seed + turn + 2**63) % 2**64 - 2**63
        try:
            result = console.show(session.stream(tokens, **options | {"seed": turn_seed}), said)
            console.say(summary(result))
        except KeyboardInterrupt:
            print(flush=True)
            console.say("interrupted")
        except (ValueError, jax.errors.JaxRuntimeError) as error:  # such as memory for the cache
            console.say(sentence(error))
        conversation.answer("".join(said) if said or result else None)


def _lines() -> Iterator[str]:
    """The nonempty lines of standard input, with a prompt on a terminal.

    **Raises:** `KeyboardInterrupt` for the second Ctrl-C in sequence at the prompt of a terminal.
    """
    terminal, interrupted = sys.stdin.isatty(), False
    if terminal:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")
        console.say("Ctrl-C ends a reply, Ctrl-D the chat")
    while True:
        try:
            line = _asked() if terminal else _piped()
        except EOFError:
            if terminal:
                print(file=sys.stderr, flush=True)
            return
        except KeyboardInterrupt:
            if interrupted or not terminal:
                raise
            interrupted = True
            print(file=sys.stderr, flush=True)
            console.say("Ctrl-D ends the chat, and so does another Ctrl-C")
            continue
        except ValueError as error:
            console.say(f"{sentence(error)} It is ignored.")
            continue
        interrupted = False
        if line.strip():
            yield line


def _asked() -> str:
    if sys.stdout.isatty():
        line = input("> ")
    else:
        print("> ", end="", file=sys.stderr, flush=True)
        line = input()
    return console.check_unicode("the line", line)


def _piped() -> str:
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return console.decode("the line", line).rstrip("\r\n")
