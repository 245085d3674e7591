"""`QuantizedEmbed`: `nn.Embed` with a quantized table."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes
from jax import Array

from .._core import checks
from .._core.array import QuantizedArray
from .._core.format import Format
from .._matmul.api import quantized_matmul
from . import arguments
from .embedding import lookup, tokens_of
from .kernel_axes import KernelAxes
from .linen_errors import QueryWidthError
from .linen_variables import initialise, kernel_of, packing_of
from .weights import Packing, Shards, stand_in


class QuantizedEmbed(nn.Module):
    """`nn.Embed` with a quantized table, looked up by tokens and, in `attend`, multiplied by.

    The table is packed as a matrix (features, num_embeddings), with groups along the features, so
    that `attend` is a quantized product; a lookup reads the columns of its tokens and dequantizes
    no other. The table's arrays are variables of the collection `"quantized"`, as those of
    `QuantizedDense`.

    **Arguments:** those of `nn.Embed`, and

    - `format`: a `Format`, or its name. The table is initialised in `param_dtype`, then quantized;
      its scales have `param_dtype`: float32, bfloat16 or float16.
    - `shards`: the number of equal parts of k and n into which devices will cut the matrix, as for
      `jaxlowbit.quantize`.
    - `activation_dtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, to which `attend` quantizes
      its queries, as that of `jaxlowbit.quantized_matmul`.

    **Raises:** `ValueError` where `jaxlowbit.quantize` does, and if applied to variables without
    its table, or with one of other sizes.

    ```python
    layer = QuantizedEmbed(1000, 256, format=INT4)
    variables = layer.init(jax.random.key(0), jnp.array([3, 1, 4]))
    x = layer.apply(variables, jnp.array([3, 1, 4]))
    logits = layer.apply(variables, x, method="attend")
    ```
    """

    num_embeddings: int
    features: int
    format: Format | str
    shards: Shards = (1, 1)
    dtype: Any = None
    param_dtype: Any = jnp.float32
    embedding_init: Callable[..., Any] = nn.linear.default_embed_init
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype
    activation_dtype: Any = None

    def setup(self) -> None:
        caller = type(self).__name__
        packing = packing_of(self, "embedding_init")
        tokens = arguments.size(caller, "num_embeddings", self.num_embeddings)
        shape = (tokens, arguments.size(caller, "features", self.features))

        def table() -> Any:
            return self.embedding_init(self.make_rng("params"), shape, self.param_dtype)

        initialise(self, packing, table, table_axes(self, shape))

    @property
    def _packing(self) -> Packing:
        return packing_of(self)

    def __call__(self, inputs: Any) -> Array:
        """Returns the embeddings (..., features) of tokens (...), integers.

        A negative token counts from the end of the table, and one that the table has not gives
        NaN, as in `nn.Embed`.
        """
        return embed(self, self._packing, inputs)

    def attend(self, query: Any) -> Array:
        """Returns the products (..., num_embeddings) of queries (..., features) with the table."""
        return attend(self, self._packing, query)


def table_axes(layer: Any, shape: tuple[int, ...]) -> KernelAxes:
    """The axes of a table of `shape`, perhaps a stack of them."""
    del layer
    return KernelAxes((), shape[-1:], shape[-2:-1], order=(1, 0))


def embed(module: Any, packing: Packing, inputs: Any) -> Array:
    """What `nn.Embed` computes, with the table that `module` has in the collection."""
    table = _table(module, packing)
    (like,) = module.promote_dtype(
        stand_in(table, module.param_dtype), dtype=module.dtype, inexact=False
    )
    return lookup(table, tokens_of(inputs), like.dtype)


def attend(module: Any, packing: Packing, query: Any) -> Array:
    """What `nn.Embed.attend` computes, with the table that `module` has in the collection."""
    caller, table = type(module).__name__, _table(module, packing)
    query = arguments.activations(caller, "query", query)
    shape = query.shape
    if shape[-1:] != (table.k,):
        raise QueryWidthError(
            f"{caller}: {'.'.join(module.path) or 'the layer'} attends to queries "
            f"(..., {table.k}), but these have shape {shape}; pass queries of {table.k} features."
        )
    like = stand_in(table, module.param_dtype)
    with checks.within(caller, lhs="query", rhs="the table"):
        query, _ = module.promote_dtype(query, like, dtype=module.dtype)
        return quantized_matmul(query, table, activation_dtype=packing.activation_dtype)


def _table(module: Any, packing: Packing) -> QuantizedArray:
    shape = (module.num_embeddings, module.features)
    return kernel_of(module, packing, table_axes(module, shape))
