"""Plots results: speed-up over dense, and time."""

import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import contenders
from report import Group, groups
from results import InputError
from violations import Cell

# Text is 12 pixels high on a page as narrow as a phone, 371 pixels.
WIDTH, HEIGHT, FONT = 5.2, 4.6, 12.5  # inches, inches, points
_STYLES = ("-", "--", ":", "-.")


def plot(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes two SVG files per format and dtype: a colour per shape, a style per backend.

    **Raises:** `InputError` without matplotlib.
    """
    pyplot = _pyplot()
    written = []
    for group in groups(results):
        others = [name for name in group.backends if name not in contenders.DENSE]
        for kind, backends in (("speed-up", others), ("time", group.backends)):
            figure, axis = pyplot.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
            _draw(axis, group, kind, backends)
            _legend(pyplot, figure, group, backends)
            path = folder / f"{kind}-{group.format}-{group.dtype}.svg"
            figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)
            written.append(path)
    return written


def heat_map(cells: list[Cell], path: Path) -> None:
    """Draws the speed-up over dense of each shape (a row) and number of tokens (a column).

    **Raises:** `InputError` without matplotlib.
    """
    pyplot = _pyplot()
    elements = {cell.shape: cell.elements for cell in cells}
    names = sorted(elements, key=elements.__getitem__)
    tokens = sorted({cell.m for cell in cells})
    found = {(cell.shape, cell.m): math.log2(cell.speed_up) for cell in cells}
    ratios = [[found.get((name, m), math.nan) for m in tokens] for name in names]
    size = (max(8.0, 0.16 * len(tokens)), max(3.0, 0.22 * len(names)))
    figure, axis = pyplot.subplots(figsize=size, layout="constrained")
    image = axis.imshow(ratios, aspect="auto", cmap="RdYlGn", vmin=-2, vmax=2)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    step = max(1, len(tokens) // 24)
    shown = range(0, len(tokens), step)
    axis.set_xticks(shown, [str(tokens[i]) for i in shown], rotation=60, fontsize=9)
    axis.set(xlabel="rows of activations", title="times as fast as dense bfloat16 (cuBLAS)")
    bar = figure.colorbar(image, ticks=[-2, -1, 0, 1, 2])
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        pyplot = import_module("matplotlib.pyplot")
    except ImportError:
        raise InputError(
            "plots need matplotlib: pip install matplotlib, or the extra `benchmark`."
        ) from None
    pyplot.switch_backend("svg")
    pyplot.rcParams["svg.hashsalt"] = "jaxlowbit"  # reproducible files
    pyplot.rcParams["svg.fonttype"] = "none"  # text instead of paths
    pyplot.rcParams["font.size"] = FONT
    return pyplot


def _draw(axis: Any, group: Group, kind: str, backends: list[str]) -> None:
    for style, name in zip(_cycle(), backends, strict=False):
        for color, shape in enumerate(group.shapes):
            if points := _points(group, kind, name, shape):
                axis.plot(list(points), list(points.values()), f"o{style}", **_look(color))
    if kind == "speed-up":
        axis.axhline(1, color="gray")
        axis.set(ylabel="times as fast as dense", ylim=(0, None))
    else:
        axis.set(ylabel="microseconds", yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
    rows = sorted({m for _, m in group.cells})
    axis.set(xlabel="rows of activations", xscale="log")
    axis.set_xticks(rows, [str(m) if i % 2 == 0 else "" for i, m in enumerate(rows)])
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def _points(group: Group, kind: str, name: str, shape: str) -> dict[int, float]:
    """The measured rows of a backend, by M."""
    if kind == "speed-up":
        found = {m: group.speed_up(s, m, name) for s, m in group.cells if s == shape}
        return {m: ratio for m, ratio in found.items() if ratio is not None}
    return {m: cell[name] for (s, m), cell in group.cells.items() if s == shape and name in cell}


def _legend(pyplot: Any, figure: Any, group: Group, backends: list[str]) -> None:
    """Legend: shapes (n x k), and backends if there are several."""
    lines = [pyplot.Line2D([], [], marker="o", **_look(i)) for i in range(len(group.shapes))]
    labels = [shape.replace("x", " x ") for shape in group.shapes]
    if len(backends) > 1:
        styles = zip(_cycle(), backends, strict=False)
        lines += [pyplot.Line2D([], [], color="gray", linestyle=style) for style, _ in styles]
        labels += backends
    figure.legend(lines, labels, loc="outside lower center", ncols=2, frameon=False)


def _look(color: int) -> dict[str, Any]:
    return {"color": f"C{color}", "markersize": 4}


def _cycle() -> Iterator[str]:
    while True:
        yield from _STYLES
