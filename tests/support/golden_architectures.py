"""Tiny models of every architecture, whose logits transformers computed.

tools/golden_architectures.py stores only the logits: the weights follow from the names of their
tensors, so both sides compute the same. This module needs only NumPy.
"""

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

PATH = Path(__file__).parents[1] / "data" / "golden" / "architectures.npz"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9, 32, 38]

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
}
_HEADS = {"head_dim": 32}
_WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": 24}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}
_PHI3 = {"rope_scaling": _LONGROPE, "partial_rotary_factor": 0.75}
_QWEN3_MOE: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "num_experts": 5,
    "num_experts_per_tok": 3,
}

_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
    "tie_word_embeddings": True,
}

CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"} | _HEADS,
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 5} | _HEADS,
    "ministral": {"model_type": "ministral"} | _HEADS | _WINDOW,
    "ministral3": {
        "model_type": "ministral3",
        "rope_parameters": _YARN
        | {
            "original_max_position_embeddings": 4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
            "rope_theta": 1000.0,
        },
    }
    | _HEADS,
    "qwen2": {"model_type": "qwen2"},
    "qwen2, windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3"} | _HEADS,
    "gemma2": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "sliding_window": 5,
    }
    | _HEADS
    | _GEMMA,
    "gemma3": {
        "model_type": "gemma3_text",
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    | _HEADS
    | _GEMMA
    | _WINDOW,
    "phi3": {"model_type": "phi3", "sliding_window": 5},
    "phi3, short factors": {"model_type": "phi3", "original_max_position_embeddings": 16} | _PHI3,
    "phi3, long factors": {"model_type": "phi3", "original_max_position_embeddings": 15} | _PHI3,
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "rope_theta": 500000.0, "rope_scaling": _YARN} | _WINDOW,
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "exaone4": {"model_type": "exaone4"} | _WINDOW,
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", "norm_topk_prob": True} | _QWEN3_MOE,
    "qwen3_moe, weights as they are": {"model_type": "qwen3_moe", "norm_topk_prob": False}
    | _QWEN3_MOE,
    "gemma4": _GEMMA4 | _WINDOW,
    # On two devices, each has whole heads and multiples of 64 features.
    "gemma4_moe": _GEMMA4
    | _WINDOW
    | {
        "head_dim": 32,
        "num_key_value_heads": 4,
        "global_head_dim": 64,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "intermediate_size": 128,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 3,
        "moe_intermediate_size": 64,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "rope_scaling": _YARN | {"truncate": False},
    }
    | _HEADS,
}
"""The config.json of each model."""
CASES = {name: _SIZES | entries for name, entries in CASES.items()}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 weight of a tensor by its name in transformers' files.

    Raw numbers of PCG64 are the same in all versions of NumPy.
    """
    if len(shape) == 3:
        return mxfp4(name, shape)[0]
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    uniform = (raw >> np.uint64(40)).astype(np.float32).reshape(shape) / 2**23 - 1
    if len(shape) == 1:
        return 0.75 + 0.25 * uniform if name.endswith("norm.weight") else 0.5 * uniform
    return uniform * np.float32(math.sqrt(3 / shape[-1]))


def mxfp4(name: str, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A stack of gpt-oss, (experts, in, out): floats, and their codes and exponents (experts, out,
    in), which MXFP4 represents exactly."""
    experts, k, n = shape
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    codes = (raw >> np.uint64(60)).astype(np.uint8).reshape(experts, n, k)
    exponents = np.broadcast_to(123 + np.arange(n, dtype=np.uint8)[:, None] % 3, codes.shape)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers = np.concatenate([numbers, -numbers])
    floats = np.ldexp(numbers[codes], exponents.astype(np.int32) - 127)
    return np.ascontiguousarray(floats.swapaxes(1, 2)), codes, exponents


_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MIXTRAL = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


def parameter(kind: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 weight of a parameter by its name in transformers.

    Stacks of experts, except gpt-oss's, are a tensor for each expert in files.
    """
    if kind == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if kind in ("gpt_oss", "gemma4_text") or ".experts." not in name:
        return weight(name, shape)
    stem, _, last = name.rpartition(".")
    parts = (_MIXTRAL if kind == "mixtral" else _EXPERTS)[last]
    matrix = shape[1] // len(parts), shape[2]
    experts = [
        [weight(f"{stem}.{i}.{part}.weight", matrix) for part in parts] for i in range(shape[0])
    ]
    return np.stack([np.concatenate(expert) for expert in experts])
