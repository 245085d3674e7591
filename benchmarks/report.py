"""Tables and plots of results, computed only from the JSON."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import contenders
from results import InputError, describe

BEGIN, END = "<!-- results -->", "<!-- end of results -->"


class Group(NamedTuple):
    """The rows of one format and dtype, with the dense rows and reads to compare with."""

    format: str
    dtype: str
    cells: dict[tuple[str, int], dict[str, float]]  # (shape, m) to backend to us
    reads: dict[str, float]  # shape to us
    ideals: dict[str, float]  # shape to the ratio of dense bytes to the format's bytes

    @property
    def backends(self) -> list[str]:
        """The measured backends, in the order of the rows."""
        return list(dict.fromkeys(name for cell in self.cells.values() for name in cell))

    @property
    def shapes(self) -> list[str]:
        return list(dict.fromkeys(shape for shape, _ in self.cells))

    def dense(self, shape: str, m: int) -> float | None:
        """The faster of the dense products."""
        cell = self.cells[shape, m]
        return min((cell[name] for name in contenders.DENSE if name in cell), default=None)

    def speed_up(self, shape: str, m: int, backend: str) -> float | None:
        cell, dense = self.cells[shape, m], self.dense(shape, m)
        return None if dense is None or backend not in cell else dense / cell[backend]


def groups(results: dict[str, Any]) -> Iterator[Group]:
    """The rows, by format and dtype."""
    rows = results["rows"]
    names = dict.fromkeys((r["format"], r["dtype"]) for r in rows if r["format"] != "dense")
    for format, dtype in names or [("dense", r["dtype"]) for r in rows[:1]]:
        group = Group(format, dtype, {}, {}, {})
        for row in rows:
            if row["format"] not in (format, "dense") or row["dtype"] != dtype:
                continue
            if row["m"] is None:
                group.reads[row["shape"]] = row["us"]
                continue
            cell = group.cells.setdefault((row["shape"], row["m"]), {})
            cell[row["backend"]] = row["us"]
            if row["format"] == format:
                itemsize = 4 if dtype == "float32" else 2
                group.ideals[row["shape"]] = row["n"] * row["k"] * itemsize / row["bytes"]
        yield group


def markdown(results: dict[str, Any]) -> str:
    """A table per format: microseconds, with the speed-up over dense in parentheses."""
    parts = [describe(results["environment"])]
    for group in groups(results):
        parts.append(f"**{group.format}, {group.dtype}**")
        parts.append("\n".join(_table(group)))
    return "\n\n".join(parts) + "\n"


def _table(group: Group) -> Iterator[str]:
    read = [contenders.READ] if group.reads else []
    yield f"| {' | '.join(['n x k', 'tokens', *group.backends, *read])} |"
    yield "|---" * (2 + len(group.backends) + len(read)) + "|"
    for (shape, m), cell in group.cells.items():
        texts = [shape, str(m)]
        for name in group.backends:
            faster = group.speed_up(shape, m, name)
            ratio = "" if faster is None or name in contenders.DENSE else f" ({faster:.2f}x)"
            texts.append(f"{cell[name]:.1f}{ratio}" if name in cell else "-")
        if read:
            texts.append(f"{group.reads[shape]:.1f}" if shape in group.reads else "-")
        yield f"| {' | '.join(texts)} |"
    means = [_mean(group, name) for name in group.backends]
    if any(means):
        yield f"| {' | '.join(['geometric mean', '', *means, *('' for _ in read)])} |"


def _mean(group: Group, backend: str) -> str:
    found = [group.speed_up(*cell, backend) for cell in group.cells]
    logs = [math.log(ratio) for ratio in found if ratio is not None]
    if backend in contenders.DENSE or not logs:
        return ""
    return f"{math.exp(sum(logs) / len(logs)):.2f}x"


def embed(path: Path, text: str) -> None:
    """Replaces the text between the two markers of a page.

    **Raises:** `InputError` for a page without markers.
    """
    try:
        page = path.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        _, after = rest.split(END)
    except (OSError, UnicodeDecodeError, ValueError):
        raise InputError(
            f"{path} has no lines {BEGIN} and {END} for the tables between them."
        ) from None
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")
