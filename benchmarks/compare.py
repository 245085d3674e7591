"""Compares two results, cell by cell."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import contenders
from results import InputError

_KEY = ("shape", "m", "format", "dtype", "backend", "method")


class Cell(NamedTuple):
    """A time that both results have."""

    key: tuple[Any, ...]
    old_us: float
    new_us: float

    @property
    def ratio(self) -> float:
        """New over old: above 1 is slower."""
        return self.new_us / self.old_us

    def regressed(self, percent: float) -> bool:
        """Whether one of our times grew by more than this. Times of other backends do not count."""
        return self.key[4] in contenders.OURS and self.ratio > 1 + percent / 100

    def __str__(self) -> str:
        shape, m, format, dtype, backend, method = self.key
        name = f"{shape:32s} m={m or '-':<6} {format:16s} {dtype:9s} {backend:18s} {method:10s}"
        return f"{name} {self.old_us:10.2f} {self.new_us:10.2f} {self.ratio:8.3f}"


def cells(old: dict[str, Any], new: dict[str, Any]) -> list[Cell]:
    """**Raises:** `InputError` if the two have no cell in common."""
    before = dict(_times(old))
    found = [Cell(key, before[key], us) for key, us in _times(new) if key in before]
    if not found:
        raise InputError(
            "the two results have no cell in common; compare the same shapes, tokens and formats."
        )
    return found


def _times(results: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], float]]:
    for row in results["rows"]:
        yield tuple(row[name] for name in _KEY), row["us"]
