"""`QuantizedDense`: `nn.Dense` with a quantized kernel, and the collection that holds it."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes
from jax import Array

from .._array import QuantizedArray
from .._formats import Format
from .._matmul import quantized_matmul
from .._quantize import quantize

COLLECTION = "quantized"
"""The collection of packed words, scales, zeros and layout versions, beside `params`."""

_ARRAYS = ("packed", "scale", "zero", "version")


class QuantizedDense(nn.Module):
    """`nn.Dense` with a quantized kernel: `inputs @ kernel.dequantize() + bias`.

    The kernel's arrays are the variables `packed`, `scale`, `zero` (none in a format without one)
    and `version` of the collection `"quantized"`, so that gradients and optimizers, which take
    `params`, pass the integers by; the bias remains in `params`.

    **Arguments:** those of `nn.Dense`, without `precision` and `dot_general`, and

    - `format`: of the kernel, which is initialised in `param_dtype`, then quantized. Its scales
      have `param_dtype`: float32, bfloat16 or float16.

    **Raises:** `ValueError` where `jaxlowbit.quantize` does, and if applied to variables without
    its kernel.

    ```python
    layer = QuantizedDense(512, format=INT4)
    variables = layer.init(jax.random.key(0), jnp.ones((8, 256)))
    y = layer.apply(variables, jnp.ones((8, 256)))
    ```
    """

    features: int
    format: Format
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nn.linear.default_kernel_init
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype

    @nn.compact
    def __call__(self, inputs: Any) -> Array:
        """Returns `inputs @ kernel.dequantize() + bias`, for any leading axes of `inputs`."""
        if self.is_initializing() and not self.has_variable(COLLECTION, "packed"):
            shape = (jnp.shape(inputs)[-1], self.features)
            weight = self.kernel_init(self.make_rng("params"), shape, self.param_dtype)
            for name, array in arrays_of(quantize(weight, self.format)).items():
                self.put_variable(COLLECTION, name, array)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        return dense(self, self.format, bias, inputs)


def arrays_of(kernel: QuantizedArray) -> dict[str, Array]:
    """The arrays of a kernel under the names that the collection has for them."""
    arrays = {name: getattr(kernel, name) for name in _ARRAYS}
    return {name: array for name, array in arrays.items() if array is not None}


def dense(module: Any, format: Format, bias: Array | None, inputs: Any) -> Array:
    """What `nn.Dense` computes, with the kernel that `module` has in the collection."""
    inputs = jnp.asarray(inputs)
    kernel = _kernel(module, format, inputs.shape[-1])
    # The scale stands in for the kernel, whose dtype it has.
    inputs, _, bias = module.promote_dtype(inputs, kernel.scale, bias, dtype=module.dtype)
    out = quantized_matmul(inputs, kernel)
    return out if bias is None else out + bias.reshape(*[1] * (out.ndim - 1), -1)


def _kernel(module: Any, format: Format, k: int) -> QuantizedArray:
    name = ".".join(module.path) or "the layer"
    if not module.has_variable(COLLECTION, "packed"):
        raise ValueError(
            f"{name} has no kernel in the collection {COLLECTION!r}. Pass the variables that "
            f"hold it; inside nn.scan or nn.vmap, add {COLLECTION!r}: 0 to variable_axes."
        )
    arrays = {name: module.get_variable(COLLECTION, name) for name in _ARRAYS}
    kernel = QuantizedArray(**arrays, index=None, format=format, k=k, n=module.features)
    if kernel.ndim > 2:
        raise ValueError(
            f"{name} has a kernel of shape {kernel.shape}, a stack of layers; inside nn.scan or "
            f"nn.vmap, add {COLLECTION!r}: 0 to variable_axes."
        )
    return kernel
