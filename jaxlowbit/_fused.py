"""Products whose epilogue is computed by the kernel: `quantized_matmul` with one, `quantized_glu`.

Each is its composition (`_epilogue.py`) but on one CUDA device, as the calls of `_calls.py`. So
where k is sharded, float32 partial sums are added up before anything is done with them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from . import _epilogue
from ._array import QuantizedArray
from ._backends import native
from ._calls import Call, Options, run
from ._epilogue import Activation
from ._explicit import Sharding
from ._matmul import Backend

_DTYPES = (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16"))


def matmul(
    lhs: Array,
    rhs: QuantizedArray,
    *,
    bias: Any,
    activation: str | None,
    residual: Any,
    **options: Any,
) -> Array:
    """`quantized_matmul` with an epilogue, whose other arguments it has checked."""
    _epilogue.check_activation("quantized_matmul", activation, optional=True)
    stack, n = rhs.shape[:-2], rhs.n
    batch = jnp.broadcast_shapes(lhs.shape[:-2], stack)
    bias = _addend("quantized_matmul", "bias", bias, (*stack, n), "(*stack, n)")
    residual = _addend(
        "quantized_matmul", "residual", residual, (*batch, *lhs.shape[-2:-1], n), "the result"
    )
    call = functools.partial(_Fused, activation=activation, stacked=bool(stack))
    return run(call, (lhs, residual), (rhs,), Options(**options), (bias,))[0]


def quantized_glu(
    lhs: Any,
    gate_up: QuantizedArray,
    *,
    bias: Any = None,
    activation: Activation = "silu",
    preferred_element_type: Any = None,
    precision: lax.DotAlgorithmPreset | None = None,
    out_sharding: Sharding | None = None,
    backend: Backend | None = None,
) -> Array:
    """Computes a gated linear unit, `activation(lhs @ gate + bias[0]) * (lhs @ up + bias[1])`.

    Sums, biases, the activation and the product are float32, and the result is rounded once. On one
    NVIDIA GPU, and inside `jax.shard_map`, it is one kernel that reads both weights; elsewhere, in
    the cases that `quantized_matmuls` names, and where it is differentiated, a call for both
    products and what XLA makes of the rest.

    **Arguments:**

    - `lhs`: float32, bfloat16 or float16 (..., k).
    - `gate_up`: (2, k, n), gate first: `quantize(jnp.stack([gate, up]), format)`, or a view of a
      longer stack, `stack.select(jnp.array([2 * i, 2 * i + 1]))`.
    - `bias`: (2, n), float32, bfloat16 or float16, or None.
    - `activation`: `"silu"`, `"gelu"` (by erf), `"gelu_tanh"` (its approximation) or `"relu"`, as
      in `jax.nn`.
    - `preferred_element_type`, `precision`, `out_sharding`, `backend`: as of `quantized_matmul`.

    **Returns:** (..., n).

    **Raises:** what `quantized_matmul` raises; `TypeError` if `gate_up` is not quantized,
    `ValueError` if it is not two matrices, for a bias of another shape and for an unknown
    activation.

    ```python
    gate_up = quantize(jnp.ones((2, 256, 512)), INT4)
    quantized_glu(jnp.ones((8, 256), jnp.bfloat16), gate_up, activation="gelu_tanh")
    ```
    """
    if not isinstance(gate_up, QuantizedArray):
        raise TypeError(
            f"quantized_glu: gate_up is {type(gate_up).__name__}, but it must be a QuantizedArray; "
            "make one with jaxlowbit.quantize."
        )
    _epilogue.check_activation("quantized_glu", activation)
    if gate_up.ndim != 3 or gate_up.shape[0] != 2:
        raise ValueError(
            f"quantized_glu: gate_up has shape {gate_up.shape}, but it is two matrices (2, k, n), "
            "gate and up; stack them before they are quantized."
        )
    lhs = jnp.asarray(lhs)
    options = Options(preferred_element_type, precision, out_sharding, backend)
    options.check("quantized_glu", lhs, gate_up)
    bias = _addend("quantized_glu", "bias", bias, (2, gate_up.n), "(2, n)")
    call = functools.partial(_Glu, activation=activation)
    return run(call, (lhs,), (gate_up,), options, (bias,))[0]


def _addend(caller: str, name: str, array: Any, shape: tuple[int, ...], rule: str) -> Array | None:
    if array is None:
        return None
    array = jnp.asarray(array)
    if array.dtype not in _DTYPES:
        raise ValueError(
            f"{caller}: {name} is {array.dtype}, but it is float32, bfloat16 or float16; cast it."
        )
    if array.shape != shape:
        raise ValueError(
            f"{caller}: {name} has shape {array.shape}, but it must be that of {rule}, {shape}; "
            "reshape or broadcast it."
        )
    return array


@dataclasses.dataclass(frozen=True)
class _Fused(Call):
    activation: str | None
    stacked: bool

    @property
    def folds(self) -> bool:
        # Leading axes of lhs are rows of one matrix, but those of a stack are the stack's.
        return not self.stacked

    def products(
        self, rows: Sequence[Any], weights: Sequence[QuantizedArray], *others: Any
    ) -> tuple[Array, ...]:
        (lhs, residual), (rhs,), (bias,) = rows, weights, others
        options = vars(self.options)
        return (_epilogue.product(lhs, rhs, bias, self.activation, residual, **options),)

    def custom_call(
        self, rows: Sequence[Any], weights: Sequence[QuantizedArray], *others: Any
    ) -> tuple[Array, ...]:
        (lhs, residual), (rhs,), (bias,) = rows, weights, others
        stack, n = rhs.shape[:-2], rhs.n
        shape = lhs.shape[-2:-1] if stack else lhs.shape[:-1]
        if stack and jnp.broadcast_shapes(lhs.shape[:-2], stack) != stack:
            return self.products(rows, weights, *others)
        out = native.fused(
            jnp.broadcast_to(lhs, (*stack, *shape, rhs.k)),
            rhs,
            bias,
            residual,
            rows=shape,
            activation=self.activation,
            **self.options.of_native(lhs),
        )
        return (out.reshape(*stack, *shape, n),)


@dataclasses.dataclass(frozen=True)
class _Glu(Call):
    activation: str

    def products(
        self, rows: Sequence[Array], weights: Sequence[QuantizedArray], *others: Any
    ) -> tuple[Array, ...]:
        (lhs,), (gate_up,), (bias,) = rows, weights, others
        options = vars(self.options)
        return (_epilogue.gated_product(lhs, gate_up, bias, self.activation, **options),)

    def custom_call(
        self, rows: Sequence[Array], weights: Sequence[QuantizedArray], *others: Any
    ) -> tuple[Array, ...]:
        (lhs,), (gate_up,), (bias,) = rows, weights, others
        shape = lhs.shape[:-1]
        out = native.fused(
            lhs,
            gate_up,
            bias,
            None,
            rows=shape,
            activation=self.activation,
            gated=True,
            **self.options.of_native(lhs),
        )
        return (out.reshape(*shape, gate_up.n),)
