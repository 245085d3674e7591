"""`QuantizedLinear`: `nnx.Linear` with a quantized kernel."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes, initializers
from jax import Array

from .._core import checks
from .._core.format import Format
from .._matmul.api import quantized_matmul
from . import arguments
from .nnx_variables import QuantizedModule, check_replaceable
from .weights import Shards, stand_in

default_kernel_init = initializers.lecun_normal()
default_bias_init = initializers.zeros_init()


class QuantizedLinear(QuantizedModule):
    """`nnx.Linear` with a quantized kernel: `inputs @ kernel.dequantize() + bias`.

    The kernel's arrays are the variables `packed`, `scale`, `zero` (None in a format without one),
    `permutation` (None unless a weight with permuted rows is put into the layer) and `version`;
    `kernel` is the `QuantizedArray` they form. The bias remains an `nnx.Param`.

    **Arguments:** those of `nnx.Linear`, and

    - `format`: a `Format`, or its name. The kernel is initialised in `param_dtype`, then quantized;
      its scales have `param_dtype`: float32, bfloat16 or float16.
    - `shards`: the number of equal parts of k and n into which devices will cut the kernel, as for
      `jaxlowbit.quantize`.
    - `activation_dtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, to which each call quantizes
      its inputs, as that of `jaxlowbit.quantized_matmul`.
    - `preferred_element_type`: dtype of the product: None for that of the promoted inputs, or
      float32.

    Sharding metadata of the kernel, from `nnx.with_partitioning` or `kernel_metadata`, goes over to
    its arrays, so that `nnx.get_partition_spec` says where each is divided.

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
        format: Format | str,
        shards: Shards = (1, 1),
        activation_dtype: Any = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = default_kernel_init,
        bias_init: Callable[..., Any] = default_bias_init,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        preferred_element_type: Any = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        caller = type(self).__name__
        self.activation_dtype = arguments.activation_dtype(caller, activation_dtype)
        in_features = arguments.size(caller, "in_features", in_features)
        out_features = arguments.size(caller, "out_features", out_features)
        arguments.check_options(
            self,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            preferred_element_type=preferred_element_type,
        )
        weight = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        if not isinstance(weight, nnx.Variable):
            weight = nnx.Param(weight, **kernel_metadata)
        self._store(weight, format, shards)
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            bias = bias_init(rngs.params(), (out_features,), param_dtype)
            self.bias = nnx.Param(bias, **bias_metadata)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    @classmethod
    def from_linear(
        cls,
        linear: nnx.Linear,
        format: Format | str,
        shards: Shards = (1, 1),
        activation_dtype: Any = None,
    ) -> "QuantizedLinear":
        """The layer that quantizes the kernel of `linear` and shares its bias variable.

        An abstract layer, made under `nnx.eval_shape`, gives an abstract one.

        **Raises:** `TypeError` if `linear` is no `nnx.Linear`, or of a subclass, `ValueError` if it
        sets a `dot_general` or `precision`, which the quantized product does not have, where
        `jaxlowbit.quantize` raises, and for a kernel sharded in parts that `shards` do not fit.

        ```python
        model.head = QuantizedLinear.from_linear(model.head, INT4)
        ```
        """
        check_linear(linear)
        layer = cls(
            linear.in_features,
            linear.out_features,
            format=format,
            shards=shards,
            activation_dtype=activation_dtype,
            use_bias=False,
            dtype=linear.dtype,
            param_dtype=linear.param_dtype,
            kernel_init=lambda *_: linear.kernel,
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

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        """Returns `inputs @ kernel.dequantize() + bias`, for any leading axes of `inputs`.

        `out_sharding` is that of the result, on a mesh with Explicit axes.
        """
        caller = type(self).__name__
        kernel = self._single_kernel()
        inputs = arguments.activations(caller, "inputs", inputs)
        arguments.check_width(caller, "inputs", inputs, kernel.shape[-2])
        bias = None if self.bias is None else self.bias.get_value()
        like = stand_in(kernel, self.param_dtype)
        with checks.within(caller, lhs="inputs", rhs="the kernel"):
            inputs, _, bias = self.promote_dtype((inputs, like, bias), dtype=self.dtype)
            return quantized_matmul(
                inputs,
                kernel,
                bias=bias,
                activation_dtype=self.activation_dtype,
                preferred_element_type=self.preferred_element_type,
                out_sharding=out_sharding,
            )


def check_linear(layer: Any) -> None:
    """Refuses a layer that `QuantizedLinear` cannot stand in for."""
    defaults = {"dot_general": jax.lax.dot_general, "precision": None}
    check_replaceable(layer, nnx.Linear, "QuantizedLinear.from_linear", defaults)
