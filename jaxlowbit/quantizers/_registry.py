"""The quantizers by name: one for each module of this folder without a leading underscore."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._core import checks
from .._core.array import QuantizedArray
from .._core.format import Format

Quantizer = Callable[..., QuantizedArray]

_MODULES = {
    name: importlib.import_module(f"{__package__}.{name}")
    for _, name, _ in pkgutil.iter_modules([str(Path(__file__).parent)])
    if not name.startswith("_")
}
NAMES = tuple(_MODULES)


def check(caller: str, quantizer: Any) -> None:
    """Raises for a value that is neither a known name, nor a function, nor None.

    **Raises:** `TypeError`, or `ValueError` for an unknown name.
    """
    named = isinstance(quantizer, str)
    function = callable(quantizer) and not isinstance(quantizer, type)
    if quantizer is None or function or (named and quantizer in _MODULES):
        return
    raise (ValueError if named else TypeError)(
        f"{caller}: quantizer={checks.brief(quantizer)} is unknown; it is one of "
        f"{', '.join(map(repr, NAMES))}, a function (weight, format, statistics, **options), or "
        "None."
    )


def find(caller: str, quantizer: Any, format: Format, options: Mapping[str, Any]) -> Quantizer:
    """Returns the function of a quantizer.

    **Raises:** as `check` does; `ValueError` for a format that the quantizer does not support,
    `TypeError` for a function that does not take the `options`, or cannot be hashed.
    """
    check(caller, quantizer)
    if quantizer is None:
        quantizer = "mse" if format.bits < 4 else "absmax"
    if isinstance(quantizer, str):
        module = _MODULES[quantizer]
        if reason := module.unsupported(format):
            raise ValueError(f"{caller}: the quantizer {quantizer!r} lacks this format: {reason}.")
        return module.quantize
    try:
        hash(quantizer)
        inspect.signature(quantizer).bind(None, format, None, **options)
    except (TypeError, ValueError) as error:  # a `ValueError` is of functions in C
        given = "".join(f", {name}=" for name in options)
        raise TypeError(
            f"{caller}: quantizer is {checks.brief(quantizer)}, which cannot be called with "
            f"(weight, format, statistics{given}): {error}; pass a function (weight, format, "
            "statistics, **options)."
        ) from None
    return quantizer
