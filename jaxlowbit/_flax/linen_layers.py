"""The Linen layers, and the functions that replace calls of float layers.

`QuantizedDense`, `QuantizedDenseGeneral` and `QuantizedEinsum` multiply by the matrix of an
`Equation`, made from their fields and inputs. `QuantizedEmbed` also looks up.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes
from jax import Array

from .._core import checks
from .._core.array import QuantizedArray
from .._core.format import Format
from . import arguments
from .einsum_layers import EinsumLayer, EinsumParameter
from .equation import TABLE, Equation, as_tuple, check_batch, positions
from .input_factors import lookup, multiply
from .linen_variables import QueryWidthError, factor_of, initialise, kernel_of, packing_of
from .weights import Packing, Path, Shards, stand_in


def _multiply(
    layer: Any,
    packing: Packing,
    equation: Equation,
    inputs: Array,
    bias: Array | None,
    weight: str | None = None,
) -> Array:
    """Multiplies inputs by the stored kernel of a layer, which may be a float layer."""
    kernel = kernel_of(layer, packing, equation, weight)
    factor = factor_of(layer, packing, weight)
    like = stand_in(kernel, getattr(layer, "param_dtype", None))
    promote = getattr(layer, "promote_dtype", dtypes.promote_dtype)
    with checks.within(type(layer).__name__, lhs="inputs", rhs="the kernel"):
        inputs, _, bias = promote(inputs, like, bias, dtype=getattr(layer, "dtype", None))
        return equation.multiply(
            inputs,
            kernel,
            bias,
            lhs_factor=factor,
            lhs_qtype=packing.lhs_qtype,
            preferred_element_type=getattr(layer, "preferred_element_type", None),
        )


class _Product(nn.Module):
    """Base class of layers that multiply; subclasses define the fields."""

    _flat = True  # initializers get the shapes that Flax passes, or flat ones

    @staticmethod
    def equation_of(layer: Any, shape: tuple[int, ...]) -> Equation:
        """The equation of a layer, which may be a float layer, for inputs of `shape`."""
        raise NotImplementedError

    @nn.compact
    def __call__(self: Any, inputs: Any) -> Array:
        """Returns the product of the inputs with the kernel, plus the bias."""
        packing = packing_of(self)
        inputs = arguments.activations(type(self).__name__, "inputs", inputs)
        equation = self.equation_of(self, inputs.shape)
        shape = equation.flat_shape if self._flat else equation.kernel_shape
        features = equation.bias_shape

        def weight() -> Any:
            return self.kernel_init(self.make_rng("params"), shape, self.param_dtype)

        def init(key: Any) -> Any:
            if not self._flat or len(features) == 1:
                return self.bias_init(key, features, self.param_dtype)
            return self.bias_init(key, (math.prod(features),), self.param_dtype).reshape(features)

        initialise(self, packing, weight, equation)
        bias = self.param("bias", init) if self.use_bias else None
        return _multiply(self, packing, equation, inputs, bias)


class QuantizedDense(_Product):
    """`nn.Dense` with a quantized kernel: `inputs @ kernel.dequantize() + bias`.

    The kernel's arrays are variables of the collection `"quantized"`: `packed`, `scale`, `zero` (if
    the format has zeros), `permutation` (if a weight with permuted rows is assigned), `version` and
    `padding` (unless k and n are multiples of 64). Gradients and optimizers of `params` therefore
    skip the integers. The bias remains in `params`.

    **Arguments:** as `nn.Dense`, without `precision` and `dot_general`, and

    - `format`: a `Format`, or its name. The kernel is initialized in `param_dtype`, then quantized;
      its scales have `param_dtype`: float32, bfloat16 or float16.
    - `shards`: the numbers of shards of k and n if devices share the kernel, as in
      `jaxlowbit.quantize`.
    - `lhs_qtype`: `jnp.int8` or `jnp.float8_e4m3fn` to quantize the inputs in each call, as
      in `jaxlowbit.quantized_matmul`, or None.

    **Raises:** `ValueError` if `jaxlowbit.quantize` does, and if applied to variables without a
    kernel or with a kernel of other sizes.

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
    lhs_qtype: Any = None

    @staticmethod
    def equation_of(layer: Any, shape: tuple[int, ...]) -> Equation:
        caller = type(layer).__name__
        features = arguments.size(caller, "features", layer.features)
        arguments.check_axes(caller, "inputs", shape)
        return Equation.general(shape[-1:], (features,))


