"""`Decoder`: one transformer for Llama, Mistral, Qwen 2 and 3 and Gemma 3, by configuration.

It is also an example of how to write a model with quantized weights. The residual stream x of a
decoder of L blocks goes through

    x = embedding[tokens]
    q, k, v = norm(x) times the weights of block 0
    for each block:  x, (q, k, v) = finish(attend(q, k, v), x), with the q, k, v of the next block
    logits = norm(x) times the head

where `finish` is all from the output projection of a block to the queries, keys and values of the
next: one call, `quantized_block`, where the configuration allows it. With one query of each
sequence, as in a decode step, `attend` belongs to that call on NVIDIA GPUs.

With `activation_dtype` the products of the blocks take quantized activations where there are
`activation_rows` tokens or more: the call of a block rounds them, and `attend` is a call apart.

On a mesh every device runs this with its part of the weights (`sharding.py`). All that differs is
in `add_parts`, around the products whose partial sums the devices add, and at both ends.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from .._backends import cuda_attend
from .._composite import decode_block
from .._composite.block import quantized_block
from .._composite.glu import quantized_glu
from .._composite.matmuls import quantized_matmuls
from .._composite.mlp import quantized_mlp
from .._composite.normalized import normalized_matmuls, normalized_mlp
from .._composite.rms_norm import rms_norm
from .._core import activations, checks
from .._core.array import QuantizedArray
from .._core.columns import take_columns
from .._core.format import Format
from .._flax import arguments
from .._matmul.api import quantized_matmul
from .._matmul.quantized_lhs import least_rows
from . import attention, rope
from .cache import Cache, cache_specs, make_cache
from .config import Config, check_config
from .sharding import Division, MatrixVariable, add_parts

Weight = QuantizedArray | Array
Rotations = tuple[tuple[Array, Array], tuple[Array, Array]]


class Decoder(nnx.Module):
    """A decoder with quantized weights: tokens to logits.

    **Arguments:**

    - `config`: sizes and kinds.
    - `weights`: by name. Matrices are (in, out), quantized or float: `layers.N.{q,k,v,o}`,
      `layers.N.{gate,up,down}`, `head` (width, vocabulary) unless `config.tied_head`, and
      `embedding`, also (width, vocabulary), whose columns are looked up. Vectors are floats:
      `layers.N.{attention_norm,mlp_norm}`, `final_norm`, and where the configuration has them
      `layers.N.{q,k,v}_bias`, `layers.N.{q,k}_norm` and `layers.N.post_{attention,mlp}_norm`.
    - `dtype`: that of activations and of the cache: float32, bfloat16 or float16.
    - `activation_dtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, to which the inputs of every
      product of the blocks with a quantized matrix are rounded, with a scale for each token
      (`quantize_activations`). Embedding and head take floats.
    - `activation_rows`: how many tokens, of all sequences, have to go through the blocks at a time
      for that; fewer are floats. None for what a GPU multiplies faster in 8 bits, by the formats
      of the weights 32 or 192, and for 1 on a CPU.
    - `mesh`: the devices to divide it over, a mesh with one axis; None for one device.
    - `consume`: whether to take the weights out of the dict, so that those of a block, of which
      gate and up are stacked, exist twice at most.

    Quantized weights are variables that hold a `QuantizedArray` each, gate and up of a block as
    one stack; `nnx.state(decoder, QuantizedVariable)` finds them.

    **Raises:** `TypeError` for arguments of other types; `ValueError` with the names of missing and
    unknown weights, for a weight of another shape, another dtype, and for sizes that the devices of
    the mesh do not divide.

    ```python
    decoder = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8).decoder
    decoder(jnp.array([[3, 1, 4]])).shape  # (1, 3, 256)
    ```
    """

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, Weight],
        *,
        dtype: Any = jnp.bfloat16,
        activation_dtype: Any = None,
        activation_rows: int | None = None,
        mesh: jax.sharding.Mesh | None = None,
        consume: bool = False,
    ):
        check(config, weights)
        checks.boolean("Decoder", "consume", consume)
        dtype = checks.compute_dtype("Decoder", "dtype", dtype)
        activation_dtype = arguments.activation_dtype("Decoder", activation_dtype)
        check_rows("Decoder", activation_rows)
        weight_of = weights.pop if consume and isinstance(weights, dict) else weights.__getitem__
        self.config = config
        self.dtype = dtype
        self.activation_dtype = activation_dtype
        self.division: Division | None = None
        self.embedding = _variable(weight_of("embedding"))
        blocks = [Block(config, weight_of, i, activation_dtype) for i in range(config.layers)]
        self.blocks = nnx.List(blocks)
        self.final_norm = _norm(config, weight_of("final_norm"))
        self.head = None if config.tied_head else _variable(weight_of("head"))
        if mesh is not None:
            self.divide(mesh, caller="Decoder")
        self.activation_rows = activation_rows or self._rows_in_8_bits(mesh)
        for block in self.blocks:
            block.activation_rows = self.activation_rows

    def _rows_in_8_bits(self, mesh: jax.sharding.Mesh | None) -> int:
        """The rows from which all products of the blocks gain by quantized activations."""
        device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
        if self.activation_dtype is None or device.platform != "gpu":
            return 1
        matrices = [w.get_value() for block in self.blocks for w in block.weights]
        quantized = [w for w in matrices if isinstance(w, QuantizedArray)]
        return max((least_rows(self.activation_dtype, w) for w in quantized), default=1)

    def divide(self, mesh: jax.sharding.Mesh, caller: str = "shard") -> None:
        """Puts the decoder on the devices of a mesh with one axis, each of which gets its part.

        **Raises:** `ValueError` for sizes that the number of devices does not divide, before
        anything is moved.
        """
        division = Division.of(caller, self.config, mesh, self._formats)
        division.place_variables(self)
        for module in (self, *self.blocks):
            module.division = division

    @property
    def _formats(self) -> dict[str, Format | None]:
        """The formats of the matrices that are divided along k, by name."""
        matrices = {
            f"layers.{i}.{name}": getattr(block, name).get_value()
            for i, block in enumerate(self.blocks)
            for name in ("o", "down")
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
                f"Decoder: tokens are {tokens.dtype}{list(tokens.shape)}, but they are integers "
                "(batch, length); a single prompt is a batch of one."
            )
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        batch, length = tokens.shape
        cache = self.make_cache(batch, length)
        # On a mesh, indices of columns are computed from tokens: in int32, whatever their dtype.
        return self.logits(self.forward(tokens.astype(jnp.int32), positions, cache)[0])

    def make_cache(self, batch: int, slots: int) -> Cache:
        """An empty cache for this decoder, on its devices."""
        mesh = None if self.division is None else self.division.mesh
        return make_cache(self.config, batch, slots, self.dtype, mesh)

    def replicate(self, arrays: Any) -> Any:
        """Arrays on each of the devices of this decoder."""
        if self.division is None:
            return arrays
        return jax.device_put(arrays, jax.NamedSharding(self.division.mesh, jax.P()))

    @property
    def parts(self) -> int:
        """How many devices it is divided over."""
        return 1 if self.division is None else self.division.parts

    def forward(
        self, tokens: Array, positions: Array, cache: Cache, *, reach: int | None = None
    ) -> tuple[Array, Cache]:
        """Appends tokens to a cache and returns what the head is multiplied by.

        **Arguments:**

        - `tokens`: integers (batch, length).
        - `positions`: those of the tokens in their sequences, int32 (batch, length), ascending; -1
          for padding, whose results mean nothing.
        - `cache`: `make_cache`, or from the call for the tokens before. It must have `length` free
          slots.
        - `reach`: how many slots attention reads, at least those in use after this call; None for
          all. A prompt at the beginning of a long cache so costs what its length does.

        **Returns:** normalized features (batch, length, width), and the cache.
        """
        local = functools.partial(Decoder._forward, reach=reach)
        if self.division is not None:
            placed = cache_specs(self.config, self.division.axis)
            local = self.division.on_each(
                local,
                self,
                in_specs=(jax.P(), jax.P(), placed),
                out_specs=(jax.P(), placed),
            )
            return local(tokens, positions, cache)
        return local(self, tokens, positions, cache)

    def _forward(
        self, tokens: Array, positions: Array, cache: Cache, *, reach: int | None
    ) -> tuple[Array, Cache]:
        """`forward` on one device, or on one of several."""
        cache = cache.advance(positions)
        config, real = self.config, jnp.maximum(positions, 0)
        rotations = rope.rotation(config, real), rope.rotation(config, real, local=True)
        cached = reach is not None or tokens.shape[1] == 1
        reach = cache.slots if reach is None else reach
        parts = self.parts
        implementation = attention.choose(
            jax.default_backend(),
            self.dtype,
            batch=tokens.shape[0],
            queries=tokens.shape[1],
            length=reach,
            head_size=config.head_size,
            native=attention.native(
                self.dtype, config.heads // parts, config.kv_heads // parts, config.head_size
            ),
            cached=cached,
        )
        x = self.embed(tokens)
        products = self.blocks[0].project(x)
        for i, block in enumerate(self.blocks):
            following = self.blocks[i + 1] if i + 1 < config.layers else None
            x, products, cache = block.step(
                products,
                x,
                following,
                rotations[block.local],
                positions,
                cache,
                i,
                implementation=implementation,
                reach=reach,
            )
        return rms_norm(x, self.final_norm.get_value(), config.norm_epsilon), cache

    def embed(self, tokens: Array) -> Array:
        """The embeddings (batch, length, width) of tokens, scaled."""
        table = self.embedding.get_value()
        if self.division is None:
            x = take(table, tokens)
        else:
            own, there = self.division.own_columns(tokens, self.config.vocabulary, table.shape[-1])
            x = self.division.add(jnp.where(there[..., None], take(table, own), 0))
        return (x * self.config.embedding_scale).astype(self.dtype)

    def logits(self, x: Array) -> Array:
        """The logits, float32 (..., vocabulary), of what `forward` returns (..., width)."""
        if self.division is None:
            return self._logits(x)
        whole = jax.P()
        local = self.division.on_each(Decoder._logits, self, in_specs=(whole,), out_specs=whole)
        return local(x)

    def _logits(self, x: Array) -> Array:
        head = self.embedding if self.head is None else self.head
        logits = multiply(x, head.get_value(), jnp.float32)
        if self.division is not None:
            logits = self.division.join_columns(logits, self.config.vocabulary)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class Block(nnx.Module):
    """Attention and a gated MLP, each of which adds to the residual stream."""

    def __init__(
        self,
        config: Config,
        weight_of: Callable[[str], Weight],
        index: int,
        activation_dtype: Any = None,
    ):
        def weight(name: str) -> nnx.Variable:
            return _variable(weight_of(f"layers.{index}.{name}"))

        def norm(name: str) -> nnx.Param:
            return _norm(config, weight_of(f"layers.{index}.{name}"))

        self.config = config
        self.activation_dtype = activation_dtype
        self.activation_rows = 1
        self.division: Division | None = None
        self.local = config.is_local(index)
        self.attention_norm = norm("attention_norm")
        self.qkv = nnx.List([weight(name) for name in "qkv"])
        biases = [weight(f"{name}_bias") for name in "qkv"] if config.attention_bias else []
        self.biases = nnx.List(biases)
        self.q_norm = norm("q_norm") if config.qk_norm else None
        self.k_norm = norm("k_norm") if config.qk_norm else None
        self.o = weight("o")
        post = config.norm_placement == "pre_and_post"
        self.post_attention_norm = norm("post_attention_norm") if post else None
        self.mlp_norm = norm("mlp_norm")
        gate, up = (weight_of(f"layers.{index}.{name}") for name in ("gate", "up"))
        self.gate_up = nnx.List(_paired(gate, up))
        self.down = weight("down")
        self.post_mlp_norm = norm("post_mlp_norm") if post else None

    @property
    def weights(self) -> list[nnx.Variable]:
        """All matrices."""
        return [*self.qkv, self.o, *self.gate_up, self.down]

    def rounds(self, x: Array) -> bool:
        """Whether activations of as many tokens as x has are quantized."""
        rows = math.prod(x.shape[:-1])
        return self.activation_dtype is not None and rows >= self.activation_rows

    def fused(self, x: Array) -> bool:
        """Whether `quantized_block` computes this block."""
        # The devices of a mesh add their parts within the block.
        return self.fusible(x) and self.division is None

    def fusible(self, x: Array) -> bool:
        """Whether calls compute this block with its normalizations."""
        matrices = self.o, self.down, *self.gate_up
        quantized = all(isinstance(w.get_value(), QuantizedArray) for w in matrices)
        return quantized and len(self.gate_up) == 1 and self.post_mlp_norm is None

    @property
    def matrices(self) -> list[Weight]:
        """The weights of queries, keys and values."""
        return [weight.get_value() for weight in self.qkv]

    def project(self, x: Array) -> tuple[Array, ...]:
        """Products of the normalized x with the weights of queries, keys and values."""
        normalized = self.normalize(x, self.attention_norm)
        if not self.rounds(x):
            return products(normalized, self.matrices)
        return tuple(self.multiply(normalized, weight) for weight in self.matrices)

    def step(
        self,
        products: Sequence[Array],
        x: Array,
        following: "Block | None",
        rotation: tuple[Array, Array],
        positions: Array,
        cache: Cache,
        layer: int,
        *,
        implementation: attention.Implementation,
        reach: int,
    ) -> tuple[Array, tuple[Array, ...], Cache]:
        """This block: attention, and all up to the next.

        **Arguments:**

        - `products`: queries, keys and values, of `project`.
        - `x`: the residual stream (batch, length, width).
        - `following`: the next block.
        - `rotation`: cosines and sines of the positions (`rope.rotation`).
        - `positions`: of the queries, int32 (batch, length).
        - `cache`, `layer`: where keys and values of this block are appended.
        - `implementation`, `reach`: as of `attention.attend`; `"native"` takes one query.

        **Returns:** the residual stream, `following.project` of it, and the cache.
        """
        q, k, v = self.heads(products)
        window = self.config.window if self.local else None
        scale = self.config.attention_scale or self.config.head_size**-0.5
        if implementation == "native":
            operands = cuda_attend.Operands(
                query=q[:, 0],
                key=k[:, 0],
                value=v[:, 0],
                rotation=(rotation[0][:, 0, 0], rotation[1][:, 0, 0]),
                norms=self.head_norms,
                keys=cache.keys[layer],
                values=cache.values[layer],
                slot=cache.used - 1,
                position=positions[:, 0],
                positions=cache.positions,
            )
            options = cuda_attend.Options(
                self.config.rope_pairs, self.config.norm_epsilon, reach, window, scale
            )
            return self._decode(operands, options, x, following, cache, layer)
        q, k = self.normalize(q, self.q_norm), self.normalize(k, self.k_norm)
        q, k = (rope.rotate(head, rotation, self.config.rope_pairs) for head in (q, k))
        cache = cache.write(layer, k, v)
        attended = attention.attend(
            q,
            cache.keys[layer],
            cache.values[layer],
            positions,
            cache.positions,
            window=window,
            scale=scale,
            implementation=implementation,
            reach=reach,
        )
        return *self.finish(attended, x, following), cache

    def _decode(
        self,
        operands: cuda_attend.Operands,
        options: cuda_attend.Options,
        x: Array,
        following: "Block | None",
        cache: Cache,
        layer: int,
    ) -> tuple[Array, tuple[Array, ...], Cache]:
        """`step` by our own kernel for attention."""
        onward = self._onward(following)
        devices = () if self.division is None else self.division.exchanging(x.shape[0])
        one_call = self.fused(x) or (self.fusible(x) and devices != ())
        one_call &= not self.rounds(x)
        if one_call and (following is None or onward is not None):
            matrices = self.o, self.gate_up[0], self.down
            o, gate_up, down = (weight.get_value() for weight in matrices)
            weights = o, gate_up, down, *(() if onward is None else onward[1])
            if decode_block.supports(x, weights):
                keys, values, y, products = decode_block.decode_block(
                    operands,
                    x[:, 0],
                    o,
                    self.mlp_norm.get_value(),
                    gate_up,
                    down,
                    attending=options,
                    following=onward,
                    activation=self.config.activation,
                    epsilon=self.config.norm_epsilon,
                    devices=devices,
                )
                products = tuple(product[:, None] for product in products)
                return y[:, None], products, cache.replace(layer, keys, values)
        attended, keys, values = cuda_attend.attend(operands, options)
        attended = attended.reshape(*x.shape[:-1], -1)
        return *self.finish(attended, x, following), cache.replace(layer, keys, values)

    @property
    def head_norms(self) -> tuple[Array, Array] | None:
        """The norms of queries and keys."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.get_value(), self.k_norm.get_value()

    def heads(self, products: Sequence[Array]) -> tuple[Array, ...]:
        """Queries, keys and values (batch, length, heads, head_size), with their biases."""
        if self.biases:
            biases = [
                bias.get_value()[None, None].astype(products[0].dtype) for bias in self.biases
            ]
            products = [x + bias for x, bias in zip(products, biases, strict=True)]
        return tuple(x.reshape(*x.shape[:-1], -1, self.config.head_size) for x in products)

    def finish(
        self, attended: Array, x: Array, following: "Block | None"
    ) -> tuple[Array, tuple[Array, ...]]:
        """The residual stream after this block, and `following.project` of it."""
        if self.fused(x):
            return self._finish_in_one_call(attended, x, following)
        if self.division is not None and self.fusible(x) and not self.rounds(x):
            return self._finish_in_parts(attended, x, following, self.division)
        out = functools.partial(self.multiply, attended, self.o.get_value(), divided=True)
        x = x + self.normalize(add_parts(self.division, out, x.dtype), self.post_attention_norm)
        mlp = functools.partial(self.mlp, self.normalize(x, self.mlp_norm))
        x = x + self.normalize(add_parts(self.division, mlp, x.dtype), self.post_mlp_norm)
        return x, () if following is None else following.project(x)

    def _finish_in_one_call(
        self, attended: Array, x: Array, following: "Block | None"
    ) -> tuple[Array, tuple[Array, ...]]:
        onward = self._onward(following)
        out = quantized_block(
            attended,
            x,
            self.o.get_value(),
            self.mlp_norm.get_value(),
            self.gate_up[0].get_value(),
            self.down.get_value(),
            following=onward,
            activation=self.config.activation,
            epsilon=self.config.norm_epsilon,
            activation_dtype=self.activation_dtype if self.rounds(x) else None,
        )
        if onward is not None:
            return out
        return out, () if following is None else following.project(out)

    def _finish_in_parts(
        self, attended: Array, x: Array, following: "Block | None", division: Division
    ) -> tuple[Array, tuple[Array, ...]]:
        """A call after each of the two all-reduces."""
        epsilon = self.config.norm_epsilon
        x, parts = normalized_mlp(
            x,
            division.add(multiply(attended, self.o.get_value(), jnp.float32)),
            self.mlp_norm.get_value(),
            self.gate_up[0].get_value(),
            self.down.get_value(),
            activation=self.config.activation,
            epsilon=epsilon,
            dtype=jnp.float32,
        )
        added = division.add(parts)
        if (onward := self._onward(following)) is not None:
            return normalized_matmuls(x, added, *onward, epsilon=epsilon)
        x = x + added.astype(x.dtype)
        return x, () if following is None else following.project(x)

    def _onward(self, following: "Block | None") -> tuple[Array, Sequence[QuantizedArray]] | None:
        """What `quantized_block` multiplies by for the next block, if that is quantized."""
        if following is None:
            return None
        weights = [w for w in following.matrices if isinstance(w, QuantizedArray)]
        if len(weights) < len(following.matrices):
            return None
        return following.attention_norm.get_value(), weights

    def mlp(self, x: Array, dtype: Any) -> Array:
        """The gated MLP of a normalized x, accumulated in float32 and rounded to `dtype`."""
        activation, down = self.config.activation, self.down.get_value()
        if len(self.gate_up) == 1 and not self.rounds(x):
            gate_up = self.gate_up[0].get_value()
            if isinstance(down, QuantizedArray):
                options = {"activation": activation, "preferred_element_type": dtype}
                return quantized_mlp(x, gate_up, down, **options)
            return multiply(quantized_glu(x, gate_up, activation=activation), down, dtype)
        pair = [weight.get_value() for weight in self.gate_up]
        if isinstance(pair[0], QuantizedArray) and len(pair) == 1:
            pair = [pair[0].select(i) for i in range(2)]
        gate, up = (self.multiply(x, weight, jnp.float32) for weight in pair)
        activate = jax.nn.silu if activation == "silu" else jax.nn.gelu  # its tanh form
        return self.multiply((activate(gate) * up).astype(x.dtype), down, dtype, divided=True)

    def multiply(
        self, x: Array, weight: Weight, dtype: Any = None, *, divided: bool = False
    ) -> Array:
        """`multiply`, where the weight is quantized of x in `activation_dtype` if x has the rows.

        `divided`: whether each device of a mesh has a part of every token; they share its scale.
        """
        if not self.rounds(x) or not isinstance(weight, QuantizedArray):
            return multiply(x, weight, dtype)
        if not divided or self.division is None:
            options = {"activation_dtype": self.activation_dtype, "preferred_element_type": dtype}
            return quantized_matmul(x, weight, **options)
        reach = self.division.largest(activations.reach(x))
        return multiply(activations.rounded_tokens(x, reach, self.activation_dtype), weight, dtype)

    def normalize(self, x: Array, norm: nnx.Param | None) -> Array:
        return x if norm is None else rms_norm(x, norm.get_value(), self.config.norm_epsilon)


def multiply(x: Any, weight: Weight, dtype: Any = None) -> Array:
    """`x @ weight`, accumulated in float32 and rounded to `dtype`, or to that of x."""
    if isinstance(weight, QuantizedArray):
        return quantized_matmul(x, weight, preferred_element_type=dtype)
    product = jnp.matmul(x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
    return product.astype(dtype or x.dtype)


def take(table: Weight, tokens: Array) -> Array:
    """The columns of a table (k, n) at tokens (...), float32 (..., k)."""
    if isinstance(table, QuantizedArray):
        return take_columns(table, tokens, jnp.float32)
    return jnp.moveaxis(jnp.take(table.astype(jnp.float32), tokens, axis=1), 0, -1)


def products(x: Array, weights: Sequence[Weight]) -> tuple[Array, ...]:
    """`x @ weight` of each, in one call where they are quantized alike."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedArray)]
    formats = {weight.format for weight in quantized}
    if len(quantized) == len(weights) and len(formats) == 1:
        return quantized_matmuls(x, quantized)
    return tuple(multiply(x, weight) for weight in weights)


def check(config: Config, weights: Mapping[str, Weight]) -> None:
    """Refuses weights that do not fit a configuration."""
    check_config("Decoder", config)
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"Decoder: weights is {checks.brief(weights)}, but it is a mapping from the names of "
            "Config.shapes() to matrices, quantized or float, and vectors."
        )
    expected = config.shapes()
    missing, unknown = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    for names, what in ((missing, "are missing"), (unknown, f"are not of {config.architecture}")):
        if names:
            shown = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(f"Decoder: {len(names)} weights {what}: {shown}.")
    for name, shape in expected.items():
        if not isinstance(weights[name], QuantizedArray):
            checks.shaped("Decoder", name, weights[name])
        if tuple(weights[name].shape) != shape:
            raise ValueError(
                f"Decoder: {name} has shape {tuple(weights[name].shape)}, but the configuration "
                f"asks for {shape}."
            )


def check_rows(caller: str, rows: Any) -> None:
    """Refuses what is neither None nor a number of tokens."""
    if rows is not None:
        rule = "a number of tokens from 1 on, or None; fewer are not rounded"
        checks.integer(caller, "activation_rows", rows, rule)


def _variable(weight: Weight) -> nnx.Variable:
    if isinstance(weight, QuantizedArray):
        return MatrixVariable(weight)
    return nnx.Param(jnp.asarray(weight))


def _norm(config: Config, scale: Any) -> nnx.Param:
    return nnx.Param(jnp.asarray(scale).astype(jnp.float32) + config.norm_offset)


def _paired(gate: Weight, up: Weight) -> list[nnx.Variable]:
    """Gate and up as one stack (2, width, hidden) where they are quantized alike."""
    quantized = isinstance(gate, QuantizedArray) and isinstance(up, QuantizedArray)
    alike = jax.tree.structure(gate) == jax.tree.structure(up) and gate.dtype == up.dtype
    if quantized and alike:
        return [_variable(jax.tree.map(lambda *leaves: jnp.stack(leaves), gate, up))]
    return [_variable(gate), _variable(up)]
