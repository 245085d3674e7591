"""Platforms with custom calls, and the products that they support."""

from collections.abc import Sequence

import jax.numpy as jnp

from .._core.format import Format
from . import cpu, cuda, extension

PRODUCTS = {"cpu": cpu.matmul, "cuda": cuda.matmul}
_UNSUPPORTED = {"cpu": cpu.unsupported, "cuda": cuda.unsupported}


def unsupported(
    platform: str,
    lhs: jnp.dtype,
    format: Format,
    *,
    sizes: Sequence[int] = (),
    transposed: bool = False,
) -> str | None:
    """Returns None if this build's custom call of `platform` supports this problem, else why not.

    XLA may expand scales of two levels before the call. `sizes`: k and n, if known.
    """
    format = format.expanded
    reason = extension.unavailable(platform) or uncovered(
        platform, lhs, format, sizes=sizes, transposed=transposed
    )
    if reason is None and platform == "cuda":
        reason = extension.uncompiled(format, lhs, transposed=transposed)
    return reason


def uncovered(
    platform: str,
    lhs: jnp.dtype,
    format: Format,
    *,
    sizes: Sequence[int] = (),
    transposed: bool = False,
) -> str | None:
    """Returns None if the kernels for `platform`, if built, support this problem, else why not."""
    if platform not in _UNSUPPORTED:
        return "there is no custom call for this platform"
    return _UNSUPPORTED[platform](lhs, format.expanded, sizes=sizes, transposed=transposed)
