"""GPTQ: AutoGPTQ (`gptq`, `gptq_v2`) and GPTQModel (`gptq_p`).

A module has `qweight` (words packed along the input, input first), `qzeros` (packed along the
output), `scales` (groups, out) and `g_idx`, the group of each input feature. `gptq` stores zeros
minus one. The layouts were read from AutoGPTQ's `qlinear_cuda.py` and GPTQModel's
`planar_packing.py`.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..._core.format import Format
from ..._core.permutations import of_groups
from .. import _bits, _scaled
from .._fields import OTHER, Fields
from .._files import AGAIN, FLOATS, Folder, Tensor, read_json
from .._matrix import Found, Matrix
from .._packing import Unpacked
from .._warn import warn_of_file

METHODS = ("gptq",)
SUMMARY = "GPTQ of 2, 3, 4 and 8 bits (`gptq_p`: 2 to 8), with or without act-order"
_BITS = {"gptq": (2, 3, 4, 8), "gptq_v2": (2, 3, 4, 8), "gptq_p": (2, 3, 4, 5, 6, 7, 8)}
# Entries about calibration and kernels; the tensors show which modules are quantized.
_HARMLESS = """
    act_group_aware autoround_version backend batch_size block_name_to_quantize cache_block_outputs
    damp_auto_increment damp_percent data_type dataset desc_act disable_exllama
    enable_quanted_input exllama_config hyb_act is_marlin_format iters kernel lm_head
    low_gpu_mem_usage lr max_input_length meta method minmax_lr model_file_base_name
    model_name_or_path model_seqlen module_name_preceding_first_block modules_in_block_to_quantize
    modules_to_not_convert mse nsamples pad_token_id provider quant_method scale_dtype seqlen
    static_groups sym to_quant_block_names tokenizer true_sequential use_cuda_fp16 use_exllama
