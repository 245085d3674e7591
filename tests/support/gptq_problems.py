"""Weights and inputs for GPTQ, the same for `tools/golden_gptq.py` and the tests."""

import numpy as np

SIZE = (256, 48)  # (k, n)
FORMATS = {"int4-g64": (4, True), "int3-g64": (3, True), "int4-g64-integer": (4, False)}
"""Bits and whether a format is symmetric, by our names."""


def problem(k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """A weight (k, n) with heavy tails, and second moments (k, k) of correlated inputs, float32."""
    rng = np.random.default_rng(k)
    mixed = rng.normal(size=(4 * k, 16)) @ rng.normal(size=(16, k)) / 4
    inputs = (mixed + rng.normal(size=(4 * k, k))) * np.exp(0.7 * rng.normal(size=k))
    weight = rng.standard_t(4, size=(k, n))
    return weight.astype(np.float32), (inputs.T @ inputs / len(inputs)).astype(np.float32)


def output_error(weight: np.ndarray, rounded: np.ndarray, moments: np.ndarray) -> float:
    """The relative change of products with the inputs, in norm."""

    def norm(matrix: np.ndarray) -> float:
        wide = matrix.astype(np.float64)
        return float(np.sum(wide * (moments.astype(np.float64) @ wide))) ** 0.5

    return norm(rounded - weight) / norm(weight)
