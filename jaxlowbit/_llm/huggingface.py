"""Hugging Face directories: config.json, and weights as floats or 8-bit floats in safetensors.

Names and meanings are those of the models' code in `transformers`: the scales of gemma3's norms are
offsets from 1, and every architecture rotates halves of heads.
"""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import float8
from .config import Config, RopeScaling
from .folder import AGAIN, FLOATS, Fields, Tensor, read_json, tensors_of

# --- the configuration ----------------------------------------------------------------------------

# What `transformers` takes where the file of a gemma3 model says nothing.
_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_ARCHITECTURES = {name: name for name in ("llama", "mistral", "qwen2", "qwen3", "gemma3")}
_ARCHITECTURES["gemma3_text"] = "gemma3"
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def config_of(folder: Path) -> Config:
    """The configuration of the decoder in a folder, from its config.json.

    **Raises:** `ValueError` for an architecture, or a feature of one, that the decoder has not, and
    for entries that are missing or of the wrong kind or size.
    """
    path = folder / "config.json"
    values = read_json(path)
    kind = Fields(path, values).need("model_type", "a string")
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"{path}: 'model_type' is {kind!r}, but the decoder here knows "
            f"{', '.join(_ARCHITECTURES)}; use a model of one of those."
        )
    architecture = _ARCHITECTURES[kind]
    float8.scheme_of(path, values)  # which refuses what is quantized otherwise
    tokens = values
    if "text_config" in values:
        values = Fields(path, values).need("text_config", "an object")
    if architecture == "gemma3":
        values = _GEMMA3 | {key: value for key, value in values.items() if value is not None}
    known = Fields(path, values)
    known.refuse("mlp_bias", "the MLP of the decoder here has no biases")
    known.refuse("attn_logit_softcapping", "the attention of the decoder here has no cap")
    known.refuse("num_experts", "the decoder here has no experts")
    width, heads = (
        known.need("hidden_size", "an integer"),
        known.need("num_attention_heads", "an integer"),
    )
    if architecture != "qwen2":
        known.refuse("attention_bias", "of the models here qwen2 alone has biases in attention")
    activation = known.get("hidden_activation", "a string") or known.get(
        "hidden_act", "a string", "silu"
    )
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{path}: the activation is {activation!r}, but the decoder here has "
            f"{', '.join(_ACTIVATIONS)}; use another model."
        )
    fields: dict[str, Any] = {
        "architecture": architecture,
        "layers": known.need("num_hidden_layers", "an integer"),
        "width": width,
        "heads": heads,
        "kv_heads": known.get("num_key_value_heads", "an integer", heads),
        "head_size": known.get("head_dim", "an integer", width // max(heads, 1)),
        "hidden": known.need("intermediate_size", "an integer"),
        "vocabulary": known.need("vocab_size", "an integer"),
        "context": known.need("max_position_embeddings", "an integer"),
        "norm_epsilon": known.get("rms_norm_eps", "a number", 1e-6),
        "rope_pairs": "halves",
        "qk_norm": architecture in ("qwen3", "gemma3"),
        "attention_bias": architecture == "qwen2",
        "tied_head": known.get("tie_word_embeddings", "true or false", False),
        "activation": _ACTIVATIONS[activation],
        "logit_softcap": known.get("final_logit_softcapping", "a number"),
        "bos": Fields(path, tokens).get("bos_token_id", "an integer"),
        "eos": _eos(path, folder, tokens),
    }
    try:
        fields |= _rotation(known, architecture)
        fields |= _window(known, architecture, fields["layers"])
        if architecture == "gemma3":
            fields |= {
                "norm_placement": "pre_and_post",
                "norm_offset": 1.0,
                "embedding_scale": float(width) ** 0.5,
                "attention_scale": known.need("query_pre_attn_scalar", "a number") ** -0.5,
            }
        return Config(**fields)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{path} gives a wrong configuration: {error}") from None


def _eos(path: Path, folder: Path, values: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end texts; generation_config.json may name more than config.json."""
    found: list[int] = []
    sources = [(path, values)]
    if (folder / "generation_config.json").exists():
        other = folder / "generation_config.json"
        sources.insert(0, (other, read_json(other)))
    for source, entries in sources:
        tokens = entries.get("eos_token_id")
        tokens = [] if tokens is None else tokens if isinstance(tokens, list) else [tokens]
        if not all(type(token) is int for token in tokens):
            raise ValueError(
                f"{source}: 'eos_token_id' is {tokens!r}, but it is one integer or some; {AGAIN}."
            )
        found += tokens
    return tuple(dict.fromkeys(found))


def _rotation(known: Fields, architecture: str) -> dict[str, Any]:
    """Bases and scaling; newer files have them in `rope_parameters`, for each kind of layer."""
    parameters = known.get("rope_parameters", "an object") or {}
    local = parameters.get("sliding_attention") or {}
    if "full_attention" in parameters:
        parameters = parameters["full_attention"] or {}
    scaling = parameters or known.get("rope_scaling", "an object") or {}
    entries = Fields(known.path, dict(known.values) | parameters)
    found: dict[str, Any] = {
        "rope_base": entries.get("rope_theta", "a number", 10000.0),
        "rope_scaling": _scaling(Fields(known.path, scaling), known),
    }
    if architecture == "gemma3":
        base = known.get("rope_local_base_freq", "a number")
        found["local_rope_base"] = Fields(known.path, local).get("rope_theta", "a number", base)
    return found


def _scaling(scaling: Fields, known: Fields) -> RopeScaling | None:
    kind = scaling.get("rope_type", "a string") or scaling.get("type", "a string", "default")
    if kind == "default":
        return None
    factor = scaling.need("factor", "a number") if kind in ("linear", "llama3", "yarn") else 1.0
    if kind == "linear":
        return RopeScaling("linear", factor)
    original = "original_max_position_embeddings"
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor,
            scaling.need(original, "an integer"),
            low=scaling.need("low_freq_factor", "a number"),
            high=scaling.need("high_freq_factor", "a number"),
        )
    if kind == "yarn":
        context = known.need("max_position_embeddings", "an integer")
        return RopeScaling(
            "yarn",
            factor,
            scaling.get(original, "an integer", context),
            beta_fast=scaling.get("beta_fast", "a number", 32.0),
            beta_slow=scaling.get("beta_slow", "a number", 1.0),
            attention_factor=scaling.get("attention_factor", "a number"),
        )
    raise ValueError(
        f"the rotation's scaling is {kind!r}, but the decoder here has linear, llama3 and yarn; "
        "use another model."
    )


def _window(known: Fields, architecture: str, layers: int) -> dict[str, Any]:
    window = known.get("sliding_window", "an integer")
    if architecture in ("qwen2", "qwen3"):
        known.refuse("use_sliding_window", "the decoder here gives its layers no window")
        return {}
    if window is None or architecture == "llama":
        return {}
    if architecture == "mistral":
        return {"window": window}
    pattern = known.get("sliding_window_pattern", "an integer", 6)
    kinds = known.get("layer_types", "a list")
    if kinds is not None:
        pattern = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
        regular = [
            "full_attention" if pattern and (i + 1) % pattern == 0 else "sliding_attention"
            for i in range(layers)
        ]
        if kinds != regular:
            raise ValueError(
                "'layer_types' follows no pattern in which every n-th layer is global, but those "
                "of the decoder here do; use another model."
            )
    return {"window": window, "window_pattern": pattern}


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
# Of models that see: what turns images into embeddings. And a buffer that older files hold.
_IGNORED = re.compile(r"(^|\.)(vision_tower|multi_modal_projector)\.|\.rotary_emb\.inv_freq$")


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
    for tensor in tensors:
        if scheme is not None and scheme.has_scale(tensor.name):
            scales[tensor.name] = tensor
            continue
        if scheme is not None and scheme.leaves_out(tensor.name):
            continue
        name = _TEXT.sub("", tensor.name)
        parts = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        if name in _OUTSIDE:
            ours = _OUTSIDE[name]
        elif parts is not None and parts[2] in layer:
            ours = f"layers.{int(parts[1])}.{layer[parts[2]]}"
        elif _IGNORED.search(tensor.name):
            continue
        else:
            ours = tensor.name
        if ours == "head" and config.tied_head:  # some files hold the table twice
            continue
        if ours not in expected:
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
    if scheme is None:
        return {name: found[name] for name in expected}
    scheme.check_scales(scales, {tensor.name: tensor for tensor in tensors})
    for sentence in scheme.left_out:
        warnings.warn(f"load: {sentence}", stacklevel=5)  # the caller of llm.load
    return {
        name: scheme.matrix(found[name], scales) if found[name].kind == float8.KIND else found[name]
        for name in expected
    }
