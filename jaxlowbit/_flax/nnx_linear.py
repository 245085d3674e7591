"""`QuantizedLinear`: `nnx.Linear` with a quantized kernel."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes, initializers
from jax import Array

from .._formats import Format
from .._matmul import quantized_matmul
from .nnx_variables import QuantizedModule, check_replaceable

default_kernel_init = initializers.lecun_normal()
default_bias_init = initializers.zeros_init()


class QuantizedLinear(QuantizedModule):
    """`nnx.Linear` with a quantized kernel: `inputs @ kernel.dequantize() + bias`.

    The kernel's arrays are the variables `packed`, `scale`, `zero` (None in a format without one)
    and `version`; `kernel` is the `QuantizedArray` they form. The bias remains an `nnx.Param`.

    **Arguments:** those of `nnx.Linear`, and

    - `format`: of the kernel, which is initialised in `param_dtype`, then quantized. Its scales
      have `param_dtype`: float32, bfloat16 or float16.
    - `preferred_element_type`: dtype of the product: None for that of the promoted inputs, or
      float32.

    **Raises:** `ValueError` where `jaxlowbit.quantize` does.

    ```python
    layer = QuantizedLinear(256, 512, format=INT4, rngs=nnx.Rngs(0))
    y = layer(jnp.ones((8, 256)))
    ```
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        format: Format,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = default_kernel_init,
        bias_init: Callable[..., Any] = default_bias_init,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        preferred_element_type: Any = None,
        rngs: nnx.Rngs,
    ):
        self._store(kernel_init(rngs.params(), (in_features, out_features), param_dtype), format)
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (out_features,), param_dtype))
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    @classmethod
    def from_linear(cls, linear: nnx.Linear, format: Format) -> "QuantizedLinear":
        """The layer that quantizes the kernel of `linear` and shares its bias variable.

        An abstract layer, made under `nnx.eval_shape`, gives an abstract one. Metadata of the
        kernel, such as its sharding, is not taken over.

        **Raises:** `TypeError` if `linear` is no `nnx.Linear`, or of a subclass, `ValueError` if it
        sets a `dot_general` or `precision`, which the quantized product does not have, and where
        `jaxlowbit.quantize` raises.

        ```python
        model.head = QuantizedLinear.from_linear(model.head, INT4)
        ```
        """
        check_linear(linear)
        weight = linear.kernel.get_value()
        layer = cls(
            linear.in_features,
            linear.out_features,
            format=format,
            use_bias=False,
            dtype=linear.dtype,
            param_dtype=linear.param_dtype,
            kernel_init=lambda *_: weight,
            promote_dtype=linear.promote_dtype,
            preferred_element_type=linear.preferred_element_type,
            rngs=nnx.Rngs(0),
        )
        layer.use_bias = linear.use_bias
        layer.bias = linear.bias
        return layer

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.in_features, self.out_features

    def __call__(self, inputs: Any) -> Array:
        """Returns `inputs @ kernel.dequantize() + bias`, for any leading axes of `inputs`."""
        kernel = self._single_kernel()
        bias = None if self.bias is None else self.bias.get_value()
        # The scale stands in for the kernel, whose dtype it has.
        inputs, _, bias = self.promote_dtype((inputs, kernel.scale, bias), dtype=self.dtype)
        out = quantized_matmul(inputs, kernel, preferred_element_type=self.preferred_element_type)
        if bias is not None:
            out += bias.reshape(*[1] * (out.ndim - 1), -1).astype(out.dtype)
        return out


def check_linear(layer: Any) -> None:
    """Refuses a layer that `QuantizedLinear` cannot stand in for."""
    defaults = {"dot_general": jax.lax.dot_general, "precision": None}
    check_replaceable(layer, nnx.Linear, "QuantizedLinear.from_linear", defaults)
