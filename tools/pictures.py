"""Draws the pictures of the documentation into `docs/pictures/`.

    python tools/pictures.py          # after results or a picture have changed
    python tools/pictures.py --check  # changes nothing; fails if a file differs

Charts read `benchmarks/results`; the other pictures show structure and contain no figures.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out

from svg import WIDTH, Axis, Drawing, axes

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
FOLDER = ROOT / "docs/pictures"
_COLORS = "abcde"


def speed_up() -> Drawing:
    """Time of cuBLAS over ours, by rows of activations."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for row in _read("h200-sweep.json")["rows"]:
        found.setdefault(row["shape"], {}).setdefault(row["m"], {})[row["backend"]] = row["us"]
    shapes = ["28672x8192", "8192x28672", "8192x8192", "14336x4096", "4096x4096"]
    drawing = Drawing(396, "Speed-up over bfloat16 cuBLAS by rows of activations")
    x, y = Axis(1, 4096, 34, WIDTH - 20, log=True), Axis(0, 4, 270, 34)
    ticks = (1, 4, 16, 64, 256, 1024, 4096)
    axes(
        drawing,
        x,
        y,
        x_ticks=ticks,
        y_ticks=(0, 1, 2, 3, 4),
        x_label="rows of activations",
        y_label="times as fast as bfloat16 cuBLAS",
    )
    drawing.line([(x.start, y(1)), (x.end, y(1))], color="ink", dashed=True)
    drawing.text(x.end, y(1) + 18, "below: slower", color="soft", anchor="end", size=13)
    for i, (color, shape) in enumerate(zip(_COLORS, shapes, strict=True)):
        cells = {m: cell["cublas"] / cell["jaxlowbit"] for m, cell in sorted(found[shape].items())}
        points = [(x(m), y(ratio)) for m, ratio in cells.items()]
        drawing.line(points, color=color, width=2)
        for at in points:
            drawing.dot(*at, color=color, radius=2.5)
        left, top = 34 + i % 3 * 148, 334 + i // 3 * 22
        drawing.line([(left, top - 5), (left + 18, top - 5)], color=color, width=3)
        drawing.text(left + 24, top, shape.replace("x", " x "), size=13)
    drawing.text(
        34,
        384,
        "NVIDIA H200, 4-bit weights (n x k) in groups of 128, not in cache",
        color="soft",
        size=13,
    )
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {"speed_up": speed_up}


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the pictures of the documentation.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if it would")
    check, stale = parser.parse_args().check, []
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        path, new = FOLDER / f"{name}.svg", str(draw())
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            stale.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    print(f"{', '.join(stale) or 'no picture'}: {'differs' if check else 'drawn'}")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
