"""`QuantizedEinsum`: `nn.Einsum` with a quantized kernel."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes
from jax import Array

from .._formats import Format
from .equation import Equation
from .linen_variables import initialise, kernel_of


class QuantizedEinsum(nn.Module):
    """`nn.Einsum` with a quantized kernel, for equations that multiply the inputs by matrices.

    The kernel is one matrix (*batch, k, n): its letters that inputs and result share are batch
    axes, k is the product of those that only the inputs have, n of those that only the result
    has, and each letter is one of these. Groups run along k. The kernel's arrays are variables of
    the collection `"quantized"`, as those of `QuantizedDense`; the bias remains in `params`.

    **Arguments:** those of `nn.Einsum`, without `precision`; `einsum_str` is that of every call;
    and

    - `format`: of the kernel, which is initialised in `param_dtype`, then quantized. Its scales
      have `param_dtype`: float32, bfloat16 or float16.

    **Raises:** `ValueError` where `jaxlowbit.quantize` does, for other equations, and if applied to
    variables without its kernel.

    ```python
    layer = QuantizedEinsum((256, 4, 64), "btd,dnh->btnh", format=INT4)
    variables = layer.init(jax.random.key(0), jnp.ones((2, 8, 256)))
    y = layer.apply(variables, jnp.ones((2, 8, 256)))
    ```
    """

    shape: tuple[int, ...]
    einsum_str: str
    format: Format
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nn.linear.default_kernel_init
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype
    preferred_element_type: Any = None

    @nn.compact
    def __call__(self, inputs: Any) -> Array:
        """Returns the result of the equation, plus the bias."""
        equation = Equation.parse(self.einsum_str, self.shape)

        def weight() -> Array:
            key = self.make_rng("params")
            return equation.axes.matrix(self.kernel_init(key, self.shape, self.param_dtype))

        initialise(self, self.format, weight)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, equation.bias_shape, self.param_dtype)
        return einsum(self, self.format, bias, inputs)


def einsum(module: Any, format: Format, bias: Array | None, inputs: Any) -> Array:
    """What `nn.Einsum` computes, with the kernel that `module` has in the collection."""
    equation = Equation.parse(module.einsum_str, module.shape)
    axes = equation.axes
    kernel = kernel_of(module, format, axes.matrix_shape, 2 + len(axes.batch))
    # The scale stands in for the kernel, whose dtype it has.
    inputs, _, bias = module.promote_dtype(inputs, kernel.scale, bias, dtype=module.dtype)
    out = equation.multiply(inputs, kernel, module.preferred_element_type)
    return out if bias is None else out + equation.bias(bias, out.ndim).astype(out.dtype)


def einsum_matrix(layer: nn.Einsum, weight: Array) -> Array:
    """The matrix (..., *batch, k, n) of the kernel of a layer, or of a stack of layers."""
    return _equation(layer).axes.matrix(weight)


def check_einsum(layer: nn.Einsum) -> None:
    """Refuses a layer whose equation is no product, or not known."""
    _equation(layer)


def _equation(layer: nn.Einsum) -> Equation:
    if layer.einsum_str is None:
        raise ValueError(
            "The layer is given its equation in each call, but its kernel is packed by that; give "
            "it to the layer, nn.Einsum(shape, einsum_str)."
        )
    return Equation.parse(layer.einsum_str, layer.shape)
