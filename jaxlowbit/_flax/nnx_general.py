"""`QuantizedLinearGeneral`: `nnx.LinearGeneral` with a quantized kernel."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict
from flax.nnx.nn import dtypes
from jax import Array

from .._core import checks
from .._core.format import Format
from . import arguments
from .kernel_axes import KernelAxes, check_batch, place, positions
from .nnx_linear import default_bias_init, default_kernel_init
from .nnx_variables import QuantizedModule, check_replaceable
from .sharding import Entries
from .weights import Shards, stand_in


class QuantizedLinearGeneral(QuantizedModule):
    """`nnx.LinearGeneral` with a quantized kernel, which is one matrix (*batch, k, n).

    k is the product of `in_features`, n that of `out_features`; groups run along k, whose last
    axis varies fastest. The kernel's arrays are the variables of `QuantizedLinear`, `kernel` is
    the `QuantizedArray` they form, and the bias, of shape (*batch, *out_features), remains an
    `nnx.Param`.

    **Arguments:** those of `nnx.LinearGeneral`, without `precision`, `dot_general` and
    `dot_general_cls`, and

    - `format`: a `Format`, or its name. The kernel is initialised in `param_dtype`, then quantized;
      its scales have `param_dtype`: float32, bfloat16 or float16.
    - `shards`: the number of equal parts of k and n into which devices will cut the kernel, as for
      `jaxlowbit.quantize`.
    - `activation_dtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, to which each call quantizes
      its inputs, as that of `jaxlowbit.quantized_matmul`.

    **Raises:** `ValueError` where `jaxlowbit.quantize` does, and for axes that do not fit.

    ```python
    layer = QuantizedLinearGeneral((4, 64), 512, axis=(-2, -1), format=INT4, rngs=nnx.Rngs(0))
    y = layer(jnp.ones((8, 4, 64)))
    ```
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        format: Format | str,
        shards: Shards = (1, 1),
        activation_dtype: Any = None,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = FrozenDict({}),
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
        self.in_features = arguments.sizes(caller, "in_features", in_features)
        self.out_features = arguments.sizes(caller, "out_features", out_features)
        self.axis = arguments.axes(caller, "axis", axis)
        if not isinstance(batch_axis, Mapping):
            raise TypeError(
                f"{caller}: batch_axis is {checks.brief(batch_axis)}, but it is a mapping from "
                "the first axes to their sizes, such as {0: 8}."
            )
        arguments.axes(caller, "batch_axis", tuple(batch_axis))
        if batch_axis:
            arguments.sizes(caller, "batch_axis", tuple(batch_axis.values()))
        self.batch_axis: Mapping[int, int] = FrozenDict(batch_axis)
        if len(self.in_features) != len(self.axis):
            raise ValueError(
                f"QuantizedLinearGeneral: in_features is {self.in_features} and axis {self.axis}, "
                "but each axis has one size; give as many of them."
            )
        with checks.within(caller):
            check_batch(tuple(self.batch_axis))
        axes = self._axes
        weight = kernel_init(rngs.params(), axes.flat_shape, param_dtype)
        if not isinstance(weight, nnx.Variable):
            shape = (*axes.batch, *axes.contracted, *axes.features)
            # The arrays in its place are moved, not the kernel.
            options = {"eager_sharding": False, **kernel_metadata}
            weight = nnx.Param(_reshaped(weight, shape), **options)
        self._store(weight, format, shards)
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            shape = (*axes.batch, *axes.features)
            bias = bias_init(rngs.params(), (math.prod(shape),), param_dtype)
            self.bias = nnx.Param(_reshaped(bias, shape), **bias_metadata)
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    @classmethod
    def from_linear_general(
        cls,
        linear: nnx.LinearGeneral,
        format: Format | str,
        shards: Shards = (1, 1),
        activation_dtype: Any = None,
    ) -> "QuantizedLinearGeneral":
        """The layer that quantizes the kernel of `linear` and shares its bias variable.

        An abstract layer, made under `nnx.eval_shape`, gives an abstract one. Sharding metadata of
        the kernel goes over to its arrays; of several axes that make k or n, that of the first.

        **Raises:** `TypeError` if `linear` is no `nnx.LinearGeneral`, or of a subclass,
        `ValueError` if it sets a `dot_general`, `dot_general_cls` or `precision`, which the
        quantized product does not have, and where `jaxlowbit.quantize` raises.

        ```python
        attention.out = QuantizedLinearGeneral.from_linear_general(attention.out, INT4)
        ```
        """
        check_linear_general(linear)
        layer = cls(
            linear.in_features,
            linear.out_features,
            format=format,
            shards=shards,
            activation_dtype=activation_dtype,
            axis=linear.axis,
            batch_axis=linear.batch_axis,
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
    def _axes(self) -> KernelAxes:
        batch = tuple(self.batch_axis[axis] for axis in range(len(self.batch_axis)))
        return KernelAxes(batch, self.in_features, self.out_features)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self._axes.matrix_shape

    def matrix(self, weight: Any) -> Any:
        return self._axes.matrix(weight)

    def matrix_entries(self, entries: Entries) -> Entries:
        return self._axes.matrix_entries(entries)

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        """Returns the product over `axis`, of shape (*batch, *rows, *out_features), plus the bias.

        `out_sharding` is that of the result, on a mesh with Explicit axes.
        """
        axes, caller = self._axes, type(self).__name__
        inputs = arguments.activations(caller, "inputs", inputs)
        kernel = self._single_kernel(ndim=2 + len(axes.batch))
        bias = None if self.bias is None else self.bias.get_value()
        like = stand_in(kernel, self.param_dtype)

        def product(inputs: Array, operands: Any) -> Array:
            kernel, bias = operands
            contracted = positions(self.axis, inputs.ndim)
            return axes.multiply(
                inputs,
                kernel,
                range(len(axes.batch)),
                contracted,
                self.preferred_element_type,
                bias,
                self.activation_dtype,
            )

        with checks.within(caller, lhs="inputs", rhs="the kernel"):
            inputs, _, bias = self.promote_dtype((inputs, like, bias), dtype=self.dtype)
            return place(product, inputs, (kernel, bias), out_sharding)


def _reshaped(initial: Any, shape: tuple[int, ...]) -> Any:
    """What an initialiser made, perhaps with metadata, in the shape that the metadata names."""
    if isinstance(initial, nnx.VariableMetadata):
        return dataclasses.replace(initial, raw_value=initial.raw_value.reshape(shape))
    return initial.reshape(shape)


def check_linear_general(layer: Any) -> None:
    """Refuses a layer that `QuantizedLinearGeneral` cannot stand in for."""
    defaults = {"dot_general": None, "dot_general_cls": None, "precision": None}
    name = "QuantizedLinearGeneral.from_linear_general"
    check_replaceable(layer, nnx.LinearGeneral, name, defaults)
