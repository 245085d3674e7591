"""`Decoder`: one transformer for all architectures (`architectures.py`), described by a `Config`.

It is also an example of a model with quantized weights. The residual stream x of a decoder with L
blocks is computed as

    x = embedding[tokens]
    q, k, v = norm(x) times the weights of block 0
    for each block:  x, (q, k, v) = finish(attend(q, k, v), x), with the q, k, v of the next block
    logits = norm(x) times the head

`block.py` contains `attend` and `finish`. On a mesh every device runs this with its shards of the
weights (`sharding.py`). Only two things differ there: the ends, and `add_parts`, which adds the
partial sums of the devices.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from .._backends.cuda_calls import Projection
from .._composite.rms_norm import rms_norm
from .._core import checks
from .._core.array import QuantizedArray
from .._core.columns import take_columns
from .._core.format import Format
from .._flax import arguments
from .._matmul.quantized_lhs import least_rows
from . import attention, block_steps, rope
from .block import Block, multiply, norm_variable
from .cache import Cache, cache_specs, make_cache
from .config import Config, check_config
from .low_rank import LowRank, Weight, base_of, variable
from .sampling import first_largest
from .sharding import Division


class Decoder(nnx.Module):
    """A decoder with quantized weights: tokens to logits.

    **Arguments:**

    - `config`: sizes and kinds.
    - `weights`: by name. Matrices are (in, out), quantized or float: `layers.N.{q,k,v,o}`,
      `layers.N.{gate,up,down}`, with experts stacks (experts, in, out), `head` (width, vocabulary)
      unless `config.tied_head`, and `embedding` (width, vocabulary), whose columns are looked up.
      Vectors are floats:
      `layers.N.{attention_norm,mlp_norm}`, `final_norm`, and, if the configuration has them,
      `layers.N.{q,k,v,o,gate,up,down}_bias`, `layers.N.{q,k}_norm`, `layers.N.{q,k}_all_norm` and
      `layers.N.post_{attention,mlp}_norm`, `layers.N.sinks`; so is `layers.N.router` (width,
      experts). `Config.shapes` lists all weights, also of a dense MLP in addition to experts.
    - `dtype`: float32, bfloat16 or float16, of activations and the cache.
    - `lhs_qtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, the inputs of products with
      quantized matrices of blocks are rounded to it, with a scale per token
      (`quantize_activations`). Embedding and head always have float inputs.
    - `lhs_min_rows`: minimum number of tokens, over all sequences, for such rounding. None for 1
      on a CPU, and for 32 or 192 on a GPU, where products are faster from then on.
    - `cache_dtype`: `jnp.int8` or `jnp.float8_e4m3fn`, of cached keys and values, with a scale per
      token and head; None for `dtype`.
    - `mesh`: a mesh with one axis, to shard the decoder over its devices; None for one device.
    - `consume`: whether to remove each weight from the dict once it is a variable. Then at most the
      weights of one block exist twice, while its gate and up are stacked.

    Each quantized weight is a variable with a `QuantizedArray`; gate and up of a block are one
    stack. `nnx.state(decoder, QuantizedVariable)` selects these variables.

    **Raises:** `TypeError` for arguments of other types; `ValueError` with the names of missing and
    unknown weights, for weights of another shape or dtype, and for sizes that the number of devices
    does not divide.

    ```python
    decoder = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8).decoder
    decoder(jnp.array([[3, 1, 4]])).shape  # (1, 3, 256)
    ```
    """

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, Weight | LowRank],
        *,
        dtype: Any = jnp.bfloat16,
        lhs_qtype: Any = None,
        lhs_min_rows: int | None = None,
        cache_dtype: Any = None,
        mesh: jax.sharding.Mesh | None = None,
        consume: bool = False,
    ):
        check(config, weights)
        checks.boolean("Decoder", "consume", consume)
        dtype = checks.compute_dtype("Decoder", "dtype", dtype)
        lhs_qtype = arguments.lhs_qtype("Decoder", lhs_qtype)
        check_rows("Decoder", lhs_min_rows)
        weight_of = weights.pop if consume and isinstance(weights, dict) else weights.__getitem__
        self.config = config
        self.dtype = dtype
        self.lhs_qtype = lhs_qtype
        self.cache_dtype = arguments.cache_dtype("Decoder", cache_dtype, dtype)
        self.division: Division | None = None
        self.embedding = variable(weight_of("embedding"))
        blocks = [Block(config, weight_of, i, lhs_qtype) for i in range(config.layers)]
        self.blocks = nnx.List(blocks)
        self.final_norm = norm_variable(config, weight_of("final_norm"))
        self.head = None if config.tied_head else variable(weight_of("head"))
        if mesh is not None:
            self.divide(mesh, caller="Decoder")
        self.lhs_min_rows = lhs_min_rows or self._rows_in_8_bits(mesh)
        for block in self.blocks:
            block.lhs_min_rows = self.lhs_min_rows

    def _rows_in_8_bits(self, mesh: jax.sharding.Mesh | None) -> int:
        """The minimum number of rows that makes all products of the blocks faster in 8 bits."""
        device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
        if self.lhs_qtype is None or device.platform != "gpu":
            return 1
        matrices = [base_of(w.get_value()) for block in self.blocks for w in block.weights]
        quantized = [w for w in matrices if isinstance(w, QuantizedArray)]
        return max((least_rows(self.lhs_qtype, w) for w in quantized), default=1)

    def divide(self, mesh: jax.sharding.Mesh, caller: str = "shard") -> None:
        """Shards the decoder over the devices of a mesh with one axis.

        **Raises:** `ValueError` for sizes that the number of devices does not divide, before
        anything is moved.
        """
        division = Division.of(caller, self.config, mesh, self._formats)
        division.place_variables(self)
        for module in (self, *self.blocks):
            module.division = division

    @property
    def _formats(self) -> dict[str, Format | None]:
        """The formats of the matrices that are sharded along k, by name."""
        matrices = {
            f"layers.{i}.{name}": base_of(getattr(block, name).get_value())
            for i, block in enumerate(self.blocks)
            for name in ("o", "down", "dense_down")
            if getattr(block, name) is not None
        }
        return {
            name: weight.format if isinstance(weight, QuantizedArray) else None
            for name, weight in matrices.items()
        }

    def __call__(self, tokens: Any) -> Array:
        """Returns the logits, float32 (batch, length, vocabulary), of tokens (batch, length).

        **Raises:** `ValueError` for tokens of another shape or dtype.

        ```python
        decoder = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8).decoder
        jax.jit(lambda tokens: decoder(tokens))(jnp.array([[3, 1, 4]]))
        ```
        """
        rule = "tokens, integers (batch, length)"
        tokens = checks.array("Decoder", "tokens", tokens, rule)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"Decoder: tokens are {tokens.dtype}{list(tokens.shape)}, but they must be "
                "integers (batch, length); a single prompt is a batch of one."
            )
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        batch, length = tokens.shape
        cache = self.make_cache(batch, length)
        # On a mesh, column indices are computed from tokens in int32, whatever their dtype.
        return self.logits(self.forward(tokens.astype(jnp.int32), positions, cache)[0])

    def make_cache(self, batch: int, slots: int) -> Cache:
        """An empty cache for this decoder, on its devices."""
        mesh = None if self.division is None else self.division.mesh
        return make_cache(self.config, batch, slots, self.cache_dtype, mesh)

    def replicate(self, arrays: Any) -> Any:
        """Arrays replicated over the devices of this decoder."""
        if self.division is None:
            return arrays
        return jax.device_put(arrays, jax.NamedSharding(self.division.mesh, jax.P()))

    @property
    def parts(self) -> int:
        """The number of devices that it is sharded over."""
        return 1 if self.division is None else self.division.parts

    def forward(
        self, tokens: Array, positions: Array, cache: Cache, *, reach: int | None = None
    ) -> tuple[Array, Cache]:
        """Appends tokens to a cache and returns the input of the head.

        **Arguments:**

        - `tokens`: integers (batch, length).
        - `positions`: of the tokens in their sequences, int32 (batch, length), ascending; -1 for
          padding, whose results have no meaning.
        - `cache`: from `make_cache`, or from the call for the previous tokens; with `length` free
          slots.
        - `reach`: the number of slots that attention reads, at least those in use after this call;
          None for all. A smaller reach makes the first chunks of a prompt cheaper.

        **Returns:** normalized features (batch, length, width), and the cache.
        """
        local = functools.partial(Decoder._forward, reach=reach)
        return self._on_each(local, tokens, positions, cache, jax.P())

    def decode(self, tokens: Array, positions: Array, cache: Cache) -> tuple[Array, Cache]:
        """`forward` for a token of each sequence, and the logits of the next one.

        With our CUDA kernels it can be a single custom call from the embeddings to the logits.

        **Arguments:** as for `forward`, with tokens and positions (batch,).

        **Returns:** `divided_logits` (batch, vocabulary), and the cache.
        """
        axis = None if self.division is None else self.division.axis
        return self._on_each(Decoder._decode, tokens, positions, cache, jax.P(None, axis))

    def _on_each(
        self,
        function: Callable[..., tuple[Array, Cache]],
        tokens: Array,
        positions: Array,
        cache: Cache,
        out_spec: jax.P,
    ) -> tuple[Array, Cache]:
        """`function` of this decoder and the arguments, on every device."""
        if self.division is None:
            return function(self, tokens, positions, cache)
        placed = cache_specs(self.config, self.division.axis, self.cache_dtype)
        specs = {"in_specs": (jax.P(), jax.P(), placed), "out_specs": (out_spec, placed)}
        return self.division.on_each(function, self, **specs)(tokens, positions, cache)

    def _forward(
        self, tokens: Array, positions: Array, cache: Cache, *, reach: int | None
    ) -> tuple[Array, Cache]:
        """`forward` on one device, or on one of several."""
        x, _, cache = self._run(tokens, positions, cache, reach=reach)
        return self._normalize(x), cache

    def _decode(self, tokens: Array, positions: Array, cache: Cache) -> tuple[Array, Cache]:
        """`decode` on one device, or on one of several."""
        head, norm = self._head, self.final_norm.get_value()
        last = Projection(norm, [head]) if isinstance(head, QuantizedArray) else None
        x, products, cache = self._run(tokens[:, None], positions[:, None], cache, head=last)
        if products is None:
            return self._logits(self._normalize(x)[:, 0]), cache
        return self._scaled(products[:, 0]), cache

    def _run(
        self,
        tokens: Array,
        positions: Array,
        cache: Cache,
        *,
        reach: int | None = None,
        head: Projection | None = None,
    ) -> tuple[Array, Array | None, Cache]:
        """`block_steps.run` of all blocks."""
        cache = cache.advance(positions)
        config, real = self.config, jnp.maximum(positions, 0)
        long = config.takes_long_factors(cache.slots)
        rotations = [rope.rotation(config, real, local=x, long=long) for x in (False, True)]
        cached = reach is not None or tokens.shape[1] == 1
        reach = cache.slots if reach is None else reach
        implementations: list[attention.Implementation] = [
            self._implementation(tokens, reach, local=local, cached=cached)
            for local in (False, True)
        ]
        return block_steps.run(
            [*self.blocks],
            self._embed(tokens),
            self._add,
            rotations,
            positions,
            cache,
            head=head,
            dtype=self.dtype,
            implementations=implementations,
            reach=reach,
        )

    def _normalize(self, x: Array) -> Array:
        return rms_norm(x, self.final_norm.get_value(), self.config.norm_epsilon)

    def _implementation(
        self, tokens: Array, reach: int, *, local: bool, cached: bool
    ) -> attention.Implementation:
        """The implementation of attention in layers with a window (`local`), or without one."""
        config, parts = self.config, self.parts
        kv_heads, head_size = config.head_sizes(local=local)
        native = config.rotated_size(local=local) == head_size and attention.native(
            self.dtype, config.heads // parts, kv_heads // parts, head_size, self.cache_dtype
        )
        return attention.choose(
            jax.default_backend(),
            self.dtype,
            batch=tokens.shape[0],
            queries=tokens.shape[1],
            length=reach,
            head_size=head_size,
            native=native,
            cached=cached,
            plain=config.attention_softcap is not None,
            sinks=config.sinks,
        )

    def _embed(self, tokens: Array) -> Array:
        """The scaled embeddings of tokens, float32 (batch, length, width); on several devices the
        part of each."""
        table = self.embedding.get_value()
        if self.division is None:
            return take(table, tokens) * self.config.embedding_scale
        own, there = self.division.own_columns(tokens, self.config.vocabulary, table.shape[-1])
        x = jnp.where(there[..., None], take(table, own), 0)
        return x * self.config.embedding_scale

    def _add(self, parts: Array) -> Array:
        """The sum of the embeddings of all devices, in the dtype of activations."""
        if self.division is None:
            return parts.astype(self.dtype)
        if parts.shape[1] > 1:
            return self.division.add(parts).astype(self.dtype)
        return self.division.add_rows(parts, self.dtype)

    def logits(self, x: Array) -> Array:
        """The logits, float32 (..., vocabulary), for a result of `forward` (..., width)."""
        return self.joined(self.divided_logits(x))

    def divided_logits(self, x: Array) -> Array:
        """The logits, float32 (..., vocabulary); on several devices with padding, and each
        device has its part of the vocabulary."""
        if self.division is None:
            return self._logits(x)
        columns = jax.P(*[None] * (x.ndim - 1), self.division.axis)
        local = self.division.on_each(Decoder._logits, self, in_specs=(jax.P(),), out_specs=columns)
        return local(x)

    def joined(self, logits: Array) -> Array:
        """The logits (..., vocabulary) on every device, of `divided_logits`."""
        if (division := self.division) is None:
            return logits
        join = functools.partial(division.join_columns, columns=self.config.vocabulary)
        return division.on_columns(join, logits, jax.P())

    def largest(self, logits: Array) -> tuple[Array, Array]:
        """The largest of the logits of each sequence (batch,), of `divided_logits`, and the first
        tokens that have them. NaN counts as the largest."""
        if (division := self.division) is None:
            return first_largest(logits)
        local = functools.partial(division.argmax, columns=self.config.vocabulary)
        return division.on_columns(local, logits, (jax.P(), jax.P()))

    @property
    def _head(self) -> Weight | LowRank:
        return (self.embedding if self.head is None else self.head).get_value()

    def _logits(self, x: Array) -> Array:
        return self._scaled(multiply(x, self._head, jnp.float32))

    def _scaled(self, logits: Array) -> Array:
        """Logits of products with the head."""
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def take(table: Weight, tokens: Array) -> Array:
    """The columns of a table (k, n) at tokens (...), float32 (..., k)."""
    if isinstance(table, QuantizedArray):
        return take_columns(table, tokens, jnp.float32)
    return jnp.moveaxis(jnp.take(table.astype(jnp.float32), tokens, axis=1), 0, -1)


def check(config: Config, weights: Mapping[str, Weight | LowRank]) -> None:
    """Raises for weights that do not match a configuration."""
    check_config("Decoder", config)
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"Decoder: weights is {checks.brief(weights)}, but it must be a mapping from the names "
            "of Config.shapes() to matrices, quantized or float, and vectors."
        )
    expected = config.shapes()
    missing, unknown = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    for names, what in ((missing, "are missing"), (unknown, f"are not of {config.architecture}")):
        if names:
            shown = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(f"Decoder: {len(names)} weights {what}: {shown}.")
    for name, shape in expected.items():
        if not isinstance(weights[name], QuantizedArray | LowRank):
            checks.shaped("Decoder", name, weights[name])
        if tuple(weights[name].shape) != shape:
            raise ValueError(
                f"Decoder: {name} has shape {tuple(weights[name].shape)}, but the configuration "
                f"asks for {shape}."
            )


def check_rows(caller: str, rows: Any) -> None:
    """Raises unless `rows` is None or a number of tokens."""
    if rows is not None:
        rule = "a number of tokens from 1 on, or None; fewer are not rounded"
        checks.integer(caller, "lhs_min_rows", rows, rule)
