"""The configuration of a decoder in a GGUF file, and the tensor of each weight."""

import re
from dataclasses import replace
from typing import Any

import numpy as np

from ..checkpoint._warn import warn_of_file
from . import ggml_types
from .architectures import ARCHITECTURES, Architecture, Gguf, weight_name
from .config import Config, RopeScaling, pattern_of
from .gguf_file import AGAIN, FLOATS, File, Metadata, Tensor, short
from .gguf_file import open_gguf as open_gguf

# --- the configuration ----------------------------------------------------------------------------

# Keys behind the architecture's name (llama.cpp's `llama-arch.cpp`) that `config_of` does not read.
# These change no logits: the embedding has the vocabulary's size, and the others are descriptions
# or a choice between outputs.
_HARMLESS = frozenset(
    {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type"}
)
# And these do, by regular expressions, unless the value is empty, 0 or false.
_FEATURES = (
    (
        r"experts?_.*|moe_.*|interleave_moe_layer_step|leading_dense_block_count|hash_layer_count"
        r"|router_logit_softcapping",
        "the decoder here has no experts",
    ),
    (
        r"(ssm|kda|wkv|shortconv|hyper_connection|posnet|convnext|altup)\..*|time_.*_extra_dim"
        r"|token_shift_count|rescale_every_n_layers|full_attention_interval|nextn_predict_layers"
        r"|n_deepstack_layers|deepstack_mapping|decoder_(start_token_id|block_count)"
        r"|use_parallel_residual|norm_before_residual|swin_norm|target_(layers|hidden_size)"
        r"|features_length|embedding_length_.+|attention\.recurrent_layers",
        "the layers of the decoder here are attention and an MLP, one after the other",
    ),
    (
        r"(logit|residual|embedding)_scale|attention\.(output|value)_scale",
        "the decoder here scales neither embeddings, residuals nor logits by a key of the file",
    ),
    (
        r"attn_logit_softcapping|attention\.(max_alibi_bias|clamp_kqv|.*_lora_rank|.*_mla"
        r"|relative_buckets_count|temperature_.*|indexer\..*|output_group_count|compress_.*"
        r"|shared_kv_layers)",
        "the attention of the decoder here has no such step",
    ),
    (
        r"attention\.(layer_norm_epsilon|group_norm_.*)",
        "the norms of the decoder here are RMS norms",
    ),
    (
        r"hidden_activation|swiglu_clamp_.*|activation_sparsity_scale",
        "the decoder here has only the activation of the architecture",
    ),
    (
        r"rope\.(dimension_sections|scaling\.alpha)",
        "the decoder here rotates by one position, scaled by linear, yarn or rope_freqs",
    ),
    (r"rope\.(global|local)\..*", "the rotation is read by the keys that llama.cpp writes"),
    (
        r"classifier\.output_labels|dense_\d_feat_(in|out)",
        "the decoder here ends in the logits of tokens",
    ),
)


def config_of(file: File) -> Config:
    """The configuration of the decoder in a file, from its metadata and its embedding's shape.

    Warns of keys of the architecture that are in no table.

    **Raises:** `ValueError` for an architecture, or a feature of one, that the decoder lacks, and
    for values of the wrong kind or size, with their keys.
    """
    general = Metadata(file.path, file.metadata)
    architecture, names = _architecture(general)
    entry = ARCHITECTURES[architecture]
    known = Metadata(file.path, file.metadata, f"{names.name}.")
    _check_features(known)
    stored = {weight_name(name, names.tensors): tensor for name, tensor in file.tensors.items()}
    embedding = stored.get("embedding")
    if embedding is None or len(embedding.shape) != 2:
        name = next(name for name, ours in names.tensors.items() if ours == "embedding")
        raise ValueError(f"{file.path}: there is no matrix {name!r}, the embedding; {AGAIN}.")
    sizes = _sizes(known) | {"vocabulary": embedding.shape[0]}
    fields: dict[str, Any] = sizes | {
        "architecture": architecture,
        "norm_epsilon": known.need("attention.layer_norm_rms_epsilon", "a number"),
        "rope_base": known.get("rope.freq_base", "a number", 10000.0),
        "rope_pairs": names.rope_pairs,
        "rope_scaling": _scaling(file, known, sizes["context"], entry.local_rope_base),
        "attention_bias": "layers.0.q_bias" in stored,
        "tied_head": "head" not in stored,
        "attention_scale": known.get("attention.scale", "a number") or None,
        "logit_softcap": known.get("final_logit_softcapping", "a number") or None,
        "bos": general.get("tokenizer.ggml.bos_token_id", "an integer"),
    }
    fields |= _window(known, entry, sizes["layers"], sizes["context"])
    if entry.local_rope_base is not None:
        base = known.get("rope.freq_base_swa", "a number", entry.local_rope_base)
        fields["local_rope_base"] = base
    eos = general.get("tokenizer.ggml.eos_token_id", "an integer")
    _warn_of_others(known)
    try:
        fields |= entry.fields(sizes["width"])
        fields["attention_scale"] = fields["attention_scale"] or names.attention_scale(sizes)
        return Config(**fields, eos=() if eos is None else (eos,))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"{file.path}: the metadata gives a wrong configuration: {error}"
        ) from None


