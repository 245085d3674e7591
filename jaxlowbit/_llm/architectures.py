"""`ARCHITECTURES`: the parts of each architecture of the decoder, and its names in model files.

A new architecture of known parts is one entry. `gguf.config_of` and `huggingface.config_of` turn a
file and its entry into a `Config`; the decoder reads only that.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

RopePairs = Literal["neighbours", "halves"]
Activation = Literal["silu", "gelu_tanh"]
NormPlacement = Literal["pre", "pre_and_post"]
WindowLayers = Literal["none", "all", "upper", "pattern"]

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclasses.dataclass(frozen=True)
class Gguf:
    """GGUF files of an architecture; names are from llama.cpp's `llama-arch.cpp`.

    - `name`: value of `general.architecture` and prefix of the keys.
    - `tensors`: tensor names and our weight names, both with N for the number of a layer.
    - `rope_pairs`: the pairs that rotate; `"neighbours"` if llama.cpp's converter permutes the rows
      of queries and keys.
    - `attention_scale`: computes the scale of scores from the sizes of a `Config` for files without
      one; None for `head_size ** -0.5`.
    """

    name: str
    tensors: Mapping[str, str]
    rope_pairs: RopePairs = "halves"
    attention_scale: Callable[[Mapping[str, Any]], float | None] = lambda sizes: None


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """Hugging Face folders of an architecture; names and defaults are from transformers.

    - `model_types`: values of `model_type` in config.json.
    - `tensors`: tensor names after `model.` and our weight names, both with N for the number of a
      layer.
    - `defaults`: values of entries that config.json lacks.
    - `names`: usual entry names and the names in config.json, for entries that differ.
    - `reads`: entries that other architectures do not read: `query_pre_attn_scalar`,
      `final_logit_softcapping`.
    - `harmless`: entries that turn on a feature in other architectures and nothing in this one.
    - `eos`: tokens that end texts if no file names any.
    - `rope_pairs`: the pairs that rotate.
    - `norm_offset`: added to the stored scales of norms.
    - `null_is_default`: whether null in config.json means the default.
    - `images`: whether folders may contain an image encoder, which is skipped, and a `text_config`.
    """

    model_types: tuple[str, ...]
    tensors: Mapping[str, str]
    defaults: Mapping[str, Any]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    harmless: frozenset[str] = frozenset()
    eos: tuple[int, ...] = ()
    rope_pairs: RopePairs = "halves"
    norm_offset: float = 0.0
    null_is_default: bool = False
    images: bool = False


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The parts that all models of an architecture share, and its two kinds of files.

    - `parts`: fields of `Config`: `qk_norm`, `attention_bias`, `activation`, `norm_placement`.
    - `scaled_embedding`: whether embeddings are multiplied by `width ** 0.5`.
    - `window_layers`: the layers of a folder's model with a sliding window: `"none"`, `"all"`,
      `"upper"` (from `max_window_layers` on), or `"pattern"` (all but every n-th). Entries for
      single layers override the last two.
    - `window_pattern`: n in files without it.
    - `local_rope_base`: base of the rotation in layers with a window, in files without it; None if
      all layers share one rotation.
    - `gguf`, `huggingface`: None if llama.cpp or transformers has no such architecture.
    """

    gguf: Gguf | None
    huggingface: HuggingFace | None
    parts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scaled_embedding: bool = False
    window_layers: WindowLayers = "none"
    window_pattern: int = 0
    local_rope_base: float | None = None

    def fields(self, width: int) -> dict[str, Any]:
        """The fields of a `Config` that follow from the architecture and the width."""
        scale = float(width) ** 0.5 if self.scaled_embedding else 1.0
        return {**self.parts, "embedding_scale": scale}


def weight_name(tensor: str, tensors: Mapping[str, str]) -> str | None:
    """Our name of a tensor by a table of names with N for the layer; None if the table lacks it.

    ```python
    weight_name("blk.3.attn_q.weight", {"blk.N.attn_q.weight": "layers.N.q"})  # layers.3.q
    ```
    """
    number = _LAYER_NUMBER.search(tensor)
    ours = tensors.get(_LAYER_NUMBER.sub("N", tensor, count=1))
    if ours is None or number is None:
        return ours
    return ours.replace(".N.", f".{int(number[0])}.")


# --- the table ------------------------------------------------------------------------------------

