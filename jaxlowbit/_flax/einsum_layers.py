"""Layers of other libraries: what their parameters are multiplied by, as an equation says."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from .._core.checks import brief, integer, within
from .equation import Equation


@dataclasses.dataclass(frozen=True)
class EinsumLayer:
    """A class of layers whose call multiplies its inputs by one parameter, as `jnp.einsum` does.

    `quantize_model(..., layers=[EinsumLayer(...)])` quantizes such layers as it does `Einsum`.

    **Arguments:**

    - `module`: the class, or a regular expression for the whole of its qualified name, such as
      `r"package\\.model\\.Einsum"`. Subclasses may compute something else, and do not match.
    - `weight`: the name of the parameter; in Linen, or a function of the layer.
    - `equation`: "inputs,weight->result", or a function that makes it of the layer and, in Linen,
      of the arguments of its call. Its letters say which axes of the weight are contracted.
    - `inputs`: in Linen, the position of the inputs among the arguments of the call.
    - `bias`: the name of a parameter that is added to the result; None if there is none.

    **Raises:** `TypeError` for other arguments, `ValueError` for what is no regular expression, no
    equation or no position.

    ```python
    EinsumLayer(r"mine\\.Projection", "w", "btd,dnh->btnh")
    EinsumLayer(r"mine\\.Einsum", "w", lambda layer: layer.einsum_str)
    ```
    """

    module: type | str
    weight: str | Callable[[Any], str]
    equation: str | Callable[..., str]
    inputs: int = 0
    bias: str | None = None

    def __post_init__(self) -> None:
        for name, kinds, rule in (
            ("module", type | str, "a class, or a regular expression for its qualified name"),
            ("weight", str | Callable, "the name of a parameter"),
            ("equation", str | Callable, "'inputs,weight->result', or a function of the layer"),
            ("bias", str | None, "the name of a parameter, or None"),
        ):
            if not isinstance(value := getattr(self, name), kinds):
                raise TypeError(f"EinsumLayer: {name} is {brief(value)}, but it is {rule}.")
        integer("EinsumLayer", "inputs", self.inputs, "the position of an argument", least=0)
        if isinstance(self.equation, str):
            with within("EinsumLayer"):
                Equation.check_form(self.equation)
        if isinstance(self.module, str):
            try:
                re.compile(self.module)
            except re.error as error:
                raise ValueError(
                    f"EinsumLayer: module={self.module!r} is no regular expression: {error}."
                ) from None

    def matches(self, layer: Any) -> bool:
        return matches(self.module, type(layer))

    def weight_of(self, layer: Any) -> str:
        return told("EinsumLayer", "weight", self.weight, layer)

    def equation_of(self, layer: Any, *args: Any) -> str:
        return told("EinsumLayer", "equation", self.equation, layer, *args)

    def parsed(self, layer: Any, shape: tuple[int, ...], *args: Any) -> Equation:
        return Equation.parse(self.equation_of(layer, *args), shape)


def matches(module: type | str, kind: type) -> bool:
    """Whether a class is `module`, or has a qualified name that it describes."""
    if isinstance(module, type):
        return kind is module
    return re.fullmatch(module, f"{kind.__module__}.{kind.__qualname__}") is not None


def told(caller: str, name: str, value: Any, layer: Any, *args: Any) -> str:
    """A string, or what a function of the caller's makes of the layer."""
    if isinstance(value, str):
        return value
    try:
        found = value(layer, *args)
    except Exception as error:
        raise ValueError(
            f"{caller}: {name} of {type(layer).__name__} raises {type(error).__name__}: "
            f"{error}; correct the function."
        ) from error
    if not isinstance(found, str):
        raise ValueError(
            f"{caller}: {name} of {type(layer).__name__} is {brief(found)}, but it is a "
            "string; correct the function."
        )
    return found
