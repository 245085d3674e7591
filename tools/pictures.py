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

import measurements
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


def quality() -> Drawing:
    """Perplexity of SmolLM2-135M-Instruct by bits per weight."""
    rows = measurements.table("language_models", "formats")["rows"]
    found = [(row[0], float(row[2]), float(row[3].replace(",", ""))) for row in rows if not row[1]]
    limit = 200.0
    drawing = Drawing(420, "Perplexity of SmolLM2-135M-Instruct by bits per weight")
    x, y = Axis(3.8, 8.6, 40, WIDTH - 10), Axis(44, limit, 300, 34, log=True)
    axes(
        drawing,
        x,
        y,
        x_ticks=(4, 5, 6, 7, 8),
        y_ticks=(50, 60, 80, 100, 150, 200),
        x_label="bits per weight, with scales",
        y_label="perplexity (lower is better)",
    )
    stored = next(value for name, _, value in found if name == "as stored")
    drawing.line([(x.start, y(stored)), (x.end, y(stored))], color="ink", dashed=True)
    for name, bits, value in found:
        if value > limit:
            continue
        drawing.dot(x(bits), y(value), color="ink" if name == "as stored" else _kind(name))
        right, down, anchor = _LABELS.get(name, (7, 5, "start"))
        drawing.text(x(bits) + right, y(value) + down, name, size=12, anchor=anchor)
    legend = (("a", "integers"), ("b", "4-bit codebooks"), ("c", "8-bit floats"))
    for i, (color, words) in enumerate(legend):
        drawing.dot(46 + 150 * i, 361, color=color)
        drawing.text(55 + 150 * i, 366, words, size=13)
    above = ", ".join(f"{name} {value:,.0f}" for name, _, value in found if value > limit)
    drawing.text(40, 390, f"Not shown: {above}", color="soft", size=12)
    drawing.text(40, 408, "The file itself has 4 to 8 bits (dashed line).", color="soft", size=12)
    return drawing


def quantizers() -> Drawing:
    """Perplexity of SmolLM2-135M-Instruct, relative to the file, by bits and quantizer."""
    _, points = measurements.quality("quantizers.json")
    stored = points["stored"]["perplexity"]
    limit = 4.0
    drawing = Drawing(414, "Perplexity of SmolLM2-135M-Instruct by bits and quantizer")
    x, y = Axis(2, 5, 40, WIDTH - 60), Axis(1, limit, 300, 34, log=True)
    axes(
        drawing,
        x,
        y,
        x_ticks=(2, 2.5, 3, 3.5, 4, 4.5, 5),
        y_ticks=(1, 1.2, 1.5, 2, 3, 4),
        x_label="bits per weight of the blocks, with scales",
        y_label="perplexity over that of the file (lower is better)",
    )
    quantizers = ("absmax", "hqq", "awq", "gptq", "awq+gptq", "awq+distill")
    colors = dict(zip(quantizers, (*_COLORS, "ink"), strict=True))
    above = []
    for name, found in points.items():
        format, _, quantizer = name.partition("/")
        ratio = found["perplexity"] / stored
        if quantizer not in colors or found["bits"] > x.high:
            continue
        if ratio > limit:
            above.append(f"{name} {ratio:,.0f}")
            continue
        drawing.dot(x(found["bits"]), y(ratio), color=colors[quantizer])
        if format[0].isdigit():
            drawing.text(x(found["bits"]) - 7, y(ratio) + 5, "plan", size=12, anchor="end")
    for i, (name, color) in enumerate(colors.items()):
        drawing.dot(46 + 84 * i, 361, color=color)
        drawing.text(55 + 84 * i, 366, name, size=13)
    for i in range(0, len(above), 4):
        words = ("Above: " if i == 0 else "") + ", ".join(above[i : i + 4])
        drawing.text(40, 386 + 9 * i / 2, words, color="soft", size=11)
    return drawing


_LABELS = {
    "as stored": (0, 17, "middle"),
    "int4-int8": (-6, -4, "end"),
    "int4": (7, 8, "start"),
    "uint4": (-7, 0, "end"),
    "nf4": (-7, 10, "end"),
    "e2m1": (7, -2, "start"),
    "nvfp4": (7, 12, "start"),
    "int7": (0, -9, "middle"),
    "int8": (-6, 17, "end"),
    "uint8": (4, 17, "start"),
    "e4m3": (-7, -5, "end"),
    "e5m2": (-7, 5, "end"),
    "mxfp8": (4, -9, "start"),
    "int4-g32-float-two_level": (-4, -9, "middle"),
}


