"""The quantizers by name: one for each module of this folder without a leading underscore."""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax import Array, lax

from .._core import checks
from .._core.array import QuantizedArray
from .._core.format import Format
from ._statistics import Statistics

Quantizer = Callable[..., QuantizedArray]

_MODULES = {
    name: importlib.import_module(f"{__package__}.{name}")
    for _, name, _ in pkgutil.iter_modules([str(Path(__file__).parent)])
    if not name.startswith("_")
}
NAMES = tuple(_MODULES)
_SCALING = tuple(name for name, module in _MODULES.items() if hasattr(module, "factors"))
_PAIRS = {f"{first}+{last}": (first, last) for first in _SCALING for last in NAMES if first != last}


def check(caller: str, quantizer: Any) -> None:
    """Raises for a value that is neither a known name, nor a function, nor None.

    **Raises:** `TypeError`, or `ValueError` for an unknown name.
    """
    named = isinstance(quantizer, str)
    if named and quantizer in _PAIRS:
        return
    function = callable(quantizer) and not isinstance(quantizer, type)
    if quantizer is None or function or (named and quantizer in _MODULES):
        return
    raise (ValueError if named else TypeError)(
        f"{caller}: quantizer={checks.brief(quantizer)} is unknown; it is one of "
        f"{', '.join(map(repr, NAMES))}, a pair of them such as 'awq+gptq', a function (weight, "
        "format, statistics, **options), or None."
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
        module = _MODULES[_PAIRS.get(quantizer, (None, quantizer))[1]]
        if reason := module.unsupported(format):
            raise ValueError(
                f"{caller}: the quantizer {quantizer!r} does not support this format: {reason}."
            )
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


def factors_of(quantizer: Any) -> Callable[..., Any] | None:
    """The function of a quantizer that computes factors of input features, or None."""
    first, *then = _PAIRS.get(quantizer, (quantizer,)) if isinstance(quantizer, str) else (None,)
    return _factors(first, *then) if first in _SCALING else None


@functools.cache  # one function for each pair: it is a static argument of a program
def _factors(first: str, last: str | None = None) -> Callable[..., Any]:
    factors = _MODULES[first].factors
    importance = None if last is None else getattr(_MODULES[last], "importance", None)
    return factors if importance is None else functools.partial(factors, importance=importance)


@functools.partial(jax.jit, static_argnames=("factors", "formats"))
def stack_factors(
    weights: tuple[Array, ...],
    statistics: Statistics,
    factors: Callable[..., Array],
    formats: tuple[Format, ...],
) -> Array:
    """The factors (*lead, k) of the features of matrices (*lead, k, n) that share inputs."""
    if weights[0].ndim == 2:
        return factors(weights, formats, statistics)
    return lax.map(lambda x: stack_factors(*x, factors, formats), (weights, statistics))


def check_calibration(caller: str, quantizer: Any, calibrated: bool) -> None:
    """Raises if a quantizer needs a calibration that is not given, or reads none that is.

    **Raises:** `ValueError`.
    """
    if statistics_of(quantizer) is None and calibrated:
        raise ValueError(
            f"{caller}: calibration is given, but the quantizer {quantizer!r} reads no statistics; "
            "leave it out, or use another quantizer, such as 'gptq'."
        )
    if not calibrated:
        required = [getattr(module, "REQUIRED", False) for module in _modules_of(quantizer)]
        if any(required):
            raise ValueError(
                f"{caller}: the quantizer {quantizer!r} needs statistics of the inputs of each "
                "layer; pass calibration=, inputs of the model."
            )


def statistics_of(quantizer: Any) -> str | None:
    """The statistics that a quantizer reads: "full" second moments, their "diagonal", or None."""
    modules = _modules_of(quantizer)
    if not modules:
        return None if quantizer is None else "full"
    found = [module.STATISTICS for module in modules]
    return next((kind for kind in ("full", "diagonal") if kind in found), None)


def block_options(quantizer: Any) -> Any:
    """The options of a quantizer that learns from the outputs of whole blocks of a language model,
    or None."""
    module = next(reversed(_modules_of(quantizer)), None)
    options = getattr(module, "Options", None)
    return None if options is None else options(**getattr(quantizer, "keywords", {}))


def _modules_of(quantizer: Any) -> list[Any]:
    """The modules of a quantizer by name, or of a `functools.partial` of one of ours."""
    if isinstance(quantizer, str):
        return [_MODULES[name] for name in _PAIRS.get(quantizer, (quantizer,))]
    function = getattr(quantizer, "func", quantizer)
    return [module for module in _MODULES.values() if module.quantize is function][:1]
