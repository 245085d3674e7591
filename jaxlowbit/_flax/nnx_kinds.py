"""The NNX layers that have quantized counterparts."""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx

from .._core.format import Format
from .nnx_einsum import QuantizedEinsum, check_einsum
from .nnx_embed import QuantizedEmbed, check_embed
from .nnx_general import QuantizedLinearGeneral, check_linear_general
from .nnx_linear import QuantizedLinear, check_linear
from .nnx_variables import QuantizedModule
from .weights import Shards


class Kind(NamedTuple):
    """A class of layers: what refuses one, what replaces one, and the name of its weight.

    `named`: only a rule that matches its path quantizes it, no lone format.
    """

    layer: type
    check: Callable[[Any], None]
    quantize: Callable[[Any, Format, Shards], QuantizedModule]
    weight: str = "kernel"
    named: bool = False


_KINDS = (
    Kind(nnx.Linear, check_linear, lambda *args: QuantizedLinear.from_linear(*args)),
    Kind(
        nnx.LinearGeneral,
        check_linear_general,
        lambda *args: QuantizedLinearGeneral.from_linear_general(*args),
    ),
    Kind(nnx.Einsum, check_einsum, lambda *args: QuantizedEinsum.from_einsum(*args)),
    Kind(
        nnx.Embed,
        check_embed,
        lambda *args: QuantizedEmbed.from_embed(*args),
        weight="embedding",
        named=True,
    ),
)

NAMES = ", ".join(f"nnx.{kind.layer.__name__}" for kind in _KINDS)


def kind_of(node: Any) -> Kind | None:
    return next((kind for kind in _KINDS if isinstance(node, kind.layer)), None)
