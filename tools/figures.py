"""Keeps the figures in the text of the pages equal to `benchmarks/results/figures.json`.

    python tools/figures.py          # after a figure has changed: writes its value into the pages
    python tools/figures.py --check  # changes nothing; fails if a page has another value

A figure has a `value`, or is the time of a row of other results, or the ratio of two figures. Its
`pages` lists the phrases that contain it, with `#` in place of the number: `"decodes # tokens/s"`.
The text itself has no markers; a phrase may span lines.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
Figures = dict[str, dict[str, Any]]


def pages(root: Path = ROOT) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def read(path: Path = RESULTS / "figures.json") -> Figures:
    return json.loads(path.read_text(encoding="utf-8"))


def value(figures: Figures, name: str) -> str:
    """Returns a figure as the pages print it.

    **Raises:** `ValueError` for an unknown name, and for results without exactly one such row.
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


def filled(text: str, page: str, figures: Figures) -> str:
    """Returns the text of a page with the current values in the phrases of its figures.

    **Raises:** `ValueError` for a phrase that the page does not contain.
    """
    for name, phrase in _phrases(page, figures):
        new = value(figures, name)
        text, count = _pattern(phrase).subn(lambda m, new=new: f"{m[1]}{new}{m[3]}", text)
        if not count:
            raise ValueError(
                f"{page} does not contain the phrase {phrase!r} of the figure {name!r}: correct "
                "`pages` in figures.json."
            )
    return text


def unlisted(text: str, page: str, figures: Figures) -> list[str]:
    """Returns figures, and numbers of tokens/s, outside of the phrases of a page."""
    for _, phrase in _phrases(page, figures):
        text = _pattern(phrase).sub(lambda m: f"{m[1]}#{m[3]}", text)
    plain = re.sub(r"\s+", " ", text)
    known = [f"{value(figures, name)} {figure['unit']}" for name, figure in figures.items()]
    # Too common to belong to one figure.
    known = [words for words in known if not words.endswith((" MB", " minutes", " times"))]
    found = [words for words in known if re.search(rf"(?<![\d.,]){re.escape(words)}\b", plain)]
    return found + re.findall(r"\d[\d,.]* tokens/s", plain)


def _phrases(page: str, figures: Figures) -> list[tuple[str, str]]:
    return [
        (name, phrase)
        for name, figure in figures.items()
        for phrase in figure.get("pages", {}).get(page, [])
    ]


def _pattern(phrase: str) -> re.Pattern[str]:
    before, after = (re.escape(part).replace(r"\ ", r"\s+") for part in phrase.split("#"))
    return re.compile(rf"({before})(\d[\d.,]*\d|\d)({after})")


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes figures into the text of the pages.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if it would")
    check, figures, stale = parser.parse_args().check, read(), []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text, name_of(page), figures)) != text:
            stale.append(name_of(page))
            if not check:
                page.write_text(new, encoding="utf-8")
    print(f"{', '.join(stale) or 'no page'}: {'other figures' if check else 'written'}")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
