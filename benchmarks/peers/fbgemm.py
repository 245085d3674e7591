"""FBGEMM GenAI: e4m3 with one scale for all channels, up to 4 rows; channel scales follow here."""

from importlib import import_module
from typing import Any

from jaxlowbit import Format
from jaxlowbit._core import format as formats

from . import Peer

_MOST_ROWS = 4


def _make(codes: Any, format: Format) -> Any:
    torch = import_module("torch")
    floats = codes.qvalue.t().contiguous().view(torch.float8_e4m3fn)
    return floats, codes.scale.new_ones(1, dtype=torch.float32), codes.scale


def _call(x: Any, weight: Any) -> Any:
    if x.shape[0] > _MOST_ROWS:
        raise ValueError(f"it has products of up to {_MOST_ROWS} rows, not {x.shape[0]}")
    floats, one, scale = weight
    return import_module("torch").ops.fbgemm.bf16fp8bf16_fast_gemv(x, floats, one) * scale


def _unsupported(format: Format, dtype: str) -> str | None:
    fits = format == formats.FP8 and dtype == "bfloat16"
    return None if fits else "the adapter has e4m3 per channel beside bfloat16"


PEER = Peer(
    "fbgemm-gpu-genai", "fbgemm_gpu", "1.6.0", _make, _call, _unsupported, only_integers=False
)
