"""`quantized_glu`: a gated linear unit, with both products in one kernel."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax import Array, lax

from .._backends import cuda_calls
from .._core import checks
from .._core.array import QuantizedArray
from .._core.explicit import Sharding
from .._matmul import epilogue
from .._matmul.call import Call, run
from .._matmul.epilogue import Activation
from .._matmul.options import Backend, Options


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

    Accumulators, biases, the activation and the product are float32; the result is rounded once. On
    one NVIDIA GPU, and inside `jax.shard_map`, it is one kernel that reads both weights; elsewhere,
    in the cases listed in `quantized_matmuls`, and when differentiating, one call computes both
    products and XLA the rest.

    **Arguments:**

    - `lhs`: float32, bfloat16 or float16 (..., k).
    - `gate_up`: (2, k, n), gate first: `quantize(jnp.stack([gate, up]), format)`, or a view of a
      longer stack, `stack.select(jnp.array([2 * i, 2 * i + 1]))`.
    - `bias`: (2, n), float32, bfloat16 or float16, or None.
    - `activation`: `"silu"`, `"gelu"` (by erf), `"gelu_tanh"` (its approximation) or `"relu"`, as
      in `jax.nn`.
    - `preferred_element_type`, `precision`, `out_sharding`, `backend`: as for `quantized_matmul`.

    **Returns:** (..., n).

    **Raises:** as `quantized_matmul`; `TypeError` if `gate_up` is not quantized, `ValueError` if it
    is not two matrices, for a bias of another shape and for an unknown activation.

    ```python
    gate_up = quantize(jnp.ones((2, 256, 512)), INT4)
    quantized_glu(jnp.ones((8, 256), jnp.bfloat16), gate_up, activation="gelu_tanh")
    ```
    """
    checks.quantized("quantized_glu", "gate_up", gate_up, QuantizedArray)
    epilogue.check_activation("quantized_glu", activation)
    if gate_up.ndim != 3 or gate_up.shape[0] != 2:
        raise ValueError(
            f"quantized_glu: gate_up has shape {gate_up.shape}, but it must be two matrices (2, k, "
            "n), gate and up; stack them before they are quantized."
        )
    caller = "quantized_glu"
    lhs = checks.array(caller, "lhs", lhs, "activations (..., k)")
    options = Options.checked(caller, preferred_element_type, precision, out_sharding, backend)
    options.check_rows(caller, lhs, gate_up)
    bias = epilogue.checked_addend("quantized_glu", "bias", bias, (2, gate_up.n), "(2, n)")
    with checks.within(caller):
        return run(_Glu, (lhs,), (gate_up,), options, (bias,), activation=activation)[0]


@dataclasses.dataclass(frozen=True)
class _Glu(Call):
    activation: str

    def composition(self, *operands: Array) -> tuple[Array, ...]:
        (lhs,), (gate_up,), (bias,) = self.named(operands)
        return (epilogue.gated_product(lhs, gate_up, bias, self.activation, self.options),)

    @property
    def custom_calls(self) -> Mapping[str, Callable[..., tuple[Array, ...]]]:
        return {"cuda": self._cuda}

    def _cuda(self, *operands: Array) -> tuple[Array, ...]:
        (lhs,), (gate_up,), (bias,) = self.named(operands)
        shape = lhs.shape[:-1]
        out = cuda_calls.fused(
            lhs,
            gate_up,
            bias,
            None,
            rows=shape,
            activation=self.activation,
            gated=True,
            out_dtype=self.options.out_dtype(lhs),
            accumulate_float16=self.options.accumulate_float16,
        )
        return (out.reshape(*shape, gate_up.n),)
