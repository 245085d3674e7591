"""The backends of a product, and the choice among them.

A backend is a module with the two functions of `Backend`. To add one, list it in `BACKENDS`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax.numpy as jnp
from jax import Array

from .._core.format import Format
from .._core.layout import ATOM
from . import cpu, cuda, definition, extension, pallas
from .problem import Operands, Problem
from .target import Target


class Backend(Protocol):
    """One way to compute products."""

    def unsupported(
        self, lhs: jnp.dtype, format: Format, *, sizes: Sequence[int], transposed: bool
    ) -> str | None:
        """Returns None if some build computes such products, else the reason.

        `format` has no scales of two levels: XLA may expand them. `sizes`: k and n, if known.
        """
        ...

    def lower(self, problem: Problem, operands: Operands, target: Target) -> Callable[..., Array]:
        """The function of a problem and its operands; here, `operands` are shapes and dtypes."""
        ...


BACKENDS: Mapping[str, Backend] = {"cuda": cuda, "cpu": cpu, "pallas": pallas, "xla": definition}

CUSTOM_CALLS = ("cuda", "cpu")
"""Backends that run on the platform of their name, and that are its default."""

_PLATFORMS = {"cuda": ("cuda",), "cpu": ("cpu",), "pallas": pallas.PLATFORMS}


def unsupported(
    name: str | None,
    lhs: jnp.dtype,
    format: Format,
    *,
    sizes: Sequence[int] = (),
    transposed: bool = False,
    built: bool = True,
) -> str | None:
    """Returns None if a backend computes such products, else the reason.

    - `name`: a backend, or a platform, for its custom call.
    - `sizes`: k and n, if known.
    - `built`: by this build, on this machine; otherwise by a build with all kernels.
    """
    if name is None or name not in BACKENDS:
        return "there is no custom call for this platform"
    if built and name in CUSTOM_CALLS and (reason := extension.unavailable(name)):
        return reason
    format = format.expanded
    reason = BACKENDS[name].unsupported(lhs, format, sizes=sizes, transposed=transposed)
    if reason is None and built and name == "cuda":
        reason = extension.uncompiled(format, lhs, transposed=transposed)
    return reason


def lower(problem: Problem, operands: Operands, target: Target) -> Callable[..., Array]:
    """The function that computes a product on a target: by the requested backend, or by the
    target's custom call, or else by the definition."""
    name = problem.backend
    if target.platform not in _PLATFORMS.get(name or "xla", (target.platform,)):
        raise ValueError(
            f"jaxlowbit: backend={name!r}, but this program is compiled for "
            f"{target.platform or 'another platform'}; use backend=None or 'xla'."
        )
    unfit = target.unfit
    if unfit and name == "cuda":
        raise ValueError(f"jaxlowbit: backend='cuda', but {unfit}; use backend=None or 'xla'.")
    if math.prod(operands.lhs.shape[:-1]) == 0:
        return definition.empty
    name = target.platform if name is None else name
    n_blocks, k_blocks, _ = operands.packed.shape[-3:]
    sizes = (k_blocks * ATOM, n_blocks * ATOM)
    missing = (unfit if name == "cuda" else None) or unsupported(
        name, operands.lhs.dtype, problem.format, sizes=sizes, transposed=problem.transposed
    )
    backend = definition if missing or name is None else BACKENDS[name]
    return backend.lower(problem, operands, target)
