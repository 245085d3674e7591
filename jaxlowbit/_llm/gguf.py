"""Reads the configuration of a decoder from a GGUF file, and finds the tensor of each weight."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..checkpoint._warn import warn_of_file
from . import ggml_types
from .architectures import (
    ARCHITECTURES,
    Architecture,
    Gguf,
    entry_of,
    every_nth,
    fused,
    weight_name,
)
from .config import MOST, Config, RopeScaling, is_matrix
from .expert_tensors import lists_of, stored_shape
from .gguf_file import AGAIN, FLOATS, File, Metadata, Tensor, short
from .gguf_file import open_gguf as open_gguf

# --- the configuration ----------------------------------------------------------------------------

# Keys after the architecture's name (llama.cpp's `llama-arch.cpp`) that `config_of` does not read.
# They do not affect logits: the embedding determines the vocabulary's size, and the others are
# descriptions or a choice between outputs.
_HARMLESS = frozenset(
    {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type"}
)
# Keys that affect logits, as regular expressions, unless the value is empty, 0 or false.
_FEATURES = (
    (
        r"experts?_.*|moe_.*|interleave_moe_layer_step|leading_dense_block_count|hash_layer_count"
        r"|router_logit_softcapping",
        "the decoder here has no such experts",
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
        "this architecture scales neither embeddings, residuals nor logits by a key of the file",
    ),
    (
        r"attn_logit_softcapping|attention\.(max_alibi_bias|clamp_kqv|.*_lora_rank|.*_mla"
        r"|relative_buckets_count|temperature_.*|indexer\..*|output_group_count|compress_.*"
        r"|shared_kv_layers)",
        "the attention of this architecture has no such step",
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
        "the decoder here rotates by one position, scaled by linear, yarn or factors in tensors",
    ),
    (r"rope\.(global|local)\..*", "the rotation is read by the keys that llama.cpp writes"),
    (
        r"classifier\.output_labels|dense_\d_feat_(in|out)",
        "the decoder here ends in the logits of tokens",
    ),
)


def config_of(file: File) -> Config:
    """Returns the configuration of a file's decoder, from its metadata and its embedding's shape.

    Warns of keys of the architecture that are in no table.

    **Raises:** `ValueError` for an architecture, or a feature of one, that the decoder lacks, and
    for values of the wrong kind or size, with their keys.
    """
    general = Metadata(file.path, file.metadata)
    architecture, names = _architecture(general)
    entry = ARCHITECTURES[architecture]
    defaults = {f"{names.name}.{key}": value for key, value in names.defaults.items()}
    known = Metadata(file.path, defaults | file.metadata, f"{names.name}.")
    _check_features(known, names.reads)
    stored = {weight_name(name, names.tensors): tensor for name, tensor in file.tensors.items()}
    embedding = stored.get("embedding")
    if embedding is None or len(embedding.shape) != 2:
        name = next(name for name, ours in names.tensors.items() if ours == "embedding")
        raise ValueError(f"{file.path}: there is no matrix {name!r}, the embedding; {AGAIN}.")
    sizes = _sizes(known, names) | {"vocabulary": embedding.shape[0]}
    fields: dict[str, Any] = sizes | {
        "architecture": architecture,
        "norm_epsilon": known.need("attention.layer_norm_rms_epsilon", "a number"),
        "rope_base": known.get("rope.freq_base", "a number", 10000.0),
        "rope_pairs": names.rope_pairs,
        "rope_scaling": _scaling(file, known, sizes["context"], entry, names),
        "attention_bias": "layers.0.q_bias" in stored,
        "output_bias": "layers.0.o_bias" in stored,
        "mlp_bias": "layers.0.down_bias" in stored,
        "tied_head": "head" not in stored,
        "attention_scale": known.get("attention.scale", "a number") or None,
        "logit_softcap": known.get("final_logit_softcapping", "a number") or None,
        "bos": general.get("tokenizer.ggml.bos_token_id", "an integer"),
    }
    fields |= _experts(known, names, sizes["hidden"])
    fields |= _layers(known, entry, sizes["layers"], sizes["context"])
    if _LOCAL_SIZE in names.reads:
        fields |= _global_heads(known, fields, stored.keys())
        if "rope_freqs.weight" not in file.tensors:
            raise ValueError(
                f"{file.path}: there is no tensor 'rope_freqs.weight', the rotation of layers "
                f"without a window in {names.name}; {AGAIN}."
            )
    if entry.local_rope_base is not None:
        shared = entry.local_rope_base == "global"
        default = fields["rope_base"] if shared else entry.local_rope_base
        base = known.get("rope.freq_base_swa", "a number", default)
        fields["local_rope_base"] = None if shared and fields["window"] is None else base
    eos = general.get("tokenizer.ggml.eos_token_id", "an integer")
    try:
        fields |= entry.fields(sizes["width"]) | _options(known, names, sizes)
        _warn_of_others(known)
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
    known: dict[str, list[str]] = {}
    for key, entry in ARCHITECTURES.items():
        if entry.gguf is not None:
            known.setdefault(entry.gguf.name, []).append(key)
    if name not in known:
        raise ValueError(
            f"{general.path}: general.architecture is {name!r}, but the decoder here knows "
            f"{', '.join(known)}; use a model of one of those."
        )
    experts = len(known[name]) > 1 and bool(general.values.get(f"{name}.expert_count"))
    key = entry_of(known[name], experts) if len(known[name]) > 1 else known[name][0]
    names = ARCHITECTURES[key].gguf
    assert names is not None
    return key, names


def _sizes(known: Metadata, names: Gguf) -> dict[str, Any]:
    """The sizes of a `Config` except the vocabulary; of heads, those in layers with a window."""
    width = known.need("embedding_length", "an integer")
    heads = known.same("attention.head_count")
    head_size = known.get("attention.key_length", "an integer", width // max(heads, 1))
    rotated = known.get("rope.dimension_count", "an integer", head_size)
    local = head_size, rotated
    if _LOCAL_SIZE in names.reads:
        size = known.get(_LOCAL_SIZE, "an integer", head_size)
        local = size, known.get("rope.dimension_count_swa", "an integer", size)
    pairs = {"head": head_size, "local": local[0], "rotated": local[1]}
    for key, kind in _HEAD_SIZES.items():
        expected = pairs[kind]
        if (found := known.get(key, "an integer", expected)) != expected:
            raise ValueError(
                f"{known.path}: '{known.prefix}{key}' is {found}, but it must be {expected} for "
                "attention to queries, keys and values of one size, which rotate alike in all "
                "layers; use another model."
            )
    several = isinstance(known.values.get(f"{known.prefix}{_KV_HEADS}"), list)
    counts = heads if several and _LOCAL_SIZE in names.reads else known.same(_KV_HEADS, heads)
    layers, context = (known.need(key, "an integer") for key in ("block_count", "context_length"))
    return {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": counts,
        "head_size": local[0],
        "rope_size": None if local[1] == local[0] else local[1],
        "hidden": known.same("feed_forward_length"),
        "context": context,
    }


def _experts(known: Metadata, names: Gguf, hidden: int) -> dict[str, Any]:
    """Fields of a `Config` for experts; none for a model without.

    Files name the gating functions of llama.cpp: softmax over all experts (1) or over the selected
    experts of a token (3). Weights that are normalized to a sum of 1 are the same in both.
    """
    keys = {key for key in names.reads if key.startswith("expert_")}
    found = {key: known.get(key, "an integer") or 0 for key in sorted(keys & _COUNTS)}
    count, used = found.get("expert_count", 0), found.get("expert_used_count", 0)
    if bool(count) != bool(used):
        raise ValueError(
            f"{known.path}: '{known.prefix}expert_count' is {count} and "
            f"'{known.prefix}expert_used_count' is {used}, but both are above 0 or both 0; {AGAIN}."
        )
    if not count:
        return {}
    fields = {"experts": count, "experts_per_token": used}
    if "expert_feed_forward_length" in keys:
        fields["hidden"] = found["expert_feed_forward_length"] or hidden
        if "layers.N.dense_down" in names.tensors.values():
            fields["dense_hidden"] = hidden
        function = known.get("expert_gating_func", "an integer", 0)
        if function not in (0, 1, 3):
            raise ValueError(
                f"{known.path}: '{known.prefix}expert_gating_func' is {function}, but the decoder "
                "here has softmax, 1 or 3; use another model."
            )
    if "expert_weights_norm" in keys:
        fields["normalized_experts"] = known.get("expert_weights_norm", "true or false", True)
    return fields


_COUNTS = {"expert_count", "expert_used_count", "expert_feed_forward_length"}
_HEAD_SIZES = {
    "attention.value_length": "head",
    "attention.key_length_swa": "local",
    "attention.value_length_swa": "local",
    "rope.dimension_count_swa": "rotated",
}
_LOCAL_SIZE = "attention.key_length_swa"
_KV_HEADS = "attention.head_count_kv"

# Keys that only some architectures read (`Gguf.reads`), and the fields of `Config` that they set.
_OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "attn_logit_softcapping": lambda x: {"attention_softcap": x},
    "embedding_scale": lambda x: {"embedding_scale": x},
    "residual_scale": lambda x: {"residual_scale": x},
    "logit_scale": lambda x: {"logit_scale": 1 / x},
}


def _options(known: Metadata, names: Gguf, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Config` set by keys that only some architectures read; 0 disables them."""
    found: dict[str, Any] = {}
    for key in sorted(names.reads & _OPTIONS.keys()):
        if value := known.get(key, "a number"):
            found |= _OPTIONS[key](value)
    if "attention.temperature_scale" in names.reads:
        original = known.get(_ORIGINAL, "an integer", sizes["context"])
        if factor := known.get("attention.temperature_scale", "a number"):
            found["attention_temperature"] = (factor, original)
    key = "rope.scaling.finetuned"  # Granite's switch for the rotation
    if key in names.reads and not known.get(key, "true or false", True):
        found["rope_layers"] = (False,) * min(max(sizes["layers"], 0), MOST["layers"])
    return found


