"""The collection of quantized weights in Linen."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors
from flax import linen as nn
from flax.core import meta
from flax.linen.spmd import logical_to_mesh_axes

from .._core import checks, layout, versions
from .._core.array import QuantizedArray
from .._core.format import as_format
from . import arguments
from .arguments import inner
from .equation import Equation, as_tuple
from .input_factors import FACTOR
from .sharding import Entries, MatrixSharding, mesh_of, padded
from .weights import ARRAYS, Packing, kernel_from, quantize_weight

COLLECTION = "quantized"
"""The collection of the arrays of quantized weights."""

PADDING = "padding"
"""The variable with the amount of padding: zeros (..., 1 + rows, 1 + columns).

Only its shape matters, which is static under tracing and preserved by lifts and checkpoints."""


class _KernelError(ValueError):
    """A `ValueError` with an unchanged message; Flax's errors would format it and add a link."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)


class KernelShapeError(_KernelError, errors.ScopeParamShapeError):
    """The sizes of the kernel differ from the sizes of the inputs and the layer."""


class KernelNotFoundError(_KernelError, errors.ScopeParamNotFoundError):
    """The variables have no kernel for the layer."""


class QueryWidthError(_KernelError, TypeError):
    """The width of a query differs from the table's; JAX raises `TypeError` for the float layer."""


def value_of(variable: Any) -> Any:
    """The array in a variable, which may be boxed, without a sharding constraint."""
    return variable.value if isinstance(variable, meta.Partitioned) else nn.unbox(variable)


def quantized(
    weight: Any, packing: Packing, equation: Equation
) -> tuple[QuantizedArray, dict[str, Any]]:
    """The matrix of a weight, and its variables; boxed with axis names if the weight is boxed."""
    value = value_of(weight)
    kernel, factor = quantize_weight(value, packing.format, equation.matrix, packing.shards)
    if not isinstance(weight, meta.Partitioned):
        return kernel, variables_of(kernel, factor)
    sharding = _sharding(weight, value, equation)
    kernel, specs = sharding.divide(kernel)
    names: dict[str, Entries] = {name: tuple(getattr(specs, name) or ()) for name in ARRAYS}
    if names["version"]:  # the axes of a stack, which both have in front
        names[PADDING] = (*names["version"], None, None)
    if factor is not None:
        factor, spec = sharding.divide_factor(factor)
        names[FACTOR] = tuple(spec)
    return kernel, {
        name: weight.replace(value=array, names=names[name]) if names.get(name) else array
        for name, array in variables_of(kernel, factor).items()
    }


def variables_of(array: QuantizedArray, factor: Any = None) -> dict[str, Any]:
    """The variables of a matrix (..., k, n) in the collection."""
    variables = {name: getattr(array, name) for name in ARRAYS}
    variables |= {PADDING: _padding(array), FACTOR: factor}
    return {name: held for name, held in variables.items() if held is not None}


def _padding(kernel: QuantizedArray) -> Any:
    """The variable `PADDING` of a kernel, which may be abstract; None without padding."""
    k, n = _stored_shape(kernel.packed)
    if (k, n) == (kernel.k, kernel.n):
        return None

    def zeros(version: Any) -> Any:
        shape = (*version.shape, 1 + k - kernel.k, 1 + n - kernel.n)
        return jnp.broadcast_to(jnp.zeros_like(version, jnp.uint8)[..., None, None], shape)

    abstract = isinstance(kernel.version, jax.ShapeDtypeStruct)
    return jax.eval_shape(zeros, kernel.version) if abstract else zeros(kernel.version)


def _stored_shape(packed: Any, padding: Any = None) -> tuple[int, int]:
    """k and n of words, without the padding if `PADDING` gives it."""
    n_blocks, k_blocks, _ = packed.shape[-3:]
    rows, columns = (1, 1) if padding is None else padding.shape[-2:]
    return k_blocks * layout.ATOM + 1 - rows, n_blocks * layout.ATOM + 1 - columns


def _sharding(box: meta.Partitioned, value: Any, equation: Equation) -> MatrixSharding:
    rules = nn.get_logical_axis_rules()
    if isinstance(box, nn.LogicallyPartitioned):
        rules = box.rules or rules
        found = logical_to_mesh_axes(box.names, rules) if rules else box.names
    else:
        found = box.get_partition_spec()
    names, found = (equation.matrix_entries(padded(x, value.ndim)) for x in (box.names, found))
    return MatrixSharding(names, found, box.mesh or mesh_of(value))


def packing_of(module: Any) -> Packing:
    """Returns how a quantized layer packs its weight.

    **Raises:** `TypeError` and `ValueError` for an invalid format, shards, dtype or other option.
    """
    caller = type(module).__name__
    options = {x: getattr(module, x) for x in arguments.OPTIONS if hasattr(module, x)}
    arguments.check_options(caller, options)
    return Packing(
        as_format(caller, module.format),
        checks.shard_counts(caller, module.shards),
        lhs_qtype=arguments.lhs_qtype(caller, module.lhs_qtype),
    )


