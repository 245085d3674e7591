"""Tables of pages agree with `benchmarks/results/measurements/`."""

import figures
import measurements
import pytest

STUDIES = sorted(path.stem for path in measurements.FOLDER.glob("*.json"))


@pytest.mark.parametrize("page", figures.pages(), ids=figures.name_of)
def test_pages_have_the_tables(page):
    """To update the pages: python tools/measurements.py"""
    text = page.read_text()
    assert measurements.filled(text) == text


@pytest.mark.parametrize("study", STUDIES)
def test_tables_are_complete(study):
    for name in measurements.study(study):
        table = measurements.table(study, name)
        assert table["title"] and table["conditions"], name
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}, name
        assert table["title"] in measurements.markdown(table)


def test_every_study_has_a_page():
    text = "".join(page.read_text() for page in figures.pages())
    assert [study for study in STUDIES if f"<!-- table: {study}/" not in text] == []


def test_unknown_names_raise():
    with pytest.raises(ValueError, match="there is no study 'none'"):
        measurements.study("none")
    with pytest.raises(ValueError, match="has no table 'none'; name one of rate"):
        measurements.table("qmm_sm80", "none")
    decode = figures.value(figures.read(), "llama3-8b-decode")
    assert measurements.table("language_models", "gpu")["rows"][0][3] == decode
