"""Refusing layers, all of them in one error before the first one changes, and what is no model."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._core.checks import brief

_LISTED = 8


def inner(error: Exception) -> str:
    """What an error says, without the name of the function that found it."""
    return re.sub(r"^[\w.]+: ", "", str(error))


def refuse(refusals: Iterable[tuple[str, str | None]]) -> None:
    """Raises a `ValueError` of the paths of layers that cannot be quantized, and why.

    A reason is None where a layer can.
    """
    found = [(path, reason) for path, reason in refusals if reason is not None]
    if len(found) == 1:
        raise ValueError(f"quantize_model: {found[0][1]}")
    if found:
        more = ", ".join(path for path, _ in found[_LISTED:])
        rest = f"\n- and {len(found) - _LISTED} more: {more}" if more else ""
        listed = "".join(f"\n- {reason}" for _, reason in found[:_LISTED])
        raise ValueError(
            f"quantize_model: {len(found)} layers cannot be quantized, and none was: correct them, "
            f"or keep them, with keep= or rules of their paths and None.{listed}{rest}"
        )


def refuse_nothing(kept: Sequence[tuple[str, tuple[int, ...], str | None]]) -> None:
    """Refuses a choice that keeps all layers: paths, shapes, and why each is kept or None."""
    if any(reason is None for _, _, reason in kept):
        return
    listed = "".join(
        f"\n- {path or 'the model'} {shape}: {reason}" for path, shape, reason in kept[:_LISTED]
    )
    more = f"\n- and {len(kept) - _LISTED} more" if len(kept) > _LISTED else ""
    raise ValueError(
        "quantize_model: no layer would be quantized, and the model is as it was; name layers by "
        f"rules, such as {{'': jaxlowbit.INT4}} for all. The layers are{listed}{more}."
    )


# What other libraries call a model, by the package of a class, and what to do with it here.
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
    """The error for what is passed in the place of a model; `wanted` says what is to be passed."""
    found = [cls.__module__.partition(".")[0] for cls in type(model).__mro__]
    library = next((_LIBRARIES[name] for name in found if name in _LIBRARIES), None)
    if library is not None:
        return TypeError(f"quantize_model: the model is {library}.")
    if isinstance(model, type):
        what = f"the class {model.__name__}, not an instance of it"
    elif isinstance(model, Mapping):
        what = f"a {type(model).__name__} of arrays, which does not say what multiplies by them"
    else:
        what = brief(model)
    return TypeError(f"quantize_model: the model is {what}; {wanted}")