def initialise(
    module: Any, packing: Packing, weight: Callable[[], Any], equation: Equation
) -> None:
    """Stores the quantized weight in the collection while `module` is initialized."""
    if module.is_initializing() and not module.has_variable(COLLECTION, "packed"):
        try:
            variables = quantized(weight(), packing, equation)[1]
        except (TypeError, ValueError) as error:
            raise type(error)(f"{type(module).__name__}: {inner(error)}") from None
        for name, variable in variables.items():
            module.put_variable(COLLECTION, name, variable)


def kernel_of(
    module: Any, packing: Packing, equation: Equation, weight: str | None = None
) -> QuantizedArray:
    """The kernel of `module` in the collection, the matrix of `equation`.

    The arrays of an `EinsumLayer` are under the name of its `weight`.

    **Raises:** `KernelNotFoundError` if it is missing, `KernelShapeError` for other sizes and for a
    stack.
    """
    name = f"{type(module).__name__}: {'.'.join(module.path) or 'the layer'}"
    kernel = held_kernel(name, _held(module, weight), packing, equation)
    if kernel.ndim > equation.matrix_ndim:
        raise KernelShapeError(
            f"{name} has a kernel of shape {kernel.shape}, a stack of layers; inside nn.scan or "
            f"nn.vmap, add {COLLECTION!r}: 0 to variable_axes."
        )
    return kernel


def factor_of(module: Any, packing: Packing, weight: str | None = None) -> Any:
    """The factors (k,) of the inputs of `module` in the collection, or None without any."""
    return held_factor(_held(module, weight)) if packing.factor else None


def held_factor(held: Mapping[str, Any]) -> Any:
    """The factors (..., k) among the variables of a weight, or None."""
    return value_of(held.get(FACTOR))


def held_kernel(
    name: str, held: Mapping[str, Any], packing: Packing, equation: Equation
) -> QuantizedArray:
    """The kernel, or a stack of kernels, in the variables `held`; errors begin with `name`.

    **Raises:** as `kernel_of` does.
    """
    if "packed" not in held:
        raise KernelNotFoundError(
            f"{name} has no kernel in the collection {COLLECTION!r}. Pass the variables that "
            f"contain it; inside nn.scan or nn.vmap, add {COLLECTION!r}: 0 to variable_axes."
        )
    if packing.factor and FACTOR not in held:
        raise KernelNotFoundError(
            f"{name} has no {FACTOR!r} in the collection {COLLECTION!r}, which divides its inputs. "
            "Pass the variables that quantize_model returned."
        )
    arrays = {array: value_of(held.get(array)) for array in (*ARRAYS, PADDING)}
    if not jax.sharding.get_abstract_mesh().manual_axes:  # where arrays and inputs are parts
        reason = _other_sizes(packing, equation, arrays["packed"], arrays[PADDING])
        if reason is not None:
            versions.check(arrays["version"])  # words of another have other shapes
            raise KernelShapeError(f"{name} {reason}")
    return kernel_from(arrays, packing.format, equation.matrix_shape, packing.shards)


def _held(module: Any, weight: str | None) -> Mapping[str, Any]:
    """The variables of a weight of `module` in the collection."""
    if weight is not None:
        return module.get_variable(COLLECTION, weight) or {}
    names = [name for name in (*ARRAYS, PADDING, FACTOR) if module.has_variable(COLLECTION, name)]
    return {name: module.get_variable(COLLECTION, name) for name in names}


def _other_sizes(packing: Packing, equation: Equation, packed: Any, padding: Any) -> str | None:
    """Returns the reason why inputs or the layer do not fit the kernel, or None."""
    sizes = equation.contracted, equation.features
    if packing.sizes not in (None, sizes):
        return _meets(sizes, "that was quantized", packing.sizes)
    asked, stored = equation.matrix_shape, _stored_shape(packed, padding)
    if asked == stored:
        return None
    way_out = ""
    if padding is None and tuple(map(layout.blocks, asked)) == tuple(map(layout.blocks, stored)):
        shape = tuple(1 + whole - size for whole, size in zip(stored, asked, strict=True))
        way_out = (
            f" If the kernel is {asked} and was stored without {PADDING!r}, add {PADDING!r}: "
            f"jnp.zeros({shape}, jnp.uint8) next to 'packed'."
        )
    return _meets(asked, "in its variables", stored) + way_out


def _meets(asked: Any, whose: str, found: Any) -> str:
    k, n, own_k, own_n = (" x ".join(map(str, as_tuple(size))) for size in (*asked, *found))
    return (
        f"is to multiply inputs of width {k} to {n} features, but the kernel {whose} takes width "
        f"{own_k} to {own_n}; pass inputs of width {own_k}, or the kernel of a layer from {k} to "
        f"{n}."
    )
