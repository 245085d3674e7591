"""The NNX layers: `QuantizedLinear`, `QuantizedLinearGeneral`, `QuantizedEinsum`, `QuantizedEmbed`.

`QuantizedModule` has a packed weight, the matrix of an `Equation`. `QuantizedLayer` multiplies by
it, and each of the four classes adds the arguments of the Flax layer that it replaces.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict
from flax.nnx.nn import dtypes, initializers
from jax import Array

from .._core import checks
from .._core.format import Format
from . import arguments
from .equation import TABLE, Equation, check_batch, place, positions
from .input_factors import lookup
from .nnx_variables import QuantizedModule
from .weights import Shards, stand_in

default_kernel_init = initializers.lecun_normal()
default_bias_init = initializers.zeros_init()
default_embed_init = initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class QuantizedLayer(QuantizedModule):
    """A layer that replaces a layer of Flax.

    - `float_layer`: the class that it replaces.
    - `weight_name`: the name of the weight there.
    - `constructor`: the name of the class method that replaces a float layer.
    - `unsupported`: options that a quantized product does not support, with their neutral values.
    """

    float_layer: ClassVar[Any]
    weight_name: ClassVar[str] = "kernel"
    constructor: ClassVar[str]
    unsupported: ClassVar[Mapping[str, Any]] = {}
    bias: nnx.Param | None
    param_dtype: Any
    promote_dtype: Callable[..., Any]
    preferred_element_type: Any = None

    def _set_options(self, lhs_qtype: Any, **options: Any) -> None:
        """Checks the options and, except for initializers, sets them as attributes."""
        caller = type(self).__name__
        self.lhs_qtype = arguments.lhs_qtype(caller, lhs_qtype)
        arguments.check_options(caller, options)
        for name, value in options.items():
            if not name.endswith("_init"):
                setattr(self, name, value)

    @classmethod
    def check_layer(cls, layer: Any) -> None:
        """Raises unless this class can replace a float layer, by its class, options and
        equation."""
        kind, name = cls.float_layer.__name__, f"{cls.__name__}.{cls.constructor}"
        if type(layer) is not cls.float_layer:
            raise TypeError(
                f"{name}: the layer is {type(layer).__name__}, but an nnx.{kind} "
                "is needed, and no subclass, which may compute something else; build a "
                f"{cls.__name__} instead."
            )
        for option, default in cls.unsupported.items():
            if getattr(layer, option) is not default:
                raise ValueError(
                    f"{name}: the layer has {option}={getattr(layer, option)!r}, but a quantized "
                    "product, accumulated in float32, has no such choice; build the layer without "
                    f"{option}."
                )
        cls.equation_of(layer)

    @classmethod
    def from_layer(
        cls, layer: Any, format: Format | str, shards: Shards = (1, 1), lhs_qtype: Any = None
    ) -> Self:
        """Quantizes the weight of a float layer, and shares its bias."""
        cls.check_layer(layer)
        weight = getattr(layer, cls.weight_name)
        bias = {name for name in ("bias", "use_bias", "bias_shape") if hasattr(layer, name)}
        named = inspect.signature(cls.__init__).parameters.keys()
        options = {name: getattr(layer, name) for name in named - bias if hasattr(layer, name)}
        if "use_bias" in named:
            options["use_bias"] = False  # no bias is made; the one of the layer is shared
        options[f"{cls.weight_name}_init"] = lambda *_: weight
        options |= {"format": format, "shards": shards, "lhs_qtype": lhs_qtype}
        options["rngs"] = nnx.Rngs(0)
        new = cls(**options)
        for name in bias:
            setattr(new, name, getattr(layer, name))
        return new

    def _multiply(
        self, inputs: Array, equation: Equation, out_sharding: Any, *bias: Any, name: str = "inputs"
    ) -> Array:
        """Computes an equation after promotion. `name` is the argument name of the inputs."""
        kernel = self._single_kernel()
        like = stand_in(kernel, self.param_dtype)

        def product(inputs: Array, operands: Any) -> Array:
            kernel, factor, *bias = operands
            return equation.multiply(
                inputs,
                kernel,
                *bias,
                lhs_factor=factor,
                lhs_qtype=self.lhs_qtype,
                preferred_element_type=self.preferred_element_type,
            )

        with checks.within(type(self).__name__, lhs=name, rhs=f"the {self.weight_name}"):
            inputs, _, *added = self.promote_dtype((inputs, like, *bias), dtype=self.dtype)
            return place(product, inputs, (kernel, self.factor, *added), out_sharding)

    def _bias(self) -> Array | None:
        return None if self.bias is None else self.bias.get_value()


class QuantizedLinear(QuantizedLayer):
    """`nnx.Linear` with a quantized kernel: `inputs @ kernel.dequantize() + bias`.

    The kernel's arrays are the variables `packed`, `scale`, `zero` (None if the format has no
    zeros), `permutation` (None unless a weight with permuted rows is assigned) and `version`;
    `kernel` returns them as a `QuantizedArray`. The bias remains an `nnx.Param`.

    **Arguments:** as `nnx.Linear`, and

    - `format`: a `Format`, or its name. The kernel is initialized in `param_dtype`, then quantized;
      its scales have `param_dtype`: float32, bfloat16 or float16.
    - `shards`: the numbers of shards of k and n if devices share the kernel, as in
      `jaxlowbit.quantize`.
    - `lhs_qtype`: `jnp.int8` or `jnp.float8_e4m3fn` to quantize the inputs in each call, as
      in `jaxlowbit.quantized_matmul`, or None.
    - `preferred_element_type`: dtype of the product: float32, or None for the dtype of the promoted
      inputs.

    The arrays inherit the sharding metadata of the kernel, from `nnx.with_partitioning` or
    `kernel_metadata`, so `nnx.get_partition_spec` returns the sharding of each.

    **Raises:** `ValueError` if `jaxlowbit.quantize` does.

    ```python
    layer = QuantizedLinear(256, 512, format=INT4, rngs=nnx.Rngs(0))
    y = layer(jnp.ones((8, 256)))
    ```
    """

    float_layer = nnx.Linear
    constructor = "from_linear"
    unsupported: ClassVar = {"dot_general": jax.lax.dot_general, "precision": None}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        format: Format | str,
        shards: Shards = (1, 1),
        lhs_qtype: Any = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = default_kernel_init,
        bias_init: Callable[..., Any] = default_bias_init,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        preferred_element_type: Any = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
    ):
        caller = type(self).__name__
        self.in_features = arguments.size(caller, "in_features", in_features)
        self.out_features = arguments.size(caller, "out_features", out_features)
        self._set_options(
            lhs_qtype,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            preferred_element_type=preferred_element_type,
        )
        weight = kernel_init(rngs.params(), (self.in_features, self.out_features), param_dtype)
        self._store(_variable(weight, kernel_metadata), format, shards)
        self.bias = nnx.data(None)
        if use_bias:
            bias = bias_init(rngs.params(), (self.out_features,), param_dtype)
            self.bias = nnx.Param(bias, **bias_metadata)

    @classmethod
    def from_linear(
        cls,
        linear: nnx.Linear,
        format: Format | str,
        shards: Shards = (1, 1),
        lhs_qtype: Any = None,
    ) -> "QuantizedLinear":
        """Makes a layer with the quantized kernel of `linear` and its bias variable, which both
        share.

        An abstract layer, made under `nnx.eval_shape`, gives an abstract one. The arrays inherit
        the sharding metadata of the kernel.

        **Raises:** `TypeError` unless the class of `linear` is `nnx.Linear`; `ValueError` if it
        sets a `dot_general` or `precision`, which quantized products do not support, if
        `jaxlowbit.quantize` raises, and for a kernel whose sharding `shards` do not match.

        ```python
        model.head = QuantizedLinear.from_linear(model.head, INT4)
        ```
        """
        return cls.from_layer(linear, format, shards, lhs_qtype)

    @staticmethod
    def equation_of(layer: Any) -> Equation:
        return Equation.general((layer.in_features,), (layer.out_features,))

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        """Returns `inputs @ kernel.dequantize() + bias`, for any leading axes of `inputs`.

        `out_sharding` is the sharding of the result, on a mesh with Explicit axes.
        """
        caller = type(self).__name__
        inputs = arguments.activations(caller, "inputs", inputs)
        arguments.check_width(caller, "inputs", inputs, self._single_kernel().k)
        return self._multiply(inputs, self._equation, out_sharding, self._bias())


class QuantizedLinearGeneral(QuantizedLayer):
    """`nnx.LinearGeneral` with a quantized kernel, which is one matrix (*batch, k, n).

    k is the product of `in_features`, n the product of `out_features`; groups run along k, whose
    last axis varies fastest. The kernel's arrays are variables as in `QuantizedLinear`, and
    `kernel` returns them as a `QuantizedArray`. The bias, of shape (*batch, *out_features), remains
    an `nnx.Param`.

    **Arguments:** as `nnx.LinearGeneral`, without `precision`, `dot_general` and
    `dot_general_cls`, and `format`, `shards` and `lhs_qtype` as in `QuantizedLinear`.

    **Raises:** `ValueError` if `jaxlowbit.quantize` does, and for axes that do not match the
    inputs.

    ```python
    layer = QuantizedLinearGeneral((4, 64), 512, axis=(-2, -1), format=INT4, rngs=nnx.Rngs(0))
    y = layer(jnp.ones((8, 4, 64)))
    ```
    """

    float_layer = nnx.LinearGeneral
    constructor = "from_linear_general"
    unsupported: ClassVar = {"dot_general": None, "dot_general_cls": None, "precision": None}

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        format: Format | str,
        shards: Shards = (1, 1),
        lhs_qtype: Any = None,
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
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
    ):
        self._set_axes(in_features, out_features, axis, batch_axis)
        self._set_options(
            lhs_qtype,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            preferred_element_type=preferred_element_type,
        )
        equation = self._equation
        weight = kernel_init(rngs.params(), equation.flat_shape, param_dtype)
        # The packed arrays are moved to their devices, not the kernel.
        metadata = {"eager_sharding": False, **kernel_metadata}
        weight = _variable(_reshaped(weight, equation.kernel_shape), metadata)
        self._store(weight, format, shards)
        self.bias = nnx.data(None)
        if use_bias:
            shape = equation.bias_shape
            bias = bias_init(rngs.params(), (math.prod(shape),), param_dtype)
            self.bias = nnx.Param(_reshaped(bias, shape), **bias_metadata)

    def _set_axes(self, in_features: Any, out_features: Any, axis: Any, batch_axis: Any) -> None:
        caller = type(self).__name__
        self.in_features = arguments.sizes(caller, "in_features", in_features)
        self.out_features = arguments.sizes(caller, "out_features", out_features)
        self.axis = arguments.axes(caller, "axis", axis)
        if not isinstance(batch_axis, Mapping):
            raise TypeError(
                f"{caller}: batch_axis is {checks.brief(batch_axis)}, but it must be a mapping "
                "from the first axes to their sizes, such as {0: 8}."
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

    @classmethod
    def from_linear_general(
        cls,
        linear: nnx.LinearGeneral,
        format: Format | str,
        shards: Shards = (1, 1),
        lhs_qtype: Any = None,
    ) -> "QuantizedLinearGeneral":
        """Makes a layer with the quantized kernel of `linear` and its bias variable, which both
        share.

        Like `QuantizedLinear.from_linear`. If k or n has several axes, the first gives the
        sharding.

        **Raises:** `TypeError` unless the class of `linear` is `nnx.LinearGeneral`; `ValueError` if
        it sets a `dot_general`, `dot_general_cls` or `precision`, which quantized products do not
        support, and if `jaxlowbit.quantize` raises.

        ```python
        attention.out = QuantizedLinearGeneral.from_linear_general(attention.out, INT4)
        ```
        """
        return cls.from_layer(linear, format, shards, lhs_qtype)

    @staticmethod
    def equation_of(layer: Any) -> Equation:
        batch = tuple(layer.batch_axis[axis] for axis in range(len(layer.batch_axis)))
        return Equation.general(layer.in_features, layer.out_features, batch)

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        """Returns the product over `axis`, of shape (*batch, *rows, *out_features), plus the bias.

        `out_sharding` is the sharding of the result, on a mesh with Explicit axes.
        """
        caller = type(self).__name__
        inputs = arguments.activations(caller, "inputs", inputs)
        with checks.within(caller):
            own = self._equation
            contracted = positions(self.axis, inputs.ndim)
            sizes = (own.contracted, own.features, own.batch)
            equation = Equation.general(*sizes, contracted, inputs.ndim)
        return self._multiply(inputs, equation, out_sharding, self._bias())


class QuantizedEinsum(QuantizedLayer):
    """`nnx.Einsum` with a quantized kernel, for equations that multiply the inputs by matrices.

    The kernel is one matrix (*batch, k, n). A letter of the kernel is a batch axis if inputs and
    result have it, part of k if only the inputs have it, and part of n if only the result has it.
    Groups run along k. The kernel's arrays are variables as in `QuantizedLinear`, and `kernel`
    returns them as a `QuantizedArray`. The bias remains an `nnx.Param`.

    **Arguments:** as `nnx.Einsum`, without `precision` and `einsum_op`, and `format`,
    `shards` and `lhs_qtype` as in `QuantizedLinear`.

    **Raises:** `ValueError` if `jaxlowbit.quantize` does, and for other equations.

    ```python
    layer = QuantizedEinsum("btd,dnh->btnh", (256, 4, 64), format=INT4, rngs=nnx.Rngs(0))
    y = layer(jnp.ones((2, 8, 256)))
    ```
    """

    float_layer = nnx.Einsum
    constructor = "from_einsum"
    unsupported: ClassVar = {"einsum_op": jnp.einsum, "precision": None}

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: tuple[int, ...],
        bias_shape: tuple[int, ...] | None = None,
        *,
        format: Format | str,
        shards: Shards = (1, 1),
        lhs_qtype: Any = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = default_kernel_init,
        bias_init: Callable[..., Any] = default_bias_init,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        preferred_element_type: Any = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
    ):
        caller = type(self).__name__
        self.kernel_shape = arguments.sizes(caller, "kernel_shape", kernel_shape)
        if bias_shape is not None:
            bias_shape = arguments.sizes(caller, "bias_shape", bias_shape)
        self.bias_shape = bias_shape
        with checks.within(caller):
            Equation.parse(einsum_str, self.kernel_shape)
        self.einsum_str = einsum_str.replace(" ", "")
        self._set_options(
            lhs_qtype,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            preferred_element_type=preferred_element_type,
        )
        weight = kernel_init(rngs.params(), self.kernel_shape, param_dtype)
        self._store(_variable(weight, kernel_metadata), format, shards)
        self.bias = nnx.data(None)
        if bias_shape is not None:
            bias = bias_init(rngs.params(), bias_shape, param_dtype)
            self.bias = nnx.Param(bias, **bias_metadata)

    @classmethod
    def from_einsum(
        cls,
        einsum: nnx.Einsum,
        format: Format | str,
        shards: Shards = (1, 1),
        lhs_qtype: Any = None,
    ) -> "QuantizedEinsum":
        """Makes a layer with the quantized kernel of `einsum` and its bias variable, which both
        share.

        Like `QuantizedLinear.from_linear`. If k or n has several axes, the first gives the
        sharding.

        **Raises:** `TypeError` unless the class of `einsum` is `nnx.Einsum`; `ValueError` if it
        sets an `einsum_op` or `precision`, which quantized products do not support, for an equation
        that is not a product with matrices, and if `jaxlowbit.quantize` raises.

        ```python
        model.query = QuantizedEinsum.from_einsum(model.query, INT4)
        ```
        """
        return cls.from_layer(einsum, format, shards, lhs_qtype)

    @staticmethod
    def equation_of(layer: Any) -> Equation:
        return Equation.parse(layer.einsum_str, layer.kernel_shape)

    def __call__(
        self, inputs: Any, einsum_str: str | None = None, out_sharding: Any = None
    ) -> Array:
        """Returns the result of the equation, plus the bias.

        `einsum_str` may rename axes of the inputs and the result, but each axis of the kernel must
        stay a batch axis, contracted or a feature, since the kernel is packed for that.
        `out_sharding` is the sharding of the result, on a mesh with Explicit axes.
        """
        caller, equation = type(self).__name__, self._equation
        inputs = arguments.activations(caller, "inputs", inputs)
        if einsum_str is not None:
            with checks.within(caller):
                equation = Equation.parse(einsum_str, self.kernel_shape)
            if equation.layout != self._equation.layout:
                raise ValueError(
                    f"QuantizedEinsum: the kernel is packed for the equation {self.einsum_str!r}, "
                    f"and {einsum_str!r} would sum it over other axes; make a layer for each."
                )
        return self._multiply(inputs, equation, out_sharding, self._bias())


class QuantizedEmbed(QuantizedLayer):
    """`nnx.Embed` with a quantized table, for lookups and for products (`attend`).

    The table is packed as a matrix (features, num_embeddings) with groups along the features, so
    `attend` is a quantized product and a lookup dequantizes only the columns of its tokens. The
    table's arrays are variables as in `QuantizedLinear`, and `kernel` returns them as a
    `QuantizedArray`.

    **Arguments:** as `nnx.Embed`, and `format`, `shards` (of the matrix) and
    `lhs_qtype` (of the queries of `attend`) as in `QuantizedLinear`.

    **Raises:** `ValueError` if `jaxlowbit.quantize` does.

    ```python
    embed = QuantizedEmbed(1000, 256, format=INT4, rngs=nnx.Rngs(0))
    logits = embed.attend(embed(jnp.array([3, 1, 4])))
    ```
    """

    float_layer = nnx.Embed
    weight_name = "embedding"
    constructor = "from_embed"

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        format: Format | str,
        shards: Shards = (1, 1),
        lhs_qtype: Any = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: Callable[..., Any] = default_embed_init,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        embedding_metadata: Mapping[str, Any] = _NO_METADATA,
    ):
        caller = type(self).__name__
        self.num_embeddings = arguments.size(caller, "num_embeddings", num_embeddings)
        self.features = arguments.size(caller, "features", features)
        self._set_options(
            lhs_qtype,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=embedding_init,
            promote_dtype=promote_dtype,
        )
        table = embedding_init(rngs.params(), (self.num_embeddings, self.features), param_dtype)
        self._store(_variable(table, embedding_metadata), format, shards)
        self.dtype = dtype or stand_in(self.kernel, param_dtype).dtype

    @classmethod
    def from_embed(
        cls,
        embed: nnx.Embed,
        format: Format | str,
        shards: Shards = (1, 1),
        lhs_qtype: Any = None,
    ) -> "QuantizedEmbed":
        """Makes a layer with the quantized table of `embed`, like `QuantizedLinear.from_linear`.

        **Raises:** `TypeError` unless the class of `embed` is `nnx.Embed`, `ValueError` if
        `jaxlowbit.quantize` raises.

        ```python
        model.embed = QuantizedEmbed.from_embed(model.embed, INT8)
        ```
        """
        return cls.from_layer(embed, format, shards, lhs_qtype)

    @staticmethod
    def equation_of(layer: Any) -> Equation:
        return Equation.parse(TABLE, (layer.num_embeddings, layer.features))

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        """Returns the embeddings (..., features) of tokens (...), integers.

        Negative tokens count from the end of the table, and tokens beyond the table give NaN, as in
        `nnx.Embed`. `out_sharding` is the sharding of the result, on a mesh with Explicit axes.
        """
        table = self._single_kernel()
        like = stand_in(table, self.param_dtype)
        (like,) = self.promote_dtype((like,), dtype=self.dtype, inexact=False)

        def look(inputs: Any, operands: Any) -> Array:
            table, factor = operands
            return lookup(table, inputs, like.dtype, factor)

        tokens = arguments.tokens(inputs)
        with checks.within(type(self).__name__, lhs="inputs", rhs="the table"):
            return place(look, tokens, (table, self.factor), out_sharding)

    def attend(self, query: Any, out_sharding: Any = None) -> Array:
        """Returns the products (..., num_embeddings) of queries (..., features) with the table.

        `out_sharding` is the sharding of the result, on a mesh with Explicit axes.
        """
        caller = type(self).__name__
        query = arguments.activations(caller, "query", query)
        arguments.check_width(caller, "query", query, self._single_kernel().k)
        return self._multiply(query, self._equation, out_sharding, name="query")


def _variable(weight: Any, metadata: Mapping[str, Any]) -> nnx.Variable:
    """The result of an initialiser as a variable; a float layer already has a variable."""
    return weight if isinstance(weight, nnx.Variable) else nnx.Param(weight, **metadata)


def _reshaped(initial: Any, shape: tuple[int, ...]) -> Any:
    """The result of an initialiser, perhaps with metadata, in the shape of the metadata."""
    if isinstance(initial, nnx.Variable):
        return initial
    if isinstance(initial, nnx.VariableMetadata):
        return dataclasses.replace(initial, raw_value=initial.raw_value.reshape(shape))
    return initial.reshape(shape)
