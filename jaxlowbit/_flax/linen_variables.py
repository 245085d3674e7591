"""The collection that holds quantized weights in Linen."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax.core import meta
from flax.linen.spmd import logical_to_mesh_axes

from .._array import QuantizedArray
from .kernel_axes import KernelAxes
from .sharding import MatrixSharding, mesh_of, padded
from .weights import ARRAYS, Packing, kernel_from, quantize_weight

COLLECTION = "quantized"
"""The collection of the arrays of quantized weights, beside `params`."""


def value_of(variable: Any) -> Any:
    """The array in a variable, perhaps boxed, where it is: no constraint moves it."""
    return variable.value if isinstance(variable, meta.Partitioned) else nn.unbox(variable)


def quantized(
    weight: Any, packing: Packing, axes: KernelAxes
) -> tuple[QuantizedArray, dict[str, Any]]:
    """The matrix of a weight, and its variables, boxed with their names if the weight is boxed."""
    value = value_of(weight)
    kernel = quantize_weight(value, packing.format, axes.matrix, packing.shards)
    names = None
    if isinstance(weight, meta.Partitioned):
        kernel, names = _sharding(weight, value, axes).divide(kernel)
    variables = {}
    for name in ARRAYS:
        if (array := getattr(kernel, name)) is not None:
            spec = () if names is None else tuple(getattr(names, name))
            variables[name] = weight.replace(value=array, names=spec) if spec else array
    return kernel, variables


def _sharding(box: meta.Partitioned, value: Any, axes: KernelAxes) -> MatrixSharding:
    rules = nn.get_logical_axis_rules()
    if isinstance(box, nn.LogicallyPartitioned):
        rules = box.rules or rules
        found = logical_to_mesh_axes(box.names, rules) if rules else box.names
    else:
        found = box.get_partition_spec()
    names, found = (axes.matrix_entries(padded(x, value.ndim)) for x in (box.names, found))
    return MatrixSharding(names, found, box.mesh or mesh_of(value))


def initialise(module: Any, packing: Packing, weight: Callable[[], Any], axes: KernelAxes) -> None:
    """Puts the quantized weight into the collection, when `module` is being initialised."""
    if module.is_initializing() and not module.has_variable(COLLECTION, "packed"):
        for name, variable in quantized(weight(), packing, axes)[1].items():
            module.put_variable(COLLECTION, name, variable)


def kernel_of(
    module: Any, packing: Packing, matrix_shape: tuple[int, int], ndim: int = 2
) -> QuantizedArray:
    """The kernel that `module` has in the collection, a matrix (k, n) with `ndim` axes in all."""
    name = ".".join(module.path) or "the layer"
    if not module.has_variable(COLLECTION, "packed"):
        raise ValueError(
            f"{name} has no kernel in the collection {COLLECTION!r}. Pass the variables that "
            f"hold it; inside nn.scan or nn.vmap, add {COLLECTION!r}: 0 to variable_axes."
        )
    arrays = {array: value_of(module.get_variable(COLLECTION, array)) for array in ARRAYS}
    kernel = kernel_from(arrays, packing.format, matrix_shape, packing.shards)
    if kernel.ndim > ndim:
        raise ValueError(
            f"{name} has a kernel of shape {kernel.shape}, a stack of layers; inside nn.scan or "
            f"nn.vmap, add {COLLECTION!r}: 0 to variable_axes."
        )
    return kernel
