"""The collection that holds quantized weights in Linen."""

from collections.abc import Callable
from typing import Any

from jax import Array

from .._array import QuantizedArray
from .._formats import Format
from .._quantize import quantize

COLLECTION = "quantized"
"""The collection of packed words, scales, zeros and layout versions, beside `params`."""

_ARRAYS = ("packed", "scale", "zero", "version")


def arrays_of(kernel: QuantizedArray) -> dict[str, Array]:
    """The arrays of a kernel under the names that the collection has for them."""
    arrays = {name: getattr(kernel, name) for name in _ARRAYS}
    return {name: array for name, array in arrays.items() if array is not None}


def initialise(module: Any, format: Format, weight: Callable[[], Array]) -> None:
    """Puts the quantized matrix into the collection, when `module` is being initialised."""
    if module.is_initializing() and not module.has_variable(COLLECTION, "packed"):
        for name, array in arrays_of(quantize(weight(), format)).items():
            module.put_variable(COLLECTION, name, array)


def kernel_of(
    module: Any, format: Format, matrix_shape: tuple[int, int], ndim: int = 2
) -> QuantizedArray:
    """The kernel that `module` has in the collection, a matrix (k, n) with `ndim` axes in all."""
    name = ".".join(module.path) or "the layer"
    if not module.has_variable(COLLECTION, "packed"):
        raise ValueError(
            f"{name} has no kernel in the collection {COLLECTION!r}. Pass the variables that "
            f"hold it; inside nn.scan or nn.vmap, add {COLLECTION!r}: 0 to variable_axes."
        )
    arrays = {name: module.get_variable(COLLECTION, name) for name in _ARRAYS}
    k, n = matrix_shape
    kernel = QuantizedArray(**arrays, index=None, format=format, k=k, n=n)
    if kernel.ndim > ndim:
        raise ValueError(
            f"{name} has a kernel of shape {kernel.shape}, a stack of layers; inside nn.scan or "
            f"nn.vmap, add {COLLECTION!r}: 0 to variable_axes."
        )
    return kernel
