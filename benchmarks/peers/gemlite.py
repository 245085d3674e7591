"""GemLite: Triton kernels for 1, 2, 4 and 8 bits."""

from importlib import import_module
from typing import Any

from jaxlowbit import Format

from . import Peer


def _make(codes: Any, format: Format) -> Any:
    helper = import_module("gemlite.helper")
    zero = codes.zero
    if zero is None:
        zero = codes.scale.new_full(codes.scale.shape, format.offset)
    qvalue, scale, zero = (a.t().contiguous() for a in (codes.qvalue, codes.scale, zero))
    size = qvalue.shape[1] if format.group_size == -1 else format.group_size
    packer = helper.A16Wn(device="cuda:0", dtype=scale.dtype)
    return packer.from_weights(qvalue, scale, zero, format.bits, size)


def _call(x: Any, layer: Any) -> Any:
    return layer(x)


def _unsupported(format: Format, dtype: str) -> str | None:
    grouped = format.group_size != -1
    if format.bits not in (1, 2, 4, 8) or (grouped and format.group_size % 32):
        return "it has 1, 2, 4 and 8 bits, in groups of multiples of 32 or per channel"
    if format.zero == "float" or dtype == "float32":
        return "its zeros are in units of codes, and its activations 16 bits"
    return None


PEER = Peer("gemlite", "gemlite", "0.6.0.post2", _make, _call, _unsupported)
