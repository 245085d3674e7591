"""`Session`: several generations that share the cache of their common beginning."""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from .._core import checks
from . import cache_file
from .generate import Generation, Request, generate, generated, stream, streamed
from .language_model import LanguageModel, check_model
from .programs import Kept
from .prompts import Prompt, is_single


class Session:
    """Generates like `generate` and `stream`, and reuses the cache in the next call.

    A call reads only the tokens after the longest prefix that its prompt shares with the prompt and
    the generated tokens of the previous call. A chat therefore reads only the new messages of each
    turn. Results equal `generate`'s up to the rounding of sums in another order.

    The cache grows with the conversation, in powers of two up to the context. A call that raises,
    and a stream that is closed or interrupted, leave the session usable. A session runs one
    generation at a time: a new call closes the previous stream.

    **Arguments:**

    - `model`: from `load` or `init`.

    **Raises:** `TypeError` if `model` is not a `LanguageModel`.

    ```python
    model = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8)
    session = Session(model)
    first = session.generate([3, 1, 4], max_new_tokens=4)
    session.generate([3, 1, 4, *first.tokens, 5, 9], max_new_tokens=4)  # reads two or three tokens
    ```
    """

    def __init__(self, model: LanguageModel):
        check_model("Session", model)
        self.model = model
        self._kept = Kept()
        self._running: Generator[Any, None, Generation] | None = None

    def generate(self, prompt: Prompt, **options: Any) -> Any:
        """Generates after one prompt.

        **Arguments:**

        - `prompt`: as for `generate`, but not a batch. A chat contains all its messages, old and
          new.
        - `options`: the other arguments of `generate`.

        **Returns:** the result of `generate`.

        **Raises:** the errors of `generate`, before the session changes, and `ValueError` for a
        batch. If a conversation fills the context, remove its oldest messages.
        """
        self._close()
        if not is_single("Session.generate", prompt):
            raise ValueError(
                "Session.generate: the prompt is a batch, but a session is one conversation; use "
                "generate."
            )
        options = _with_defaults("Session.generate", generate, options)
        return generated(Request.of("Session.generate", self.model, **options), prompt, self._kept)

    def stream(self, prompt: Prompt, **options: Any) -> Generator[Any, None, Generation]:
        """Generates after one prompt, and yields the text as it is generated.

        **Arguments:**

        - `prompt`: as for `stream`. A chat contains all its messages, old and new.
        - `options`: the other arguments of `stream`.

        **Returns:** the result of `stream`.

        **Raises:** the errors of `stream`, before the session changes. If a conversation fills the
        context, remove its oldest messages.
        """
        self._close()
        options = _with_defaults("Session.stream", stream, options)
        request = Request.of("Session.stream", self.model, **options)
        self._running = streamed(request, prompt, self._kept)
        return self._running

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes the cache and its tokens to a file, for `load` of a session of the same model.

        The file gets its name when it is complete.

        **Arguments:**

        - `path`: the file, in safetensors.
        - `overwrite`: whether to replace a file that exists.

        **Raises:** `TypeError` for other arguments; `ValueError` for a `path` that
        exists, and for a session that has not generated yet.
        """
        self._save(path, overwrite)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces the cache by one that `save` wrote: the next call reads only later tokens.

        The model may be on another number of devices than before.

        **Raises:** `TypeError` if `path` is no path; `FileNotFoundError` if there is no such file;
        `ValueError` for a file of another model, format or dtype, for a damaged file, and for a
        cache that memory lacks. The session is then as before.
        """
        self._load(path)

    def _save(self, path: Any, overwrite: bool, notes: Any = None) -> None:
        path = _path("Session.save", path)
        checks.boolean("Session.save", "overwrite", overwrite)
        self._close()
        self._kept.shared([])  # forgets a cache that an interrupted call has donated
        cache: Any = self._kept.cache
        contents = cache_file.Contents(self._kept.tokens, cache, notes)
        decoder = self.model.decoder
        cache_file.write_session("Session.save", path, decoder, contents, overwrite=overwrite)

    def _load(self, path: Any) -> Any:
        """`load`, and the notes of the file."""
        path = _path("Session.load", path)
        self._close()
        found = cache_file.read_session("Session.load", path, self.model.decoder)
        self._kept.tokens, self._kept.cache = found.tokens, found.cache
        return found.notes

    def _close(self) -> None:
        """Closes the previous stream, so that nothing else changes the cache."""
        if self._running is not None:
            self._running.close()
            self._running = None


def _path(caller: str, path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"{caller}: path is {checks.brief(path)}, but it must be the path of a file."
        )
    return Path(path)


def _with_defaults(caller: str, function: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call with the defaults of `generate` or `stream`."""
    defaults = function.__kwdefaults__
    if unknown := sorted(options.keys() - defaults.keys()):
        raise TypeError(
            f"{caller}: {', '.join(unknown)} is no option; the options are {', '.join(defaults)}."
        )
    return defaults | options
