"""`QuantizedEinsum`: `nnx.Einsum` with a quantized kernel."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import Array

from .._core import checks
from .._core.format import Format
from . import arguments
from .equation import Equation
from .kernel_axes import place
from .nnx_linear import default_bias_init, default_kernel_init
from .nnx_variables import QuantizedModule, check_replaceable
from .sharding import Entries
from .weights import Shards, stand_in


class QuantizedEinsum(QuantizedModule):
    """`nnx.Einsum` with a quantized kernel, for equations that multiply the inputs by matrices.

    The kernel is one matrix (*batch, k, n): its letters that inputs and result share are batch
    axes, k is the product of those that only the inputs have, n of those that only the result
    has, and each letter is one of these. Groups run along k. The kernel's arrays are the variables
    of `QuantizedLinear`, `kernel` is the `QuantizedArray` they form, and the bias remains an
    `nnx.Param`.

    **Arguments:** those of `nnx.Einsum`, without `precision` and `einsum_op`, and

    - `format`: a `Format`, or its name. The kernel is initialised in `param_dtype`, then quantized;
      its scales have `param_dtype`: float32, bfloat16 or float16.
    - `shards`: the number of equal parts of k and n into which devices will cut the kernel, as for
      `jaxlowbit.quantize`.
    - `activation_dtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, to which each call quantizes
      its inputs, as that of `jaxlowbit.quantized_matmul`.

    **Raises:** `ValueError` where `jaxlowbit.quantize` does, and for other equations.

    ```python
    layer = QuantizedEinsum("btd,dnh->btnh", (256, 4, 64), format=INT4, rngs=nnx.Rngs(0))
    y = layer(jnp.ones((2, 8, 256)))
    ```
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: tuple[int, ...],
        bias_shape: tuple[int, ...] | None = None,
        *,
        format: Format | str,
        shards: Shards = (1, 1),
        activation_dtype: Any = None,
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
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            preferred_element_type=preferred_element_type,
        )
        self.kernel_shape = arguments.sizes(caller, "kernel_shape", kernel_shape)
        if bias_shape is not None:
            bias_shape = arguments.sizes(caller, "bias_shape", bias_shape)
        with checks.within(caller):
            # Refuses an equation before anything is computed.
            shape = Equation.parse(einsum_str, self.kernel_shape).kernel_shape
        self.einsum_str = einsum_str.replace(" ", "")
        weight = kernel_init(rngs.params(), shape, param_dtype)
        if not isinstance(weight, nnx.Variable):
            weight = nnx.Param(weight, **kernel_metadata)
        self._store(weight, format, shards)
        self.bias: nnx.Param | None = nnx.data(None)
        if bias_shape is not None:
            bias = bias_init(rngs.params(), bias_shape, param_dtype)
            self.bias = nnx.Param(bias, **bias_metadata)
        self.bias_shape = bias_shape
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    @classmethod
    def from_einsum(
        cls,
        einsum: nnx.Einsum,
        format: Format | str,
        shards: Shards = (1, 1),
        activation_dtype: Any = None,
    ) -> "QuantizedEinsum":
        """The layer that quantizes the kernel of `einsum` and shares its bias variable.

        An abstract layer, made under `nnx.eval_shape`, gives an abstract one. Sharding metadata of
        the kernel goes over to its arrays; of several axes that make k or n, that of the first.

        **Raises:** `TypeError` if `einsum` is no `nnx.Einsum`, or of a subclass, `ValueError` if it
        sets an `einsum_op` or `precision`, which the quantized product does not have, for an
        equation that is no product with matrices, and where `jaxlowbit.quantize` raises.

        ```python
        model.query = QuantizedEinsum.from_einsum(model.query, INT4)
        ```
        """
        check_einsum(einsum)
        layer = cls(
            einsum.einsum_str,
            tuple(einsum.kernel_shape),
            format=format,
            shards=shards,
            activation_dtype=activation_dtype,
            dtype=einsum.dtype,
            param_dtype=einsum.param_dtype,
            kernel_init=lambda *_: einsum.kernel,
            promote_dtype=einsum.promote_dtype,
            preferred_element_type=einsum.preferred_element_type,
            rngs=nnx.Rngs(0),
        )
        layer.bias_shape = einsum.bias_shape
        layer.bias = einsum.bias
        return layer

    @property
    def _equation(self) -> Equation:
        return Equation.parse(self.einsum_str, self.kernel_shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self._equation.axes.matrix_shape

    def matrix(self, weight: Any) -> Any:
        return self._equation.axes.matrix(weight)

    def matrix_entries(self, entries: Entries) -> Entries:
        return self._equation.axes.matrix_entries(entries)

    def __call__(
        self, inputs: Any, einsum_str: str | None = None, out_sharding: Any = None
    ) -> Array:
        """Returns the result of the equation, plus the bias.

        `einsum_str` may name the axes of the inputs and the result otherwise, but not change the
        part of each axis of the kernel, which is packed by that. `out_sharding` is that of the
        result, on a mesh with Explicit axes.
        """
        caller = type(self).__name__
        inputs = arguments.activations(caller, "inputs", inputs)
        equation = self._equation
        axes = equation.axes
        if einsum_str is not None:
            with checks.within(caller):
                equation = Equation.parse(einsum_str, self.kernel_shape)
        if equation.axes != axes:
            raise ValueError(
                f"QuantizedEinsum: the kernel is packed for the equation {self.einsum_str!r}, and "
                f"{einsum_str!r} would sum it over other axes; make a layer for each."
            )
        kernel = self._single_kernel(ndim=2 + len(axes.batch))
        bias = None if self.bias is None else self.bias.get_value()
        like = stand_in(kernel, self.param_dtype)

        def product(inputs: Array, operands: Any) -> Array:
            kernel, bias = operands
            dtype = self.preferred_element_type
            return equation.multiply(inputs, kernel, dtype, bias, self.activation_dtype)

        with checks.within(caller, lhs="inputs", rhs="the kernel"):
            inputs, _, bias = self.promote_dtype((inputs, like, bias), dtype=self.dtype)
            return place(product, inputs, (kernel, bias), out_sharding)


def check_einsum(layer: Any) -> None:
    """Refuses a layer that `QuantizedEinsum` cannot stand in for."""
    defaults = {"einsum_op": jnp.einsum, "precision": None}
    check_replaceable(layer, nnx.Einsum, "QuantizedEinsum.from_einsum", defaults)
    Equation.parse(layer.einsum_str, layer.kernel_shape)
