"""The Linen layers that have quantized counterparts."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import linen as nn
from jax import Array

from .._formats import Format
from .linen_dense import dense
from .linen_general import dense_general, general_matrix


class Kind(NamedTuple):
    """A class of layers.

    - `methods`: what computes instead of each method, given the layer and the format first.
    - `options`: attributes that a quantized product has not: None, or the layer is refused.
    - `matrix`: its weight, or a stack of them, as the matrix that is quantized.
    - `weight`: the name of that among its parameters.
    - `named`: only a rule that matches its path quantizes it, no lone format.
    """

    layer: type[nn.Module]
    methods: Mapping[str, Callable[..., Array]]
    options: tuple[str, ...]
    matrix: Callable[[Any, Array], Array] = lambda layer, weight: weight
    weight: str = "kernel"
    named: bool = False


def _with_bias(compute: Callable[..., Array]) -> Callable[..., Array]:
    def call(layer: Any, format: Format, *args: Any, **kwargs: Any) -> Array:
        bias = layer.get_variable("params", "bias") if layer.use_bias else None
        return compute(layer, format, bias, *args, **kwargs)

    return call


_OPTIONS = ("precision", "dot_general", "dot_general_cls")
_KINDS = (
    Kind(nn.Dense, {"__call__": _with_bias(dense)}, _OPTIONS),
    Kind(nn.DenseGeneral, {"__call__": _with_bias(dense_general)}, _OPTIONS, general_matrix),
)


def kind_of(layer: Any) -> Kind | None:
    return next((kind for kind in _KINDS if isinstance(layer, kind.layer)), None)
