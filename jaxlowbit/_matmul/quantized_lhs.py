"""Products of quantized activations.

They are compositions of a product and token scales. For large M on Hopper, and on CPUs with VNNI,
they are one custom call with 8-bit products. On Hopper that call also quantizes float activations;
for small M, it multiplies the rounded values in bfloat16.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import Array

from .._backends import cpu, cuda, cuda_calls
from .._backends.cuda import HOPPER
from .._backends.extension import ffi
from .._backends.target import Target
from .._core import checks, explicit, smoothing
from .._core.activations import EXACT, QuantizedActivations, quantize_activations, value_dtype
from .._core.array import QuantizedArray
from . import epilogue, fused
from .call import Product, Rows, Weights, run, unread
from .options import FLOAT16_SUMS, Options
from .product import multiply


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
    """`quantized_matmul` with quantized activations, or with `Rounding`; `options` must be checked.

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
    check_float32_sums(caller, options)
    floats, values = (jax.ShapeDtypeStruct(lhs.shape, dtype) for dtype in (lhs.dtype, EXACT))
    options.replace(backend=None).check(caller, floats, rhs)
    options.replace(preferred_element_type=None).check(caller, values, rhs)
    bias, residual = fused.checked(floats, rhs, bias, activation, residual)
    if factor is not None:
        factor = smoothing.checked_factor(caller, "lhs_factor", factor, rhs.k)
    out_dtype = options.out_dtype(lhs)
    plain = bias is None and activation is None and residual is None
    # The epilogue takes accumulators that are not rounded.
    options = options.replace(preferred_element_type=out_dtype if plain else jnp.dtype("float32"))
    if given:
        sums = scaled(options, lhs, rhs)
    else:
        sums = straight_through(options, dtype, lhs, rhs, factor)
    if plain:
        return sums
    if bias is not None and lhs.ndim > 1:
        bias = bias[..., None, :]
    return epilogue.finished(sums, bias, activation, residual, out_dtype)


def check_float32_sums(caller: str, options: Options) -> None:
    """Raises for a `precision` that allows float16 sums."""
    if options.accumulate_float16:
        raise ValueError(
            f"{caller}: precision is {FLOAT16_SUMS}, but quantized activations are multiplied "
            "in bfloat16 with float32 sums; leave precision out."
        )


@dataclasses.dataclass(frozen=True)
class Scaled(Product):
    """`(values @ rhs) * scale`, in the dtype of `options.preferred_element_type`."""

    def composition(self, *operands: Array) -> tuple[Array, ...]:
        (values, scale), (rhs,), _ = self.named(operands)
        options = self.options.replace(preferred_element_type=jnp.dtype("float32"))
        sums = multiply(values.astype(EXACT), rhs, options)
        scale = explicit.beside(scale, sums)
        scale = jnp.expand_dims(scale, range(sums.ndim - scale.ndim))  # for the stack axes
        return ((sums * scale).astype(self.out_dtype),)

    @property
    def out_dtype(self) -> Any:
        return self.options.preferred_element_type

    @property
    def call_dtype(self) -> Any:
        """The result dtype of custom calls, which assume bfloat16 as the dtype of activations."""
        return jnp.dtype(jnp.float32 if self.out_dtype == jnp.float16 else self.out_dtype)

    @property
    def custom_calls(self) -> Mapping[str, Callable[..., tuple[Array, ...]]]:
        calls = {"cuda": cuda_calls.quantized, "cpu": cpu.quantized}
        return {name: functools.partial(self._one_call, calls[name]) for name in calls}

    def unsupported(self, rows: Rows, weights: Weights, target: Target) -> str | None:
        return slow_bytes(rows[0], weights[0], self.options.backend, target)

    def _one_call(self, call: Callable[..., Array], *operands: Array) -> tuple[Array, ...]:
        (values, scale), (rhs,), _ = self.named(operands)
        out = call(values, scale, rhs, out_dtype=self.call_dtype)
        return (out.astype(self.out_dtype),)


@dataclasses.dataclass(frozen=True)
class Rounded(Product):
    """`Scaled` of activations that the call quantizes to `dtype`; `others`: a factor or None.

    If XLA partitions the program, or on the CPU, it is the composition, with one scale per token
    over all devices.
    """

    dtype: Any

    @property
    def given(self) -> Scaled:
        """The call for activations that are already quantized."""
        return Scaled(self.treedef, self.options)

    def composition(self, *operands: Array) -> tuple[Array, ...]:
        (lhs,), (rhs,), (factor,) = self.named(operands)
        return (scaled(self.options, quantize_activations(lhs, self.dtype, factor=factor), rhs),)

    @property
    def custom_calls(self) -> Mapping[str, Callable[..., tuple[Array, ...]]]:
        return {"cuda": self._cuda}

    def unsupported(self, rows: Rows, weights: Weights, target: Target) -> str | None:
        (lhs,), (rhs,) = rows, weights
        reason = self._slow_bytes(lhs, rhs, target)
        return reason and unsupported_few_rows(lhs.shape, rhs, self.options.backend, target)

    def _slow_bytes(self, lhs: Any, rhs: QuantizedArray, target: Target) -> str | None:
        values = jax.ShapeDtypeStruct(lhs.shape, self.dtype)
        return slow_bytes(values, rhs, self.options.backend, target)

    def _cuda(self, *operands: Array) -> tuple[Array, ...]:
        (lhs,), (rhs,), (factor,) = self.named(operands)
        narrow = self._slow_bytes(lhs, rhs, _HOPPER) is None
        stored = self.dtype if narrow else EXACT
        options = {"dtype": self.dtype, "stored": stored, "out_dtype": self.given.call_dtype}
        out, *_ = cuda_calls.rounded(lhs, factor, rhs, **options)
        return (out.astype(self.options.preferred_element_type),)


