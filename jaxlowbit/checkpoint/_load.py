"""`load`: reads a checkpoint folder into a tree of packed matrices and floats."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from .._core.array import QuantizedArray
from .._core.checks import boolean, brief, compute_dtype
from .._core.format import Format, as_format
from .._core.sharding import placed
from . import _packing
from ._fields import OTHER
from ._files import AGAIN, FLOATS, Tensor, read_folder
from ._matrix import Matrix
from ._registry import find
from ._saved import is_saved, load_saved
from ._warn import warn_of_file

# Buffers that are not weights.
_BUFFERS = ("position_ids", "masked_bias", "attn.bias", "attention.bias", "num_batches_tracked")


class Contents(NamedTuple):
    """A folder with checked headers: its quantized matrices and its other tensors, by name.

    `sentences`: warnings about entries that have no effect here but may change results.
    """

    path: Path
    matrices: dict[str, Matrix]
    floats: dict[str, Tensor]
    sentences: tuple[str, ...]


def open_folder(path: Path) -> Contents:
    """Reads and checks a folder, except the elements of tensors.

    **Raises:** `ValueError` for missing or damaged files, unsupported kinds of quantization, and
    unknown tensors.
    """
    folder = read_folder(path)
    found = find(folder)
    users: dict[str, Matrix] = {}
    matrices: dict[str, Matrix] = {}
    for matrix in found.matrices:
        for tensor in matrix.tensors:
            if tensor.name in users:
                raise ValueError(
                    f"{tensor.where} is part of {users[tensor.name].name!r} and of "
                    f"{matrix.name!r}, but a tensor belongs to one weight; {AGAIN}."
                )
            users[tensor.name] = matrix
        if matrix.name in matrices:
            raise ValueError(f"{matrix.where} is {matrix.name!r} a second time; {AGAIN}.")
        matrices[matrix.name] = matrix
    renamed = {tensor.name for tensor in found.floats.values()}
    floats = dict(found.floats)
    for name, tensor in folder.tensors.items():
        if name in users or name in found.unused or name in renamed:
            continue
        if name in matrices or name in floats:
            raise ValueError(f"{tensor.where} is there both quantized and as it is; {AGAIN}.")
        if tensor.kind not in (*FLOATS, "F64") and not name.endswith(_BUFFERS):
            raise ValueError(
                f"{tensor.where} is {tensor.kind}, but it is no part of a quantized weight that "
                f"the configuration in {path} tells of; {OTHER}."
            )
        floats[name] = tensor
    return Contents(path, matrices, floats, found.sentences)


def load(
    path: str | os.PathLike[str],
    *,
    requantize: Format | str | None = None,
    scale_dtype: Any = None,
    dtype: Any = None,
    target: Any = None,
    sharding: Any = None,
    progress: bool = False,
) -> Any:
    """Loads a folder written by `save`, or a Hugging Face folder, quantized or not.

    The integers of the checkpoint are unchanged, so `dequantize(jnp.float32)` gives the weights
    that the checkpoint's library computes with. Tensors are memory-mapped and packed one at a time,
    in strips: loading takes the memory of the packed weights and one tensor.

    **Arguments:**

    - `path`: a folder with `model.safetensors`, or shards with their index, and `config.json`.
    - `requantize`: None, or a format for matrices that no format represents exactly, such as groups
      along the output; without it, these raise. Other matrices stay exact.
    - `scale_dtype`: None for the scales of the file, or float32, bfloat16 or float16 to round
      scales and float zeros to.
    - `dtype`: None for the dtypes of the file, or a dtype for float tensors.
    - `target`: for a folder written by `save`: None, or a tree like the saved one, of arrays or
      `jax.ShapeDtypeStruct`s. The result has its structure and its shardings, if any.
    - `sharding`: None, a sharding or device for every array, or a function from a name and a
      memory-mapped array to a sharding per leaf. Each device reads only its shard.
    - `progress`: whether to show a bar on standard error.

    A folder written by `save` is memory-mapped: do not change its files in place while its arrays
    exist. On a CPU the arrays are the mapped memory. Such folders take no `requantize`,
    `scale_dtype` or `dtype`.

    **Returns:** a dict by the names in the checkpoint, or a tree like `target`. A quantized matrix
    `X.weight` of a Hugging Face folder is a `QuantizedArray` (in, out), the transpose of PyTorch's
    weight: `x @ tree["X.weight"]` is the layer without its bias. Other tensors are arrays of the
    shape in the file.

    **Raises:** before elements are read: `TypeError` for an invalid path, `FileNotFoundError` if it
    does not exist, `ValueError` for damaged files, unsupported kinds of quantization, and unknown
    tensors and entries of the quantization config; afterwards `ValueError` for invalid values. The
    error names the file and the entry or tensor.

    ```py
    tree = checkpoint.load("Llama-3.1-8B-Instruct-GPTQ-INT4")
    y = x @ tree["model.layers.0.self_attn.q_proj.weight"]
    ```
    """
    boolean("checkpoint.load", "progress", progress)
    requantize = None if requantize is None else as_format("checkpoint.load", requantize)
    for name, value in (("scale_dtype", scale_dtype), ("dtype", dtype)):
        if value is not None:
            compute_dtype("checkpoint.load", name, value)
    folder = _folder(path)
    if is_saved(read_folder(folder)):
        others = {"requantize": requantize, "scale_dtype": scale_dtype, "dtype": dtype}
        _check_unused(others, f"{folder} has packed weights, which are used as they are")
        return load_saved(folder, target=target, sharding=sharding)
    _check_unused({"target": target}, f"{folder} was not written by save")
    contents = open_folder(folder)
    _check_exact(contents.matrices, requantize)
    for sentence in contents.sentences:
        warn_of_file(sentence)
    weights: dict[str, Matrix | Tensor] = {**contents.matrices, **contents.floats}
    tree: dict[str, QuantizedArray | Array] = {}
    total = sum(weight.nbytes for weight in weights.values())
    with tqdm(total=total, unit="B", unit_scale=True, disable=not progress) as bar:
        for name, weight in weights.items():
            if isinstance(weight, Tensor):
                array = weight.array()
                cast = dtype is not None and weight.kind in (*FLOATS, "F64")
                tree[name] = jnp.asarray(array.astype(dtype) if cast else np.array(array))
            else:
                tree[name] = _matrix(weight, requantize, scale_dtype)
            if sharding is not None:
                own = sharding(name, tree[name]) if callable(sharding) else sharding
                tree[name] = placed(tree[name], own)
            bar.update(weight.nbytes)
    return tree


def _check_unused(options: Mapping[str, Any], reason: str) -> None:
    """Raises for an option that would have no effect."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"checkpoint.load: {name} is given, but {reason}; leave it out.")


