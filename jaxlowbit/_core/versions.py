"""Layout versions of packed words."""

from typing import Any

import jax
import numpy as np
from jax import Array
from jax.core import Tracer

from . import checks, layout


def check_layout_version(tree: Any) -> None:
    """Raises unless this library reads the layout version of all packed words in a pytree.

    Products outside `jax.jit` check their weights themselves; traced code cannot see the version.
    Call this once after restoring a checkpoint.

    **Arguments:** `tree`: a pytree with `QuantizedArray`s, an `nnx.Module` with quantized layers or
    its state, or the variables of a quantized Linen model.

    **Raises:** `ValueError` with the path of a weight and the version found; `ValueError` too if
    `tree` has no quantized weights.

    ```python
    check_layout_version({"up": quantize(jnp.ones((256, 512)), INT4)})
    ```
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = [jax.tree_util.keystr((key,), simple=True) for key in path]
        if names and names[-1] == "value":  # of a variable of Flax
            names.pop()
        if names and names[-1] in ("packed", "version"):
            found.setdefault((*names[:-1],), {})[names[-1]] = leaf
    versions = {path: leaves["version"] for path, leaves in found.items() if len(leaves) == 2}
    if not versions:
        raise ValueError(
            f"check_layout_version: tree is {checks.brief(tree)}, which has no quantized weights; "
            "pass a quantized model, its nnx.state, all its Linen variables or QuantizedArrays."
        )
    for path, version in versions.items():
        try:
            check(version)
        except ValueError as error:
            where = f"in {'.'.join(path)}: " if path else ""
            raise ValueError(f"check_layout_version: {where}{error}") from None


def check(version: Any) -> None:
    """Raises for words of another layout version. Does nothing while tracing.

    **Raises:** `ValueError` with the version found.
    """
    if isinstance(version, Tracer) or not hasattr(version, "__array__"):
        return
    found = _local(version)
    if (found != layout.VERSION).any():
        raise ValueError(
            "QuantizedArray: the words were packed with layout version "
            f"{np.unique(found).tolist()}, but this library reads version {layout.VERSION}; "
            "quantize the weights again, or use the library that wrote them."
        )


def _local(array: Any) -> np.ndarray:
    """Returns this process's values of a concrete array; JAX keeps a copy of them."""
    if isinstance(array, Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        return np.array([x for shard in array.addressable_shards for x in np.ravel(shard.data)])
    return np.asarray(array)
