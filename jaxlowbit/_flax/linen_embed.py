"""`QuantizedEmbed`: `nn.Embed` with a quantized table."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes
from jax import Array

from .._formats import Format
from .._matmul import quantized_matmul
from .embedding import lookup, stand_in
from .linen_variables import initialise, kernel_of


class QuantizedEmbed(nn.Module):
    """`nn.Embed` with a quantized table, looked up by tokens and, in `attend`, multiplied by.

    The table is packed as a matrix (features, num_embeddings), with groups along the features, so
    that `attend` is a quantized product; a lookup reads the columns of its tokens and dequantizes
    no other. The table's arrays are variables of the collection `"quantized"`, as those of
    `QuantizedDense`.

    **Arguments:** those of `nn.Embed`, and

    - `format`: of the table, which is initialised in `param_dtype`, then quantized. Its scales
      have `param_dtype`: float32, bfloat16 or float16.

    **Raises:** `ValueError` where `jaxlowbit.quantize` does, and if applied to variables without
    its table.

    ```python
    layer = QuantizedEmbed(1000, 256, format=INT4)
    variables = layer.init(jax.random.key(0), jnp.array([3, 1, 4]))
    x = layer.apply(variables, jnp.array([3, 1, 4]))
    logits = layer.apply(variables, x, method="attend")
    ```
    """

    num_embeddings: int
    features: int
    format: Format
    dtype: Any = None
    param_dtype: Any = jnp.float32
    embedding_init: Callable[..., Any] = nn.linear.default_embed_init
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype

    def setup(self) -> None:
        shape = (self.num_embeddings, self.features)

        def weight() -> Array:
            return self.embedding_init(self.make_rng("params"), shape, self.param_dtype).T

        initialise(self, self.format, weight)

    def __call__(self, inputs: Any) -> Array:
        """Returns the embeddings (..., features) of tokens (...), integers.

        A negative token counts from the end of the table, and one that the table has not gives
        NaN, as in `nn.Embed`.
        """
        return embed(self, self.format, inputs)

    def attend(self, query: Any) -> Array:
        """Returns the products (..., num_embeddings) of queries (..., features) with the table."""
        return attend(self, self.format, query)


def embed(module: Any, format: Format, inputs: Any) -> Array:
    """What `nn.Embed` computes, with the table that `module` has in the collection."""
    table = kernel_of(module, format, (module.features, module.num_embeddings))
    (like,) = module.promote_dtype(stand_in(table), dtype=module.dtype, inexact=False)
    return lookup(table, inputs, like.dtype)


def attend(module: Any, format: Format, query: Any) -> Array:
    """What `nn.Embed.attend` computes, with the table that `module` has in the collection."""
    table = kernel_of(module, format, (module.features, module.num_embeddings))
    query, _ = module.promote_dtype(query, stand_in(table), dtype=module.dtype)
    return quantized_matmul(query, table)
