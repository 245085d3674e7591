"""Products of quantized activations.

They are compositions of a product and token scales. For large M on Hopper, and on CPUs with VNNI,
they are one custom call, which multiplies in 8 bits. On Hopper that call also quantizes float
activations; for small M, to values that it multiplies as bfloat16.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .._backends import cpu, cuda, cuda_calls, extension
from .._core import checks, explicit, smoothing
from .._core.activations import EXACT, QuantizedActivations, quantize_activations, value_dtype
from .._core.array import QuantizedArray
from . import epilogue, fused
from .call import Product, Rows, Weights, is_supported, run
from .options import Options
from .product import multiply
from .support import only_gpus_of

MOST_K = 2**17 - 1
"""With a larger k, products of 8 bits may overflow int32, if all of them are (-128)^2.

The kernels see k padded to 16, so they do not check this limit.
"""


class Rounding(NamedTuple):
    """How to quantize activations: arguments of `quantized_matmul`."""

    dtype: Any
    factor: Any


def product(
    lhs: Any,
    rhs: QuantizedArray,
    rounding: Rounding,
    options: Options,
    *,
    bias: Any,
    activation: Any,
    residual: Any,
) -> Array:
    """`quantized_matmul` of quantized or to be quantized activations; `options` must be checked.

    **Raises:** as `quantized_matmul`.
    """
    caller, given = "quantized_matmul", isinstance(lhs, QuantizedActivations)
    dtype, factor = rounding
    if not given:
        lhs = checks.array(caller, "lhs", lhs, "activations (..., k)")
        dtype = value_dtype(caller, "lhs_qtype", dtype)
    else:
        for name, value in zip(("lhs_qtype", "lhs_factor"), rounding, strict=True):
            if value is not None:
                raise ValueError(
                    f"{caller}: {name} is {checks.brief(value)}, but lhs is quantized already; "
                    f"leave {name} out."
                )
    if options.precision is not None:
        raise ValueError(
            f"{caller}: precision is {options.precision}, but quantized activations are multiplied "
            "in bfloat16 with float32 sums; leave precision out."
        )
    floats, values = (jax.ShapeDtypeStruct(lhs.shape, dtype) for dtype in (lhs.dtype, EXACT))
    options.replace(backend=None).check(caller, floats, rhs)
    options.replace(preferred_element_type=None).check(caller, values, rhs)
    bias, residual = fused.checked(floats, rhs, bias, activation, residual)
    if factor is not None:
        factor = smoothing.checked_factor(caller, "lhs_factor", factor, rhs.k)
    out_dtype = options.out_dtype(lhs)
    plain = bias is None and activation is None and residual is None
    # The epilogue takes accumulators that are not rounded.
    options = options.replace(preferred_element_type=out_dtype if plain else jnp.float32)
    if given:
        sums = scaled(options, lhs, rhs)
    else:
        sums = straight_through(options, dtype, lhs, rhs, factor)
    if plain:
        return sums
    if bias is not None and lhs.ndim > 1:
        bias = bias[..., None, :]
    return epilogue.finished(sums, bias, activation, residual, out_dtype)


@dataclasses.dataclass(frozen=True)
class Scaled(Product):
    """`(values @ rhs) * scale`, in the dtype that the options prefer."""

    def composition(self, *operands: Array) -> tuple[Array, ...]:
        (values, scale), (rhs,), _ = self.named(operands)
        options = self.options.replace(preferred_element_type=jnp.float32)
        sums = multiply(values.astype(EXACT), rhs, options)
        scale = explicit.beside(scale, sums)
        scale = jnp.expand_dims(scale, range(sums.ndim - scale.ndim))  # for the stack axes
        return ((sums * scale).astype(self.out_dtype),)

    @property
    def out_dtype(self) -> Any:
        return self.options.preferred_element_type

    @property
    def call_dtype(self) -> Any:
        """The result dtype of custom calls, which take the dtype of activations to be bfloat16."""
        return jnp.dtype(jnp.float32 if self.out_dtype == jnp.float16 else self.out_dtype)

    def fits(self, context: Any) -> bool:
        return only_gpus_of(90, context)

    def supports(self, rows: Rows, weights: Weights) -> bool:
        values, (rhs,) = rows[0], weights
        return in_8_bits(values, rhs, self.options.backend)

    def custom_call(self, *operands: Array) -> tuple[Array, ...]:
        return self._one_call(cuda_calls.quantized, operands)

    def cpu_fits(self, context: Any) -> bool:
        return not context.lowering_parameters.for_export  # another CPU may lack the instruction

    def cpu_supports(self, rows: Rows, weights: Weights) -> bool:
        return self.options.backend in (None, "cpu") and cpu_reads_bytes(rows[0], weights[0])

    def cpu_call(self, *operands: Array) -> tuple[Array, ...]:
        return self._one_call(cpu.quantized, operands)

    def _one_call(self, call: Callable, operands: Sequence[Array]) -> tuple[Array, ...]:
        (values, scale), (rhs,), _ = self.named(operands)
        out = call(values, scale, rhs, out_dtype=self.call_dtype)
        return (out.astype(self.out_dtype),)


@dataclasses.dataclass(frozen=True)
class Rounded(Product):
    """`Scaled` of activations that the call quantizes to `dtype`; `others`: a factor or None.

    If XLA partitions the program, or on the CPU, it is the composition, in which a token has one
    scale over all devices.
    """

    dtype: Any

    @property
    def given(self) -> Scaled:
        """The call for activations that are already quantized."""
        return Scaled(self.treedef, self.options)

    def composition(self, *operands: Array) -> tuple[Array, ...]:
        (lhs,), (rhs,), (factor,) = self.named(operands)
        return (scaled(self.options, quantize_activations(lhs, self.dtype, factor=factor), rhs),)

    def fits(self, context: Any) -> bool:
        return self.given.fits(context)

    def supports(self, rows: Rows, weights: Weights) -> bool:
        (lhs,), (rhs,) = rows, weights
        return self._in_8_bits(lhs, rhs) or few_rows(lhs.shape, rhs, self.options.backend)

    def _in_8_bits(self, lhs: Any, rhs: QuantizedArray) -> bool:
        return self.given.supports((jax.ShapeDtypeStruct(lhs.shape, self.dtype),), (rhs,))

    def custom_call(self, *operands: Array) -> tuple[Array, ...]:
        (lhs,), (rhs,), (factor,) = self.named(operands)
        stored = self.dtype if self._in_8_bits(lhs, rhs) else EXACT
        options = {"dtype": self.dtype, "stored": stored, "out_dtype": self.given.call_dtype}
        out, *_ = cuda_calls.rounded(lhs, factor, rhs, **options)
        return (out.astype(self.options.preferred_element_type),)


def reads_bytes(values: Any, rhs: QuantizedArray, *, pair: bool = False) -> bool:
    """Whether the Hopper kernels of this build multiply 8-bit values by a weight in 8 bits;
    arguments are shapes and dtypes."""
    return (
        math.prod(values.shape[:-1]) != 0
        and uncovered_bytes(values, rhs, pair=pair) is None
        and is_supported("cuda", jax.ShapeDtypeStruct(values.shape, EXACT), rhs)
        and extension.uncompiled_activations() is None
    )


def cpu_reads_bytes(values: Any, rhs: QuantizedArray) -> bool:
    """Whether a kernel of this CPU multiplies quantized activations by a weight in 8 bits;
    arguments are shapes and dtypes."""
    rows = math.prod(values.shape[:-1])
    return (
        rows != 0
        and rhs.ndim == 2
        and is_supported("cpu", jax.ShapeDtypeStruct(values.shape, EXACT), rhs)
        and cpu.unsupported_activations(values.dtype, rows, rhs.format) is None
    )


def uncovered_bytes(values: Any, rhs: QuantizedArray, *, pair: bool = False) -> str | None:
    """Returns None if Hopper kernels multiply 8-bit values by a weight in 8 bits, else why not."""
    if not all(isinstance(size, int) for size in values.shape[:-1]):
        return "the number of rows is not known"
    if rhs.ndim != 2 and not pair:
        return "the call multiplies 8 bits by one matrix, not by a stack"
    if rhs.permutation is not None or rhs.shards != (1, 1):
        return "the call multiplies 8 bits by rows that are neither permuted nor in shards"
    if rhs.k > MOST_K:
        return f"sums over k={rhs.k} may leave int32, which holds {MOST_K} products of 8 bits"
    return cuda.unsupported_activations(values.dtype, rhs.format, rhs.k)


def too_few_rows(values: Any, rhs: QuantizedArray) -> str | None:
    """The reason why small M is multiplied in bfloat16 on Hopper; None if M is large enough."""
    rows, least = math.prod(values.shape[:-1]), least_rows(values.dtype, rhs)
    return f"{rows} rows, fewer than {least}, are as fast in that" if rows < least else None


def least_rows(values: Any, rhs: QuantizedArray) -> int:
    """The minimum M at which Hopper multiplies 8-bit values faster in 8 bits."""
    return cuda.least_rows(values, rhs.format, rhs.k)


def in_8_bits(values: Any, rhs: QuantizedArray, backend: str | None, *, pair: bool = False) -> bool:
    """Whether Hopper kernels multiply 8-bit values by a weight faster than in bfloat16; arguments
    are shapes and dtypes. `pair`: the weight is a gate and its up."""
    reads = backend in (None, "cuda") and reads_bytes(values, rhs, pair=pair)
    return reads and too_few_rows(values, rhs) is None


def few_rows(shape: tuple[Any, ...], rhs: QuantizedArray, backend: str | None) -> bool:
    """Whether the Hopper kernel for small M multiplies rounded rows (..., k) in bfloat16."""
    count = math.prod(shape[:-1])
    return (
        backend in (None, "cuda")
        and isinstance(count, int)
        and count > 0
        and rhs.ndim == 2
        and rhs.format.scale != "two_level"
        and rhs.tensor_scale is None
        and cuda.unsupported_few_rows(count, rhs.format, rhs.k) is None
        and is_supported("cuda", jax.ShapeDtypeStruct(shape, EXACT), rhs)
    )


def scaled(options: Options, lhs: QuantizedActivations, rhs: QuantizedArray) -> Array:
    """`lhs @ rhs`, rounded once to the result dtype of the options."""
    return run(Scaled, (lhs.values, lhs.scale), (rhs,), options)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def straight_through(
    options: Options, dtype: Any, lhs: Array, rhs: QuantizedArray, factor: Array | None
) -> Array:
    """`scaled` of activations that the call quantizes, perhaps after division by a factor.

    The derivative treats the rounding as the identity (the straight-through estimator of Bengio et
    al., 2013): it is the derivative of the product with the dequantized activations.
    """
    return run(Rounded, (lhs,), (rhs,), options, (factor,), dtype=dtype)[0]


@straight_through.defjvp
def _straight_through_jvp(
    options: Options, dtype: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Array, Array]:
    lhs, rhs, factor = primals
    plain = options.replace(preferred_element_type=None)

    def product(lhs: Array, rhs: QuantizedArray) -> Array:
        return epilogue.accumulators(plain, lhs, rhs).astype(options.preferred_element_type)

    def divided(lhs: Array, factor: Array | None) -> Array:
        return lhs if factor is None else smoothing.divided(lhs, factor).astype(lhs.dtype)

    lhs_tangent, rhs_tangent, factor_tangent = tangents
    _, lhs_tangent = jax.jvp(divided, (lhs, factor), (lhs_tangent, factor_tangent))
    dequantized = quantize_activations(lhs, dtype, factor=factor).dequantize()
    out = straight_through(options, dtype, lhs, rhs, factor)
    return out, jax.jvp(product, (dequantized, rhs), (lhs_tangent, rhs_tangent))[1]


def check_unused(factor: Any) -> None:
    """Raises if `lhs_factor` is given but activations are not quantized."""
    if factor is not None:
        raise ValueError(
            f"quantized_matmul: lhs_factor is {checks.brief(factor)}, but without "
            "lhs_qtype nothing is rounded; divide lhs by it, or pass lhs_qtype."
        )
