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
}
"""The config.json of each model."""
CASES = {name: _SIZES | entries for name, entries in CASES.items()}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 weight of a tensor by its name in transformers.

    Raw numbers of PCG64 are the same in all versions of NumPy.
    """
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(math.prod(shape))
    uniform = (raw >> np.uint64(40)).astype(np.float32).reshape(shape) / 2**23 - 1
    if len(shape) == 1:
        return 0.75 + 0.25 * uniform if name.endswith("norm.weight") else 0.5 * uniform
    return uniform * np.float32(math.sqrt(3 / shape[-1]))