_GGUF = {
    "token_embd.weight": "embedding",
    "output_norm.weight": "final_norm",
    "output.weight": "head",
    "blk.N.attn_q.weight": "layers.N.q",
    "blk.N.attn_k.weight": "layers.N.k",
    "blk.N.attn_v.weight": "layers.N.v",
    "blk.N.attn_output.weight": "layers.N.o",
    "blk.N.ffn_gate.weight": "layers.N.gate",
    "blk.N.ffn_up.weight": "layers.N.up",
    "blk.N.ffn_down.weight": "layers.N.down",
    "blk.N.attn_norm.weight": "layers.N.attention_norm",
    "blk.N.ffn_norm.weight": "layers.N.mlp_norm",
}
_GGUF_BIASES = {
    "blk.N.attn_q.bias": "layers.N.q_bias",
    "blk.N.attn_k.bias": "layers.N.k_bias",
    "blk.N.attn_v.bias": "layers.N.v_bias",
}
_GGUF_HEAD_NORMS = {
    "blk.N.attn_q_norm.weight": "layers.N.q_norm",
    "blk.N.attn_k_norm.weight": "layers.N.k_norm",
}
_GGUF_POST_NORMS = {
    "blk.N.post_attention_norm.weight": "layers.N.post_attention_norm",
    "blk.N.post_ffw_norm.weight": "layers.N.post_mlp_norm",
}

_FOLDER = {
    "embed_tokens.weight": "embedding",
    "norm.weight": "final_norm",
    "lm_head.weight": "head",
    "layers.N.self_attn.q_proj.weight": "layers.N.q",
    "layers.N.self_attn.k_proj.weight": "layers.N.k",
    "layers.N.self_attn.v_proj.weight": "layers.N.v",
    "layers.N.self_attn.o_proj.weight": "layers.N.o",
    "layers.N.mlp.gate_proj.weight": "layers.N.gate",
    "layers.N.mlp.up_proj.weight": "layers.N.up",
    "layers.N.mlp.down_proj.weight": "layers.N.down",
    "layers.N.input_layernorm.weight": "layers.N.attention_norm",
    "layers.N.post_attention_layernorm.weight": "layers.N.mlp_norm",
}
_FOLDER_BIASES = {
    "layers.N.self_attn.q_proj.bias": "layers.N.q_bias",
    "layers.N.self_attn.k_proj.bias": "layers.N.k_bias",
    "layers.N.self_attn.v_proj.bias": "layers.N.v_bias",
}
_FOLDER_HEAD_NORMS = {
    "layers.N.self_attn.q_norm.weight": "layers.N.q_norm",
    "layers.N.self_attn.k_norm.weight": "layers.N.k_norm",
}
_FOLDER_POST_NORMS = {
    "layers.N.post_attention_layernorm.weight": "layers.N.post_attention_norm",
    "layers.N.pre_feedforward_layernorm.weight": "layers.N.mlp_norm",
    "layers.N.post_feedforward_layernorm.weight": "layers.N.post_mlp_norm",
}

_COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
_QWEN = {"num_key_value_heads": 32, "max_window_layers": 28, "sliding_window": 4096}


def _gemma3_scale(sizes: Mapping[str, Any]) -> float | None:
    """Scores of the 27B model, of 62 layers, are scaled by `(width / heads) ** -0.5`."""
    return (sizes["width"] / sizes["heads"]) ** -0.5 if sizes["layers"] == 62 else None


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        Gguf("llama", _GGUF | _GGUF_BIASES, rope_pairs="neighbours"),
        HuggingFace(("llama",), _FOLDER, _COMMON, eos=(2,)),
    ),
    "mistral": Architecture(
        None,  # its GGUF files are of the architecture llama
        HuggingFace(
            ("mistral",),
            _FOLDER,
            _COMMON | {"num_key_value_heads": 8, "sliding_window": 4096},
            eos=(2,),
        ),
        window_layers="all",
    ),
    "qwen2": Architecture(
        Gguf("qwen2", _GGUF | _GGUF_BIASES),
        HuggingFace(
            ("qwen2",),
            _FOLDER | _FOLDER_BIASES,
            _COMMON | _QWEN,
            harmless=frozenset({"attention_bias"}),
        ),
        parts={"attention_bias": True},
        window_layers="upper",
    ),
    "qwen3": Architecture(
        Gguf("qwen3", _GGUF | _GGUF_HEAD_NORMS),
        HuggingFace(("qwen3",), _FOLDER | _FOLDER_HEAD_NORMS, _COMMON | _QWEN | {"head_dim": 128}),
        parts={"qk_norm": True},
        window_layers="upper",
    ),
    "gemma3": Architecture(
        Gguf(
            "gemma3",
            _GGUF | _GGUF_HEAD_NORMS | _GGUF_POST_NORMS,
            attention_scale=_gemma3_scale,
        ),
        HuggingFace(
            ("gemma3", "gemma3_text"),
            _FOLDER | _FOLDER_HEAD_NORMS | _FOLDER_POST_NORMS,
            {
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
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "tie_word_embeddings": True,
                "hidden_activation": "gelu_pytorch_tanh",
            },
            names={"hidden_act": "hidden_activation"},
            reads=frozenset({"query_pre_attn_scalar", "final_logit_softcapping"}),
            eos=(1,),
            norm_offset=1.0,
            null_is_default=True,
            images=True,
        ),
        parts={"qk_norm": True, "activation": "gelu_tanh", "norm_placement": "pre_and_post"},
        scaled_embedding=True,
        window_layers="pattern",
        window_pattern=6,
        local_rope_base=10_000.0,
    ),
}
