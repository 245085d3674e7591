"""Reports of `quantize_model`: the layers of a model, and the parameters that are not covered."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from .._core import explicit
from .._core.array import QuantizedArray
from .._core.format import Format
from .._matmul.quantized_lhs import EXACT
from .._matmul.support import supported_backends

_LISTED = 12


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """A layer that could be quantized: an entry of `QuantizationReport.layers`."""

    path: str
    shape: tuple[int, ...]
    format: Format | None
    nbytes_before: int
    nbytes_after: int
    error: float | None
    backend: str
    by_default: bool = False
    lhs_qtype: Any = None

    @classmethod
    def kept(cls, path: str, weight: Any, reason: str, by_default: bool) -> "LayerReport":
        nbytes = nbytes_of(weight)
        shape = tuple(weight.shape)
        return cls(path, shape, None, nbytes, nbytes, None, reason, by_default)

    @classmethod
    def quantized(
        cls,
        path: str,
        weight: Any,
        kernel: QuantizedArray,
        dtype: Any,
        matrix: Callable[[Any], Any] = lambda weight: weight,
        lhs_qtype: Any = None,
        factor: Any = None,
    ) -> "LayerReport":
        """Reports a kernel that replaces `matrix(weight)` and has inputs of `dtype`, which `factor`
        divides unless it is None."""
        concrete = isinstance(weight, Array) and not isinstance(weight, Tracer)
        return cls(
            path,
            tuple(weight.shape),
            kernel.format,
            nbytes_of(weight),
            kernel.nbytes + (0 if factor is None else nbytes_of(factor)),
            _error(matrix(weight), kernel, factor) if concrete else None,
            backend_of(dtype if lhs_qtype is None else EXACT, kernel),
            lhs_qtype=lhs_qtype,
        )


@dataclasses.dataclass(frozen=True)
class ParameterReport:
    """A parameter outside of such layers: an entry of `QuantizationReport.uncovered`."""

    path: str
    shape: tuple[int, ...]
    nbytes: int
    module: str
    by_rule: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class QuantizationReport:
    """The result of `quantize_model`. Every parameter of the model counts once. Prints as a table.

    - `layers`: the layers that could be quantized. Each has
        - `path`: its dotted path, the first one if there are several;
        - `shape`: the shape of the kernel;
        - `format`: None if the layer stayed in floats;
        - `nbytes_before`, `nbytes_after`: memory of the kernel, scales included;
        - `error`: Frobenius norm of the change, relative to the norm of the kernel; None for a
          float layer and for an abstract one;
        - `backend`: the backend on this machine, with the reason if it is not a kernel; for a float
          layer, why it stayed in floats;
        - `by_default`: whether it stayed in floats by default, not by rules;
        - `lhs_qtype`: the dtype of its quantized inputs, or None.
    - `uncovered`: the parameters with two or more axes in no such layer, largest first. Each has
        - `path`, `shape`, `nbytes`;
        - `module`: the class of its module, with the reason if there is one;
        - `by_rule`: whether a rule with None, or `keep`, matches the path.
    - `vectors`: bytes of biases, norms and other parameters with one axis, which do not change.
    - `packed`: bytes of arrays that were quantized before.
    """

    layers: tuple[LayerReport, ...]
    uncovered: tuple[ParameterReport, ...] = ()
    vectors: int = 0
    packed: int = 0

    @property
    def nbytes_before(self) -> int:
        """Bytes of all parameters before."""
        return self._others + sum(layer.nbytes_before for layer in self.layers)

    @property
    def nbytes_after(self) -> int:
        """Bytes of all parameters after."""
        return self._others + sum(layer.nbytes_after for layer in self.layers)

    @property
    def coverage(self) -> float:
        """The quantized share of the bytes of weights (all parameters except vectors)."""
        weights = sum(layer.nbytes_before for layer in self.layers)
        weights += sum(found.nbytes for found in self.uncovered)
        chosen = (layer.nbytes_before for layer in self.layers if layer.format is not None)
        return sum(chosen) / max(weights, 1)

    @property
    def _others(self) -> int:
        return self.vectors + self.packed + sum(found.nbytes for found in self.uncovered)

    def __str__(self) -> str:
        head = ("layer", "shape", "format", "before", "after", "error", "backend")
        rows: list[tuple[str, ...]] = [head, *map(_row, self.layers)]
        chosen = [layer for layer in self.layers if layer.format is not None]
        kept = [layer for layer in self.layers if layer.format is None]
        left = [found for found in self.uncovered if not found.by_rule]
        rules = [found for found in self.uncovered if found.by_rule]
        sizes = {
            "quantized": sum(layer.nbytes_before for layer in chosen),
            "quantized before": self.packed,
            "kept by rules": sum(layer.nbytes_after for layer in kept if not layer.by_default)
            + sum(found.nbytes for found in rules),
            "kept by default": sum(layer.nbytes_after for layer in kept if layer.by_default),
            "vectors, such as biases": self.vectors,
            "not covered": sum(found.nbytes for found in left),
        }
        words = f"{len(chosen)} of {len(self.layers)} layers quantized"
        sums = (size_words(self.nbytes_before), size_words(self.nbytes_after))
        totals = [
            (name, size_words(nbytes), f"{nbytes / max(self.nbytes_before, 1):.1%}")
            for name, nbytes in sizes.items()
            if nbytes or name == "not covered"
        ]
        listed = [
            (f"  {found.path}", size_words(found.nbytes), shape_words(found.shape), found.module)
            for found in left[:_LISTED]
        ]
        if more := left[_LISTED:]:
            nbytes = sum(found.nbytes for found in more)
            listed.append((f"  and {len(more)} more", size_words(nbytes), "", ""))
        lines = [*aligned(rows), "", f"{words}; all parameters: {sums[0]} became {sums[1]}"]
        return "\n".join([*lines, *aligned(totals), *aligned(listed)])

    __repr__ = __str__

    def warn(self, names: str) -> None:
        """Warns the caller's caller if more than a tenth of the bytes is not covered.

        `names` are the classes of layers that are covered.
        """
        left = [found for found in self.uncovered if not found.by_rule]
        nbytes = sum(found.nbytes for found in left)
        if nbytes <= 0.1 * self.nbytes_before:
            return
        largest = left[0]
        warnings.warn(
            f"quantize_model: {nbytes / self.nbytes_before:.0%} of the bytes of the model "
            f"({size_words(nbytes)}) are not covered, the largest {largest.path} of shape "
            f"{largest.shape} in {largest.module}. Only {names} are, and what layers= describes: "
            "an EinsumLayer says it of a class, an EinsumParameter of a path. A rule of their "
            "paths and None, or keep=, says that they stay in floats on purpose. print(report) "
            "lists them.",
            stacklevel=3,
        )


def nbytes_of(weight: Any) -> int:
    """The bytes of an array, which may be abstract."""
    return math.prod(weight.shape) * weight.dtype.itemsize


class Rest:
    """Collects the parameters of a model other than the weights of quantizable layers."""

    def __init__(self) -> None:
        self.uncovered: list[ParameterReport] = []
        self.vectors = 0
        self.packed = 0

    def add(self, path: str, array: Any, module: str, *, vector: bool, packed: bool) -> None:
        """Counts a parameter; a `vector` is a parameter that no product contracts, such as a
        bias."""
        if packed:
            self.packed += nbytes_of(array)
        elif vector or len(array.shape) < 2:
            self.vectors += nbytes_of(array)
        else:
            shape = tuple(array.shape)
            self.uncovered.append(ParameterReport(path, shape, nbytes_of(array), module))

    def report(self, layers: Iterable[LayerReport], by_rule: Iterable[bool]) -> QuantizationReport:
        """Makes the report on these layers; `by_rule`: for each uncovered parameter, whether a rule
        keeps it."""
        found = zip(self.uncovered, by_rule, strict=True)
        marked = [dataclasses.replace(parameter, by_rule=kept) for parameter, kept in found]
        ordered = sorted(marked, key=lambda parameter: -parameter.nbytes)
        return QuantizationReport(tuple(layers), tuple(ordered), self.vectors, self.packed)


def _error(weight: Array, kernel: QuantizedArray, factor: Array | None) -> float:
    mesh = explicit.mesh_of((weight, kernel))
    compute = _relative_error
    if mesh is not None:
        compute = explicit.automatic(compute, mesh, jax.P())
    return float(compute(weight, kernel, factor))


@jax.jit
def _relative_error(weight: Array, kernel: QuantizedArray, factor: Array | None) -> Array:
    weight, found = weight.astype(jnp.float32), kernel.dequantize(jnp.float32)
    if factor is not None:
        found /= factor[..., None]
    change = jnp.linalg.norm((found - weight).ravel())
    return change / jnp.maximum(jnp.linalg.norm(weight.ravel()), jnp.finfo(jnp.float32).tiny)


def backend_of(dtype: Any, kernel: QuantizedArray) -> str:
    reasons = supported_backends(jax.ShapeDtypeStruct((1, kernel.k), dtype), kernel)
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    if platform not in reasons:
        return f"xla: there is no kernel for {platform}"
    return platform if reasons[platform] is None else f"xla: {reasons[platform]}"


def _row(layer: LayerReport) -> tuple[str, ...]:
    return (
        layer.path,
        shape_words(layer.shape),
        format_words(layer.format, layer.lhs_qtype),
        size_words(layer.nbytes_before),
        size_words(layer.nbytes_after),
        "" if layer.error is None else f"{layer.error:.4f}",
        layer.backend,
    )


def format_words(format: Format | None, lhs_qtype: Any = None) -> str:
    if format is None:
        return "-"
    groups = "per channel" if format.group_size == -1 else f"groups of {format.group_size}"
    zero = "" if format.zero == "none" else f", {format.zero} zero"
    zero = zero if format.scale is None else f", {format.scale} scales"
    inputs = "" if lhs_qtype is None else f", {lhs_qtype} activations"
    return f"{format.bits} bits, {groups}{zero}{inputs}"


def shape_words(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def size_words(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def aligned(rows: Iterable[tuple[str, ...]]) -> Iterable[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