def _check_features(known: Metadata, reads: frozenset[str]) -> None:
    """Checks that no key, except the keys `reads`, turns on a feature that the decoder lacks.

    **Raises:** `ValueError` with the key, its value and the reason.
    """
    for key, value in known.values.items():
        name = key.removeprefix(known.prefix)
        if name == key or name in reads or _is_off(value):
            continue
        for pattern, reason in _FEATURES:
            one = value == 1 and name.endswith("_scale")  # a neutral factor
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


def _layers(known: Metadata, entry: Architecture, layers: int, context: int) -> dict[str, Any]:
    """The window, the layers with a window and the layers with a rotation, as `Config` fields."""
    layers = min(max(layers, 0), MOST["layers"])  # larger numbers raise an error in `Config`
    window = known.get("attention.sliding_window", "an integer") or None
    if entry.window_layers in ("upper", "unrotated") and window is not None:
        if window < context:
            raise ValueError(
                f"{known.path}: '{known.prefix}attention.sliding_window' is {window}, but such "
                "files do not say which layers have the window; use the model's Hugging Face "
                "folder."
            )
        window = None  # without effect
    key, kind = "attention.sliding_window_pattern", "an integer"
    if isinstance(known.values.get(known.prefix + key), list):
        local = [bool(value) for value in known.get(key, "a list")]
        if len(local) != layers:
            raise ValueError(
                f"{known.path}: '{known.prefix}{key}' is {short(local)}, but it has one value for "
                f"each of {layers} layers; {AGAIN}."
            )
    else:
        pattern = known.get(key, kind, entry.window_pattern)
        if pattern < 0:
            raise ValueError(f"{known.path}: '{known.prefix}{key}' is {pattern}; {AGAIN}.")
        local = every_nth(layers, pattern)
    local = [window is not None and found for found in local]
    rotated = [True] * layers
    if entry.rope_layers == "pattern":
        rotated = every_nth(layers, entry.rope_pattern)
    elif entry.rope_layers == "local" and window is not None:
        rotated = local
    return {
        "window": window if any(local) else None,
        "window_layers": () if all(local) or not any(local) else tuple(local),
        "rope_layers": () if all(rotated) else tuple(rotated),
    }


