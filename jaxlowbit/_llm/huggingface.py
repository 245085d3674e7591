"""Reads Hugging Face folders: config.json, and weights in safetensors, quantized or floats.

Names and meanings follow the code of the models in `transformers`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._core.checks import brief
from ..checkpoint._fields import Fields
from ..checkpoint._files import AGAIN, FLOATS, Tensor, read_json
from ..checkpoint._load import Contents, open_folder
from ..checkpoint._matrix import Matrix
from ..checkpoint._warn import warn_of_file
from .architectures import (
    ARCHITECTURES,
    IMAGE_MODELS,
    Architecture,
    HuggingFace,
    entry_of,
    every_nth,
    fused,
    weight_name,
)
from .config import MOST, Config
from .entries import check_features, left_out
from .expert_tensors import View, lists_of, of_rows, of_stacks, split_name, stored_shape
from .rope_entries import rotation_of

Weight = Tensor | Matrix | View | list[Tensor | Matrix | View]

# --- the configuration ----------------------------------------------------------------------------

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Entries that only some architectures read (`HuggingFace.reads`): type, and fields of `Config`.
_OPTIONS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "attention_bias": ("true or false", lambda x: {"attention_bias": x, "output_bias": x}),
    "mlp_bias": ("true or false", lambda x: {"mlp_bias": x}),
    "norm_topk_prob": ("true or false", lambda x: {"normalized_experts": x}),
    "query_pre_attn_scalar": ("a number", lambda x: {"attention_scale": x**-0.5}),
    "attention_multiplier": ("a number", lambda x: {"attention_scale": x}),
    "attn_logit_softcapping": ("a number", lambda x: {"attention_softcap": x}),
    "embedding_multiplier": ("a number", lambda x: {"embedding_scale": x}),
    "residual_multiplier": ("a number", lambda x: {"residual_scale": x}),
    "logits_scaling": ("a number", lambda x: {"logit_scale": 1 / x}),
    "final_logit_softcapping": ("a number", lambda x: {"logit_softcap": x}),
    "attention_k_eq_v": ("true or false", lambda x: {"keys_as_values": x}),
    "use_bidirectional_attention": ("a string", lambda x: _causal(x)),
}


def _causal(kind: str) -> dict[str, Any]:
    """Checks an entry that lets tokens of images, "vision", or all tokens attend to later ones."""
    if kind == "vision":
        return {}
    raise ValueError(
        f"'use_bidirectional_attention' is {kind!r}, but each position of the decoder here attends "
        "only to those before it; use another model."
    )


def config_of(folder: Path) -> Config:
    """Returns the configuration of the decoder in a folder, from its config.json.

    Warns of entries that are not used and may change the results.

    **Raises:** `ValueError` for an architecture, or a feature of one, that the decoder lacks, and
    for entries that are missing or have the wrong type or size.
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
    fields |= _experts(known, names, sizes["hidden"])
    activation = _activation(known, entry)
    try:
        fields |= _layers(known, entry, names, sizes["layers"])
        fields |= _global_heads(known, names, fields)
        head_size = fields.get("global_head_size") or sizes["head_size"]
        rotation, sentences = rotation_of(known, entry, names, head_size, "window" in fields)
        fields |= rotation | entry.fields(sizes["width"]) | activation
        for name in sorted(names.reads & _OPTIONS.keys()):
            kind, option = _OPTIONS[name]
            if (value := known.get(name, kind)) is not None:
                fields |= option(value)
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


