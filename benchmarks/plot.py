"""Plots of results: speed-up over dense, and time against what reading the weight takes."""

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import contenders
from report import Group, groups
from results import InputError
from violations import Cell


def plot(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes two SVG files per format and dtype, a panel per shape.

    **Raises:** `InputError` without matplotlib.
    """
    pyplot = _pyplot()
    written = []
    for group in groups(results):
        for kind, draw in (("speed-up", _speed_up), ("time", _time)):
            path = folder / f"{kind}-{group.format}-{group.dtype}.svg"
            _panels(pyplot, group, draw, path)
            written.append(path)
    return written


def heat_map(cells: list[Cell], path: Path) -> None:
    """Draws how many times as fast as dense each shape (a row) is with each number of tokens.

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
    pyplot.rcParams["svg.hashsalt"] = "jaxlowbit"  # the same results give the same file
    return pyplot


def _panels(pyplot: Any, group: Group, draw: Callable[[Any, Group, str], None], path: Path) -> None:
    columns = min(3, len(group.shapes))
    rows = math.ceil(len(group.shapes) / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )
    labels: dict[str, Any] = {}
    for axis, shape in zip(axes.flat, group.shapes, strict=False):
        draw(axis, group, shape)
        axis.set(title=shape, xlabel="tokens", xscale="log")
        tokens = [m for name, m in group.cells if name == shape]
        crowded = len(tokens) > 8
        axis.set_xticks(tokens, map(str, tokens), fontsize="small", rotation=60 if crowded else 0)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        labels |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    for axis in axes.flat[len(group.shapes) :]:
        axis.remove()
    figure.suptitle(f"{group.format}, {group.dtype}")
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _speed_up(axis: Any, group: Group, shape: str) -> None:
    for name in group.backends:
        if name in contenders.DENSE:
            continue
        found = {m: group.speed_up(s, m, name) for s, m in group.cells if s == shape}
        points = {m: ratio for m, ratio in found.items() if ratio is not None}
        if points:
            axis.plot(list(points), list(points.values()), "o-", label=name, markersize=3)
    axis.axhline(1, color="gray", label="dense, the faster")
    if shape in group.ideals:
        axis.axhline(group.ideals[shape], color="gray", linestyle="--", label="fewer bytes")
    axis.set(ylabel="times as fast as dense", ylim=(0, None))


def _time(axis: Any, group: Group, shape: str) -> None:
    for name in group.backends:
        points = {
            m: cell[name] for (s, m), cell in group.cells.items() if s == shape and name in cell
        }
        if points:
            dashes = "o--" if name in contenders.DENSE else "o-"
            axis.plot(list(points), list(points.values()), dashes, label=name, markersize=3)
    if shape in group.reads:
        axis.axhline(group.reads[shape], color="gray", linestyle=":", label="read")
    axis.set(ylabel="microseconds", yscale="log")
