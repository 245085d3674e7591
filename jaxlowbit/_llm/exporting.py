"""`export`: models as GGUF files and as folders of compressed-tensors, for other engines."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np

from .._core.array import QuantizedArray
from .._core.layout import ATOM
from ..checkpoint._files import read_json
from ..checkpoint._replace import check_target, new_file, new_folder
from ..checkpoint._saved import write
from . import compressed, ggml_blocks, gguf_metadata, rope
from .architectures import ARCHITECTURES, FUSED, Gguf
from .config import Config
from .gguf_file import File
from .saved import TOKENIZER, copy_tokenizer, source_of, without_adapter

KINDS = ("gguf", "compressed-tensors")


def write_export(
    path: Path, kind: str, decoder: Any, tokenizer: Any, *, overwrite: bool, progress: bool
) -> None:
    """Writes a model in the format of another engine; arguments and errors as for `export`."""
    check_target("export", path, overwrite)
    source = source_of("export", tokenizer)
    config, weights = without_adapter("export", decoder)
    if config.experts:
        raise ValueError(
            f"export: the model has {config.experts} experts in each layer, which are not written; "
            "keep the file that it came from, or save the model."
        )
    if kind == "gguf":
        stored = _gguf_source(source)
        with new_file("export", path, overwrite) as file:
            if stored is None:
                assert source is not None
                _write_gguf_of_folder(file, source, config, tokenizer, weights)
            else:
                _write_gguf(file, stored, config, weights)
        return
    values = _folder_source(source, config)
    with new_folder("export", path, overwrite) as folder:
        tensors = _compressed(config, weights, values)
        write(folder, tensors, own=False, progress=progress)
        text = json.dumps(values, indent=2, ensure_ascii=False)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
        assert source is not None
        copy_tokenizer(source, folder)


# --- GGUF -----------------------------------------------------------------------------------------


def _gguf_source(source: Path | None) -> Path | None:
    """The GGUF file that supplies the metadata of a model; None for a Hugging Face folder.

    **Raises:** `ValueError` for a model without a file.
    """
    if source is not None and source.is_dir() and (source / "tokenizer.json").is_file():
        return None
    file = None if source is None else source / TOKENIZER if source.is_dir() else source
    if file is None or not file.is_file():
        raise ValueError(
            f"export: the model came from {source or 'no file'}, but a GGUF file gets the metadata "
            "and the tokenizer of the file or folder that the model came from; load that."
        )
    return file


def _write_gguf(path: Path, source: Path, config: Config, weights: Mapping[str, Any]) -> None:
    """Writes a model with the metadata of the GGUF file that it came from."""
    names = gguf_metadata.names_of(config)
    writer = gguf.GGUFWriter(path, names.name)
    _copy_metadata(source, writer)
    _add_tensors(writer, config, names, weights)


def _write_gguf_of_folder(
    path: Path, source: Path, config: Config, tokenizer: Any, weights: Mapping[str, Any]
) -> None:
    """Writes a model with the configuration and the tokenizer of a Hugging Face folder."""
    names = gguf_metadata.names_of(config)
    writer = gguf.GGUFWriter(path, names.name)
    gguf_metadata.add_configuration(writer, config, names)
    gguf_metadata.add_tokenizer(writer, source, tokenizer, config)
    _add_tensors(writer, config, names, weights)
    gguf_metadata.check(path, config, tokenizer)


def _add_tensors(
    writer: gguf.GGUFWriter, config: Config, names: Gguf, weights: Mapping[str, Any]
) -> None:
    """Adds the weights, and writes the file."""
    theirs = {ours: name for name, ours in reversed([*names.tensors.items()])}
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "longrope":
        raise ValueError("export: models with longrope cannot be written; keep the file.")
    if (factors := gguf_metadata.factors_of(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for ours, weight in _joined(weights, theirs).items():
        name = _numbered(ours, theirs)
        moved = names.rope_pairs != config.rope_pairs and _ROTATED.search(ours) is not None
        try:
            for own, (kind, data) in _gguf_tensors(name, weight).items():
                if moved and len(data) > 1:
                    data = np.ascontiguousarray(data[rope.order(len(data), config.head_size)])
                writer.add_tensor(own, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        except ValueError as error:
            raise ValueError(f"export: {ours}: {error}.") from None
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_ROTATED = re.compile(r"\.[qk](_bias)?$")


def _copy_metadata(source: Path, writer: gguf.GGUFWriter) -> None:
    """Copies the metadata of a file, except entries about its files and tensor types."""
    File(source)  # raises for a damaged file; the reader of the package does not check
    for field in gguf.GGUFReader(source).fields.values():
        skipped = field.name.startswith(("GGUF.", "split.")) or field.name in (
            "general.architecture",
            "general.file_type",
        )
        if not skipped:
            kind, inner = field.types[0], field.types[-1]
            of = {"sub_type": inner} if kind == gguf.GGUFValueType.ARRAY else {}
            writer.add_key_value(field.name, field.contents(), kind, **of)


def _gguf_tensors(name: str, weight: Any) -> dict[str, tuple[str, np.ndarray]]:
    """The tensors of a weight, with their types."""
    if isinstance(weight, QuantizedArray):
        kind, data, unit = ggml_blocks.blocks_of(weight)
        found = {name: (kind, data)}
        if unit is not None:
            scale = np.array([unit], np.float32)
            found[f"{name.removesuffix('.weight')}.scale"] = ("F32", scale)
        return found
    values = np.ascontiguousarray(np.asarray(weight).T)
    if values.dtype == jnp.bfloat16:
        return {name: ("BF16", values.view(np.uint8))}
    return {name: ("F16" if values.dtype == np.float16 else "F32", values)}


def _numbered(ours: str, names: Mapping[str, str]) -> str:
    """Looks up the name of a weight in a table with N for the number of a layer."""
    _, number, own = ours.split(".") if ours.startswith("layers.") else ("", "", ours)
    found = names[f"layers.N.{own}" if number else own]
    return re.sub(r"\bN\b", number, found) if number else found


def _joined(weights: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Joins matrices that files of the architecture fuse; names are ours.

    **Raises:** `ValueError` for parts that cannot be one matrix.
    """
    found = dict(weights)
    for stem, parts in FUSED.items():
        if f"layers.N.{stem}" not in names:
            continue
        for name in [x for x in weights if x.endswith(f".{parts[0]}")]:
            layer = name.removesuffix(parts[0])
            try:
                found[layer + stem] = _one([found.pop(layer + part) for part in parts])
            except ValueError as error:
                raise ValueError(f"export: {layer}{', '.join(parts)}: {error}.") from None
    return found


