"""Folders of whole language models in the packed layout, written by `save` and read by `load`.

A folder has

- the weights as `checkpoint.save` writes them, by the names of `Config.shapes()`;
- `config.json`: the file of the Hugging Face folder that the model came from, if any, with
  `{"quant_method": "jaxlowbit", "decoder": ...}`, the fields of the `Config`, as its
  `quantization_config`;
- the tokenizer: the files of the Hugging Face folder, or the metadata of the GGUF file as
  `tokenizer.gguf`, a GGUF file without tensors.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core import checks, layout
from .._core.array import QuantizedArray
from .._core.columns import take_columns
from ..checkpoint._files import AGAIN, read_json
from ..checkpoint._replace import new_folder
from ..checkpoint._saved import KEY, Saved, read_saved, write
from .config import Config, RopeScaling, is_matrix
from .decoder import Decoder
from .gguf_file import File
from .low_rank import LowRank
from .tokenizer import Tokenizer

TOKENIZER = "tokenizer.gguf"
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "generation_config.json",
)
"""Files of a Hugging Face folder with its tokenizer and settings of generation."""
_LISTS = {
    "qkv": ("q", "k", "v"),
    "biases": ("q_bias", "k_bias", "v_bias"),
    "gate_up": ("gate", "up"),
    "dense_gate_up": ("dense_gate", "dense_up"),
}
"""The weights of a block that share a list of variables."""
_STACKS = {"gate_bias": ("gate_up_bias", 0), "up_bias": ("gate_up_bias", 1)}
"""Weights of a block that are parts of one variable."""


# --- writing --------------------------------------------------------------------------------------


def write_model(
    path: Path, decoder: Decoder, tokenizer: Any, *, overwrite: bool, progress: bool
) -> None:
    """Writes a model to a folder that gets its name when it is complete."""
    source = source_of("save", tokenizer)
    config, weights = without_adapter("save", decoder)
    with new_folder("save", path, overwrite) as folder:
        write(folder, weights, progress=progress)
        _write_config(folder, config, source)
        if source is not None and source.is_dir():
            copy_tokenizer(source, folder)
        elif source is not None:
            (folder / TOKENIZER).write_bytes(File(source).header())


def weights_of(decoder: Decoder) -> tuple[Config, dict[str, Any]]:
    """The configuration without an offset of norms, and the weights, whose norms include it."""
    config = decoder.config
    found = {}
    for name, shape in config.shapes().items():
        weight = _weight(decoder, name)
        found[name] = _without_padding(weight, shape[-1]) if weight.shape != shape else weight
    return config.replace(norm_offset=0.0), found


def without_adapter(caller: str, decoder: Decoder) -> tuple[Config, dict[str, Any]]:
    """`weights_of` a model without an adapter.

    **Raises:** `ValueError` for one with an adapter.
    """
    config, weights = weights_of(decoder)
    for name, weight in weights.items():
        if isinstance(weight, LowRank):
            raise ValueError(
                f"{caller}: {name} has an adapter, which is not part of such a file; save_adapter "
                "writes the adapter, and merge_adapter adds it to the weights."
            )
    return config, weights


def _weight(decoder: Decoder, name: str) -> Any:
    if not name.startswith("layers."):
        return getattr(decoder, name).get_value()
    _, number, own = name.split(".")
    block = decoder.blocks[int(number)]
    if own in _STACKS:
        attribute, i = _STACKS[own]
        return getattr(block, attribute).get_value()[i]
    for attribute, names in _LISTS.items():
        if own in names:
            variables, i = getattr(block, attribute), names.index(own)
            if len(variables) == 1:  # gate and up as one stack
                return variables[0].get_value()[i]
            return variables[i].get_value()
    return getattr(block, own).get_value()


def _without_padding(weight: Any, n: int) -> Any:
    """Removes the padding of a sharded vocabulary: its first n columns."""
    if isinstance(weight, LowRank):
        base = _without_padding(weight.base, n)
        return dataclasses.replace(weight, base=base, b=weight.b[:, :n])
    if not isinstance(weight, QuantizedArray):
        return weight[..., :n]
    blocks = layout.blocks(n)
    fields: dict[str, Any] = {
        name: None if (leaf := getattr(weight, name)) is None else leaf[:blocks]
        for name in ("packed", "scale", "zero")
    }
    if weight.format.scales_channels and weight.tensor_scale is not None:
        fields["tensor_scale"] = weight.tensor_scale[:n]
    return dataclasses.replace(weight, **fields, n=n, whole=None)


def source_of(caller: str, tokenizer: Any) -> Path | None:
    """The file or folder that a tokenizer was loaded from; None without a tokenizer.

    **Raises:** `ValueError` for a tokenizer that was not loaded from a file; `FileNotFoundError` if
    that no longer exists.
    """
    if tokenizer is None:
        return None
    if not isinstance(tokenizer, Tokenizer) or tokenizer.source is None:
        raise ValueError(
            f"{caller}: the tokenizer is {checks.brief(tokenizer)}, but one from a file is saved; "
            "save LanguageModel(model.decoder), and store the tokenizer separately."
        )
    if not tokenizer.source.exists():
        raise FileNotFoundError(
            f"{caller}: {tokenizer.source}, the file of the tokenizer, does not exist any more; "
            "put it back, or save LanguageModel(model.decoder)."
        )
    return tokenizer.source


def _write_config(folder: Path, config: Config, source: Path | None) -> None:
    values: dict[str, Any] = {"model_type": config.architecture}
    if source is not None and (source / "config.json").is_file():
        values = read_json(source / "config.json")
    decoder = dataclasses.asdict(config)
    values["quantization_config"] = {"quant_method": KEY, "decoder": decoder}
    text = json.dumps(values, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, folder: Path) -> None:
    for name in (*_FILES, TOKENIZER):
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name)
        elif (source / name).exists():
            shutil.copyfile(source / name, folder / name)


# --- reading --------------------------------------------------------------------------------------


class Model(NamedTuple):
    """A folder written by `save`, with checked headers and memory-mapped weights by name."""

    config: Config
    saved: Saved
    weights: dict[str, Any]
    tokenizer: Tokenizer | None


def is_model(path: Path) -> bool:
    """Whether a folder was written by `write_model`, by its config.json."""
    file = path / "config.json"
    if not file.is_file():
        return False
    found = read_json(file).get("quantization_config")
    return isinstance(found, dict) and found.get("quant_method") == KEY


def read_model(path: Path) -> Model:
    """Reads and checks a folder of `write_model`, except the elements of its weights.

    **Raises:** `ValueError` for missing or damaged files, and for weights that do not match the
    configuration.
    """
    config = _config_of(path / "config.json")
    saved = read_saved(path)
    expected = config.shapes()
    if odd := sorted(expected.keys() ^ saved.arrays.keys()):
        where = "is missing" if odd[0] in expected else f"is no weight of {config.architecture}"
        raise ValueError(f"{path}: the array {odd[0]!r} {where}; {AGAIN}.")
    weights = {name: saved.leaf(name) for name in expected}
    for name, shape in expected.items():
        leaf = weights[name]
        floats = not isinstance(leaf, QuantizedArray) and jnp.issubdtype(leaf.dtype, jnp.floating)
        quantized = isinstance(leaf, QuantizedArray) and is_matrix(name)
        if tuple(leaf.shape) != shape or not (floats or quantized):
            raise ValueError(
                f"{path}: the array {name!r} is {checks.brief(leaf)} of shape {leaf.shape}, but "
                f"config.json asks for {shape}; {AGAIN}."
            )
    return Model(config, saved, weights, _tokenizer_of(path))


def rows(leaf: Any, start: int, stop: int) -> np.ndarray:
    """The float32 rows `start` to `stop` - 1 of a weight (k, n)."""
    if isinstance(leaf, QuantizedArray):
        columns = jnp.arange(start, stop, dtype=jnp.int32)
        return np.asarray(take_columns(jax.tree.map(jnp.asarray, leaf), columns, jnp.float32))
    return leaf[:, start:stop].T.astype(np.float32)


def in_dtype(leaf: Any, dtype: Any) -> Any:
    """A memory-mapped weight, with floats in `dtype`."""
    return leaf if isinstance(leaf, QuantizedArray) else leaf.astype(dtype, copy=False)


def _tokenizer_of(path: Path) -> Tokenizer | None:
    if (path / TOKENIZER).is_file():
        return Tokenizer.from_gguf(File(path / TOKENIZER))
    return Tokenizer.from_folder(path) if (path / "tokenizer.json").is_file() else None


def _config_of(path: Path) -> Config:
    found = read_json(path)["quantization_config"]
    fields = found.get("decoder")
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: 'quantization_config' lacks 'decoder', an object; {AGAIN}.")
    known = {field.name for field in dataclasses.fields(Config)}
    if unknown := sorted(fields.keys() - known):
        raise ValueError(
            f"{path}: 'decoder' has the entry {unknown[0]!r}, which this library does not know; "
            f"use the library that wrote it, or {AGAIN}."
        )
    try:
        return Config(**{name: _value(value) for name, value in fields.items()})
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{path} gives a wrong configuration: {error}") from None


def _value(value: Any) -> Any:
    """Converts a field of a `Config` from JSON: lists to tuples, objects to dataclasses."""
    if isinstance(value, Mapping):
        return RopeScaling(**{name: _value(x) for name, x in value.items()})
    return tuple(map(_value, value)) if isinstance(value, list) else value
