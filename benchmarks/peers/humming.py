"""Humming: kernels compiled on first use, with unchanged codes.

`humming` compiles and runs only the schedule that the package picks for the number of rows.
`humming-tuned` runs the fastest of the schedules that it picks for a quarter to four times as many.
"""

import json
import math
import weakref
from importlib import import_module
from typing import Any

import timing

from jaxlowbit import Format

from . import Peer
from .torch import float_dtype, scales

_CODEBOOKS = {"e2m1": "float4e2m1", "e4m3": "float8e4m3", "e5m2": "float8e5m2"}
_SCALES = {"e8m0": "float8e8m0", "e4m3": "float8e4m3"}
_PARTS = (1, 1 / 4, 1 / 2, 3 / 4, 3 / 2, 2, 4)  # multiples of the rows whose schedules are tried


_LIKE: dict[str, Any] = {}  # weights by shape and format, timed in turn
_CHOSEN: dict[tuple[str, int], str] = {}  # fastest schedule by shape and format, and rows


class _Weight:
    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.config = layer.humming_config.to_str()
        _LIKE.setdefault(self.config, weakref.WeakSet()).add(self)


def weight_config(format: Format) -> dict[str, Any]:
    """The package's name of a format."""
    config = {
        "dtype": _CODEBOOKS[str(format.codebook)] if format.codebook else f"int{format.bits}",
        "group_size": max(format.group_size, 0),  # 0: per channel
        "has_zero_point": format.zero == "integer",
    }
    if format.scale is not None:
        config["scale_dtype"] = _SCALES[format.scale]
    if format.has_tensor_scale:
        config["scale_2_type"] = "tensor"
    return config


def picked(config: Any, rows: int) -> str:
    """The schedule that the package picks."""
    pick = import_module("humming.tune").get_heuristics_config
    return json.dumps(pick(config, shape_m=rows), sort_keys=True)


def schedules(config: Any, rows: int) -> list[str]:
    """The schedules that the package picks for similar numbers of rows."""
    return list(dict.fromkeys(picked(config, math.ceil(part * rows)) for part in _PARTS))


def _make(codes: Any, format: Format) -> _Weight:
    pack = import_module("humming.ops").pack_weight
    new = import_module("humming.layer").HummingLayer
    k, n = codes.qvalue.shape
    dtype = float_dtype(codes)
    layer = new(shape_n=n, shape_k=k, weight_config=weight_config(format), torch_dtype=dtype)
    layer = layer.cuda()
    tensors = {
        "weight": pack(codes.qvalue.t().int().contiguous(), format.bits),
        "weight_scale": scales(codes, format).t().contiguous(),
    }
    if codes.zero is not None:
        tensors["zero_point"] = pack(codes.zero.int().contiguous(), format.bits).t().contiguous()
    if codes.tensor_scale is not None:
        tensors["weight_scale_2"] = codes.tensor_scale.reshape(1)
    layer.load_from_tensors(tensors)
    layer.transform()
    return _Weight(layer)


def _run(x: Any, weight: _Weight, schedule: str) -> Any:
    return weight.layer(x, tuning_config=schedule)


def _call(x: Any, weight: _Weight) -> Any:
    return _run(x, weight, picked(weight.layer.humming_config, x.shape[0]))


def _call_tuned(x: Any, weight: _Weight) -> Any:
    key = (weight.config, x.shape[0])
    if key not in _CHOSEN:
        _CHOSEN[key] = _fastest(x, weight)
    return _run(x, weight, _CHOSEN[key])


def _fastest(x: Any, weight: _Weight) -> str:
    like = list(_LIKE[weight.config])
    times = {}
    for schedule in schedules(weight.layer.humming_config, x.shape[0]):

        def call(x: Any, weight: _Weight, schedule: str = schedule) -> Any:
            return _run(x, weight, schedule)

        try:
            call(x, weight)
            found = timing.graph_microseconds_per_call(call, x, like, len(like))
            times[schedule] = found.median
        except Exception:  # a schedule for other numbers of rows may fail
            continue
    return min(times, key=times.__getitem__)


def _unsupported(format: Format, dtype: str) -> str | None:
    if format.zero == "float" or dtype == "float32":
        return "the adapter has no float zeros, and its activations are 16 bits"
    if format.codebook is not None and format.codebook not in _CODEBOOKS:
        return "it has integers and floats, and no tables of numbers"
    return None


PEER = Peer("humming-kernels", "humming", "0.1.19", _make, _call, _unsupported, only_integers=False)
TUNED = PEER._replace(call=_call_tuned)
