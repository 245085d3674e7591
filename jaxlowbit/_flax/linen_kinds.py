"""The Linen layers that have quantized counterparts."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import linen as nn
from jax import Array

from .kernel_axes import KernelAxes
from .linen_dense import dense, dense_axes
from .linen_einsum import check_einsum, einsum, einsum_axes
from .linen_embed import attend, embed, table_axes
from .linen_general import dense_general, general_axes
from .weights import Packing


class Kind(NamedTuple):
    """A class of layers.

    - `methods`: what computes instead of each method, given the layer and its packing first.
    - `options`: attributes that a quantized product has not: None, or the layer is refused.
    - `axes`: those of its weight, or of a stack of them, given the shape.
    - `check`: refuses a layer for other reasons, with a `ValueError`.
    - `weight`: the name of that among its parameters.
    - `named`: only a rule that matches its path quantizes it, no lone format.
    """

    layer: type[nn.Module]
    methods: Mapping[str, Callable[..., Any]]
    options: tuple[str, ...]
    axes: Callable[[Any, tuple[int, ...]], KernelAxes]
    check: Callable[[Any], None] = lambda layer: None
    weight: str = "kernel"
    named: bool = False


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


def kind_of(layer: Any) -> Kind | None:
    return next((kind for kind in _KINDS if isinstance(layer, kind.layer)), None)
