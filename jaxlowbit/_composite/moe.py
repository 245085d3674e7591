"""`quantized_moe`: the gated MLPs of a mixture of experts."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._backends import cuda_calls
from .._backends.cuda import HOPPER
from .._backends.target import Target
from .._core import checks, explicit, indexing
from .._core.array import QuantizedArray
from .._core.dtypes import FLOATS
from .._core.explicit import Sharding
from .._matmul import epilogue
from .._matmul.call import Rows, Weights, first, run
from .._matmul.epilogue import GatedActivation
from .._matmul.options import Backend, Options
from .ragged_dot import (
    RaggedCall,
    check_activation,
    check_rows,
    checked_offset,
    matrix,
    ragged_dot,
)


def quantized_moe(
    x: Any,
    expert: Any,
    weight: Any,
    gate_up: QuantizedArray,
    down: QuantizedArray,
    *,
    activation: GatedActivation = "silu",
    gate_up_bias: Any = None,
    down_bias: Any = None,
    group_offset: Any = None,
    num_experts: int | None = None,
    lhs_qtype: Any = None,
    preferred_element_type: Any = None,
    precision: lax.DotAlgorithmPreset | None = None,
    out_sharding: Sharding | None = None,
    backend: Backend | None = None,
) -> Array:
    """Computes the weighted sum of the MLPs of the experts that each token has chosen.

    ```
    y[t] = sum over i of weight[t, i] * mlp(x[t], expert[t, i])
    mlp(x, e) = (activation(x @ gate_up[0, e]) * (x @ gate_up[1, e])) @ down[e]
    ```

    It sorts the choices by expert, unless they are few, computes both products by
    `quantized_ragged_dot`, and adds the choices of a token in their order, so results repeat bit by
    bit. The hidden features are rounded to the dtype of `x`; down products, weights and their sum
    are float32, and the sum is rounded once. Differentiable in `x`, `weight`, scales and biases.

    **Arguments:**

    - `x`: float32, bfloat16 or float16 (..., k), the tokens.
    - `expert`: integers (..., top), the experts of each token. Choices of experts on other
      devices contribute zero, whatever their weight; an expert that occurs twice counts twice.
    - `weight`: float32, bfloat16 or float16 (..., top), the factors of the choices, as the router
      made them: they need not add up to 1.
    - `gate_up`: (2, experts, k, hidden), gate first: `quantize(jnp.stack([gate, up]), format)`.
    - `down`: (experts, hidden, n); the format may differ.
    - `activation`: as for pairs of `quantized_ragged_dot`.
    - `gate_up_bias`, `down_bias`: float32, bfloat16 or float16, (2, experts, hidden) and
      (experts, n), or None.
    - `group_offset`: None if all experts are on this device. Otherwise an integer, () or (1,),
      perhaps traced: the number of the first expert of this device. The sum over devices is the
      result.
    - `num_experts`: with `group_offset`, the number of experts on all devices. It does not change
      the result: kernels are chosen for the share of choices that are of experts here. None: all
      choices.
    - `lhs_qtype`: None, or the 8-bit dtype of rows before both products, as for `quantized_matmul`.
    - `preferred_element_type`, `out_sharding`: for the result, as for `quantized_matmul`.
    - `precision`, `backend`: for every product.

    **Returns:** (..., n).

    **Raises:** as `quantized_matmul`; `TypeError` if a weight is not quantized, `ValueError` for
    shapes that do not match and for an unknown activation.

    ```python
    gate_up = quantize(jnp.ones((2, 4, 256, 128)), INT4)
    down = quantize(jnp.ones((4, 128, 256)), INT4)
    logits = jax.random.normal(jax.random.key(0), (8, 4))
    weight, expert = jax.lax.top_k(jax.nn.softmax(logits), 2)
    quantized_moe(jnp.ones((8, 256)), expert, weight, gate_up, down)
    ```
    """
    caller = "quantized_moe"
    checks.quantized(caller, "gate_up", gate_up, QuantizedArray)
    checks.quantized(caller, "down", down, QuantizedArray)
    check_activation(caller, activation, pairs=True, optional=False)
    _check_weights(gate_up, down)
    options = Options.checked(caller, preferred_element_type, precision, out_sharding, backend)
    x = checks.array(caller, "x", x, "tokens (..., k)")
    with checks.within(caller, lhs="x", rhs="gate_up"):
        dtype = check_rows(caller, x, gate_up, lhs_qtype, options)
    hidden = jax.ShapeDtypeStruct((down.k,), x.dtype)
    with checks.within(caller, rhs="down"):
        check_rows(caller, hidden, down, lhs_qtype, options)
    expert, weight = _checked_choices(x, expert, weight)
    _, experts, _, features = gate_up.shape
    if num_experts is not None:
        rule = f"None or an integer from {experts} on, the number of experts here"
        num_experts = checks.integer(caller, "num_experts", num_experts, rule, experts)
    shapes = {"gate_up_bias": (2, experts, features), "down_bias": (experts, down.n)}
    rules = {"gate_up_bias": "(2, experts, hidden)", "down_bias": "(experts, n)"}
    biases = (
        epilogue.checked_addend(caller, name, bias, shapes[name], rules[name])
        for name, bias in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias))
    )
    options = options.replace(out_sharding=None)
    fields: dict[str, Any] = {
        "activation": activation,
        "dtype": dtype,
        "all_experts": num_experts or experts,
    }
    product = functools.partial(_moe, options=options, **fields)
    operands = (x, expert, weight, gate_up, down, *biases, checked_offset(caller, group_offset))
    with checks.within(caller):
        chained = (matrix(gate_up), matrix(down))
        return explicit.chain(product, operands, x, chained, out_sharding)


def _moe(
    x: Array,
    expert: Array,
    weight: Array,
    gate_up: QuantizedArray,
    down: QuantizedArray,
    *others: Array | None,
    options: Options,
    **fields: Any,
) -> Array:
    return run(_Moe, (x, expert, weight), (gate_up, down), options, others, **fields)[0]


@dataclasses.dataclass(frozen=True)
class _Moe(RaggedCall):
    """The MLPs of experts. Rows are x, experts and weights of the choices; others are the biases of
    both products and the group offset."""

    all_experts: int  # of all devices

    @property
    def custom_calls(self) -> Mapping[str, Callable[..., tuple[Array, ...]]]:
        return {"cuda": self._cuda}

    def unsupported(self, rows: Rows, weights: Weights, target: Target) -> str | None:
        if target.capabilities - {HOPPER}:
            return "kernels that group choices are for compute capability 9.0"
        x, expert, _ = rows
        choices = math.prod(expert.shape)
        products = zip(weights, (self.activation, None), strict=True)
        return first(
            self.unsupported_product(
                jax.ShapeDtypeStruct((choices, weight.k), x.dtype), weight, activation, target
            )
            for weight, activation in products
        )

    def _cuda(self, *operands: Array) -> tuple[Array, ...]:
        (x, expert, weight), (gate_up, down), others = self.named(operands)
        gate_up_bias, down_bias, offset = others
        out = cuda_calls.moe(
            *(x, expert, weight, gate_up, down, gate_up_bias, down_bias, offset),
            activation=self.activation,
            out_dtype=self.options.out_dtype(x),
            accumulate_float16=self.options.accumulate_float16,
            all_experts=self.all_experts,
        )
        return (out,)

    def composition(self, *operands: Array) -> tuple[Array, ...]:
        (x, expert, weight), (gate_up, down), (gate_up_bias, down_bias, offset) = self.named(
            operands
        )
        experts, top, tokens = down.shape[0], expert.shape[-1], x.reshape(-1, x.shape[-1])
        origin = jnp.clip(offset, -experts, jnp.iinfo(jnp.int32).max - experts)
        here = (expert >= jnp.maximum(origin, 0)) & (expert < origin + experts)
        local = jnp.where(here, expert - origin, experts).reshape(-1)
        place = _places(local)
        order = _inverse(place)
        every = jnp.arange(experts, dtype=jnp.int32)
        sizes = jnp.sum(local[:, None] == every[None, :], axis=0, dtype=jnp.int32)
        product = functools.partial(ragged_dot, sizes=sizes, offset=jnp.int32(0), dtype=self.dtype)
        hidden = product(
            tokens[order // max(top, 1)],
            gate_up,
            bias=gate_up_bias,
            activation=self.activation,
            options=self.options.replace(preferred_element_type=None),
        )
        wide = self.options.replace(preferred_element_type=jnp.dtype("float32"))
        rows = product(hidden, down, bias=down_bias, activation=None, options=wide)
        rows = rows[place].reshape(*expert.shape, down.n)
        factors = jnp.where(here, weight.astype(jnp.float32), 0)
        sums = jnp.zeros((*expert.shape[:-1], down.n), jnp.float32)
        for i in range(top):
            sums += factors[..., i, None] * rows[..., i, :]
        return (sums.astype(self.options.out_dtype(x)),)


def _inverse(order: Array) -> Array:
    """The inverse of a permutation."""
    number = jnp.arange(order.size, dtype=jnp.int32)
    return jnp.zeros_like(order).at[order].set(number, unique_indices=True)


COMPARED = 1024
"""Maximum number of choices that are compared with each other, in one kernel, and not sorted."""


def _places(experts: Array) -> Array:
    """The place of each choice (r,) in a stable sort by expert."""
    number = jnp.arange(experts.size, dtype=jnp.int32)
    if experts.size > COMPARED:
        return _inverse(jnp.argsort(experts, stable=True).astype(jnp.int32))
    own, other = experts[:, None], experts[None, :]
    before = (other < own) | ((other == own) & (number[None, :] < number[:, None]))
    return jnp.sum(before, axis=1, dtype=jnp.int32)


def _check_weights(gate_up: QuantizedArray, down: QuantizedArray) -> None:
    if gate_up.ndim != 4 or gate_up.shape[0] != 2:
        raise ValueError(
            f"quantized_moe: gate_up has shape {gate_up.shape}, but it must be a gate and an up of "
            "each expert, (2, experts, k, hidden); stack them before they are quantized."
        )
    _, experts, _, hidden = gate_up.shape
    if down.shape[:-1] != (experts, hidden):
        raise ValueError(
            f"quantized_moe: down has shape {down.shape}, but gate_up {gate_up.shape} has "
            f"{experts} experts with {hidden} hidden features, so it must be ({experts}, {hidden}, "
            "n); pass the down projections of these experts."
        )


def _checked_choices(x: Array, expert: Any, weight: Any) -> tuple[Array, Array]:
    caller = "quantized_moe"
    expert = checks.integers(caller, "expert", expert, "integers (..., top)")
    weight = checks.array(caller, "weight", weight, "floats (..., top)")
    if not jnp.issubdtype(expert.dtype, jnp.integer) or weight.dtype not in FLOATS:
        raise ValueError(
            f"{caller}: expert is {checks.brief(expert)} and weight {checks.brief(weight)}, but "
            "experts are integers and weights float32, bfloat16 or float16; cast them."
        )
    if expert.ndim == 0 or expert.shape != weight.shape or expert.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{caller}: expert has shape {expert.shape} and weight {weight.shape}, but both must "
            f"be (*tokens, top) for x {x.shape}; pass the choices of each token."
        )
    return indexing.saturated(expert), weight