def _global_heads(
    known: Metadata, fields: Mapping[str, Any], stored: Collection[str | None]
) -> dict[str, Any]:
    """The sizes of heads in layers without a window, and whether these have no value projection,
    as fields of a `Config`.

    `fields`: of the `Config`, with its layers; `stored`: our names of the tensors.
    """
    layers = range(min(max(fields["layers"], 0), MOST["layers"]))
    local = fields["window_layers"] or [fields["window"] is not None for _ in layers]
    size = known.get("attention.key_length", "an integer", fields["head_size"])
    rotated = known.get("rope.dimension_count", "an integer", size)
    counts = known.values.get(f"{known.prefix}{_KV_HEADS}")
    counts = counts if isinstance(counts, list) else [fields["kv_heads"] for _ in layers]
    known.read.add(_KV_HEADS)
    kinds = [{n for n, x in zip(counts, local, strict=False) if x == kind} for kind in (0, 1)]
    if len(counts) != len(layers) or max(map(len, kinds)) > 1 or rotated != size:
        raise ValueError(
            f"{known.path}: '{known.prefix}{_KV_HEADS}' is {short(counts)} and "
            f"'{known.prefix}rope.dimension_count' {rotated}, but layers without a window are "
            f"alike, so are the others, and heads of {size} rotate as a whole; use another model."
        )
    own, other = (next(iter(kind), None) for kind in kinds[::-1])
    own, other = own or other or fields["kv_heads"], other or own
    values = [f"layers.{i}.v" in stored for i in layers if not local[i]]
    return {
        "kv_heads": own,
        "global_kv_heads": None if other == own else other,
        "global_head_size": None if size == fields["head_size"] else size,
        "keys_as_values": len(values) > 0 and not any(values),
    }


