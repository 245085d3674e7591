"""Factors of input channels that move outliers of activations into weights (SmoothQuant)."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from .._core import checks
from .._core.dtypes import FLOATS
from .._core.scales import least
from .._core.smoothing import check_values, of_channels


def smoothing_factor(absmax: Any, weight: Any, *, alpha: float = 0.5) -> Array:
    """Returns the factors of SmoothQuant, which divide the input channels of activations.

    `absmax ** alpha / max(abs(weight)) ** (1 - alpha)`: activations are divided by it, and rows of
    the weight multiplied, so that their product stays the same. Channels with outliers, which
    decide the scales of tokens, become smaller, and their weights larger. The method is SmoothQuant
    (Xiao et al., 2022), equation 4.

    **Arguments:**

    - `absmax`: floats (k,), from 0 on: the largest magnitude of each channel of activations, over
      the tokens of a calibration set.
    - `weight`: float32, bfloat16 or float16 (k, n), that they are multiplied by; for several
      matrices, such as queries, keys and values, concatenated along n.
    - `alpha`: 0 to 1, how much of the difficulty moves to the weight: usually 0.5, more for larger
      outliers.

    **Returns:** float32 (k,), positive; 1 for channels whose activations or weights are all 0.

    **Raises:** `TypeError` for arguments that are not arrays or a number, `ValueError` for other
    shapes and dtypes and, outside `jax.jit`, other values.

    ```python
    x, w = jnp.ones((8, 256)).at[:, 3].set(100), jnp.ones((256, 512))
    factor = smoothing_factor(jnp.max(jnp.abs(x), axis=0), w)
    q = quantize(w * factor[:, None], INT8)
    y = quantized_matmul(x, q, lhs_qtype=jnp.int8, lhs_factor=factor)
    ```
    """
    caller = "smoothing_factor"
    weight = checks.array(caller, "weight", weight, "floats (k, n)")
    if weight.dtype not in FLOATS or weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(
            f"{caller}: weight is {checks.brief(weight)}, but it must be float32, bfloat16 or "
            "float16 (k, n), which are from 1; cast or reshape it."
        )
    absmax = of_channels(caller, "absmax", absmax, weight.shape[0])
    check_values(caller, "absmax", absmax, "from 0 on", lambda values: values >= 0)
    checks.finite(caller, "weight", weight, "repair them")
    alpha = checks.positive(caller, "alpha", alpha)
    if alpha > 1:
        raise ValueError(f"{caller}: alpha is {alpha!r}, but it must be from 0 to 1, such as 0.5.")
    rows = jnp.max(jnp.abs(weight.astype(jnp.float32)), axis=1)
    smallest = least(jnp.float32)
    factor = jnp.maximum(absmax, smallest) ** alpha / jnp.maximum(rows, smallest) ** (1 - alpha)
    factor = jnp.clip(factor, smallest, float(jnp.finfo(jnp.float32).max))
    return jnp.where((absmax >= smallest) & (rows >= smallest), factor, 1.0)
