"""Selection of CUDA kernels: devices, choices, and tables of measured choices.

The functions here call the custom call's selection (`cuda/select/select.h`), and need no GPU.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._core.activations import EXACT, VALUES
from .._core.format import Format
from . import call
from .cuda import FLOAT32_PARTS, HOPPER, reads_super_blocks
from .extension import ffi


class DeviceFacts(NamedTuple):
    """Properties of a GPU that the selection depends on."""

    name: str
    compute_capability: int
    num_sms: int
    shared_bytes_per_sm: int
    clock_mhz: int = 0  # 0 if unknown: treated as an H200
    memory_gb_per_s: int = 0  # likewise


class Product(NamedTuple):
    """One product (m, k) @ (k, n) with integers, as choices are measured for it."""

    m: int
    n: int
    k: int
    format: Format
    lhs: str  # dtype
    scale: str  # dtype

    def record(self) -> list[int]:
        """The product as the compiled library compares it."""
        scale = self.scale if self.scale == self.lhs else "float32"  # kernels widen other dtypes
        return call.record(self.format, self.lhs, scale, m=self.m, n=self.n, k=self.k)


class Choice(NamedTuple):
    """A kernel and its parameters for a product (`cuda/select/select.h`)."""

    kernel: str
    block_m: int
    split_k: int
    slices: int
    tile: int
    peers: int


def choose(
    batch: int,
    m: int,
    k: int,
    n: int,
    lhs: jnp.dtype,
    scale: jnp.dtype,
    format: Format,
    *,
    device: DeviceFacts,
    gated: bool = False,
    transposed: bool = False,
    **launch: bool,
) -> dict:
    """The CUDA handler's choice for a device: its fields, and "unsupported", a reason or "".

    `launch`: properties of the launch, by the names of `_ffi.select`. XLA expands scales of two
    levels that no kernel reads in such a product. An 8-bit lhs is quantized activations with padded
    columns.
    """
    if format.two_levels and not (
        device.compute_capability == HOPPER and reads_super_blocks(lhs, batch * m, k, n, format)
    ):
        format, scale = format.expanded, jnp.dtype("float32")
    parts = FLOAT32_PARTS if lhs == jnp.float32 else 1
    narrow = lhs in VALUES
    floats = EXACT if narrow else lhs
    product = call.record(
        format,
        EXACT if parts > 1 else lhs,
        floats if scale == floats else "float32",  # `call.stored` widens other scales
        batch=batch,
        m=parts * m,
        n=n,
        k=call.padded_columns(k) if narrow else k,
        scale_accumulators=parts > 1,
        gated=gated,
        transposed=transposed,
    )
    bytes = ffi.partial_sums_bytes(product)
    return ffi.select(product, **launch, **_named(device), workspace_bytes=bytes)


def candidates(product: Product, device: DeviceFacts) -> list[Choice]:
    """The choices worth measuring for a product, starting with the default one."""
    asked = product.record()
    bytes = ffi.partial_sums_bytes(asked)
    found = ffi.candidates(asked, **_named(device), workspace_bytes=bytes)
    return [Choice(*fields) for fields in found]


def set_tuned(
    device: DeviceFacts, entries: Sequence[tuple[Product, Choice] | tuple[Product, Choice, int]]
) -> list[str]:
    """Sets the table of measured choices for a device whose kernels are not loaded yet.

    A choice applies to its product and to smaller M, down to the next entry or, if given, to a
    minimum M.

    **Returns:** for each entry the reason for leaving it out, or "".
    """
    fields = [
        (entry[0].record(), entry[1], entry[2] if len(entry) == 3 else 1) for entry in entries
    ]
    return ffi.set_tuned(
        device.name,
        fields,
        compute_capability=device.compute_capability,
        num_sms=device.num_sms,
        shared_bytes_per_sm=device.shared_bytes_per_sm,
    )


def _named(device: DeviceFacts) -> dict[str, Any]:
    fields = device._asdict()
    return {"device_name": fields.pop("name")} | fields
