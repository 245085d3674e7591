"""Writes the figures of `benchmarks/results/figures.json` into the pages that name them.

    python tools/figures.py          # after a figure was measured anew
    python tools/figures.py --check  # whether all pages have them; changes nothing

A page names a figure around its value: `<!--=llama3-8b-decode-->533<!--/--> tokens/s`. A figure has
its `value`, or is the time of a row of other results, or the ratio of two figures.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
_MARKED = re.compile(r"<!--=([\w.-]+)-->([^<]*)<!--/-->")


def pages(root: Path = ROOT) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])


def read(path: Path = RESULTS / "figures.json") -> dict[str, dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))


def value(figures: dict[str, dict[str, Any]], name: str) -> str:
    """A figure as the pages have it.

    **Raises:** `ValueError` for a name that there is not, and for results without its row.
    """
    if name not in figures:
        raise ValueError(f"there is no figure {name!r} in figures.json; name one of its keys.")
    figure = figures[name]
    if "ratio" in figure:
        above, below = (float(value(figures, of).replace(",", "")) for of in figure["ratio"])
        return f"{above / below:.1f}"
    if "results" in figure:
        rows = json.loads((RESULTS / figure["results"]).read_text(encoding="utf-8"))["rows"]
        wanted = {key: figure[key] for key in ("shape", "backend", "m")}
        found = [row["us"] for row in rows if wanted.items() <= row.items()]
        if len(found) != 1:
            raise ValueError(f"{figure['results']} has {len(found)} rows with {wanted}, not one.")
        return f"{found[0]:.1f}"
    return figure["value"]


def filled(text: str, figures: dict[str, dict[str, Any]]) -> str:
    """A page with the values of the figures that it names."""
    return _MARKED.sub(lambda m: f"<!--={m[1]}-->{value(figures, m[1])}<!--/-->", text)


def named(text: str) -> set[str]:
    """The figures that a page names."""
    return {match[1] for match in _MARKED.finditer(text)}


def unnamed(text: str, figures: dict[str, dict[str, Any]]) -> list[str]:
    """Figures that a page has without naming them, and other numbers of tokens/s."""
    plain = re.sub(r"\s+", " ", _MARKED.sub("", text))
    known = [f"{value(figures, name)} {figure['unit']}" for name, figure in figures.items()]
    # What several things may take, such as 5 MB, is no figure for that.
    known = [words for words in known if not words.endswith((" MB", " minutes", " times"))]
    found = [words for words in known if re.search(rf"(?<![\d.,]){re.escape(words)}\b", plain)]
    return found + re.findall(r"\d[\d,.]* tokens/s", plain)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes figures into the pages that name them.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if it would")
    check, figures, stale = parser.parse_args().check, read(), []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text, figures)) != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(new, encoding="utf-8")
    print(f"{', '.join(stale) or 'no page'}: {'other figures' if check else 'written'}")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
