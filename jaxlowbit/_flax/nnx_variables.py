"""The variables that hold a quantized weight in NNX, and the class of layers that have one."""

from typing import Any

from flax import nnx
from flax.nnx.spmd import get_var_pspec

from .._core import checks
from .._core.array import QuantizedArray
from .._core.format import Format, as_format
from .refusals import inner
from .sharding import Entries, MatrixSharding, mesh_of, padded
from .weights import ARRAYS, Shards, kernel_from, quantize_weight


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


class Permutation(QuantizedVariable):
    """`QuantizedArray.permutation`."""


class LayoutVersion(QuantizedVariable):
    """`QuantizedArray.version`."""


class TensorScale(QuantizedVariable):
    """`QuantizedArray.tensor_scale`."""


_KINDS = (Packed, Scale, Zero, Permutation, LayoutVersion, TensorScale)
_VARIABLES = dict(zip(ARRAYS, _KINDS, strict=True))


class QuantizedModule(nnx.Module):
    """A layer with one quantized weight, a matrix of `matrix_shape`."""

    packed: Packed
    scale: Scale
    zero: Zero | None
    permutation: Permutation | None
    version: LayoutVersion
    tensor_scale: TensorScale | None = None  # an attribute of layers that have one
    format: Format
    shards: Shards
    dtype: Any
    activation_dtype: Any = None  # of layers that were stored before they had one

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The sizes k and n."""
        raise NotImplementedError

    def matrix(self, weight: Any) -> Any:
        """The weight of the float layer, perhaps a stack of them, as a matrix (..., k, n)."""
        return weight

    def matrix_entries(self, entries: Entries) -> Entries:
        """The sharding of that matrix, given that of the weight."""
        return entries

    @property
    def kernel(self) -> QuantizedArray:
        """The weight (..., k, n), leading axes those of stacked layers, then its own.

        Inside `jax.shard_map`, the part of it that the device holds.

        **Raises:** `ValueError` outside `jax.jit` if its words have another layout version.
        """
        variables = {name: getattr(self, name) for name in _VARIABLES}
        arrays = {name: var.get_value() for name, var in variables.items() if var is not None}
        return kernel_from(arrays, self.format, self.matrix_shape, self.shards)

    def _store(self, weight: Any, format: Format | str, shards: Shards = (1, 1)) -> None:
        """Quantizes the weight of a float layer, an array or a variable, into variables."""
        name = type(self).__name__
        format, shards = as_format(name, format), checks.shard_counts(name, shards)
        variable = weight if isinstance(weight, nnx.Variable) else nnx.Param(weight)
        try:
            kernel = quantize_weight(variable.get_value(), format, self.matrix, shards)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {inner(error)}") from None
        sharding = _sharding(variable, self.matrix_entries)
        names = None
        if sharding is not None:
            kernel, names = sharding.divide(kernel)
        for name, kind in _VARIABLES.items():
            array = getattr(kernel, name)
            if array is None and name == "tensor_scale":
                continue
            stored: Any = nnx.data(None) if array is None else kind(array)
            # Scalars stay whole: NNX cannot take the axis of a stack from one and return.
            scalar = name == "version" or (name == "tensor_scale" and not format.scales_channels)
            if names is not None and array is not None and not scalar:
                # The constructor would move the array if it were given this metadata.
                stored.set_metadata(out_sharding=tuple(getattr(names, name)), **_context(variable))
            setattr(self, name, stored)
        self.format = format
        self.shards = shards

    def _single_kernel(self, ndim: int = 2) -> QuantizedArray:
        """The weight of a single layer, which has `ndim` axes."""
        kernel = self.kernel
        if kernel.ndim > ndim:
            raise ValueError(
                f"{type(self).__name__}: the kernel has shape {kernel.shape}, a stack of layers; "
                "apply it under nnx.vmap or nnx.scan, or multiply by layer.kernel."
            )
        return kernel


def _sharding(variable: nnx.Variable, matrix_entries: Any) -> MatrixSharding | None:
    """What the metadata of a float weight says of its matrix."""
    weight, names = variable.get_value(), variable.get_metadata("out_sharding", None)
    if not names:
        return None
    mesh = variable.get_metadata("mesh", None) or mesh_of(weight)
    axes = get_var_pspec(variable)
    names, axes = (matrix_entries(padded(entries, weight.ndim)) for entries in (names, axes))
    return MatrixSharding(names, axes, mesh)


def _context(variable: nnx.Variable) -> dict[str, Any]:
    """The metadata with which names of axes are read."""
    found = {name: variable.get_metadata(name, None) for name in ("sharding_rules", "mesh")}
    return {name: value for name, value in found.items() if value is not None}


def check_layout_version(model: nnx.Module) -> None:
    """Refuses a model whose words were packed by another layout version.

    A layer applied outside `jax.jit` checks itself; traced code cannot see the version. Call this
    once after restoring a checkpoint.

    **Raises:** `ValueError` with the path of the layer and the version found.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"check_layout_version: model is {checks.brief(model)}, but it is an nnx.Module with "
            "quantized layers; pass the model itself."
        )
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
