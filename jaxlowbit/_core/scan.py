"""`scan` over stacked layers without copying their words."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import checks
from .array import QuantizedArray


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    length: int | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """`jax.lax.scan` that indexes stacked `QuantizedArray`s instead of slicing them.

    `jax.lax.scan` copies the slice of every array it maps over, including packed words. Here `f`
    gets `stack.select(i)` for each `QuantizedArray` of `xs`: kernels index it on the device.

    **Arguments:** as for `jax.lax.scan`; other keyword arguments are passed to it.

    **Returns:** the final carry and the stacked outputs.

    **Raises:** `ValueError` if a `QuantizedArray` in `xs` is not a stack (L, k, n), if stacks and
    arrays differ in length, and for a length that is negative or not an integer.

    ```python
    scan(lambda h, layer: (jax.nn.relu(h @ layer), None), x, stacked_layers)
    ```
    """
    if not callable(f):
        raise TypeError(
            f"scan: f is {checks.brief(f)}, but it must be a function of the carry and a slice."
        )
    for name, tree in (("init", init), ("xs", xs)):
        for leaf in jax.tree.leaves(tree):
            if not isinstance(leaf, jax.Array):
                checks.array("scan", f"a leaf of {name}", leaf)
    leaves, treedef = jax.tree.flatten(xs, is_leaf=lambda x: isinstance(x, QuantizedArray))
    stacks = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, QuantizedArray)}
    arrays = [leaf for i, leaf in enumerate(leaves) if i not in stacks]
    shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
    if length is not None and (not isinstance(length, int | np.integer) or length < 0):
        raise ValueError(
            f"scan: length={checks.brief(length)}, but it must be the number of steps, an integer "
            "from 0 on; leave it out where xs has arrays."
        )
    lengths = {shape[0] for shape in shapes if shape} | (set() if length is None else {length})
    if len(lengths) != 1 or () in shapes:
        raise ValueError(
            f"scan: xs of shapes {shapes} and length={length} do not name one number of steps; "
            "give every array the same leading axis, or a length where there is none."
        )

    for stack in stacks.values():
        if stack.ndim != 3 or stack.index is not None:
            raise ValueError(
                f"scan: a QuantizedArray of xs with shape {stack.shape} is not a stack (L, k, n), "
                "or it is a view of one; index or reshape it first."
            )

    (steps,) = lengths
    if steps == 0:  # an empty stack has nothing to select
        return jax.lax.scan(f, init, xs, length, **options)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        i, slices = x
        slices = iter(slices)
        inputs = [stacks[j].select(i) if j in stacks else next(slices) for j in range(len(leaves))]
        return f(carry, jax.tree.unflatten(treedef, inputs))

    return jax.lax.scan(step, init, (jnp.arange(steps, dtype=jnp.int32), arrays), **options)
