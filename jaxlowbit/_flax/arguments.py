"""Checks of what layers are made of and called with: errors name the layer and the argument."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._core import checks
from .._core.activations import value_dtype

_SIZE = "a number of features, an integer from 1 to 2**31 - 1"
_FUNCTIONS = ("kernel_init", "bias_init", "embedding_init", "promote_dtype")


def check_options(layer: Any, *names: str, **options: Any) -> None:
    """Refuses options of a layer that are none, among its attributes those of `names`.

    **Raises:** `TypeError` for what names no dtype, is no function or no truth value, `ValueError`
    for a dtype that weights do not have.
    """
    caller = type(layer).__name__
    for name, value in (options | {name: getattr(layer, name) for name in names}).items():
        if name in _FUNCTIONS:
            if not callable(value):
                raise TypeError(
                    f"{caller}: {name} is {checks.brief(value)}, but it is a function, such as "
                    "those of flax; leave it out for the default."
                )
        elif name == "use_bias":
            checks.boolean(caller, name, value)
        elif value is not None or name == "param_dtype":
            checks.compute_dtype(caller, name, value)


def activation_dtype(caller: str, value: Any) -> Any:
    """A dtype of quantized activations, or None.

    **Raises:** `TypeError` for what names no dtype, `ValueError` for another one.
    """
    return None if value is None else value_dtype(caller, "activation_dtype", value)


def sizes(caller: str, name: str, value: Any) -> tuple[int, ...]:
    """One number of features, or several, as a tuple.

    **Raises:** `TypeError` and `ValueError` for others.
    """
    listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | Array)
    found = tuple(value) if listed else (value,)
    rule = f"{_SIZE}, or several of them"
    return tuple(checks.integer(caller, name, size, rule, most=2**31 - 1) for size in found)


def size(caller: str, name: str, value: Any) -> int:
    """A number of features.

    **Raises:** `TypeError` and `ValueError` for what is none.
    """
    return checks.integer(caller, name, value, _SIZE, most=2**31 - 1)


def axes(caller: str, name: str, value: Any) -> tuple[int, ...]:
    """One number of an axis, or several, as a tuple.

    **Raises:** `TypeError` for what is none.
    """
    listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | Array)
    found = tuple(value) if listed else (value,)
    rule = "the number of an axis, or several of them, such as (-2, -1)"
    return tuple(checks.integer(caller, name, axis, rule, least=-64, most=63) for axis in found)


def activations(caller: str, name: str, value: Any) -> Array:
    """Inputs as an array of numbers, whose dtype Flax promotes to one of floats.

    **Raises:** `TypeError` for what is none.
    """
    found = checks.array(caller, name, value, "an array of numbers")
    if not any(jnp.issubdtype(found.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool)):
        raise TypeError(
            f"{caller}: {name} is {checks.brief(found)}, but layers take real numbers; cast it."
        )
    return found


def check_axes(caller: str, name: str, found: Array) -> None:
    """Refuses a number in the place of inputs.

    **Raises:** `ValueError` that says so.
    """
    if found.ndim == 0:
        raise ValueError(
            f"{caller}: {name} is a number without axes, but the layer multiplies (..., features); "
            "pass an array with an axis."
        )


def check_width(caller: str, name: str, found: Array, width: int) -> None:
    """Refuses inputs whose last axis is not the width of a layer.

    **Raises:** `ValueError` with both.
    """
    if found.shape[-1:] != (width,):
        raise ValueError(
            f"{caller}: {name} has shape {found.shape}, but the layer multiplies (..., {width}); "
            f"pass {width} features."
        )
