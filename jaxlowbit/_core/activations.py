"""Quantized activations: 8-bit values with a scale per token."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from . import checks
from .dtypes import FLOATS
from .scales import least, rounded
from .smoothing import checked_factor, divided

VALUES = (jnp.dtype("int8"), jnp.dtype("float8_e4m3fn"))
"""Dtypes of quantized activations."""

EXACT = jnp.dtype("bfloat16")
"""Most kernels convert 8-bit values to this dtype, which represents all of them exactly."""


@jax.tree_util.register_pytree_with_keys_class
class QuantizedActivations:
    """Activations (..., k) in 8 bits, with a scale per token: `values * scale`.

    Made by `quantize_activations`, or directly from quantized values; `dequantize()` defines the
    floats. `x @ q` and `quantized_matmul` take it as their left operand. A pytree of both arrays.

    **Arguments:**

    - `values`: int8 or float8_e4m3fn (..., k).
    - `scale`: float32 (..., 1), one for each token.
    - `dtype`: float32, bfloat16 or float16, the dtype of `dequantize()` and of products.

    **Raises:** `TypeError` for arguments that are not arrays, `ValueError` for other shapes and
    dtypes.

    ```python
    QuantizedActivations(jnp.ones((2, 64), jnp.int8), jnp.full((2, 1), 0.5))
    ```
    """

    def __init__(self, values: Any, scale: Any, dtype: Any = jnp.bfloat16):
        caller = type(self).__name__
        for name, array in (("values", values), ("scale", scale)):
            checks.shaped(caller, name, array)
        if values.dtype not in VALUES or values.ndim == 0:
            raise ValueError(
                f"{caller}: values is {checks.brief(values)}, but it must be int8 or float8_e4m3fn "
                "(..., k); use quantize_activations for floats."
            )
        expected = (*values.shape[:-1], 1)
        if scale.dtype != jnp.float32 or scale.shape != expected:
            raise ValueError(
                f"{caller}: scale is {checks.brief(scale)}, but values of shape {values.shape} "
                f"have float32{list(expected)}, one for each token; reshape or cast it."
            )
        self.values, self.scale = values, scale
        self.dtype = checks.compute_dtype(caller, "dtype", dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dequantize(self, dtype: Any = None) -> Array:
        """Returns `values * scale`, computed in float32 and rounded once.

        **Arguments:** `dtype`: the float dtype of the result; None for `self.dtype`.

        **Raises:** `TypeError` if `dtype` is not a dtype, `ValueError` for integers.
        """
        name = "QuantizedActivations.dequantize"
        dtype = self.dtype if dtype is None else checks.float_dtype(name, "dtype", dtype)
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)

    def __repr__(self) -> str:
        if not hasattr(self.values, "shape"):
            return f"QuantizedActivations({self.values}, {self.scale})"
        return f"QuantizedActivations({self.shape}, {self.values.dtype}, {self.dtype})"

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        key = jax.tree_util.GetAttrKey
        return [(key("values"), self.values), (key("scale"), self.scale)], self.dtype

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.values, self.scale), self.dtype

    @classmethod
    def tree_unflatten(cls, dtype: Any, leaves: Any) -> "QuantizedActivations":
        # Transformations unflatten with placeholders as leaves, so do not check here.
        self = object.__new__(cls)
        self.values, self.scale = leaves
        self.dtype = dtype
        return self


def quantize_activations(
    activations: Any, dtype: Any = jnp.int8, *, factor: Any = None
) -> QuantizedActivations:
    """Rounds activations to 8 bits, with a scale per token that covers its largest magnitude.

    int8 values are from -127 to 127. A token of zeros has the scale 1. A token with a NaN or an
    infinity has the scale NaN, so that its products are NaN. The scheme is the dynamic per-token
    quantization of ZeroQuant (Yao et al., 2022).

    **Arguments:**

    - `activations`: float32, bfloat16 or float16 (..., k), k from 1.
    - `dtype`: `jnp.int8` or `jnp.float8_e4m3fn`.
    - `factor`: None, or positive floats (k,) that divide the channels first, in float32, such as
      the result of `smoothing_factor`. The rows of the weight must be multiplied by it.

    **Returns:** `QuantizedActivations` of the same shape and dtype.

    **Raises:** `TypeError` for arguments that are not an array or dtype, `ValueError` for other
    dtypes, for tokens without values, and for a factor of another shape or, outside `jax.jit`,
    other values.

    ```python
    x = quantize_activations(jnp.ones((8, 256), jnp.bfloat16), jnp.float8_e4m3fn)
    y = x @ quantize(jnp.ones((256, 512)), INT4)
    ```
    """
    caller = "quantize_activations"
    array = checks.array(caller, "activations", activations, "floats (..., k)")
    dtype = value_dtype(caller, "dtype", dtype)
    if array.dtype not in FLOATS or array.ndim == 0 or array.shape[-1] == 0:
        raise ValueError(
            f"{caller}: activations are {checks.brief(array)}, but they must be float32, bfloat16 "
            "or float16 (..., k), k from 1; cast or reshape them."
        )
    if factor is None:
        return rounded_tokens(array, reach(array), dtype)
    floats = divided(array, checked_factor(caller, "factor", factor, array.shape[-1]))
    found = rounded_tokens(floats, reach(floats), dtype)
    return QuantizedActivations(found.values, found.scale, array.dtype)


def reach(activations: Array) -> Array:
    """Returns the largest magnitude of each token, float32 (..., 1)."""
    magnitudes = jnp.abs(activations.astype(jnp.float32))
    largest = jnp.max(magnitudes, axis=-1, keepdims=True)
    # On CPUs, XLA's maximum over many values may drop NaN.
    no_number = jnp.any(jnp.isnan(magnitudes), axis=-1, keepdims=True)
    return jnp.where(no_number, jnp.nan, largest)


def rounded_tokens(activations: Array, reach: Array, dtype: Any) -> QuantizedActivations:
    """`quantize_activations` for tokens whose largest magnitude is `reach`.

    If each device has only a part of each token, `reach` must cover the whole tokens.
    """
    floats = activations.astype(jnp.float32)
    most = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scale = jnp.where(reach > 0, jnp.maximum(reach / most, least(jnp.float32)), 1.0)
    scale = jnp.where(jnp.isfinite(reach), scale, jnp.nan)
    steps = jnp.where(jnp.isfinite(scale), jnp.clip(floats / scale, -most, most), 0)
    values = jnp.round(steps) if dtype == jnp.int8 else rounded(steps, dtype)
    return QuantizedActivations(values.astype(dtype), scale, activations.dtype)


def value_dtype(caller: str, name: str, dtype: Any) -> Any:
    """Returns a value as a dtype of quantized activations.

    **Raises:** `TypeError` if it is not a dtype, `ValueError` for other dtypes.
    """
    found = checks.dtype(caller, name, dtype)
    if found not in VALUES:
        raise ValueError(
            f"{caller}: {name} is {found}, but activations are quantized to int8 or "
            "float8_e4m3fn; pass one of these."
        )
    return found
