"""Checks of arguments: errors name the layer or function, the argument, its value and the rule."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._core import checks
from .._core.activations import VALUES, value_dtype

_SIZE = "a number of features, an integer from 1 to 2**31 - 1"
_FUNCTIONS = ("kernel_init", "bias_init", "embedding_init", "promote_dtype")
OPTIONS = (*_FUNCTIONS, "use_bias", "dtype", "param_dtype", "preferred_element_type")
"""Options of layers that `check_options` checks."""


def inner(error: Exception) -> str:
    """The message of an error without the leading name of the function."""
    return re.sub(r"^[\w.]+: ", "", str(error))


def some(paths: Sequence[str]) -> str:
    """The first paths of a list, and the number of others."""
    return ", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")


def check_options(caller: str, options: Mapping[str, Any]) -> None:
    """Checks options of a layer by their names: functions, `use_bias` and dtypes.

    **Raises:** `TypeError` for values that are not a function, bool or dtype, `ValueError` for a
    dtype that weights cannot have.
    """
    for name, value in options.items():
        if name in _FUNCTIONS:
            if not callable(value):
                raise TypeError(
                    f"{caller}: {name} is {checks.brief(value)}, but it must be a function, such "
                    "as those of flax; leave it out for the default."
                )
        elif name == "use_bias":
            checks.boolean(caller, name, value)
        elif value is not None or name == "param_dtype":
            checks.compute_dtype(caller, name, value)


def lhs_qtype(caller: str, value: Any) -> Any:
    """Returns a dtype of quantized activations, or None.

    **Raises:** `TypeError` for a value that is not a dtype, `ValueError` for another dtype.
    """
    return None if value is None else value_dtype(caller, "lhs_qtype", value)


def cache_dtype(caller: str, value: Any, dtype: Any) -> Any:
    """Returns the dtype of a cache: int8 or float8_e4m3fn, or None for `dtype`, of activations.

    **Raises:** `TypeError` for a value that is not a dtype, `ValueError` for another dtype.
    """
    found = dtype if value is None else checks.dtype(caller, "cache_dtype", value)
    if value is not None and found not in VALUES:
        raise ValueError(
            f"{caller}: cache_dtype is {found}, but it must be int8 or float8_e4m3fn, or None for "
            "the dtype of activations."
        )
    return found


def sizes(caller: str, name: str, value: Any) -> tuple[int, ...]:
    """Returns one number of features, or several, as a tuple.

    **Raises:** `TypeError` and `ValueError` for others.
    """
    rule = f"{_SIZE}, or several of them"
    return tuple(checks.integer(caller, name, x, rule, most=2**31 - 1) for x in _several(value))


def size(caller: str, name: str, value: Any) -> int:
    """Returns a number of features.

    **Raises:** `TypeError` and `ValueError` for other values.
    """
    return checks.integer(caller, name, value, _SIZE, most=2**31 - 1)


def axes(caller: str, name: str, value: Any) -> tuple[int, ...]:
    """Returns the number of one axis, or of several, as a tuple.

    **Raises:** `TypeError` and `ValueError` for other values.
    """
    rule = "the number of an axis, or several of them, such as (-2, -1)"
    return tuple(checks.integer(caller, name, x, rule, -64, 63) for x in _several(value))


def _several(value: Any) -> tuple[Any, ...]:
    listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | Array)
    return tuple(value) if listed else (value,)


def activations(caller: str, name: str, value: Any) -> Array:
    """Returns inputs as an array of real numbers; Flax promotes integers and truth values.

    **Raises:** `TypeError` for other values.
    """
    found = checks.array(caller, name, value, "an array of numbers")
    if not any(jnp.issubdtype(found.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool)):
        raise TypeError(
            f"{caller}: {name} is {checks.brief(found)}, but layers take real numbers; cast it."
        )
    return found


def tokens(inputs: Any) -> Array:
    """Returns the inputs of an embedding as an array of integers.

    **Raises:** `TypeError` unless they are an array, `ValueError` for another dtype.
    """
    found = checks.array("QuantizedEmbed", "inputs", inputs, "tokens, an array of integers")
    if not jnp.issubdtype(found.dtype, jnp.integer):
        raise ValueError(
            f"QuantizedEmbed: the inputs are {found.dtype}, but tokens are integers; cast them."
        )
    return found


def check_axes(caller: str, name: str, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` for inputs without axes."""
    if not shape:
        raise ValueError(
            f"{caller}: {name} is a number without axes, but the layer multiplies (..., features); "
            "pass an array with an axis."
        )


def check_width(caller: str, name: str, found: Array, width: int) -> None:
    """Raises `ValueError` unless the last axis of inputs has `width` elements."""
    if found.shape[-1:] != (width,):
        raise ValueError(
            f"{caller}: {name} has shape {found.shape}, but the layer multiplies (..., {width}); "
            f"pass {width} features."
        )


# Packages with models that `quantize_model` does not support, and the error's advice.
_LIBRARIES = {
    "equinox": "an Equinox module, and there are no layers for Equinox; put quantize(weight.T, "
    "format) where a layer has its weight (out, in), and let it compute x @ weight",
    "penzai": "a Penzai module, and there are no layers for Penzai; put a QuantizedArray where a "
    "layer computes x @ weight",
    "haiku": "of Haiku, and there are no layers for Haiku; put a QuantizedArray among its "
    "parameters where a layer computes x @ weight",
    "keras": "of Keras, and there are no layers for Keras; put a QuantizedArray where a layer "
    "computes x @ weight",
    "torch": "of PyTorch; jaxlowbit.llm.load reads the files of language models",
}


def not_a_model(model: Any, wanted: str) -> TypeError:
    """The error for a `model` that `quantize_model` does not support; `wanted` is the advice."""
    found = [cls.__module__.partition(".")[0] for cls in type(model).__mro__]
    library = next((_LIBRARIES[name] for name in found if name in _LIBRARIES), None)
    if library is not None:
        return TypeError(f"quantize_model: the model is {library}.")
    if isinstance(model, type):
        what = f"the class {model.__name__}, not an instance of it"
    elif isinstance(model, Mapping):
        what = f"a {type(model).__name__} of arrays, which does not say what multiplies by them"
    else:
        what = checks.brief(model)
    return TypeError(f"quantize_model: the model is {what}; {wanted}")