def _kind(name: str) -> str:
    if name in ("e4m3", "e5m2", "mxfp8"):
        return "c"
    return "b" if name in ("nf4", "fp4", "e2m1", "mxfp4", "nvfp4") else "a"


def token_time() -> Drawing:
    """Parts of a decode step of Llama 3 8B."""
    found = measurements.table("decode_step", "with_attention")
    texts = [row[1] for row in found["rows"]]
    times = [float(text.removeprefix("up to ").replace(",", "")) for text in texts]
    names = (
        "products and norms",
        "attention",
        "head",
        "small XLA kernels",
    )
    x = Axis(0, max(times), 150, WIDTH - 60)
    drawing = Drawing(200, "Where the time of a token goes, Llama 3 8B in 4 bits")
    drawing.text(0, 16, "microseconds of a decode step, Llama 3 8B in 4 bits", bold=True)
    for i, (us, text, name) in enumerate(zip(times, texts, names, strict=True)):
        top = 32 + 32 * i
        drawing.text(142, top + 16, name, anchor="end", size=12.5)
        drawing.rect(x.start, top, max(x(us) - x.start, 2), 22, fill="a", stroke="a", opacity=0.75)
        drawing.text(max(x(us), x.start) + 6, top + 16, text, size=13)
    notes = f"{found['conditions']}; one sequence, 1,000 positions"
    drawing.text(0, 184, notes, color="soft", size=12.5)
    return drawing


def call_path() -> Drawing:
    """From Python to the tensor core instruction."""
    stages = (
        ("x @ q", "jaxlowbit: checks, jvp, vmap, partitioning"),
        ("primitive, lowered by backend", "one custom call, jaxlowbit_sequence"),
        ("XLA handler", "xla_ffi: decodes products and steps"),
        ("selection", "cuda/select: kernel, tile, split, cached"),
        ("launch", "prebuilt, or compiled by NVRTC and cached"),
        ("kernel", "packed words, dequantized in registers"),
        ("mma.sync or wgmma", "weights are operand A; float32 accumulators"),
    )
    phases = (("trace, lower", 0, 2), ("run: capturable", 2, 5), ("device", 5, 7))
    drawing = Drawing(62 * len(stages) + 4, "From Python to the tensor core instruction")
    for i, (name, detail) in enumerate(stages):
        top = 2 + 62 * i
        drawing.box(112, top, 340, 44, name, detail)
        if i:
            drawing.arrow((282, top - 18), (282, top))
    for name, first, end in phases:
        top, bottom = 4 + 62 * first, 62 * end - 18
        drawing.line([(100, top), (94, top), (94, bottom), (100, bottom)], color="soft")
        middle = (top + bottom) / 2
        for j, word in enumerate(name.split(": ") if ":" in name else [name]):
            drawing.text(88, middle + 5 + 16 * j, word, anchor="end", size=12.5, color="soft")
    return drawing


def layout() -> Drawing:
    """The packed layout: matrix, atom, words of a lane."""
    drawing = Drawing(470, "Packed layout: matrix, atom, words of a lane")
    drawing.text(0, 16, "1. Matrix (n, k): atoms of 64 x 64, k-blocks contiguous", bold=True)
    for row in range(2):
        for column in range(5):
            marked = row == 0 and column == 1
            drawing.box(
                40 + 76 * column,
                28 + 40 * row,
                72,
                36,
                str(5 * row + column),
                fill="a" if marked else "fill",
                opacity=0.35 if marked else 1,
            )
    drawing.text(30, 52, "n", anchor="end", color="soft")
    drawing.text(432, 66, "k", color="soft")
    drawing.text(0, 138, "2. Atom: 4 warps of 16 channels, in mma register order", bold=True)
    for warp in range(4):
        top = 150 + 30 * warp
        drawing.text(34, top + 18, f"w {warp}", anchor="end", size=12, color="soft")
        for step in range(4):
            marked = warp == 0
            drawing.rect(40 + 95 * step, top, 92, 26, fill="a" if marked else "fill", opacity=0.2)
            if warp == 0:
                words = f"step {step}: 16 x 16"
                drawing.text(86 + 95 * step, top + 18, words, anchor="middle", size=12)
    drawing.text(0, 300, "3. Lane 4 g + t of a warp, 4 bits: a word per step", bold=True)
    for slot in range(8):
        left = 40 + 48 * (7 - slot)
        e, v, h = slot >> 2, slot >> 1 & 1, slot & 1
        color = _COLORS[2 * v + h]
        drawing.rect(left, 312, 48, 30, fill=color, opacity=0.3)
        drawing.text(left + 24, 332, f"{e} {v} {h}", anchor="middle", size=12.5)
        drawing.text(left + 24, 358, f"bit {4 * slot}", anchor="middle", size=11, color="soft")
    drawing.text(34, 332, "e v h", anchor="end", size=12.5, color="soft")
    drawing.text(40, 384, "n = 16 w + 8 h + g", size=13)
    drawing.text(220, 384, "k = 16 s + 8 v + 2 t + e", size=13)
    drawing.text(40, 408, "(word >> 4 (2 v + h)) & 0x000f000f gives register 2 v + h:", size=13)
    drawing.text(
        40, 428, "k and k + 1 in its two halves. No shuffle, no shared-memory pass.", size=13
    )
    drawing.text(40, 456, "Colors: the four registers of operand A.", size=12.5, color="soft")
    return drawing


