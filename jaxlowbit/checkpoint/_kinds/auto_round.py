"""AutoRound's own checkpoints: layouts of GPTQ, AWQ or compressed-tensors.

`packing_format` determines the layout, and whether stored zeros are reduced by one
(`auto_round:auto_gptq`) or not (`auto_round`). Names follow `inference/convert_model.py` and
`export/export_to_autoround` of auto-round 0.16.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from .. import _scaled
from .._fields import OTHER, Fields
from .._files import AGAIN, Folder
from .._matrix import Found, Matrix
from . import awq, compressed_tensors, gptq

METHODS = ("auto-round", "intel/auto-round")
SUMMARY = "AutoRound of 2 to 8 bits, MXFP4, MXFP8, NVFP4 and 8-bit floats"
_KIND = "AutoRound"
_ALIASES = {
    "auto": "auto_round:auto_gptq",
    "auto_round:gptq": "auto_round:auto_gptq",
    "auto_round:awq": "auto_round:auto_awq",
    "auto_round:gptqmodel": "auto_round",
    "auto_round:fp8_static": "auto_round:fp8",
}
# Entries about how rounding was trained.
_TRAINING = """
    act_dynamic act_group_size act_sym activation_scheme amp enable_minmax_tuning
    enable_norm_bias_tuning fmt gradient_accumulate_steps modules_to_not_convert not_use_best_mse
    quant_block_list quant_lm_head seed super_bits super_group_size
"""
_HARMLESS = (*gptq.HARMLESS, *_TRAINING.split())


def read(folder: Folder, config: Fields) -> Found:
    packing = config.get("packing_format", "a string", "auto_round:auto_gptq")
    packing = _ALIASES.get(packing, packing)
    if packing not in _LAYOUTS:
        raise ValueError(
            f"{config.path}: 'packing_format' is {packing!r}, but of AutoRound "
            f"{', '.join(_LAYOUTS)} are read; {OTHER}."
        )
    suffixes, layout = _LAYOUTS[packing]
    overrides = _overrides(config)
    _changed(config, {})
    config.expect_rest(*_HARMLESS)
    matrices = []
    for suffix in suffixes:
        for module in gptq.modules(folder, suffix):
            own = _changed(config, overrides(module))
            if own.values["bits"] > 8:
                raise ValueError(
                    f"{folder.tensors[f'{module}.{suffix}'].where} is quantized, but by "
                    f"'extra_config' in {config.path} {module!r} stays floats; {AGAIN}."
                )
            matrices.append(layout(folder, module, own))
    return Found(matrices, frozenset(n for n in folder.tensors if n.endswith(".input_scale")))


def _changed(config: Fields, changes: Mapping[str, Any]) -> Fields:
    """The entries of a module, checked."""
    own = Fields(config.path, {**config.values, **changes})
    own.need("bits", "an integer")
    own.expect("data_type", "int", "int", "fp", "mx_fp", "nv_fp", "fp8", "fp8_e4m3", "fp8_static")
    own.get("act_bits", "an integer")
    own.get("act_data_type", "a string")
    for key in ("rotation_config", "transform_config"):
        if own.values.get(key):
            own.expect(key, None, None)
    own.read.add("group_size")
    config.read |= own.read
    return own


def _overrides(config: Fields) -> Callable[[str], Mapping[str, Any]]:
    """Returns a function from a module to its changes in `extra_config`: by name, else by
    pattern."""
    extra = config.inner("extra_config")
    entries = {key: extra.get(key, "an object", {}) for key in extra.values}
    patterns: list[tuple[re.Pattern[str], Mapping[str, Any]]] = []
    for key, own in entries.items():
        _changed(config, own)
        Fields(config.path, own).expect_rest(*_HARMLESS, *_SCHEME)
        if own and re.search(r"[^\w.-]", key):
            patterns.append((config.pattern("extra_config", key), own))

    def find(module: str) -> Mapping[str, Any]:
        if module in entries:
            return entries[module]
        return next((own for pattern, own in patterns if pattern.search(module)), {})

    return find


_SCHEME = ("bits", "group_size", "data_type", "act_bits", "act_data_type")


def _integers(stored_zero: bool) -> Callable[[Folder, str, Fields], Matrix]:
    def matrix(folder: Folder, module: str, own: Fields) -> Matrix:
        bits = own.expect("bits", None, *range(2, 9))
        own.expect("data_type", "int", "int")
        layout = gptq.Layout(bits, gptq.group_size(own), stored_zero)
        return gptq.matrix(folder, module, layout, _KIND)

    return matrix


def _awq(folder: Folder, module: str, own: Fields) -> Matrix:
    own.expect("bits", None, 4)
    own.expect("data_type", "int", "int")
    return awq.gemm(folder, module, gptq.group_size(own), _KIND)


def _compressed(folder: Folder, module: str, own: Fields) -> Matrix:
    kind, bits = own.expect("data_type", "int", "mx_fp", "nv_fp"), own.values["bits"]
    own.expect("bits", None, *((4, 8) if kind == "mx_fp" else (4,)))
    layout = "nvfp4-pack-quantized" if kind == "nv_fp" else "mxfp4-pack-quantized"
    layout = "mxfp8-quantized" if bits == 8 else layout
    scheme = compressed_tensors.Scheme(layout, bits, 1, 32, True, None)
    return compressed_tensors.matrix_of(folder, module, scheme)[0]


def _float8(folder: Folder, module: str, own: Fields) -> Matrix:
    """Reads blocks with `weight_scale_inv`, else a scale per output or per matrix."""
    own.expect("bits", None, 8)
    weight = folder.need(f"{module}.weight", module)
    name = f"{module}.weight"
    match own.values.get("group_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0 and columns % 16 == 0:
            scale = folder.need(f"{module}.weight_scale_inv", module)
            return _scaled.scaled(name, _KIND, weight, scale, rows=rows, columns=columns)
        case -1 | 0 | None as size:
            scale = folder.need(f"{module}.weight_scale", module)
            rows = -1 if size == 0 else 1
            return _scaled.scaled(name, _KIND, weight, scale, rows=rows, columns=-1)
        case size:
            raise ValueError(
                f"{own.path}: 'group_size' is {size!r}, but of 8-bit floats blocks [rows, columns] "
                f"are read, or -1 for outputs and 0 for matrices; {OTHER}."
            )


_LAYOUTS: dict[str, tuple[tuple[str, ...], Callable[[Folder, str, Fields], Matrix]]] = {
    "auto_round": (("qweight",), _integers(False)),
    "auto_round:auto_gptq": (("qweight",), _integers(True)),
    "auto_round:auto_awq": (("qweight",), _awq),
    "auto_round:llm_compressor": (("weight_scale",), _compressed),
    "auto_round:fp8": (("weight_scale", "weight_scale_inv"), _float8),
}
