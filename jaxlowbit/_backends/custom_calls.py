"""Platforms with a custom call, and why one cannot compute a product."""

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
    """Why the custom call of `platform` cannot compute this problem with this build, or None.

    Scales of two levels may be expanded in front of it. `sizes`: k and n, where they are known.
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
    """Why the kernels for `platform`, in a build that has them, lack this problem, or None."""
    if platform not in _UNSUPPORTED:
        return "there is no custom call for this platform"
    return _UNSUPPORTED[platform](lhs, format.expanded, sizes=sizes, transposed=transposed)