def _lanes(title: str, lanes: list[tuple[str, list[tuple[float, float, str, str]]]]) -> Drawing:
    """A timeline: lanes of (start, end, label, color) in units of a tenth of the width."""
    drawing = Drawing(58 + 46 * len(lanes), title)
    drawing.text(0, 16, title, bold=True)
    for i, (name, spans) in enumerate(lanes):
        top = 30 + 46 * i
        drawing.text(0, top + 21, name, size=12.5, color="soft")
        for start, end, label, color in spans:
            left, right = 98 + 38 * start, 98 + 38 * end
            drawing.rect(left, top, right - left - 2, 32, fill=color, stroke=color, opacity=0.28)
            drawing.text((left + right) / 2 - 1, top + 21, label, anchor="middle", size=12)
    bottom = 44 + 46 * len(lanes)
    drawing.arrow((98, bottom), (WIDTH - 4, bottom))
    drawing.text(90, bottom + 4, "time", anchor="end", size=12.5, color="soft")
    return drawing


def qmm_sm80() -> Drawing:
    """The pipeline of `qmm_sm80`."""
    loads = [(i * 1.5, i * 1.5 + 1.5, f"stage {i}", "a") for i in range(5)]
    products = [(2 + i * 1.5, 3.5 + i * 1.5, f"mma {i}", "b") for i in range(5)]
    return _lanes(
        "qmm_sm80: all four warps copy and multiply",
        [
            ("cp.async", loads),
            ("dequant, mma", products),
            ("end", [(8.5, 10, "store", "c")]),
            ("reduce (PDL)", [(8.5, 10, "add if split", "d")]),
        ],
    )


def qmm_sm90_stream() -> Drawing:
    """The pipeline of `qmm_sm90_stream`."""
    first = [(0.6 + i, 1.6 + i, f"W{i}", "a") for i in range(3)]
    rest = [(3.6 + 1.2 * i, 4.8 + 1.2 * i, f"W, x {i + 3}", "a") for i in range(2)]
    products = [(3 + 1.1 * i, 4.1 + 1.1 * i, f"{i}", "b") for i in range(5)]
    return _lanes(
        "qmm_sm90_stream: weights load before the last kernel ends",
        [
            ("last kernel", [(0, 2.2, "draining", "e")]),
            ("producer: TMA", first + rest),
            ("8 warps: mma", products),
            ("cluster", [(8.5, 9.2, "add", "d"), (9.2, 10, "store", "c")]),
        ],
    )


def qmm_sm90() -> Drawing:
    """The pipeline of `qmm_sm90`."""
    loads = [(1.2 * i, 1.2 + 1.2 * i, f"TMA {i}", "a") for i in range(6)]
    zero = [(1.2 + 1.6 * i, 2 + 1.6 * i, f"dq {i}", "b") for i in range(5)]
    one = [(2 + 1.6 * i, 2.8 + 1.6 * i, f"dq {i}", "c") for i in range(5)]
    cores = [(2 + 0.8 * i, 2.8 + 0.8 * i, f"{'AB'[i % 2]}{i // 2}", "bc"[i % 2]) for i in range(9)]
    return _lanes(
        "qmm_sm90: two warpgroups keep the tensor cores busy",
        [
            ("producer", loads),
            ("warpgroup A", [*zero, (9.2, 10, "store", "e")]),
            ("warpgroup B", one),
            ("wgmma", cores),
        ],
    )


PICTURES: dict[str, Callable[[], Drawing]] = {
    draw.__name__: draw
    for draw in (
        speed_up,
        quality,
        quantizers,
        token_time,
        call_path,
        layout,
        qmm_sm80,
        qmm_sm90_stream,
        qmm_sm90,
    )
}


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
