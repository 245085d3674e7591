"""`quantized_matmul`: the file to read first.

`multiply` (`product.py`) binds the primitive, `lowering.py` picks the backend of a program, and
`_backends/cuda.py` or `cpu.py` makes the custom call. `docs/design.md` follows it to the kernel.
"""

from typing import Any

from jax import Array, lax

from .._core import checks
from .._core.activations import QuantizedActivations
from .._core.array import QuantizedArray
from .._core.explicit import Sharding
from . import fused, quantized_lhs
from .call import run
from .epilogue import Activation
from .options import Backend, Options
from .product import multiply


def quantized_matmul(
    lhs: Any,
    rhs: QuantizedArray,
    *,
    bias: Any = None,
    activation: Activation | None = None,
    residual: Any = None,
    lhs_qtype: Any = None,
    lhs_factor: Any = None,
    preferred_element_type: Any = None,
    precision: lax.DotAlgorithmPreset | None = None,
    out_sharding: Sharding | None = None,
    backend: Backend | None = None,
) -> Array:
    """Computes `lhs @ rhs.dequantize()` without writing the dequantized matrix to memory.

    Weights are rounded once to the dtype of `lhs`, products accumulate in float32 (see
    `precision`), the result is rounded once. Linear in `lhs` and in the scales (and float zeros) of
    `rhs`, and differentiable in both. If the kernels support the transposed product (CUDA), the
    cotangent of `lhs` reads the same packed weights; cotangents of scales dequantize.

    With an epilogue, `activation(lhs @ rhs.dequantize() + bias) + residual`, in float32 until the
    single rounding. The kernel computes it on one NVIDIA GPU and inside `jax.shard_map`; XLA does
    elsewhere, when differentiating, and in the cases listed in `quantized_matmuls`.

    With quantized activations, `lhs.dequantize() @ rhs.dequantize()`: their values are multiplied
    in bfloat16, which represents them exactly, or for large M on Hopper in 8 bits. Token scales
    multiply the float32 results, before an epilogue.

    **Arguments:**

    - `lhs`: float32, bfloat16 or float16 (..., k), or `QuantizedActivations`. Leading axes
      broadcast against the leading axes of `rhs` as in `jnp.matmul`.
    - `rhs`: (..., k, n).
    - `bias`: float32, bfloat16 or float16, (n,), or (..., n) with the leading axes of `rhs`.
    - `activation`: `"silu"`, `"gelu"` (by erf), `"gelu_tanh"` (its approximation) or `"relu"`, as
      in `jax.nn`.
    - `residual`: float32, bfloat16 or float16, of the shape of the result.
    - `lhs_qtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, to quantize `lhs` to with
      `quantize_activations`. Derivatives treat that rounding as the identity.
    - `lhs_factor`: None, or, with `lhs_qtype`, positive floats (k,) that divide the
      channels of `lhs` before rounding (`smoothing_factor`), for a weight whose rows were
      multiplied by them. The product is linear in `lhs / lhs_factor`.
    - `preferred_element_type`: dtype of the result: the dtype of `lhs` (the default) or float32.
    - `precision`: None for float32 accumulation. `jax.lax.DotAlgorithmPreset.F16_F16_F16`, for
      float16 `lhs`, allows kernels to accumulate up to 128 products in float16, and these partial
      sums in float32: for GPUs with slow float32 accumulation. That adds an error of at most
      2^-7 `|lhs| @ |weights|` (2^-8 for 8 bits), for any k; if such a partial sum is beyond
      65504, the result is not finite.
    - `out_sharding`: sharding of the result on a mesh with Explicit axes, required if k is
      sharded; None for the sharding of the rows of `lhs` and the columns of `rhs`.
    - `backend`: None for the custom call of the platform that the program is compiled for, or the
      definition if the call does not support the problem; `"cuda"` or `"cpu"` for that custom call;
      `"pallas"` for a kernel that JAX compiles, on TPUs and GPUs (interpreted, slowly, on the CPU);
      `"xla"` for the definition, `lhs @ rhs.dequantize(lhs.dtype)`. A named backend raises the
      reason if it does not support the problem.

    **Returns:** (..., n).

    **Raises:** `TypeError` if `rhs` is not quantized, `ValueError` for invalid shapes, dtypes,
    shardings or precisions and for a backend that does not support the problem.

    ```python
    rhs = quantize(jnp.ones((256, 512)), INT4)
    quantized_matmul(jnp.ones((8, 256), jnp.bfloat16), rhs)
    quantized_matmul(jnp.ones((8, 256)), rhs, bias=jnp.zeros(512), activation="silu")
    quantized_matmul(jnp.ones((8, 256)), rhs, lhs_qtype=jnp.int8)
    ```
    """
    caller = "quantized_matmul"
    if not isinstance(rhs, QuantizedArray):
        raise checks.not_quantized(caller, "rhs", rhs)
    options = Options.checked(caller, preferred_element_type, precision, out_sharding, backend)
    if isinstance(lhs, QuantizedActivations) or lhs_qtype is not None:
        rounding = quantized_lhs.Rounding(lhs_qtype, lhs_factor)
        addends = {"bias": bias, "activation": activation, "residual": residual}
        return quantized_lhs.product(lhs, rhs, rounding, options, **addends)
    if lhs_factor is not None:
        quantized_lhs.raise_unused(lhs_factor)
    lhs = checks.array(caller, "lhs", lhs, "activations (..., k)")
    options.check(caller, lhs, rhs)
    if bias is None and activation is None and residual is None:
        return multiply(lhs, rhs, options)
    bias, residual = fused.checked(lhs, rhs, bias, activation, residual)
    return run(fused.Fused, (lhs, residual), (rhs,), options, (bias,), activation=activation)[0]


QuantizedArray._multiply = staticmethod(quantized_matmul)  # implements `lhs @ rhs`
