"""Error bounds of combinations of weights, scales, zeros, activations and epilogues.

A sample runs on every machine, all of them on a GPU. `tools/run_combinations.py` runs all on
either, and writes the table of `docs/measurements/combinations.md`.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import combinations
import jax.numpy as jnp
import numpy as np
import pytest
import run_combinations
from combinations import (
    BITS,
    COMBINATIONS,
    DIMENSIONS,
    QUANTIZED,
    SIZE,
    WIDE_SCALES,
    Combination,
    accepted,
    check,
    claimed,
)
from helpers import PLATFORM

from jaxlowbit import Format, QuantizedActivations, quantized_glu

PARTS = 48  # shares of the combinations, for parallel processes
SAMPLE = COMBINATIONS[7::23]  # contains every value of each dimension except weights


def wrong(chosen: Iterable[Combination], *, but: str | None = None) -> list[str]:
    """Results outside the bound, on all backends that support these combinations except `but`."""
    lines = [
        run_combinations.line_of(combinations, combination, backend)
        for combination in chosen
        for backend in claimed(combination)
        if backend != but
    ]
    return [str(line) for line in lines if not run_combinations.right(line)]


@pytest.mark.parametrize("combination", SAMPLE, ids=lambda x: x.name)
def test_a_few(combination):
    """Without Pallas, which is slow when interpreted."""
    found = wrong([combination], but="pallas")
    assert not found, "\n".join(found)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_all(part):
    found = wrong(COMBINATIONS[part::PARTS])
    assert not found, "\n".join(found)


# --- the selection of combinations ----------------------------------------------------------------


def values_of(combination: Combination) -> dict[str, Any]:
    return {name: getattr(combination, name) for name in DIMENSIONS}


def test_every_pair_and_the_triples_are_there():
    missing = combinations.required()
    for combination in COMBINATIONS:
        values = values_of(combination)
        assert accepted(values)
        for part in combinations.covered(values):
            missing.pop(part, None)
    assert not missing
    assert len({x.name for x in COMBINATIONS}) == len(COMBINATIONS) >= 300


def test_a_small_sample_contains_every_value():
    weights, *others = DIMENSIONS
    for name in others:
        assert {values_of(x)[name] for x in SAMPLE} == {*DIMENSIONS[name]}, name
    assert len({x.weights for x in SAMPLE}) > 8, weights


def test_omitted_entries_raise():
    """Combinations are left out only if `Format` or gated quantized activations raise."""
    names = ("weights", "scales", "zero")
    for row in itertools.product(*(DIMENSIONS[name] for name in names)):
        values: dict[str, Any] = dict(zip(names, row, strict=True))
        numbers = tuple(map(float, range(2 ** BITS[values["weights"]])))
        codebook: Any = values["weights"]
        if codebook.startswith("int"):
            codebook = None
        elif codebook.startswith("table"):
            codebook = numbers
        scale = None if values["scales"] in WIDE_SCALES else values["scales"]
        try:
            Format(BITS[values["weights"]], 32, values["zero"], codebook, scale)
        except ValueError:
            assert not accepted(values), values
        else:
            assert accepted(values), values
    gated = next(x for x in COMBINATIONS if x.gated)
    pair: Any = combinations.operands(gated).rhs
    lhs: Any = QuantizedActivations(jnp.ones((1, pair.k), jnp.int8), jnp.ones((1, 1)))
    with pytest.raises(TypeError, match="quantized_glu: lhs is a QuantizedActivations"):
        quantized_glu(lhs, pair)
    assert not any(accepted({"epilogue": "gated", "lhs": lhs}) for lhs in QUANTIZED)


# --- the checks detect errors ---------------------------------------------------------------------


def test_a_wrong_element_is_found(monkeypatch):
    """Adds an error to one element of the product, of the weights and of the integer sums."""
    combination = next(x for x in COMBINATIONS if combinations.has_sums(x) and x.zero == "integer")
    jitted = combinations._jitted
    assert run_combinations.right(run_combinations.line_of(combinations, combination, PLATFORM))

    def doctored(product: Any, backend: str) -> Any:
        def multiply(*operands: Any, **options: Any) -> Any:
            return jitted(product, backend)(*operands, **options).at[-1, -1].add(SIZE)

        return multiply

    monkeypatch.setattr(combinations, "_jitted", doctored)
    found = check(combination, PLATFORM)
    assert found.error > 1 and found.weights >= 1 and found.sums == 1
    line = run_combinations.line_of(combinations, combination, PLATFORM)
    assert not run_combinations.right(line)


def test_an_error_is_a_line(monkeypatch):
    def refuse(*_: Any) -> Any:
        raise ValueError("no")

    monkeypatch.setattr(combinations, "check", refuse)
    line = run_combinations.line_of(combinations, SAMPLE[0], "xla")
    assert line["failed"] == "ValueError: no" and not run_combinations.right(line)


# --- the recorded results -------------------------------------------------------------------------


def test_the_page_has_the_table():
    """To update the page: python tools/run_combinations.py --table"""
    text = run_combinations.PAGE.read_text()
    assert run_combinations.filled(text, combinations, run_combinations.kept()) == text


def test_results_are_of_these_combinations():
    """To measure again after changes: python tools/run_combinations.py --out ..."""
    found = run_combinations.kept()
    assert found
    for results in found:
        names = {line["name"] for line in results.lines if line["backend"] == "xla"}
        assert names == {x.name for x in COMBINATIONS}, results.environment["device"]


def test_a_table():
    names = [x.name for x in COMBINATIONS if (x.weights, x.scales) == ("nf4", "float32")]
    errors = np.linspace(0.25, 0.5, len(names)).tolist()
    lines: list[Any] = [
        {"name": name, "backend": "xla", "error": error, "weights": 0, "sums": None}
        for name, error in zip(names, errors, strict=True)
    ]
    lines += [
        {**lines[0], "backend": "cuda", "weights": 3},
        {"name": names[0], "backend": "pallas", "failed": "ValueError: no"},
    ]
    about = {"device": "a device", "jax": "1", "jaxlowbit": "2", "date": "2026-01-01"}
    results = [run_combinations.Results(about, lines)]
    page = "a\n<!-- combinations -->\nold\n<!-- /combinations -->\nb\n"
    filled = run_combinations.filled(page, combinations, results)
    assert filled.startswith("a\n<!--") and filled.endswith("<!-- /combinations -->\nb\n")
    cells = f"0.25 of 1, 1 wrong | none of 1, 1 wrong | 0.5 of {len(names)} |"
    assert f"| nf4 | {cells}" in filled and f"| float32 | {cells}" in filled
    assert "old" not in filled
    assert "| cuda | 1 | 1 | 0.25 | 0 |\n| pallas | 1 | 1 | none | 0 |\n" in filled
    assert f"| xla | {len(names)} | 0 | 0.5 | 0 |" in filled
    assert run_combinations.filled(filled, combinations, results) == filled
