"""`QuantizedEmbed`: `nnx.Embed` with a quantized table."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes, initializers
from jax import Array

from .._core import checks
from .._core.format import Format
from .._matmul.api import quantized_matmul
from . import arguments
from .embedding import lookup, tokens_of
from .kernel_axes import place
from .nnx_variables import QuantizedModule, check_replaceable
from .sharding import Entries
from .weights import Shards, stand_in

default_embed_init = initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


class QuantizedEmbed(QuantizedModule):
    """`nnx.Embed` with a quantized table, looked up by tokens and, in `attend`, multiplied by.

    The table is packed as a matrix (features, num_embeddings), with groups along the features, so
    that `attend` is a quantized product; a lookup reads the columns of its tokens and dequantizes
    no other. The table's arrays are the variables of `QuantizedLinear`, and `kernel` is the
    `QuantizedArray` they form.

    **Arguments:** those of `nnx.Embed`, and

    - `format`: a `Format`, or its name. The table is initialised in `param_dtype`, then quantized;
      its scales have `param_dtype`: float32, bfloat16 or float16.
    - `shards`: the number of equal parts of k and n into which devices will cut the matrix, as for
      `jaxlowbit.quantize`.
    - `activation_dtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, to which `attend` quantizes
      its queries, as that of `jaxlowbit.quantized_matmul`.

    **Raises:** `ValueError` where `jaxlowbit.quantize` does.

    ```python
    embed = QuantizedEmbed(1000, 256, format=INT4, rngs=nnx.Rngs(0))
    logits = embed.attend(embed(jnp.array([3, 1, 4])))
    ```
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        format: Format | str,
        shards: Shards = (1, 1),
        activation_dtype: Any = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: Callable[..., Any] = default_embed_init,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        embedding_metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        caller = type(self).__name__
        self.activation_dtype = arguments.activation_dtype(caller, activation_dtype)
        num_embeddings = arguments.size(caller, "num_embeddings", num_embeddings)
        features = arguments.size(caller, "features", features)
        arguments.check_options(
            self,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=embedding_init,
            promote_dtype=promote_dtype,
        )
        shape = (num_embeddings, features)
        table = embedding_init(rngs.params(), shape, param_dtype)
        if not isinstance(table, nnx.Variable):
            table = nnx.Param(table, **embedding_metadata)
        self._store(table, format, shards)
        self.num_embeddings = num_embeddings
        self.features = features
        self.dtype = dtype or stand_in(self.kernel, param_dtype).dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    @classmethod
    def from_embed(
        cls,
        embed: nnx.Embed,
        format: Format | str,
        shards: Shards = (1, 1),
        activation_dtype: Any = None,
    ) -> "QuantizedEmbed":
        """The layer that quantizes the table of `embed`.

        An abstract layer, made under `nnx.eval_shape`, gives an abstract one. Sharding metadata of
        the table goes over to its arrays.

        **Raises:** `TypeError` if `embed` is no `nnx.Embed`, or of a subclass, `ValueError` where
        `jaxlowbit.quantize` raises.

        ```python
        model.embed = QuantizedEmbed.from_embed(model.embed, INT8)
        ```
        """
        check_embed(embed)
        return cls(
            embed.num_embeddings,
            embed.features,
            format=format,
            shards=shards,
            activation_dtype=activation_dtype,
            dtype=embed.dtype,
            param_dtype=embed.param_dtype,
            embedding_init=lambda *_: embed.embedding,
            promote_dtype=embed.promote_dtype,
            rngs=nnx.Rngs(0),
        )

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.features, self.num_embeddings

    def matrix(self, weight: Any) -> Any:
        return jnp.swapaxes(weight, -1, -2)

    def matrix_entries(self, entries: Entries) -> Entries:
        *lead, tokens, features = entries
        return (*lead, features, tokens)

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        """Returns the embeddings (..., features) of tokens (...), integers.

        A negative token counts from the end of the table, and one that the table has not gives
        NaN, as in `nnx.Embed`. `out_sharding` is that of the result, on a mesh with Explicit axes.
        """
        table = self._single_kernel()
        (like,) = self.promote_dtype(
            (stand_in(table, self.param_dtype),), dtype=self.dtype, inexact=False
        )

        def look(inputs: Any, table: Any) -> Array:
            return lookup(table, inputs, like.dtype)

        tokens = tokens_of(inputs)
        with checks.within(type(self).__name__, lhs="inputs", rhs="the table"):
            return place(look, tokens, table, out_sharding)

    def attend(self, query: Any, out_sharding: Any = None) -> Array:
        """Returns the products (..., num_embeddings) of queries (..., features) with the table.

        `out_sharding` is that of the result, on a mesh with Explicit axes.
        """
        caller = type(self).__name__
        table = self._single_kernel()
        query = arguments.activations(caller, "query", query)
        arguments.check_width(caller, "query", query, table.shape[-2])
        like = stand_in(table, self.param_dtype)
        with checks.within(caller, lhs="query", rhs="the table"):
            query, _ = self.promote_dtype((query, like), dtype=self.dtype)
            return quantized_matmul(
                query, table, activation_dtype=self.activation_dtype, out_sharding=out_sharding
            )


def check_embed(layer: Any) -> None:
    """Refuses a layer that `QuantizedEmbed` cannot stand in for."""
    check_replaceable(layer, nnx.Embed, "QuantizedEmbed.from_embed", {})
