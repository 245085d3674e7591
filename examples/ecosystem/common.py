"""Shared by the scripts of this folder: inputs, random weights, and the check of a model."""

import importlib.metadata
import logging
import warnings
from typing import Any

import jax
import jax.numpy as jnp

SEQUENCES, LENGTH, VOCABULARY = 2, 16, 512
IDS = jax.random.randint(jax.random.key(0), (SEQUENCES, LENGTH), 1, VOCABULARY)
POSITIONS = jnp.broadcast_to(jnp.arange(LENGTH), IDS.shape)
# Limits of the relative error of outputs with 8-bit weights, by dtype of the model.
LIMITS = {"float32": 0.03, "bfloat16": 0.05}
COVERAGE = 0.9

warnings.simplefilter("ignore")  # warnings of other packages
logging.disable(logging.WARNING)


def randomized(params: Any) -> Any:
    """Replaces all weights of a tree by random ones, so that every layer has an effect."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(tree, [_random(leaf, i) for i, leaf in enumerate(leaves)])


def _random(weight: jax.Array, number: int) -> jax.Array:
    if weight.ndim < 2:
        return weight  # a norm or a bias
    values = jax.random.normal(jax.random.key(number), weight.shape) * weight.size**-0.25
    return values.astype(weight.dtype)


def check(package: str, model: str, found: jax.Array, wanted: jax.Array, coverage: float) -> None:
    """Prints a line, and compares outputs with the float model.

    `coverage` is the quantized share of the bytes of linear maps and embeddings.
    """
    difference = (found - wanted).astype(jnp.float32)
    error = float(jnp.linalg.norm(difference) / jnp.linalg.norm(wanted.astype(jnp.float32)))
    version = importlib.metadata.version(package)
    print(f"{package} {version} | {model} | error {error:.4f} | coverage {coverage:.1%}")
    assert error <= LIMITS[wanted.dtype.name], f"the error in {wanted.dtype} is {error}"
    assert coverage >= COVERAGE, f"the coverage is {coverage}"
