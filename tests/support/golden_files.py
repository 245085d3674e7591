"""Files of the tiny models of `golden_architectures`: tensors of folders, and keys and tensors of
GGUF files as llama.cpp's converter writes them."""

import itertools
import math
import re
from typing import Any

import gguf
import numpy as np
from golden_architectures import CASES, weight
from model_files import BPE

from jaxlowbit._llm.architectures import ARCHITECTURES, FUSED
from jaxlowbit.llm import Config

# `general.architecture`, if it is not the model's type.
RENAMED = {
    "mistral": "llama",
    "ministral3": "mistral3",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "gemma4_text": "gemma4",
}


def hf_weights(config: Config) -> dict[str, np.ndarray]:
    """The tensors of a folder, by the names in the table of architectures."""
    entry: Any = ARCHITECTURES[config.architecture].huggingface
    shapes, found = config.shapes(), {}
    for tensor, ours in entry.tensors.items():
        if ours.endswith(".E") and "layers.N.gate_up" in entry.tensors.values():
            continue  # a stack instead
        layers = range(config.layers if "N." in ours else 1)
        experts = range(config.experts if ours.endswith(".E") else 1)
        for layer, expert in itertools.product(layers, experts):
            stem, _, last = ours.removesuffix(".E").rpartition(".")
            parts = [f"{stem}.{part}" if stem else part for part in FUSED.get(last, (last,))]
            parts = [part.replace("N", str(layer)) for part in parts]
            if parts[0] not in shapes:
                continue
            first, n = shapes[parts[0]][:-1], sum(shapes[part][-1] for part in parts)
            stack = first[:-1] if len(first) == 2 and not ours.endswith(".E") else ()
            as_they_are = (stack and entry.alternate) or last.endswith("_bias")
            shape = (*first, n) if as_they_are else (*stack, n, *first[-1:])
            name = tensor.replace("N", str(layer)).replace(".E.", f".{expert}.")
            name = name if name.startswith("lm_head") else f"model.{name}"
            found[name] = weight(name, shape)
    return found


