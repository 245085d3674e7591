"""The NNX layers that have quantized counterparts."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx

from .._core.format import Format
from .equation import Equation
from .kernel_axes import as_tuple
from .nnx_einsum import QuantizedEinsum, check_einsum
from .nnx_embed import QuantizedEmbed, check_embed
from .nnx_general import QuantizedLinearGeneral, check_linear_general
from .nnx_linear import QuantizedLinear, check_linear
from .nnx_variables import QuantizedModule
from .weights import Shards


class Kind(NamedTuple):
    """A class of layers: what refuses one, what replaces one, and the name of its weight.

    - `matrix`: k and n of its weight; raises a `ValueError` where that is no product.
    - `named`: only a rule that matches its path quantizes it, no lone format.
    """

    layer: type
    check: Callable[[Any], None]
    quantize: Callable[[Any, Format, Shards], QuantizedModule]
    matrix: Callable[[Any], tuple[int, int]]
    weight: str = "kernel"
    named: bool = False


def _general_matrix(layer: Any) -> tuple[int, int]:
    sizes = (layer.in_features, layer.out_features)
    k, n = (math.prod(as_tuple(size)) for size in sizes)
    return k, n


_KINDS = (
    Kind(
        nnx.Linear,
        check_linear,
        lambda *args: QuantizedLinear.from_linear(*args),
        lambda layer: (layer.in_features, layer.out_features),
    ),
    Kind(
        nnx.LinearGeneral,
        check_linear_general,
        lambda *args: QuantizedLinearGeneral.from_linear_general(*args),
        _general_matrix,
    ),
    Kind(
        nnx.Einsum,
        check_einsum,
        lambda *args: QuantizedEinsum.from_einsum(*args),
        lambda layer: Equation.parse(layer.einsum_str, layer.kernel_shape).axes.matrix_shape,
    ),
    Kind(
        nnx.Embed,
        check_embed,
        lambda *args: QuantizedEmbed.from_embed(*args),
        lambda layer: (layer.features, layer.num_embeddings),
        weight="embedding",
        named=True,
    ),
)

NAMES = ", ".join(f"nnx.{kind.layer.__name__}" for kind in _KINDS)


def kind_of(node: Any) -> Kind | None:
    return next((kind for kind in _KINDS if isinstance(node, kind.layer)), None)
