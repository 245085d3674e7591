"""`QuantizedDenseGeneral`: `nn.DenseGeneral` with a quantized kernel."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes
from jax import Array

from .._core import checks
from .._core.format import Format
from . import arguments
from .kernel_axes import KernelAxes, as_tuple, check_batch, positions
from .linen_variables import initialise, kernel_of, packing_of
from .weights import Packing, Shards, stand_in


class QuantizedDenseGeneral(nn.Module):
    """`nn.DenseGeneral` with a quantized kernel, which is one matrix (*batch, k, n).

    k is the product of the sizes of the inputs along `axis`, n that of `features`; groups run
    along k, whose last axis varies fastest. The kernel's arrays are variables of the collection
    `"quantized"`, as those of `QuantizedDense`; the bias remains in `params`.

    **Arguments:** those of `nn.DenseGeneral`, without `precision`, `dot_general` and
    `dot_general_cls`, and

    - `format`: a `Format`, or its name. The kernel is initialised in `param_dtype`, then quantized;
      its scales have `param_dtype`: float32, bfloat16 or float16.
    - `shards`: the number of equal parts of k and n into which devices will cut the kernel, as for
      `jaxlowbit.quantize`.
    - `activation_dtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, to which each call quantizes
      its inputs, as that of `jaxlowbit.quantized_matmul`.

    **Raises:** `ValueError` where `jaxlowbit.quantize` does, for axes that the inputs have not,
    and if applied to variables without its kernel, or with one of other sizes.

    ```python
    layer = QuantizedDenseGeneral(512, format=INT4, axis=(-2, -1))
    variables = layer.init(jax.random.key(0), jnp.ones((8, 4, 64)))
    y = layer.apply(variables, jnp.ones((8, 4, 64)))
    ```
    """

    features: int | Sequence[int]
    format: Format | str
    shards: Shards = (1, 1)
    axis: int | Sequence[int] = -1
    batch_dims: Sequence[int] = ()
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nn.linear.default_kernel_init
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype
    activation_dtype: Any = None

    @nn.compact
    def __call__(self, inputs: Any) -> Array:
        """Returns the product over `axis`, of shape (*batch, *rows, *features), plus the bias."""
        packing = packing_of(self, "use_bias", "kernel_init", "bias_init")
        inputs = arguments.activations(type(self).__name__, "inputs", inputs)
        axes = _axes(self, inputs)

        def weight() -> Any:
            return self.kernel_init(self.make_rng("params"), axes.flat_shape, self.param_dtype)

        initialise(self, packing, weight, axes)
        bias = None
        if self.use_bias:
            shape = (*axes.batch, *axes.features)

            def init(key: Any) -> Array:
                return self.bias_init(key, (math.prod(shape),), self.param_dtype).reshape(shape)

            bias = self.param("bias", init)
        return dense_general(self, packing, bias, inputs)


def dense_general(module: Any, packing: Packing, bias: Array | None, inputs: Any) -> Array:
    """What `nn.DenseGeneral` computes, with the kernel that `module` has in the collection."""
    inputs = jnp.asarray(inputs)
    axes = _axes(module, inputs)
    kernel = kernel_of(module, packing, axes)
    like = stand_in(kernel, module.param_dtype)
    with checks.within(type(module).__name__, lhs="inputs", rhs="the kernel"):
        inputs, _, bias = module.promote_dtype(inputs, like, bias, dtype=module.dtype)
        contracted = positions(as_tuple(module.axis), inputs.ndim)
        return axes.multiply(
            inputs,
            kernel,
            range(len(axes.batch)),
            contracted,
            bias=bias,
            activation_dtype=packing.activation_dtype,
        )


def general_axes(layer: nn.DenseGeneral, shape: tuple[int, ...]) -> KernelAxes:
    """The axes of a kernel of `shape`, of which those in front may be a stack or a batch."""
    features = len(as_tuple(layer.features))
    own = shape[len(shape) - features - len(as_tuple(layer.axis)) :]
    return KernelAxes((), own[:-features], own[-features:])


def _axes(module: Any, inputs: Any) -> KernelAxes:
    shape, caller = jnp.shape(inputs), type(module).__name__
    batch = arguments.axes(caller, "batch_dims", module.batch_dims)
    features = arguments.sizes(caller, "features", module.features)
    with checks.within(caller):
        check_batch(batch)
        if len(batch) > len(shape):
            raise ValueError(
                f"batch_dims are {batch}, but inputs have {len(shape)} axes; name axes that are "
                "there."
            )
        contracted = positions(arguments.axes(caller, "axis", module.axis), len(shape))
    return KernelAxes(
        tuple(shape[axis] for axis in range(len(batch))),
        tuple(shape[axis] for axis in contracted),
        features,
    )
