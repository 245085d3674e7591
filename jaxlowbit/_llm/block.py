"""`Block`: attention and an MLP of a decoder, computed from attention to attention.

`Block.finish` covers everything from the output projection of a block to the queries, keys and
values of the next: one call, `quantized_block`, if the configuration allows it. On NVIDIA GPUs this
call includes attention in decode steps, which have one query per sequence.

With `lhs_qtype`, products of the blocks quantize their activations for at least `lhs_min_rows`
tokens: the call of a block rounds them, and attention is a separate call.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from .._backends import cuda_attend
from .._backends.cuda_calls import Mixture, Projection, Router
from .._composite import decode_block
from .._composite.block import quantized_block
from .._composite.glu import quantized_glu
from .._composite.matmuls import quantized_matmuls
from .._composite.mlp import quantized_mlp
from .._composite.normalized import normalized_matmuls, normalized_mlp
from .._composite.rms_norm import rms_norm
from .._core import activations
from .._core.array import QuantizedArray
from .._matmul.api import quantized_matmul
from . import attention, experts, rope
from .cache import Cache
from .config import Config
from .low_rank import LowRank, Weight, base_of, variable
from .sharding import Division, add_parts


class Block(nnx.Module):
    """Attention and a gated MLP, or a mixture of experts, which both add to the residual stream.

    **Arguments:**

    - `config`, `lhs_qtype`: as for `Decoder`.
    - `weight_of`: returns a weight by its name.
    - `index`: number of the block.
    """

    def __init__(
        self,
        config: Config,
        weight_of: Callable[[str], Any],
        index: int,
        lhs_qtype: Any = None,
    ):
        def weight(name: str) -> Any:
            return variable(weight_of(f"layers.{index}.{name}"))

        def norm(name: str) -> nnx.Param:
            return norm_variable(config, weight_of(f"layers.{index}.{name}"))

        self.config = config
        self.lhs_qtype = lhs_qtype
        self.lhs_min_rows = 1
        self.division: Division | None = None
        self.local, self.rotates = config.is_local(index), config.rotates(index)
        pre, post = config.norm_placement != "post", config.norm_placement != "pre"
        self.kv_heads, self.head_size = config.head_sizes(local=self.local)
        self.attention_norm = norm("attention_norm") if pre else None
        names = config.projections(index)
        self.qkv = nnx.List([weight(name) for name in names])
        biases = [weight(f"{name}_bias") for name in names] if config.attention_bias else []
        self.biases = nnx.List(biases)
        self.q_norm = norm("q_norm") if config.qk_norm == "head" else None
        self.k_norm = norm("k_norm") if config.qk_norm == "head" else None
        self.q_all_norm = norm("q_all_norm") if config.qk_norm == "all" else None
        self.k_all_norm = norm("k_all_norm") if config.qk_norm == "all" else None
        self.sinks = weight("sinks") if config.sinks else None
        self.o = weight("o")
        self.o_bias = weight("o_bias") if config.output_bias else None
        self.post_attention_norm = norm("post_attention_norm") if post else None
        self.mlp_norm = norm("mlp_norm") if pre else None
        gate, up = (weight_of(f"layers.{index}.{name}") for name in ("gate", "up"))
        self.gate_up = nnx.List(_paired(gate, up))
        pair: Any = [
            weight_of(f"layers.{index}.{x}_bias") for x in ("gate", "up") if config.mlp_bias
        ]
        self.gate_up_bias = variable(jnp.stack(pair)) if pair else None
        self.router = weight("router") if config.experts else None
        self.router_bias = weight("router_bias") if config.router_bias else None
        self.router_norm = weight("router_norm") if config.router_norm else None
        self.expert_scale = weight("expert_scale") if config.router_norm else None
        self.down = weight("down")
        self.down_bias = weight("down_bias") if config.mlp_bias else None
        self.post_mlp_norm = norm("post_mlp_norm") if post else None
        dense = config.dense_hidden > 0
        pair = [weight_of(f"layers.{index}.dense_{x}") for x in ("gate", "up") if dense]
        self.dense_gate_up = nnx.List(_paired(*pair) if dense else [])
        self.dense_down = weight("dense_down") if dense else None
        self.post_dense_norm = norm("post_dense_norm") if dense else None
        self.expert_norm = norm("expert_norm") if dense else None
        self.post_expert_norm = norm("post_expert_norm") if dense else None
        self.layer_scale = weight("layer_scale") if config.layer_scale else None

    @property
    def weights(self) -> list[Any]:
        """All matrices, and stacks of them, as variables or `Adapted`."""
        dense = [] if self.dense_down is None else [*self.dense_gate_up, self.dense_down]
        return [*self.qkv, self.o, *self.gate_up, self.down, *dense]

    @property
    def window(self) -> int | None:
        """The positions that a query attends to, or None for all."""
        return self.config.window if self.local else None

    @property
    def scale(self) -> float:
        """The factor of scores."""
        return self.config.attention_scale or self.head_size**-0.5

    def rounds(self, x: Array) -> bool:
        """Whether activations are quantized for the number of tokens in x."""
        rows = math.prod(x.shape[:-1])
        return self.lhs_qtype is not None and rows >= self.lhs_min_rows

    def fused(self, x: Array) -> bool:
        """Whether `quantized_block` computes this block."""
        # On a mesh, devices add their partial sums within the block.
        return self.fusible(x) and self.division is None and self.o_bias is None

    def fusible(self, x: Array) -> bool:
        """Whether custom calls compute this block, including its normalizations."""
        # On a mesh, every device would add a bias.
        biased = self.config.mlp_bias or (self.o_bias is not None and self.division is not None)
        return self._is_plain and not (self.config.experts or biased)

    @property
    def _is_plain(self) -> bool:
        """Whether attention and the MLP or experts follow a norm each, and add to the residual
        stream what products of quantized weights give."""
        config = self.config
        if config.norm_placement != "pre" or config.residual_scale != 1:
            return False
        if config.layer_scale or config.dense_hidden or config.router_norm:
            return False
        matrices = self.o, self.down, *self.gate_up
        quantized = all(isinstance(w.get_value(), QuantizedArray) for w in matrices)
        return quantized and len(self.gate_up) == 1

    @property
    def routed(self) -> Mixture | None:
        """The mixture of experts of a block whose decode steps one call may compute, or None. On a
        mesh, of the experts of this device."""
        if self.router is None or not self._is_plain:
            return None
        router_bias, gate_up_bias, down_bias = (
            None if x is None else x.get_value()
            for x in (self.router_bias, self.gate_up_bias, self.down_bias)
        )
        top, normalized = self.config.experts_per_token, self.config.normalized_experts
        router = Router(self.router.get_value(), router_bias, top, normalized)
        return Mixture(router, gate_up_bias, down_bias, self._first_expert)

    @property
    def _first_expert(self) -> Array | None:
        """The number of the first expert of this device; None without a mesh."""
        experts = self.down.get_value().shape[0]
        return None if self.division is None else self.division.first(experts)

    @property
    def out_bias(self) -> Array | None:
        """The bias of the output projection, to add once over all devices, or None."""
        if self.o_bias is None or self.division is None:
            return None if self.o_bias is None else self.o_bias.get_value()
        return self.division.on_first(self.o_bias.get_value())

    @property
    def fused_norm(self) -> Array:
        """The norm before the MLP of a `fusible` block."""
        assert self.mlp_norm is not None
        return self.mlp_norm.get_value()

    @property
    def entry(self) -> Projection | None:
        """The norm and the weights of queries, keys and values, if they are quantized."""
        weights = [w for w in self.matrices if isinstance(w, QuantizedArray)]
        if self.attention_norm is None or len(weights) < len(self.matrices):
            return None
        return Projection(self.attention_norm.get_value(), weights)

    @property
    def matrices(self) -> list[Weight | LowRank]:
        """The weights of queries, keys and values."""
        return [weight.get_value() for weight in self.qkv]

    def project(self, x: Array) -> tuple[Array, ...]:
        """Products of the normalized x with the weights of queries, keys and values."""
        normalized = self.normalize(x, self.attention_norm)
        if not self.rounds(x):
            return _products(normalized, self.matrices)
        return tuple(self.multiply(normalized, weight) for weight in self.matrices)

    def step(
        self,
        products: Sequence[Array],
        x: Array,
        following: "Block | None",
        rotation: tuple[Array, Array] | None,
        positions: Array,
        cache: Cache,
        layer: int,
        *,
        implementation: attention.Implementation,
        reach: int,
    ) -> tuple[Array, tuple[Array, ...], Cache]:
        """Computes attention, then everything up to the next attention.

        **Arguments:**

        - `products`: queries, keys and values, of `project`.
        - `x`: the residual stream (batch, length, width).
        - `following`: the next block.
        - `rotation`: cosines and sines of the positions (`rope.rotation`); None for queries and
          keys without a rotation.
        - `positions`: of the queries, int32 (batch, length).
        - `cache`, `layer`: where keys and values of this block are appended.
        - `implementation`, `reach`: as for `attention.attend`; `"native"` needs one query.

        **Returns:** the residual stream, `following.project` of it, and the cache.
        """
        native = implementation == "native"
        q, k, v = self.heads(products, positions, native=native)
        if native:
            operands = self.attention_operands((q, k, v), rotation, positions, cache, layer)
            attended, *arrays = cuda_attend.attend(operands, self.attention_options(reach))
            attended = attended.reshape(*x.shape[:-1], -1)
            return *self.finish(attended, x, following), cache.replace(layer, *arrays)
        q, k = self.normalize(q, self.q_norm), self.normalize(k, self.k_norm)
        if rotation is not None:
            q, k = (rope.rotate(head, rotation, self.config.rope_pairs) for head in (q, k))
        cache = cache.write(layer, k, v)
        keys, values, held = cache.read(layer, reach, q.dtype)
        attended = attention.attend(
            q,
            keys,
            values,
            positions,
            held,
            window=self.window,
            scale=self.scale,
            implementation=implementation,
            reach=reach,
            softcap=self.config.attention_softcap,
            sinks=None if self.sinks is None else self.sinks.get_value(),
        )
        return *self.finish(attended, x, following), cache

    def attention_operands(
        self,
        heads: Sequence[Array],
        rotation: tuple[Array, Array] | None,
        positions: Array,
        cache: Cache,
        layer: int,
    ) -> cuda_attend.Operands:
        """The operands of our CUDA kernel for attention; arguments as for `step`."""
        if rotation is None:
            rotation = rope.identity(positions, self.head_size)
        query, key, value = (x[:, 0] for x in heads)
        return cuda_attend.Operands(
            query=query,
            key=key,
            value=value,
            rotation=(rotation[0][:, 0, 0], rotation[1][:, 0, 0]),
            norms=self.head_norms,
            keys=cache.keys[layer],
            values=cache.values[layer],
            slot=cache.used - 1,
            position=positions[:, 0],
            positions=cache.positions,
            scales=cache.arrays(layer)[2:],
            biases=self.attention_biases,
            sinks=None if self.sinks is None else self.sinks.get_value(),
        )

    def attention_options(self, reach: int) -> cuda_attend.Options:
        return cuda_attend.Options(
            self.config.rope_pairs, self.config.norm_epsilon, reach, self.window, self.scale
        )

    def exchanging(self, x: Any) -> tuple[int, ...]:
        """CUDA ordinals of the devices that share this block and can add their parts of x within a
        call, or ()."""
        return () if self.division is None else self.division.exchanging(x.shape[0])

    def one_call(self, x: Any, following: "Block | None") -> bool:
        """Whether attention and this block are one call in a decode step for rows like x."""
        shared = self.division is None or bool(self.exchanging(x))
        mixture = self.routed if shared else None
        if self.rounds(x) or not shared or not (mixture is not None or self.fusible(x)):
            return False
        onward = _entry(following)
        if following is not None and onward is None:
            return False
        weights = [w.get_value() for w in (self.o, self.gate_up[0], self.down)]
        weights += [] if onward is None else onward.weights
        return decode_block.unsupported(x, weights, mixture, self.config.activation) is None

    @property
    def attends_to_products(self) -> bool:
        """Whether our CUDA kernel for attention reads the products as they are."""
        plain = self.q_all_norm is None and self.k_all_norm is None
        plain = plain and not self.config.value_norm and len(self.qkv) == 3
        return plain and self.config.attention_temperature is None

    @property
    def attention_biases(self) -> tuple[Array, ...]:
        """The biases that our CUDA kernel adds to the products."""
        return tuple(x.get_value() for x in self.biases) if self.attends_to_products else ()

    @property
    def head_norms(self) -> tuple[Array, Array] | None:
        """The norms of queries and keys."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.get_value(), self.k_norm.get_value()

    def heads(
        self, products: Sequence[Array], positions: Array, *, native: bool = False
    ) -> tuple[Array, ...]:
        """Queries, keys and values (batch, length, heads, head_size), with their biases, the norms
        of all heads together and of values, and the temperature of the queries.

        `native`: without `attention_biases`.
        """
        if self.biases and not (native and self.attention_biases):
            products = [biased(x, bias) for x, bias in zip(products, self.biases, strict=True)]
        q, k, v = products if len(products) == 3 else (*products, products[1])
        q, k = self.normalize_heads(q, self.q_all_norm), self.normalize_heads(k, self.k_all_norm)
        q, k, v = (x.reshape(*x.shape[:-1], -1, self.head_size) for x in (q, k, v))
        if self.config.value_norm:
            v = rms_norm(v, jnp.ones(self.head_size), self.config.norm_epsilon)
        if (factor := rope.temperature(self.config, jnp.maximum(positions, 0))) is not None:
            q = (q.astype(jnp.float32) * factor).astype(q.dtype)
        return q, k, v

    def finish(
        self, attended: Array, x: Array, following: "Block | None"
    ) -> tuple[Array, tuple[Array, ...]]:
        """The residual stream after this block, and `following.project` of it."""
        if self.fused(x):
            return self._finish_in_one_call(attended, x, following)
        if self.division is not None and self.fusible(x) and not self.rounds(x):
            return self._finish_in_parts(attended, x, following, self.division)
        out = functools.partial(self.multiply, attended, self.o.get_value(), divided=True)
        x = x + self._result(out, x.dtype, self.o_bias, self.post_attention_norm)
        if self.dense_down is not None:
            return self._ended(x, self._dense_and_mixture(x), following)
        if self.router is not None:
            return self._finish_with_experts(x, following)
        mlp = functools.partial(self.mlp, self.normalize(x, self.mlp_norm))
        added = self._result(mlp, x.dtype, self.down_bias, self.post_mlp_norm)
        return self._ended(x, added, following)

    def _ended(
        self, x: Array, added: Array, following: "Block | None"
    ) -> tuple[Array, tuple[Array, ...]]:
        """The residual stream after the MLP or the experts, and `following.project` of it."""
        x = x + added
        if self.layer_scale is not None:
            x = x * self.layer_scale.get_value().astype(x.dtype)[None, None]
        return x, () if following is None else following.project(x)

    def _result(
        self,
        product: Callable[[Any], Array],
        dtype: Any,
        bias: nnx.Variable | None,
        norm: nnx.Param | None,
    ) -> Array:
        """The term that attention or the MLP adds to the residual stream."""
        out = biased(add_parts(self.division, product, dtype), bias)
        out = self.normalize(out, norm)
        scale = self.config.residual_scale
        return out if scale == 1 else (out * scale).astype(dtype)

    def _finish_in_one_call(
        self, attended: Array, x: Array, following: "Block | None"
    ) -> tuple[Array, tuple[Array, ...]]:
        onward = _entry(following)
        activation: Any = self.config.activation  # gpt-oss's only with experts
        out = quantized_block(
            attended,
            x,
            out=self.o.get_value(),
            norm=self.fused_norm,
            gate_up=self.gate_up[0].get_value(),
            down=self.down.get_value(),
            following=onward,
            activation=activation,
            epsilon=self.config.norm_epsilon,
            lhs_qtype=self.lhs_qtype if self.rounds(x) else None,
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
            self.fused_norm,
            self.gate_up[0].get_value(),
            self.down.get_value(),
            activation=self.config.activation,
            epsilon=epsilon,
            dtype=jnp.float32,
        )
        added = division.add(parts)
        if (onward := _entry(following)) is not None:
            return normalized_matmuls(x, added, *onward, epsilon=epsilon)
        x = x + added.astype(x.dtype)
        return x, () if following is None else following.project(x)

    def _finish_with_experts(
        self, x: Array, following: "Block | None"
    ) -> tuple[Array, tuple[Array, ...]]:
        """`finish` from the residual stream after attention on, in two calls if possible."""
        mixture = functools.partial(self.mixture, self.normalize(x, self.mlp_norm), x)
        added = self._result(mixture, x.dtype, None, self.post_mlp_norm)
        onward = _entry(following)
        if onward is not None and not self.rounds(x) and self.layer_scale is None:
            epsilon = self.config.norm_epsilon
            return normalized_matmuls(x, added, *onward, epsilon=epsilon)
        return self._ended(x, added, following)

    def _dense_and_mixture(self, x: Array) -> Array:
        """The normalized sum of an MLP and a mixture of experts, each with norms of its input and
        result."""
        mlp = functools.partial(self.mlp, self.normalize(x, self.mlp_norm))
        mixture = functools.partial(self.mixture, self.normalize(x, self.expert_norm), x)
        dense = self._result(mlp, x.dtype, None, self.post_dense_norm)
        mixed = self._result(mixture, x.dtype, None, self.post_expert_norm)
        return self.normalize(dense + mixed, self.post_mlp_norm)

    def mixture(self, x: Array, stream: Array, dtype: Any) -> Array:
        """The mixture of experts of a normalized x; on a mesh, of the experts of this device.

        `stream`: the residual stream, which a router with a separate norm reads.
        """
        assert self.router is not None
        router_bias = None if self.router_bias is None else self.router_bias.get_value()
        scale = None if self.expert_scale is None else self.expert_scale.get_value()
        routed = x
        if self.router_norm is not None:
            factors = self.router_norm.get_value() * self.config.width**-0.5
            routed = rms_norm(stream, factors, self.config.norm_epsilon)
        expert, weight = experts.route(
            self.config, routed, self.router.get_value(), router_bias, scale
        )
        down = self.down.get_value()
        return experts.mix(
            x,
            expert,
            weight,
            [stack.get_value() for stack in self.gate_up],
            down,
            None if self.gate_up_bias is None else self.gate_up_bias.get_value(),
            None if self.down_bias is None else self.down_bias.get_value(),
            activation=self.config.activation,
            offset=self._first_expert,
            num_experts=self.config.experts,
            lhs_qtype=self.lhs_qtype if self.rounds(x) else None,
            dtype=dtype,
        )

    def mlp(self, x: Array, dtype: Any) -> Array:
        """The gated MLP of a normalized x, in a block with experts the dense one; accumulated in
        float32 and rounded to `dtype`."""
        activation: Any = self.config.activation
        matrices, out = self.gate_up, self.down
        if self.dense_down is not None:
            matrices, out = self.dense_gate_up, self.dense_down
        down = out.get_value()
        if len(matrices) == 1 and not self.rounds(x) and self.gate_up_bias is None:
            gate_up = matrices[0].get_value()
            if isinstance(down, QuantizedArray):
                options = {"activation": activation, "preferred_element_type": dtype}
                return quantized_mlp(x, gate_up=gate_up, down=down, **options)
            return multiply(quantized_glu(x, gate_up, activation=activation), down, dtype)
        pair = [weight.get_value() for weight in matrices]
        if isinstance(pair[0], QuantizedArray) and len(pair) == 1:
            pair = [pair[0].select(i) for i in range(2)]
        gate, up = (self.multiply(x, weight, jnp.float32) for weight in pair)
        if self.gate_up_bias is not None:
            biases = self.gate_up_bias.get_value()[:, None, None].astype(gate.dtype)
            gate, up = gate + biases[0], up + biases[1]
        activate = jax.nn.silu if activation == "silu" else jax.nn.gelu  # its tanh form
        return self.multiply((activate(gate) * up).astype(x.dtype), down, dtype, divided=True)

    def multiply(
        self, x: Array, weight: Weight | LowRank, dtype: Any = None, *, divided: bool = False
    ) -> Array:
        """`multiply`, with x rounded to `lhs_qtype` if the weight is quantized and `rounds(x)`.

        `divided`: whether each device of a mesh has a part of every token; they share its scale.
        """
        if isinstance(weight, LowRank):
            product = self.multiply(x, weight.base, jnp.float32, divided=divided)
            return weight.add(product, x, dtype or x.dtype)
        if not self.rounds(x) or not isinstance(weight, QuantizedArray):
            return multiply(x, weight, dtype)
        if not divided or self.division is None:
            options = {"lhs_qtype": self.lhs_qtype, "preferred_element_type": dtype}
            return quantized_matmul(x, weight, **options)
        reach = self.division.largest(activations.reach(x))
        return multiply(activations.rounded_tokens(x, reach, self.lhs_qtype), weight, dtype)

    def normalize(self, x: Array, norm: nnx.Param | None) -> Array:
        return x if norm is None else rms_norm(x, norm.get_value(), self.config.norm_epsilon)

    def normalize_heads(self, x: Array, norm: nnx.Param | None) -> Array:
        """`normalize` of x (batch, length, features); each device has some of the features."""
        if norm is None or self.division is None:
            return self.normalize(x, norm)
        wide = x.astype(jnp.float32)
        total = self.division.add(jnp.sum(wide**2, axis=-1, keepdims=True))
        mean = total / (x.shape[-1] * self.division.parts)
        factor = jax.lax.rsqrt(mean + self.config.norm_epsilon)
        return (wide * factor * norm.get_value()[None, None]).astype(x.dtype)


