"""Writes the tables of `benchmarks/results/measurements/` into the pages that name them.

    python tools/measurements.py                     # after a measurement has changed
    python tools/measurements.py --check             # changes nothing; fails if a page differs
    python tools/measurements.py qmm_sm90            # lists the tables of a study
    python tools/measurements.py qmm_sm90 versions   # prints one

A file is a study: tables by name, each with `title`, `conditions`, `columns` and `rows`, or instead
of the last two the `results` of a sweep to read, with `shapes`, `m` and `backends`, or a `quality`
file of `tools/quality.py`. `{name}` in a
cell is a figure of `figures.json`. Pages have the table between `<!-- table: study/name -->` and
`<!-- /table -->`, and a list of all others of the study between `<!-- tables: study -->` and
`<!-- /tables -->`.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out

import figures

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks/results/measurements"
_TABLE = re.compile(r"(<!-- table: (\w+)/(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)
_LIST = re.compile(r"(<!-- tables: (\w+) -->\n).*?(<!-- /tables -->)", re.DOTALL)
Table = dict[str, Any]


def study(name: str) -> dict[str, Table]:
    """Returns the tables of a study by name.

    **Raises:** `ValueError` for an unknown study.
    """
    path = FOLDER / f"{name}.json"
    if not path.exists():
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.json")))
        raise ValueError(f"there is no study {name!r} in {FOLDER}; name one of {known}.")
    return json.loads(path.read_text(encoding="utf-8"))


def table(name: str, part: str) -> Table:
    """Returns one table of a study, with columns and rows of text.

    **Raises:** `ValueError` for an unknown name.
    """
    tables = study(name)
    if part not in tables:
        raise ValueError(
            f"the study {name} has no table {part!r}; name one of {', '.join(tables)}."
        )
    found = tables[part]
    if "results" in found:
        return {**found, **_sweep(found)}
    if "quality" in found:
        return {**found, **_quality(found["quality"])}
    known = figures.read()
    rows = [
        [re.sub(r"\{([\w.-]+)\}", lambda m: figures.value(known, m[1]), cell) for cell in row]
        for row in found["rows"]
    ]
    return {**found, "rows": rows}


def markdown(found: Table) -> str:
    """Returns a table with its title above and its conditions below."""
    rows = [found["columns"], ["---"] * len(found["columns"]), *found["rows"]]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(
        [f"**{found['title']}**", "", *lines, "", f"Conditions: {found['conditions']}."]
    )


def filled(text: str) -> str:
    """Returns the text of a page with its tables, and with lists of the tables it leaves out."""
    shown = {(match[2], match[3]) for match in _TABLE.finditer(text)}
    text = _TABLE.sub(lambda m: f"{m[1]}\n{markdown(table(m[2], m[3]))}\n\n{m[4]}", text)
    return _LIST.sub(lambda m: f"{m[1]}\n{_listed(m[2], shown)}\n\n{m[3]}", text)


def _listed(name: str, shown: set[tuple[str, str]]) -> str:
    others = [
        f"- `{part}`: {t['title']}" for part, t in study(name).items() if (name, part) not in shown
    ]
    command = f"`python tools/measurements.py {name} NAME` prints them:"
    return "\n".join(
        [f"Other tables of `benchmarks/results/measurements/{name}.json`; {command}", "", *others]
    )


def _sweep(found: Table) -> Table:
    """Cells of one or more backends, divided by slashes, by shape and rows of activations."""
    path = ROOT / "benchmarks/results" / found["results"]
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    us = {(row["shape"], row["m"], row["backend"]): row["us"] for row in rows}
    cells = [
        [shape.replace("x", " x "), *(_cell(us, shape, m, found["backends"]) for m in found["m"])]
        for shape in found["shapes"]
    ]
    return {
        "columns": [
            "n x k",
            *(f"{m} rows" if i == 0 else str(m) for i, m in enumerate(found["m"])),
        ],
        "rows": cells,
    }


def quality(name: str) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """The conditions and the points of a file of `tools/quality.py`, most bits first."""
    path = ROOT / "benchmarks/results" / name
    found = json.loads(path.read_text(encoding="utf-8"))
    points = sorted(found["points"].items(), key=lambda x: (-x[1]["bits"], -x[1]["perplexity"]))
    return found["conditions"], dict(points)


def _quality(name: str) -> Table:
    """Quality by format and quantizer; the part of the loss of absmax that others recover."""
    conditions, points = quality(name)
    stored = points["stored"]
    rows = []
    for point, found in points.items():
        format, _, quantizer = point.partition("/")
        plain = points.get(f"{format}/absmax")
        part = ""
        if plain and plain is not found and "@" not in quantizer:
            part = f"{(plain['loss'] - found['loss']) / (plain['loss'] - stored['loss']):.0%}"
        rows.append(
            [
                format if not format[0].isdigit() else f"plan of {format} bits",
                quantizer.replace("@", ", inputs in "),
                f"{found['bits']:.2f}",
                f"{found['megabytes']:.1f}",
                f"{found['perplexity']:,.2f}",
                f"{found['perplexity'] / stored['perplexity']:,.3f}",
                f"{found['divergence']:.3f}",
                part,
            ]
        )
    columns = ["format", "quantizer", "bits", "MB", "perplexity", "over stored", "divergence"]
    text = (
        "{model}, first {tokens:,} tokens of {text}, context and stride {context}; calibration on "
        "{calibration_tokens:,} tokens of {calibration}; {scales} scales; activations {activations}"
    )
    return {
        "columns": [*columns, "recovered loss"],
        "rows": rows,
        "conditions": text.format(**conditions),
    }


def _cell(us: dict[Any, float], shape: str, m: int, backends: list[str]) -> str:
    times = (us[shape, m, backend] for backend in backends)
    return " / ".join(f"{time:.1f}" if time < 99.95 else f"{time:.0f}" for time in times)


def _stale() -> Iterator[tuple[Path, str]]:
    for page in figures.pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            yield page, new


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes or prints tables of measurements.")
    parser.add_argument("study", nargs="?", help="lists the tables of this study")
    parser.add_argument("table", nargs="?", help="prints this table of the study")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if it would")
    options = parser.parse_args()
    if options.table:
        print(markdown(table(options.study, options.table)))
    elif options.study:
        print("\n".join(f"{part}: {t['title']}" for part, t in study(options.study).items()))
    else:
        stale = list(_stale())
        for page, new in stale:
            print(f"{figures.name_of(page)}: {'differs' if options.check else 'written'}")
            if not options.check:
                page.write_text(new, encoding="utf-8")
        sys.exit(1 if options.check and stale else 0)


if __name__ == "__main__":
    main()
