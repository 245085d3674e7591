"""`perplexity`: how well a model predicts a text."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._core import checks
from .language_model import LanguageModel, check_model
from .prompts import encoded, is_single
from .structure import Structure, split

_CONTEXT = 512  # the default
_ROWS = 64  # maximum number of tokens whose logits exist at the same time


class Perplexity(NamedTuple):
    """The result of `perplexity`.

    - `perplexity`: `exp(loss)`, infinite beyond the range of a float.
    - `tokens`: the number of predicted tokens.
    - `context`: the number of tokens of a window.
    - `loss`: the mean negative natural log-likelihood per token.
    - `divergence`: None without a reference; else the mean Kullback-Leibler divergence of each
      token's distribution from the reference's, in nats.
    """

    perplexity: float
    tokens: int
    context: int
    loss: float
    divergence: float | None = None


def perplexity(
    model: LanguageModel,
    text: str | Sequence[int],
    *,
    context: int | None = None,
    stride: int | None = None,
    reference: LanguageModel | None = None,
    progress: bool = False,
) -> Perplexity:
    """Measures how well a model predicts a text: `exp(mean(-log p(token)))`.

    The text is split into windows of `context` tokens. Each token of the text except the first is
    predicted once: in its window or, if it is the first of a window, in the previous one. If the
    model begins texts with a special token (`bos`), each window begins with it, followed by
    `context - 1` tokens of the text; that token is never predicted.

    **Arguments:**

    - `model`: from `load` or `init`.
    - `text`: a string, or its tokens; windows begin with `bos` if the tokens do.
    - `context`: the number of tokens of a window, at least 2 if windows begin with `bos`; None for
      512, or the context of the model if that is shorter.
    - `stride`: the distance between the starts of windows in tokens, up to `context`; None for
      windows that do not overlap. With a smaller stride, each token is predicted from more previous
      tokens, and a text takes more windows.
    - `reference`: None, or a model with the same tokens, such as one with float weights, for
      `divergence`.
    - `progress`: whether to show a progress bar, which needs tqdm.

    **Returns:** a `Perplexity`.

    **Raises:** `TypeError` for arguments of other types; `ValueError` for a text of fewer than two
    tokens besides `bos`, tokens outside the vocabulary, a context larger than the model's, and a
    reference with another vocabulary.

    ```python
    model = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8)
    perplexity(model, [3, 1, 4, 1, 5, 9, 2, 6], context=4).perplexity
    ```
    """
    check_model("perplexity", model)
    checks.boolean("perplexity", "progress", progress)
    begin, tokens, context = windowed(model, text, context)
    step = context - len(begin)
    rule = f"tokens between the starts of windows, an integer from 1 to {step}, or None"
    stride = checks.integer("perplexity", "stride", stride or step, rule, 1, step)
    known = [split(model.decoder), *([] if reference is None else [_checked(model, reference)])]
    structures, weights = zip(*known, strict=True)
    windows: Any = list(_windows(len(tokens), step, stride))
    if progress:
        from tqdm import tqdm

        windows = tqdm(windows, unit="window", leave=False)
    total = np.zeros(2)
    for start, end, done in windows:
        window = np.concatenate([begin, tokens[start : end + 1]])
        padded = np.zeros(context + 1, np.int32)
        padded[: len(window)] = window
        bounds = np.int32(len(begin) + done - start), np.int32(len(window) - 1)
        total += np.asarray(_surprise(structures, weights, padded, *bounds), np.float64)
    loss, divergence = total / (len(tokens) - 1)
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        perplexity = math.inf
    found = None if reference is None else float(divergence)
    return Perplexity(perplexity, len(tokens) - 1, context, float(loss), found)


def _checked(model: LanguageModel, reference: Any) -> tuple[Structure, list[Array]]:
    check_model("perplexity", reference)
    ours, theirs = model.config.vocabulary, reference.config.vocabulary
    if ours != theirs:
        raise ValueError(
            f"perplexity: the reference has {theirs} tokens, but the model {ours}; pass a "
            "reference with the same tokens."
        )
    return split(reference.decoder)


def _windows(count: int, step: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """The first and the last token of each window, and the last token predicted before it."""
    start = done = 0
    while done < count - 1:
        end = min(start + step, count - 1)
        yield start, end, done
        start, done = start + stride, end


def windowed(model: Any, text: Any, context: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """The first tokens of each window, the tokens of the text after them, and the context.

    `model` may be the header of a file, to check arguments before weights are read.

    **Raises:** the errors of `perplexity` for its text and its context.
    """
    most = model.config.context
    rule = f"the tokens of a window, an integer from 1 to {most}, or None"
    context = min(_CONTEXT, most) if context is None else context
    context = checks.integer("perplexity", "context", context, rule, most=most)
    if not is_single("perplexity", text):
        raise TypeError(
            "perplexity: text is a batch, but it must be one text, or its tokens; join them."
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
def _surprise(
    structures: tuple[Structure, ...],
    weights: tuple[list[Array], ...],
    tokens: Array,
    skipped: Array,
    count: Array,
) -> Array:
    """Sums over the predicted tokens of a window: -log p by the first model, and its divergence
    from the second model, or 0.

    `tokens` is (context + 1,). Predicted are the `count` tokens after the first, except the first
    `skipped` of these.
    """
    decoders = [x.merge(own) for x, own in zip(structures, weights, strict=True)]
    context = len(tokens) - 1
    steps = jnp.arange(context, dtype=jnp.int32)
    positions = jnp.where(steps < count, steps, -1)
    scored = (steps >= skipped) & (steps < count)

    def features(decoder: Any) -> Array:
        cache = decoder.make_cache(1, context)
        return decoder.forward(tokens[None, :-1], positions[None], cache)[0][0]

    def of_row(row: tuple[list[Array], Array]) -> Array:
        pairs = zip(decoders, row[0], strict=True)
        found = [jax.nn.log_softmax(decoder.logits(x)) for decoder, x in pairs]
        divergence = jnp.sum(jnp.exp(found[-1]) * (found[-1] - found[0]))
        return jnp.stack([-found[0][row[1]], divergence])

    rows = [features(decoder) for decoder in decoders], tokens[1:]
    losses = lax.map(of_row, rows, batch_size=min(_ROWS, context))
    return jnp.where(scored[:, None], losses, 0).sum(0)