def keys_of(name: str, architecture: str) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for a model, with a tokenizer."""
    keys, config = gguf.Keys, CASES[name]
    heads = config["num_attention_heads"]
    size = config.get("head_dim", config["hidden_size"] // heads)
    found = {
        keys.LLM.BLOCK_COUNT: config["num_hidden_layers"],
        keys.LLM.CONTEXT_LENGTH: config["max_position_embeddings"],
        keys.LLM.EMBEDDING_LENGTH: config["hidden_size"],
        keys.LLM.FEED_FORWARD_LENGTH: config["intermediate_size"],
        keys.Attention.HEAD_COUNT: heads,
        keys.Attention.HEAD_COUNT_KV: config["num_key_value_heads"],
        keys.Attention.KEY_LENGTH: size,
        keys.Attention.VALUE_LENGTH: size,
        keys.Attention.LAYERNORM_RMS_EPS: config["rms_norm_eps"],
        keys.Rope.FREQ_BASE: config["rope_theta"],
    }
    optional = {
        keys.Attention.SLIDING_WINDOW: "sliding_window",
        keys.LLM.ATTN_LOGIT_SOFTCAPPING: "attn_logit_softcapping",
        keys.LLM.FINAL_LOGIT_SOFTCAPPING: "final_logit_softcapping",
        keys.Attention.SCALE: "attention_multiplier",
        keys.LLM.EMBEDDING_SCALE: "embedding_multiplier",
        keys.LLM.RESIDUAL_SCALE: "residual_multiplier",
        keys.LLM.LOGIT_SCALE: "logits_scaling",
        keys.Rope.SCALING_ORIG_CTX_LEN: "original_max_position_embeddings",
    }
    found |= {key: config[entry] for key, entry in optional.items() if entry in config}
    if "query_pre_attn_scalar" in config:  # llama.cpp has it for the sizes of released models
        found[keys.Attention.SCALE] = config["query_pre_attn_scalar"] ** -0.5
    if "layer_types" in config:
        local = [kind == "sliding_attention" for kind in config["layer_types"]]
        found[keys.Attention.SLIDING_WINDOW_PATTERN] = local
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if "partial_rotary_factor" in config:
        found[keys.Rope.DIMENSION_COUNT] = int(size * config["partial_rotary_factor"])
    if rope.get("rope_type") == "longrope":
        original = config["original_max_position_embeddings"]
        ratio = config["max_position_embeddings"] / original
        found[keys.Rope.SCALING_ATTN_FACTOR] = math.sqrt(1 + math.log(ratio) / math.log(original))
    elif "rope_type" in rope:
        found[keys.Rope.SCALING_TYPE] = rope["rope_type"]
        found[keys.Rope.SCALING_FACTOR] = rope["factor"]
        if original := rope.get("original_max_position_embeddings"):
            found[keys.Rope.SCALING_ORIG_CTX_LEN] = original
    if architecture == "gemma4":
        found |= _gemma4_keys(config, found[keys.Attention.SLIDING_WINDOW_PATTERN])
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        found[keys.LLM.EXPERT_COUNT] = experts
        used = config.get("top_k_experts") or config["num_experts_per_tok"]
        found[keys.LLM.EXPERT_USED_COUNT] = used
        if architecture != "llama":
            size = config.get("moe_intermediate_size", config["intermediate_size"])
            found[keys.LLM.EXPERT_FEED_FORWARD_LENGTH] = size
    if "norm_topk_prob" in config:
        found[keys.LLM.EXPERT_WEIGHTS_NORM] = config["norm_topk_prob"]
    if "llama_4_scaling_beta" in rope:
        found[keys.Rope.SCALING_YARN_LOG_MUL] = rope["mscale_all_dim"]
        found[keys.Attention.TEMPERATURE_SCALE] = rope["llama_4_scaling_beta"]
    tokens = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    own = {key.format(arch=architecture): value for key, value in found.items()}
    return {"general.architecture": architecture} | own | BPE | tokens


def _gemma4_keys(config: dict[str, Any], local: list[bool]) -> dict[str, Any]:
    keys, size, other = gguf.Keys, config["head_dim"], config["global_head_dim"]
    rope, heads = config["rope_parameters"], config["num_key_value_heads"]
    others = config.get("num_global_key_value_heads", heads)
    return {
        keys.Attention.SHARED_KV_LAYERS: 0,
        keys.LLM.EMBD_LENGTH_PER_LAYER_INP: 0,
        keys.Attention.HEAD_COUNT_KV: [heads if own else others for own in local],
        keys.Attention.KEY_LENGTH: other,
        keys.Attention.VALUE_LENGTH: other,
        keys.Attention.KEY_LENGTH_SWA: size,
        keys.Attention.VALUE_LENGTH_SWA: size,
        keys.Rope.DIMENSION_COUNT: other,
        keys.Rope.DIMENSION_COUNT_SWA: size,
        keys.Rope.FREQ_BASE: rope["full_attention"]["rope_theta"],
        keys.Rope.FREQ_BASE_SWA: rope["sliding_attention"]["rope_theta"],
    }


# Names that the converter writes itself.
OWN = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
# Converters join the tensors of experts under these names.
EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def stacked(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors with one stack (experts, out, in) for the experts of a layer, and separate gate
    and up of gpt-oss."""
    found, experts = {}, {}
    for key, value in weights.items():
        if single := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", key):
            stem = single[1].replace("block_sparse_moe", "mlp")
            name = f"{stem}.{EXPERTS.get(single[2], single[2])}.weight"
            experts.setdefault(name, []).append(value)
        elif ".experts." in key and "mlp" in key:
            stem, kind = (key[:-5], "bias") if key.endswith("_bias") else (key, "weight")
            value = value if kind == "bias" else value.swapaxes(1, 2)
            if stem.endswith("gate_up_proj"):
                for i, part in enumerate(("gate_proj", "up_proj")):
                    found[f"{stem[:-12]}{part}.{kind}"] = value[:, i::2]
            else:
                found[f"{stem}.{kind}"] = value
        else:
            bare = key.endswith(("sinks", "layer_scalar", "_proj"))
            found[key + ".weight" if bare else key] = value
    return found | {name: np.stack(values) for name, values in experts.items()}


def tensors_of(name: str, architecture: str, weights: dict[str, np.ndarray]) -> dict[str, Any]:
    """The tensors that llama.cpp's converter writes for a model, by their names in its table."""
    config = CASES[name]
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config["num_hidden_layers"])
    found = {}
    for key, value in stacked(weights).items():
        stem, _, suffix = key.rpartition(".")
        if architecture in ("gemma2", "gemma3") and key.endswith("norm.weight"):
            value = value + 1
        permuted = architecture in ("llama", "mistral3", "smollm3", "granite")
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if permuted and part in stem:
                rows = value.reshape(config[heads], 2, -1, *value.shape[1:])
                value = rows.swapaxes(1, 2).reshape(value.shape)
        name = f"{names.get_name(stem)}.{suffix}"
        for theirs, own in OWN.items():
            if key.endswith(theirs):
                name = f"blk.{key.split('.')[2]}.{own}"
        found[name] = ("F32", np.ascontiguousarray(value))
    if architecture == "gemma4":
        pairs = config["global_head_dim"] // 2
        part = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        factors = np.where(np.arange(pairs) < int(pairs * part), 1, 1e30).astype(np.float32)
        found["rope_freqs.weight"] = ("F32", factors)
    for kind in ("long", "short"):
        if factors := config.get("rope_scaling", {}).get(f"{kind}_factor"):
            found[f"rope_factors_{kind}.weight"] = ("F32", np.array(factors, np.float32))
    return found
