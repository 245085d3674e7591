"""torchao: tensor subclasses in safetensors, as written by torchao's `flatten_tensor_state_dict`.

The metadata of a file has a JSON object per tensor: `_type`, attributes in `_data`, and the names
of the parts of `X.weight`, which are the tensors `X._weight_NAME`. A weight is `(qdata -
zero_point) * scale`; for `Int4Tensor`, `qdata * scale + zero_point`.
"""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._core.checks import brief
from ..._core.format import Format
from .. import _bits
from .._fields import OTHER, Fields
from .._files import AGAIN, FLOATS, Folder
from .._matrix import Found, Matrix
from .._packing import Unpacked
from .._scaled import left_out, scaled, scales
from .._smoothed import smoothed

METHODS = ("torchao",)
SUMMARY = "Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor and Int4Tensor"
_BITS = {f"int{bits}": bits for bits in range(1, 9)}
_STATIC = ("act_quant_scale", "act_quant_zero_point")
# Entries about how a product is computed, and the dtype of its result.
_HARMLESS = """
    dtype hp_value_lb hp_value_ub kernel_preference mm_config reduce_range shape
"""


def read(folder: Folder, config: Fields) -> Found:
    # The tensors show which modules are quantized, and how.
    config.expect_rest(
        "include_input_output_embeddings",
        "modules_to_not_convert",
        "quant_method",
        "quant_type",
        "untie_embedding_weights",
    )
    path = folder.path
    if "tensor_names" not in folder.metadata:
        raise ValueError(
            f"{path}: no safetensors file has the metadata 'tensor_names' of torchao, but its "
            "tensors cannot be read without; save the model again with torchao 0.14 or newer."
        )
    matrices: list[Matrix] = []
    unused: set[str] = set()
    others = False
    for name, text in folder.metadata.items():
        entries = _entries(folder, name, text)
        if entries is None:
            continue
        matrices.append(_READERS[entries.values["_type"]](folder, name, entries))
        data = entries.inner("_data").values
        if data.get("act_quant_kwargs") or data.get("activation_quantization"):
            others |= matrices[-1].activation_dtype is None
        unused |= {part for last in _STATIC if (part := _part(name, last)) in folder.tensors}
    sentences = (left_out(path, "activations with static scales, zeros or other groups"),)
    return Found(matrices, frozenset(unused), sentences if unused or others else ())


