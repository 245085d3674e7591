"""`Fields`: entries of a JSON object. An entry is used, known to be harmless, or raises."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._core.checks import brief
from ._files import AGAIN

_KINDS: dict[str, tuple[type, ...]] = {
    "an integer": (int,),
    "a number": (int, float),
    "a string": (str,),
    "true or false": (bool,),
    "an object": (dict,),
    "a list": (list,),
}
OTHER = "use the folder of the model's floats, or a GGUF file"
"""The advice for checkpoints with an unsupported quantization."""


class Fields:
    """Entries of a JSON object, with types checked; null counts as missing.

    `names` maps keys of `get` and `need` to keys of this object, if they differ. `read` contains
    the keys that `get`, `need` and `expect` have read.
    """

    read: set[str]

    def __init__(
        self, path: Path, values: Mapping[str, Any], names: Mapping[str, str] | None = None
    ):
        self.path, self.values, self.names, self.read = path, values, names or {}, set()

    def get(self, key: str, kind: str, default: Any = None) -> Any:
        key = self.names.get(key, key)
        self.read.add(key)
        value = self.values.get(key)
        if value is None:
            return default
        truth = isinstance(value, bool) and kind != "true or false"
        if truth or not isinstance(value, _KINDS[kind]):
            raise ValueError(f"{self.path}: {key!r} is {value!r}, but it must be {kind}; {AGAIN}.")
        return value

    def need(self, key: str, kind: str) -> Any:
        value = self.get(key, kind)
        if value is None:
            key = self.names.get(key, key)
            raise ValueError(f"{self.path} lacks {key!r}, {kind}; {AGAIN}.")
        return value

    def inner(self, key: str) -> "Fields":
        """The entries of an inner object; empty if it is missing."""
        return Fields(self.path, self.get(key, "an object", {}))

    def expect(self, key: str, default: Any, *values: Any) -> Any:
        """Returns an entry that must have one of some values; `default` if it is missing.

        **Raises:** `ValueError` for another value.
        """
        self.read.add(key)
        found = self.values.get(key)
        found = default if found is None else found
        if not any(type(found) is type(value) and found == value for value in values):
            raise ValueError(
                f"{self.path}: {key!r} is {brief(found)}, but "
                f"{' or '.join(map(repr, values))} is read; {OTHER}."
            )
        return found

    def expect_rest(self, *harmless: str) -> None:
        """Checks that no unread entry, except harmless ones, turns anything on.

        **Raises:** `ValueError` with the first one that is not null, false, 0 or empty.
        """
        for name, value in self.values.items():
            if name not in self.read and name not in harmless and value:
                raise ValueError(
                    f"{self.path}: {name!r} is {brief(value)}, an entry of a quantized checkpoint "
                    f"that is not known here; {OTHER}."
                )

    def strings(self, key: str) -> list[str]:
        """A list of strings; empty if it is missing.

        **Raises:** `ValueError` for other elements.
        """
        found = self.get(key, "a list", [])
        if not all(isinstance(name, str) for name in found):
            raise ValueError(f"{self.path}: {key!r} is {found!r}, but it must be strings; {AGAIN}.")
        return found

    def pattern(self, key: str, text: str) -> re.Pattern[str]:
        """Compiles a regular expression from the entry `key`.

        **Raises:** `ValueError` if it is invalid, or may take exponential time.
        """
        if _repeats_choices(text):
            raise ValueError(
                f"{self.path}: {key!r} has {text!r}, which repeats a group with repetitions or "
                "alternatives in it; matching it may not end. Write it without the outer or the "
                "inner repetition."
            )
        try:
            return re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"{self.path}: {key!r} has {text!r}, which is no regular expression ({error}); "
                f"{AGAIN}."
            ) from None


def _repeats_choices(pattern: str) -> bool:
    """Whether a regular expression repeats, without a bound, a group with a choice in it: another
    repetition or alternatives. Python's `re` backtracks through all combinations of these."""
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL)
    groups = [False]
    for match in re.finditer(r"\(\?[:=!<P]?|\(|\)|[*+|]|\{\d*,?\d*\}|\?", plain):
        token = match[0]
        if token.startswith("("):
            groups.append(False)
        elif token == ")":
            choice = len(groups) > 1 and groups.pop()
            if choice and re.match(r"[*+]|\{\d*,\d*\}", plain[match.end() :]):
                return True
            groups[-1] |= choice
        else:
            groups[-1] = True
    return False
