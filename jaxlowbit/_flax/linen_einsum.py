"""`QuantizedEinsum`: `nn.Einsum` with a quantized kernel."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes
from jax import Array

from .._core import checks
from .._core.format import Format
from . import arguments
from .equation import Equation
from .kernel_axes import KernelAxes
from .linen_variables import initialise, kernel_of, packing_of
from .weights import Packing, Shards, stand_in


class QuantizedEinsum(nn.Module):
    """`nn.Einsum` with a quantized kernel, for equations that multiply the inputs by matrices.

    The kernel is one matrix (*batch, k, n): its letters that inputs and result share are batch
    axes, k is the product of those that only the inputs have, n of those that only the result
    has, and each letter is one of these. Groups run along k. The kernel's arrays are variables of
    the collection `"quantized"`, as those of `QuantizedDense`; the bias remains in `params`.

    **Arguments:** those of `nn.Einsum`, without `precision`; `einsum_str` is that of every call;
    and

    - `format`: a `Format`, or its name. The kernel is initialised in `param_dtype`, then quantized;
      its scales have `param_dtype`: float32, bfloat16 or float16.
    - `shards`: the number of equal parts of k and n into which devices will cut the kernel, as for
      `jaxlowbit.quantize`.
    - `activation_dtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, to which each call quantizes
      its inputs, as that of `jaxlowbit.quantized_matmul`.

    **Raises:** `ValueError` where `jaxlowbit.quantize` does, for other equations, and if applied to
    variables without its kernel, or with one of other sizes.

    ```python
    layer = QuantizedEinsum((256, 4, 64), "btd,dnh->btnh", format=INT4)
    variables = layer.init(jax.random.key(0), jnp.ones((2, 8, 256)))
    y = layer.apply(variables, jnp.ones((2, 8, 256)))
    ```
    """

    shape: tuple[int, ...]
    einsum_str: str
    format: Format | str
    shards: Shards = (1, 1)
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nn.linear.default_kernel_init
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype
    preferred_element_type: Any = None
    activation_dtype: Any = None

    @nn.compact
    def __call__(self, inputs: Any) -> Array:
        """Returns the result of the equation, plus the bias."""
        caller = type(self).__name__
        packing = packing_of(self, "use_bias", "kernel_init", "bias_init", "preferred_element_type")
        shape = arguments.sizes(caller, "shape", self.shape)
        with checks.within(caller):
            equation = Equation.parse(self.einsum_str, shape)
        inputs = arguments.activations(caller, "inputs", inputs)

        def weight() -> Any:
            return self.kernel_init(self.make_rng("params"), shape, self.param_dtype)

        initialise(self, packing, weight, equation.axes)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, equation.bias_shape, self.param_dtype)
        return einsum(self, packing, bias, inputs)


def einsum(module: Any, packing: Packing, bias: Array | None, inputs: Any) -> Array:
    """What `nn.Einsum` computes, with the kernel that `module` has in the collection."""
    equation = Equation.parse(module.einsum_str, module.shape)
    kernel = kernel_of(module, packing, equation.axes)
    like = stand_in(kernel, module.param_dtype)
    with checks.within(type(module).__name__, lhs="inputs", rhs="the kernel"):
        inputs, _, bias = module.promote_dtype(inputs, like, bias, dtype=module.dtype)
        dtype = module.preferred_element_type
        return equation.multiply(inputs, kernel, dtype, bias, packing.activation_dtype)


def einsum_axes(layer: nn.Einsum, shape: tuple[int, ...]) -> KernelAxes:
    """The axes of the kernel of a layer, or of a stack of layers."""
    del shape
    return _equation(layer).axes


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
