"""Converts tokens to text as they are generated, up to the end of a turn or a stop string."""

from collections.abc import Iterable, Sequence
from typing import Any


class Text:
    """The tokens and the text of one generation.

    `text` is None without a tokenizer. `finish` is None until the generation has ended: by a token
    of `eos`, by a stop string, or by a call of `close`.
    """

    def __init__(self, tokenizer: Any, eos: Sequence[int], stops: Sequence[str]):
        self.tokens: list[int] = []
        self.text: str | None = None if tokenizer is None else ""
        self.finish: str | None = None
        self._stream = None if tokenizer is None else tokenizer.decode_stream()
        self._eos, self._stops = frozenset(eos), tuple(stops)
        self._taken = 0  # characters, or tokens, that `take` has returned

    def add(self, tokens: Iterable[int]) -> None:
        """Adds tokens up to the end; -1 is the end of a turn."""
        for token in map(int, tokens):
            if self.finish is None and (token < 0 or token in self._eos):
                self.close("eos")
            if self.finish is not None:
                return
            self.tokens.append(token)
            if self._stream is not None:
                self._append(self._stream.push(token))

    def close(self, finish: str) -> None:
        """Ends the generation, if it has not ended."""
        if self.finish is None:
            self.finish = finish
            if self._stream is not None:
                self._append(self._stream.finish())

    def take(self) -> Any:
        """The text (or tokens) since the last call, except a possible beginning of a stop
        string."""
        whole: Any = self.tokens if self.text is None else self.text
        end = len(whole)
        if self.text is not None and self.finish is None:
            end -= max((_overlap(self.text, stop) for stop in self._stops), default=0)
        new = whole[self._taken : end]
        self._taken = max(self._taken, end)
        return new

    def _append(self, new: str) -> None:
        self.text = (self.text or "") + new
        found = [at for stop in self._stops if (at := self.text.find(stop)) >= 0]
        if found:
            self.text, self.finish = self.text[: min(found)], "stop"


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of the text that is a prefix of `stop`."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
