"""Argument checks: errors name the caller, the argument, its value and the rule."""

import contextlib
import enum
import numbers
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from . import indexing
from .dtypes import FLOATS

_PLAIN = (int, float, complex, str, bytes, tuple, list, dict, set, type, np.generic, type(None))
LARGEST = float(jnp.finfo(jnp.float32).max)
SMALLEST = float(jnp.finfo(jnp.float32).smallest_normal)
"""The range of positive float32 numbers that arithmetic does not flush to 0 or overflow."""
_NO_ARRAYS = (str, bytes, Mapping, set, frozenset, type, type(None))


def brief(value: object) -> str:
    """A short form of a value, for errors: its text if that is short, else its class."""
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, enum.Enum):
        return value.name
    words = repr(value) if isinstance(value, _PLAIN) else ""
    return words if 0 < len(words) < 60 else f"of class {type(value).__name__}"


def array(caller: str, name: str, value: Any, what: str = "an array of numbers") -> Array:
    """Returns a value as a JAX array.

    **Raises:** `TypeError` if it is not one, as for quantized arrays and quantized activations.
    """
    if isinstance(value, Array) and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    if hasattr(value, "dequantize"):
        if hasattr(value, "values"):
            raise TypeError(
                f"{caller}: {name} is a {type(value).__name__}, but it must be {what}; "
                "quantized_matmul takes activations that are quantized, and their dequantize() "
                "gives floats."
            )
        raise TypeError(
            f"{caller}: {name} is a {type(value).__name__}, but it must be {what}; products take "
            "packed weights on the right, x @ q, and q.dequantize() gives floats."
        )
    return _converted(caller, name, value, what, jnp.asarray)


def integers(caller: str, name: str, value: Any, what: str) -> Any:
    """Returns a value as an integer array, or as `indexing.exact` returns it.

    **Raises:** `TypeError` if it is not an array.
    """
    return _converted(caller, name, value, what, indexing.exact)


def _converted(caller: str, name: str, value: Any, what: str, convert: Callable[[Any], Any]) -> Any:
    converted = None
    if not isinstance(value, _NO_ARRAYS):
        with contextlib.suppress(TypeError, ValueError, OverflowError, AttributeError):
            converted = convert(value)
    if (
        converted is None
        or converted.dtype == np.dtype(object)
        or jnp.issubdtype(converted.dtype, jax.dtypes.extended)  # random keys
    ):
        raise TypeError(f"{caller}: {name} is {brief(value)}, but it must be {what}; pass one.")
    return converted


def shaped(caller: str, name: str, value: Any) -> None:
    """Raises if a value has no shape or dtype; arrays and `jax.ShapeDtypeStruct`s have both."""
    known = hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)
    if hasattr(value, "dequantize") or not known:
        raise TypeError(
            f"{caller}: {name} is {brief(value)}, but it must be an array, or a "
            "jax.ShapeDtypeStruct with the shape and dtype of one; pass one."
        )


def quantized(caller: str, name: str, value: Any, kind: type) -> None:
    """Raises if a weight is not a quantized array of class `kind`."""
    if not isinstance(value, kind):
        raise not_quantized(caller, name, value)


def not_quantized(caller: str, name: str, value: Any) -> TypeError:
    """The error for a weight that is not a quantized array."""
    return TypeError(
        f"{caller}: {name} is {brief(value)}, but it must be a QuantizedArray; "
        "make one with jaxlowbit.quantize."
    )


def dtype(caller: str, name: str, value: Any) -> Any:
    """Returns a value as a dtype."""
    try:
        if not isinstance(value, str | type | np.dtype):  # NumPy takes objects that have a dtype
            raise TypeError
        return jnp.dtype(value)
    except (TypeError, ValueError, AttributeError):
        raise TypeError(
            f"{caller}: {name} is {brief(value)}, which names no dtype; pass one such as "
            "jnp.bfloat16."
        ) from None


def float_dtype(caller: str, name: str, value: Any) -> Any:
    """Returns a value as a float dtype."""
    found = dtype(caller, name, value)
    if not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            f"{caller}: {name} is {found}, but weights are floats; pass a dtype such as "
            "jnp.bfloat16, and cast the result if integers are meant."
        )
    return found


def compute_dtype(caller: str, name: str, value: Any) -> Any:
    """Returns a value as a dtype for computing products."""
    found = dtype(caller, name, value)
    if found not in FLOATS:
        raise ValueError(
            f"{caller}: {name} is {found}, but it must be float32, bfloat16 or float16; pass one "
            "of these."
        )
    return found


