"""`QuantizedLinearGeneral`: `nnx.LinearGeneral` with a quantized kernel."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict
from flax.nnx.nn import dtypes
from jax import Array

from .._core.format import Format
from .kernel_axes import KernelAxes, as_tuple, check_batch, place, positions
from .nnx_linear import default_bias_init, default_kernel_init
from .nnx_variables import QuantizedModule, check_replaceable
from .sharding import Entries
from .weights import Shards


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
    ):
        self.in_features = as_tuple(in_features)
        self.out_features = as_tuple(out_features)
        self.axis = as_tuple(axis)
        self.batch_axis: Mapping[int, int] = FrozenDict(batch_axis)
        if len(self.in_features) != len(self.axis):
            raise ValueError(
                f"QuantizedLinearGeneral: in_features is {self.in_features} and axis {self.axis}, "
                "but each axis has one size; give as many of them."
            )
        check_batch(tuple(self.batch_axis))
        axes = self._axes
        weight = kernel_init(rngs.params(), axes.flat_shape, param_dtype)
        if not isinstance(weight, nnx.Variable):
            # Metadata names the axes of the kernel, which is flat here and cannot be moved by it.
            weight = nnx.Param(weight, eager_sharding=False)
        self._store(weight, format, shards)
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            shape = (*axes.batch, *axes.features)
            self.bias = nnx.Param(
                bias_init(rngs.params(), (math.prod(shape),), param_dtype).reshape(shape)
            )
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    @classmethod
    def from_linear_general(
        cls, linear: nnx.LinearGeneral, format: Format | str, shards: Shards = (1, 1)
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
        axes = self._axes
        kernel = self._single_kernel(ndim=2 + len(axes.batch))
        bias = None if self.bias is None else self.bias.get_value()
        # The scale stands in for the kernel, whose dtype it has.
        inputs, _, bias = self.promote_dtype((inputs, kernel.scale, bias), dtype=self.dtype)
        contracted = positions(self.axis, inputs.ndim)

        def product(inputs: Array, operands: Any) -> Array:
            kernel, bias = operands
            batch, dtype = range(len(axes.batch)), self.preferred_element_type
            return axes.multiply(inputs, kernel, batch, contracted, dtype, bias)

        return place(product, inputs, (kernel, bias), out_sharding)


def check_linear_general(layer: Any) -> None:
    """Refuses a layer that `QuantizedLinearGeneral` cannot stand in for."""
    defaults = {"dot_general": None, "dot_general_cls": None, "precision": None}
    name = "QuantizedLinearGeneral.from_linear_general"
    check_replaceable(layer, nnx.LinearGeneral, name, defaults)
