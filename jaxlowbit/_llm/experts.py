"""The mixture of experts of a block: routing, and the MLPs of the experts that tokens have chosen.

Quantized experts are one call, `quantized_moe`. If gate and up have different formats, or some
experts are floats, the choices are sorted by expert here, and every stack is a ragged product.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .._composite.moe import quantized_moe
from .._composite.ragged_dot import quantized_ragged_dot
from .._core.array import QuantizedArray
from .._matmul import epilogue
from .config import Config

Stack = QuantizedArray | Array


def route(
    config: Config, x: Array, router: Array, bias: Array | None, scale: Array | None = None
) -> tuple[Array, Array]:
    """The experts of each token and their weights, as transformers' routers compute them.

    **Arguments:**

    - `x`: (..., width).
    - `router`, `bias`: floats (width, experts), and (experts,) or None.
    - `scale`: a factor of the weight of each expert, float32 (experts,), or None.

    **Returns:** int32 and float32 (..., experts_per_token), the largest weight first. Logits and
    their softmax are float32; of experts with equal logits the first is chosen.
    """
    router = router.astype(jnp.float32)
    logits = jnp.matmul(x.astype(jnp.float32), router, precision=lax.Precision.HIGHEST)
    if bias is not None:
        logits += bias.astype(jnp.float32)[None, None]
    top, expert = lax.top_k(logits, config.experts_per_token)
    over = top if config.normalized_experts else logits
    largest = top[..., :1]
    total = jnp.sum(jnp.exp(over - largest), axis=-1, keepdims=True)
    weight = jnp.exp(top - largest) / total
    return expert, weight if scale is None else weight * scale[expert]


def mix(
    x: Array,
    expert: Array,
    weight: Array,
    gate_up: Sequence[Stack],
    down: Stack,
    gate_up_bias: Array | None,
    down_bias: Array | None,
    *,
    activation: Any,
    offset: Array | None,
    num_experts: int,
    lhs_qtype: Any,
    dtype: Any,
) -> Array:
    """The weighted sum of the MLPs of the experts of each token, rounded to `dtype`.

    **Arguments:**

    - `x`, `expert`, `weight`: (..., width), and (..., experts_per_token) each.
    - `gate_up`: a stack of pairs (2, experts, width, hidden), or gate and up (experts, width,
      hidden).
    - `down`: (experts, hidden, width).
    - `gate_up_bias`, `down_bias`: (2, experts, hidden) and (experts, width), or None.
    - `activation`, `num_experts`, `lhs_qtype`: as for `quantized_moe`.
    - `offset`: the number of the first of these experts, int32 (), if other devices have other
      experts; the caller adds the results of all devices.
    """
    if len(gate_up) == 1 and isinstance(down, QuantizedArray):
        stack: Any = gate_up[0]
        return quantized_moe(
            x,
            expert,
            weight,
            stack,
            down,
            activation=activation,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            group_offset=offset,
            num_experts=num_experts,
            lhs_qtype=lhs_qtype,
            preferred_element_type=dtype,
        )
    if len(gate_up) == 1:
        gate_up = [gate_up[0][i] for i in range(2)]
    experts, top = down.shape[0], expert.shape[-1]
    local = expert if offset is None else expert - offset
    here = (local >= 0) & (local < experts)
    local = jnp.where(here, local, experts).reshape(-1)
    order = jnp.argsort(local, stable=True)
    sizes = jnp.bincount(local, length=experts).astype(jnp.int32)
    rows, group = x.reshape(-1, x.shape[-1])[order // top], local[order]

    def product(rows: Array, stack: Stack, bias: Array | None) -> Array:
        if isinstance(stack, QuantizedArray):
            options = {"lhs_qtype": lhs_qtype, "preferred_element_type": jnp.float32}
            out = quantized_ragged_dot(rows, stack, sizes, **options)
        else:
            floats = stack.astype(rows.dtype)
            out = lax.ragged_dot(rows, floats, sizes, preferred_element_type=jnp.float32)
        return out if bias is None else out + bias.astype(jnp.float32)[group % experts]

    pair = [None if gate_up_bias is None else gate_up_bias[i] for i in range(2)]
    gate, up = (product(rows, gate_up[i], pair[i]) for i in range(2))
    hidden = epilogue.gated(gate, up, activation, x.dtype)
    out = product(hidden, down, down_bias)
    out = jnp.zeros_like(out).at[order].set(out).reshape(*expert.shape, -1)
    out = jnp.where(here[..., None], out * weight[..., None], 0)
    return jnp.sum(out, axis=-2).astype(dtype)
