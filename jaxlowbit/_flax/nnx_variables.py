"""`QuantizedVariable`, and the NNX modules with a quantized weight in such variables."""

from typing import Any

from flax import nnx
from flax.nnx.spmd import get_var_pspec

from .._core import checks
from .._core.array import QuantizedArray
from .._core.format import Format, as_format
from .arguments import inner
from .equation import Equation
from .input_factors import FACTOR
from .sharding import MatrixSharding, mesh_of, padded
from .weights import ARRAYS, Shards, kernel_from, quantize_weight


class QuantizedVariable(nnx.Variable):
    """One array of a quantized weight. `nnx.grad` and optimizers skip it, since it is not an
    `nnx.Param`.

    A layer has one for each array of its `QuantizedArray`, under the same name. As a filter:
    `nnx.state(model, QuantizedVariable)`; to train the scales, `nnx.grad(f, nnx.DiffState(0,
    nnx.All(QuantizedVariable, nnx.PathContains("scale"))))`.
    """


class QuantizedModule(nnx.Module):
    """A module with one quantized weight, packed as the matrix of its equation."""

    packed: QuantizedVariable
    scale: QuantizedVariable
    zero: QuantizedVariable | None
    permutation: QuantizedVariable | None
    version: QuantizedVariable
    tensor_scale: QuantizedVariable | None = None  # an attribute only of layers that have one
    lhs_factor: QuantizedVariable | None = None  # likewise
    format: Format
    shards: Shards
    dtype: Any
    lhs_qtype: Any = None  # default for layers stored without this attribute

    @staticmethod
    def equation_of(layer: Any) -> Equation:
        """The equation of this layer, or of the float layer that it replaces."""
        raise NotImplementedError

    @property
    def _equation(self) -> Equation:
        return self.equation_of(self)

    def matrix(self, weight: Any) -> Any:
        """The weight of the float layer, or a stack of them, as a matrix (..., k, n)."""
        return self._equation.matrix(weight)

    @property
    def factor(self) -> Any:
        """The factors (..., k) that divide the inputs, or None."""
        return None if self.lhs_factor is None else self.lhs_factor.get_value()

    @property
    def kernel(self) -> QuantizedArray:
        """The weight (..., k, n), with the axes of a stack of layers first, then batch axes.

        Its rows are multiplied by `lhs_factor` (..., k), if the layer has one, and inputs are
        divided by it. Inside `jax.shard_map`, the shard of this device.

        **Raises:** `ValueError` outside `jax.jit` if its words have another layout version.
        """
        variables = {name: getattr(self, name) for name in ARRAYS}
        arrays = {name: var.get_value() for name, var in variables.items() if var is not None}
        return kernel_from(arrays, self.format, self._equation.matrix_shape, self.shards)

    def _store(self, weight: nnx.Variable, format: Format | str, shards: Shards) -> None:
        """Quantizes the weight of a float layer, and stores it in variables."""
        caller = type(self).__name__
        format, shards = as_format(caller, format), checks.shard_counts(caller, shards)
        try:
            found = quantize_weight(weight.get_value(), format, self.matrix, shards)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{caller}: {inner(error)}") from None
        kernel, factor = found
        sharding, names = _sharding(weight, self._equation), {}
        if sharding is not None:
            kernel, specs = sharding.divide(kernel)
            names: Any = {name: getattr(specs, name) for name in ARRAYS}
            if factor is not None:
                factor, names[FACTOR] = sharding.divide_factor(factor)
        arrays = {name: getattr(kernel, name) for name in ARRAYS} | {FACTOR: factor}
        for name, array in arrays.items():
            if array is None and name in ("tensor_scale", FACTOR):
                continue
            stored: Any = nnx.data(None) if array is None else QuantizedVariable(array)
            # Scalars are not mapped: NNX cannot remove the axis of a stack from one and restore it.
            scalar = name == "version" or (name == "tensor_scale" and not format.scales_channels)
            if names and array is not None and not scalar:
                # With this metadata, the constructor would move the array.
                stored.set_metadata(out_sharding=tuple(names[name]), **_context(weight))
            setattr(self, name, stored)
        self.format = format
        self.shards = shards

    def _single_kernel(self) -> QuantizedArray:
        """The weight of a single layer.

        **Raises:** `ValueError` for a stack of layers.
        """
        kernel = self.kernel
        if kernel.ndim > self._equation.matrix_ndim:
            raise ValueError(
                f"{type(self).__name__}: the kernel has shape {kernel.shape}, a stack of layers; "
                "apply it under nnx.vmap or nnx.scan, or multiply by layer.kernel."
            )
        return kernel


def _sharding(variable: nnx.Variable, equation: Equation) -> MatrixSharding | None:
    """The sharding of the matrix of a float weight, from its metadata."""
    weight, names = variable.get_value(), variable.get_metadata("out_sharding", None)
    if not names:
        return None
    mesh = variable.get_metadata("mesh", None) or mesh_of(weight)
    axes = get_var_pspec(variable)
    names, axes = (equation.matrix_entries(padded(x, weight.ndim)) for x in (names, axes))
    return MatrixSharding(names, axes, mesh)


def _context(variable: nnx.Variable) -> dict[str, Any]:
    """The metadata for resolving axis names."""
    found = {name: variable.get_metadata(name, None) for name in ("sharding_rules", "mesh")}
    return {name: value for name, value in found.items() if value is not None}
