"""`jaxlowbit.llm.perplexity`: windows, the initial token, and limits of ranges."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from decoders import LLAMA, floats, reference
from language_models import LONG, PROMPT, Letters, model, weights

from jaxlowbit.llm import Decoder, LanguageModel, perplexity


@pytest.mark.parametrize("context", [5, 16, 64])
def test_perplexity_matches_a_plain_program(context):
    """Each token except the first is predicted once, within its window."""
    tokens, surprise = LONG, []
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context + 1]
        rows = reference(LLAMA, floats(weights("llama")), window[:-1])
        rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
        surprise += [-row[token] for row, token in zip(rows, window[1:], strict=True)]
    found = perplexity(model(), tokens, context=context)
    assert found.tokens == len(surprise) == len(tokens) - 1
    assert found.perplexity == pytest.approx(np.exp(np.mean(surprise)), rel=1e-5)
    assert found.loss == pytest.approx(np.mean(surprise), rel=1e-5)


def test_the_default_context_fits_the_model():
    assert perplexity(model(), LONG[:4]).context == LLAMA.context < 512


def test_texts_without_a_perplexity_raise():
    for tokens, context, sentence in (
        ([], 4, "perplexity: the text is empty"),
        ([3], 4, "1 token, but the first is not predicted"),
        ([3, 999], 4, "perplexity: the text has token 999"),
        ([3, 4], 0, "context is 0"),
        ([3, 4], 257, "1 to 256"),
    ):
        with pytest.raises(ValueError, match=sentence):
            perplexity(model(), tokens, context=context)


class Beginning(Letters):
    """A tokenizer that puts a token before each text."""

    bos = 2

    def encode(self, text, *, bos=None):
        return [2, *super().encode(text)]


@pytest.mark.parametrize("context", [2, 5, 64])
def test_each_window_begins_as_texts_do(context):
    """The windows cover the text; each token except the first is predicted once."""
    one = dataclasses.replace(model(), tokenizer=Beginning())
    text, surprise = "a text of some words.", []
    tokens = list(text.encode())
    for start in range(0, len(tokens) - 1, context - 1):
        window = [2, *tokens[start : start + context]]
        rows = reference(LLAMA, floats(weights("llama")), window[:-1])
        rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
        surprise += [-row[token] for row, token in zip(rows[1:], window[2:], strict=True)]
    found = perplexity(one, text, context=context)
    assert found.tokens == len(surprise) == len(tokens) - 1
    assert found.loss == pytest.approx(np.mean(surprise), rel=1e-5)
    assert perplexity(one, [2, *tokens], context=context) == found
    # Windows have no initial token if the tokens or the model have none.
    plain = perplexity(model(), text, context=context)
    assert plain.loss != found.loss
    assert perplexity(one, tokens, context=context) == plain
    with pytest.raises(ValueError, match="context is 1, but each window begins"):
        perplexity(one, text, context=1)
    with pytest.raises(ValueError, match="the text is 1 token"):
        perplexity(one, [2, 3], context=context)


def test_a_loss_beyond_the_range_of_exp_is_reported():
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in floats(weights("llama")).items()}
    arrays["head"] = arrays["head"] * 1e6
    found = perplexity(LanguageModel(Decoder(LLAMA, arrays, dtype=jnp.float32)), PROMPT, context=16)
    assert found.perplexity == math.inf and 1000 < found.loss < math.inf
