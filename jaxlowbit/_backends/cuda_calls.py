"""Several products, or one with its epilogue, as one CUDA custom call.

Each kernel of a call starts before its predecessor ends (programmatic dependent launch).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._core import layout
from .._core.array import QuantizedArray
from .._core.dtypes import FLOATS
from . import call, cuda_attend, extension
from .block import add_block, add_mlp
from .call import Call, stored_weight
from .extension import UNAVAILABLE, ffi
from .layers import Layer, run_layers


def matmuls(
    lhs: Array, weights: Sequence[QuantizedArray], *, out_dtype: jnp.dtype, accumulate_float16: bool
) -> tuple[Array, ...]:
    """`lhs @ weight` (..., n) for matrices of one format, as one CUDA custom call."""
    rows, m = lhs.shape[:-1], math.prod(lhs.shape[:-1])
    calls = Call("quantized_matmuls")
    x = calls.operand(*call.apart(lhs.reshape(1, m, lhs.shape[-1])))
    products = [
        calls.add_product(
            stored_weight(weight, lhs.dtype),
            x,
            calls.result((1, m, weight.n), out_dtype),
            accumulate_float16=accumulate_float16,
        )
        for weight in weights
    ]
    calls.multiply(*products)
    return tuple(out.reshape(*rows, out.shape[-1]) for out in call.apart(*calls.run()))


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
    accumulate_float16: bool,
) -> Array:
    """A product with its epilogue, (batch, m, n), as one CUDA custom call.

    lhs is (*stack, *rows, k); a gated rhs is two matrices that share one batch of lhs.
    """
    m, weights = math.prod(rows), math.prod(rhs.shape[:-2])
    batch = 1 if gated else weights
    calls = Call("quantized_glu" if gated else "quantized_matmul")

    def wide(array: Array) -> Array:
        return array.astype(lhs.dtype if array.dtype == lhs.dtype else jnp.float32)

    x = calls.operand(*call.apart(lhs.reshape(batch, m, rhs.k)))
    addends = {}
    if bias is not None:
        addends["bias"] = calls.operand(wide(bias).reshape(weights, rhs.n))
    if residual is not None:
        addends["residual"] = calls.operand(*call.apart(wide(residual).reshape(batch, m, rhs.n)))
    product = calls.add_product(
        stored_weight(rhs, lhs.dtype),
        x,
        calls.result((batch, m, rhs.n), out_dtype),
        gated=gated,
        addends=addends,
        activation=activation or "none",
        accumulate_float16=accumulate_float16,
    )
    calls.multiply(product)
    return call.apart(*calls.run())[0]


def ragged(
    lhs: Array,
    rhs: QuantizedArray,
    sizes: Array,
    offset: Array | None,
    bias: Array | None,
    *,
    activation: str | None,
    out_dtype: jnp.dtype,
    accumulate_float16: bool,
) -> Array:
    """`quantized_ragged_dot`, (m, n), as one CUDA custom call."""
    calls = Call("quantized_ragged_dot")
    x, groups = map(calls.operand, call.apart(lhs[None], sizes))
    out = calls.result((1, lhs.shape[0], rhs.n), out_dtype)
    product = _add_ragged(
        *(calls, rhs, x, out, groups, offset, bias, activation),
        lhs=lhs.dtype,
        accumulate_float16=accumulate_float16,
    )
    calls.multiply(product)
    return call.apart(calls.run()[0])[0][0]


def _add_ragged(
    calls: Call,
    rhs: QuantizedArray,
    x: int,
    out: int,
    groups: int,
    offset: Array | None,
    bias: Array | None,
    activation: str | None,
    *,
    lhs: Any,
    all_experts: int = 0,
    **fields: Any,
) -> int:
    """Appends the product of the rows at `x`, in groups, and a stack of matrices or pairs.
    `all_experts`: of all devices, 0 for the number of groups."""
    if offset is not None:
        fields["group_offset_at"] = calls.operand(offset.reshape(1))
    addends = {}
    if bias is not None:
        bias = bias.astype(lhs if bias.dtype == lhs else jnp.float32)
        addends["bias"] = calls.operand(bias.reshape(-1, rhs.n))
    return calls.add_product(
        stored_weight(rhs, lhs),
        x,
        out,
        gated=rhs.ndim == 4,
        addends=addends,
        activation=activation or "none",
        groups_of_rows=calls.at[groups].shape[0],
        all_experts=all_experts or calls.at[groups].shape[0],
        group_sizes_at=groups,
        **fields,
    )


def moe(
    x: Array,
    expert: Array,
    weight: Array,
    gate_up: QuantizedArray,
    down: QuantizedArray,
    gate_up_bias: Array | None,
    down_bias: Array | None,
    offset: Array,
    *,
    activation: str | None,
    out_dtype: jnp.dtype,
    accumulate_float16: bool,
    all_experts: int,
) -> Array:
    """`quantized_moe`, (..., n), as one CUDA custom call.

    Its first kernel sorts the choices and copies their rows, its last one adds the choices of each
    token. If there are few choices, products read the experts and the rows themselves.
    """
    rows, k = x.shape[:-1], x.shape[-1]
    tokens, top = math.prod(rows), expert.shape[-1]
    calls, choices = Call("quantized_moe"), (tokens, top)
    arrays = (x.reshape(1, tokens, k), expert.reshape(choices), weight.reshape(choices))
    x_at, expert_at, weight_at = map(calls.operand, call.apart(*arrays))
    out = calls.result((1, tokens, down.n), out_dtype)
    _add_experts(
        *(calls, x_at, expert_at, weight_at, gate_up, down, gate_up_bias, down_bias),
        calls.operand(offset.reshape(1)),
        out,
        activation=activation,
        accumulate_float16=accumulate_float16,
        all_experts=all_experts,
    )
    return call.apart(calls.run()[0])[0].reshape(*rows, down.n)


def _add_experts(
    calls: Call,
    x: int,
    expert: int,
    weight: int,
    gate_up: QuantizedArray,
    down: QuantizedArray,
    gate_up_bias: Array | None,
    down_bias: Array | None,
    offset: int,
    out: int,
    *,
    activation: str | None,
    accumulate_float16: bool = False,
    all_experts: int,
) -> None:
    """Appends the products and steps of `quantized_moe`, of the rows at `x` and the choices at
    `expert` and `weight`. `offset`: a place, 0 if all experts are here. `all_experts`: of all
    devices."""
    k, dtype = calls.at[x].shape[-1], calls.at[x].dtype
    choices = tuple(calls.at[expert].shape)
    count = math.prod(choices)
    sizes = calls.result((down.shape[0],), jnp.int32)
    place = calls.result(choices, jnp.int32)
    grouped = calls.result((1, count, k), dtype)
    hidden = calls.result((1, count, down.k), dtype)
    results = calls.result((1, count, down.n), jnp.float32)
    shared: dict[str, Any] = {
        "lhs": dtype,
        "all_experts": all_experts,
        "accumulate_float16": accumulate_float16,
    }
    products = [
        _add_ragged(calls, *operands, **shared)
        for operands in (
            (gate_up, grouped, hidden, sizes, None, gate_up_bias, activation),
            (down, hidden, results, sizes, None, down_bias, None),
        )
    ]
    calls.step(
        "group",
        first=products[0],
        count=len(products),
        x=x,
        expert=expert,
        offset=offset,
        sizes=sizes,
        place=place,
        out=grouped,
    )
    for product in products:
        calls.multiply(product)
    calls.step("combine", x=results, place=place, scales=weight, out=out)


def unsupported_ragged(
    lhs: Any, rhs: QuantizedArray, activation: str | None, capability: int
) -> str | None:
    """Returns None if kernels for a compute capability multiply these rows in groups, else the
    reason."""
    if rhs.index is not None or rhs.packed.shape[0] == 0:
        return "the stack is a view of a longer one, or empty"
    stack = math.prod(rhs.shape[:-2])
    product = call.record(
        *(rhs.format, lhs.dtype, lhs.dtype),
        m=lhs.shape[0] if isinstance(lhs.shape[0], int) else -1,
        n=rhs.n,
        k=rhs.k,
        num_weights=stack,
        groups_of_rows=stack,
        gated=rhs.ndim == 4,
        activation=activation or "none",
    )
    what = ffi.compiled_for(product)
    return ffi.unsupported(product, capability) or extension.no_compiler(what)


def quantized(
    values: Array, scale: Array | None, rhs: QuantizedArray, *, out_dtype: jnp.dtype
) -> Array:
    """`(values @ rhs) * scale`, (..., n), of 8-bit values (..., k), as one CUDA custom call.

    `scale`: float32 (..., 1), one per token; None for integer sums of int8 values, without float
    scales. `out_dtype`: float32 or bfloat16; int32 without `scale`.
    """
    rows, m = values.shape[:-1], math.prod(values.shape[:-1])
    padding = ((0, 0), (0, 0), (0, call.padded_columns(rhs.k) - rhs.k))
    values = jnp.pad(values.reshape(1, m, rhs.k), padding)
    calls = Call("quantized_matmul")
    x = calls.operand(*call.apart(_interleaved(values)))
    scales = 0 if scale is None else calls.operand(*call.apart(scale.reshape(1, m)))
    out = calls.result((1, m, rhs.n), out_dtype)
    weight = _stored_for_bytes(rhs, scaled=scale is not None)
    calls.multiply(calls.add_product(weight, x, out, lhs_scale=scales))
    return call.apart(*calls.run())[0].reshape(*rows, rhs.n)


def rounded(
    lhs: Array,
    factor: Array | None,
    rhs: QuantizedArray,
    *,
    dtype: Any,
    stored: Any,
    out_dtype: jnp.dtype,
) -> tuple[Array, Array, Array]:
    """`quantized` for floats (..., k), which the call divides by a factor, if given, and rounds.

    Returns the product, the values (m, padded k), and the scales (m). Values have dtype `stored`:
    `dtype`, interleaved, or for small M bfloat16. If the product rounds the rows itself (one or two
    bfloat16 rows), values and scales are not written.
    """
    rows, m = lhs.shape[:-1], math.prod(lhs.shape[:-1])
    calls = Call("quantized_matmul")
    floats = calls.operand(*call.apart(lhs.reshape(1, m, rhs.k)))
    factors = 0 if factor is None else calls.operand(*call.apart(factor))
    out = calls.result((1, m, rhs.n), out_dtype)
    values = calls.result((1, m, call.padded_columns(rhs.k)), stored)
    scale = calls.result((1, m), jnp.float32)
    product = calls.add_product(
        _stored_for_bytes(rhs), values, out, lhs_scale=scale, apply_lhs_scale=stored != dtype
    )
    rounding = {"to": str(jnp.dtype(dtype)), "first": product}
    calls.step("round", x=floats, scales=factors, out=values, out_scale=scale, **rounding)
    calls.multiply(product)
    result, x, scales = calls.run()
    return call.apart(result)[0].reshape(*rows, rhs.n), x[0], scales[0]


def _stored_for_bytes(rhs: QuantizedArray, *, scaled: bool = True) -> call.Stored:
    """A weight for 8-bit activations, with channel scales padded to whole strips."""
    weight = stored_weight(rhs._with(tensor_scale=None), jnp.dtype(jnp.bfloat16))
    if rhs.tensor_scale is None or not scaled:
        return weight
    n_blocks = rhs.packed.shape[-3]
    scales = rhs.tensor_scale.reshape(-1, rhs.n)
    padded = jnp.pad(scales, ((0, 0), (0, n_blocks * layout.ATOM - rhs.n)))
    return dataclasses.replace(weight, unit=padded.reshape(-1, n_blocks, layout.ATOM))


def _interleaved(values: Array) -> Array:
    """Columns in the order of tensor core instructions with packed weights (`problem.h`)."""
    halves = values.reshape(*values.shape[:-1], -1, 2, call.INTERLEAVED // 2)
    return jnp.swapaxes(halves, -1, -2).reshape(values.shape)


def mlp(
    lhs: Array,
    gate_up: QuantizedArray,
    down: QuantizedArray,
    *,
    activation: str,
    out_dtype: jnp.dtype,
    accumulate_float16: bool,
) -> Array:
    """`(activation(lhs @ gate) * (lhs @ up)) @ down`, (..., n), as one CUDA custom call."""
    rows, m = lhs.shape[:-1], math.prod(lhs.shape[:-1])
    calls = Call("quantized_mlp")
    x = calls.operand(*call.apart(lhs.reshape(1, m, lhs.shape[-1])))
    out = calls.result((1, m, down.n), out_dtype)
    add_mlp(
        calls, x, gate_up, down, out, activation, lhs.dtype, accumulate_float16=accumulate_float16
    )
    return call.apart(calls.run()[0])[0].reshape(*rows, down.n)


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
    """`quantized_block` as one CUDA custom call: the new residual, then the following products.

    `weights`: out, gate_up and down, then the following weights. `values`: None, or the 8-bit dtype
    that bfloat16 rows are rounded to before each product.
    """
    rows, m = attended.shape[:-1], math.prod(attended.shape[:-1])
    calls = Call("quantized_block")
    x = calls.operand(*call.apart(attended.reshape(1, m, attended.shape[-1])))
    residual = call.apart(residual.reshape(1, m, residual.shape[-1]))[0]
    read = functools.partial(stored_weight, dtype=attended.dtype)
    add_block(
        *(calls, x, residual, norm, following_norm, weights),
        read=read if values is None else _stored_for_bytes,
        activation=activation,
        values=values,
    )
    result, *others = calls.run(epsilon=np.float32(epsilon))
    results = call.apart(result, *others[: len(weights) - 3])
    return tuple(x.reshape(*rows, x.shape[-1]) for x in results)


class Router(NamedTuple):
    """The router of a mixture of experts.

    - `weight`, `bias`: floats (width, experts), and (experts,) or None.
    - `top`: the number of experts of a token.
    - `normalized`: whether weights are the softmax over the chosen experts, or over all.
    """

    weight: Array
    bias: Array | None
    top: int
    normalized: bool


class Mixture(NamedTuple):
    """The router of a mixture of experts, and the biases of its stacks gate_up and down.

    - `gate_up_bias`, `down_bias`: (2, experts, hidden) and (experts, width), or None.
    - `offset`: the number of the first expert of this device, int32 (), if the devices of a call
      have different experts. Otherwise None: all experts are here.
    """

    router: Router
    gate_up_bias: Array | None
    down_bias: Array | None
    offset: Array | None = None


class Projection(NamedTuple):
    """A norm (d,), and the weights of products of the normalized rows."""

    norm: Array
    weights: Sequence[QuantizedArray]


class DecodeLayer(NamedTuple):
    """Attention of a decode step, and the block after it.

    - `attention`, `attending`: as for `cuda_attend.attend`. Only the first layer reads its
      query, key and value; later layers read the following products of the layer before.
    - `norm`, `following_norm`: before the MLP and before the following products, if any.
    - `weights`: out, gate_up and down, then the following weights.
    - `mixture`: if gate_up and down are stacks of experts.
    - `out_bias`: (d,), added to the product with `out`, or None. If devices add their parts, it is
      zero on all but one of them.
    - `following_dtype`: of the following products; None for the dtype of the query.
    """

    attention: cuda_attend.Operands
    attending: cuda_attend.Options
    norm: Array
    following_norm: Array | None
    weights: Sequence[QuantizedArray]
    mixture: Mixture | None = None
    out_bias: Array | None = None
    following_dtype: Any = None


def decode_layers(
    layers: Sequence[DecodeLayer],
    residual: Array,
    *,
    first: Projection | None = None,
    activation: str,
    epsilon: float,
    devices: Sequence[int] = (),
) -> tuple[list[tuple[Array, ...]], list[Array]]:
    """Consecutive layers of a decode step as one CUDA custom call, so that attention starts while
    the kernels of the layer before run.

    With several `devices`, from `exchanging`, each has a part of the weights. With `first`, which
    gives the query, key and value of the first layer, the residual is float32, and devices add it.

    Returns the updated arrays of the cache for each layer, then the new residual (batch, d) and the
    following products of the last layer.
    """
    x: Any = call.apart(residual[None])[0]
    group: dict[str, Any] = {"devices": np.array(devices, np.int64)} if devices else {}
    group["epsilon"] = np.float32(epsilon)
    caller = "decode_block" if len(layers) == 1 else "decode_blocks"
    parts: list[Layer] = []
    given: list[int] = []  # residual, query, key and value: results of the call before
    if first is not None:
        calls, dtype = Call(caller), layers[0].attention.query.dtype
        given = _add_first(calls, x, first, dtype)
        parts.append(Layer(calls, attributes=group))
        x = jax.ShapeDtypeStruct(x.shape, dtype)  # the first layer reads the result instead
    for layer in layers:
        calls = Call(caller)
        shape = (1, x.shape[1], layer.weights[0].k)
        add_block(
            calls,
            cuda_attend.add_attention(calls, layer.attention, shape),
            *(x, layer.norm, layer.following_norm, layer.weights),
            read=functools.partial(stored_weight, dtype=x.dtype),
            activation=activation,
            parts=jnp.float32 if devices else None,
            mlp=None
            if layer.mixture is None
            else functools.partial(
                _add_mixture, calls, layer.mixture, layer.weights[1:3], activation
            ),
            out_bias=layer.out_bias,
            following_dtype=layer.following_dtype,
        )
        links = dict(zip((calls.place_of(x), 1, 2, 3), given, strict=True)) if given else {}
        aliases = cuda_attend.aliases(layer.attention)
        sums = cuda_attend.workspace_bytes(layer.attention, layer.attending)
        attributes = {**cuda_attend.call_attributes(layer.attention, layer.attending), **group}
        parts.append(Layer(calls, links, aliases, sums, attributes))
        # Results: attention, the cache, the residual, the following products.
        given = [-len(aliases) - i for i in (2, 3, 4, 5)]
    found = run_layers(parts)
    caches = [
        tuple(results[-i - 1] for i in part.aliases.values())
        for part, results in zip(parts, found, strict=True)
        if part.aliases
    ]
    places = [given[0] - i for i in range(len(layers[-1].weights) - 2)]
    return caches, [x[0] for x in call.apart(*[found[-1][place] for place in places])]


def _add_first(calls: Call, addend: Array, first: Projection, dtype: Any) -> list[int]:
    """Appends the sum (1, m, d) of the addends of all devices, and products of the normalized sum.
    Returns the places of the sum and the products."""
    shape = addend.shape
    total = calls.result(shape, dtype)
    outs = [calls.result((*shape[:-1], weight.n), dtype) for weight in first.weights]
    normed = calls.result(shape, dtype)
    parts, scales = map(calls.operand, (addend, first.norm))
    calls.step("normalize", addend=parts, scales=scales, total=total, out=normed)
    _multiply_by_all(calls, first.weights, normed, outs)
    return [total, *outs]


def _multiply_by_all(
    calls: Call, weights: Sequence[QuantizedArray], x: int, outs: Sequence[int]
) -> None:
    """Appends products of the rows at `x`, and the step that multiplies them."""
    dtype = calls.at[x].dtype
    products = [
        calls.add_product(stored_weight(weight, dtype), x, out)
        for weight, out in zip(weights, outs, strict=True)
    ]
    calls.multiply(*products)


def _add_mixture(
    calls: Call,
    mixture: Mixture,
    stacks: Sequence[QuantizedArray],
    activation: str,
    x: int,
    out: int,
) -> None:
    """Appends a router and the experts that it chooses for the rows at `x`."""
    router, (gate_up, down) = mixture.router, stacks
    choices = (calls.at[x].shape[1], router.top)
    expert = calls.result(choices, jnp.int32)
    weight = calls.result(choices, jnp.float32)
    calls.step(
        "route",
        x=x,
        scales=calls.operand(router.weight),
        addend=0 if router.bias is None else calls.operand(router.bias),
        normalized=router.normalized,
        expert=expert,
        out=weight,
    )
    offset = 0 if mixture.offset is None else calls.operand(mixture.offset.reshape(1))
    operands = (calls, x, expert, weight, gate_up, down, mixture.gate_up_bias, mixture.down_bias)
    experts = router.weight.shape[1]
    _add_experts(*operands, offset, out, activation=activation, all_experts=experts)


def unsupported_router(router: Router, capability: int) -> str | None:
    """Returns None if there is a kernel for a router and a compute capability, else the reason."""
    width, experts = router.weight.shape
    sizes = {"columns": width, "experts": experts, "top": router.top}
    reason = ffi.unsupported_route(**sizes, compute_capability=capability)
    arrays = [router.weight] if router.bias is None else [router.weight, router.bias]
    if any(array.dtype not in FLOATS for array in arrays):
        reason = reason or f"the router's kernel takes {call.one_of(FLOATS)}"
    return reason or None


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
    """`residual + addend`, and products of its normalized rows, as one CUDA custom call.

    With an activation, the weights form an MLP: gate and up as one stack, and down.
    """
    rows, m, dtype = residual.shape[:-1], math.prod(residual.shape[:-1]), residual.dtype
    shape = (1, m, residual.shape[-1])
    calls = Call("normalized products")
    x, y = map(calls.operand, call.apart(residual.reshape(shape), addend.reshape(shape)))
    total = calls.result(shape, dtype)
    mlp = activation is not None
    of_results = weights[1:] if mlp else weights
    outs = [calls.result((1, m, weight.n), out_dtype) for weight in of_results]
    normed = calls.result(shape, dtype)
    calls.step("normalize", x=x, addend=y, scales=calls.operand(norm), total=total, out=normed)
    if mlp:
        gate_up, down = weights
        add_mlp(calls, normed, gate_up, down, outs[0], activation, dtype)
    else:
        _multiply_by_all(calls, weights, normed, outs)
    results = call.apart(*calls.run(epsilon=np.float32(epsilon))[: 1 + len(outs)])
    return tuple(x.reshape(*rows, x.shape[-1]) for x in results)


def unsupported_norm(columns: int) -> str | None:
    """Returns None if the kernels normalize rows of this length, else the reason."""
    if columns % 8 == 0 and columns <= ffi.MAX_RMS_NORM_COLUMNS:
        return None
    return f"the kernels normalize rows of a multiple of 8 up to {ffi.MAX_RMS_NORM_COLUMNS}"


def exchanging(devices: Sequence[Any], rows: int) -> tuple[int, ...]:
    """CUDA ordinals of devices that can add parts of `rows` rows within a call, or ().

    They must be GPUs of this process with access to each other's memory (`cuda/ops/exchange.h`).
    """
    near = all(
        device.platform == "gpu" and device.process_index == jax.process_index()
        for device in devices
    )
    if not near or rows > ffi.MAX_EXCHANGE_ROWS or UNAVAILABLE["cuda"] is not None:
        return ()
    numbers = tuple(device.local_hardware_id for device in devices)
    return numbers if ffi.can_exchange(numbers) else ()


def add_over_devices(parts: Array, dtype: Any, devices: Sequence[int]) -> Array:
    """The sum of float32 `parts` (rows, columns) of devices, from `exchanging`, in `dtype`."""
    calls, shape = Call("addition over devices"), (1, *parts.shape)
    addend = calls.operand(*call.apart(parts.reshape(shape)))
    calls.step("normalize", addend=addend, total=calls.result(shape, dtype))
    return call.apart(*calls.run(devices=np.array(devices, np.int64)))[0][0]


def exchange_failure() -> str:
    """A sentence if devices that add parts within calls stopped since the last call of this, else
    an empty string. The next program runs normally."""
    return "" if UNAVAILABLE["cuda"] is not None else ffi.take_exchange_failure()
