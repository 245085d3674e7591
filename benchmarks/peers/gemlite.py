"""GemLite: Triton kernels for integers of 1, 2, 4 and 8 bits, and for 4- and 8-bit floats."""

from importlib import import_module
from typing import Any

from jaxlowbit import Format
from jaxlowbit._core import format as formats

from . import Peer
from .torch import float_dtype, scales

_DEVICE = "cuda:0"


def _make(codes: Any, format: Format) -> Any:
    helper = import_module("gemlite.helper")
    qvalue = codes.qvalue.t().contiguous()
    scale = scales(codes, format).t().contiguous()
    dtype = float_dtype(codes)
    if format == formats.FP8:
        floats = qvalue.view(import_module("torch").float8_e4m3fn)
        return helper.A16W8_FP8(device=_DEVICE, dtype=dtype).from_weights(floats, scales=scale)
    if format == formats.MXFP4:
        return helper.A16W4_MXFP(device=_DEVICE, dtype=dtype).from_weights(qvalue, scale)
    if format == formats.NVFP4:
        # GemLite divides by the tensor scale.
        inverse = 1 / codes.tensor_scale
        packer = helper.A16W4_NVFP(device=_DEVICE, dtype=dtype)
        return packer.from_weights(qvalue, scales=scale, meta_scale=inverse)
    zero = codes.zero
    if zero is None:
        zero = codes.scale.new_full(codes.scale.shape, format.offset)
    size = qvalue.shape[1] if format.group_size == -1 else format.group_size
    packer = helper.A16Wn(device=_DEVICE, dtype=dtype)
    return packer.from_weights(qvalue, scale, zero.t().contiguous(), format.bits, size)


def _call(x: Any, layer: Any) -> Any:
    return layer(x)


def _unsupported(format: Format, dtype: str) -> str | None:
    if format.zero == "float" or dtype == "float32":
        return "its zeros are codes, and its activations have 16 bits"
    if format in (formats.FP8, formats.MXFP4, formats.NVFP4):
        return None
    if format.codebook is not None or format.scale is not None:
        return "besides integers, the adapter has e4m3 per channel, mxfp4 and nvfp4"
    grouped = format.group_size != -1
    if format.bits not in (1, 2, 4, 8) or (grouped and format.group_size % 32):
        return "it has 1, 2, 4 and 8 bits, in groups of multiples of 32 or per channel"
    return None


PEER = Peer("gemlite", "gemlite", "0.6.0.post2", _make, _call, _unsupported, only_integers=False)
