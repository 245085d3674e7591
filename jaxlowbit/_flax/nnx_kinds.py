"""The NNX layers that have quantized counterparts."""

import math
import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flax import nnx

from .._core.checks import brief
from .._core.format import Format
from .einsum_layers import EinsumLayer
from .einsum_parameters import EinsumParameter
from .equation import Equation
from .kernel_axes import as_tuple
from .nnx_einsum import QuantizedEinsum, check_einsum
from .nnx_embed import QuantizedEmbed, check_embed
from .nnx_general import QuantizedLinearGeneral, check_linear_general
from .nnx_linear import QuantizedLinear, check_linear
from .nnx_parameters import QuantizedParameter
from .nnx_variables import QuantizedModule
from .weights import Shards


class Kind(NamedTuple):
    """A class of layers: what refuses one, what replaces one, and the name of its weight.

    - `quantize`: takes the format, the shards and the dtype of quantized activations.
    - `matrix`: k and n of its weight; raises a `ValueError` where that is no product.
    - `named`: only a rule that matches its path quantizes it, no lone format.
    """

    layer: type
    check: Callable[[Any], None]
    quantize: Callable[[Any, Format, Shards, Any], QuantizedModule]
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


def _general_equation(layer: Any) -> str:
    """That of MaxText's `DenseGeneral`, whose kernel has the contracted axes first."""
    letters = string.ascii_letters[: len(layer.in_features_shape + layer.out_features_shape)]
    count = len(layer.in_features_shape)
    return f"...{letters[:count]},{letters}->...{letters[count:]}"


# Layers and parameters of other packages, known by the names of their classes.
_KNOWN = (EinsumLayer(r"tunix\.models\.\w+\.model\.Einsum", "w", lambda layer: layer.einsum_str),)
KNOWN_PARAMETERS = (
    EinsumParameter(
        r"(^|\.)input_embedding$",
        "...d,vd->...v",
        module=r"tunix\.models\.\w+\.model\.Embedder",
        embedding=True,
    ),
    EinsumParameter(
        r"(^|\.)(gate|up|down)_proj$",
        "e...k,ekn->e...n",
        module=r"tunix\.models\.\w+\.model\.MoELayer",
    ),
    EinsumParameter(
        r"(^|\.)kernel$", _general_equation, module=r"maxtext\.layers\.linears\.DenseGeneral"
    ),
    EinsumParameter(
        r"(^|\.)embedding$",
        "...d,vd->...v",
        module=r"maxtext\.layers\.embeddings\.Embed",
        embedding=True,
    ),
    EinsumParameter(
        r"(^|\.)embedder\.embedding$",
        "...d,vd->...v",
        embedding=True,
        reader=r"mamba2_jax\.modeling\.Mamba2ForCausalLM",
    ),
)


def kind_of(node: Any, others: Sequence[EinsumLayer] = ()) -> Kind | None:
    """The kind of a layer of Flax, of another package, or one that the caller describes."""
    found = next((kind for kind in _KINDS if isinstance(node, kind.layer)), None)
    other = next((other for other in (*others, *_KNOWN) if other.matches(node)), None)
    return found if other is None else _kind_of_other(node, other)


def _kind_of_other(node: Any, other: EinsumLayer) -> Kind:
    weight = other.weight_of(node)

    if not isinstance(found := getattr(node, weight, None), nnx.Variable):
        raise ValueError(
            f"quantize_model: {type(node).__name__} has {weight}={brief(found)}, but the weight of "
            "an EinsumLayer is an nnx.Variable; name the attribute that holds it."
        )

    def check(layer: Any) -> None:
        other.equation_of(layer)

    def equation(layer: Any) -> Equation:
        return other.parsed(layer, getattr(layer, weight).get_value().shape)

    def quantize(
        layer: Any, format: Format, shards: Shards, activation_dtype: Any
    ) -> QuantizedModule:
        variable = getattr(layer, weight)
        value = variable.get_value()
        new = QuantizedEinsum(
            other.equation_of(layer),
            value.shape,
            format=format,
            shards=shards,
            activation_dtype=activation_dtype,
            dtype=getattr(layer, "dtype", None),
            param_dtype=value.dtype,
            kernel_init=lambda *_: variable,
            rngs=nnx.Rngs(0),
        )
        bias = None if other.bias is None else getattr(layer, other.bias)
        if bias is not None:
            new.bias, new.bias_shape = bias, bias.get_value().shape
        # Code around the layer may read what it says of itself, such as its shape.
        for name, told in vars(layer).items():
            if not hasattr(new, name) and not isinstance(told, nnx.Variable | nnx.Module):
                setattr(new, name, told)
        return new

    def matrix(layer: Any) -> tuple[int, int]:
        return equation(layer).axes.matrix_shape

    return Kind(type(node), check, quantize, matrix, weight)


def parameter_kind(module: Any, name: str, other: EinsumParameter) -> Kind:
    """The kind of a raw parameter of a module."""

    def equation(holder: Any) -> Equation:
        return other.parsed(holder, tuple(getattr(holder, name).get_value().shape))

    def check(holder: Any) -> None:
        equation(holder)

    def quantize(
        holder: Any, format: Format, shards: Shards, activation_dtype: Any
    ) -> QuantizedModule:
        weight = getattr(holder, name)
        return QuantizedParameter(weight, equation(holder), format, shards, activation_dtype)

    def matrix(holder: Any) -> tuple[int, int]:
        return equation(holder).axes.matrix_shape

    return Kind(type(module), check, quantize, matrix, name, other.embedding)
