"""vLLM: Marlin and Machete, without zeros."""

from importlib import import_module
from typing import Any, NamedTuple

from jaxlowbit import Format

from . import Peer

_UTILS = "vllm.model_executor.layers.quantization.utils.marlin_utils"


class _Marlin(NamedTuple):
    packed: Any
    scale: Any
    zero: Any  # empty
    workspace: Any
    type: Any
    n: int
    k: int


class _Machete(NamedTuple):
    packed: Any
    scale: Any
    type: Any
    group_size: int


def _type(format: Format) -> Any:
    types = import_module("vllm.scalar_type").scalar_types
    return types.uint4b8 if format.bits == 4 else types.uint8b128


def _gptq(codes: Any, format: Format) -> Any:
    """Codes packed along k into 32-bit words, lowest bits first: (k * bits / 32, n)."""
    torch = import_module("torch")
    per_word = 32 // format.bits
    values = codes.qvalue.int().reshape(-1, per_word, codes.qvalue.shape[1])
    words = torch.zeros_like(values[:, 0])
    for i in range(per_word):
        words |= values[:, i] << (format.bits * i)
    return words


def _marlin_make(codes: Any, format: Format) -> _Marlin:
    ops, utils = import_module("vllm._custom_ops"), import_module(_UTILS)
    k, n = codes.qvalue.shape
    device = codes.qvalue.device
    return _Marlin(
        ops.gptq_marlin_repack(_gptq(codes, format), k, n, format.bits),
        utils.marlin_permute_scales(codes.scale, k, n, format.group_size),
        utils.marlin_make_empty(device),
        utils.marlin_make_workspace_new(device),
        _type(format),
        n,
        k,
    )


def _marlin_call(x: Any, weight: _Marlin) -> Any:
    return import_module("vllm._custom_ops").marlin_gemm(
        x,
        None,
        weight.packed,
        None,
        weight.scale,
        None,
        None,
        weight.zero,
        weight.workspace,
        weight.type,
        size_m=x.shape[0],
        size_n=weight.n,
        size_k=weight.k,
        use_fp32_reduce=True,
    )


def _machete_make(codes: Any, format: Format) -> _Machete:
    words = _gptq(codes, format).t().contiguous().t()
    dtype, type = codes.scale.dtype, _type(format)
    packed = import_module("vllm._custom_ops").machete_prepack_B(words, dtype, type, dtype)
    return _Machete(packed, codes.scale, type, format.group_size)


def _machete_call(x: Any, weight: _Machete) -> Any:
    return import_module("vllm._custom_ops").machete_mm(
        x,
        weight.packed,
        weight.type,
        b_group_scales=weight.scale,
        b_group_size=weight.group_size,
    )


def _unsupported(groups: tuple[int, ...], format: Format, dtype: str) -> str | None:
    if format.bits not in (4, 8) or format.zero != "none" or format.group_size not in groups:
        return f"the adapter has 4 and 8 bits without zeros, in groups of {groups}"
    return "its activations are 16 bits" if dtype == "float32" else None


MARLIN = Peer(
    "vllm",
    "vllm._custom_ops",
    "0.33.0",
    _marlin_make,
    _marlin_call,
    lambda format, dtype: _unsupported((-1, 32, 64, 128), format, dtype),
)
MACHETE = Peer(
    "vllm",
    "vllm._custom_ops",
    "0.33.0",
    _machete_make,
    _machete_call,
    lambda format, dtype: _unsupported((-1, 64, 128), format, dtype),
)
