"""Finds anomalies in measured times: cells slower than dense or than larger M, and jumps."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import contenders
from results import InputError

# Weights with fewer elements take a few microseconds, including the launch.
SMALL = 20_000_000
SLOWER_BY, SMALL_SLOWER_BY, FALLS_BY = 0.04, 0.10, 0.03
STEP, JUMPS_BY = 8, 0.15  # tokens, and the allowed increase in time


class Cell(NamedTuple):
    """A product, measured together with dense."""

    shape: str
    elements: int  # of the weight
    m: int
    us: float
    dense_us: float

    @property
    def speed_up(self) -> float:
        """Speed-up over dense."""
        return self.dense_us / self.us

    @property
    def slower(self) -> bool:
        """Whether it is slower than dense by more than allowed."""
        allowed = SMALL_SLOWER_BY if self.elements < SMALL else SLOWER_BY
        return self.us > (1 + allowed) * self.dense_us

    def __str__(self) -> str:
        return (
            f"{self.shape:24s} m={self.m:<5d} {self.us:9.2f} us, dense {self.dense_us:9.2f}: "
            f"{self.us / self.dense_us:.2f} times as long"
        )


class Pair(NamedTuple):
    """Times of a shape at smaller and larger M."""

    few: Cell
    many: Cell

    def __str__(self) -> str:
        few, many = self
        return (
            f"{few.shape:24s} m={few.m:<5d} {few.us:9.2f} us, m={many.m:<5d} {many.us:9.2f} us: "
            f"{few.us / many.us:.2f} times as long"
        )


def cells(rows: list[dict[str, Any]]) -> list[Cell]:
    """Our rows with a matching dense row, the fastest if there are several.

    **Raises:** `InputError` if there are none, or rows of several formats.
    """
    ours = [row for row in rows if row["backend"] == "jaxlowbit"]
    if len({(row["format"], row["dtype"], row["method"]) for row in ours}) > 1:
        raise InputError("the rows have several formats, dtypes or methods; sweep one at a time.")
    dense: dict[tuple[str, int], float] = {}
    for row in rows:
        if row["backend"] in contenders.DENSE:
            key = row["shape"], row["m"]
            dense[key] = min(row["us"], dense.get(key, math.inf))
    found = [
        Cell(row["shape"], row["n"] * row["k"], row["m"], row["us"], dense[row["shape"], row["m"]])
        for row in ours
        if (row["shape"], row["m"]) in dense
    ]
    if not found:
        raise InputError("the rows have no product of jaxlowbit together with a dense one.")
    return found


def falls(cells: list[Cell]) -> Iterator[Pair]:
    """Pairs whose minimum time at larger M is shorter by more than allowed."""
    for few in cells:
        more = [cell for cell in cells if cell.shape == few.shape and cell.m > few.m]
        many = min(more, key=lambda cell: cell.us, default=few)
        if many.us < (1 - FALLS_BY) * few.us:
            yield Pair(few, many)


def jumps(cells: list[Cell]) -> Iterator[Pair]:
    """Pairs up to STEP tokens apart whose time increases by more than allowed."""
    times = {(cell.shape, cell.m): cell for cell in cells}
    for few in cells:
        more = [times.get((few.shape, few.m + step)) for step in range(1, STEP + 1)]
        many = next(filter(None, reversed(more)), few)
        if many.us > (1 + JUMPS_BY) * few.us:
            yield Pair(few, many)


def mean_speed_up(cells: list[Cell]) -> float:
    """Geometric mean of the speed-ups."""
    return math.exp(sum(math.log(cell.speed_up) for cell in cells) / len(cells))