_ORIGINAL = "rope.scaling.original_context_length"


def _scaling(
    file: File, known: Metadata, context: int, entry: Architecture, names: Gguf
) -> RopeScaling | None:
    """The scaling of the rotation, by llama.cpp's defaults.

    A factor without a type is linear; `rope.scale_linear` is its older key. The model was trained
    on the whole context unless the file gives another one. Two tensors of factors mean longrope.
    """
    kind = known.get("rope.scaling.type", "a string", "linear")
    older = known.get("rope.scale_linear", "a number", 0)
    factor = float(known.get("rope.scaling.factor", "a number", older) or 1)
    original = known.get(_ORIGINAL, "an integer", context)
    own = float(known.get("rope.scaling.attn_factor", "a number", 1))
    factors, long = _factors(file, "rope_freqs"), _factors(file, "rope_factors_long")
    kinds = ("none", "linear", "longrope") if long else ("none", "linear", "yarn")
    if kind not in kinds or (factors and (long or kind == "yarn")):
        others = " with the tensor rope_freqs" if factors else ""
        others += " with the tensor rope_factors_long" if long else ""
        raise ValueError(
            f"{file.path}: '{known.prefix}rope.scaling.type' is {kind!r}{others}, but the decoder "
            "here scales by none, linear or yarn, by linear and the tensor rope_freqs, or by "
            "longrope and the tensors rope_factors_short and rope_factors_long; use another model."
        )
    factor = 1.0 if kind == "none" else factor
    if own != 1 and entry.local_rope_base is not None:
        raise ValueError(
            f"{file.path}: '{known.prefix}rope.scaling.attn_factor' is {own}, but the decoder here "
            "scales sines and cosines only in global layers; use another model."
        )
    try:
        if kind == "yarn":
            fields = _yarn(known)
            yarn = RopeScaling("yarn", factor, original, truncate=names.yarn_truncate, **fields)
            return yarn if own == 1 else replace(yarn, attention_factor=own * yarn.amplitude)
        if long:
            return RopeScaling(
                "longrope",
                factor=factor,
                original_context=original,
                attention_factor=own,
                factors=_factors(file, "rope_factors_short"),
                long_factors=long,
            )
        if factors:
            return RopeScaling("factors", factor, attention_factor=own, factors=factors)
        if factor == 1 and own == 1:
            return None
        return RopeScaling("linear", factor, attention_factor=own)
    except ValueError as error:
        raise ValueError(f"{file.path}: the scaling of the rotation is wrong: {error}") from None


def _yarn(known: Metadata) -> dict[str, Any]:
    """Fields of a scaling by yarn.

    llama.cpp uses `yarn_log_multiplier` as transformers' mscale_all_dim, with mscale = 1. It
    replaces `yarn_attn_factor`, so a file with that key requires another factor.
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


def _factors(file: File, name: str) -> tuple[float, ...]:
    """The numbers of a tensor of factors, in any float type; empty without the tensor."""
    tensor = file.tensors.get(f"{name}.weight")
    if tensor is None:
        return ()
    if tensor.kind not in FLOATS or len(tensor.shape) != 1:
        raise ValueError(
            f"{file.where(tensor)} is {tensor.kind} of shape {tensor.shape}, but "
            f"it is a vector of {', '.join(FLOATS)}; convert the model again."
        )
    return tuple(float(x) for x in file.rows(tensor)[0])


# --- the weights ----------------------------------------------------------------------------------

# Read by `config_of`.
_IGNORED = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def weights_of(file: File, config: Config) -> dict[str, Any]:
    """The tensor of each weight that a configuration needs, checked; of experts a list of them.

    **Raises:** `ValueError` for tensors that are missing, unknown, of another shape, or of a type
    that no format represents, with the name of the first one.
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
    weights = lists_of(file.path, _parts(file, found, expected), config.experts)
    if missing := [name for name in expected if name not in weights]:
        raise ValueError(
            f"{file.path}: {len(missing)} weights of {len(expected)} are missing, the first is "
            f"{missing[0]!r}; {AGAIN}."
        )
    if extra := [name for name in weights if name not in expected]:
        first = weights[extra[0]]
        where = file.where(first[0] if isinstance(first, list) else first)
        raise ValueError(
            f"{where} is beyond what the metadata says, {config.layers} layers; {AGAIN}."
        )
    for name, shape in expected.items():
        if len(shape) == 3 and not isinstance(weights[name], list):
            weights[name] = _single(file, weights[name], shape)
        for tensor in weights[name] if isinstance(weights[name], list) else [weights[name]]:
            _check(file, tensor, stored_shape(name, shape), is_matrix(name))
    return {name: weights[name] for name in expected}


