"""gpt-oss: stacks of experts in MXFP4.

`X_blocks`, uint8 (experts, out, in / 32, 16), has pairs of 4-bit floats, the even input in the low
bits. `X_scales`, uint8 (experts, out, in / 32), has the exponents of their scales
(`convert_moe_packed_tensors` of transformers). The outputs of `gate_up_proj` alternate: even ones
are gate, odd ones up.
"""

import dataclasses

from .._fields import Fields
from .._files import AGAIN, Folder
from .._matrix import Found, Matrix
from .._scaled import four_bit_floats

METHODS = ("mxfp4",)
SUMMARY = "MXFP4 experts of gpt-oss, as stacks"
_BLOCKS = "_blocks"


def read(folder: Folder, config: Fields) -> Found:
    # The tensors show which modules are floats; `dequantize` concerns transformers.
    config.expect_rest("dequantize", "modules_to_not_convert", "quant_method")
    names = [name.removesuffix(_BLOCKS) for name in folder.tensors if name.endswith(_BLOCKS)]
    return Found([_matrix(folder, name) for name in names])


def _matrix(folder: Folder, name: str) -> Matrix:
    data, scale = (folder.need(f"{name}{last}", name) for last in (_BLOCKS, "_scales"))
    if len(data.shape) not in (3, 4) or data.shape[-1] != 16 or data.kind != "U8":
        raise ValueError(
            f"{data.where} is {data.kind} of shape {data.shape}, but it must be U8 of shape "
            f"(experts, out, in / 32, 16); {AGAIN}."
        )
    *lead, n, blocks, _ = data.shape
    scale.check(("U8",), (*lead, n, blocks))
    rows = n * lead[0] if lead else n
    found = four_bit_floats(
        name,
        "MXFP4",
        data._replace(shape=(rows, 16 * blocks)),
        scale._replace(shape=(rows, blocks)),
    )
    return dataclasses.replace(found, shape=(n, 32 * blocks), stack=lead[0]) if lead else found
