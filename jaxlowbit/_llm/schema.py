"""Replies that match a JSON schema: llguidance computes the allowed next tokens.

Source: https://github.com/guidance-ai/llguidance, `docs/json_schema.md`.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._core import checks
from .._requirements import require_extra


def _package() -> Any:
    require_extra("llm-json", "llguidance")
    import llguidance  # pyright: ignore[reportMissingImports]

    return llguidance


class Schema:
    """A JSON schema for the tokens of a model."""

    def __init__(self, tokenizer: Any, grammar: str, caller: str):
        self._tokenizer, self._grammar, self._caller = tokenizer, grammar, caller

    @classmethod
    def of(cls, caller: str, model: Any, schema: Any) -> "Schema":
        """Checks a schema; `model` is a `LanguageModel` or a `Header`.

        **Raises:** `TypeError` for an object that is no mapping; `ValueError` for a schema that
        llguidance does not support and a model without a tokenizer or tokens that end texts;
        `ModuleNotFoundError` without llguidance.
        """
        if not isinstance(schema, Mapping):
            raise TypeError(
                f"{caller}: schema is {checks.brief(schema)}, but it must be a mapping, a JSON "
                "schema "
                'such as {"type": "object", "properties": {...}}.'
            )
        if not hasattr(model.tokenizer, "token_bytes"):
            raise ValueError(
                f"{caller}: schema needs the tokenizer of a loaded model, which knows the bytes of "
                f"each token, but this is {checks.brief(model.tokenizer)}."
            )
        if not model.config.eos:
            raise ValueError(f"{caller}: schema needs a token that ends texts, but eos is empty.")
        matcher = _package().LLMatcher
        tokenizer = _tokenizer(model.tokenizer, model.config.vocabulary, model.config.eos)
        grammar, error = "", ""
        try:
            grammar = matcher.grammar_from_json_schema(json.dumps(dict(schema)))
            error = matcher.validate_grammar(grammar, tokenizer)
        except (TypeError, ValueError) as raised:  # for values that JSON lacks
            error = str(raised)
        if error:
            text = " ".join(error.split())
            raise ValueError(
                f"{caller}: llguidance does not support the schema: {text}; change it."
            )
        return cls(tokenizer, grammar, caller)

    def masks(self, batch: int) -> "Masks":
        """The masks of `batch` sequences, before their first tokens."""
        matcher = _package().LLMatcher
        found = [matcher(self._tokenizer, self._grammar) for _ in range(batch)]
        return Masks(found, self._caller)


class Masks:
    """The allowed next tokens of each sequence of a batch."""

    def __init__(self, matchers: list[Any], caller: str):
        self._matchers: list[Any] = matchers
        self._caller = caller

    def apply(self, logits: Array) -> Array:
        """The logits (batch, vocabulary) with -inf for tokens that are not allowed.

        For sequences that have ended, all tokens are allowed.
        """
        words: list[Any] = [
            None if matcher is None else np.frombuffer(matcher.compute_bitmask(), np.uint32)
            for matcher in self._matchers
        ]
        size = next((len(row) for row in words if row is not None), 1)
        every = np.full(size, 2**32 - 1, np.uint32)
        return _masked(logits, np.stack([every if row is None else row for row in words]))

    def add(self, tokens: np.ndarray) -> None:
        """Adds the next token of each sequence (batch,); negative ones end it.

        **Raises:** `ValueError` if a reply is too complex for llguidance.
        """
        for i, (matcher, token) in enumerate(zip(self._matchers, tokens.tolist(), strict=True)):
            if matcher is None or token < 0:
                self._matchers[i] = None
            elif not matcher.consume_token(token):
                text = " ".join(matcher.get_error().split())
                raise ValueError(f"{self._caller}: llguidance cannot follow the reply: {text}")


@functools.partial(jax.jit, donate_argnums=0)
def _masked(logits: Array, words: Array) -> Array:
    """Logits (batch, n) of the tokens whose bits are set in words (batch, words), else -inf."""
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    bits = bits.reshape(len(words), -1)[:, : logits.shape[-1]]
    missing = logits.shape[-1] - bits.shape[-1]
    allowed = jnp.pad(bits, ((0, 0), (0, missing))) > 0
    return jnp.where(allowed, logits, -jnp.inf)


class _Vocabulary:
    """A tokenizer with the interface that llguidance needs."""

    def __init__(self, tokenizer: Any, count: int, eos: tuple[int, ...]):
        pieces = tokenizer.token_bytes()[:count]
        self.tokens = pieces + [b""] * (count - len(pieces))
        self.eos_token_id, self.bos_token_id = eos[0], tokenizer.bos
        self.special_token_ids = sorted({*eos, *tokenizer.control})
        self._encode = tokenizer.encode

    def __call__(self, text: Any) -> list[int]:
        text = text if isinstance(text, str) else text.decode(errors="replace")
        return self._encode(text, bos=False, special=False)


@functools.lru_cache(maxsize=4)
def _tokenizer(tokenizer: Any, count: int, eos: tuple[int, ...]) -> Any:
    llguidance = _package()
    wrapped = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, count, eos))
    return llguidance.LLTokenizer(wrapped, n_vocab=count, eos_token=list(eos))
