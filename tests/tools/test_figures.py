"""Every figure stands once, in `benchmarks/results/figures.json`, and the pages agree with it."""

import json
import re

import figures
import pytest
import report

FIGURES = figures.read()
PAGES = figures.pages()
USERS = [page for page in PAGES if page.parent.name in ("docs", figures.ROOT.name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(figures.ROOT)))
def test_pages_have_the_figures(page):
    """If not: python tools/figures.py"""
    text = page.read_text()
    assert figures.filled(text, FIGURES) == text
    # Markdown ends a paragraph there.
    assert not re.findall(r"^\s*<!--=.*", text, re.MULTILINE)


@pytest.mark.parametrize("page", USERS, ids=lambda page: str(page.relative_to(figures.ROOT)))
def test_pages_name_the_figures_that_they_have(page):
    assert figures.unnamed(page.read_text(), FIGURES) == []


def test_figures_are_used_and_say_where_they_are_from():
    used = set().union(*(figures.named(page.read_text()) for page in PAGES))
    assert used == FIGURES.keys()
    for name, figure in FIGURES.items():
        keys = {"ratio": set(), "results": {"shape", "backend", "m"}}
        kind = next((kind for kind in keys if kind in figure), None)
        wanted = keys[kind] | {kind} if kind else {"value", "device", "date", "command"}
        assert figure.keys() == wanted | {"unit"}, name


def test_a_page_is_filled():
    own = {"a": {"value": "2", "unit": "us"}, "b": {"value": "4", "unit": "us"}}
    own["c"] = {"ratio": ["b", "a"], "unit": "times"}  # pyright: ignore
    text = "<!--=a-->1<!--/--> us, <!--=c-->?<!--/--> times"
    assert figures.filled(text, own) == "<!--=a-->2<!--/--> us, <!--=c-->2.0<!--/--> times"
    assert figures.unnamed("in 2\nus, 12 us, 4.2 us", own) == ["2 us"]
    assert figures.unnamed("<!--=a-->2<!--/--> us and 3.5 tokens/s", own) == ["3.5 tokens/s"]
    with pytest.raises(ValueError, match="there is no figure 'd'"):
        figures.filled("<!--=d-->1<!--/-->", own)


def test_the_table_of_the_page_is_that_of_its_results():
    """If not: python benchmarks/benchmark.py --read benchmarks/results/h200.json --shapes ..."""
    page = (figures.ROOT / "docs/benchmarks.md").read_text()
    table = page.partition(report.BEGIN)[2].partition(report.END)[0]
    rows = re.findall(r"^\| (\d+x\d+) \| (\d+) \| .*$", table, re.MULTILINE)
    results = json.loads((figures.RESULTS / "h200.json").read_text())
    shapes = {shape for shape, _ in rows}
    kept = [row for row in results["rows"] if row["shape"] in shapes]
    assert table.strip() == report.markdown({**results, "rows": kept}).strip()
