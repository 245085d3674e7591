"""Hugging Face directories: config.json, and weights as floats or 8-bit floats in safetensors.

Names and meanings are those of the models' code in `transformers`: the scales of gemma3's norms are
offsets from 1, and every architecture rotates halves of heads.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._core.checks import brief
from . import float8
from .config import MOST, Config, pattern_of
from .entries import check_features, left_out
from .folder import AGAIN, FLOATS, MLX, Fields, Tensor, read_json, tensors_of
from .rope_entries import rotation_of
from .warn import warn_of_file

# --- the configuration ----------------------------------------------------------------------------

# The values of transformers' classes for entries that a file lacks; only gemma3's files lack sizes.
_COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
_DEFAULTS = {
    "llama": _COMMON,
    "mistral": _COMMON | {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _COMMON | {"num_key_value_heads": 32, "max_window_layers": 28, "sliding_window": 4096},
    "qwen3": _COMMON
    | {"num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28, "sliding_window": 4096},
    "gemma3": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
_EOS = {"llama": [2], "mistral": [2], "gemma3": [1]}
_ROPE_BASE = {"gemma3": 1_000_000.0}
_ARCHITECTURES = {name: name for name in _DEFAULTS} | {"gemma3_text": "gemma3"}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def config_of(folder: Path) -> Config:
    """The configuration of the decoder in a folder, from its config.json.

    Warns of entries that are left out and may change the results.

    **Raises:** `ValueError` for an architecture, or a feature of one, that the decoder lacks, and
    for entries that are missing or of the wrong kind or size.
    """
    path = folder / "config.json"
    architecture, objects = _objects(path)
    outer, known = objects[0], objects[-1]
    layers = known.need("num_hidden_layers", "an integer")
    width, heads = (
        known.need("hidden_size", "an integer"),
        known.need("num_attention_heads", "an integer"),
    )
    activation = known.need(
        "hidden_activation" if architecture == "gemma3" else "hidden_act", "a string"
    )
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{path}: the activation is {activation!r}, but the decoder here has "
            f"{', '.join(_ACTIVATIONS)}; use another model."
        )
    fields: dict[str, Any] = {
        "architecture": architecture,
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": known.get("num_key_value_heads", "an integer", heads),
        "head_size": known.get("head_dim", "an integer", width // max(heads, 1)),
        "hidden": known.need("intermediate_size", "an integer"),
        "vocabulary": known.need("vocab_size", "an integer"),
        "context": known.need("max_position_embeddings", "an integer"),
        "norm_epsilon": known.need("rms_norm_eps", "a number"),
        "rope_pairs": "halves",
        "qk_norm": architecture in ("qwen3", "gemma3"),
        "attention_bias": architecture == "qwen2",
        "tied_head": known.get("tie_word_embeddings", "true or false", False),
        "activation": _ACTIVATIONS[activation],
        "bos": outer.get("bos_token_id", "an integer", known.get("bos_token_id", "an integer")),
        "eos": _eos(folder, architecture, objects),
    }
    try:
        fields |= _window(known, architecture, layers)
        base = _ROPE_BASE.get(architecture, 10_000.0)
        rotation, sentences = rotation_of(known, architecture, base, "window" in fields)
        fields |= rotation
        if architecture == "gemma3":
            fields |= {
                "norm_placement": "pre_and_post",
                "norm_offset": 1.0,
                "embedding_scale": float(width) ** 0.5,
                "attention_scale": known.need("query_pre_attn_scalar", "a number") ** -0.5,
                "logit_softcap": known.get("final_logit_softcapping", "a number"),
            }
        config = Config(**fields)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{path} gives a wrong configuration: {error}") from None
    for sentence in [*sentences, *(x for found in objects for x in left_out(found, architecture))]:
        warn_of_file(sentence)
    return config


def _objects(path: Path) -> tuple[str, list[Fields]]:
    """The architecture, and the object of the decoder, which is the last.

    Before it comes the whole of a config.json, if the decoder has a part of that, `text_config`.
    The object of the decoder has the defaults of its architecture.
    """
    outer = Fields(path, read_json(path))
    kind = outer.need("model_type", "a string")
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"{path}: 'model_type' is {kind!r}, but the decoder here knows "
            f"{', '.join(_ARCHITECTURES)}; use a model of one of those."
        )
    architecture = _ARCHITECTURES[kind]
    if outer.values.get("quantization"):
        raise ValueError(f"{path}: 'quantization' is an entry of MLX's format; {MLX}.")
    float8.scheme_of(path, outer.values)  # which raises for weights quantized otherwise
    outer.read.add("quantization_config")
    check_features(path, outer.values, architecture)
    values, objects = outer.values, []
    if architecture == "gemma3" and "text_config" in values:
        values, objects = _text(outer), [outer]
    if architecture == "gemma3":  # older files write null for the default
        values = {key: value for key, value in values.items() if value is not None}
    known = Fields(path, _DEFAULTS[architecture] | values)
    known.read |= {"model_type", "quantization_config"}
    return architecture, [*objects, known]


def _text(outer: Fields) -> Mapping[str, Any]:
    """The entries of the decoder of a gemma3 with images.

    Both objects may tie the head, and the decoder's may leave it to the other.
    """
    path, values = outer.path, outer.need("text_config", "an object")
    if (kind := values.get("model_type", "gemma3_text")) not in ("gemma3", "gemma3_text"):
        raise ValueError(
            f"{path}: 'model_type' of 'text_config' is {brief(kind)}, but that of a gemma3 is "
            "gemma3_text; use another model."
        )
    check_features(path, values, "gemma3")
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


def _eos(folder: Path, architecture: str, objects: Sequence[Fields]) -> tuple[int, ...]:
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
        found = _EOS.get(architecture, [])
    return tuple(dict.fromkeys(found))


def _window(known: Fields, architecture: str, layers: int) -> dict[str, Any]:
    """The window and the pattern of its layers; empty if no layer has one."""
    layers = min(max(layers, 0), MOST["layers"])  # more raise an error in `Config`
    size = None if architecture == "llama" else known.get("sliding_window", "an integer")
    if architecture in ("qwen2", "qwen3"):
        used = known.get("use_sliding_window", "true or false", False)
        first = known.get("max_window_layers", "an integer", layers)
        size = size if used else None
        local = [size is not None and i >= first for i in range(layers)]
    elif architecture == "gemma3":
        every = known.get("sliding_window_pattern", "an integer", 6)
        if "layer_types" not in known.values:
            return {"window": size, "window_pattern": every}
        local = [True] * layers
    else:
        local = [size is not None] * layers
    kinds = known.get("layer_types", "a list")
    if kinds is not None:
        named = [kind == "sliding_attention" for kind in kinds]
        fixed = architecture in ("llama", "mistral")  # whose models do not read the entry
        unknown = set(map(str, kinds)) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) != layers or (fixed and named != local):
            raise ValueError(
                f"'layer_types' is {brief(kinds)}, but the {layers} layers of {architecture} here "
                "have full_attention or sliding_attention, and those of llama and mistral all "
                "the same; use another model."
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

_LAYER = {
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
    "input_layernorm.weight": "attention_norm",
}
_MLP_NORM = {"post_attention_layernorm.weight": "mlp_norm"}
_POST_NORMS = {
    "post_attention_layernorm.weight": "post_attention_norm",
    "pre_feedforward_layernorm.weight": "mlp_norm",
    "post_feedforward_layernorm.weight": "post_mlp_norm",
}
_OUTSIDE = {
    "embed_tokens.weight": "embedding",
    "norm.weight": "final_norm",
    "lm_head.weight": "head",
}
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
    post = config.norm_placement == "pre_and_post"
    layer = _LAYER | (_POST_NORMS if post else _MLP_NORM)
    expected = config.shapes()
    found: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    tensors = tensors_of(folder)
    unread: list[str] = []
    for tensor in tensors:
        if scheme is not None and scheme.has_scale(tensor.name):
            scales[tensor.name] = tensor
            continue
        if scheme is not None and scheme.leaves_out(tensor.name):
            unread.append(tensor.name)
            continue
        name = _TEXT.sub("", tensor.name)
        parts = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        if name in _OUTSIDE:
            ours = _OUTSIDE[name]
        elif parts is not None and parts[2] in layer:
            ours = f"layers.{int(parts[1])}.{layer[parts[2]]}"
        elif _IGNORED.search(tensor.name) or (
            config.architecture == "gemma3" and _IMAGES.search(tensor.name)
        ):
            continue
        else:
            ours = tensor.name
        if ours in found:
            raise ValueError(
                f"{tensor.file}: tensors {found[ours].name!r} and {tensor.name!r} are one weight "
                f"under two names, {ours!r}; {AGAIN}."
            )
        if ours not in expected and not (ours == "head" and config.tied_head):
            if tensor.name.endswith(_MLX):
                raise ValueError(
                    f"{tensor.file}: tensor {tensor.name!r} is of weights quantized in MLX's "
                    f"format; {MLX}."
                )
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name!r} is no part of {config.architecture} with "
                f"{config.layers} layers as the decoder here knows it, and leaving it out would "
                "change the model; use another model."
            )
        found[ours] = tensor
    if missing := [name for name in expected if name not in found]:
        raise ValueError(
            f"{folder}: {len(missing)} weights of {len(expected)} are missing, the first is "
            f"{missing[0]!r}; {AGAIN}."
        )
    for name, shape in expected.items():
        tensor = found[name]
        kinds = FLOATS if scheme is None or len(shape) == 1 else (*FLOATS, float8.KIND)
        if tensor.shape != shape[::-1] or tensor.kind not in kinds:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name!r} is {tensor.kind} of shape {tensor.shape}, "
                f"but config.json asks for floats ({', '.join(kinds)}) of {shape[::-1]}; {AGAIN}."
            )
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
        name: scheme.matrix(found[name], scales) if found[name].kind == float8.KIND else found[name]
        for name in expected
    }


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
