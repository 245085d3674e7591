"""Fine-grained float8: DeepSeek-V3's format, `FineGrainedFP8Config` of transformers.

`X.weight` has 8-bit floats, and `X.weight_scale_inv` the factor of each block of rows and columns,
or of the matrix. A weight is their product (README_WEIGHTS.md of DeepSeek-V3). Factors stored as
bytes are powers of two, as in MXFP8. Experts may be stacks, or pairs of 4-bit floats with a power
of two per 32 inputs (`Fp8Dequantize` of transformers).
"""

import dataclasses
import re

from .._fields import OTHER, Fields
from .._files import AGAIN, Folder
from .._matrix import Found, Matrix
from .._scaled import four_bit_floats, left_out, scaled, static_scales

METHODS = ("fp8", "mxfp8")
SUMMARY = "float8_e4m3fn with a scale for each block of rows and columns, or for each matrix"
_SCALE = "_scale_inv"


def read(folder: Folder, config: Fields) -> Found:
    config.expect("fmt", "e4m3", "e4m3")
    config.expect("scale_fmt", "float", "float", "ue8m0")
    config.expect("expert_dtype", "fp8", "fp8", "fp4")
    activations = config.expect("activation_scheme", "dynamic", "dynamic", "static")
    block = _block(config)
    floats = _floats(config)
    # The tensors show which other modules have 8-bit floats; `dequantize` concerns transformers.
    config.expect_rest("dequantize", "modules_to_convert", "quant_method")
    matrices = [
        _matrix(folder, config, name.removesuffix(_SCALE), block, floats)
        for name in folder.tensors
        if name.endswith(_SCALE)
    ]
    unused = static_scales(folder)
    sentences = ()
    if activations == "static" or unused:
        sentences = (left_out(config.path, "static scales of activations or of a cache"),)
    return Found(matrices, unused, sentences)


def _matrix(
    folder: Folder,
    config: Fields,
    name: str,
    block: tuple[int, int],
    floats: list[re.Pattern[str]],
) -> Matrix:
    weight, scale = folder.need(name, name + _SCALE), folder.tensors[name + _SCALE]
    module = name.removesuffix(".weight")
    if any(pattern.match(module) for pattern in floats):
        raise ValueError(
            f"{weight.where} has scales, but {config.path} keeps {module!r} in floats; {AGAIN}."
        )
    if not 2 <= len(weight.shape) <= 3 or weight.kind not in ("F8_E4M3", "I8"):
        raise ValueError(
            f"{weight.where} is {weight.kind} of shape {weight.shape}, but it must be F8_E4M3, or "
            f"pairs of 4-bit floats in I8, a matrix or a stack of them; {AGAIN}."
        )
    *lead, n, k = weight.shape
    rows, columns = block if weight.kind == "F8_E4M3" else (1, 32)
    if lead:
        if rows == -1 or n % rows:
            raise ValueError(
                f"{weight.where} is a stack of matrices of {n} rows, but a matrix must have "
                f"whole blocks of {rows} rows; {OTHER}."
            )
        scale.check((scale.kind,), (*lead, n // rows, *scale.shape[2:]))
        weight = weight._replace(shape=(lead[0] * n, k))
        scale = scale._replace(shape=(lead[0] * n // rows, *scale.shape[2:]))
    if weight.kind == "I8":
        scale.check(("U8", "F8_E8M0"), scale.shape)
        found = four_bit_floats(name, "4-bit floats", weight._replace(kind="U8"), scale)
        k *= 2
    else:
        found = scaled(name, "float8", weight, scale, rows=rows, columns=columns)
    return dataclasses.replace(found, shape=(n, k), stack=lead[0]) if lead else found


def _block(config: Fields) -> tuple[int, int]:
    """The rows and columns of a block, -1 for all."""
    match config.get("weight_block_size", "a list"):
        case None:
            return -1, -1
        case [int(rows), int(columns)] if rows >= 1 and columns >= 1 and columns % 16 == 0:
            return rows, columns
        case found:
            raise ValueError(
                f"{config.path}: 'weight_block_size' is {found!r}, but a block must have a number "
                f"of rows and a multiple of 16 columns, such as [128, 128]; {OTHER}."
            )


def _floats(config: Fields) -> list[re.Pattern[str]]:
    """Patterns of the modules that stay floats. A name also covers its submodules, and may omit the
    names of outer modules."""
    return [
        re.compile(rf"(.*\.)?{re.escape(name)}(\.|$)")
        for key in ("modules_to_not_convert", "ignored_layers")
        for name in config.strings(key)
    ]
