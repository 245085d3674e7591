"""The backends of a product; `_matmul/lowering.py` chooses among them.

A backend is a module with the two functions of `Backend`. To add one, list it in `BACKENDS`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax.numpy as jnp
from jax import Array

from .._core.format import Format
from . import cpu, cuda, definition, pallas
from .problem import Operands, Problem
from .target import Target


class Backend(Protocol):
    """One way to compute products."""

    def unsupported(
        self, lhs: jnp.dtype, format: Format, *, sizes: Sequence[int], transposed: bool, built: bool
    ) -> str | None:
        """As `registry.unsupported`; `format` has no two-level scales: XLA may expand them."""
        ...

    def lower(self, problem: Problem, operands: Operands, target: Target) -> Callable[..., Array]:
        """The function of a problem and its operands; here, `operands` are shapes and dtypes."""
        ...


BACKENDS: Mapping[str, Backend] = {"cuda": cuda, "cpu": cpu, "pallas": pallas, "xla": definition}

PLATFORMS = {"cuda": ("cuda",), "cpu": ("cpu",), "pallas": pallas.PLATFORMS}
"""Platforms that a backend can be requested on; the definition runs on all of them."""


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
    - `built`: whether by this build, on this machine; otherwise by a build with all kernels.
    """
    if name is None or name not in BACKENDS:
        return "there is no custom call for this platform"
    if format.two_levels:
        format = format.expanded
    return BACKENDS[name].unsupported(lhs, format, sizes=sizes, transposed=transposed, built=built)