class QuantizedDenseGeneral(_Product):
    """`nn.DenseGeneral` with a quantized kernel, which is one matrix (*batch, k, n).

    k is the product of the sizes of the inputs along `axis`, n the product of `features`; groups
    run along k, whose last axis varies fastest. A call returns the product of shape
    (*batch, *rows, *features), plus the bias. The kernel's arrays are variables of the collection
    `"quantized"`, as in `QuantizedDense`; the bias remains in `params`.

    **Arguments:** as `nn.DenseGeneral`, without `precision`, `dot_general` and
    `dot_general_cls`, and `format`, `shards` and `lhs_qtype` as in `QuantizedDense`.

    **Raises:** `ValueError` if `jaxlowbit.quantize` does, for axes that the inputs lack, and if
    applied to variables without a kernel or with a kernel of other sizes.

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
    lhs_qtype: Any = None

    @staticmethod
    def equation_of(layer: Any, shape: tuple[int, ...]) -> Equation:
        caller = type(layer).__name__
        batch = arguments.axes(caller, "batch_dims", layer.batch_dims)
        features = arguments.sizes(caller, "features", layer.features)
        axis = arguments.axes(caller, "axis", layer.axis)
        with checks.within(caller):
            check_batch(batch)
            if len(batch) > len(shape):
                raise ValueError(
                    f"batch_dims are {batch}, but inputs have {len(shape)} axes; name axes that "
                    "are there."
                )
            contracted = positions(axis, len(shape))
            sizes = tuple(shape[axis] for axis in contracted)
            lead = shape[: len(batch)]
            return Equation.general(sizes, features, lead, contracted, len(shape))


class QuantizedEinsum(_Product):
    """`nn.Einsum` with a quantized kernel, for equations that multiply the inputs by matrices.

    The kernel is one matrix (*batch, k, n). A letter of the kernel is a batch axis if inputs and
    result have it, part of k if only the inputs have it, and part of n if only the result has it.
    Groups run along k. The kernel's arrays are variables of the collection `"quantized"`, as in
    `QuantizedDense`; the bias remains in `params`.

    **Arguments:** as `nn.Einsum`, without `precision`; `einsum_str` is used in every call;
    and `format`, `shards` and `lhs_qtype` as in `QuantizedDense`.

    **Raises:** `ValueError` if `jaxlowbit.quantize` does, for other equations, and if applied to
    variables without a kernel or with a kernel of other sizes.

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
    lhs_qtype: Any = None

    _flat = False

    @staticmethod
    def equation_of(layer: Any, shape: tuple[int, ...]) -> Equation:
        caller = type(layer).__name__
        with checks.within(caller):
            return Equation.parse(layer.einsum_str, arguments.sizes(caller, "shape", layer.shape))


class QuantizedEmbed(nn.Module):
    """`nn.Embed` with a quantized table, for lookups and for products (`attend`).

    The table is packed as a matrix (features, num_embeddings) with groups along the features, so
    `attend` is a quantized product and a lookup dequantizes only the columns of its tokens. The
    table's arrays are variables of the collection `"quantized"`, as in `QuantizedDense`.

    **Arguments:** as `nn.Embed`, and `format`, `shards` (of the matrix) and
    `lhs_qtype` (of the queries of `attend`) as in `QuantizedDense`.

    **Raises:** `ValueError` if `jaxlowbit.quantize` does, and if applied to variables without a
    table or with a table of other sizes.

    ```python
    layer = QuantizedEmbed(1000, 256, format=INT4)
    variables = layer.init(jax.random.key(0), jnp.array([3, 1, 4]))
    x = layer.apply(variables, jnp.array([3, 1, 4]))
    logits = layer.apply(variables, x, method="attend")
    ```
    """

    num_embeddings: int
    features: int
    format: Format | str
    shards: Shards = (1, 1)
    dtype: Any = None
    param_dtype: Any = jnp.float32
    embedding_init: Callable[..., Any] = nn.linear.default_embed_init
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype
    lhs_qtype: Any = None

    def setup(self) -> None:
        caller = type(self).__name__
        packing = packing_of(self)
        tokens = arguments.size(caller, "num_embeddings", self.num_embeddings)
        shape = (tokens, arguments.size(caller, "features", self.features))

        def table() -> Any:
            return self.embedding_init(self.make_rng("params"), shape, self.param_dtype)

        initialise(self, packing, table, Equation.parse(TABLE, shape))

    def __call__(self, inputs: Any) -> Array:
        """Returns the embeddings (..., features) of tokens (...), integers.

        Negative tokens count from the end of the table, and tokens beyond the table give NaN, as in
        `nn.Embed`.
        """
        return _embed(self, packing_of(self), inputs)

    def attend(self, query: Any) -> Array:
        """Returns the products (..., num_embeddings) of queries (..., features) with the table."""
        return _attend(self, packing_of(self), query)


