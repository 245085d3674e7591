"""Models as models of lm-eval: likelihoods, generation, scores of tasks."""

import importlib.machinery
import importlib.util
import json
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_files import write_tiny

from jaxlowbit import llm
from jaxlowbit._command import main
from jaxlowbit._llm import command, harness

QUESTIONS = [
    {"question": "hello w", "choices": ["hello", " worlds"], "answer": 1},
    {"question": "", "choices": ["aa", "b"], "answer": 0},
]
TASK = """task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(tiny):
    return llm.load(tiny, dtype="float32", progress=False)


class LM:
    """Like `lm_eval.api.model.LM`, without the rest of the package."""

    def __init__(self):
        self.made = True


def accuracy(model: Any) -> float:
    """The accuracy on `QUESTIONS`, as lm-eval computes it."""
    right = []
    for question in QUESTIONS:
        pairs = [(question["question"], choice) for choice in question["choices"]]
        found = model.loglikelihood([types.SimpleNamespace(args=pair) for pair in pairs])
        right.append(np.argmax([score for score, _ in found]) == question["answer"])
    return float(np.mean(right))


@pytest.fixture
def stub(monkeypatch):
    def simple_evaluate(model, tasks, **options):
        assert isinstance(model, LM) and options["limit"] == 2
        scores = {"alias": tasks[0], "acc,none": accuracy(model), "acc_stderr,none": 0.25}
        return {"results": {tasks[0]: scores}}

    manager = types.SimpleNamespace(TaskManager=lambda include_path: include_path)
    parts = {"lm_eval.api": {}, "lm_eval.api.model": {"LM": LM}, "lm_eval.tasks": vars(manager)}
    for name, entries in ({"lm_eval": {"simple_evaluate": simple_evaluate}} | parts).items():
        found: Any = types.ModuleType(name)
        found.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(found).update(entries)
        monkeypatch.setitem(sys.modules, name, found)
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, found)


def request(*args: Any) -> Any:
    return types.SimpleNamespace(args=args)


def test_likelihoods_are_those_of_the_decoder(stub, model):
    made = harness.harness_model(model)
    assert made.made
    (score, greedy), (best, most) = made.loglikelihood(
        [request("hello w ", "orld"), request("hello", continuation := best_of(model, "hello"))]
    )
    tokens = model.tokenizer.encode("hello w orld")
    before = len(model.tokenizer.encode("hello w"))
    logits = jax.jit(lambda tokens: model.decoder(tokens))(jnp.asarray([tokens[:-1]]))[0]
    found = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(tokens) - 1), tokens[1:]]
    assert score == pytest.approx(found[before - 1 :].sum(), rel=1e-4) and not greedy
    assert most and continuation and best < 0
    (rolling,) = made.loglikelihood_rolling([request("hello w orld")])
    assert rolling == pytest.approx(found.sum(), rel=1e-4)
    options = {"until": ["\n\n"], "max_gen_toks": 3, "do_sample": False}
    (text,) = made.generate_until([request("hello", options)])
    assert text == llm.generate(model, "hello", max_new_tokens=3, stop=["\n\n"]).text
    with pytest.raises(ValueError, match=r"the task sets \['num_beams'\] for generation"):
        made.generate_until([request("hello", {"num_beams": 2})])


def best_of(model: Any, text: str) -> str:
    """The greedy next token."""
    return llm.generate(model, text, max_new_tokens=1).text or ""


def test_the_command_prints_accuracies(stub, tiny, model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "keep_programs", lambda: None)
    text = tmp_path / "text"
    text.write_text("some words and others")
    arguments = ["evaluate", str(tiny), "--text", str(text), "--context", "16", "--json"]
    main([*arguments, "--tasks", "tiny_choice", "--limit", "2", "--dtype", "float32"])
    *lines, last = capsys.readouterr().out.splitlines()
    wanted = accuracy(harness.harness_model(model))
    assert lines[-1] == f"  tiny_choice: acc {wanted:.4f} +- 0.2500"
    scores = {"task": "tiny_choice", "metric": "acc", "value": wanted, "error": 0.25}
    assert json.loads(last)[0]["scores"] == [scores]


def test_the_real_package_accepts_the_model(model, tmp_path, monkeypatch):
    evaluator = pytest.importorskip("lm_eval.evaluator", reason="lm-eval is not installed")
    # It imports transformers, whose name a module of these tests has.
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)
    data = tmp_path / "questions.json"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "tiny_choice.yaml").write_text(TASK.replace("FILE", str(data)))
    (score,) = harness.evaluate_tasks(model, ["tiny_choice"], folder=str(tmp_path))
    assert score[:2] == ("tiny_choice", "acc")
    assert score.value == accuracy(harness.harness_model(model))


def test_without_the_package(model, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "lm_eval" else find(name)
    )
    with pytest.raises(ModuleNotFoundError, match=r'pip install "jaxlowbit\[llm-eval\]"'):
        harness.harness_model(model)
    bare = llm.init(llm.Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), None)
    with pytest.raises(ValueError, match="harness_model: the model has no tokenizer"):
        harness.harness_model(bare)
