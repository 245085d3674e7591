"""`QuantizedDense`: `nn.Dense` with a quantized kernel."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes
from jax import Array

from .._core import checks
from .._core.format import Format
from .._matmul.api import quantized_matmul
from . import arguments
from .kernel_axes import KernelAxes
from .linen_variables import initialise, kernel_of, packing_of
from .weights import Packing, Shards, stand_in


class QuantizedDense(nn.Module):
    """`nn.Dense` with a quantized kernel: `inputs @ kernel.dequantize() + bias`.

    The kernel's arrays are the variables `packed`, `scale`, `zero` (none in a format without one),
    `permutation` (none unless a weight with permuted rows is put there), `version` and `padding`
    (none where k and n are multiples of 64) of the collection `"quantized"`, so that gradients and
    optimizers, which take `params`, pass the integers by; the bias remains in `params`.

    **Arguments:** those of `nn.Dense`, without `precision` and `dot_general`, and

    - `format`: a `Format`, or its name. The kernel is initialised in `param_dtype`, then quantized;
      its scales have `param_dtype`: float32, bfloat16 or float16.
    - `shards`: the number of equal parts of k and n into which devices will cut the kernel, as for
      `jaxlowbit.quantize`.
    - `activation_dtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, to which each call quantizes
      its inputs, as that of `jaxlowbit.quantized_matmul`.

    **Raises:** `ValueError` where `jaxlowbit.quantize` does, and if applied to variables without
    its kernel, or with one of other sizes.

    ```python
    layer = QuantizedDense(512, format=INT4)
    variables = layer.init(jax.random.key(0), jnp.ones((8, 256)))
    y = layer.apply(variables, jnp.ones((8, 256)))
    ```
    """

    features: int
    format: Format | str
    shards: Shards = (1, 1)
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nn.linear.default_kernel_init
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype
    activation_dtype: Any = None

    @nn.compact
    def __call__(self, inputs: Any) -> Array:
        """Returns `inputs @ kernel.dequantize() + bias`, for any leading axes of `inputs`."""
        packing = packing_of(self, "use_bias", "kernel_init", "bias_init")
        features = arguments.size(type(self).__name__, "features", self.features)
        inputs = arguments.activations(type(self).__name__, "inputs", inputs)
        arguments.check_axes(type(self).__name__, "inputs", inputs)
        shape = (inputs.shape[-1], features)

        def weight() -> Any:
            return self.kernel_init(self.make_rng("params"), shape, self.param_dtype)

        initialise(self, packing, weight, dense_axes(self, shape))
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (features,), self.param_dtype)
        return dense(self, packing, bias, inputs)


def dense_axes(layer: Any, shape: tuple[int, ...]) -> KernelAxes:
    """The axes of a kernel of `shape`, perhaps a stack of them."""
    del layer
    return KernelAxes((), shape[-2:-1], shape[-1:])


def dense(module: Any, packing: Packing, bias: Array | None, inputs: Any) -> Array:
    """What `nn.Dense` computes, with the kernel that `module` has in the collection."""
    inputs = jnp.asarray(inputs)
    shape = (inputs.shape[-1], module.features)
    kernel = kernel_of(module, packing, dense_axes(module, shape))
    like = stand_in(kernel, module.param_dtype)
    with checks.within(type(module).__name__, lhs="inputs", rhs="the kernel"):
        inputs, _, bias = module.promote_dtype(inputs, like, bias, dtype=module.dtype)
        dtype = packing.activation_dtype
        return quantized_matmul(inputs, kernel, bias=bias, activation_dtype=dtype)
