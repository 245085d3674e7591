"""Steps of a call between two attentions of a transformer, shared by the backends."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from .._core.array import QuantizedArray
from .call import Call, Stored, stored_weight


def add_mlp(
    calls: Call,
    x: int,
    gate_up: QuantizedArray,
    down: QuantizedArray,
    out: int,
    activation: str,
    dtype: Any,
    **fields: Any,
) -> None:
    """Appends the products of an MLP and the steps that multiply them."""
    hidden = calls.result((1, calls.at[x].shape[1], gate_up.n), dtype)
    weights = [stored_weight(weight, dtype) for weight in (gate_up, down)]
    calls.multiply(
        calls.add_product(weights[0], x, hidden, gated=True, activation=activation, **fields)
    )
    calls.multiply(calls.add_product(weights[1], hidden, out, **fields))


def add_block(
    calls: Call,
    attended: int,
    residual: Array,
    norm: Array,
    following_norm: Array | None,
    weights: Sequence[QuantizedArray],
    *,
    read: Callable[[QuantizedArray], Stored],
    activation: str,
    values: Any = None,
    parts: Any = None,
    mlp: Callable[[int, int], None] | None = None,
    out_bias: Array | None = None,
    following_dtype: Any = None,
) -> None:
    """Appends a block; the first results of the call are the new residual and following products.

    - `attended`, `residual`: the place of (1, m, a) and the array (1, m, d).
    - `read`: returns the arrays of a weight in the backend's form.
    - `values`: None, or the 8-bit dtype that rows are rounded to before each product.
    - `parts`: the dtype of the output and down projections, if it differs from `residual`.
    - `mlp`: appends what replaces the MLP, from the place of its rows to the place of its result.
    - `out_bias`: (d,), added to the output projection in float32, or None.
    - `following_dtype`: the dtype of the following products, if it differs from `residual`.
    """
    out, gate_up, down, *following = weights
    shape, dtype, m = residual.shape, residual.dtype, residual.shape[1]
    result = calls.result(shape, dtype)
    follow = [calls.result((1, m, weight.n), following_dtype or dtype) for weight in following]
    projected = calls.result(shape, parts or dtype)
    total = calls.result(shape, dtype)
    normed = calls.result(shape, values or dtype)
    hidden = 0 if mlp is not None else calls.result((1, m, gate_up.n), dtype)
    scale = 0 if values is None else calls.result((1, m), jnp.float32)
    lhs_of_out, lhs_of_down = attended, hidden
    if values is not None:
        lhs_of_out, lhs_of_down = (calls.result((1, m, w.k), values) for w in (out, down))
    products = [(out, lhs_of_out, projected)]
    if mlp is None:
        products += [(gate_up, normed, hidden), (down, lhs_of_down, projected)]
    products += [(weight, normed, y) for weight, y in zip(following, follow, strict=True)]
    numbers = []
    for weight, x, y in products:
        gated = {"gated": True, "activation": activation}
        fields: dict[str, Any] = gated if weight is gate_up else {}
        if weight is out and out_bias is not None:
            wide = out_bias.astype(dtype if out_bias.dtype == dtype else jnp.float32)
            fields["addends"] = {"bias": calls.operand(wide.reshape(1, -1))}
        numbers.append(calls.add_product(read(weight), x, y, lhs_scale=scale, **fields))

    def normalize(x: int, y: int, scales: int) -> None:
        last = {"scales": scales, "out": normed, "out_scale": scale} if scales else {}
        calls.step("normalize", x=x, addend=projected, total=y, **last)

    _round_rows(calls, values, attended, 0, lhs_of_out, scale)
    calls.multiply(0)
    normalize(calls.operand(residual), total, calls.operand(norm))
    if mlp is None:
        calls.multiply(1)
        _round_rows(calls, values, hidden, 2, lhs_of_down, scale)
        calls.multiply(2)
    else:
        mlp(normed, projected)
    last = 0 if following_norm is None or not following else calls.operand(following_norm)
    normalize(total, result, last)
    if following:
        calls.multiply(*numbers[-len(following) :])


def _round_rows(calls: Call, values: Any, x: int, product: int, y: int, scale: int) -> None:
    """Appends the rounding of rows before a product, if `values` are given."""
    if values is not None:
        to = str(jnp.dtype(values))
        calls.step("round", first=product, to=to, x=x, out=y, out_scale=scale)