def _architecture(general: Metadata) -> tuple[str, Gguf]:
    """The architecture of a file and its names; raises unless the file is one whole model."""
    if (kind := general.get("general.type", "a string", "model")) != "model":
        raise ValueError(
            f"{general.path}: general.type is {kind!r}, but a whole model is read; merge an "
            "adapter into its model with llama.cpp's llama-export-lora, or name the model's own "
            "file."
        )
    name = general.need("general.architecture", "a string")
    known = {x.gguf.name: (key, x.gguf) for key, x in ARCHITECTURES.items() if x.gguf is not None}
    if name not in known:
        raise ValueError(
            f"{general.path}: general.architecture is {name!r}, but the decoder here knows "
            f"{', '.join(known)}; use a model of one of those."
        )
    return known[name]


def _sizes(known: Metadata) -> dict[str, int]:
    """The sizes of a `Config` except the vocabulary."""
    width = known.need("embedding_length", "an integer")
    heads = known.same("attention.head_count")
    head_size = known.get("attention.key_length", "an integer", width // max(heads, 1))
    for key in _HEAD_SIZES:
        if known.get(key, "an integer", head_size) != head_size:
            raise ValueError(
                f"{known.path}: '{known.prefix}{key}' is {known.need(key, 'an integer')} and heads "
                f"have {head_size} elements, but the decoder here rotates whole heads of one size; "
                "use another model."
            )
    layers, context = (known.need(key, "an integer") for key in ("block_count", "context_length"))
    return {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": known.same("attention.head_count_kv", heads),
        "head_size": head_size,
        "hidden": known.same("feed_forward_length"),
        "context": context,
    }


_HEAD_SIZES = (
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count",
    "rope.dimension_count_swa",
)


def _check_features(known: Metadata) -> None:
    """Checks that no key turns on a feature that the decoder lacks.

    **Raises:** `ValueError` with the key, its value and the reason.
    """
    for key, value in known.values.items():
        name = key.removeprefix(known.prefix)
        if name == key or _is_off(value):
            continue
        for pattern, reason in _FEATURES:
            one = value == 1 and name.endswith("_scale")  # a factor that changes nothing
            if not one and re.fullmatch(pattern, name):
                raise ValueError(
                    f"{known.path}: {key!r} is {short(value)}, but {reason}; use another model."
                )
    if not known.get("attention.causal", "true or false", True):
        raise ValueError(
            f"{known.path}: '{known.prefix}attention.causal' is False, but each position of the "
            "decoder here attends only to those before it; use another model."
        )


def _is_off(value: Any) -> bool:
    return value in (0, False, "") or (isinstance(value, list) and not any(value))


def _warn_of_others(known: Metadata) -> None:
    others = {
        key: value
        for key, value in known.values.items()
        if (name := key.removeprefix(known.prefix)) != key
        and name not in known.read | _HARMLESS
        and not _is_off(value)
        and not any(re.fullmatch(pattern, name) for pattern, _ in _FEATURES)
    }
    if others:
        listed = ", ".join(f"{key!r}: {short(value)}" for key, value in others.items())
        warn_of_file(
            f"{known.path} has keys that the decoder here does not know: {listed}; they are "
            "left out. Compare the model's results with those of llama.cpp."
        )


def _window(known: Metadata, entry: Architecture, layers: int, context: int) -> dict[str, Any]:
    """The window and the pattern of its layers, which some files write for each layer."""
    window = known.get("attention.sliding_window", "an integer") or None
    if entry.window_layers == "upper" and window is not None:
        if window < context:
            raise ValueError(
                f"{known.path}: '{known.prefix}attention.sliding_window' is {window}, but such "
                "files do not say which layers have the window; use the model's Hugging Face "
                "folder."
            )
        window = None  # which changes nothing
    key, kind = "attention.sliding_window_pattern", "an integer"
    if isinstance(known.values.get(known.prefix + key), list):
        local = [bool(value) for value in known.get(key, "a list")]
        found = pattern_of(local) if len(local) == layers else None
        if found is None:
            raise ValueError(
                f"{known.path}: '{known.prefix}{key}' is {short(local)}, which is no pattern of "
                f"{layers} layers in which every n-th is global, but the decoder here has only "
                "those; use another model."
            )
        pattern = found
    else:
        pattern = known.get(key, kind, entry.window_pattern)
    return {"window": window, "window_pattern": pattern if window else 0}


def _scaling(
    file: File, known: Metadata, context: int, local_base: float | None
) -> RopeScaling | None:
    """The scaling of the rotation, by llama.cpp's defaults.

    A factor without a type is linear, `rope.scale_linear` is its older key, and the model was
    trained on the whole context unless the file says otherwise.
    """
    kind = known.get("rope.scaling.type", "a string", "linear")
    older = known.get("rope.scale_linear", "a number", 0)
    factor = float(known.get("rope.scaling.factor", "a number", older) or 1)
    original = known.get("rope.scaling.original_context_length", "an integer", context)
    own = float(known.get("rope.scaling.attn_factor", "a number", 1))
    factors = _factors(file)
    if kind not in ("none", "linear", "yarn") or (kind == "yarn" and factors):
        others = " with the tensor rope_freqs" if factors else ""
        raise ValueError(
            f"{file.path}: '{known.prefix}rope.scaling.type' is {kind!r}{others}, but the decoder "
            "here scales by none, linear or yarn, or by linear and the tensor rope_freqs; use "
            "another model."
        )
    factor = 1.0 if kind == "none" else factor
    if own != 1 and local_base is not None:
        raise ValueError(
            f"{file.path}: '{known.prefix}rope.scaling.attn_factor' is {own}, but the decoder here "
            "scales sines and cosines only in global layers; use another model."
        )
    try:
        if kind == "yarn":
            yarn = RopeScaling("yarn", factor, original, **_yarn(known))
            return yarn if own == 1 else replace(yarn, attention_factor=own * yarn.amplitude)
        if factors:
            return RopeScaling("factors", factor, attention_factor=own, factors=factors)
        if factor == 1 and own == 1:
            return None
        return RopeScaling("linear", factor, attention_factor=own)
    except ValueError as error:
        raise ValueError(f"{file.path}: the scaling of the rotation is wrong: {error}") from None


def _yarn(known: Metadata) -> dict[str, Any]:
    """Fields of a scaling by yarn.

    llama.cpp takes `yarn_log_multiplier` for transformers' mscale_all_dim, mscale being 1. It
    replaces `yarn_attn_factor`, so a file with one asks for another factor.
    """
    prefix = "rope.scaling.yarn_"
    for name in ("ext_factor", "attn_factor"):
        if (value := known.get(prefix + name, "a number", 1)) != 1:
            raise ValueError(
                f"'{known.prefix}{prefix}{name}' is {value}, but the decoder here has yarn only "
                "with 1; use another model"
            )
    multiplier = known.get(f"{prefix}log_multiplier", "a number") or None
    return {
        "beta_fast": known.get(f"{prefix}beta_fast", "a number", 32.0),
        "beta_slow": known.get(f"{prefix}beta_slow", "a number", 1.0),
        "mscale": multiplier and 1.0,
        "mscale_all_dim": multiplier,
    }


def _factors(file: File) -> tuple[float, ...]:
    """The numbers of the tensor rope_freqs, in any float type; none without it."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return ()
    if tensor.kind not in FLOATS or len(tensor.shape) != 1:
        raise ValueError(
            f"{file.where(tensor)} is {tensor.kind} of shape {tensor.shape}, but "
            f"it is a vector of {', '.join(FLOATS)}; convert the model again."
        )
    return tuple(float(x) for x in file.rows(tensor)[0])


# --- the weights ----------------------------------------------------------------------------------

_IGNORED = ("rope_freqs.weight",)  # read by `config_of`


def weights_of(file: File, config: Config) -> dict[str, Tensor]:
    """The tensor of each weight that a configuration needs, checked.

    **Raises:** `ValueError` for tensors that are missing, unknown, of another shape, or of a type
    that no format holds, with the name of the first of them.
    """
    _, names = _architecture(Metadata(file.path, file.metadata))
    found: dict[str, Tensor] = {}
    for name, tensor in file.tensors.items():
        ours = weight_name(name, names.tensors)
        if ours is not None:
            if ours in found:
                raise ValueError(
                    f"{file.path}: tensors {found[ours].name!r} and {name!r} are one weight under "
                    f"two names; {AGAIN}."
                )
            found[ours] = tensor
        elif name not in _IGNORED and not _is_factor(file, name):
            raise ValueError(
                f"{file.where(tensor)} is no part of {config.architecture} as the decoder "
                "here knows it, and leaving it out would change the model; use another model."
            )
    expected = config.shapes()
    if missing := [name for name in expected if name not in found]:
        raise ValueError(
            f"{file.path}: {len(missing)} weights of {len(expected)} are missing, the first is "
            f"{missing[0]!r}; {AGAIN}."
        )
    if extra := [name for name in found if name not in expected]:
        raise ValueError(
            f"{file.where(found[extra[0]])} is beyond what the metadata says, "
            f"{config.layers} layers; {AGAIN}."
        )
    for name, shape in expected.items():
        _check(file, found[name], shape)
    return {name: found[name] for name in expected}


def tensor_scale(file: File, tensor: Tensor) -> float:
    """The factor of all weights of a matrix, from a tensor with its name and `.scale`; else 1.

    **Raises:** `ValueError` unless that tensor is one finite float.
    """
    factor = file.tensors.get(f"{tensor.name.removesuffix('.weight')}.scale")
    if factor is None:
        return 1.0
    values = file.rows(factor) if factor.kind == "F32" else np.zeros(0)
    if values.size != 1 or not np.isfinite(values).all():
        raise ValueError(
            f"{file.where(factor)} is {factor.kind} of shape {factor.shape}, but "
            f"the scale of a tensor is one finite F32; {AGAIN}."
        )
    return float(values.item())


def _is_factor(file: File, name: str) -> bool:
    """Whether a tensor is a factor of an NVFP4 matrix, or of its inputs, which stay floats here."""
    stem, _, last = name.rpartition(".")
    matrix = file.tensors.get(f"{stem}.weight")
    return last in ("scale", "input_scale") and matrix is not None and matrix.kind == "NVFP4"


def _check(file: File, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape[::-1]:
        raise ValueError(
            f"{file.where(tensor)} has the shape {tensor.shape}, but the metadata "
            f"asks for {shape[::-1]}; {AGAIN}."
        )
    if tensor.kind in FLOATS or (len(shape) == 2 and tensor.kind in ggml_types.TYPES):
        return
    if len(shape) == 1:
        raise ValueError(
            f"{file.where(tensor)} is {tensor.kind}, but norms and biases are "
            f"{', '.join(FLOATS)}; convert the model again."
        )
    raise ValueError(
        f"{file.where(tensor)} is {tensor.kind}, whose values no format here holds. "
        "Quantize the model to one of "
        f"{', '.join([*ggml_types.TYPES, *FLOATS])}, such as by llama.cpp's llama-quantize."
    )
