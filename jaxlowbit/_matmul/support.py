"""Backends that can compute a product, and GPUs that run the kernels."""

from collections.abc import Sequence
from typing import Any

import jax

from .._backends import custom_calls, pallas, selection
from .._core import checks
from .._core.activations import EXACT, QuantizedActivations
from .._core.array import QuantizedArray
from .._core.dtypes import FLOATS


def supported_backends(lhs: Any, rhs: QuantizedArray) -> dict[str, str | None]:
    """Returns, for each backend, None if it can compute `lhs @ rhs`, else the reason why not.

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
            return dict.fromkeys(("cuda", "cpu", "pallas", "xla"), reason)
    reasons = {
        name: custom_calls.unsupported(name, dtype, rhs.format, sizes=rhs.padded_shape)
        for name in ("cuda", "cpu")
    }
    reasons["cuda"] = reasons["cuda"] or _unfit(_local_gpus())
    return {**reasons, "pallas": pallas.unsupported(rhs.format), "xla": None}


def _local_gpus() -> list[Any]:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:  # JAX has no such backend here
        return []


def _unfit(gpus: Sequence[Any]) -> str | None:
    capabilities = sorted({selection.compute_capability(gpu) for gpu in gpus})
    return next(filter(None, map(selection.unfit, capabilities)), None)


def only_local_gpus_of(compute_capability: int) -> bool:
    """Whether all GPUs that JAX sees here have this compute capability, and there is one."""
    return {selection.compute_capability(gpu) for gpu in _local_gpus()} == {compute_capability}


def only_gpus_of(compute_capability: int, context: Any) -> bool:
    """Whether the GPUs that a program is lowered for are known and have this compute capability."""
    gpus = _gpus_of(context)
    capabilities = {selection.compute_capability(gpu) for gpu in gpus}
    return capabilities == {compute_capability} and _unfit(gpus) is None


def unfit_gpus(context: Any) -> str | None:
    """The reason why CUDA kernels do not run on the GPUs that a program is lowered for, or None.

    Also None if the GPUs are not known: in an exported program, the custom call raises when it
    runs.
    """
    return _unfit(_gpus_of(context))


def _gpus_of(context: Any) -> list[Any]:
    """The GPUs that a program is lowered for; empty if they are not known."""
    if context.lowering_parameters.for_export or context.backend is None:
        return []
    return [gpu for gpu in context.backend.local_devices() if gpu.platform == "gpu"]