def _table(layer: Any, packing: Packing) -> QuantizedArray:
    return kernel_of(layer, packing, Equation.parse(TABLE, (layer.num_embeddings, layer.features)))


def _embed(layer: Any, packing: Packing, inputs: Any) -> Array:
    table = _table(layer, packing)
    like = stand_in(table, layer.param_dtype)
    (like,) = layer.promote_dtype(like, dtype=layer.dtype, inexact=False)
    return lookup(table, arguments.tokens(inputs), like.dtype, factor_of(layer, packing))


def _attend(layer: Any, packing: Packing, query: Any) -> Array:
    caller, table = type(layer).__name__, _table(layer, packing)
    query = arguments.activations(caller, "query", query)
    if query.shape[-1:] != (table.k,):
        raise QueryWidthError(
            f"{caller}: {'.'.join(layer.path) or 'the layer'} attends to queries "
            f"(..., {table.k}), but these have shape {query.shape}; pass queries of {table.k} "
            "features."
        )
    like = stand_in(table, layer.param_dtype)
    with checks.within(caller, lhs="query", rhs="the table"):
        query, _ = layer.promote_dtype(query, like, dtype=layer.dtype)
        return multiply(query, table, factor_of(layer, packing), lhs_qtype=packing.lhs_qtype)


# --- float layers ---------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A class of float layers that can be quantized, and how.

    - `methods`: functions that replace its methods; they get the layer and its packing first.
    - `equation_of`: returns the equation of a weight, or of a stack of weights, given its shape;
      raises `ValueError` if it is not a product.
    - `options`: attributes that a quantized product does not support; None is the neutral value.
    - `weight`: the name of the weight among its parameters.
    - `table`: whether it is an embedding, which only a rule that matches its path quantizes.
    - `equation`: for an `EinsumLayer`, the equation of a call. Such a layer is identified by the
      path of its parameter, since a module may have several.
    - `bias`: the name of its bias among its parameters.
    """

    layer: type[nn.Module]
    methods: Mapping[str, Callable[..., Any]]
    equation_of: Callable[[Any, tuple[int, ...]], Equation]
    options: tuple[str, ...] = ()
    weight: str = "kernel"
    table: bool = False
    equation: str | None = None
    bias: str | None = "bias"

    def key(self, path: Path) -> Path:
        """The path of a layer's parameter, given the path that identifies the layer."""
        return path if self.equation is not None else (*path, self.weight)


def _calls(layer: type[_Product]) -> dict[str, Callable[..., Any]]:
    def call(float_layer: Any, packing: Packing, inputs: Any) -> Array:
        inputs = jnp.asarray(inputs)
        equation = layer.equation_of(float_layer, inputs.shape)
        bias = float_layer.get_variable("params", "bias") if float_layer.use_bias else None
        return _multiply(float_layer, packing, equation, inputs, nn.unbox(bias))

    return {"__call__": call}


def _no_setup(layer: Any, packing: Packing) -> None:
    """Skips the setup of a float embedding, which would require its float table."""


def _dense_kernel(layer: Any, shape: tuple[int, ...]) -> Equation:
    del layer
    return Equation.general(shape[-2:-1], shape[-1:])


def _general_kernel(layer: nn.DenseGeneral, shape: tuple[int, ...]) -> Equation:
    """Leading axes are a stack or a batch; both are a stack of matrices."""
    features = len(as_tuple(layer.features))
    own = shape[len(shape) - features - len(as_tuple(layer.axis)) :]
    return Equation.general(own[:-features], own[-features:])