def _entry(following: Block | None) -> Projection | None:
    return None if following is None else following.entry


def biased(x: Array, bias: nnx.Variable | None) -> Array:
    """x plus a bias of its last axis, in the dtype of x."""
    return x if bias is None else x + bias.get_value()[None, None].astype(x.dtype)


def multiply(x: Any, weight: Weight | LowRank, dtype: Any = None) -> Array:
    """`x @ weight`, accumulated in float32 and rounded to `dtype`, by default the dtype of x."""
    if isinstance(weight, LowRank):
        return weight.add(multiply(x, weight.base, jnp.float32), x, dtype or x.dtype)
    if isinstance(weight, QuantizedArray):
        return quantized_matmul(x, weight, preferred_element_type=dtype)
    product = jnp.matmul(x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
    return product.astype(dtype or x.dtype)


def _products(x: Array, weights: Sequence[Weight | LowRank]) -> tuple[Array, ...]:
    """`x @ weight` for each weight, in one call, except adapters, if they share a format."""
    bases = [base_of(weight) for weight in weights]
    formats = {base.format if isinstance(base, QuantizedArray) else None for base in bases}
    if len(formats) > 1 or None in formats:
        return tuple(multiply(x, weight) for weight in weights)
    adapted = any(isinstance(weight, LowRank) for weight in weights)
    found = quantized_matmuls(x, bases, preferred_element_type=jnp.float32 if adapted else None)
    return tuple(
        weight.add(product, x, x.dtype) if isinstance(weight, LowRank) else product.astype(x.dtype)
        for product, weight in zip(found, weights, strict=True)
    )


def norm_variable(config: Config, scale: Any) -> nnx.Param:
    return nnx.Param(jnp.asarray(scale).astype(jnp.float32) + config.norm_offset)


def _paired(gate: Any, up: Any) -> list[Any]:
    """Gate and up, as one stack (2, width, hidden) if they have the same format."""
    quantized = isinstance(gate, QuantizedArray) and isinstance(up, QuantizedArray)
    alike = jax.tree.structure(gate) == jax.tree.structure(up)
    if quantized and alike and gate.dtype == up.dtype:
        return [variable(jax.tree.map(lambda *leaves: jnp.stack(leaves), gate, up))]
    return [variable(gate), variable(up)]
