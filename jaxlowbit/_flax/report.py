"""Reports of what the quantization of a model did, layer by layer."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from .._core import explicit
from .._core.array import QuantizedArray
from .._core.format import Format
from .._matmul.support import supported_backends


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One layer that could be quantized.

    - `path`: the dotted path, the first one if there are several.
    - `shape`: the shape of the kernel.
    - `format`: None if its floats were kept.
    - `nbytes_before`, `nbytes_after`: memory of the kernel, scales included.
    - `error`: Frobenius norm of what changed, relative to that of the kernel; None for a kept
      layer and for an abstract one.
    - `backend`: what multiplies on this machine, with the reason if it is no kernel.
    """

    path: str
    shape: tuple[int, ...]
    format: Format | None
    nbytes_before: int
    nbytes_after: int
    error: float | None
    backend: str

    @classmethod
    def kept(cls, path: str, weight: Any) -> "LayerReport":
        nbytes = weight.size * weight.dtype.itemsize
        return cls(path, tuple(weight.shape), None, nbytes, nbytes, None, "kept in floats")

    @classmethod
    def quantized(
        cls,
        path: str,
        weight: Any,
        kernel: QuantizedArray,
        dtype: Any,
        matrix: Callable[[Any], Any] = lambda weight: weight,
    ) -> "LayerReport":
        """The report of a kernel that replaces `matrix(weight)` and takes inputs of `dtype`."""
        concrete = isinstance(weight, Array) and not isinstance(weight, Tracer)
        return cls(
            path,
            tuple(weight.shape),
            kernel.format,
            weight.size * weight.dtype.itemsize,
            kernel.nbytes,
            _error(matrix(weight), kernel) if concrete else None,
            backend_of(dtype, kernel),
        )


@dataclasses.dataclass(frozen=True)
class QuantizationReport:
    """What `quantize_model` did: `layers`, and a table when printed."""

    layers: tuple[LayerReport, ...]

    @property
    def nbytes_before(self) -> int:
        return sum(layer.nbytes_before for layer in self.layers)

    @property
    def nbytes_after(self) -> int:
        return sum(layer.nbytes_after for layer in self.layers)

    def __str__(self) -> str:
        head = ("layer", "shape", "format", "before", "after", "error", "backend")
        rows: list[tuple[str, ...]] = [head, *map(_row, self.layers)]
        chosen = sum(layer.format is not None for layer in self.layers)
        total = f"{chosen} of {len(self.layers)} layers quantized"
        rows.append(
            (total, "", "", size_words(self.nbytes_before), size_words(self.nbytes_after), "", "")
        )
        return "\n".join(aligned(rows))


def _error(weight: Array, kernel: QuantizedArray) -> float:
    mesh = explicit.mesh_of((weight, kernel))
    compute = _relative_error
    if mesh is not None:
        compute = explicit.automatic(compute, mesh, jax.P())
    return float(compute(weight, kernel))


@jax.jit
def _relative_error(weight: Array, kernel: QuantizedArray) -> Array:
    weight = weight.astype(jnp.float32)
    change = jnp.linalg.norm((kernel.dequantize(jnp.float32) - weight).ravel())
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
        " x ".join(map(str, layer.shape)),
        format_words(layer.format),
        size_words(layer.nbytes_before),
        size_words(layer.nbytes_after),
        "" if layer.error is None else f"{layer.error:.4f}",
        layer.backend,
    )


def format_words(format: Format | None) -> str:
    if format is None:
        return "-"
    groups = "per channel" if format.group_size == -1 else f"groups of {format.group_size}"
    zero = "" if format.zero == "none" else f", {format.zero} zero"
    return f"{format.bits} bits, {groups}{zero}"


def size_words(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def aligned(rows: Iterable[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
