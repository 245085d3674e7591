"""Hugging Face directories: config.json and float weights in safetensors, single or sharded.

Names and meanings are those of the models' code in `transformers`: the scales of gemma3's norms are
offsets from 1, and every architecture rotates halves of heads.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from .config import Config, RopeScaling

FLOATS = ("F32", "F16", "BF16")
_AGAIN = "fetch the folder again"


class Tensor(NamedTuple):
    """A tensor: its type and shape, outermost axis first, and the file that holds it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * (4 if self.kind == "F32" else 2)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The floats of rows from one number up to another, (rows, k); a vector is one row."""
        with safe_open(self.file, framework="numpy") as file:
            stored = file.get_slice(self.name)
            return stored[start:stop] if len(self.shape) > 1 else stored[:][None]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    **Raises:** `ValueError` for a missing file and for anything else than an object.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing, but the folder of a Hugging Face model has it; {_AGAIN}."
        ) from None
    except (ValueError, RecursionError) as error:  # of JSON and of UTF-8
        raise ValueError(f"{path} is no JSON ({error}); {_AGAIN}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}, but an object belongs there.")
    return found


# --- the configuration ----------------------------------------------------------------------------

_KINDS: dict[str, tuple[type, ...]] = {
    "an integer": (int,),
    "a number": (int, float),
    "a string": (str,),
    "true or false": (bool,),
    "an object": (dict,),
    "a list": (list,),
}
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


class _Fields:
    """Entries of config.json with the kind of each value checked; null stands for none."""

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self.path, self.values = path, values

    def get(self, key: str, kind: str, default: Any = None) -> Any:
        value = self.values.get(key)
        if value is None:
            return default
        truth = isinstance(value, bool) and kind != "true or false"
        if truth or not isinstance(value, _KINDS[kind]):
            raise ValueError(f"{self.path}: {key!r} is {value!r}, but it is {kind}; {_AGAIN}.")
        return value

    def need(self, key: str, kind: str) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise ValueError(f"{self.path} lacks {key!r}, {kind}; {_AGAIN}.")
        return value

    def refuse(self, key: str, reason: str) -> None:
        """Refuses a feature that an entry turns on."""
        if self.values.get(key):
            raise ValueError(
                f"{self.path}: {key!r} is {self.values[key]!r}, but {reason}; use another model."
            )


def config_of(folder: Path) -> Config:
    """The configuration of the decoder in a folder, from its config.json.

    **Raises:** `ValueError` for an architecture, or a feature of one, that the decoder has not, and
    for entries that are missing or of the wrong kind or size.
    """
    path = folder / "config.json"
    values = read_json(path)
    kind = _Fields(path, values).need("model_type", "a string")
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"{path}: 'model_type' is {kind!r}, but the decoder here knows "
            f"{', '.join(_ARCHITECTURES)}; use a model of one of those."
        )
    architecture = _ARCHITECTURES[kind]
    tokens = values
    if "text_config" in values:
        values = _Fields(path, values).need("text_config", "an object")
    if architecture == "gemma3":
        values = _GEMMA3 | {key: value for key, value in values.items() if value is not None}
    known = _Fields(path, values)
    known.refuse("quantization_config", "float weights are read, which are then quantized here")
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
        "bos": _Fields(path, tokens).get("bos_token_id", "an integer"),
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
                f"{source}: 'eos_token_id' is {tokens!r}, but it is one integer or some; {_AGAIN}."
            )
        found += tokens
    return tuple(dict.fromkeys(found))


def _rotation(known: _Fields, architecture: str) -> dict[str, Any]:
    """Bases and scaling; newer files have them in `rope_parameters`, for each kind of layer."""
    parameters = known.get("rope_parameters", "an object") or {}
    local = parameters.get("sliding_attention") or {}
    if "full_attention" in parameters:
        parameters = parameters["full_attention"] or {}
    scaling = parameters or known.get("rope_scaling", "an object") or {}
    entries = _Fields(known.path, dict(known.values) | parameters)
    found: dict[str, Any] = {
        "rope_base": entries.get("rope_theta", "a number", 10000.0),
        "rope_scaling": _scaling(_Fields(known.path, scaling), known),
    }
    if architecture == "gemma3":
        base = known.get("rope_local_base_freq", "a number")
        found["local_rope_base"] = _Fields(known.path, local).get("rope_theta", "a number", base)
    return found


def _scaling(scaling: _Fields, known: _Fields) -> RopeScaling | None:
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


def _window(known: _Fields, architecture: str, layers: int) -> dict[str, Any]:
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


def weights_of(folder: Path, config: Config) -> dict[str, Tensor]:
    """The tensor of each weight that a configuration needs, checked; reads headers only.

    **Raises:** `ValueError` for files that are missing or damaged, and for tensors that are
    missing, unknown, of another shape, or no floats.
    """
    post = config.norm_placement == "pre_and_post"
    layer = _LAYER | (_POST_NORMS if post else _MLP_NORM)
    expected = config.shapes()
    found: dict[str, Tensor] = {}
    for tensor in _tensors(folder):
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
            f"{missing[0]!r}; {_AGAIN}."
        )
    for name, shape in expected.items():
        tensor = found[name]
        if tensor.shape != shape[::-1] or tensor.kind not in FLOATS:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name!r} is {tensor.kind} of shape {tensor.shape}, "
                f"but config.json asks for floats ({', '.join(FLOATS)}) of {shape[::-1]}; {_AGAIN}."
            )
    return {name: found[name] for name in expected}


def _tensors(folder: Path) -> list[Tensor]:
    """All tensors of the file or shards of a folder."""
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors": None}
    if index.exists():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
            raise ValueError(f"{index} has no 'weight_map' of tensors to files; {_AGAIN}.")
        if outside := [x for x in places.values() if Path(x).name != x]:
            raise ValueError(
                f"{index} names the file {outside[0]!r}, but shards lie beside it; {_AGAIN}."
            )
        files = dict.fromkeys(places.values())
    found: list[Tensor] = []
    for name in files:
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing; {_AGAIN}, or name a .gguf file.")
        try:
            with safe_open(path, framework="numpy") as file:
                for key in sorted(file.keys()):
                    tensor = file.get_slice(key)
                    shape = tuple(tensor.get_shape())
                    found.append(Tensor(key, tensor.get_dtype(), shape, path))
        except SafetensorError as error:
            raise ValueError(
                f"{path} is no safetensors file, or it is cut off ({error}); {_AGAIN}."
            ) from None
    return found
