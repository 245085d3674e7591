"""Backends that can compute a product."""

from typing import Any

import jax

from .._backends import registry
from .._backends.target import local_gpus
from .._core import checks
from .._core.activations import EXACT, QuantizedActivations
from .._core.array import QuantizedArray
from .._core.dtypes import FLOATS


def supported_backends(lhs: Any, rhs: QuantizedArray) -> dict[str, str | None]:
    """Returns, for each backend, None if it can compute `lhs @ rhs`, else the reason.

    Nothing is computed. `lhs` is any object with a dtype, such as a `jax.ShapeDtypeStruct`, or
    `QuantizedActivations`, which every backend can multiply in bfloat16 (`explain` says which ones
    do); the custom call depends on the platform that a program is compiled for. `"cuda"` also has a
    reason if JAX sees a GPU that the kernels were not compiled for.

    **Raises:** `TypeError` if `lhs` has no dtype, or `rhs` is not quantized.

    ```python
    supported_backends(jax.ShapeDtypeStruct((1, 256), jnp.bfloat16), rhs)["cuda"]
    ```
    """
    checks.quantized("supported_backends", "rhs", rhs, QuantizedArray)
    if isinstance(lhs, QuantizedActivations):
        dtype = EXACT
    else:
        checks.shaped("supported_backends", "lhs", lhs)
        dtype = jax.dtypes.canonicalize_dtype(lhs.dtype)  # as in a product
        if dtype not in FLOATS:
            reason = f"lhs is {dtype}, but activations are float32, bfloat16 or float16"
            return dict.fromkeys(registry.BACKENDS, reason)
    reasons = {
        name: registry.unsupported(name, dtype, rhs.format, sizes=rhs.padded_shape)
        for name in registry.BACKENDS
    }
    return reasons | {"cuda": reasons["cuda"] or local_gpus().unfit}
