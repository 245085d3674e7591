"""`Matrix`: a quantized matrix of a checkpoint whose elements have not been read yet."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.array import QuantizedArray
from .._core.format import Format
from . import _packing
from ._files import Tensor
from ._packing import Unpacked


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix (out, in), or a stack of them, read from tensors with checked headers.

    - `name`: its name in the tree that `load` returns, such as `model.layers.0.mlp.up_proj.weight`.
    - `kind`: its name in reports, such as `"GPTQ"`.
    - `tensors`: the tensors that it is read from; errors name the first.
    - `shape`: (out, in), of one matrix of a stack.
    - `format`: the format that represents it exactly; None, with a `reason`, if there is none.
    - `unpack(start, stop)`: codes, scales and zeros of output rows `start` to `stop` - 1, counted
      through the stack, with the input features in the order of the file. Raises `ValueError` for
      invalid values.
    - `floats(start, stop)`: these rows as float32 (rows, in), if `format` is None.
    - `permutation`: None, or the stored order of the input features, int32 (in,)
      (`permutations.of_groups`).
    - `tensor_scale`: the factor of all weights, for a format with a tensor scale.
    - `activation_dtype`: None, or the dtype that the checkpoint's library rounds inputs to, with a
      scale per token.
    - `stack`: None, or the number of matrices.
    - `share`: its share of the tensors' bytes.
    """

    name: str
    kind: str
    tensors: tuple[Tensor, ...]
    shape: tuple[int, int]
    format: Format | None
    unpack: Callable[[int, int], Unpacked] | None = None
    floats: Callable[[int, int], np.ndarray] | None = None
    reason: str = ""
    permutation: np.ndarray | None = None
    tensor_scale: float = 1.0
    activation_dtype: Any = None
    stack: int | None = None
    share: float = 1.0

    @property
    def where(self) -> str:
        """The file and the name, as the beginning of errors."""
        return self.tensors[0].where

    @property
    def nbytes(self) -> int:
        return round(self.share * sum(tensor.nbytes for tensor in self.tensors))

    def part(self, start: int, stop: int) -> "Matrix":
        """A range of output rows as a matrix."""

        def shifted(function: Callable[[int, int], Any] | None) -> Callable[[int, int], Any] | None:
            if function is None:
                return None
            return lambda first, last: function(start + first, start + last)

        rows, k = self.shape
        return dataclasses.replace(
            self,
            shape=(stop - start, k),
            unpack=shifted(self.unpack),
            floats=shifted(self.floats),
            share=self.share * (stop - start) / rows,
        )

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The float32 weights (rows, in) of some output rows, as the library computes them."""
        if self.format is None:
            assert self.floats is not None
            return self.floats(start, stop)
        weights = _packing.dequantized(self._ordered(start, stop), self.format)
        if self.permutation is not None:
            weights = weights[:, np.argsort(self.permutation)]
        return weights if self.tensor_scale == 1 else weights * np.float32(self.tensor_scale)

    def pack(self, scale_dtype: Any = None) -> QuantizedArray:
        """The packed matrix (in, out), or a stack of them; `scale_dtype` rounds scales and zeros.

        **Raises:** `ValueError` for invalid values, and for a matrix without a format.
        """
        if self.format is None:
            raise ValueError(
                f"no format represents it exactly: {self.reason}; pass requantize= with a format, "
                "such as 'int8', which rounds it."
            )
        rows, parts = self.shape[0], []
        for i in range(self.stack or 1):

            def read(start: int, stop: int, first: int = i * rows) -> Unpacked:
                return self._ordered(first + start, first + stop)

            parts.append(
                _packing.pack_rows(read, self.shape, self.format, scale_dtype, self.tensor_scale)
            )
        if self.permutation is not None:
            order = jnp.asarray(self.permutation, jnp.int32)
            parts = [part._with(permutation=order) for part in parts]
        if self.stack is None:
            return parts[0]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)

    def _ordered(self, start: int, stop: int) -> Unpacked:
        """Rows with the input features in stored order."""
        assert self.unpack is not None
        found = self.unpack(start, stop)
        if self.permutation is None:
            return found
        return found._replace(qvalue=found.qvalue[:, self.permutation])


class Found(NamedTuple):
    """The contents of a quantized folder.

    - `matrices`: the quantized matrices; `floats` excludes their tensors.
    - `unused`: names of skipped tensors, which are harmless or mentioned in `sentences`.
    - `sentences`: warnings about entries that have no effect here but may change results.
    - `floats`: tensors that are renamed.
    """

    matrices: list[Matrix]
    unused: frozenset[str] = frozenset()
    sentences: tuple[str, ...] = ()
    floats: Mapping[str, Tensor] = {}
