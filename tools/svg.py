"""SVG primitives for `tools/pictures.py`: shapes, text, arrows and axes, for light and dark pages.

Colors are CSS variables that follow the color scheme of the reader's system. The background is
transparent. Lengths are pixels; pictures are at most 480 wide so that letters stay readable on a
phone.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH = 480.0
_LIGHT = {
    "ink": "#1f2328",
    "soft": "#59636e",
    "line": "#d1d9e0",
    "fill": "#eef1f4",
    "a": "#0969da",
    "b": "#bc4c00",
    "c": "#1a7f37",
    "d": "#8250df",
    "e": "#bf3989",
}
_DARK = {
    "ink": "#f0f6fc",
    "soft": "#a8b1bb",
    "line": "#4a525c",
    "fill": "#2b323b",
    "a": "#58a6ff",
    "b": "#f0883e",
    "c": "#56d364",
    "d": "#bc8cff",
    "e": "#f778ba",
}


def _variables(colors: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colors.items())


_STYLE = f"""<style>
svg {{ {_variables(_LIGHT)} font: 14px system-ui, sans-serif }}
@media (prefers-color-scheme: dark) {{ svg {{ {_variables(_DARK)} }} }}
</style>"""


class Drawing:
    """Collects the elements of one picture."""

    def __init__(self, height: float, title: str) -> None:
        self.height, self.title = height, title
        self.parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        color: str = "ink",
        anchor: str = "start",
        size: float = 14,
        bold: bool = False,
    ) -> None:
        style = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="var(--{color})" text-anchor="{anchor}" '
            f'font-size="{size:g}"{style}>{escape(words)}</text>'
        )

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "fill",
        stroke: str = "line",
        opacity: float = 1,
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="var(--{fill})" fill-opacity="{opacity:g}" stroke="var(--{stroke})"/>'
        )

    def box(self, x: float, y: float, width: float, height: float, *lines: str, **look) -> None:
        """Draws a rectangle with centred lines of text; the first is bold if there are several."""
        self.rect(x, y, width, height, **look)
        top = y + height / 2 - 9 * (len(lines) - 1) + 5
        for i, line in enumerate(lines):
            bold = i == 0 and len(lines) > 1
            size = 14 if i == 0 else 12.5
            color = "ink" if i == 0 else "soft"
            self.text(
                x + width / 2,
                top + 18 * i,
                line,
                anchor="middle",
                bold=bold,
                size=size,
                color=color,
            )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        *,
        color: str = "line",
        width: float = 1,
        dashed: bool = False,
    ) -> None:
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="var(--{color})" '
            f'stroke-width="{width:g}"{dash}/>'
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Draws a straight arrow with a head at its end."""
        self.line([start, end], color="soft", width=1.3)
        angle = math.atan2(end[1] - start[1], end[0] - start[0])
        corners = [end] + [
            (end[0] - 8 * math.cos(angle + turn), end[1] - 8 * math.sin(angle + turn))
            for turn in (0.45, -0.45)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self.parts.append(f'<polygon points="{path}" fill="var(--soft)"/>')

    def dot(self, x: float, y: float, *, color: str, radius: float = 3.5) -> None:
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="var(--{color})"/>'
        )

    def __str__(self) -> str:
        size = f'viewBox="0 0 {WIDTH:g} {self.height:g}" width="{WIDTH:g}" height="{self.height:g}"'
        title = escape(self.title)
        parts = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
            f"<title>{title}</title>\n{_STYLE}\n{parts}\n</svg>\n"
        )


class Axis(NamedTuple):
    """Maps values to pixels, linearly or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log(x) if self.log else x for x in (self.low, self.high))
        at = math.log(value) if self.log else value
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def axes(
    drawing: Drawing,
    x: Axis,
    y: Axis,
    *,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_label: str,
    y_label: str,
) -> None:
    """Draws grid lines, tick labels and the names of both axes."""
    for tick in y_ticks:
        drawing.line([(x.start, y(tick)), (x.end, y(tick))])
        drawing.text(x.start - 6, y(tick) + 5, f"{tick:,g}", color="soft", anchor="end", size=13)
    for tick in x_ticks:
        drawing.line([(x(tick), y.start), (x(tick), y.start + 4)])
        drawing.text(x(tick), y.start + 19, f"{tick:g}", color="soft", anchor="middle", size=13)
    drawing.text((x.start + x.end) / 2, y.start + 38, x_label, anchor="middle")
    drawing.text(4, y.end - 12, y_label)