def _matrix(matrix: Matrix, requantize: Format | None, scale_dtype: Any) -> QuantizedArray:
    try:
        if matrix.format is not None or requantize is None:
            return matrix.pack(scale_dtype)
        return _packing.quantize_rows(
            matrix.rows, matrix.shape, requantize, scale_dtype or jnp.bfloat16
        )
    except ValueError as error:
        raise ValueError(f"{matrix.where} ({matrix.kind}): {error}") from None


def _check_exact(matrices: Mapping[str, Matrix], requantize: Format | None) -> None:
    """Raises for the first matrix that no format represents exactly, unless `requantize` is
    given."""
    inexact = [matrix for matrix in matrices.values() if matrix.format is None]
    if inexact and requantize is None:
        raise ValueError(
            f"{inexact[0].where} ({inexact[0].kind}) and {len(inexact) - 1} others are held by no "
            f"format exactly: {inexact[0].reason}; pass requantize= with a format, such as 'int8', "
            "which rounds them."
        )


def _folder(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"checkpoint.load: path is {brief(path)}, but it must be the path of a folder; pass "
            "one."
        )
    given = os.fspath(path)
    if not given or not Path(given).exists():
        raise FileNotFoundError(
            f"checkpoint.load: {given or 'the empty path'} does not exist; name the folder of a "
            "checkpoint that is on this machine."
        )
    if not Path(given).is_dir():
        raise ValueError(
            f"checkpoint.load: {given} is a file, but a checkpoint is a folder with config.json "
            "and model.safetensors; name that. jaxlowbit.llm.load reads .gguf files."
        )
    return Path(given)
