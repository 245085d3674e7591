"""NVIDIA ModelOpt: float8, NVFP4, MXFP8, MXFP4, int4 of AWQ and int8 of SmoothQuant.

A module has `weight` and `weight_scale`, and for NVFP4 `weight_scale_2`, the tensor scale.
`pre_quant_scale` multiplies inputs. For W4A8_AWQ, `weight_scale_2` is the range of 8-bit float
operands and does not scale weights. `export_hf_checkpoint` writes these tensors, and the algorithm
(`quant_algo`) to config.json and hf_quant_config.json (`modelopt/torch/export`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._core.format import Format
from .._fields import OTHER, Fields
from .._files import AGAIN, FLOATS, Folder, Tensor, read_json
from .._matrix import Found, Matrix
from .._packing import Unpacked
from .._scaled import four_bit_floats, left_out, number, scaled, scales, static_scales
from .._smoothed import smoothed

METHODS = ("modelopt",)
SUMMARY = "FP8 of tensors, channels and blocks, NVFP4, MXFP8, MXFP4, int4 (AWQ) and int8"
# Entries about float modules and rounded inputs; the tensors determine the weights.
_HARMLESS = """
    config_groups exclude_modules has_zero_point ignore kv_cache_quant_algo kv_cache_scheme
    lora_rank pre_quant_scale producer quant_method
"""
_E8M0 = ("U8", "F8_E8M0")


def configured(folder: Folder) -> tuple[Path, Mapping[str, Any]] | None:
    """Older folders have only hf_quant_config.json."""
    path = folder.path / "hf_quant_config.json"
    if not path.exists():
        return None
    values = Fields(path, read_json(path)).get("quantization", "an object")
    return None if values is None else (path, values)


def read(folder: Folder, config: Fields) -> Found:
    whole = config.need("quant_algo", "a string")
    layers = config.inner("quantized_layers")
    config.read.add("group_size")
    config.expect_rest(*_HARMLESS.split())
    matrices = []
    suffix = ".weight_scale"
    for name in folder.tensors:
        module = name.removesuffix(suffix)
        if module == name:
            continue
        own = config
        if whole == "MIXED_PRECISION":
            own = Fields(config.path, layers.need(module, "an object"))
        algorithm = own.need("quant_algo", "a string")
        if algorithm not in _READERS:
            raise ValueError(
                f"{config.path}: 'quant_algo' is {algorithm!r}, but {', '.join(_READERS)} are "
                f"read; {OTHER}."
            )
        found = _READERS[algorithm](folder, module, own)
        matrices.append(smoothed(found, folder.tensors.get(f"{module}.pre_quant_scale")))
    unused = static_scales(folder)
    sentences = (left_out(config.path, "static scales of activations or of a cache"),)
    return Found(matrices, unused, sentences if unused else ())


def _pair(folder: Folder, module: str) -> tuple[Tensor, Tensor]:
    weight, scale = (folder.need(f"{module}.{name}", module) for name in ("weight", "weight_scale"))
    if len(weight.shape) != 2:
        raise ValueError(f"{weight.where} has shape {weight.shape}, but a matrix is read; {OTHER}.")
    return weight, scale


def _bytes(
    kind: str, weights: str, scale_kinds: tuple[str, ...], rows: int, columns: int, inputs: Any
) -> Callable[[Folder, str, Fields], Matrix]:
    """Reads one element per byte, with a scale per block of rows and columns."""

    def read(folder: Folder, module: str, config: Fields) -> Matrix:
        weight, scale = _pair(folder, module)
        weight.check((weights,), weight.shape)
        scale.check(scale_kinds, scale.shape)
        if len(scale.shape) == 4:  # blocks, with an axis of size 1 after each axis
            scale.check((scale.kind,), (scale.shape[0], 1, scale.shape[2], 1))
            scale = scale._replace(shape=scale.shape[::2])
        options: Any = {"rows": rows, "columns": columns, "activation_dtype": inputs}
        return scaled(weight.name, f"ModelOpt {kind}", weight, scale, **options)

    return read


def _nvfp4(folder: Folder, module: str, config: Fields) -> Matrix:
    weight, scale = _pair(folder, module)
    factor = folder.need(f"{module}.weight_scale_2", module)
    scale.check(("F8_E4M3",), scale.shape)
    options: Any = {"tensor_scale": factor, "unit": number(factor)}
    return four_bit_floats(weight.name, "ModelOpt NVFP4", weight, scale, **options)


def _mxfp4(folder: Folder, module: str, config: Fields) -> Matrix:
    weight, scale = _pair(folder, module)
    scale.check(_E8M0, scale.shape)
    return four_bit_floats(weight.name, "ModelOpt MXFP4", weight, scale)


def _int4(folder: Folder, module: str, config: Fields) -> Matrix:
    """Pairs of rows of signed integers, (out / 2, in): the even row in the low bits."""
    weight, scale = _pair(folder, module)
    n, k = 2 * weight.shape[0], weight.shape[1]
    weight.check(("U8",), weight.shape)
    scale.check(FLOATS, (n, *scale.shape[1:2]))
    # hf_quant_config.json has the group size, but config.json does not.
    size = k // max(scale.shape[1], 1)
    if size * scale.shape[1] != k or (size % 16 and size != k):
        raise ValueError(
            f"{scale.where} has {scale.shape[1]} groups, but groups are read that divide the {k} "
            f"inputs of {weight.name!r} into multiples of 16; {OTHER}."
        )
    if config.get("group_size", "an integer", size) != size:
        raise ValueError(
            f"{config.path}: 'group_size' is {config.values['group_size']}, but {scale.name!r} has "
            f"groups of {size}; {AGAIN}."
        )

    def unpack(start: int, stop: int) -> Unpacked:
        pairs = weight.array()[start // 2 : -(-stop // 2)]
        rows = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=1).reshape(-1, k)
        values = rows[start % 2 : start % 2 + stop - start] ^ np.uint8(8)
        return Unpacked(values, scales(scale, scale.array()[start:stop]), None)

    factor = folder.tensors.get(f"{module}.weight_scale_2")
    tensors = (weight, scale, *([] if factor is None else [factor]))
    format = Format(4, -1 if size == k else size)
    return Matrix(weight.name, "ModelOpt int4", tensors, (n, k), format, unpack)


_float8 = partial(_bytes, "float8", "F8_E4M3", FLOATS)
_READERS = {
    "FP8": _float8(-1, -1, None),
    "FP8_PER_CHANNEL_PER_TOKEN": _float8(1, -1, jnp.float8_e4m3fn),
    "fp8_pb_wo": _float8(128, 128, None),
    "MXFP8": _bytes("MXFP8", "F8_E4M3", _E8M0, 1, 32, None),
    "NVFP4": _nvfp4,
    "NVFP4_AWQ": _nvfp4,
    "W4A16_NVFP4": _nvfp4,
    "mxfp4": _mxfp4,
    "W4A8_MXFP4_FP8": _mxfp4,
    "W4A16_AWQ": _int4,
    "W4A8_AWQ": _int4,
    "W8A16": _bytes("int8", "I8", FLOATS, 1, -1, None),
    "W8A8_SQ_PER_CHANNEL": _bytes("int8", "I8", FLOATS, 1, -1, None),
}
