"""The attention of a decode step and the block after it, in one call."""

from collections.abc import Sequence

from jax import Array

from .._backends import cuda_attend, cuda_calls
from .._core.array import QuantizedArray
from .._matmul.call import fits_hopper_alone, is_supported
from .._matmul.support import only_local_gpus_of


def supports(residual: Array, weights: Sequence[QuantizedArray]) -> bool:
    """Whether `decode_block` computes a block with these weights, where `cuda_attend` attends."""
    runs = not fits_hopper_alone(weights) or only_local_gpus_of(90)
    return (
        runs
        and cuda_calls.normalizes(residual.shape[-1])
        and all(is_supported("cuda", residual, weight) for weight in weights)
    )


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
    """`quantized_block` of what `cuda_attend.attend` returns, as one custom call of CUDA.

    The output projection so loads its weights while the attention runs. It has no derivative and no
    rule for `vmap`, and computes with the arrays of one GPU.

    In `jax.shard_map` several GPUs may share a block (`cuda_calls.exchanging`). Each has some of
    the heads and hidden features, and the weights that go with them; residual and norms are the
    same on all of them. Two kernels of the call add what the output and down projections give, in
    float32, over the GPUs, and the results are the same on all.

    **Arguments:**

    - `attention`, `attending`: as of `cuda_attend.attend`.
    - `residual`: (batch, d) in the dtype of the query.
    - `devices`: CUDA's numbers of the GPUs that share the block.
    - the others: as of `quantized_block`.

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
