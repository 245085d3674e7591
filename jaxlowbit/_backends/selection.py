"""Selection of CUDA kernels: devices, choices, and tables of measured choices.

The functions here call the custom call's selection (`cuda/select/select.h`), and need no GPU.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._core.activations import EXACT, VALUES
from .._core.format import Format
from . import call
from .cuda import HOPPER, parts_of, reads_super_blocks
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

    def fields(self) -> tuple[int, int, int, int, int, str, bool, str]:
        """The fields that the compiled library compares."""
        bits, group_size, zero = self.format.bits, self.format.group_size, self.format.zero
        widened = self.scale != self.lhs
        return self.m, self.n, self.k, bits, group_size, self.lhs, widened, zero


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
    **variant: bool,
) -> dict:
    """The CUDA handler's choice for a device: its fields, and "unsupported", a reason or "".

    `variant`: further properties of the product, by the names of `_ffi.select`. XLA expands scales
    of two levels that no kernel reads in such a product. An 8-bit lhs is quantized activations with
    padded columns.
    """
    if format.scale == "two_level" and not (
        device.compute_capability == HOPPER and reads_super_blocks(lhs, batch * m, k, n, format)
    ):
        format, scale = format.expanded, jnp.dtype("float32")
    parts = parts_of(lhs)
    narrow = lhs in VALUES
    floats = EXACT if narrow else lhs
    k = call.padded_columns(k) if narrow else k
    return ffi.select(
        m=parts * m,
        n=n,
        k=k,
        bits=format.bits,
        codebook=ffi.codebook(format.values),
        group_size=format.group_size,
        batch=batch,
        lhs=str(lhs) if narrow or lhs == jnp.float16 else "bfloat16",
        float32_scale=scale != floats or parts > 1,  # `cuda.matmul` widens scales
        narrow_scale="super" if format.scale == "two_level" else format.scale or "",
        zero=format.zero,
        scale_accumulators=parts > 1,
        **variant,
        **_named(device),
        workspace_bytes=call.workspace_bytes(batch, parts * m, n),
    )


def candidates(product: Product, device: DeviceFacts) -> list[Choice]:
    """The choices worth measuring for a product, starting with the default one."""
    m, n, k, bits, group_size, lhs, float32_scale, zero = product.fields()
    found = ffi.candidates(
        m=m,
        n=n,
        k=k,
        bits=bits,
        group_size=group_size,
        lhs=lhs,
        float32_scale=float32_scale,
        zero=zero,
        **_named(device),
        workspace_bytes=call.workspace_bytes(1, m, n),
    )
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
        (entry[0].fields(), entry[1], entry[2] if len(entry) == 3 else 1) for entry in entries
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