def whole(tensors: list[Tensor]) -> Tensor | None:
    """The tensor that these matrices (out, in) are parts of, as one matrix; None if of several."""
    first = tensors[0]
    starts = (first.start + i * first.nbytes for i in range(len(tensors)))
    follow = (tensor.start == start for tensor, start in zip(tensors, starts, strict=True))
    if any(tensor.name != first.name for tensor in tensors) or not all(follow):
        return None
    rows, k = first.shape
    count = len(tensors)
    return first._replace(shape=(count * rows, k), nbytes=count * first.nbytes)


def _single(file: File, tensor: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    """The matrices of a stack (experts, out, in)."""
    experts, k, n = shape
    if tensor.shape != (experts, n, k):
        raise ValueError(
            f"{file.where(tensor)} has the shape {tensor.shape}, but the metadata "
            f"asks for {(experts, n, k)}; {AGAIN}."
        )
    size = tensor.nbytes // experts
    starts = (tensor.start + i * size for i in range(experts))
    return [tensor._replace(start=start, nbytes=size, shape=(n, k)) for start in starts]


def _parts(
    file: File, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor | list[Tensor]]:
    """Replaces fused tensors by their parts, by our names; stacks of experts by lists.

    **Raises:** `ValueError` for a fused tensor of another shape, and if the file also has the
    tensor of a part.
    """
    found: dict[str, Tensor | list[Tensor]] = {}
    for name, tensor in tensors.items():
        parts = fused(name)
        if not parts or any(part not in shapes for part in parts):
            found[name] = tensor
            continue
        rows = [shapes[part][-1] for part in parts]
        stack = shapes[parts[0]][:-2]
        _check(file, tensor, (*stack, sum(rows), shapes[parts[0]][-2]), True)
        if both := [part for part in parts if part in tensors]:
            raise ValueError(
                f"{file.path}: tensors {tensors[both[0]].name!r} and {tensor.name!r} have the same "
                f"weight, {both[0]!r}; {AGAIN}."
            )
        start, nbytes = tensor.start, tensor.nbytes // (math.prod(stack) * sum(rows))
        for part, count in zip(parts, rows, strict=True):
            own = {"shape": (count, tensor.shape[-1]), "nbytes": nbytes * count}
            starts = (start + i * nbytes * sum(rows) for i in range(math.prod(stack)))
            matrices = [tensor._replace(start=first, **own) for first in starts]
            found[part] = matrices if stack else matrices[0]
            start += nbytes * count
    return found


def tensor_scale(file: File, tensor: Tensor) -> float:
    """The tensor scale of a matrix, from the tensor with its name and `.scale`; else 1.

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
    """Whether a tensor is the scale of an NVFP4 matrix, or of its inputs, which stay floats
    here."""
    stem, _, last = name.rpartition(".")
    matrix = file.tensors.get(f"{stem}.weight")
    return last in ("scale", "input_scale") and matrix is not None and matrix.kind == "NVFP4"


def _check(file: File, tensor: Tensor, shape: tuple[int, ...], matrix: bool) -> None:
    """Raises unless a tensor has this shape and a type for a matrix, or for others floats."""
    if tensor.shape != shape:
        raise ValueError(
            f"{file.where(tensor)} has the shape {tensor.shape}, but the metadata "
            f"asks for {shape}; {AGAIN}."
        )
    if tensor.kind in FLOATS or (matrix and tensor.kind in ggml_types.TYPES):
        return
    if not matrix:
        raise ValueError(
            f"{file.where(tensor)} is {tensor.kind}, but norms, biases and routers are "
            f"{', '.join(FLOATS)}; convert the model again."
        )
    raise ValueError(
        f"{file.where(tensor)} is {tensor.kind}, which no format here represents. "
        "Quantize the model to one of "
        f"{', '.join([*ggml_types.TYPES, *FLOATS])}, such as by llama.cpp's llama-quantize."
    )
