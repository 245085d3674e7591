"""Matrices with a factor for each input feature, which no format represents."""

import dataclasses

import numpy as np

from ._files import FLOATS, Tensor
from ._matrix import Matrix
from ._scaled import scales


def smoothed(matrix: Matrix, factors: Tensor | None) -> Matrix:
    """The product of a matrix and the factors of its inputs, (in,), in float32.

    Such factors come from SmoothQuant and AWQ. The matrix is unchanged without factors.

    **Raises:** `ValueError` for factors of another type or shape.
    """
    if factors is None:
        return matrix
    k = matrix.shape[1]
    factors.check(FLOATS, (k,), (1, k))

    def floats(start: int, stop: int) -> np.ndarray:
        own = scales(factors, factors.array().astype(np.float32).reshape(-1))
        return matrix.rows(start, stop) * own

    return dataclasses.replace(
        matrix,
        tensors=(*matrix.tensors, factors),
        format=None,
        floats=floats,
        activation_dtype=None,  # the library rounds products of inputs and factors
        reason=f"{factors.name!r} multiplies each of its inputs",
    )
