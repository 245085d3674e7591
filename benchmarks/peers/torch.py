"""PyTorch: a dense product (cuBLAS), and tinygemm, the kernel of torchao's tile-packed weights."""

from importlib import import_module
from typing import Any

from jaxlowbit import Format

from . import Peer


def repeat_groups(values: Any, k: int, format: Format) -> Any:
    """Scales or zeros (groups, n) as float32 (k, n)."""
    size = k if format.group_size == -1 else format.group_size
    return values.float().repeat_interleave(size, 0)[:k]


def dequantize(codes: Any, format: Format) -> Any:
    """The weight (k, n) in float32."""
    k = codes.qvalue.shape[0]
    scale = scales(codes, format).float()
    if codes.tensor_scale is not None:
        scale *= codes.tensor_scale
    scale = repeat_groups(scale, k, format)
    if format.codebook is not None:
        return scale.new_tensor(format.values)[codes.qvalue.int()] * scale
    qvalue = codes.qvalue.float()
    if codes.zero is None:
        return (qvalue - format.offset) * scale
    zero = repeat_groups(codes.zero, k, format)
    return (qvalue - zero) * scale if format.zero == "integer" else qvalue * scale + zero


def scales(codes: Any, format: Format) -> Any:
    """Scales (groups, n) in their dtype."""
    if format.scale is None:
        return codes.scale
    return codes.scale.view(getattr(import_module("torch"), format.scale_dtype.name))


def float_dtype(codes: Any) -> Any:
    """See `weights.float_dtype`."""
    torch = import_module("torch")
    return torch.bfloat16 if codes.scale.dtype == torch.uint8 else codes.scale.dtype


def linear(codes: Any, format: Format) -> Any:
    """The weight in the layout of `torch.nn.Linear`: (n, k), in the dtype of the activations."""
    return dequantize(codes, format).to(float_dtype(codes)).t().contiguous()


def _linear_call(x: Any, weight: Any) -> Any:
    return import_module("torch").nn.functional.linear(x, weight)


def _tinygemm_make(codes: Any, format: Format) -> Any:
    torch = import_module("torch")
    qvalue = codes.qvalue.t().int()
    pairs = (qvalue[:, ::2] << 4 | qvalue[:, 1::2]).to(torch.uint8).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    if format.zero == "float":  # the kernel computes (q - 8) * s + zero
        zero = codes.zero.float() + format.offset * codes.scale.float()
    elif format.zero == "integer":
        zero = (format.offset - codes.zero.float()) * codes.scale.float()
    else:
        zero = torch.zeros_like(codes.scale)
    both = torch.stack([codes.scale, zero.to(codes.scale.dtype)], dim=-1)
    return packed, format.group_size, both.contiguous()


def _tinygemm_call(x: Any, weight: Any) -> Any:
    return import_module("torch").ops.aten._weight_int4pack_mm(x, *weight)


def _tinygemm_unsupported(format: Format, dtype: str) -> str | None:
    if format.bits != 4 or format.group_size not in (32, 64, 128, 256) or dtype != "bfloat16":
        return "it has 4 bits in groups of 32, 64, 128 or 256, and bfloat16"
    return None


CUBLAS = Peer(
    "torch",
    "torch",
    "2.11",
    linear,
    _linear_call,
    lambda format, dtype: None,
    dense=True,
)
TINYGEMM = Peer("torch", "torch", "2.11", _tinygemm_make, _tinygemm_call, _tinygemm_unsupported)
