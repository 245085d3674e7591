"""Language models with calibrated quantizers: errors of outputs, folded factors, resuming."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_files import write_tiny

from jaxlowbit import llm
from jaxlowbit._command import main
from jaxlowbit._llm import command
from jaxlowbit.llm import perplexity
from jaxlowbit.quantizers import Calibration, distill, gptq

TOKENS = np.random.default_rng(0).integers(3, 200, (4, 64))
RULES = {"embedding|head": None}
STEPS = 16


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """The default takes several times as long."""
    monkeypatch.setattr(distill, "Options", functools.partial(distill.Options, steps=STEPS))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def loaded(path, format="int3-g32", **options):
    return llm.load(path, format=format, rules=RULES, progress=False, dtype="float32", **options)


@functools.cache
def logits(path, quantizer=None, format="int3-g32", calibration=True):
    given = {"quantizer": quantizer, "calibration": TOKENS if calibration else None}
    model = loaded(path, format, **given) if format else llm.load(path, dtype="float32")
    return np.asarray(model.decoder(jnp.asarray(TOKENS[:2, :32])))


def test_calibrated_models_are_nearer_to_the_floats(tiny):
    wanted = logits(tiny, format=None)
    errors = {
        name: np.linalg.norm(logits(tiny, name, calibration=name != "absmax") - wanted)
        for name in ("absmax", "gptq", "distill")
    }
    assert errors["gptq"] < 0.8 * errors["absmax"]
    assert errors["distill"] < 0.9 * errors["gptq"]


def test_factors_of_inputs_are_folded_without_a_change(tiny):
    """With 8 bits, folding factors into norms and matrices keeps the logits."""
    wanted = logits(tiny, format=None)
    found = logits(tiny, "smoothquant", "int8")
    model = loaded(tiny, "int8", quantizer="smoothquant", calibration=TOKENS)
    norm, folded = (x.decoder.blocks[0].mlp_norm for x in (llm.load(tiny, dtype="float32"), model))
    assert norm is not None and folded is not None
    assert not np.allclose(norm.get_value(), folded.get_value())
    assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


def test_interrupted_calibration_resumes(tiny, tmp_path):
    options = {"quantizer": "awq+distill", "calibration": Calibration(TOKENS, folder=tmp_path)}
    first = loaded(tiny, **options)
    (tmp_path / "layers.1.npz").unlink()
    again = loaded(tiny, **options)
    for found, wanted in zip(*(jax.tree.leaves(x.decoder) for x in (again, first)), strict=True):
        np.testing.assert_array_equal(found, wanted)
    with pytest.raises(ValueError, match=r"load: the folder .* \(quantizer differ\)"):
        loaded(tiny, quantizer="awq", calibration=options["calibration"])


WRONG = {
    r"load: the quantizer 'gptq' needs statistics": {"quantizer": "gptq"},
    r"load: calibration is given, but the quantizer 'hqq' reads": {
        "quantizer": "hqq",
        "calibration": TOKENS,
    },
    r"load: the calibration has token 900, but": {"calibration": TOKENS + 900 - TOKENS.max()},
    r"load: the text of the calibration has \d+ tokens, but a window": {"calibration": "short"},
    r"load: the batches of the calibration are": {"calibration": [[0.5, 1.0]]},
    r"load: calibration has 20 rows of inputs for layers.0.q": {"calibration": TOKENS[:1, :20]},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_calibrations(tiny, message):
    with pytest.raises((TypeError, ValueError, UserWarning), match=message):
        loaded(tiny, **{"quantizer": gptq.quantize} | WRONG[message])


def test_divergence_and_stride(tiny):
    model, reference = load_pair(tiny)
    tokens = TOKENS[0].tolist()
    same = perplexity(reference, tokens, context=32, reference=reference)
    assert same.divergence == pytest.approx(0, abs=1e-7)
    found = perplexity(model, tokens, context=32, stride=8, reference=reference)
    assert found.divergence is not None and found.divergence > 1e-7
    assert found.tokens == same.tokens == len(tokens) - 1
    # Windows that begin a token later each predict all tokens before as the decoder does.
    logits = reference.decoder(jnp.asarray([tokens[:-1]]))[0]
    plain = -jax.nn.log_softmax(logits)[jnp.arange(len(tokens) - 1), jnp.asarray(tokens[1:])]
    whole = perplexity(reference, tokens, context=len(tokens) - 1, stride=1)
    assert whole.loss == pytest.approx(float(plain.mean()), rel=1e-4)
    with pytest.raises(
        ValueError,
        match=r"stride is 33, but it must be tokens between .* from 1 "
        r"to 32",
    ):
        perplexity(model, tokens, context=32, stride=33)


def test_the_command_compares_formats(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "keep_programs", lambda: None)
    text = tmp_path / "text"
    text.write_text("some words and others, " * 20)
    arguments = ["evaluate", str(tiny), "--text", str(text), "--tokens", "40", "--context", "16"]
    arguments += ["--keep", "embedding|head", "--dtype", "float32", "--json"]
    main([*arguments, "--formats", "int3-g32", "--quantizers", "absmax"])
    *table, last = capsys.readouterr().out.splitlines()
    stored, found = json.loads(last)
    assert table[1].startswith("as stored") and table[2].startswith("int3-g32 ")
    assert stored["divergence"] < 1e-7 < found["divergence"] and found["bits"] < stored["bits"]
    with pytest.raises(SystemExit):
        main([*arguments, "--formats", "int3", "--quantizers", "gptq"])
    assert "--quantizer gptq needs inputs; pass --calibration" in capsys.readouterr().err


def load_pair(path):
    return loaded(path, quantizer="absmax"), llm.load(path, dtype="float32")
