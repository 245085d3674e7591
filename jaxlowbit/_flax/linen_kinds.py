"""The Linen layers that have quantized counterparts."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from jax import Array

from .einsum_layers import EinsumLayer
from .einsum_parameters import EinsumParameter
from .equation import Equation
from .kernel_axes import KernelAxes
from .linen_dense import dense, dense_axes
from .linen_einsum import check_einsum, einsum, einsum_axes
from .linen_embed import attend, embed, table_axes
from .linen_general import dense_general, general_axes
from .linen_variables import kernel_of
from .weights import Packing, stand_in


class Kind(NamedTuple):
    """A class of layers.

    - `methods`: what computes instead of each method, given the layer and its packing first.
    - `options`: attributes that a quantized product has not: None, or the layer is refused.
    - `axes`: those of its weight, or of a stack of them, given the shape.
    - `check`: refuses a layer for other reasons, with a `ValueError`.
    - `weight`: the name of that among its parameters.
    - `named`: only a rule that matches its path quantizes it, no lone format.
    - `equation`: of an `EinsumLayer`, that of a call. Such a layer goes by the path of its
      parameter, since a module may have several.
    - `bias`: the name of its bias among its parameters.
    """

    layer: type[nn.Module]
    methods: Mapping[str, Callable[..., Any]]
    options: tuple[str, ...]
    axes: Callable[[Any, tuple[int, ...]], KernelAxes]
    check: Callable[[Any], None] = lambda layer: None
    weight: str = "kernel"
    named: bool = False
    equation: str | None = None
    bias: str | None = "bias"

    def key(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """The path of the parameter of a layer, given what the layer goes by."""
        return path if self.equation is not None else (*path, self.weight)


def _with_bias(compute: Callable[..., Array]) -> Callable[..., Array]:
    def call(layer: Any, packing: Packing, *args: Any, **kwargs: Any) -> Array:
        bias = nn.unbox(layer.get_variable("params", "bias")) if layer.use_bias else None
        return compute(layer, packing, bias, *args, **kwargs)

    return call


def _no_setup(layer: Any, packing: Packing) -> None:
    """Skips the setup of a float layer, which asks for its float weight."""


_OPTIONS = ("precision", "dot_general", "dot_general_cls")
_KINDS = (
    Kind(nn.Dense, {"__call__": _with_bias(dense)}, _OPTIONS, dense_axes),
    Kind(nn.DenseGeneral, {"__call__": _with_bias(dense_general)}, _OPTIONS, general_axes),
    Kind(
        nn.Einsum,
        {"__call__": _with_bias(einsum)},
        ("precision",),
        einsum_axes,
        check_einsum,
    ),
    Kind(
        nn.Embed,
        {"__call__": embed, "attend": attend, "setup": _no_setup},
        (),
        table_axes,
        weight="embedding",
        named=True,
    ),
)

NAMES = ", ".join(f"nn.{kind.layer.__name__}" for kind in _KINDS)


# Layers and parameters of other packages, known by the names of their classes.
_KNOWN = (
    EinsumLayer(
        r"transformers\.models\.gpt2\.modeling_flax_gpt2\.FlaxConv1D",
        "kernel",
        "...k,nk->...n",
        bias="bias",
    ),
    EinsumLayer(
        r"gemma\.gm\.nn\.(\w+\.)*_layers\.Einsum",
        lambda layer: layer.weight_name,
        lambda layer, equation, x: equation,
        inputs=1,
    ),
)
KNOWN_PARAMETERS = (
    EinsumParameter(
        r"(^|\.)input_embedding$",
        "...d,vd->...v",
        module=r"gemma\.gm\.nn\.(\w+\.)*_modules\.Embedder",
        embedding=True,
    ),
    EinsumParameter(
        r"(^|\.)embedding$",
        "...d,vd->...v",
        module=r"transformers\.models\.opt\.modeling_flax_opt\.FlaxOPTLearnedPositionalEmbedding",
        embedding=True,
    ),
)


def kind_of(
    layer: Any, method: str | None = None, others: Sequence[EinsumLayer] = (), args: Any = ()
) -> Kind | None:
    """The kind of a layer of Flax, or, where it is called with `args`, of a class of others."""
    if method == "__call__":
        for other in others:
            if other.matches(layer):
                return _kind_of_other(layer, other, args)
        for other in _KNOWN:
            if other.matches(layer):
                with contextlib.suppress(ValueError):  # a call that is written otherwise
                    return _kind_of_other(layer, other, args)
    return next((kind for kind in _KINDS if isinstance(layer, kind.layer)), None)


def _kind_of_other(layer: Any, other: EinsumLayer, args: Any) -> Kind:
    name, equation = other.weight_of(layer), other.equation_of(layer, *args)

    def axes(layer: Any, shape: tuple[int, ...]) -> KernelAxes:
        letters = len(equation.partition(",")[2].partition("->")[0].strip())
        return Equation.parse(equation, shape[len(shape) - letters :]).axes

    def compute(layer: Any, packing: Packing, *args: Any) -> Array:
        text, shape = packing.equation or (equation, ())
        parsed = Equation.parse(equation, shape)
        if parsed.axes != Equation.parse(text, shape).axes:
            raise ValueError(
                f"{'.'.join(layer.path)} was quantized for the equation {text!r}, but is called "
                f"with {equation!r}, which takes other axes of its {name}; keep it in floats."
            )
        if len(args) <= other.inputs:
            raise ValueError(
                f"EinsumLayer: {type(layer).__name__} is called with {len(args)} arguments by "
                f"position, but inputs={other.inputs}; name the position of the inputs."
            )
        kernel = kernel_of(layer, packing, parsed.axes, name)
        bias = layer.get_variable("params", other.bias) if other.bias else None
        like = stand_in(kernel, getattr(layer, "param_dtype", None))
        operands = (jnp.asarray(args[other.inputs]), like, nn.unbox(bias))
        dtype = getattr(layer, "dtype", None)
        inputs, _, bias = promote_dtype(*operands, dtype=dtype)
        return parsed.multiply(inputs, kernel, None, bias, packing.activation_dtype)

    return Kind(
        type(layer),
        {"__call__": compute},
        ("precision",) if hasattr(layer, "precision") else (),
        axes,
        weight=name,
        equation=equation,
        bias=other.bias,
    )


def parameter_kind(module: Any, name: str, other: EinsumParameter) -> Kind:
    """The kind of a raw parameter of a module, which goes by its own path."""

    def axes(layer: Any, shape: tuple[int, ...]) -> KernelAxes:
        return other.parsed(layer, shape).axes

    def check(layer: Any) -> None:
        del layer

    return Kind(type(module), {}, (), axes, check, name, other.embedding, equation="", bias=None)
