"""Packed matrices as tensors of compressed-tensors' format `pack-quantized`.

The library's `pack_to_int32`, version 0.20, defines the layout: a dense stream of bits, lowest
first, in 32-bit words.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._core.array import QuantizedArray
from .._core.format import Format, format_name
from ..checkpoint._rows import rows_of

VERSION = "0.20.0"
"""The version of compressed-tensors that defines this layout."""


def tensors_of(name: str, array: QuantizedArray) -> dict[str, np.ndarray]:
    """The tensors of a matrix (k, n), named after its module.

    **Raises:** `ValueError` for a format, groups or zeros that `pack-quantized` does not support.
    """
    format = array.format
    check_format(format)
    if format.group_size > 0 and array.k % format.group_size:
        raise ValueError(
            f"groups of {format.group_size} cut its {array.k} inputs, which compressed-tensors "
            "does not; use a group size that divides them"
        )
    rows = rows_of(array)
    found = {
        "weight_packed": _packed(rows.qvalue, format.bits),
        "weight_scale": np.ascontiguousarray(rows.scale),
        "weight_shape": np.array([array.n, array.k], np.int64),
    }
    if rows.zero is not None:
        if rows.zero.max(initial=0) >= 2**format.bits:
            raise ValueError(f"its largest zero is {rows.zero.max()}, beyond {format.bits} bits")
        found["weight_zero_point"] = np.ascontiguousarray(_packed(rows.zero.T, format.bits).T)
    return {f"{name}.{part}": values for part, values in found.items()}


def check_format(format: Format) -> None:
    """Raises unless `pack-quantized` represents a format."""
    if (
        format.codebook is not None
        or format.scale is not None
        or format.zero == "float"
        or format.bits < 2
    ):
        raise ValueError(
            f"pack-quantized does not represent the format {format_name(format)}; it has integers "
            "of 2 to 8 bits with one scale per group or channel, without zeros or with integer ones"
        )


def _packed(values: np.ndarray, bits: int) -> np.ndarray:
    """Values uint8 (rows, count) as int32 words (rows, ceil(count * bits / 32))."""
    rows = len(values)
    digits = np.unpackbits(np.ascontiguousarray(values)[..., None], axis=-1, bitorder="little")
    stream = np.packbits(digits[..., :bits].reshape(rows, -1), axis=1, bitorder="little")
    stream = np.pad(stream, [(0, 0), (0, -stream.shape[1] % 4)])
    return stream.view("<i4")


def config_of(matrices: Mapping[str, Format], floats: list[str]) -> dict[str, Any]:
    """`quantization_config` of config.json, for modules by name and modules that stay floats."""
    groups: dict[Format, list[str]] = {}
    for name, format in matrices.items():
        groups.setdefault(format, []).append(name)
    entries = {
        f"group_{i}": {
            "targets": ["Linear"] if len(groups) == 1 else names,
            "weights": _weights(format),
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
        for i, (format, names) in enumerate(groups.items())
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "version": VERSION,
        "config_groups": entries,
        "ignore": floats,
        "kv_cache_scheme": None,
    }


def _weights(format: Format) -> dict[str, Any]:
    grouped = format.group_size > 0
    return {
        "num_bits": format.bits,
        "type": "int",
        "strategy": "group" if grouped else "channel",
        "group_size": format.group_size if grouped else None,
        "symmetric": format.zero == "none",
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