"""
HARMLESS = tuple(_HARMLESS.split())


class Layout(NamedTuple):
    """How a module is packed.

    - `bits`, `group_size`: -1 for one group.
    - `stored_zero`: whether zeros are stored minus one.
    - `planar`: whether values are in planes.
    """

    bits: int
    group_size: int
    stored_zero: bool
    planar: bool = False

    def fields(self, words: np.ndarray, count: int) -> np.ndarray:
        unpack = _bits.planar_fields if self.planar else _bits.fields
        return unpack(words, self.bits, count)

    def zeros(self, words: np.ndarray, count: int) -> np.ndarray:
        """Unpacks zeros (groups, out); adding 1 carries across the words of `gptq`, as in
        GPTQModel."""
        words = np.ascontiguousarray(words).view(np.uint32)
        if not self.stored_zero:
            return self.fields(words, count)
        if 32 % self.bits == 0:
            ones = sum(1 << i for i in range(0, 32, self.bits))
            return self.fields(words + np.uint32(ones), count)
        return self.fields(words, count) + np.uint8(1) & np.uint8(2**self.bits - 1)


def configured(folder: Folder) -> tuple[Path, Mapping[str, Any]] | None:
    """Older folders have only quantize_config.json."""
    path = folder.path / "quantize_config.json"
    if not path.exists():
        return None
    values = read_json(path)
    return (path, values) if "bits" in values else None


def read(folder: Folder, config: Fields) -> Found:
    form = config.get("format", "a string") or config.get("checkpoint_format", "a string", "gptq")
    if form not in _BITS:
        raise ValueError(
            f"{config.path}: the format of GPTQ is {form!r}, but {', '.join(_BITS)} are read; "
            f"{OTHER}."
        )
    config.read |= {"format", "checkpoint_format"}
    config.expect("pack_dtype", "int32", "int32")
    whole = _layout(config, form, {})
    overrides = _overrides(config)
    layouts = [
        (pattern, None if own is None else _layout(config, form, own)) for pattern, own in overrides
    ]
    config.expect_rest(*HARMLESS)
    matrices = []
    for module in modules(folder, "qweight"):
        layout = next((own for pattern, own in layouts if pattern.match(module)), whole)
        if layout is None:
            raise ValueError(
                f"{folder.tensors[f'{module}.qweight'].where} is quantized, but by 'dynamic' in "
                f"{config.path} {module!r} stays floats; {AGAIN}."
            )
        matrices.append(matrix(folder, module, layout, "GPTQ"))
    return Found(matrices)


def modules(folder: Folder, suffix: str) -> list[str]:
    """The modules with a tensor of this suffix, sorted by name."""
    found = (name.rpartition(".") for name in folder.tensors)
    return [module for module, _, last in found if last == suffix]


def _layout(config: Fields, form: str, changes: Mapping[str, Any]) -> Layout:
    """The layout of modules, after changes to some entries."""
    own = Fields(config.path, {**config.values, **changes})
    bits = own.need("bits", "an integer")
    if bits not in _BITS[form]:
        raise ValueError(
            f"{config.path}: 'bits' is {bits}, but of {form} {', '.join(map(str, _BITS[form]))} "
            f"are read; {OTHER}."
        )
    found = Layout(bits, group_size(own), form == "gptq", form == "gptq_p")
    config.read |= own.read
    return found


def group_size(config: Fields) -> int:
    """The entry `group_size`, -1 for one group.

    **Raises:** `ValueError` for 0 and other negative numbers.
    """
    size = config.get("group_size", "an integer", -1)
    if size < 1 and size != -1:
        raise ValueError(
            f"{config.path}: 'group_size' is {size}, but it must be positive, or -1 for one group; "
            f"{AGAIN}."
        )
    return size


def _overrides(config: Fields) -> list[tuple[re.Pattern[str], Mapping[str, Any] | None]]:
    """The entries of `dynamic`: patterns of modules with their changes, or None for floats."""
    found = []
    dynamic = config.inner("dynamic")
    for key in dynamic.values:
        own = Fields(config.path, dynamic.get(key, "an object", {}))
        own.get("bits", "an integer")
        own.get("group_size", "an integer")
        own.expect_rest(*HARMLESS)
        excluded, text = key.startswith("-:"), re.sub(r"^[-+]:", "", key)
        found.append((config.pattern("dynamic", text), None if excluded else own.values))
    return found


def matrix(folder: Folder, module: str, layout: Layout, kind: str) -> Matrix:
    """The matrix of a module with `qweight`, `qzeros`, `scales` and optionally `g_idx`."""
    names = ("qweight", "qzeros", "scales")
    qweight, qzeros, scales = (folder.need(f"{module}.{name}", module) for name in names)
    g_idx = folder.tensors.get(f"{module}.g_idx")
    bits = layout.bits
    if len(scales.shape) != 2 or len(qweight.shape) != 2:
        raise ValueError(
            f"{scales.where} is of shape {scales.shape} and 'qweight' of {qweight.shape}, but both "
            f"have two axes; {AGAIN}."
        )
    n = scales.shape[1]
    k = qweight.shape[0] * 32 // bits if g_idx is None else (*g_idx.shape, 0)[0]
    size = k if layout.group_size == -1 else layout.group_size
    groups = -(-k // max(size, 1))
    qweight.check(("I32", "U32"), (_bits.word_count(bits, k), n))
    qzeros.check(("I32", "U32"), (groups, _bits.word_count(bits, n)))
    scales.check(FLOATS, (groups, n))
    tensors = (qweight, qzeros, scales)
    permutation = None
    if g_idx is not None:
        g_idx.check(("I32", "I64"), (k,))
        tensors = (*tensors, g_idx)
        permutation = order_of(g_idx, size if size < k else -1)
    if layout.planar and (k % 32 or n % 32):
        raise ValueError(
            f"{qweight.where} has {k} inputs and {n} outputs, but planes have multiples of 32; "
            f"{AGAIN}."
        )
    symmetric = is_symmetric(qzeros, lambda words: layout.zeros(words, n), bits)

    def unpack(start: int, stop: int) -> Unpacked:
        if start == 0:
            _warn_of_zeros(qzeros, layout, n)
        values = layout.fields(np.asarray(qweight.array()[:, start:stop]).T, k)
        zeros = None
        if not symmetric:
            zeros = np.ascontiguousarray(layout.zeros(qzeros.array(), n)[:, start:stop].T)
        return Unpacked(values, _scaled.scales(scales, scales.array()[:, start:stop].T), zeros)

    format = grouped(qweight, bits, size, k, symmetric)
    return Matrix(
        f"{module}.weight", kind, tensors, (n, k), format, unpack, permutation=permutation
    )


def order_of(g_idx: Tensor, size: int) -> np.ndarray | None:
    """The order of input features that makes the groups of a tensor consecutive."""
    return of_groups(g_idx.where, np.array(g_idx.array()), (*g_idx.shape, 1), size, 1)


def is_symmetric(qzeros: Tensor, unpack: Callable[[np.ndarray], np.ndarray], bits: int) -> bool:
    """Whether all zeros are 2^(bits - 1), the zero point of formats without zeros."""
    words = qzeros.array()
    if not words.size or (unpack(words[:1]) != 1 << bits - 1).any():
        return False
    return bool((words == words[:1]).all())


def grouped(tensor: Tensor, bits: int, size: int, k: int, symmetric: bool) -> Format:
    """The format of k inputs in groups of `size`, -1 for all.

    **Raises:** `ValueError` for a size that no format supports.
    """
    if size % 16 and -1 < size < k:
        raise ValueError(
            f"{tensor.where} has groups of {size}, but groups here are multiples of 16 inputs; "
            f"{OTHER}."
        )
    zero = "none" if symmetric else "integer"
    return Format(bits, size if 0 < size < k else -1, zero=zero)


def _warn_of_zeros(qzeros: Tensor, layout: Layout, n: int) -> None:
    """Warns of zeros that AutoGPTQ's packer may have damaged: it stores 0 as -1, with all bits
    set."""
    if not layout.stored_zero:
        return
    stored = layout._replace(stored_zero=False).zeros(qzeros.array(), n)
    if (stored == 2**layout.bits - 1).any():
        warn_of_file(
            f"{qzeros.where} has zeros of 0, which the format 'gptq' stores as -1; AutoGPTQ "
            "damages neighbouring zeros then. They are read as GPTQModel reads them."
        )