_HOPPER = Target("cuda", frozenset({HOPPER}))
"""The target of every call that rounds activations on a GPU."""


def unsupported_bytes(
    values: Any, rhs: QuantizedArray, target: Target, *, pair: bool = False
) -> str | None:
    """Returns None if kernels of a target multiply 8-bit values by a weight in 8 bits, else the
    reason; arguments are shapes and dtypes. `pair`: the weight is a gate and its up."""
    rows = math.prod(values.shape[:-1])
    if rows == 0:
        return "the result is empty"
    if target.platform == "cuda":
        if not target.is_only(HOPPER):
            return "only GPUs of compute capability 9.0 multiply 8 bits"
        reason = uncovered_bytes(values, rhs, pair=pair)
    elif target.exported:
        reason = "another CPU may lack the instruction"
    elif rhs.ndim != 2:
        reason = "the call multiplies 8 bits by one matrix, not by a stack"
    else:
        reason = cpu.unsupported_activations(values.dtype, rows, rhs.format)
    return reason or unread(target, jax.ShapeDtypeStruct(values.shape, EXACT), rhs)


def uncovered_bytes(
    values: Any, rhs: QuantizedArray, *, pair: bool = False, built: bool = True
) -> str | None:
    """Returns None if Hopper kernels multiply 8-bit values by a weight in 8 bits, else a reason."""
    if not all(isinstance(size, int) for size in values.shape[:-1]):
        return "the number of rows is not known"
    if rhs.ndim != 2 and not pair:
        return "the call multiplies 8 bits by one matrix, not by a stack"
    if rhs.permutation is not None or rhs.shards != (1, 1):
        return "the call multiplies 8 bits by rows that are neither permuted nor in shards"
    if rhs.k > (most := ffi.MAX_K_OF_8_BITS):
        return f"sums over k={rhs.k} may leave int32, which holds {most} products of 8 bits"
    return cuda.unsupported_activations(values.dtype, rhs.format, rhs.k, built=built)


def too_few_rows(values: Any, rhs: QuantizedArray) -> str | None:
    """The reason to multiply small M in bfloat16 on Hopper; None if M is large enough."""
    rows, least = math.prod(values.shape[:-1]), least_rows(values.dtype, rhs)
    return f"{rows} rows, fewer than {least}, are as fast in that" if rows < least else None


def least_rows(values: Any, rhs: QuantizedArray) -> int:
    """The minimum M for 8-bit products of 8-bit values on Hopper; bfloat16 is faster below it."""
    return cuda.least_rows(values, rhs.format, rhs.k)


def slow_bytes(
    values: Any, rhs: QuantizedArray, backend: str | None, target: Target, *, pair: bool = False
) -> str | None:
    """`unsupported_bytes`; on Hopper it also returns a reason if bfloat16 is as fast."""
    if backend not in (None, target.platform):
        return f"backend={backend!r} is requested"
    reason = unsupported_bytes(values, rhs, target, pair=pair)
    if reason is None and target.platform == "cuda":
        reason = too_few_rows(values, rhs)
    return reason


def unsupported_few_rows(
    shape: tuple[Any, ...], rhs: QuantizedArray, backend: str | None, target: Target
) -> str | None:
    """Returns None if the Hopper kernel for small M multiplies rounded rows (..., k) in bfloat16,
    else the reason."""
    count = math.prod(shape[:-1])
    if backend not in (None, "cuda"):
        return f"backend={backend!r} is requested"
    if not isinstance(count, int) or count == 0:
        return "the number of rows is 0 or not known"
    if rhs.ndim != 2 or rhs.format.two_levels or rhs.tensor_scale is not None:
        return "the kernel for small M rounds rows for one matrix with one scale per group"
    if not target.is_only(HOPPER):
        return "only kernels for compute capability 9.0 round rows"
    reason = cuda.unsupported_few_rows(count, rhs.format, rhs.k)
    return reason or unread(target, jax.ShapeDtypeStruct(shape, EXACT), rhs)


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


def raise_unused(factor: Any) -> NoReturn:
    """Raises for an `lhs_factor` of activations that are not quantized."""
    raise ValueError(
        f"quantized_matmul: lhs_factor is {checks.brief(factor)}, but without "
        "lhs_qtype nothing is rounded; divide lhs by it, or pass lhs_qtype."
    )
