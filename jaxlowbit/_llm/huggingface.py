"""Hugging Face directories: config.json, and weights as floats or 8-bit floats in safetensors.

Names and meanings follow the models' code in `transformers`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._core.checks import brief
from ..checkpoint._fields import Fields
from ..checkpoint._files import AGAIN, FLOATS, Tensor, read_folder, read_json
from ..checkpoint._warn import warn_of_file
from . import float8
from .architectures import ARCHITECTURES, HuggingFace, weight_name
from .config import MOST, Config, pattern_of
from .entries import check_features, left_out
from .folder import MLX
from .rope_entries import rotation_of

# --- the configuration ----------------------------------------------------------------------------

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def config_of(folder: Path) -> Config:
    """The configuration of the decoder in a folder, from its config.json.

    Warns of entries that are left out and may change the results.

    **Raises:** `ValueError` for an architecture, or a feature of one, that the decoder lacks, and
    for entries that are missing or of the wrong kind or size.
    """
    path = folder / "config.json"
    architecture, objects = _objects(path)
    entry, names = ARCHITECTURES[architecture], _names(architecture)
    outer, known = objects[0], objects[-1]
    sizes = _sizes(known)
    fields: dict[str, Any] = sizes | {
        "architecture": architecture,
        "norm_epsilon": known.need("rms_norm_eps", "a number"),
        "norm_offset": names.norm_offset,
        "rope_pairs": names.rope_pairs,
        "tied_head": known.get("tie_word_embeddings", "true or false", False),
        "bos": outer.get("bos_token_id", "an integer", known.get("bos_token_id", "an integer")),
        "eos": _eos(folder, names, objects),
    }
    activation = _activation(known)
    try:
        fields |= _window(known, architecture, sizes["layers"])
        rotation, sentences = rotation_of(known, entry.local_rope_base, "window" in fields)
        fields |= rotation | entry.fields(sizes["width"]) | {"activation": activation}
        if "query_pre_attn_scalar" in names.reads:
            scalar = known.need("query_pre_attn_scalar", "a number")
            fields["attention_scale"] = scalar**-0.5
        if "final_logit_softcapping" in names.reads:
            fields["logit_softcap"] = known.get("final_logit_softcapping", "a number")
        config = Config(**fields)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"{path} gives a wrong configuration: {error}") from None
    unread = (sentence for found in objects for sentence in left_out(found, names.harmless))
    for sentence in [*sentences, *unread]:
        warn_of_file(sentence)
    return config


def _sizes(known: Fields) -> dict[str, int]:
    """The sizes of a `Config`."""
    width, heads = (
        known.need("hidden_size", "an integer"),
        known.need("num_attention_heads", "an integer"),
    )
    return {
        "layers": known.need("num_hidden_layers", "an integer"),
        "width": width,
        "heads": heads,
        "kv_heads": known.get("num_key_value_heads", "an integer", heads),
        "head_size": known.get("head_dim", "an integer", width // max(heads, 1)),
        "hidden": known.need("intermediate_size", "an integer"),
        "vocabulary": known.need("vocab_size", "an integer"),
        "context": known.need("max_position_embeddings", "an integer"),
    }


def _activation(known: Fields) -> str:
    activation = known.need("hidden_act", "a string")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{known.path}: the activation is {activation!r}, but the decoder here has "
            f"{', '.join(_ACTIVATIONS)}; use another model."
        )
    return _ACTIVATIONS[activation]


def _names(architecture: str) -> HuggingFace:
    names = ARCHITECTURES[architecture].huggingface
    assert names is not None  # `_objects` finds an architecture by these
    return names


def _objects(path: Path) -> tuple[str, list[Fields]]:
    """The architecture, and the object of the decoder, which is the last.

    If the decoder has a part of config.json, `text_config`, the whole comes first. The object of
    the decoder has the defaults of its architecture.
    """
    outer = Fields(path, read_json(path))
    kind = outer.need("model_type", "a string")
    known = {
        kind: name
        for name, entry in ARCHITECTURES.items()
        if entry.huggingface is not None
        for kind in entry.huggingface.model_types
    }
    if kind not in known:
        raise ValueError(
            f"{path}: 'model_type' is {kind!r}, but the decoder here knows "
            f"{', '.join(known)}; use a model of one of those."
        )
    architecture = known[kind]
    names = _names(architecture)
    if outer.values.get("quantization"):
        raise ValueError(f"{path}: 'quantization' is an entry of MLX's format; {MLX}.")
    float8.scheme_of(path, outer.values)  # which raises for weights quantized otherwise
    outer.read.add("quantization_config")
    check_features(path, outer.values, names.harmless)
    values, objects = outer.values, []
    if names.images and "text_config" in values:
        values, objects = _text(outer, names), [outer]
    if names.null_is_default:
        values = {key: value for key, value in values.items() if value is not None}
    found = Fields(path, {**names.defaults, **values}, names.names)
    found.read |= {"model_type", "quantization_config"}
    return architecture, [*objects, found]


def _text(outer: Fields, names: HuggingFace) -> Mapping[str, Any]:
    """The entries of the decoder of a model with images.

    Both objects may tie the head, and the decoder's may leave it to the other.
    """
    path, values = outer.path, outer.need("text_config", "an object")
    kind = values.get("model_type", names.model_types[0])
    if kind not in names.model_types:
        raise ValueError(
            f"{path}: 'model_type' of 'text_config' is {brief(kind)}, but in such a file it is "
            f"{' or '.join(names.model_types)}; use another model."
        )
    check_features(path, values, names.harmless)
    key = "tie_word_embeddings"
    whole = outer.get(key, "true or false")
    if whole is None:
        return values
    if values.get(key) not in (None, whole):
        raise ValueError(
            f"{path}: {key!r} is {whole} for the model and {values[key]!r} in 'text_config', but "
            "both are about one head; make them agree."
        )
    return values | {key: whole}


def _eos(folder: Path, names: HuggingFace, objects: Sequence[Fields]) -> tuple[int, ...]:
    """The tokens that end texts, of generation_config.json and the objects of config.json.

    A file that does not name any ends texts as the class of transformers does.
    """
    sources = list(objects)
    path = folder / "generation_config.json"
    if path.exists():
        generation = Fields(path, read_json(path))
        generation.read |= {"eos_token_id", "bos_token_id"}
        sources.insert(0, generation)
        for sentence in left_out(generation):
            warn_of_file(sentence)
    found: list[int] = []
    for source in sources:
        source.read.add("eos_token_id")
        tokens = source.values.get("eos_token_id")
        tokens = [] if tokens is None else tokens if isinstance(tokens, list) else [tokens]
        if not all(type(token) is int for token in tokens):
            raise ValueError(
                f"{source.path}: 'eos_token_id' is {tokens!r}, but it is an integer or a list of "
                f"integers; {AGAIN}."
            )
        found += tokens
    if not any("eos_token_id" in source.values for source in sources):
        found = list(names.eos)
    return tuple(dict.fromkeys(found))


def _window(known: Fields, architecture: str, layers: int) -> dict[str, Any]:
    """The window and the pattern of its layers; empty if no layer has one."""
    layers = min(max(layers, 0), MOST["layers"])  # more raise an error in `Config`
    entry = ARCHITECTURES[architecture]
    alike = entry.window_layers in ("none", "all")  # such models do not read layer_types
    size = None
    if entry.window_layers != "none":
        size = known.get("sliding_window", "an integer")
    local = [size is not None] * layers
    if entry.window_layers == "upper":
        used = known.get("use_sliding_window", "true or false", False)
        first = known.get("max_window_layers", "an integer", layers)
        size = size if used else None
        local = [size is not None and i >= first for i in range(layers)]
    elif entry.window_layers == "pattern":
        every = known.get("sliding_window_pattern", "an integer", entry.window_pattern)
        if "layer_types" not in known.values:
            return {"window": size, "window_pattern": every}
    kinds = known.get("layer_types", "a list")
    if kinds is not None:
        named = [kind == "sliding_attention" for kind in kinds]
        unknown = set(map(str, kinds)) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) != layers or (alike and named != local):
            same = " and are all the same" if alike else ""
            raise ValueError(
                f"'layer_types' is {brief(kinds)}, but the {layers} layers of {architecture} here "
                f"have full_attention or sliding_attention{same}; use another model."
            )
        local = named
    if not any(local):
        return {}
    if size is None:
        raise ValueError("'layer_types' has layers with a window, but 'sliding_window' is missing.")
    pattern = pattern_of(local)
    if pattern is None:
        raise ValueError(
            "the layers with a window follow no pattern in which every n-th layer is global, but "
            "those of the decoder here do; use another model."
        )
    return {"window": size, "window_pattern": pattern}


# --- the weights ----------------------------------------------------------------------------------

_TEXT = re.compile(
    r"^(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)?"
)
# A buffer that older files hold; the configuration gives its values.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
# From images to embeddings, which the decoder does not read.
_IMAGES = re.compile(r"(^|\.)(vision_tower|multi_modal_projector)\.")
_MLX = (".scales", ".biases")


def weights_of(folder: Path, config: Config) -> dict[str, Tensor | float8.Matrix]:
    """The tensor of each weight that a configuration needs, checked; reads headers only.

    Warns of scales that are left out.

    **Raises:** `ValueError` for files that are missing or damaged, and for tensors that are
    missing, unknown, of another shape, or neither floats nor 8-bit floats with their scales.
    """
    path = folder / "config.json"
    scheme = float8.scheme_of(path, read_json(path))
    tensors = list(read_folder(folder).tensors.values())
    scales: dict[str, Tensor] = {}
    unread: list[str] = []
    weights: list[Tensor] = []
    for tensor in tensors:
        if scheme is not None and scheme.has_scale(tensor.name):
            scales[tensor.name] = tensor
        elif scheme is not None and scheme.leaves_out(tensor.name):
            unread.append(tensor.name)
        else:
            weights.append(tensor)
    found = _by_weight(weights, config)
    expected = config.shapes()
    if missing := [name for name in expected if name not in found]:
        raise ValueError(
            f"{folder}: {len(missing)} weights of {len(expected)} are missing, the first is "
            f"{missing[0]!r}; {AGAIN}."
        )
    for name, shape in expected.items():
        quantized = scheme is not None and len(shape) == 2
        _check(found[name], shape, (*FLOATS, float8.KIND) if quantized else FLOATS)
    if "head" in found and config.tied_head:
        _check_tied(found["embedding"], found["head"])
    if scheme is None:
        return {name: found[name] for name in expected}
    scheme.check_scales(scales, {tensor.name: tensor for tensor in tensors})
    sentences = list(scheme.left_out)
    if unread and not sentences:
        sentences.append(
            f"{folder} has {len(unread)} scales of activations or of a cache, such as "
            f"{unread[0]!r}, which are left out: here activations and the cache are floats, or "
            "get scales as they come."
        )
    for sentence in sentences:
        warn_of_file(sentence)
    return {
        name: scheme.matrix(found[name], scales, embedding=name == "embedding")
        if found[name].kind == float8.KIND
        else found[name]
        for name in expected
    }


def _by_weight(tensors: Sequence[Tensor], config: Config) -> dict[str, Tensor]:
    """Tensors by our names of their weights, without the tensors that no decoder needs.

    **Raises:** `ValueError` for a tensor that is not a weight of the decoder, and for two tensors
    of one weight.
    """
    names, expected = _names(config.architecture), config.shapes()
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        ours = weight_name(_TEXT.sub("", tensor.name), names.tensors)
        buffer = _IGNORED.search(tensor.name) or (names.images and _IMAGES.search(tensor.name))
        if ours is None and buffer:
            continue
        if ours is not None and ours in found:
            raise ValueError(
                f"{tensor.file}: tensors {found[ours].name!r} and {tensor.name!r} are one weight "
                f"under two names, {ours!r}; {AGAIN}."
            )
        if ours is not None and (ours in expected or (ours == "head" and config.tied_head)):
            found[ours] = tensor
        elif tensor.name.endswith(_MLX):
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name!r} is of weights quantized in MLX's "
                f"format; {MLX}."
            )
        else:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name!r} is no part of {config.architecture} with "
                f"{config.layers} layers as the decoder here knows it, and leaving it out would "
                "change the model; use another model."
            )
    return found


def _check(tensor: Tensor, shape: tuple[int, ...], kinds: Sequence[str]) -> None:
    if tensor.shape != shape[::-1] or tensor.kind not in kinds:
        raise ValueError(
            f"{tensor.file}: tensor {tensor.name!r} is {tensor.kind} of shape {tensor.shape}, "
            f"but config.json asks for floats ({', '.join(kinds)}) of {shape[::-1]}; {AGAIN}."
        )


def _check_tied(table: Tensor, head: Tensor) -> None:
    """Checks that a file's head is a copy of the table, if config.json ties the two.

    transformers 5 does not tie two that differ, and earlier versions ignore the head.

    **Raises:** `ValueError`.
    """
    same = (table.kind, table.shape) == (head.kind, head.shape)
    rows, strip = table.shape[0], max(1, 2**22 // max(table.shape[-1], 1))
    for start in range(0, rows if same else 0, strip):
        stop = min(start + strip, rows)
        if not np.array_equal(table.bytes(start, stop), head.bytes(start, stop)):
            same = False
            break
    if not same:
        raise ValueError(
            f"{head.file}: tensor {head.name!r} differs from {table.name!r}, but config.json ties "
            "the two; set 'tie_word_embeddings' to false there if the head is the model's, or "
            "remove the tensor."
        )
