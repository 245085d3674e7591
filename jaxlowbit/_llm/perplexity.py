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

_ROWS = 64  # whose logits exist at the same time


class Perplexity(NamedTuple):
    """The exponential of the mean negative log-likelihood, and of how many tokens it is."""

    perplexity: float
    tokens: int
    context: int


def perplexity(
    model: LanguageModel,
    text: str | Sequence[int],
    *,
    context: int = 512,
    progress: bool = False,
) -> Perplexity:
    """Measures how well a model predicts a text: `exp(mean(-log p(token)))`.

    The text is cut into windows of `context` tokens. Each token but the first is predicted once,
    from those of its window that come before it and from the last of the window before.

    **Arguments:**

    - `model`: from `load` or `init`.
    - `text`: a text, or its tokens.
    - `context`: the tokens that a window holds.
    - `progress`: whether to show a progress bar, which needs tqdm.

    **Returns:** a `Perplexity`.

    **Raises:** `TypeError` for arguments of other types, `ValueError` for a text of less than two
    tokens, tokens that the vocabulary has not, and a context that the model has not.

    ```python
    model = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8)
    perplexity(model, [3, 1, 4, 1, 5, 9, 2, 6], context=4).perplexity
    ```
    """
    check_model("perplexity", model)
    rule = f"the tokens of a window, an integer from 1 to {model.config.context}"
    checks.integer("perplexity", "context", context, rule, most=model.config.context)
    checks.boolean("perplexity", "progress", progress)
    if not is_single("perplexity", text):
        raise TypeError(
            "perplexity: text is a batch, but it is one text, or its tokens; join them."
        )
    tokens = np.asarray(encoded(model, text, "perplexity: the text"), np.int32)
    if len(tokens) < 2:
        raise ValueError("perplexity: the text is one token, but the first is not predicted.")
    graph, weights = nnx.split(model.decoder)
    starts: Any = range(0, len(tokens) - 1, context)
    if progress:
        from tqdm import tqdm

        starts = tqdm(starts, unit="window", leave=False)
    total = 0.0
    for start in starts:
        window = tokens[start : start + context + 1]
        padded = np.zeros(context + 1, np.int32)
        padded[: len(window)] = window
        total += float(_surprise(graph, weights, padded, np.int32(len(window) - 1)))
    return Perplexity(math.exp(total / (len(tokens) - 1)), len(tokens) - 1, context)


@functools.partial(jax.jit, static_argnums=0)
def _surprise(graph: Any, weights: Any, tokens: Array, count: Array) -> Array:
    """The sum of -log p of the `count` tokens after the first of tokens (context + 1,)."""
    decoder = nnx.merge(graph, weights)
    context = len(tokens) - 1
    steps = jnp.arange(context, dtype=jnp.int32)
    positions = jnp.where(steps < count, steps, -1)
    cache = decoder.make_cache(1, context)
    x, _ = decoder.forward(tokens[None, :-1], positions[None], cache)

    def of_row(row: tuple[Array, Array]) -> Array:
        features, target = row
        return -jax.nn.log_softmax(decoder.logits(features))[target]

    losses = lax.map(of_row, (x[0], tokens[1:]), batch_size=min(_ROWS, context))
    return jnp.where(positions >= 0, losses, 0).sum()
