"""Sampling of the next token: penalties, temperature, and the tokens that may be sampled."""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._core import checks

NOT_A_NUMBER = -3
"""The token of a sequence whose logits contain NaN."""

SEED_RULE = "an integer of 64 bits, from -2**63 to 2**63 - 1"

_FLOAT32 = np.finfo(np.float32)


class Sampling(NamedTuple):
    """Options of sampling. The compiled program omits each step that is None; other values are
    arrays, so another temperature does not recompile."""

    temperature: Array | None = None
    top_k: Array | None = None
    top_p: Array | None = None
    min_p: Array | None = None  # its logarithm
    repetition_penalty: Array | None = None
    presence_penalty: Array | None = None
    frequency_penalty: Array | None = None

    @classmethod
    def of(
        cls,
        caller: str,
        temperature: Any = 0.0,
        top_k: Any = None,
        top_p: Any = None,
        min_p: Any = None,
        repetition_penalty: Any = None,
        presence_penalty: Any = None,
        frequency_penalty: Any = None,
    ) -> "Sampling":
        """Checks the options as float32: a temperature that rounds to 0 is 0.

        **Raises:** `TypeError` for other types, `ValueError` for values out of range.
        """
        rule = "a number from 0 to 3.4e38, and 0 takes the most likely token"
        temperature = _float32(caller, "temperature", temperature, rule, least=0)
        if top_k is not None:
            rule = "an integer from 1 to 2**31 - 1, or None"
            top_k = checks.integer(caller, "top_k", top_k, rule, most=2**31 - 1)
        if top_p is not None:
            rule = "a number above 0 and up to 1, or None"
            top_p = _float32(caller, "top_p", top_p, rule, above=0, most=1)
        if min_p is not None:
            rule = "a number from 0 to 1, or None"
            _float32(caller, "min_p", min_p, rule, least=0, most=1)
        penalties: dict[str, Any] = {}
        for name, value, neutral, least in (
            ("repetition_penalty", repetition_penalty, 1, float(_FLOAT32.tiny)),
            ("presence_penalty", presence_penalty, 0, -math.inf),
            ("frequency_penalty", frequency_penalty, 0, -math.inf),
        ):
            if value is not None:
                rule = "a number" + (" from 1.2e-38 to 3.4e38" if neutral else "")
                rule += f" in the range of float32, or None; {neutral} changes nothing"
                value = _float32(caller, name, value, rule, least=least)
                penalties[name] = None if value == neutral else jnp.float32(value)
        if temperature < _FLOAT32.tiny:
            return cls(**penalties)
        return cls(
            jnp.float32(temperature),
            None if top_k is None else jnp.int32(top_k),
            # Above 0, since a sum of 0 would be reached without any token.
            None if top_p in (None, 1) else jnp.float32(max(top_p, _FLOAT32.tiny)),
            jnp.float32(math.log(min_p)) if min_p else None,
            **penalties,
        )


