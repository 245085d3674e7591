"""`perplexity`: how well a model predicts a text."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from .._core import checks
from .language_model import LanguageModel, check_model
from .prompts import encoded, is_single

_CONTEXT = 512  # the default
_ROWS = 64  # logits of so many tokens exist at the same time


class Perplexity(NamedTuple):
    """How well a model predicts a text.

    - `perplexity`: `exp(loss)`, infinite beyond the range of a float.
    - `tokens`: the number of tokens that were predicted.
    - `context`: the tokens of a window.
    - `loss`: the mean negative log-likelihood of a token, by the natural logarithm.
    """

    perplexity: float
    tokens: int
    context: int
    loss: float


def perplexity(
    model: LanguageModel,
    text: str | Sequence[int],
    *,
    context: int | None = None,
    progress: bool = False,
) -> Perplexity:
    """Measures how well a model predicts a text: `exp(mean(-log p(token)))`.

    The text is cut into windows of `context` tokens. Each token of the text but the first is
    predicted once: by its own window, or, as the first of a window, by the one before. If the model
    begins texts with a special token (`bos`), each window begins with it, followed by `context - 1`
    tokens of the text; that token is never predicted.

    **Arguments:**

    - `model`: from `load` or `init`.
    - `text`: a text, or its tokens; windows begin with `bos` if these do.
    - `context`: the tokens of a window, at least 2 if each begins with `bos`; None for 512, or for
      the context of the model if that is shorter.
    - `progress`: whether to show a progress bar, which needs tqdm.

    **Returns:** a `Perplexity`.

    **Raises:** `TypeError` for arguments of other types; `ValueError` for a text of less than two
    tokens besides `bos`, tokens beyond the vocabulary, and a context larger than the model's.

    ```python
    model = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8)
    perplexity(model, [3, 1, 4, 1, 5, 9, 2, 6], context=4).perplexity
    ```
    """
    check_model("perplexity", model)
    checks.boolean("perplexity", "progress", progress)
    begin, tokens, context = windowed(model, text, context)
    step = context - len(begin)
    graph, weights = nnx.split(model.decoder)
    starts: Any = range(0, len(tokens) - 1, step)
    if progress:
        from tqdm import tqdm

        starts = tqdm(starts, unit="window", leave=False)
    total = 0.0
    for start in starts:
        window = np.concatenate([begin, tokens[start : start + step + 1]])
        padded = np.zeros(context + 1, np.int32)
        padded[: len(window)] = window
        bounds = np.int32(len(begin)), np.int32(len(window) - 1)
        total += float(_surprise(graph, weights, padded, *bounds))
    loss = total / (len(tokens) - 1)
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        perplexity = math.inf
    return Perplexity(perplexity, len(tokens) - 1, context, loss)


def windowed(model: Any, text: Any, context: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """The first tokens of each window, the tokens of the text after them, and the context.

    `model` may be the header of a file, to check arguments before weights are read.

    **Raises:** what `perplexity` raises for its text and its context.
    """
    most = model.config.context
    rule = f"the tokens of a window, an integer from 1 to {most}, or None"
    context = min(_CONTEXT, most) if context is None else context
    context = checks.integer("perplexity", "context", context, rule, most=most)
    if not is_single("perplexity", text):
        raise TypeError(
            "perplexity: text is a batch, but it is one text, or its tokens; join them."
        )
    tokens = np.asarray(encoded(model, text, "perplexity: the text"), np.int32)
    bos = getattr(model.tokenizer, "bos", None)
    begin = tokens[:1] if tokens[0] == bos else tokens[:0]
    tokens = tokens[len(begin) :]
    if len(tokens) < 2:
        raise ValueError(
            f"perplexity: the text is {len(tokens)} token, but the first is not predicted; pass a "
            "longer one."
        )
    if context == len(begin):
        raise ValueError(
            "perplexity: context is 1, but each window begins with the token that begins texts of "
            "this model; use 2 or more."
        )
    return begin, tokens, context


@functools.partial(jax.jit, static_argnums=0)
def _surprise(graph: Any, weights: Any, tokens: Array, skipped: Array, count: Array) -> Array:
    """The sum of -log p of the `count` tokens after the first of tokens (context + 1,), without
    the `skipped` first ones of these."""
    decoder = nnx.merge(graph, weights)
    context = len(tokens) - 1
    steps = jnp.arange(context, dtype=jnp.int32)
    positions = jnp.where(steps < count, steps, -1)
    scored = (steps >= skipped) & (steps < count)
    cache = decoder.make_cache(1, context)
    x, _ = decoder.forward(tokens[None, :-1], positions[None], cache)

    def of_row(row: tuple[Array, Array]) -> Array:
        features, target = row
        return -jax.nn.log_softmax(decoder.logits(features))[target]

    losses = lax.map(of_row, (x[0], tokens[1:]), batch_size=min(_ROWS, context))
    return jnp.where(scored, losses, 0).sum()
