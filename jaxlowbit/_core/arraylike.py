"""Quantized arrays passed as arrays: conversion to floats, or an error."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .format import Format, format_name

_WAY = "write x @ q for products with the packed words, or q.dequantize() for floats"
_ATTRIBUTES = frozenset(name for name in dir(jax.Array) if not name.startswith("_"))


def words(array: Any) -> str:
    """Describes the array in a line: shape, format, dtype of the scales, and size."""
    try:
        size = f"{array.nbytes / 1e6:.2f} MB"
        return f"QuantizedArray({array.shape}, {format_name(array.format)}, {array.dtype}, {size})"
    except (AttributeError, TypeError):  # JAX puts placeholders in place of the leaves
        leaves = ", ".join(f"{name}={getattr(array, name)!r}" for name in ("packed", "scale"))
        return f"QuantizedArray({leaves}, {format_name(array.format)})"


def on_host(array: Any, dtype: Any, copy: bool | None) -> np.ndarray:
    """The floats of an array with concrete leaves."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(array)):
        raise TypeError(
            f"QuantizedArray: a function of jax.numpy got {array!r} inside a "
            f"transformation, but it needs an array of floats; {_WAY}."
        )
    if copy is False:
        raise ValueError(
            "QuantizedArray: copy=False asks for floats without a copy, but the words are packed; "
            "leave copy out."
        )
    return np.asarray(array.dequantize(dtype))


def refused(array: Any, what: str, rule: str = "takes part in no other operation") -> TypeError:
    """The error for an operation other than a product with the array on the right."""
    return TypeError(f"QuantizedArray: {what} is not defined, as {array!r} {rule}; {_WAY}.")


def no_operator(names: str) -> Callable[..., Any]:
    """A method that raises for operators."""

    def refuse(array: Any, *others: Any) -> Any:
        raise refused(array, f"{names} of a packed array")

    return refuse


def compared(array: Any, other: Any, compare: Callable[[Any, Any], Any]) -> Any:
    """Compares the floats of an array with another array, packed or not."""
    if isinstance(other, type(array)):
        return compare(array.dequantize(), other.dequantize())
    if isinstance(other, jax.Array | np.ndarray | np.generic | float | int):
        return compare(array.dequantize(), other)
    return NotImplemented


def missing(array: Any, name: str) -> AttributeError:
    """The error for an attribute that only an array of floats has."""
    if name in _ATTRIBUTES and not hasattr(type(array), name):
        return AttributeError(
            f"QuantizedArray: there is no .{name} of {array!r}, whose words kernels read in one "
            f"order; {_WAY}, such as q.dequantize().{name}; for a transposed weight, quantize its "
            "transpose."
        )
    return AttributeError(f"'QuantizedArray' object has no attribute {name!r}")


def cast_scale(found: Any, format: Format) -> ValueError:
    """The error for 8-bit scales that were cast with floats, which corrupts them."""
    return ValueError(
        f"QuantizedArray: scale is {found}, but the format has {format.scale} scales, "
        f"{format.scale_dtype}; a tree with it was cast, as by jax.tree.map(lambda x: "
        "x.astype(...)). Cast the floats of a tree before it is quantized."
    )


def cast_words(name: str, found: Any) -> ValueError:
    """The error for packed words, or their version, that were cast with floats."""
    return ValueError(
        f"QuantizedArray: {name} is {found}, but packed words are uint32; a tree with it "
        "was cast, as by jax.tree.map(lambda x: x.astype(...)), which loses them. Cast "
        "only the floats of a tree, before it is quantized; scale_dtype= of quantize "
        "is the dtype of the scales."
    )
