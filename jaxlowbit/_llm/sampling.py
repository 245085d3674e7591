"""Choice of the next token."""

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._core import checks


class Sampling(NamedTuple):
    """How tokens are drawn. What is None is left out of the compiled program; other values are
    arrays, so that another temperature compiles nothing."""

    temperature: Array | None = None
    top_k: Array | None = None
    top_p: Array | None = None

    @classmethod
    def of(
        cls,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        caller: str = "generate",
    ) -> "Sampling":
        """**Raises:** `TypeError` for what is no number, `ValueError` for values out of range."""
        if not _is_number(temperature, 0):
            raise _error(temperature)(
                f"{caller}: temperature is {checks.brief(temperature)}, but it is a finite number "
                "from 0 on, and 0 takes the most likely token."
            )
        if top_k is not None:
            rule = "an integer from 1 to 2**31 - 1, or None"
            top_k = checks.integer(caller, "top_k", top_k, rule, most=2**31 - 1)
        if top_p is not None and not (_is_number(top_p, 0) and 0 < top_p <= 1):
            raise _error(top_p)(
                f"{caller}: top_p is {checks.brief(top_p)}, but it is a number above 0 and up to "
                "1, or None."
            )
        if temperature == 0:
            return cls()
        return cls(
            jnp.float32(temperature),
            None if top_k is None else jnp.int32(top_k),
            None if top_p is None or top_p == 1 else jnp.float32(top_p),
        )


def _is_number(value: Any, least: float) -> bool:
    return _is_real(value) and least <= value < float("inf")


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _error(value: Any) -> type[Exception]:
    return ValueError if _is_real(value) else TypeError


def sample(logits: Array, keys: Array, sampling: Sampling) -> Array:
    """The next token of each sequence, int32 (batch,).

    The temperature divides the logits, then the `top_k` largest remain, then the most likely whose
    probabilities sum up to `top_p`; of these one is drawn. Tokens of equal logits stay together.

    **Arguments:**

    - `logits`: float32 (batch, vocabulary).
    - `keys`: a random key for each sequence (batch,).
    """
    if sampling.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if (top_k := sampling.top_k) is not None:
        logits = _largest(logits, lambda kept: kept.sum(-1) >= top_k)
    if (top_p := sampling.top_p) is not None:
        p = jax.nn.softmax(logits, axis=-1)
        logits = _largest(logits, lambda kept: jnp.where(kept, p, 0).sum(-1) >= top_p)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)


def _largest(logits: Array, enough: Callable[[Array], Array]) -> Array:
    """Logits without those below the largest threshold that keeps `enough`.

    The threshold is found bit by bit, which reads the logits 32 times; a sort takes longer.
    """
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    order = jnp.where(logits < 0, ~bits, bits | jnp.uint32(1 << 31))  # ascends with the logits

    def refine(i: Array, threshold: Array) -> Array:
        higher = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(order >= higher[:, None]), higher, threshold)

    threshold = lax.fori_loop(0, 32, refine, jnp.zeros(logits.shape[0], jnp.uint32))
    return jnp.where(order >= threshold[:, None], logits, -jnp.inf)
