"""qwix: a quantized array that XLA dequantizes and multiplies."""

import functools
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from jaxlowbit import Format

from . import Peer


@functools.partial(jax.jit, static_argnames="format")
def array(codes: Any, format: Format) -> Any:
    """The codes as a QArray of signed integers."""
    qvalue = codes.qvalue.astype(jnp.int16) - format.offset
    qvalue = qvalue.astype(getattr(jnp, f"int{format.bits}"))
    return import_module("qwix").QArray(qvalue, codes.scale)


def unsupported(format: Format, dtype: str) -> str | None:
    """Returns the reason why the adapter does not support this format, or None."""
    fits = format.bits in (2, 4, 8) and format.zero == "none"
    return None if fits else "the adapter has 2, 4 and 8 bits without zeros"


def _call(x: Any, weight: Any) -> Any:
    return import_module("qwix").dot(x, weight)


PEER = Peer("qwix", "qwix", "0.1.8", array, _call, unsupported, framework="jax")