def _einsum_kernel(layer: nn.Einsum, shape: tuple[int, ...]) -> Equation:
    del shape
    if layer.einsum_str is None:
        raise ValueError(
            "The layer is given its equation in each call, but its kernel is packed by that; give "
            "it to the layer, nn.Einsum(shape, einsum_str)."
        )
    return Equation.parse(layer.einsum_str, layer.shape)


def _table_kernel(layer: Any, shape: tuple[int, ...]) -> Equation:
    del layer
    return Equation.parse(TABLE, shape[-2:])


_OPTIONS = ("precision", "dot_general", "dot_general_cls")
_KINDS = (
    Kind(nn.Dense, _calls(QuantizedDense), _dense_kernel, _OPTIONS),
    Kind(nn.DenseGeneral, _calls(QuantizedDenseGeneral), _general_kernel, _OPTIONS),
    Kind(nn.Einsum, _calls(QuantizedEinsum), _einsum_kernel, ("precision",)),
    Kind(
        nn.Embed,
        {"__call__": _embed, "attend": _attend, "setup": _no_setup},
        _table_kernel,
        weight="embedding",
        table=True,
    ),
)
NAMES = ", ".join(f"nn.{kind.layer.__name__}" for kind in _KINDS)

# Known layers and parameters of other packages, identified by class name.
_KNOWN_LAYERS = (
    EinsumLayer(
        r"transformers\.models\.gpt2\.modeling_flax_gpt2\.FlaxConv1D",
        "kernel",
        "...k,nk->...n",
        bias="bias",
    ),
    EinsumLayer(
        r"gemma\.gm\.nn\.(\w+\.)*_layers\.Einsum",
        lambda layer: layer.weight_name,
        lambda layer, equation, x: equation,
        inputs=1,
    ),
)
KNOWN_PARAMETERS = (
    EinsumParameter(
        r"(^|\.)input_embedding$",
        TABLE,
        module=r"gemma\.gm\.nn\.(\w+\.)*_modules\.Embedder",
        embedding=True,
    ),
    EinsumParameter(
        r"(^|\.)embedding$",
        TABLE,
        module=r"transformers\.models\.opt\.modeling_flax_opt\.FlaxOPTLearnedPositionalEmbedding",
        embedding=True,
    ),
)


def kind_of(
    layer: Any, method: str | None = None, others: Sequence[EinsumLayer] = (), args: Any = ()
) -> Kind | None:
    """Returns the kind of a Flax layer or, for a call with `args`, of a layer described in
    `others`."""
    if method == "__call__":
        for other in others:
            if other.matches(layer):
                return _kind_of_other(layer, other, args)
        for other in _KNOWN_LAYERS:
            if other.matches(layer):
                with contextlib.suppress(ValueError):  # a call with other arguments
                    return _kind_of_other(layer, other, args)
    return next((kind for kind in _KINDS if isinstance(layer, kind.layer)), None)


def _kind_of_other(layer: Any, other: EinsumLayer, args: Any) -> Kind:
    name, equation = other.weight_of(layer), other.equation_of(layer, *args)

    def compute(layer: Any, packing: Packing, *args: Any) -> Array:
        text, shape = packing.equation or (equation, ())
        parsed = Equation.parse(equation, shape)
        if parsed.layout != Equation.parse(text, shape).layout:
            raise ValueError(
                f"{'.'.join(layer.path)} was quantized for the equation {text!r}, but is called "
                f"with {equation!r}, which takes other axes of its {name}; keep it in floats."
            )
        if len(args) <= other.inputs:
            raise ValueError(
                f"EinsumLayer: {type(layer).__name__} is called with {len(args)} arguments by "
                f"position, but inputs={other.inputs}; name the position of the inputs."
            )
        bias = layer.get_variable("params", other.bias) if other.bias else None
        inputs = jnp.asarray(args[other.inputs])
        return _multiply(layer, packing, parsed, inputs, nn.unbox(bias), name)

    return Kind(
        type(layer),
        {"__call__": compute},
        lambda layer, shape: Equation.of_last(equation, shape),
        ("precision",) if hasattr(layer, "precision") else (),
        name,
        equation=equation,
        bias=other.bias,
    )


def parameter_kind(module: Any, name: str, other: EinsumParameter) -> Kind:
    """The kind of a raw parameter of a module, which is identified by its own path."""
    return Kind(
        type(module),
        {},
        other.parsed,
        weight=name,
        table=other.embedding,
        equation="",
        bias=None,
    )
