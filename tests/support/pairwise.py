"""Pairwise covers: subsets of combinations that contain every pair of values."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def covering(items: Iterable[T], aspects: Callable[[T], Mapping[Any, Any]]) -> list[T]:
    """A subset of the items that contains every pair of aspect values found in any item."""
    missing = {item: set(itertools.combinations(aspects(item).items(), 2)) for item in items}
    chosen = []
    while missing:
        best = max(missing, key=lambda item: len(missing[item]))
        found = missing[best]
        chosen.append(best)
        missing = {item: rest for item in missing if (rest := missing[item] - found)}
    return chosen


def pairwise(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value per factor that contain every pair of values of two factors."""
    choices = [list(factor) for factor in factors]
    rows = covering(
        itertools.product(*map(range, map(len, choices))), lambda row: dict(enumerate(row))
    )
    return [tuple(choices[i][j] for i, j in enumerate(row)) for row in rows]