def _one(parts: Sequence[Any]) -> Any:
    """Matrices (k, n) next to each other, as one matrix."""
    first = parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedArray)]
    if not quantized:
        return jnp.concatenate(parts, axis=-1)
    kinds = {(part.format, part.scale.dtype, part.shards) for part in quantized}
    if len(quantized) < len(parts) or len(kinds) > 1 or any(x.n % ATOM for x in parts[:-1]):
        raise ValueError(
            "files of this architecture have them as one matrix, but their formats differ, or "
            f"their outputs are no multiples of {ATOM}; give them one format with rules="
        )
    if any(x.permutation is not None or x.tensor_scale is not None for x in parts):
        raise ValueError(
            "files of this architecture have them as one matrix, but each has an order of rows or "
            "a tensor scale; round them to another format with rules="
        )
    fields = {
        name: jnp.concatenate([getattr(part, name) for part in parts])
        for name in ("packed", "scale", "zero")
        if getattr(first, name) is not None
    }
    return dataclasses.replace(first, **fields, n=sum(part.n for part in parts), whole=None)


# --- compressed-tensors ---------------------------------------------------------------------------


def _folder_source(source: Path | None, config: Config) -> dict[str, Any]:
    """config.json of the Hugging Face folder that supplies a model's metadata, without
    quantization."""
    file = None if source is None or not source.is_dir() else source / "config.json"
    values = {} if file is None or not file.is_file() else read_json(file)
    if "hidden_size" not in values and "text_config" not in values:
        raise ValueError(
            f"export: the model came from {source or 'no file'}, but such a folder gets the "
            "config.json and the tokenizer of the Hugging Face folder of a model; load that."
        )
    if "text_config" in values:
        raise ValueError(
            f"export: {source} is a model with images, whose other parts are not here; export a "
            f"model of text, such as one of {config.architecture} without 'text_config'."
        )
    values.pop("quantization_config", None)
    return values


def _compressed(
    config: Config, weights: Mapping[str, Any], values: dict[str, Any]
) -> dict[str, Any]:
    """The tensors of a folder; adds the quantization to its config.json."""
    names = ARCHITECTURES[config.architecture].huggingface
    assert names is not None  # of a model from a Hugging Face folder
    theirs = {ours: name for name, ours in reversed([*names.tensors.items()])}
    matrices, floats, found = {}, [], {}
    for ours, weight in _joined(weights, theirs).items():
        own = _numbered(ours, theirs)
        name = own if ours == "head" else f"model.{own}"
        module = name.removesuffix(".weight")
        quantized = isinstance(weight, QuantizedArray)
        if quantized and ours != "embedding":
            try:
                found |= compressed.tensors_of(module, weight)
            except ValueError as error:
                raise ValueError(f"export: {ours}: {error}.") from None
            matrices[module] = weight.format
            continue
        # transformers looks up rows of the embedding, and does not support a quantized one.
        dense = weight.dequantize(jnp.float32) if quantized else weight
        if ours.endswith("norm") or ours == "final_norm":
            dense = dense - names.norm_offset
        elif weight.ndim == 2 and ours != "embedding":
            floats.append(module)
        found[name] = np.ascontiguousarray(np.asarray(dense).T)
    if config.tied_head:
        floats.append("lm_head")
    if matrices:
        values["quantization_config"] = compressed.config_of(matrices, floats)
    return found
