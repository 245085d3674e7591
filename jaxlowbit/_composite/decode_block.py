"""The attention of a decode step and the block after it, in one call."""

from collections.abc import Sequence

from jax import Array

from .._backends import cuda_attend, cuda_calls
from .._backends.target import local_gpus
from .._core.array import QuantizedArray
from .._matmul.call import first, unread


def unsupported(residual: Array, weights: Sequence[QuantizedArray]) -> str | None:
    """Returns None if `decode_block` supports these weights, else the reason. Attention has
    separate limits: `cuda_attend.unsupported`."""
    target = local_gpus()
    reason = cuda_calls.unsupported_norm(residual.shape[-1])
    return reason or first(unread(target, residual, weight) for weight in weights)


def decode_block(
    attention: cuda_attend.Operands,
    residual: Array,
    out: QuantizedArray,
    norm: Array,
    gate_up: QuantizedArray,
    down: QuantizedArray,
    *,
    attending: cuda_attend.Options,
    following: tuple[Array, Sequence[QuantizedArray]] | None,
    activation: str,
    epsilon: float,
    devices: Sequence[int] = (),
) -> tuple[Array, Array, Array, tuple[Array, ...]]:
    """`quantized_block` of the result of `cuda_attend.attend`, as one CUDA custom call.

    So the output projection loads its weights while the attention runs. It supports neither
    derivatives nor `vmap`, and only arrays of one GPU.

    In `jax.shard_map` several GPUs may share a block (`cuda_calls.exchanging`). Each has some of
    the heads and hidden features with the corresponding weights; residual and norms are replicated.
    Two kernels of the call add the output and down projections of all GPUs in float32, with equal
    results on all of them.

    **Arguments:**

    - `attention`, `attending`: as for `cuda_attend.attend`.
    - `residual`: (batch, d) in the dtype of the query.
    - `devices`: CUDA ordinals of the GPUs that share the block.
    - the others: as for `quantized_block`.

    **Returns:** the keys and values of the cache, the new residual, and the following products.
    """
    following_norm, following_weights = (None, ()) if following is None else following
    keys, values, y, *products = cuda_calls.decode_block(
        attention,
        residual,
        norm,
        following_norm,
        (out, gate_up, down, *following_weights),
        attending=attending,
        activation=activation,
        epsilon=epsilon,
        devices=devices,
    )
    return keys, values, y, tuple(products)


def decode_blocks(
    attentions: Sequence[cuda_attend.Operands],
    residual: Array,
    norms: Sequence[tuple[Array, Array]],
    weights: Sequence[Sequence[QuantizedArray]],
    *,
    attending: cuda_attend.Options,
    activation: str,
    epsilon: float,
    devices: Sequence[int] = (),
) -> tuple[list[list[Array]], Array, tuple[Array, ...]] | None:
    """`decode_block` of consecutive layers that are alike, as one CUDA custom call.

    So attention starts while the kernels before it run. The following products of a layer are
    query, key and value of the next one.

    **Arguments:**

    - `attentions`: as for `cuda_attend.attend`; query, key and value are read of the first only.
    - `norms`: of each layer, before its MLP and before the following products.
    - `weights`: of each layer, output, gate and up, down, and three following ones.
    - the others: as for `decode_block`.

    **Returns:** the keys and values of each layer, the new residual, and the following products;
    None if the layers are not alike.
    """
    found = cuda_calls.decode_blocks(
        attentions,
        residual,
        norms,
        weights,
        attending=attending,
        activation=activation,
        epsilon=epsilon,
        devices=devices,
    )
    if found is None:
        return None
    caches, (y, *products) = found
    return caches, y, tuple(products)