def _activation(known: Fields, entry: Architecture) -> dict[str, str]:
    """The activation, if it differs from the architecture's.

    **Raises:** `ValueError` for one that the decoder lacks.
    """
    activation = known.need("hidden_act", "a string")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{known.path}: the activation is {activation!r}, but the decoder here has "
            f"{', '.join(_ACTIVATIONS)}; use another model."
        )
    if entry.parts.get("activation") != "gpt_oss":
        return {"activation": _ACTIVATIONS[activation]}
    constants = {"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    for name, value in constants.items():
        known.read.add(name)
        if (found := known.values.get(name)) not in (None, value):
            raise ValueError(
                f"{known.path}: {name!r} is {brief(found)}, but the experts of this architecture "
                f"have the activation with {value!r}; use another model."
            )
    return {}


def _experts(known: Fields, names: HuggingFace, hidden: int) -> dict[str, int]:
    """The number of experts, the number that each token takes, and the widths of the MLPs of a
    model with experts and a dense one, as fields of a `Config`.

    transformers writes `num_experts` or `num_local_experts`, by its version. `hidden`: the entry
    `intermediate_size`, or the one that `names` gives for it.

    **Raises:** `ValueError` for two numbers that differ.
    """
    if not names.experts:
        return {}
    stored = {name: known.get(name, "an integer") for name in ("num_experts", "num_local_experts")}
    counts = set(stored.values()) - {None}
    if len(counts) > 1 or 0 in counts:
        raise ValueError(
            f"{known.path}: {stored}, but both are the number of experts, from 1 on; {AGAIN}."
        )
    found = {
        "experts": counts.pop() if counts else names.experts,
        "experts_per_token": known.need("num_experts_per_tok", "an integer"),
    }
    if "layers.N.dense_down" in names.tensors.values():
        needed = {"experts": "num_experts", "hidden": "moe_intermediate_size"}
        found |= {field: known.need(name, "an integer") for field, name in needed.items()}
        found |= {"dense_hidden": hidden}
    return found


def _names(architecture: str) -> HuggingFace:
    names = ARCHITECTURES[architecture].huggingface
    assert names is not None  # `_objects` finds an architecture by these
    return names


def _objects(path: Path) -> tuple[str, list[Fields]]:
    """The architecture, and objects of entries, ending with the decoder's.

    If the decoder is a part of config.json, `text_config`, the whole file comes first. The object
    of the decoder has the defaults of its architecture.
    """
    outer = Fields(path, read_json(path))
    kind, values = outer.need("model_type", "a string"), outer.values
    if kind in IMAGE_MODELS:
        kind, values = _text(outer, IMAGE_MODELS[kind])
    known: dict[str, list[str]] = {}
    for name, entry in ARCHITECTURES.items():
        for model_type in () if entry.huggingface is None else entry.huggingface.model_types:
            known.setdefault(model_type, []).append(name)
    if kind not in known:
        raise ValueError(
            f"{path}: 'model_type' is {kind!r}, but the decoder here knows "
            f"{', '.join([*known, *IMAGE_MODELS])}; use a model of one of those."
        )
    switch = Fields(path, values)
    several = len(known[kind]) > 1
    experts = several and switch.get("enable_moe_block", "true or false", False)
    architecture = entry_of(known[kind], experts) if several else known[kind][0]
    names = _names(architecture)
    outer.read |= {"quantization", "quantization_config"}  # `open_folder` reads them
    values = dict(names.defaults) | {
        key: value
        for key, value in values.items()
        if value is not None or key not in names.null_is_default
    }
    for found in (outer.values, values):
        check_features(path, found, names.reads | names.harmless)
    inner = Fields(path, values, names.names)
    inner.read |= {"model_type", "quantization", "quantization_config"} | switch.read
    return architecture, [inner] if "text_config" not in outer.read else [outer, inner]


def _text(outer: Fields, kinds: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """The `model_type`, one of `kinds`, and the entries of the decoder of a model with images.

    Both objects may tie the head; the decoder's may omit it. Without a `text_config`, the decoder
    has the entries of the file.
    """
    path = outer.path
    if "text_config" not in outer.values:
        return kinds[0], outer.values
    values = outer.need("text_config", "an object")
    kind = values.get("model_type", kinds[0])
    if kind not in kinds:
        raise ValueError(
            f"{path}: 'model_type' of 'text_config' is {brief(kind)}, but in such a file it is "
            f"{' or '.join(kinds)}; use another model."
        )
    key = "tie_word_embeddings"
    whole = outer.get(key, "true or false")
    if whole is None:
        return kind, values
    if values.get(key) not in (None, whole):
        raise ValueError(
            f"{path}: {key!r} is {whole} for the model and {values[key]!r} in 'text_config', but "
            "both are about one head; make them agree."
        )
    return kind, values | {key: whole}


def _eos(folder: Path, names: HuggingFace, objects: Sequence[Fields]) -> tuple[int, ...]:
    """The tokens that end texts, from generation_config.json and the objects of config.json.

    Without any, texts end as in the class of transformers.
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
                f"{source.path}: 'eos_token_id' is {tokens!r}, but it must be an integer or a list "
                f"of integers; {AGAIN}."
            )
        found += tokens
    if not any("eos_token_id" in source.values for source in sources):
        found = list(names.eos)
    return tuple(dict.fromkeys(found))


def _layers(known: Fields, entry: Architecture, names: HuggingFace, layers: int) -> dict[str, Any]:
    """The window, the layers with a window and the layers with a rotation, as `Config` fields.

    The window is absent if no layer has one.
    """
    layers = min(max(layers, 0), MOST["layers"])  # larger numbers raise an error in `Config`
    rotated = [True] * layers
    if entry.rope_layers == "pattern":
        every = _interval(known, "no_rope_layer_interval", entry.rope_pattern)
        stored = known.get("no_rope_layers", "a list", every_nth(layers, every))
        if len(stored) != layers or not all(value in (0, 1) for value in stored):
            raise ValueError(
                f"'no_rope_layers' is {brief(stored)}, but it has 0 or 1 for each of {layers} "
                f"layers; {AGAIN}."
            )
        rotated = [bool(value) for value in stored]
    size = None if entry.window_layers == "none" else known.get("sliding_window", "an integer")
    size, local = _local(known, entry, names, size, rotated)
    if any(local) and size is None:
        raise ValueError("'layer_types' has layers with a window, but 'sliding_window' is missing.")
    if entry.rope_layers == "local" and size is not None:
        rotated = local
    found: dict[str, Any] = {"rope_layers": () if all(rotated) else tuple(rotated)}
    if any(local):
        found |= {"window": size, "window_layers": () if all(local) else tuple(local)}
    return found


def _local(
    known: Fields, entry: Architecture, names: HuggingFace, size: int | None, rotated: list[bool]
) -> tuple[int | None, list[bool]]:
    """The window, None if it is turned off, and for each layer whether it has one."""
    layers = len(rotated)
    if entry.window_layers in ("upper", "unrotated") or "use_sliding_window" in names.reads:
        size = size if known.get("use_sliding_window", "true or false", False) else None
    local = [size is not None] * layers
    if entry.window_layers == "upper":
        first = known.get("max_window_layers", "an integer", layers)
        local = [size is not None and i >= first for i in range(layers)]
    elif entry.window_layers == "unrotated":
        local = [size is not None and not rotates for rotates in rotated]
    elif entry.window_layers == "pattern":
        every = _every(known, entry, names)
        local = [size is not None and found for found in every_nth(layers, every)]
    reads = "layer_types" in names.reads
    kinds = known.get("layer_types", "a list")
    if kinds is None:
        return size, local
    named = [kind == "sliding_attention" for kind in kinds]
    unknown = set(map(str, kinds)) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers or (not reads and named != local):
        same = "" if reads else " and are all the same"
        raise ValueError(
            f"'layer_types' is {brief(kinds)}, but the {layers} layers of such a model here "
            f"have full_attention or sliding_attention{same}; use another model."
        )
    return size, named


def _every(known: Fields, entry: Architecture, names: HuggingFace) -> int:
    """The n of layers with a window (all except every n-th), if no entry lists the layers."""
    key = "sliding_window_pattern"
    if key not in names.reads:
        return entry.window_pattern
    if isinstance(known.values.get(key), str) and "layer_types" in known.values:
        known.read.add(key)  # letters that describe the same layers
        return entry.window_pattern
    return _interval(known, key, entry.window_pattern)


def _interval(known: Fields, key: str, default: int) -> int:
    """The n of an entry for every n-th layer."""
    found = known.get(key, "an integer", default)
    if found < 1:
        raise ValueError(f"{key!r} is {found}, but it counts layers from 1 on; {AGAIN}.")
    return found


def _global_heads(
    known: Fields, names: HuggingFace, fields: Mapping[str, Any]
) -> dict[str, int | None]:
    """The sizes of heads in layers without a window, as fields of a `Config`.

    `fields`: of the `Config`, with its layers. Released files have two entries; transformers writes
    `per_layer_config` instead, by the number of a layer, and reads only that if it is there.
    """
    if "global_head_dim" not in names.reads:
        return {}
    found = {
        "head_dim": known.get("global_head_dim", "an integer", 512),
        "num_key_value_heads": known.get("num_global_key_value_heads", "an integer"),
    }
    if not known.get("attention_k_eq_v", "true or false", False):
        found["num_key_value_heads"] = None
    key = "per_layer_config"
    if key in known.values:
        stored = known.get(key, "an object", {})
        layers = range(min(max(fields["layers"], 0), MOST["layers"]))
        local = fields.get("window_layers") or [fields.get("window") is not None for _ in layers]
        numbers = [str(i) for i in layers if not local[i]]
        found = stored.get(numbers[0], {}) if numbers else {}
        expected = dict.fromkeys(numbers, found) if found else {}
        sizes = isinstance(found, dict) and found.keys() <= {"head_dim", "num_key_value_heads"}
        if stored != expected or not sizes:
            raise ValueError(
                f"{key!r} is {brief(stored)}, but the decoder here has other sizes, head_dim and "
                "num_key_value_heads, only in all layers without a window alike; use another model."
            )
    if fields.get("window_layers") and fields["window_layers"][-1]:
        raise ValueError(
            "'layer_types' ends with sliding_attention, but transformers gives the last layer of "
            "such a model full_attention; correct config.json."
        )
    own = {"head_dim": fields["head_size"], "num_key_value_heads": fields["kv_heads"]}
    head_size, kv_heads = (
        None if found.get(name) == size else found.get(name) for name, size in own.items()
    )
    return {"global_head_size": head_size, "global_kv_heads": kv_heads}


# --- the weights ----------------------------------------------------------------------------------

TEXT = re.compile(r"^(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)?")
"""The prefix of tensors and modules of the decoder, also in models with images."""
# A buffer in older files; the configuration determines its values.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
# Encoders of images and sounds, which the decoder does not read.
_IMAGES = re.compile(
    r"(^|\.)(vision_tower|multi_modal_projector|embed_vision|audio_tower|embed_audio)\."
)


def weights_of(folder: Path, config: Config) -> dict[str, Weight]:
    """The tensor or quantized matrix of each weight of a configuration; reads only headers.

    A stack of experts is a list of them.

    Warns of entries of the checkpoint that are not used.

    **Raises:** `ValueError` for missing or damaged files, and for tensors that are missing,
    unknown, of another shape, or neither floats nor part of a quantized matrix.
    """
    contents = open_folder(folder)
    kind = read_json(folder / "config.json").get("model_type")
    images = _IMAGES if kind in IMAGE_MODELS else None
    stored = lists_of(folder, _by_weight(contents, config, images), config.experts)
    alternate = _names(config.architecture).alternate
    found: Mapping[str, Weight] = (
        of_stacks(stored, config) if alternate else _parts(of_rows(stored, config), config)
    )
    expected = config.shapes()
    if missing := [name for name in expected if name not in found]:
        raise ValueError(
            f"{folder}: {len(missing)} weights of {len(expected)} are missing, the first is "
            f"{missing[0]!r}; {AGAIN}."
        )
    for name, shape in expected.items():
        weight = found[name]
        for part in weight if isinstance(weight, list) else [weight]:
            _check(part, stored_shape(name, shape))
    if "head" in found and config.tied_head:
        _check_tied(found["embedding"], found["head"])
    for sentence in contents.sentences:
        warn_of_file(sentence)
    return {name: found[name] for name in expected}


def lhs_qtype_of(path: Path) -> Any:
    """The dtype of a checkpoint's quantized activations, or None.

    **Raises:** `ValueError` if it differs between matrices.
    """
    if not path.is_dir():
        return None
    found = {
        None if dtype is None else jnp.dtype(dtype).name: matrix
        for matrix in open_folder(path).matrices.values()
        for dtype in [matrix.activation_dtype]
    }
    if len(found) > 1:
        one, other = list(found)[:2]
        raise ValueError(
            f"{path} rounds the inputs of {found[one].name!r} to {one} and of "
            f"{found[other].name!r} to {other}, but all blocks here have one lhs_qtype; pass it, "
            "or None for floats."
        )
    return next(iter(found), None)


def _by_weight(
    contents: Contents, config: Config, images: re.Pattern[str] | None
) -> dict[str, Tensor | Matrix]:
    """Tensors and matrices by our names of the weights, without unused ones.

    `images` matches the names of the tensors of an image encoder.

    **Raises:** `ValueError` for a tensor that is not a weight of the decoder, and for two tensors
    of one weight.
    """
    names, expected = _names(config.architecture), config.shapes()
    found: dict[str, Tensor | Matrix] = {}
    weights: dict[str, Tensor | Matrix] = {**contents.matrices, **contents.floats}
    for name, weight in weights.items():
        ours = weight_name(TEXT.sub("", name), names.tensors)
        buffer = _IGNORED.search(name) or (images and images.search(name))
        if ours is None and buffer:
            continue
        if ours is not None and ours in found:
            raise ValueError(
                f"{weight.where} and {found[ours].where} are one weight under two names, {ours!r}; "
                f"{AGAIN}."
            )
        stem = None if ours is None else split_name(ours)[0]
        first = None if stem is None else next(iter(fused(stem)), stem)
        if ours is not None and (first in expected or (ours == "head" and config.tied_head)):
            found[ours] = weight
        elif not _is_empty_bias(name, contents):
            raise ValueError(
                f"{weight.where} is no part of {config.architecture} with {config.layers} layers "
                "as the decoder here knows it, and leaving it out would change the model; use "
                "another model."
            )
    return found


def _is_empty_bias(name: str, contents: Contents) -> bool:
    """Whether a tensor is a bias of zeros, which GPTQ's packers add to quantized matrices."""
    module, _, last = name.rpartition(".")
    if last != "bias" or f"{module}.weight" not in contents.matrices:
        return False
    return not contents.floats[name].array().astype(np.float32).any()


def _parts(weights: Mapping[str, Tensor | Matrix], config: Config) -> dict[str, Tensor | Matrix]:
    """Replaces fused matrices by their parts, by our names.

    **Raises:** `ValueError` for a fused matrix of another shape, and if the folder also has the
    tensor of a part.
    """
    shapes, found = config.shapes(), {}
    for name, weight in weights.items():
        parts = fused(name)
        if not parts:
            found[name] = weight
            continue
        k, rows = shapes[parts[0]][0], [shapes[part][1] for part in parts]
        _check(weight, (sum(rows), k))
        if both := [part for part in parts if part in weights]:
            raise ValueError(
                f"{weights[both[0]].where} and {weight.where} have the same weight, {both[0]!r}; "
                f"{AGAIN}."
            )
        start = 0
        for part, count in zip(parts, rows, strict=True):
            if isinstance(weight, Matrix):
                found[part] = weight.part(start, start + count)
            else:
                offset = weight.offset + start * k * weight.dtype.itemsize
                found[part] = weight._replace(shape=(count, k), offset=offset)
            start += count
    return found


def _check(weight: Any, shape: tuple[int, ...]) -> None:
    """Raises unless a weight has this shape in the file."""
    if isinstance(weight, Matrix):
        right = weight.shape == shape and weight.stack is None
        kinds = "a matrix" if len(shape) == 2 else f"floats ({', '.join(FLOATS)})"
    else:
        right = weight.shape == shape and weight.kind in FLOATS
        kinds = f"floats ({', '.join(FLOATS)})"
    if not right:
        raise ValueError(
            f"{weight.where} is {weight.kind} of shape {weight.shape}, but config.json asks for "
            f"{kinds} of {shape}; {AGAIN}."
        )


def _check_tied(table: Any, head: Any) -> None:
    """Checks that a stored head equals the table, if config.json ties the two.

    transformers 5 does not tie them if they differ, and earlier versions ignore the head.

    **Raises:** `ValueError`.
    """

    def rows(weight: Tensor | Matrix, start: int, stop: int) -> np.ndarray:
        return weight.rows(start, stop) if isinstance(weight, Matrix) else weight.bytes(start, stop)

    same = (type(table), table.kind, table.shape) == (type(head), head.kind, head.shape)
    count, strip = table.shape[0], max(1, 2**22 // max(table.shape[-1], 1))
    for start in range(0, count if same else 0, strip):
        stop = min(start + strip, count)
        if not np.array_equal(rows(table, start, stop), rows(head, start, stop)):
            same = False
            break
    if not same:
        raise ValueError(
            f"{head.where} differs from {table.name!r}, but config.json ties the two; set "
            "'tie_word_embeddings' to false there if the head is the model's, or remove the tensor."
        )
