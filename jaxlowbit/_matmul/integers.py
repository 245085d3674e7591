"""`integer_matmul`: exact sums of int8 activations times the integers of a weight.

A product of `product.py` with an int32 result. On Hopper it is one custom call, which stores the
accumulators of the kernel for quantized activations unscaled; on a CPU with VNNI it is the call for
quantized activations with scales of 1, if float32 represents the sums exactly.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._backends import cpu, cuda_calls
from .._backends.target import Target
from .._core import checks
from .._core.activations import EXACT
from .._core.array import QuantizedArray
from .._core.explicit import Sharding
from .._core.format import Format, format_name
from .call import Product, Rows, Weights, run
from .options import Options
from .product import multiply
from .quantized_lhs import unsupported_bytes

_LARGEST = 128  # magnitude of int8
_MOST_IN_FLOAT32 = 2**24  # float32 represents all integers up to it exactly


def integer_matmul(lhs: Any, rhs: QuantizedArray, *, out_sharding: Sharding | None = None) -> Array:
    """Computes the exact product of int8 and the integers of a weight, without scales.

    The integers are the weights in units of their float scale: `q - 2**(bits - 1)`, `q - z` with
    an integer zero, or, with `scale="int8"`, `(q - 2**(bits - 1)) * s`. `quantized_matmul` of
    `QuantizedActivations` multiplies the same sums by the scales of tokens and channels; use this
    function in programs that scale them separately. On Hopper, one custom call computes them in 8
    bits if it supports that product, for any number of rows; on CPUs, if float32 represents the
    sums exactly. Otherwise XLA computes exact sums of 512 products in float32 and adds them in
    int32.

    Integers have no derivatives, neither in `lhs` nor in the scales of `rhs`.

    **Arguments:**

    - `lhs`: int8 (..., k). Leading axes broadcast against the leading axes of `rhs` as in
      `jnp.matmul`.
    - `rhs`: (..., k, n), of integers with one float scale per channel: `group_size=-1`, groups
      that span k, or `scale="int8"`. Sums fit int32 while `128 * most * k < 2**31`, where `most`
      is the largest magnitude of the integers: for 8 bits, up to k = 2^17 - 1.
    - `out_sharding`: as for `quantized_matmul`.

    **Returns:** int32 (..., n).

    **Raises:** `TypeError` for arguments that are not an array or a quantized weight, `ValueError`
    for other dtypes, shapes and shardings, for weights without such integers, and for a larger k.

    ```python
    rhs = quantize(jnp.ones((256, 512)), INT8)
    integer_matmul(jnp.ones((8, 256), jnp.int8), rhs)  # 256 * 127
    ```
    """
    caller = "integer_matmul"
    checks.quantized(caller, "rhs", rhs, QuantizedArray)
    lhs = checks.array(caller, "lhs", lhs, "int8 (..., k)")
    if lhs.dtype != jnp.int8:
        raise ValueError(
            f"{caller}: lhs is {lhs.dtype}, but integers are multiplied in int8; cast it, or use "
            "quantized_matmul for floats."
        )
    options = Options.checked(caller, out_sharding=out_sharding)
    options.check(caller, jax.ShapeDtypeStruct(lhs.shape, EXACT), rhs)
    _check_integers(caller, rhs)
    # Sums do not depend on float scales, so their derivatives are 0.
    rhs = jax.tree.map(lax.stop_gradient, rhs._with(tensor_scale=None))
    return run(
        IntegerSums, (lhs,), (rhs,), options.replace(preferred_element_type=jnp.dtype("int32"))
    )[0]


def max_k(format: Format) -> int:
    """The largest k with sums of products of int8 and a weight's integers that fit int32."""
    return (2**31 - 1) // (_LARGEST * format.max_integer)


def _check_integers(caller: str, rhs: QuantizedArray) -> None:
    """Raises for weights that are not integers times one scale, and for a k above the maximum."""
    format, why = rhs.format, None
    if format.codebook is not None:
        why = "stands for the numbers of a codebook"
    elif format.zero == "float":
        why = "adds a float zero to its integers"
    elif not format.scales_channels and rhs.scale.shape[-2] != 1:
        why = f"has {rhs.scale.shape[-2]} groups of k with float scales of their own"
    if why is not None:
        raise ValueError(
            f"{caller}: rhs, {format_name(format)}, {why}, so that no sum over k is an integer; "
            "use one scale for each channel or scale='int8', or quantized_matmul."
        )
    if rhs.k > max_k(format):
        raise ValueError(
            f"{caller}: k is {rhs.k}, but sums of int8 times integers up to {format.max_integer} "
            f"may leave int32 beyond k={max_k(format)}; add up parts of k in a wider dtype."
        )


@dataclasses.dataclass(frozen=True)
class IntegerSums(Product):
    """`lhs @ integers` in int32, for a weight without its tensor scale."""

    def composition(self, *operands: Array) -> tuple[Array, ...]:
        (lhs,), (rhs,), _ = self.named(operands)
        return (multiply(lhs, rhs, self.options),)

    @property
    def custom_calls(self) -> Mapping[str, Callable[..., tuple[Array, ...]]]:
        return {"cuda": self._cuda, "cpu": self._cpu}

    def unsupported(self, rows: Rows, weights: Weights, target: Target) -> str | None:
        (lhs,), (rhs,) = rows, weights
        largest = _LARGEST * rhs.format.max_integer * rhs.k
        if target.platform == "cpu" and largest > _MOST_IN_FLOAT32:
            return "float32 does not represent the sums exactly"
        return unsupported_bytes(lhs, rhs, target)

    def _cuda(self, *operands: Array) -> tuple[Array, ...]:
        (lhs,), (rhs,), _ = self.named(operands)
        return (cuda_calls.quantized(lhs, None, rhs, out_dtype=jnp.dtype("int32")),)

    def _cpu(self, *operands: Array) -> tuple[Array, ...]:
        (lhs,), (rhs,), _ = self.named(operands)
        scale = jnp.ones((*lhs.shape[:-1], 1), jnp.float32)
        unscaled = rhs._with(scale=jnp.ones_like(rhs.scale))
        out = cpu.quantized(lhs, scale, unscaled, out_dtype=jnp.dtype("float32"))
        return (out.astype(jnp.int32),)
