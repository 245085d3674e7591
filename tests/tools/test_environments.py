"""Tables of README.md and docs/install.md: CI runs each row or lists it as not run."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = (ROOT / ".ci/run").read_text()
LISTED = tomllib.loads((ROOT / ".ci/environments.toml").read_text())
ENVIRONMENTS, OTHERS = LISTED["environments"], LISTED["others"]


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the last table below a heading, without its header."""
    section = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()]
    rows = [row for row in rows if row]
    return rows[max(i for i, row in enumerate(rows) if set(row[0]) == {"-"}) + 1 :]


def minors(text: str) -> list[str]:
    """ "3.11 to 3.13" and "3.11, 3.12" as minor versions."""
    found = re.findall(r"(\d+)\.(\d+)", text)
    numbers = [int(minor) for _, minor in found]
    if " to " in text:
        numbers = list(range(numbers[0], numbers[-1] + 1))
    return [f"{found[0][0]}.{number}" for number in numbers]


PYTHONS, JAXES, *REST = table("docs/install.md", "What goes together")
NEWEST = JAXES[2].rpartition(", ")[2]
OFFERED = {
    (python, jax.replace("newest", NEWEST).rpartition(".")[0])
    for python, jax in ((row["python"], row["jax"]) for row in ENVIRONMENTS)
}


def test_the_readme_shows_the_listed_environments():
    rows = table("README.md", "Install")
    offered = {(p, j) for row in rows for p in minors(row[0]) for j in minors(row[1])}
    assert offered == OFFERED


def test_the_page_shows_the_listed_commands():
    assert minors(PYTHONS[2]) == sorted({row["python"] for row in ENVIRONMENTS})
    versions = {row["jax"].replace("newest", NEWEST) for row in ENVIRONMENTS}
    assert JAXES[2].split(", ") == sorted(versions)
    for name, _, run in REST:
        versions = {
            version
            for row in OTHERS
            if re.match(rf"{row['name']}\b", name)
            for version in row["versions"]
        }
        assert versions == set(re.findall(r"\d+\.[\d.]*\d|x86_64|aarch64", run)), name


def test_steps_match_ci():
    (steps,) = re.findall(r"^ +set -- (lint .*)$", RUN, re.MULTILINE)
    for row in [*ENVIRONMENTS, *OTHERS]:
        assert row["step"] in ("", *steps.split()), row
        assert not row["step"] or re.search(rf"^{row['step']}\(\)", RUN, re.MULTILINE)
    run = {row["step"] for row in ENVIRONMENTS}
    assert run == {"", "kernels", "newest", "readme", "wheel"}


def test_each_python_and_each_jax_is_run():
    for name in ("python", "jax"):
        assert all(
            any(row["step"] for row in ENVIRONMENTS if row[name] == value)
            for value in {row[name] for row in ENVIRONMENTS}
        )
