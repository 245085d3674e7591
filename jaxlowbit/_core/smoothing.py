"""Factors that divide the input channels of activations before rounding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from . import checks
from .dtypes import FLOATS
from .scales import least


def checked_factor(caller: str, name: str, factor: Any, k: int) -> Array:
    """Checks a factor for each of `k` input channels, and returns it as float32.

    **Raises:** `TypeError` if it is not an array, `ValueError` for other shapes and dtypes and,
    outside `jax.jit`, for values that are not positive and finite.
    """
    factor = of_channels(caller, name, factor, k)
    rule = f"positive, {least(jnp.float32):.3g} or more"
    check_values(caller, name, factor, rule, lambda values: values >= least(jnp.float32))
    return factor


def divided(activations: Array, factor: Array) -> Array:
    """Activations (*lead, ..., k) divided by the factors (*lead, k) of their channels, float32."""
    missing = tuple(range(factor.ndim - 1, activations.ndim - 1))
    return activations.astype(jnp.float32) / jnp.expand_dims(factor, missing)


def of_channels(caller: str, name: str, value: Any, k: int) -> Array:
    """Floats (k,) as float32; raises `TypeError` or `ValueError` for other values."""
    found = checks.array(caller, name, value, f"floats ({k},)")
    if found.dtype not in FLOATS or found.shape != (k,):
        raise ValueError(
            f"{caller}: {name} is {checks.brief(found)}, but it must be floats ({k},), one for "
            "each input channel; cast or reshape it."
        )
    return found.astype(jnp.float32)


def check_values(caller: str, name: str, values: Array, rule: str, holds: Any) -> None:
    """Raises for infinite values and values that break a rule. Does nothing while tracing."""
    if isinstance(values, Tracer):
        return
    with jax.ensure_compile_time_eval():  # they may be constants of a traced function
        found = np.asarray(values)
    if (wrong := ~(holds(found) & np.isfinite(found))).any():
        first = int(np.argmax(wrong))
        raise ValueError(
            f"{caller}: {name} has {int(wrong.sum())} values that are not finite and {rule}, the "
            f"first at {first} ({found[first]}); compute them from other activations."
        )
