"""Mixed widths: the choice of formats, and the divergences that it reads."""

import json

import numpy as np
import pytest
from model_files import write_tiny

from jaxlowbit import llm
from jaxlowbit._command import main
from jaxlowbit._llm import command
from jaxlowbit._llm import plan as llm_plan
from jaxlowbit._llm.sensitivity import Unit
from jaxlowbit.quantizers import mixed

TOKENS = np.random.default_rng(0).integers(3, 200, (4, 64))
LADDER = {"int2-g16": 1.0, "int3-g16": 0.6, "int4-g16": 0.1}  # 3, 4 and 5 bits
OTHER = {"int2-g16": 0.3, "int4-g16": 0.1}
SIZES = {"first": 100, "last": 100}
UNIT = Unit("down$", 100, {"int3-g32": 0.1})


def test_the_largest_gain_comes_first():
    errors = {"first": LADDER, "last": OTHER}
    # The hull of the first layer has no int3: a step of 2 bits gains more for each.
    assert mixed(errors, SIZES, 3.9).rules == {"first": "int2-g16", "last": "int2-g16"}
    plan = mixed(errors, SIZES, 4)
    assert plan.rules == {"first": "int4-g16", "last": "int2-g16"}
    assert plan.bits == 4 and plan.error == pytest.approx(0.4)
    assert str(plan).endswith("4.000 bits per weight, error 0.4")
    assert mixed(errors, SIZES, 8).rules == {"first": "int4-g16", "last": "int4-g16"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"first": LADDER}, {"first": 1}, 2), "bits is 2, but the smallest formats take 3 bits"),
        (({"first": LADDER}, SIZES, 4), "errors or sizes lack last"),
        (({"first": {}}, {"first": 1}, 4), "first has no format"),
        (({"first": {"int4": np.nan}}, {"first": 1}, 4), "error of first is nan in int4-g128"),
    ],
)
def test_wrong_errors(arguments, message):
    with pytest.raises(ValueError, match=f"mixed: .*{message}"):
        mixed(*arguments)


def test_plans_predict_the_divergence(tmp_path):
    path = write_tiny(tmp_path)
    options = {"calibration": TOKENS, "quantizer": "absmax", "formats": ["int2-g32", "int4-g32"]}
    plan = llm.plan(path, 3.5, **options)
    assert 3 < plan.bits <= 3.5 and set(plan.rules.values()) == {"int2-g32", "int4-g32"}
    loading = {"dtype": "float32", "progress": False}
    model = llm.load(path, rules=plan.rules, quantizer="absmax", **loading)
    reference = llm.load(path, **loading)
    tokens = TOKENS.reshape(-1).tolist()
    found = llm.perplexity(model, tokens, context=64, reference=reference)
    assert plan.error / 4 < (found.divergence or 0) < 4 * plan.error
    with pytest.raises(ValueError, match=r"plan: quantizer=.nothing. is unknown"):
        llm.plan(path, 3.5, calibration=TOKENS, quantizer="nothing")


def test_the_command_writes_rules_for_formats(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "keep_programs", lambda: None)
    monkeypatch.setattr(llm_plan, "sensitivities", lambda *_, **__: iter([UNIT]))
    path, text, target = write_tiny(tmp_path), tmp_path / "text", tmp_path / "plan.json"
    text.write_text("some words and others, " * 200)
    arguments = ["plan", str(path), "--bits", "3.5", "--calibration", str(text)]
    main([*arguments, "--output", str(target), "--formats", "int3-g32"])
    assert json.loads(target.read_text()) == {"down$": "int3-g32"}
    assert "3.500 bits per weight" in capsys.readouterr().out
    assert command.formats_of(str(target), [("head", None)]) == {
        "format": None,
        "rules": [("head", None), ("down$", "int3-g32")],
    }
    with pytest.raises(SystemExit):
        main([*arguments, "--output", str(target)])
    assert "pass --overwrite" in capsys.readouterr().err
    target.write_text('["int4"]')
    with pytest.raises(ValueError, match=r"plan.json is no JSON object with names of formats"):
        command.formats_of(str(target))
