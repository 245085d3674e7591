"""Humming: kernels compiled when they are first used, quantized from floats by its own rule."""

from importlib import import_module
from typing import Any, NamedTuple

from jaxlowbit import Format

from . import Peer
from .torch import linear


class _Weight(NamedTuple):
    layer: Any
    tensors: dict[str, Any]  # as quantized, for the reference


def _make(codes: Any, format: Format) -> _Weight:
    weight = linear(codes, format)
    n, k = weight.shape
    config = {
        "dtype": f"int{format.bits}",
        "group_size": max(format.group_size, 0),  # 0 is per channel
        "has_zero_point": format.zero == "integer",
    }
    layer = import_module("humming.layer").HummingLayer(
        shape_n=n, shape_k=k, weight_config=config, torch_dtype=weight.dtype
    )
    layer = layer.cuda()
    schema = layer.weight_schema
    tensors = schema.quant_tensor(weight, schema, weight.dtype)
    layer.load_from_tensors(tensors)
    layer.transform()
    return _Weight(layer, tensors)


def _call(x: Any, weight: _Weight) -> Any:
    return weight.layer(x)


def _reference(weight: _Weight) -> Any:
    return weight.layer.weight_schema.dequant_tensors(weight.tensors).t()


def _unsupported(format: Format, dtype: str) -> str | None:
    if format.zero == "float" or dtype == "float32":
        return "the adapter has no float zeros, and its activations are 16 bits"
    return None


PEER = Peer(
    "humming-kernels", "humming", "0.1.19", _make, _call, _unsupported, reference=_reference
)