def _entries(folder: Folder, name: str, text: str) -> Fields | None:
    """The object of a tensor in the metadata; None for a float tensor and for other entries."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("_type") in (None, "Tensor"):
        return None
    if not isinstance(found["_type"], str) or found["_type"] not in _READERS:
        raise ValueError(
            f"{folder.path}: {name!r} is a {brief(found['_type'])} of torchao, but "
            f"{', '.join(_READERS)} are read; {OTHER}."
        )
    if "." not in name:
        raise ValueError(f"{folder.path}: {name!r} is in no module; {AGAIN}.")
    return Fields(folder.path, found)


def _int8(folder: Folder, name: str, entries: Fields) -> Matrix:
    data = entries.inner("_data")
    rows, columns = _block(data)
    inputs = _inputs(data, jnp.int8)
    data.expect_rest(*_HARMLESS.split())
    return _integers(folder, name, rows, columns, 8, inputs)


def _intx(folder: Folder, name: str, entries: Fields) -> Matrix:
    data = entries.inner("_data")
    rows, columns = _block(data)
    bits = _BITS[data.inner("target_dtype").expect("_data", None, *_BITS)]
    data.expect("activation_quantization", None, None, "int8_asym_per_token")
    data.expect_rest(*_HARMLESS.split())
    return _integers(folder, name, rows, columns, bits, None)


def _float8(folder: Folder, name: str, entries: Fields) -> Matrix:
    data = entries.inner("_data")
    rows, columns = _block(data)
    inputs = _inputs(data, jnp.float8_e4m3fn)
    data.expect_rest(*_HARMLESS.split())
    weight, scale = (folder.need(_part(name, last), name) for last in ("qdata", "scale"))
    weight.check(("F8_E4M3", "F8_E5M2"), weight.shape)
    found = scaled(
        name, "torchao float8", weight, scale, rows=rows, columns=columns, activation_dtype=inputs
    )
    return smoothed(found, folder.tensors.get(_part(name, "act_pre_scale")))


def _inputs(data: Fields, dtype: Any) -> Any:
    """The dtype of inputs with a scale for each token; None for floats and for other scales."""
    own = data.inner("act_quant_kwargs").inner("_data")
    per_token = own.inner("granularity").get("_type", "a string") == "PerRow"
    mapping = own.inner("mapping_type").get("_data", "a string", "SYMMETRIC")
    return dtype if per_token and mapping == "SYMMETRIC" else None


def _integers(
    folder: Folder, name: str, rows: int, columns: int, bits: int, activation_dtype: Any
) -> Matrix:
    weight, scale = (folder.need(_part(name, last), name) for last in ("qdata", "scale"))
    weight.check(("I8",), weight.shape)
    scale.check(FLOATS, scale.shape)
    zero = folder.tensors.get(_part(name, "zero_point"))
    if zero is not None:
        zero.check(("I8",), scale.shape)
    found = scaled(
        name,
        f"torchao int{bits}",
        weight,
        scale,
        rows=rows,
        columns=columns,
        bits=bits,
        zero=zero if zero is not None and zero.array().any() else None,
        activation_dtype=activation_dtype,
    )
    if zero is not None:
        found = dataclasses.replace(found, tensors=(weight, scale, zero))
    return smoothed(found, folder.tensors.get(_part(name, "act_pre_scale")))


def _int4(folder: Folder, name: str, entries: Fields) -> Matrix:
    """Pairs of signed integers, the even input in the low bits; scales and zeros (groups, out)."""
    data = entries.inner("_data")
    _, size = _block(data, 1)
    data.expect_rest(*_HARMLESS.split(), "activation_dtype")
    weight, scale, zero = (
        folder.need(_part(name, last), name) for last in ("qdata", "scale", "zero_point")
    )
    if len(weight.shape) != 2:
        raise ValueError(f"{weight.where} has shape {weight.shape}, but a matrix is read; {OTHER}.")
    n, k = weight.shape[0], 2 * weight.shape[1]
    weight.check(("I8", "U8"), (n, k // 2))
    if size % 16 and size < k:
        raise ValueError(
            f"{weight.where} has groups of {size} inputs, but groups are multiples of 16 here; "
            f"{OTHER}."
        )
    scale.check(FLOATS, (-(-k // size), n))
    zero.check(FLOATS, (-(-k // size), n))

    def unpack(start: int, stop: int) -> Unpacked:
        values = _bits.nibbles(weight.array()[start:stop].view(np.uint8)) ^ np.uint8(8)
        own, floats = (
            scales(tensor, tensor.array()[:, start:stop].T.astype(np.float32))
            for tensor in (scale, zero)
        )
        return Unpacked(values, own, floats - 8 * own)

    format = Format(4, size if size < k else -1, zero="float")
    found = Matrix(name, "torchao int4", (weight, scale, zero), (n, k), format, unpack)
    return smoothed(found, folder.tensors.get(_part(name, "act_pre_scale")))


_READERS = {
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _intx,
    "Float8Tensor": _float8,
    "Int4Tensor": _int4,
}


def _part(name: str, last: str) -> str:
    module, _, weight = name.rpartition(".")
    return f"{module}._{weight}_{last}"


def _block(data: Fields, most_rows: int | None = None) -> tuple[int, int]:
    """The outputs and inputs that share a scale."""
    match data.get("block_size", "a list"):
        case [int(rows), int(columns)] if rows >= 1 and columns >= 1:
            if most_rows is None or rows <= most_rows:
                return rows, columns
    raise ValueError(
        f"{data.path}: 'block_size' of a tensor is {brief(data.values.get('block_size'))}, but two "
        f"positive numbers, of outputs and inputs, are read; {OTHER}."
    )
