"""The attention of a decode step and the block after it, for consecutive layers in one call."""

import math
from collections.abc import Sequence

import jax
from jax import Array

from .._backends import cuda_calls
from .._backends.cuda import HOPPER
from .._backends.cuda_calls import DecodeLayer, Mixture, Projection
from .._backends.target import local_gpus
from .._core.array import QuantizedArray
from .._matmul.call import first, unread


def unsupported(
    residual: Array,
    weights: Sequence[QuantizedArray],
    mixture: Mixture | None = None,
    activation: str = "silu",
) -> str | None:
    """Returns None if `decode_layers` supports a layer with these weights, else the reason.
    Attention has separate limits: `cuda_attend.unsupported`."""
    target = local_gpus()
    matrices = weights if mixture is None else [weights[0], *weights[3:]]
    reason = cuda_calls.unsupported_norm(residual.shape[-1])
    reason = reason or first(unread(target, residual, weight) for weight in matrices)
    if mixture is None or reason is not None:
        return reason
    choices = math.prod(residual.shape[:-1]) * mixture.router.top
    stacks = weights[1:3]
    rows = [jax.ShapeDtypeStruct((choices, stack.k), residual.dtype) for stack in stacks]
    products = list(zip(rows, stacks, (activation, None), strict=True))
    reason = first(unread(target, x, stack) for x, stack, _ in products)
    for capability in sorted(target.capabilities) or [HOPPER]:
        reason = reason or cuda_calls.unsupported_router(mixture.router, capability)
        for product in products:
            reason = reason or cuda_calls.unsupported_ragged(*product, capability)
    return reason


def decode_layers(
    layers: Sequence[DecodeLayer],
    residual: Array,
    *,
    first: Projection | None = None,
    activation: str,
    epsilon: float,
    devices: Sequence[int] = (),
) -> tuple[list[tuple[Array, ...]], Array, tuple[Array, ...]]:
    """`quantized_block` of the result of `cuda_attend.attend`, for each layer, as one CUDA custom
    call. In a layer with a `mixture`, a router and `quantized_moe` replace the MLP.

    Every kernel starts while its predecessor runs: the output projection loads its weights during
    attention, and the next attention loads its cache during the products before it. It supports
    neither derivatives nor `vmap`, and only arrays of one GPU.

    In `jax.shard_map` several GPUs may share the layers (`cuda_calls.exchanging`). Each has some of
    the heads, and hidden features or experts, with the corresponding weights; residual, norms and
    routers are replicated. Two kernels per layer add the output projections, and the down
    projections or sums of experts, of all GPUs in float32, with equal results on all of them.

    **Arguments:**

    - `layers`: each but the last has three following weights, of query, key and value of the next.
    - `residual`: (batch, d) in the dtype of the query; with `first` float32, and devices add it.
    - `first`: the norm and the weights whose products are the query, key and value of the first
      layer; None if its operands contain them.
    - `activation`, `epsilon`: as for `quantized_block`.
    - `devices`: CUDA ordinals of the GPUs that share the layers.

    **Returns:** the updated arrays of the cache for each layer, as of `cuda_attend.attend`, the new
    residual, and the following products of the last layer.
    """
    caches, (y, *products) = cuda_calls.decode_layers(
        layers, residual, first=first, activation=activation, epsilon=epsilon, devices=devices
    )
    return caches, y, tuple(products)
