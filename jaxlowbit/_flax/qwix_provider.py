"""Models that qwix quantizes, with products in the kernels of this package.

qwix replaces `jax.lax.dot_general` and its relatives while a model runs, by the methods of a
provider. `PackedProvider` multiplies by packed weights there. Only public names of qwix are used.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._core.array import QuantizedArray
from .._matmul.api import quantized_matmul

try:
    import qwix  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        f"jaxlowbit.qwix: qwix cannot be imported ({error}); pip install "
        '"jaxlowbit[qwix]" brings it.',
        name="qwix",
    ) from None

_METHODS = ("dot_general", "einsum", "get_intercept_map")
if missing := [name for name in _METHODS if not hasattr(qwix.PtqProvider, name)]:
    raise ImportError(
        f"jaxlowbit.qwix: qwix {qwix.__version__} has no PtqProvider.{missing[0]}; install "
        "qwix 0.1.8, for which this module is written."
    )


class PackedProvider(qwix.PtqProvider):
    """A `qwix.PtqProvider` whose products by weights of `pack` run in this package's kernels.

    Products by other weights, such as convolutions, run as in `qwix.PtqProvider`.

    **Arguments:**

    - `rules`: `qwix.QuantizationRule`s. Their `act_qtype` are None, or all int8 or all
      float8_e4m3fn: packed products then round their inputs as `quantized_matmul` does, with a
      scale for each token.

    **Raises:** `ValueError` for other types of activations.

    ```py
    provider = PackedProvider([qwix.QuantizationRule(weight_qtype=jnp.int4, tile_size=64)])
    model = pack(qwix.quantize_model(model, provider, x))
    y = model(x)
    ```
    """

    def __init__(self, rules: Sequence[Any], **options: Any) -> None:
        super().__init__(rules, **options)
        found = {None if r.act_qtype is None else jnp.dtype(r.act_qtype).name for r in rules}
        name = found.pop() if len(found) == 1 else None
        if found or name not in (None, "int8", "float8_e4m3fn"):
            listed = ", ".join(str(rule.act_qtype) for rule in rules)
            raise ValueError(
                f"PackedProvider: act_qtype of the rules is {listed}, but all must be None, int8 "
                "or float8_e4m3fn; use one of these for all rules."
            )
        self._lhs_qtype = None if name is None else jnp.dtype(name)

    def dot_general(
        self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any
    ) -> Any:
        packed = _packed(rhs)
        if packed is None:
            return super().dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)
        contracted, batch = dimension_numbers
        if any(map(len, batch)) or tuple(contracted[1]) != (0,):
            raise ValueError(
                f"PackedProvider: dimension_numbers={dimension_numbers}, but a packed weight "
                "(k, n) is multiplied along k; leave it to qwix, with keep= of pack."
            )
        moved = jnp.moveaxis(lhs, contracted[0][0], -1)
        wanted = kwargs.get("preferred_element_type")
        options = {"lhs_qtype": self._lhs_qtype, "preferred_element_type": wanted}
        return quantized_matmul(moved, packed, **options)

    def einsum(self, einsum_str: str, *operands: Any, **kwargs: Any) -> Any:
        if all(_packed(x) is None for x in operands):
            return super().einsum(einsum_str, *operands, **kwargs)
        raise ValueError(
            f"PackedProvider: einsum {einsum_str} has a packed weight, but only dot "
            "products support it; leave it to qwix, with keep= of pack."
        )


def _packed(value: Any) -> QuantizedArray | None:
    """The packed matrix of a weight of qwix, or None."""
    found = getattr(value, "array", None)
    return found if isinstance(found, QuantizedArray) else None


def pack(model: Any, *, keep: str | Sequence[str] = ()) -> Any:
    """Packs the integer weights (k, n) of a model that qwix has quantized, without rounding.

    **Arguments:**

    - `model`: an `nnx.Module` from `qwix.quantize_model` with a `PackedProvider`, which changes in
      place; or the parameters of a Linen model, from `qwix.quantize_params`.
    - `keep`: names, or parts of paths, of weights to leave to qwix, such as `"embedding"`.

    **Returns:** the model, or new parameters.

    **Raises:** `ValueError` for a model without such weights, and for integers, tiles and zeros
    that `QuantizedArray.from_qarray` does not take.
    """
    kept = (keep,) if isinstance(keep, str) else tuple(keep)
    count = 0

    def packed(path: str, leaf: Any) -> Any:
        nonlocal count
        if not _is_weight(leaf) or leaf.array.qvalue.ndim != 2 or any(x in path for x in kept):
            return leaf
        count += 1
        boxed = isinstance(leaf.array.qvalue, nnx.Variable)
        array = jax.tree.map(_value, leaf.array, is_leaf=_is_variable)
        array = QuantizedArray.from_qarray(array)
        return leaf.replace(array=jax.tree.map(nnx.Param, array) if boxed else array)

    if isinstance(model, nnx.Module):
        found = model
        for path, module in list(nnx.iter_modules(model)):
            for name, leaf in list(vars(module).items()):
                if _is_weight(leaf):
                    setattr(module, name, packed(".".join(map(str, (*path, name))), leaf))
    else:
        found = jax.tree_util.tree_map_with_path(
            lambda path, leaf: packed(jax.tree_util.keystr(path), leaf), model, is_leaf=_is_weight
        )
    if count == 0:
        raise ValueError(
            "pack: the model has no integer weight (k, n) of qwix; run qwix.quantize_model, or "
            "qwix.quantize_params for Linen, first."
        )
    return found


def _is_weight(leaf: Any) -> bool:
    return isinstance(getattr(leaf, "array", None), qwix.QArray)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _value(leaf: Any) -> Any:
    return leaf.get_raw_value() if _is_variable(leaf) else leaf
