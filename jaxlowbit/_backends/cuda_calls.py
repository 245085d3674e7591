"""Several products, or one with its epilogue, as one custom call of CUDA.

Each kernel of a call starts before its predecessor ends (programmatic dependent launch).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._core import layout
from .._core.array import QuantizedArray
from . import call, cuda_attend
from .extension import ffi, unavailable


def matmuls(
    lhs: Array, weights: Sequence[QuantizedArray], *, out_dtype: jnp.dtype, half_sums: bool
) -> tuple[Array, ...]:
    """`lhs @ weight` (..., n) for matrices of one format, as one custom call of CUDA."""
    rows, m = lhs.shape[:-1], math.prod(lhs.shape[:-1])
    results = [jax.ShapeDtypeStruct((1, m, weight.n), out_dtype) for weight in weights]
    operands = [*call.apart(lhs.reshape(1, m, lhs.shape[-1]))]
    for weight in weights:
        operands += call.call_operands(weight, lhs.dtype)
    sums = max(call.workspace_bytes(1, m, weight.n) for weight in weights)
    workspace = call.workspace(sums, results, operands)
    launches = [_launch(lhs, m, weight, out_dtype, half_sums=half_sums) for weight in weights]
    _, *outs = jax.ffi.ffi_call(call.MATMULS_TARGET, [workspace, *results])(
        *operands,
        **call.attributes_with_units(
            weights[0].format,
            **call.format_attributes(weights[0].format),
            **call.codebook_attributes(weights[0].format),
            half_sums=half_sums,
        ),
        **call.launches(*launches),
    )
    return tuple(out.reshape(*rows, out.shape[-1]) for out in call.apart(*outs))


def fused(
    lhs: Array,
    rhs: QuantizedArray,
    bias: Array | None,
    residual: Array | None,
    *,
    rows: tuple[int, ...],
    activation: str | None,
    gated: bool = False,
    out_dtype: jnp.dtype,
    half_sums: bool,
) -> Array:
    """A product with its epilogue, (batch, m, n), as one custom call of CUDA.

    lhs is (*stack, *rows, k); a gated rhs is two matrices that share one batch of lhs.
    """
    m, weights = math.prod(rows), math.prod(rhs.shape[:-2])
    batch = 1 if gated else weights

    def addend(array: Array | None, shape: tuple[int, ...]) -> Array:
        if array is None:
            return jnp.zeros(0, lhs.dtype)
        return array.astype(lhs.dtype if array.dtype == lhs.dtype else jnp.float32).reshape(shape)

    operands = [
        *call.apart(lhs.reshape(batch, m, rhs.k)),
        *call.call_operands(rhs, lhs.dtype),
        addend(bias, (weights, rhs.n)),
        addend(residual, (batch, m, rhs.n)),
    ]
    if residual is not None:
        operands[-1:] = call.apart(operands[-1])
    result = jax.ShapeDtypeStruct((batch, m, rhs.n), out_dtype)
    workspace = call.workspace(call.workspace_bytes(weights, m, rhs.n), [result], operands)
    out, _ = jax.ffi.ffi_call(call.FUSED_TARGET, [result, workspace])(
        *operands,
        **call.attributes_with_units(
            rhs.format,
            **call.format_attributes(rhs.format),
            **call.codebook_attributes(rhs.format),
            activation=activation or "none",
            gated=gated,
            half_sums=half_sums,
        ),
        **call.launches(
            _launch(lhs, m, rhs, out_dtype, batch=batch, gated=gated, half_sums=half_sums)
        ),
    )
    return call.apart(out)[0]


def quantized(
    values: Array, scale: Array | None, rhs: QuantizedArray, *, out_dtype: jnp.dtype
) -> Array:
    """`(values @ rhs) * scale`, (..., n), of 8-bit values (..., k), as one custom call of CUDA.

    `scale`: float32 (..., 1), one for each token; None for sums of integers, without float scales,
    of int8 values. `out_dtype`: float32 or bfloat16; int32 without `scale`.
    """
    rows, m = values.shape[:-1], math.prod(values.shape[:-1])
    padding = ((0, 0), (0, 0), (0, call.padded_columns(rhs.k) - rhs.k))
    values = jnp.pad(values.reshape(1, m, rhs.k), padding)
    scale = jnp.zeros(0, jnp.float32) if scale is None else scale.reshape(1, m)
    operands = [*call.apart(_interleaved(values), scale), *_weight_operands(rhs)]
    result = jax.ShapeDtypeStruct((1, m, rhs.n), out_dtype)
    workspace = call.workspace(call.workspace_bytes(1, m, rhs.n), [result], operands)
    out, _ = jax.ffi.ffi_call(call.ACTIVATIONS_TARGET, [result, workspace])(
        *operands, **_byte_attributes(rhs, m, values.dtype, out_dtype)
    )
    return call.apart(out)[0].reshape(*rows, rhs.n)


def rounded(
    lhs: Array,
    factor: Array | None,
    rhs: QuantizedArray,
    *,
    dtype: Any,
    stored: Any,
    out_dtype: jnp.dtype,
) -> tuple[Array, Array, Array]:
    """`quantized` of floats (..., k), which the call divides by a factor, if any, and rounds.

    The product, and of what: values of `dtype` (m, padded k), and scales (m). Values are `stored`
    as what they are, interleaved, or for few rows as bfloat16. Where the product rounds rows
    itself, one or two of bfloat16, values and scales are not written.
    """
    rows, m = lhs.shape[:-1], math.prod(lhs.shape[:-1])
    factor = jnp.zeros(0, jnp.float32) if factor is None else factor
    operands = [*call.apart(lhs.reshape(1, m, rhs.k), factor), *_weight_operands(rhs)]
    result = jax.ShapeDtypeStruct((1, m, rhs.n), out_dtype)
    values = jax.ShapeDtypeStruct((1, m, call.padded_columns(rhs.k)), stored)
    scale = jax.ShapeDtypeStruct((1, m), jnp.float32)
    workspace = call.workspace(
        call.workspace_bytes(1, m, rhs.n), [result, values, scale], operands[2:]
    )
    out, values, scale, _ = jax.ffi.ffi_call(
        call.ROUNDED_TARGET, [result, values, scale, workspace]
    )(
        *operands,
        **_byte_attributes(rhs, m, stored, out_dtype),
        float8=np.bool_(dtype == jnp.float8_e4m3fn),
    )
    return call.apart(out)[0].reshape(*rows, rhs.n), values[0], scale[0]


def _weight_operands(rhs: QuantizedArray) -> tuple[Array, ...]:
    """Those of a weight that multiplies 8-bit activations."""
    plain = rhs._with(tensor_scale=None)
    return *call.call_operands(plain, jnp.dtype(jnp.bfloat16)), _channel_scale(rhs)


def _byte_attributes(
    rhs: QuantizedArray, m: Any, values: Any, out_dtype: jnp.dtype
) -> dict[str, Any]:
    """Of a call that multiplies m rows of quantized values."""
    scale = call.read_dtype(rhs.scale.dtype, rhs.format, jnp.dtype(jnp.bfloat16))
    return {
        **call.attributes(
            rhs.format,
            **call.format_attributes(rhs.format),
            **call.codebook_attributes(rhs.format),
        ),
        **call.launches(
            call.Launch(
                *(rhs.format, 1, m, rhs.n, call.padded_columns(rhs.k), values, scale, out_dtype)
            )
        ),
    }


def _channel_scale(rhs: QuantizedArray) -> Array:
    """The scales of the channels of each strip, float32 (weights, n_blocks, 64), in order; or
    none."""
    if rhs.tensor_scale is None:
        return jnp.zeros(0, jnp.float32)
    n_blocks = rhs.packed.shape[-3]
    scales = rhs.tensor_scale.reshape(-1, rhs.n)
    padded = jnp.pad(scales, ((0, 0), (0, n_blocks * layout.ATOM - rhs.n)))
    return padded.reshape(-1, n_blocks, layout.ATOM)


def _interleaved(values: Array) -> Array:
    """Columns in the order in which tensor cores take them beside packed weights (`problem.h`)."""
    halves = values.reshape(*values.shape[:-1], -1, 2, call.INTERLEAVED // 2)
    return jnp.swapaxes(halves, -1, -2).reshape(values.shape)


def mlp(
    lhs: Array,
    gate_up: QuantizedArray,
    down: QuantizedArray,
    *,
    activation: str,
    out_dtype: jnp.dtype,
    half_sums: bool,
) -> Array:
    """`(activation(lhs @ gate) * (lhs @ up)) @ down`, (..., n), as one custom call of CUDA."""
    rows, m = lhs.shape[:-1], math.prod(lhs.shape[:-1])
    operands = [
        *call.apart(lhs.reshape(1, m, lhs.shape[-1])),
        *call.call_operands(gate_up, lhs.dtype),
        *call.call_operands(down, lhs.dtype),
    ]
    result = jax.ShapeDtypeStruct((1, m, down.n), out_dtype)
    hidden = jax.ShapeDtypeStruct((1, m, gate_up.n), lhs.dtype)
    sums = max(call.workspace_bytes(2, m, gate_up.n), call.workspace_bytes(1, m, down.n))
    workspace = call.workspace(sums, [result], operands)
    out, *_ = jax.ffi.ffi_call(call.MLP_TARGET, [result, hidden, workspace])(
        *operands,
        **call.attributes_with_units(
            *(gate_up.format, down.format),
            **call.format_attributes(gate_up.format),
            **call.format_attributes(down.format, "down_"),
            **call.codebooks_attributes([gate_up.format, down.format]),
            activation=activation,
            half_sums=half_sums,
        ),
        **call.launches(
            _launch(lhs, m, gate_up, lhs.dtype, gated=True, half_sums=half_sums),
            _launch(lhs, m, down, out_dtype, half_sums=half_sums),
        ),
    )
    return call.apart(out)[0].reshape(*rows, down.n)


def block(
    attended: Array,
    residual: Array,
    norm: Array,
    following_norm: Array | None,
    weights: Sequence[QuantizedArray],
    *,
    activation: str,
    epsilon: float,
    values: Any = None,
) -> tuple[Array, ...]:
    """`quantized_block` as one custom call of CUDA: the new residual, then what follows.

    `weights` are those of out, gate_up and down, then the following ones. `values`: None, or the
    dtype of 8 bits to which each row, bfloat16, is rounded before it is multiplied.
    """
    out, gate_up, down, *following = weights
    rows, m, dtype = attended.shape[:-1], math.prod(attended.shape[:-1]), attended.dtype

    def operands_of(weight: QuantizedArray) -> tuple[Array, ...]:
        return call.call_operands(weight, dtype) if values is None else _weight_operands(weight)

    operands = [
        *call.apart(attended.reshape(1, m, out.k), residual.reshape(1, m, out.n)),
        norm,
        jnp.zeros(0, dtype) if following_norm is None else following_norm,
        *(operand for weight in weights for operand in operands_of(weight)),
    ]
    stream = jax.ShapeDtypeStruct((1, m, out.n), dtype)
    hidden = jax.ShapeDtypeStruct((1, m, gate_up.n), dtype)
    products = [jax.ShapeDtypeStruct((1, m, weight.n), dtype) for weight in following]
    workspace = call.workspace(_sums_bytes(m, weights), [stream, *products], operands)
    if values is None:
        target, between = call.BLOCK_TARGET, [*[stream] * 3, hidden]
    else:
        rounded = [jax.ShapeDtypeStruct((1, m, w.k), values) for w in (out, gate_up, down)]
        scale = jax.ShapeDtypeStruct((1, m), jnp.float32)
        target, between = call.ROUNDED_BLOCK_TARGET, [*[stream] * 2, hidden, *rounded, scale]
    result, *others = jax.ffi.ffi_call(target, [stream, *between, workspace, *products])(
        *operands, **_block_attributes(attended, weights, activation, epsilon, values=values)
    )
    results = call.apart(result, *others[len(others) - len(following) :])
    return tuple(x.reshape(*rows, x.shape[-1]) for x in results)


def decode_block(
    attention: cuda_attend.Operands,
    residual: Array,
    norm: Array,
    following_norm: Array | None,
    weights: Sequence[QuantizedArray],
    *,
    attending: cuda_attend.Options,
    activation: str,
    epsilon: float,
    devices: Sequence[int] = (),
) -> tuple[Array, ...]:
    """The attention of a decode step and `block` of its result, as one custom call of CUDA.

    The new keys and values of the cache, the new residual (batch, d), then what follows. Of several
    `devices`, which `exchanging` found, each has a part of the weights.
    """
    out, gate_up, _, *following = weights
    batch, dtype = residual.shape[0], residual.dtype
    operands = [
        *cuda_attend.call_operands(attention),
        *call.apart(residual[None]),
        norm,
        jnp.zeros(0, dtype) if following_norm is None else following_norm,
        *(operand for weight in weights for operand in call.call_operands(weight, dtype)),
    ]
    stream = jax.ShapeDtypeStruct((1, batch, out.n), dtype)
    hidden = jax.ShapeDtypeStruct((1, batch, gate_up.n), dtype)
    products = [jax.ShapeDtypeStruct((1, batch, weight.n), dtype) for weight in following]
    sums = max(cuda_attend.workspace_bytes(attention, attending), _sums_bytes(batch, weights))
    workspace = call.workspace(sums, [stream, *products], operands[-4 * len(weights) - 3 :])
    attended = cuda_attend.call_results(attention, (1, batch, out.k))
    parts = jax.ShapeDtypeStruct(stream.shape, jnp.float32) if devices else stream
    group = {"devices": np.array(devices, np.int64)} if devices else {}
    _, keys, values, _, result, *others = jax.ffi.ffi_call(
        call.DECODE_BLOCK_TARGET,
        [*attended, workspace, stream, parts, stream, stream, hidden, *products],
        input_output_aliases=cuda_attend.ALIASES,
    )(
        *operands,
        **cuda_attend.call_attributes(attending),
        **_block_attributes(residual, weights, activation, epsilon, parts.dtype),
        **group,
    )
    results = call.apart(result, *others[len(others) - len(following) :])
    return keys, values, *(x[0] for x in results)


def normalized(
    residual: Array,
    addend: Array,
    norm: Array,
    weights: Sequence[QuantizedArray],
    *,
    activation: str | None,
    epsilon: float,
    out_dtype: jnp.dtype,
) -> tuple[Array, ...]:
    """`residual + addend`, and products of its normalized rows, as one custom call of CUDA.

    With an activation the weights are gate and up as one stack and down, of an MLP.
    """
    rows, m, dtype = residual.shape[:-1], math.prod(residual.shape[:-1]), residual.dtype
    mlp = activation is not None
    k = residual.shape[-1]
    operands = [
        *call.apart(residual.reshape(1, m, k), addend.reshape(1, m, k)),
        norm,
        *(operand for weight in weights for operand in call.call_operands(weight, dtype)),
    ]
    stream = jax.ShapeDtypeStruct((1, m, k), dtype)
    dtypes = [dtype, out_dtype] if mlp else [out_dtype] * len(weights)
    products = [
        jax.ShapeDtypeStruct((1, m, weight.n), of)
        for weight, of in zip(weights, dtypes, strict=True)
    ]
    sums = max(
        call.workspace_bytes(2 if mlp and i == 0 else 1, m, weight.n)
        for i, weight in enumerate(weights)
    )
    workspace = call.workspace(sums, products, operands)
    total, _, _, *outs = jax.ffi.ffi_call(
        call.NORMALIZED_TARGET, [stream, stream, workspace, *products]
    )(
        *operands,
        **call.attributes_with_units(
            *(weight.format for weight in weights),
            **call.formats_attributes(weights),
            activation=activation or "none",
            mlp=np.bool_(mlp),
            epsilon=np.float32(epsilon),
        ),
        **call.launches(
            *(
                _launch(residual, m, weight, of, gated=mlp and i == 0)
                for i, (weight, of) in enumerate(zip(weights, dtypes, strict=True))
            )
        ),
    )
    results = call.apart(total, *(outs[1:] if mlp else outs))
    return tuple(x.reshape(*rows, x.shape[-1]) for x in results)


def _sums_bytes(m: Any, weights: Sequence[QuantizedArray]) -> int:
    """Bytes for partial sums of the products of a block."""
    out, gate_up, *others = weights
    return max(
        call.workspace_bytes(2, m, gate_up.n),
        *(call.workspace_bytes(1, m, weight.n) for weight in (out, *others)),
    )


def _block_attributes(
    lhs: Array,
    weights: Sequence[QuantizedArray],
    activation: str,
    epsilon: float,
    projected: Any = None,
    values: Any = None,
) -> dict[str, Any]:
    """Of a block with lhs (..., rows, k), whose output and down projections are `projected`.

    `values`: the dtype to which rows are rounded, if they are.
    """
    m, dtype = math.prod(lhs.shape[:-1]), lhs.dtype
    attributes = call.attributes_with_units if values is None else call.attributes
    outs = [projected or dtype, dtype, projected or dtype, *[dtype] * (len(weights) - 3)]
    return {
        **attributes(
            *(weight.format for weight in weights),
            **call.formats_attributes(weights),
            activation=activation,
            epsilon=np.float32(epsilon),
        ),
        **call.launches(
            *(
                _launch(lhs, m, weight, out, gated=i == 1, values=values)
                for i, (weight, out) in enumerate(zip(weights, outs, strict=True))
            )
        ),
    }


def _launch(
    lhs: Array,
    m: Any,
    weight: QuantizedArray,
    out: jnp.dtype,
    *,
    batch: Any = 1,
    gated: bool = False,
    half_sums: bool = False,
    values: Any = None,
) -> call.Launch:
    """`values`: the dtype to which lhs is rounded, if it is."""
    scale = call.read_dtype(weight.scale.dtype, weight.format, lhs.dtype)
    return call.Launch(
        *(weight.format, batch, m, weight.n, weight.k, values or lhs.dtype, scale, out),
        gated=gated,
        half_sums=half_sums,
    )


def normalizes(columns: int) -> bool:
    """Whether the kernels normalize rows of this length."""
    return columns % 8 == 0 and columns <= ffi.MAX_RMS_NORM_COLUMNS


def exchanging(devices: Sequence[Any], rows: int) -> tuple[int, ...]:
    """CUDA's numbers of devices that add parts of so many rows within a call, or ().

    They are GPUs of this process that can write to each other's memory (`cuda/ops/exchange.h`).
    """
    near = all(
        device.platform == "gpu" and device.process_index == jax.process_index()
        for device in devices
    )
    if not near or rows > ffi.MAX_EXCHANGE_ROWS or unavailable("cuda") is not None:
        return ()
    numbers = tuple(device.local_hardware_id for device in devices)
    return numbers if ffi.can_exchange(numbers) else ()