def choice(
    caller: str, name: str, value: Any, allowed: Sequence[str], *, optional: bool = False
) -> None:
    """Raises for a word that is not among the allowed ones."""
    if (value is None and optional) or (isinstance(value, str) and value in allowed):
        return
    raise (ValueError if isinstance(value, str) else TypeError)(
        f"{caller}: {name}={brief(value)} is unknown; it is one of "
        f"{', '.join(map(repr, allowed))}{', or None' if optional else ''}."
    )


def integer(
    caller: str, name: str, value: Any, rule: str, least: int = 1, most: int | None = None
) -> int:
    """Returns a value as an integer from `least` to `most`; `rule` states the range."""
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or found < least or (most is not None and found > most):
        raise (TypeError if found is None else ValueError)(
            f"{caller}: {name} is {brief(value)}, but it must be {rule}."
        )
    return found


def boolean(caller: str, name: str, value: Any) -> None:
    """Raises if a value is not a bool."""
    if not isinstance(value, int | np.bool_):
        raise TypeError(f"{caller}: {name} is {brief(value)}, but it must be True or False.")


def positive(caller: str, name: str, value: Any) -> float:
    """A nonnegative number that is finite in float32 and does not underflow to 0 there."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{caller}: {name} is {brief(value)}, but it must be a number, such as 1e-5."
        )
    value = float(value) if isinstance(value, np.floating) else value
    if not 0 <= value <= LARGEST:
        raise ValueError(
            f"{caller}: {name} is {brief(value)}, but it must be a finite number from 0 on, also "
            "in float32, such as 1e-5."
        )
    if 0 < value < SMALLEST:
        raise ValueError(
            f"{caller}: {name} is {brief(value)}, which float32 rounds to 0; pass 0, or "
            f"{SMALLEST:.3g} or more."
        )
    return float(value)


def finite(caller: str, name: str, values: Array, reason: str) -> None:
    """Raises for NaN and infinities. Does nothing while tracing."""
    if isinstance(values, Tracer):
        return
    with jax.ensure_compile_time_eval():  # they may be constants of a traced function
        count, first = false_elements(jnp.isfinite(values))
    if count > 0:
        where = "" if first is None else f", the first at {first} ({values[first]})"
        raise ValueError(
            f"{caller}: {name} has {count} values that are NaN or infinite{where}; {reason}."
        )


def false_elements(mask: Array) -> tuple[int, tuple[int, ...] | None]:
    """The number of false elements of a concrete array, and the position of the first one: None if
    there is none, or if other processes have parts of the array, which NumPy cannot read."""
    if not mask.is_fully_addressable:
        return int((~mask).sum()), None
    found = np.asarray(mask)
    if found.all():
        return 0, None
    positions = np.argwhere(~found)
    return len(positions), tuple(map(int, positions[0]))


@contextlib.contextmanager
def within(caller: str, **names: str) -> Iterator[None]:
    """A context whose errors name `caller`, and rename the arguments of inner functions by `names`.

    Errors of other classes than `TypeError` and `ValueError`, such as JAX's, pass through, except
    JAX's error for dtypes that do not promote.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, jax.dtypes.TypePromotionError):
            raise type(error)(f"{caller}: {error}") from None
        if type(error) not in (TypeError, ValueError):
            raise
        text = re.sub(r"^[\w.]+: ", "", str(error))
        for inner, name in names.items():
            text = re.sub(rf"\b{inner}\b", name, text)
        raise type(error)(f"{caller}: {text}").with_traceback(error.__traceback__) from None


def shard_counts(caller: str, shards: Any) -> tuple[int, int]:
    """The numbers of parts of k and n."""
    try:
        if not isinstance(shards, tuple | list):
            raise TypeError
        k, n = map(operator.index, shards)
    except (TypeError, ValueError):
        raise TypeError(
            f"{caller}: shards is {brief(shards)}, but it must be two numbers, the numbers of "
            "shards of k and of n, such as (1, 8)."
        ) from None
    return k, n


def shards(caller: str, shape: tuple[int, ...], shards: tuple[int, int]) -> None:
    """Raises for shards that do not divide a matrix (..., k, n)."""
    for axis, size, count in zip("kn", shape[-2:], shards, strict=True):
        if count < 1 or size % count:
            raise ValueError(
                f"{caller}: shards={shards!r} cuts {axis}={size} into {count} parts, but the parts "
                f"are equal, so their number divides {size}."
            )