def _float32(
    caller: str,
    name: str,
    value: Any,
    rule: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> np.float32:
    """Returns a finite number as float32. The limits apply before rounding."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{caller}: {name} is {checks.brief(value)}, but it must be {rule}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    within = least <= number <= most and (above == -math.inf or number > above)
    if not within or not abs(number) <= float(_FLOAT32.max):
        raise ValueError(f"{caller}: {name} is {checks.brief(value)}, but it must be {rule}.")
    return np.float32(number)


def random_key(seed: int) -> Array:
    """The key of a 64-bit seed, with and without `jax_enable_x64`.

    `jax.random.key` uses only the low 32 bits if 64-bit types are off, so fold in the high ones.
    """
    high, low = divmod(seed % 2**64, 2**32)
    key = jax.random.key(np.uint32(low))
    return jax.random.fold_in(key, np.uint32(high)) if high else key


class Counts(NamedTuple):
    """The tokens of each sequence so far, for penalties.

    - `drawn`: the number of times each token was generated, int32 (batch, vocabulary).
    - `prompt`: whether the prompt contains it, bool (batch, vocabulary), for the repetition
      penalty; else None.
    """

    drawn: Array
    prompt: Array | None

    @classmethod
    def of(
        cls, sampling: Sampling, prompts: Sequence[Sequence[int]], vocabulary: int
    ) -> "Counts | None":
        """The counts that these penalties need before the first token; None without penalties."""
        repetition = sampling.repetition_penalty is not None
        others = sampling.presence_penalty, sampling.frequency_penalty
        if not repetition and others == (None, None):
            return None
        shape = len(prompts), vocabulary
        prompt = np.zeros(shape, bool)
        for row, tokens in zip(prompt, prompts, strict=True):
            row[list(tokens)] = True
        return cls(jnp.zeros(shape, jnp.int32), jnp.asarray(prompt) if repetition else None)

    def add(self, tokens: Array) -> "Counts":
        """The counts after one more token (batch,) of each sequence; negative tokens are
        ignored."""
        rows = jnp.arange(len(tokens), dtype=jnp.int32)
        more = (tokens >= 0).astype(jnp.int32)
        return self._replace(drawn=self.drawn.at[rows, jnp.maximum(tokens, 0)].add(more))


def sample(logits: Array, keys: Array, sampling: Sampling, counts: Counts | None = None) -> Array:
    """The next token of each sequence, int32 (batch,); `NOT_A_NUMBER` if its logits contain NaN.

    In order: penalties change the logits; the temperature divides them; `top_k`, `top_p` and
    `min_p` remove tokens with small logits; one of the rest is sampled. Tokens with equal logits
    are kept or removed together.

    **Arguments:**

    - `logits`: float32 (batch, vocabulary).
    - `keys`: a random key for each sequence (batch,).
    - `counts`: for penalties.
    """
    if counts is not None:
        logits = _penalized(logits, sampling, counts)
    if sampling.temperature is not None:
        # The difference is not positive, so it cannot overflow to +inf at any temperature.
        logits = (logits - logits.max(axis=-1, keepdims=True)) / sampling.temperature
        if (top_k := sampling.top_k) is not None:
            logits = _largest(logits, lambda kept: kept.sum(-1, dtype=jnp.int32) >= top_k)
        if (top_p := sampling.top_p) is not None:
            p = jax.nn.softmax(logits, axis=-1)
            logits = _largest(logits, lambda kept: jnp.where(kept, p, 0).sum(-1) >= top_p)
        if (min_p := sampling.min_p) is not None:
            logits = jnp.where(logits < min_p, -jnp.inf, logits)  # the largest is 0
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
        logits = logits + noise
    return checked(*first_largest(logits))


def first_largest(values: Array) -> tuple[Array, Array]:
    """The largest of values (batch, n), and the first places that have them, int32. NaN counts as
    the largest."""
    at = jnp.argmax(values, axis=-1).astype(jnp.int32)
    return jnp.take_along_axis(values, at[:, None], axis=-1)[:, 0], at


def checked(logit: Array, token: Array) -> Array:
    """The token of the largest logit, or `NOT_A_NUMBER`."""
    return jnp.where(jnp.isnan(logit), jnp.int32(NOT_A_NUMBER), token)


def _penalized(logits: Array, sampling: Sampling, counts: Counts) -> Array:
    """Logits after the penalties for repetition, frequency and presence."""
    drawn = counts.drawn > 0
    if (penalty := sampling.repetition_penalty) is not None:
        seen = drawn if counts.prompt is None else drawn | counts.prompt
        lower = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(seen, lower, logits)
    if (penalty := sampling.frequency_penalty) is not None:
        logits = logits - penalty * counts.drawn.astype(jnp.float32)
    if (penalty := sampling.presence_penalty) is not None:
        logits = logits - penalty * drawn.astype(jnp.float32)
    return jnp.clip(logits, _FLOAT32.min, _FLOAT32.max)


def _largest(logits: Array, enough: Callable[[Array], Array]) -> Array:
    """Removes the logits below the largest threshold that leaves `enough`.

    The threshold is found bit by bit, reading the logits 32 times, which is faster than sorting.
    """
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    order = jnp.where(logits < 0, ~bits, bits | jnp.uint32(1 << 31))  # ascends with the logits

    def refine(i: Array, threshold: Array) -> Array:
        higher = threshold | (jnp.uint32(1 << 31) >> jnp.asarray(i, jnp.uint32))
        return jnp.where(enough(order >= higher[:, None]), higher, threshold)

    start = jnp.zeros(logits.shape[0], jnp.uint32)
    threshold = lax.fori_loop(jnp.int32(0), jnp.int32(32), refine, start)
    return jnp.where(order >= threshold[:, None], logits, -jnp.inf)
