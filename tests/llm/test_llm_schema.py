"""Replies by a JSON schema, with llguidance and with a stub in its place."""

import functools
import importlib.machinery
import json
import sys
import types
from typing import Any

import numpy as np
import pytest
from language_models import Letters
from model_files import write_tiny

from jaxlowbit import llm
from jaxlowbit._command import main
from jaxlowbit._llm import schema as schemas

EOS = 10
TEXT = b"{}"  # the only reply of the stub


class Matcher:
    """Takes the bytes of TEXT, then EOS."""

    def __init__(self, tokenizer: Any, grammar: str):
        self.at, self.count = 0, tokenizer

    @staticmethod
    def grammar_from_json_schema(text: str) -> str:
        return text

    @staticmethod
    def validate_grammar(text: str, tokenizer: Any) -> str:
        return "a bad\n schema" if "bad" in json.loads(text) else ""

    def next(self) -> int:
        return [*TEXT, EOS][self.at]

    def compute_bitmask(self) -> bytes:
        words = np.zeros(self.count // 32, np.uint32)
        words[self.next() // 32] = 1 << (self.next() % 32)
        return words.tobytes()

    def consume_token(self, token: int) -> bool:
        good = token == self.next() and token != self.get_error.__dict__.get("token")
        self.at += 1
        return good

    def get_error(self) -> str:
        return "too\n complex"


class Bytes(Letters):
    bos, control = None, frozenset({EOS})

    def token_bytes(self):
        return [bytes([i]) for i in range(256)]


@pytest.fixture
def stub(monkeypatch):
    found: Any = types.ModuleType("llguidance")
    found.__spec__ = importlib.machinery.ModuleSpec("llguidance", None)
    found.LLMatcher = Matcher
    found.TokenizerWrapper = lambda vocabulary: len(vocabulary.tokens)
    found.LLTokenizer = lambda count, n_vocab, eos_token: count
    monkeypatch.setitem(sys.modules, "llguidance", found)
    schemas._tokenizer.cache_clear()
    yield found
    schemas._tokenizer.cache_clear()


@functools.cache
def small(tokenizer: Any = Bytes) -> llm.LanguageModel:
    config = llm.Config("llama", 1, 64, 2, 1, 32, 128, 256, 64, eos=(EOS,))
    return llm.LanguageModel(llm.init(config, "int8").decoder, tokenizer())


def test_only_allowed_tokens_are_sampled(stub):
    found = llm.generate(small(), [[3, 1, 4], [1, 5]], schema={}, max_new_tokens=3)
    assert [(x.text, x.finish) for x in found] == [("{}", "eos")] * 2
    found = llm.generate(small(), [[3, 1, 4], [1, 5]], schema={}, max_new_tokens=1)
    assert [(x.text, x.finish) for x in found] == [("{", "length")] * 2


@pytest.mark.parametrize(
    ("schema", "tokenizer", "error", "match"),
    [
        ([], Bytes, TypeError, "generate: schema is .*a JSON schema"),
        (
            {"bad": 1},
            Bytes,
            ValueError,
            "does not support the schema: a bad schema; change it",
        ),
        ({"default": {1}}, Bytes, ValueError, "not JSON serializable"),
        ({}, Letters, ValueError, "needs the tokenizer of a loaded model"),
    ],
)
def test_wrong_schemas(schema, tokenizer, error, match, stub):
    with pytest.raises(error, match=match):
        llm.generate(small(tokenizer), [3, 1], schema=schema)


def test_replies_beyond_llguidance_raise(stub, monkeypatch):
    monkeypatch.setattr(Matcher, "consume_token", lambda self, token: False)
    with pytest.raises(ValueError, match=r"generate: llguidance cannot follow .*: too complex"):
        llm.generate(small(), [[3, 1, 4], [1, 5]], schema={}, max_new_tokens=3)


def test_a_missing_package_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "llguidance" else object()
    )
    with pytest.raises(ModuleNotFoundError, match=r'pip install "jaxlowbit\[llm-json\]"'):
        llm.generate(small(), [3, 1], schema={})


def test_json_of_llguidance(tmp_path, capsys):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    number = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"a": number}, "required": ["a"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    path = str(write_tiny(tmp_path))
    arguments = ["--raw", "--prompt", "a", "--schema", str(tmp_path / "schema.json"), "--json"]
    main(["generate", path, *arguments])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["finish"] == "eos" and 0 <= json.loads(found["text"])["a"] <= 9
    (tmp_path / "schema.json").write_text("[]")
    with pytest.raises(SystemExit):
        main(["generate", path, *arguments])
    assert "is no object in JSON" in capsys.readouterr().err
