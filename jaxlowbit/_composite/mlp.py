"""`quantized_mlp`: a gated MLP, with its three products in one custom call."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array, lax

from .._backends import cuda_calls
from .._core import checks
from .._core.array import QuantizedArray
from .._core.explicit import Sharding
from .._matmul import epilogue
from .._matmul.call import Call, run
from .._matmul.epilogue import Activation
from .._matmul.options import Backend, Options
from .._matmul.product import multiply


def quantized_mlp(
    lhs: Any,
    *,
    gate_up: QuantizedArray,
    down: QuantizedArray,
    activation: Activation = "silu",
    preferred_element_type: Any = None,
    precision: lax.DotAlgorithmPreset | None = None,
    out_sharding: Sharding | None = None,
    backend: Backend | None = None,
) -> Array:
    """Computes a gated MLP, `(activation(lhs @ gate) * (lhs @ up)) @ down`.

    The result is `quantized_glu` of gate and up, rounded to the dtype of `lhs`, times down. On one
    NVIDIA GPU, and inside `jax.shard_map`, it is one custom call; elsewhere, in the cases listed in
    `quantized_matmuls`, and when differentiating, it is one call for gate and up and one for down.

    **Arguments:**

    - `lhs`: float32, bfloat16 or float16 (..., k).
    - `gate_up`: (2, k, f), gate first: `quantize(jnp.stack([gate, up]), format)`, or a view of a
      longer stack, `stack.select(jnp.array([2 * i, 2 * i + 1]))`.
    - `down`: (f, n); the format may differ.
    - `activation`: `"silu"`, `"gelu"` (by erf), `"gelu_tanh"` (its approximation) or `"relu"`, as
      in `jax.nn`.
    - `preferred_element_type`, `out_sharding`: for the result, as for `quantized_matmul`.
    - `precision`, `backend`: for every product.

    **Returns:** (..., n).

    **Raises:** as `quantized_matmul`; `TypeError` if a weight is not quantized, `ValueError` for
    weights whose shapes do not match and for an unknown activation.

    ```python
    gate_up = quantize(jnp.ones((2, 256, 512)), INT4)
    down = quantize(jnp.ones((512, 256)), INT4)
    quantized_mlp(jnp.ones((8, 256), jnp.bfloat16), gate_up=gate_up, down=down)
    ```
    """
    checks.quantized("quantized_mlp", "gate_up", gate_up, QuantizedArray)
    checks.quantized("quantized_mlp", "down", down, QuantizedArray)
    epilogue.check_activation("quantized_mlp", activation)
    if gate_up.ndim != 3 or gate_up.shape[0] != 2:
        raise ValueError(
            f"quantized_mlp: gate_up has shape {gate_up.shape}, but it must be two matrices (2, k, "
            "f), gate and up; stack them before they are quantized."
        )
    if down.ndim != 2 or down.k != gate_up.n:
        raise ValueError(
            f"quantized_mlp: down has shape {down.shape}, but it must be one matrix (f, n) with "
            f"f={gate_up.n}, as gate_up has shape {gate_up.shape}; pass the down projection."
        )
    caller = "quantized_mlp"
    options = Options.checked(caller, preferred_element_type, precision, out_sharding, backend)
    lhs = checks.array(caller, "lhs", lhs, "activations (..., k)")
    options.check_rows(caller, lhs, gate_up)
    options.check(caller, jax.ShapeDtypeStruct((down.k,), lhs.dtype), down)
    with checks.within(caller):
        return run(_Mlp, (lhs,), (gate_up, down), options, activation=activation)[0]


@dataclasses.dataclass(frozen=True)
class _Mlp(Call):
    activation: str

    def composition(self, *operands: Array) -> tuple[Array, ...]:
        (lhs,), (gate_up, down), _ = self.named(operands)
        inner = self.options.replace(preferred_element_type=None, out_sharding=None)
        hidden = epilogue.gated_product(lhs, gate_up, None, self.activation, inner)
        return (multiply(hidden, down, self.options),)

    @property
    def custom_calls(self) -> Mapping[str, Callable[..., tuple[Array, ...]]]:
        return {"cuda": self._cuda}

    def _cuda(self, *operands: Array) -> tuple[Array, ...]:
        (lhs,), (gate_up, down), _ = self.named(operands)
        out = cuda_calls.mlp(
            lhs,
            gate_up,
            down,
            activation=self.activation,
            out_dtype=self.options.out_dtype(lhs),
            accumulate_float16=self.options.accumulate_float16,
        )
        return (out,)
