"""bitsandbytes: nf4 and fp4, quantized from the dequantized codes."""

from importlib import import_module
from typing import Any

from jaxlowbit import Format

from . import Peer
from .torch import linear


def _make(codes: Any, format: Format) -> Any:
    functional = import_module("bitsandbytes.functional")
    weight = linear(codes, format)
    kind = format.codebook or "nf4"
    return functional.quantize_4bit(weight, blocksize=format.group_size, quant_type=kind)


def _call(x: Any, weight: Any) -> Any:
    packed, state = weight
    return import_module("bitsandbytes").matmul_4bit(x, packed, quant_state=state)


def _reference(weight: Any) -> Any:
    return import_module("bitsandbytes.functional").dequantize_4bit(*weight).t()


def _unsupported(format: Format, dtype: str) -> str | None:
    if format.codebook not in (None, "nf4", "fp4") or format.scale is not None:
        return "it has nf4 and fp4, with float32 scales"
    if format.bits != 4 or format.group_size not in (32, 64, 128, 256) or format.zero != "none":
        return "it has 4 bits in blocks of 32, 64, 128 or 256, without zeros"
    return None


PEER = Peer(
    "bitsandbytes",
    "bitsandbytes",
    "0.50.2",
    _make,
    _call,
    _unsupported,
    only_integers=False,
    reference=_reference,
)
