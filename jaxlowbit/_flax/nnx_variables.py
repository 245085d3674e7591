"""The variables that hold a quantized weight in NNX, and the class of layers that have one."""

from typing import Any

from flax import nnx

from .._array import QuantizedArray
from .._formats import Format
from .weights import quantize_weight


class QuantizedVariable(nnx.Variable):
    """One array of a quantized weight: no `nnx.Param`, so `nnx.grad` and optimizers pass it by.

    A filter for all of them: `nnx.state(model, QuantizedVariable)`.
    """


class Packed(QuantizedVariable):
    """`QuantizedArray.packed`."""


class Scale(QuantizedVariable):
    """`QuantizedArray.scale`. To train the scales: `nnx.grad(f, nnx.DiffState(0, Scale))`."""


class Zero(QuantizedVariable):
    """`QuantizedArray.zero`."""


class LayoutVersion(QuantizedVariable):
    """`QuantizedArray.version`."""


class QuantizedModule(nnx.Module):
    """A layer with one quantized weight, a matrix of `matrix_shape`."""

    format: Format
    dtype: Any

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """k and n."""
        raise NotImplementedError

    def matrix(self, weight: Any) -> Any:
        """The weight of the float layer, perhaps a stack of them, as a matrix (..., k, n)."""
        return weight

    @property
    def kernel(self) -> QuantizedArray:
        """The weight (..., k, n), leading axes those of stacked layers, then its own.

        **Raises:** `ValueError` outside `jax.jit` if its words have another layout version.
        """
        k, n = self.matrix_shape
        return QuantizedArray(
            packed=self.packed.get_value(),
            scale=self.scale.get_value(),
            zero=None if self.zero is None else self.zero.get_value(),
            index=None,
            version=self.version.get_value(),
            format=self.format,
            k=k,
            n=n,
        )

    def _store(self, weight: Any, format: Format) -> None:
        """Quantizes the weight of a float layer, which may be abstract, into variables."""
        kernel = quantize_weight(weight, format, self.matrix)
        self.format = format
        self.packed = Packed(kernel.packed)
        self.scale = Scale(kernel.scale)
        self.zero = nnx.data(None) if kernel.zero is None else Zero(kernel.zero)
        self.version = LayoutVersion(kernel.version)

    def _single_kernel(self, ndim: int = 2) -> QuantizedArray:
        """The weight of a single layer, which has `ndim` axes."""
        kernel = self.kernel
        if kernel.ndim > ndim:
            raise ValueError(
                f"{type(self).__name__}: the kernel has shape {kernel.shape}, a stack of layers; "
                "apply it under nnx.vmap or nnx.scan, or multiply by layer.kernel."
            )
        return kernel


def check_layout_version(model: nnx.Module) -> None:
    """Refuses a model whose words were packed by another layout version.

    A layer applied outside `jax.jit` checks itself; traced code cannot see the version. Call this
    once after restoring a checkpoint.

    **Raises:** `ValueError` with the path of the layer and the version found.
    """
    for path, module in nnx.iter_modules(model):
        if isinstance(module, QuantizedModule):
            try:
                module.kernel.check_version()
            except ValueError as error:
                name = ".".join(map(str, path)) or "the model"
                raise ValueError(f"check_layout_version: in {name}: {error}") from None


def check_replaceable(layer: Any, kind: type, name: str, defaults: dict[str, Any]) -> None:
    """Refuses a layer that is no `kind` or has an option that a quantized product has not.

    `name` is that of the function that was called, `defaults` are the values that mean nothing.
    """
    if type(layer) is not kind:
        raise TypeError(
            f"{name}: the layer is {type(layer).__name__}, but an nnx.{kind.__name__} "
            "is needed, and no subclass, which may compute something else; build a "
            f"{name.split('.')[0]} instead."
        )
    for option, default in defaults.items():
        if getattr(layer, option) is not default:
            raise ValueError(
                f"{name}: the layer has {option}={getattr(layer, option)!r}, but a quantized "
                "product, accumulated in float32, has no such choice; build the layer without "
                f"{option}."
            )
