"""The Linen layers that have quantized counterparts."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from .._formats import Format
from .linen_dense import dense
from .linen_einsum import check_einsum, einsum, einsum_matrix
from .linen_embed import attend, embed
from .linen_general import dense_general, general_matrix


class Kind(NamedTuple):
    """A class of layers.

    - `methods`: what computes instead of each method, given the layer and the format first.
    - `options`: attributes that a quantized product has not: None, or the layer is refused.
    - `matrix`: its weight, or a stack of them, as the matrix that is quantized.
    - `check`: refuses a layer for other reasons, with a `ValueError`.
    - `weight`: the name of that among its parameters.
    - `named`: only a rule that matches its path quantizes it, no lone format.
    """

    layer: type[nn.Module]
    methods: Mapping[str, Callable[..., Any]]
    options: tuple[str, ...]
    matrix: Callable[[Any, Array], Array] = lambda layer, weight: weight
    check: Callable[[Any], None] = lambda layer: None
    weight: str = "kernel"
    named: bool = False


def _with_bias(compute: Callable[..., Array]) -> Callable[..., Array]:
    def call(layer: Any, format: Format, *args: Any, **kwargs: Any) -> Array:
        bias = layer.get_variable("params", "bias") if layer.use_bias else None
        return compute(layer, format, bias, *args, **kwargs)

    return call


def _no_setup(layer: Any, format: Format) -> None:
    """Skips the setup of a float layer, which asks for its float weight."""


_OPTIONS = ("precision", "dot_general", "dot_general_cls")
_KINDS = (
    Kind(nn.Dense, {"__call__": _with_bias(dense)}, _OPTIONS),
    Kind(nn.DenseGeneral, {"__call__": _with_bias(dense_general)}, _OPTIONS, general_matrix),
    Kind(
        nn.Einsum,
        {"__call__": _with_bias(einsum)},
        ("precision",),
        einsum_matrix,
        check_einsum,
    ),
    Kind(
        nn.Embed,
        {"__call__": embed, "attend": attend, "setup": _no_setup},
        (),
        lambda layer, weight: jnp.swapaxes(weight, -1, -2),
        weight="embedding",
        named=True,
    ),
)


def kind_of(layer: Any) -> Kind | None:
    return next((kind for kind in _KINDS if isinstance(layer, kind.layer)), None)
