"""Figures are stored once, in `benchmarks/results/figures.json`, and pages agree with it."""

import json
import re

import figures
import pytest
import report

FIGURES = figures.read()
PAGES = figures.pages()
USERS = [page for page in PAGES if page.parent.name in ("docs", figures.ROOT.name)]


@pytest.mark.parametrize("page", PAGES, ids=figures.name_of)
def test_pages_have_the_figures(page):
    """To update the pages: python tools/figures.py"""
    text = page.read_text()
    assert figures.filled(text, figures.name_of(page), FIGURES) == text
    assert "<!--=" not in text  # figures need no markers


@pytest.mark.parametrize("page", USERS, ids=figures.name_of)
def test_pages_list_their_figures(page):
    assert figures.unlisted(page.read_text(), figures.name_of(page), FIGURES) == []


def test_figures_are_used_and_have_a_source():
    names = {figures.name_of(page) for page in PAGES}
    keys = {"ratio": set(), "results": {"shape", "backend", "m"}}
    for name, figure in FIGURES.items():
        assert figure["pages"] and figure["pages"].keys() <= names, name
        kind = next((kind for kind in keys if kind in figure), None)
        wanted = keys[kind] | {kind} if kind else {"value", "device", "date", "command"}
        assert figure.keys() == wanted | {"unit", "pages"}, name


def test_a_page_is_filled():
    own = {
        "a": {"value": "2", "unit": "us", "pages": {"x.md": ["takes # us"]}},
        "b": {"value": "4", "unit": "us"},
        "c": {"ratio": ["b", "a"], "unit": "times", "pages": {"x.md": ["is # times"]}},
    }
    text = "It takes\n1,000 us and is 3 times"
    assert figures.filled(text, "x.md", own) == "It takes\n2 us and is 2.0 times"
    assert figures.filled(text, "y.md", own) == text
    assert figures.unlisted("It takes 2 us and is 2.0 times", "x.md", own) == []
    assert figures.unlisted("in 2\nus, 12 us, 4.2 us", "x.md", own) == ["2 us"]
    assert figures.unlisted("3.5 tokens/s", "x.md", own) == ["3.5 tokens/s"]
    with pytest.raises(ValueError, match="does not contain the phrase 'takes # us'"):
        figures.filled("nothing", "x.md", own)
    with pytest.raises(ValueError, match="there is no figure 'd'"):
        figures.value(own, "d")


def test_the_table_of_the_page_matches_its_results():
    """To update: python benchmarks/benchmark.py --read benchmarks/results/h200.json --shapes ..."""
    page = (figures.ROOT / "docs/benchmarks.md").read_text()
    table = page.partition(report.BEGIN)[2].partition(report.END)[0]
    rows = re.findall(r"^\| (\d+x\d+) \| (\d+) \| .*$", table, re.MULTILINE)
    results = json.loads((figures.RESULTS / "h200.json").read_text())
    shapes = {shape for shape, _ in rows}
    kept = [row for row in results["rows"] if row["shape"] in shapes]
    assert table.strip() == report.markdown({**results, "rows": kept}).strip()
