"""Raw parameters: what the code around them multiplies by them, as an equation says."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

from .._core.checks import brief, within
from .einsum_layers import EinsumLayer, matches, told
from .equation import Equation

_Module = type | str | None


@dataclasses.dataclass(frozen=True)
class EinsumParameter:
    """Parameters that the code of a model multiplies its inputs by, where they stand.

    `quantize_model(..., layers=[EinsumParameter(...)])` quantizes them, and the code stays as it
    is: what it does with the parameter is traced, and products run on the packed words. It may cast
    the parameter, transpose it, reshape it and index its batch axes before it multiplies by it, by
    any function of JAX that ends in `jax.lax.dot_general`, and look up features, as in embeddings.
    Another use of it is refused when the code runs.

    **Arguments:**

    - `path`: a regular expression, searched (`re.search`) in the dotted path of the parameter, such
      as `layers.0.mlp.gate_proj`.
    - `equation`: "inputs,weight->result", or a function that makes it of the module that holds the
      parameter. It says what the axes of the weight are: contracted if only the inputs have the
      letter, features if only the result has it, and batch axes, such as experts, if both have it,
      of which the code may also take one. First axes that it does not name are those of a stack.
    - `module`: the class of the module that holds the parameter, or a regular expression for the
      whole of its qualified name; None for any.
    - `embedding`: whether it is a table of embeddings, which a lone format keeps.
    - `reader`: in NNX, the class of a module around it whose code reads the parameter too, as for a
      tied head; None if only the module that holds it does.

    **Raises:** `TypeError` for other arguments, `ValueError` for what is no regular expression
    or no equation.

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
        for name, kinds, rule in (
            ("path", str, "a regular expression on the dotted path of a parameter"),
            ("equation", str | Callable, "'inputs,weight->result', or a function of the module"),
            ("module", _Module, regular),
            ("embedding", bool, "True for a table of embeddings, or False"),
            ("reader", _Module, regular),
        ):
            if not isinstance(value := getattr(self, name), kinds):
                raise TypeError(f"EinsumParameter: {name} is {brief(value)}, but it is {rule}.")
        if isinstance(self.equation, str):
            with within("EinsumParameter"):
                Equation.check_form(self.equation)
        for name in ("path", "module", "reader"):
            if isinstance(value := getattr(self, name), str):
                try:
                    re.compile(value)
                except re.error as error:
                    raise ValueError(
                        f"EinsumParameter: {name}={value!r} is no regular expression: {error}."
                    ) from None

    def matches(self, path: str, module: type) -> bool:
        """Whether it describes the parameter at a dotted path, in a module of this class."""
        if self.module is not None and not matches(self.module, module):
            return False
        return re.search(self.path, path) is not None

    def parsed(self, module: Any, shape: tuple[int, ...]) -> Equation:
        """The equation of a parameter of this shape, perhaps a stack.

        **Raises:** `ValueError` where it is no product, or names more axes than there are.
        """
        text = told("EinsumParameter", "equation", self.equation, module)
        letters = len(text.partition(",")[2].partition("->")[0].strip())
        return Equation.parse(text, shape[max(len(shape) - letters, 0) :])


def split(layers: Any) -> tuple[list[EinsumLayer], list[EinsumParameter]]:
    """The layers and the parameters that a caller of `quantize_model` describes."""
    known = EinsumLayer | EinsumParameter
    if not isinstance(layers, Iterable) or not all(isinstance(x, known) for x in layers):
        raise TypeError(
            f"quantize_model: layers is {brief(layers)}, but it is a list of EinsumLayer, which "
            "say what multiplies by the parameters of other classes, and EinsumParameter, which "
            "say it of parameters by their paths."
        )
    others = [x for x in layers if isinstance(x, EinsumLayer)]
    return others, [x for x in layers if isinstance(x, EinsumParameter)]


def check_used(
    parameters: Iterable[EinsumParameter], used: Iterable[EinsumParameter], paths: list[str]
) -> None:
    """Refuses a description of no parameter; `paths` are those of all that could be meant."""
    used = list(used)
    for parameter in parameters:
        if not any(parameter is x for x in used):
            where = ""
            if parameter.module is not None:
                where = f" in a module {getattr(parameter.module, '__name__', parameter.module)}"
            listed = ", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if paths[8:] else "")
            raise ValueError(
                f"quantize_model: EinsumParameter({parameter.path!r}) matches no parameter{where}; "
                f"correct its path. The parameters are {listed}."
            )
