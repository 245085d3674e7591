"""Layers and parameters of other libraries, described by the einsum equation of their product."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._core.checks import brief, integer, within
from .arguments import some
from .equation import Equation

_Module = type | str | None


@dataclasses.dataclass(frozen=True)
class EinsumLayer:
    """A class of layers that multiply their inputs by one parameter, as `jnp.einsum` does.

    `quantize_model(..., layers=[EinsumLayer(...)])` quantizes such layers as it does `Einsum`.

    **Arguments:**

    - `module`: the class, or a regular expression for its whole qualified name, such as
      `r"package\\.model\\.Einsum"`. Subclasses do not match, since they may compute something else.
    - `weight`: the name of the parameter; in Linen also a function from the layer to the name.
    - `equation`: "inputs,weight->result", or a function from the layer (in Linen also the arguments
      of its call) to the equation. Its letters determine which axes of the weight are contracted.
    - `inputs`: in Linen, the position of the inputs among the arguments of the call.
    - `bias`: the name of a parameter that is added to the result; None if there is none.

    **Raises:** `TypeError` for other arguments, `ValueError` for an invalid regular expression,
    equation or position.

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
        rules = {
            "module": (type | str, "a class, or a regular expression for its qualified name"),
            "weight": (str | Callable, "the name of a parameter"),
            "equation": (str | Callable, "'inputs,weight->result', or a function of the layer"),
            "bias": (str | None, "the name of a parameter, or None"),
        }
        _check_fields(self, rules, patterns=("module",))
        integer("EinsumLayer", "inputs", self.inputs, "the position of an argument", least=0)

    def matches(self, layer: Any) -> bool:
        return matches(self.module, type(layer))

    def weight_of(self, layer: Any) -> str:
        return _told(self, "weight", layer)

    def equation_of(self, layer: Any, *args: Any) -> str:
        return _told(self, "equation", layer, *args)


@dataclasses.dataclass(frozen=True)
class EinsumParameter:
    """Parameters that a model's code multiplies its inputs by, without a layer.

    `quantize_model(..., layers=[EinsumParameter(...)])` quantizes them without changes to the code:
    the use of the parameter is traced, and products run on the packed words. The code may cast,
    transpose and reshape the parameter and index its batch axes before the product, which any JAX
    function that ends in `jax.lax.dot_general` may compute. It may also look up features, as in
    embeddings. Any other use raises `ValueError` when the code runs.

    **Arguments:**

    - `path`: a regular expression, searched (`re.search`) in the dotted path of the parameter, such
      as `layers.0.mlp.gate_proj`.
    - `equation`: "inputs,weight->result", or a function from the module with the parameter to the
      equation. A letter of the weight is contracted if only the inputs have it, a feature if only
      the result has it, and a batch axis, such as experts, if both have it; the code may also
      select one index of a batch axis. Leading axes without a letter form a stack.
    - `module`: the class of the module with the parameter, or a regular expression for its whole
      qualified name; None for any.
    - `embedding`: whether it is an embedding table, which a single format leaves in floats.
    - `reader`: in NNX, the class of an outer module whose code reads the parameter too, as for a
      tied head; None if only its own module does.

    **Raises:** `TypeError` for other arguments, `ValueError` for an invalid regular expression or
    equation.

    ```python
    EinsumParameter(r"experts\\.(gate|up)$", "etd,edf->etf")
    EinsumParameter(r"input_embedding$", "...d,vd->...v", embedding=True)
    ```
    """

    path: str
    equation: str | Callable[[Any], str]
    module: _Module = None
    embedding: bool = False
    reader: _Module = None

    def __post_init__(self) -> None:
        regular = "a class, a regular expression for its qualified name, or None"
        rules = {
            "path": (str, "a regular expression on the dotted path of a parameter"),
            "equation": (str | Callable, "'inputs,weight->result', or a function of the module"),
            "module": (_Module, regular),
            "embedding": (bool, "True for a table of embeddings, or False"),
            "reader": (_Module, regular),
        }
        _check_fields(self, rules, patterns=("path", "module", "reader"))

    def matches(self, path: str, module: type) -> bool:
        """Whether it describes the parameter at a dotted path, in a module of this class."""
        if self.module is not None and not matches(self.module, module):
            return False
        return re.search(self.path, path) is not None

    def parsed(self, module: Any, shape: tuple[int, ...]) -> Equation:
        """The equation of a parameter of this shape, perhaps a stack.

        **Raises:** `ValueError` unless it is a product and names axes that the parameter has.
        """
        return Equation.of_last(_told(self, "equation", module), shape)


def _check_fields(
    described: EinsumLayer | EinsumParameter, rules: dict[str, Any], patterns: Sequence[str]
) -> None:
    """Checks types by `rules`, the equation, and the regular expressions `patterns`."""
    caller = type(described).__name__
    for name, (kinds, rule) in rules.items():
        if not isinstance(value := getattr(described, name), kinds):
            raise TypeError(f"{caller}: {name} is {brief(value)}, but it must be {rule}.")
    if isinstance(described.equation, str):
        with within(caller):
            _, kernel, _ = Equation.check_form(described.equation)
            Equation.parse(described.equation, (1,) * len(kernel))
    for name in patterns:
        if isinstance(value := getattr(described, name), str):
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(
                    f"{caller}: {name}={value!r} is no regular expression: {error}."
                ) from None


def matches(module: type | str, kind: type) -> bool:
    """Whether a class is `module`, or has a qualified name that it describes."""
    if isinstance(module, type):
        return kind is module
    return re.fullmatch(module, f"{kind.__module__}.{kind.__qualname__}") is not None


def _told(described: Any, name: str, layer: Any, *args: Any) -> str:
    """Returns a string field of a description, or the result of its function of the layer."""
    value, caller = getattr(described, name), type(described).__name__
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
            f"{caller}: {name} of {type(layer).__name__} is {brief(found)}, but it must be a "
            "string; correct the function."
        )
    return found


def split(layers: Any) -> tuple[list[EinsumLayer], list[EinsumParameter]]:
    """Splits the `layers` of `quantize_model` into layers and parameters."""
    known = EinsumLayer | EinsumParameter
    if not isinstance(layers, Iterable) or not all(isinstance(x, known) for x in layers):
        raise TypeError(
            f"quantize_model: layers is {brief(layers)}, but it must be a list of EinsumLayer, "
            "which say what multiplies by the parameters of other classes, and EinsumParameter, "
            "which say it of parameters by their paths."
        )
    others = [x for x in layers if isinstance(x, EinsumLayer)]
    return others, [x for x in layers if isinstance(x, EinsumParameter)]


def check_used(
    parameters: Iterable[EinsumParameter], used: Sequence[EinsumParameter], paths: list[str]
) -> None:
    """Raises `ValueError` for a description that matches none of the parameters at `paths`."""
    for parameter in parameters:
        if not any(parameter is x for x in used):
            where = ""
            if parameter.module is not None:
                where = f" in a module {getattr(parameter.module, '__name__', parameter.module)}"
            raise ValueError(
                f"quantize_model: EinsumParameter({parameter.path!r}) matches no parameter{where}; "
                f"correct its path. The parameters are {some(paths)}."
            )
