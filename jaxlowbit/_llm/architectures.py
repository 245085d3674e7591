"""`ARCHITECTURES`: the parts of each architecture of the decoder, and its names in model files.

A new architecture of known parts is one entry. `gguf.config_of` and `huggingface.config_of` turn a
file and its entry into a `Config`; the decoder reads only that.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from .tensor_names import (
    EXPERTS,
    FOLDER,
    FOLDER_ALL_NORMS,
    FOLDER_BIASES,
    FOLDER_EXPERTS,
    FOLDER_FUSED,
    FOLDER_GPT_OSS,
    FOLDER_HEAD_NORMS,
    FOLDER_MIXTRAL,
    FOLDER_MORE_BIASES,
    FOLDER_OLMO2,
    FOLDER_POST_NORMS,
    GGUF,
    GGUF_ALL_NORMS,
    GGUF_BIASES,
    GGUF_EXPERT_BIASES,
    GGUF_EXPERTS,
    GGUF_HEAD_NORMS,
    GGUF_MORE_BIASES,
    GGUF_OLMO2,
    GGUF_POST_NORMS,
    GGUF_SINGLE_EXPERTS,
    without,
)

RopePairs = Literal["neighbours", "halves"]
Activation = Literal["silu", "gelu_tanh", "gpt_oss"]
NormPlacement = Literal["pre", "post", "pre_and_post"]
QkNorm = Literal["head", "all"]
WindowLayers = Literal["none", "all", "upper", "pattern", "unrotated"]
RopeLayers = Literal["all", "pattern", "local"]

FUSED = {
    "qkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
    "gate_up_bias": ("gate_bias", "up_bias"),
}
"""Matrices that some files fuse, by our names, with the matrices whose rows they contain."""

IMAGE_MODELS = {
    "gemma3": ("gemma3_text",),
    "mistral3": ("mistral", "ministral", "ministral3"),
}
"""`model_type` of models with an image encoder, which is skipped, and the possible kinds of decoder
in their `text_config`, the default first."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclasses.dataclass(frozen=True)
class Gguf:
    """GGUF files of an architecture; names are from llama.cpp's `llama-arch.cpp`.

    - `name`: value of `general.architecture` and prefix of the keys.
    - `tensors`: tensor names and our weight names, both with N for the number of a layer and E for
      the number of an expert.
    - `rope_pairs`: the pairs that rotate; `"neighbours"` if llama.cpp's converter permutes the rows
      of queries and keys.
    - `yarn_truncate`: `RopeScaling.truncate`, which no key sets.
    - `attention_scale`: computes the scale of scores from the sizes of a `Config` for files without
      one; None for `head_size ** -0.5`.
    - `defaults`: values of keys that the file lacks.
    - `reads`: keys that only some architectures read.
    """

    name: str
    tensors: Mapping[str, str]
    rope_pairs: RopePairs = "halves"
    yarn_truncate: bool = True
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    attention_scale: Callable[[Mapping[str, Any]], float | None] = lambda sizes: None


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """Hugging Face folders of an architecture; names and defaults are from transformers.

    - `model_types`: values of `model_type` in config.json.
    - `tensors`: tensor names after `model.` and our weight names, both with N for the number of a
      layer and E for the number of an expert.
    - `alternate`: whether the outputs of gate and up alternate in fused tensors. Then stacks of
      float experts are (experts, in, out), as gpt-oss stores them.
    - `defaults`: values of entries that config.json lacks.
    - `names`: usual entry names and the names in config.json, for entries that differ.
    - `reads`: entries that only some architectures read, such as `mlp_bias` or `layer_types`.
    - `harmless`: entries that turn on a feature in other architectures but have no effect here.
    - `eos`: tokens that end texts if no file names any.
    - `rope_pairs`: the pairs that rotate.
    - `rope_types`: other names of rotation scalings, with the usual names.
    - `experts`: the number of experts in files without one; 0 for architectures without experts.
    - `norm_offset`: added to the stored scales of norms.
    - `null_is_default`: entries whose null in config.json means the default.
    """

    model_types: tuple[str, ...]
    tensors: Mapping[str, str]
    defaults: Mapping[str, Any]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    harmless: frozenset[str] = frozenset()
    eos: tuple[int, ...] = ()
    rope_pairs: RopePairs = "halves"
    rope_types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    alternate: bool = False
    experts: int = 0
    norm_offset: float = 0.0
    null_is_default: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The parts that all models of an architecture share, and its two kinds of files.

    - `parts`: fields of `Config`, such as `qk_norm`, `activation` and `norm_placement`.
    - `scaled_embedding`: whether embeddings are multiplied by `width ** 0.5`.
    - `window_layers`: the layers with a sliding window in a Hugging Face folder: `"none"`, `"all"`,
      `"upper"` (from `max_window_layers` on), `"pattern"` (all except every n-th) or `"unrotated"`.
      The entry `layer_types` overrides it in architectures that read it.
    - `window_pattern`: the default of n.
    - `local_rope_base`: the default base of the unscaled rotation in layers with a window;
      `"global"` for the base of the other layers, None if all layers share one rotation.
    - `rope_layers`: the layers with a rotation: `"all"`, `"pattern"` (all except every n-th), or
      `"local"` (layers with a window, or all layers of a model without one).
    - `rope_pattern`: the default of n.
    - `gguf`, `huggingface`: None if llama.cpp or transformers has no such architecture.
    """

    gguf: Gguf | None
    huggingface: HuggingFace | None
    parts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scaled_embedding: bool = False
    window_layers: WindowLayers = "none"
    window_pattern: int = 0
    local_rope_base: float | Literal["global"] | None = None
    rope_layers: RopeLayers = "all"
    rope_pattern: int = 0

    def fields(self, width: int) -> dict[str, Any]:
        """The fields of a `Config` that follow from the architecture and the width."""
        scale = float(width) ** 0.5 if self.scaled_embedding else 1.0
        return {**self.parts, "embedding_scale": scale}


def weight_name(tensor: str, tensors: Mapping[str, str]) -> str | None:
    """Our name of a tensor, from a table of names with N for the layer and E for the expert; None
    if it is not there.

    ```python
    weight_name("blk.3.attn_q.weight", {"blk.N.attn_q.weight": "layers.N.q"})  # layers.3.q
    ```
    """
    letters = dict(zip("NE", _NUMBER.findall(tensor), strict=False))
    for letter in letters:
        tensor = _NUMBER.sub(letter, tensor, count=1)
    ours = tensors.get(tensor)
    for letter, number in letters.items():
        ours = ours and re.sub(rf"\b{letter}\b", str(int(number)), ours)
    return ours


def fused(name: str) -> tuple[str, ...]:
    """The names of the weights in a fused matrix, in the order of its rows; () for others.

    ```python
    fused("layers.3.qkv")  # layers.3.q, layers.3.k, layers.3.v
    ```
    """
    stem, _, last = name.rpartition(".")
    return tuple(f"{stem}.{part}" for part in FUSED.get(last, ()))


def every_nth(layers: int, n: int) -> list[bool]:
    """For each layer, whether it is not an n-th one; all True if n is 0."""
    return [n == 0 or (i + 1) % n != 0 for i in range(layers)]


# --- the table ------------------------------------------------------------------------------------

_COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
_QWEN = {"num_key_value_heads": 32, "max_window_layers": 28, "sliding_window": 4096}
_BIASES = frozenset({"attention_bias", "mlp_bias"})
_EXPERT_ENTRIES = frozenset({"num_local_experts", "num_experts", "num_experts_per_tok"})
_EXPERT_KEYS = frozenset({"expert_count", "expert_used_count"})
_MORE_EXPERT_KEYS = _EXPERT_KEYS | {"expert_feed_forward_length", "expert_gating_func"}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GRANITE_SCALES = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
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
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}


def _scale_of_27b(layers: int) -> Callable[[Mapping[str, Any]], float | None]:
    """The scale of scores in Gemma's 27B models, `(width / heads) ** -0.5`, known by their
    layers."""

    def scale(sizes: Mapping[str, Any]) -> float | None:
        return (sizes["width"] / sizes["heads"]) ** -0.5 if sizes["layers"] == layers else None

    return scale


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        Gguf(
            "llama",
            GGUF | GGUF_BIASES | GGUF_MORE_BIASES | GGUF_EXPERTS | GGUF_SINGLE_EXPERTS,
            rope_pairs="neighbours",
            reads=_EXPERT_KEYS,
        ),
        HuggingFace(
            ("llama",),
            FOLDER | FOLDER_BIASES | FOLDER_MORE_BIASES,
            _COMMON,
            reads=_BIASES,
            eos=(2,),
        ),
    ),
    "mistral": Architecture(
        None,  # its GGUF files have the architecture llama
        HuggingFace(
            ("mistral",),
            FOLDER,
            _COMMON | {"num_key_value_heads": 8, "sliding_window": 4096},
            eos=(2,),
        ),
        window_layers="all",
    ),
    "ministral": Architecture(
        None,
        HuggingFace(
            ("ministral",),
            FOLDER,
            _COMMON | {"num_key_value_heads": 8, "sliding_window": 4096},
            reads=frozenset({"layer_types"}),
            eos=(2,),
        ),
        window_layers="all",
    ),
    "ministral3": Architecture(
        Gguf(
            "mistral3",
            GGUF | GGUF_BIASES | GGUF_MORE_BIASES,
            rope_pairs="neighbours",
            reads=frozenset({"attention.temperature_scale"}),
        ),
        HuggingFace(
            ("ministral3",),
            FOLDER,
            {
                "num_key_value_heads": 8,
                "head_dim": 128,
                "hidden_act": "silu",
                "rms_norm_eps": 1e-5,
                "rope_parameters": _MINISTRAL3_ROPE,
            },
            reads=frozenset({"llama_4_scaling_beta"}),
            eos=(2,),
            null_is_default=frozenset({"rope_parameters"}),
        ),
        window_layers="all",
    ),
    "qwen2": Architecture(
        Gguf("qwen2", GGUF | GGUF_BIASES),
        HuggingFace(
            ("qwen2",),
            FOLDER | FOLDER_BIASES,
            _COMMON | _QWEN,
            reads=frozenset({"layer_types"}),
            harmless=frozenset({"attention_bias"}),
        ),
        parts={"attention_bias": True},
        window_layers="upper",
    ),
    "qwen3": Architecture(
        Gguf("qwen3", GGUF | GGUF_HEAD_NORMS),
        HuggingFace(
            ("qwen3",),
            FOLDER | FOLDER_HEAD_NORMS | FOLDER_BIASES | FOLDER_MORE_BIASES,
            _COMMON | _QWEN | {"head_dim": 128},
            reads=frozenset({"attention_bias", "layer_types"}),
        ),
        parts={"qk_norm": "head"},
        window_layers="upper",
    ),
    "gemma2": Architecture(
        Gguf(
            "gemma2",
            GGUF | GGUF_POST_NORMS,
            attention_scale=_scale_of_27b(46),
            defaults={"attention.sliding_window": 4096},
            reads=frozenset({"attn_logit_softcapping"}),
        ),
        HuggingFace(
            ("gemma2",),
            FOLDER | FOLDER_POST_NORMS | FOLDER_BIASES | FOLDER_MORE_BIASES,
            {
                "num_key_value_heads": 4,
                "head_dim": 256,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-6,
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "tie_word_embeddings": True,
                "hidden_activation": "gelu_pytorch_tanh",
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            names={"hidden_act": "hidden_activation"},
            reads=frozenset(
                {
                    *("attention_bias", "attn_logit_softcapping", "final_logit_softcapping"),
                    *("layer_types", "query_pre_attn_scalar"),
                }
            ),
            eos=(1,),
            norm_offset=1.0,
        ),
        parts={"activation": "gelu_tanh", "norm_placement": "pre_and_post"},
        scaled_embedding=True,
        window_layers="pattern",
        window_pattern=2,
    ),
    "gemma3": Architecture(
        Gguf(
            "gemma3",
            GGUF | GGUF_HEAD_NORMS | GGUF_POST_NORMS,
            attention_scale=_scale_of_27b(62),
        ),
        HuggingFace(
            ("gemma3_text",),
            FOLDER | FOLDER_HEAD_NORMS | FOLDER_POST_NORMS | FOLDER_BIASES | FOLDER_MORE_BIASES,
            _GEMMA3,
            names={"hidden_act": "hidden_activation"},
            reads=frozenset(
                {
                    *("attention_bias", "final_logit_softcapping", "layer_types"),
                    *("query_pre_attn_scalar", "sliding_window_pattern"),
                }
            ),
            eos=(1,),
            norm_offset=1.0,
            null_is_default=frozenset(_GEMMA3),
        ),
        parts={"qk_norm": "head", "activation": "gelu_tanh", "norm_placement": "pre_and_post"},
        scaled_embedding=True,
        window_layers="pattern",
        window_pattern=6,
        local_rope_base=10_000.0,
    ),
    "phi3": Architecture(
        Gguf(
            "phi3",
            without(GGUF, "gate", "up")
            | {"blk.N.attn_qkv.weight": "layers.N.qkv", "blk.N.ffn_up.weight": "layers.N.gate_up"},
        ),
        HuggingFace(
            ("phi3",),
            without(FOLDER, "q", "k", "v", "gate", "up") | FOLDER_FUSED,
            {
                "hidden_act": "silu",
                "rms_norm_eps": 1e-5,
                "original_max_position_embeddings": 4096,
            },
            reads=frozenset({"partial_rotary_factor"}),
            eos=(32_000,),
            rope_types={"su": "longrope", "yarn": "longrope"},
        ),
        window_layers="all",
    ),
    "olmo2": Architecture(
        Gguf("olmo2", GGUF_OLMO2 | GGUF_ALL_NORMS),
        HuggingFace(
            ("olmo2",),
            FOLDER_OLMO2 | FOLDER_ALL_NORMS | FOLDER_BIASES | FOLDER_MORE_BIASES,
            {"hidden_act": "silu", "rms_norm_eps": 1e-5},
            reads=frozenset({"attention_bias"}),
            eos=(50_279,),
        ),
        parts={"qk_norm": "all", "norm_placement": "post"},
        window_pattern=4,
        local_rope_base="global",
    ),
    "olmo3": Architecture(
        None,  # its GGUF files have the architecture olmo2
        HuggingFace(
            ("olmo3",),
            FOLDER_OLMO2 | FOLDER_ALL_NORMS | FOLDER_BIASES | FOLDER_MORE_BIASES,
            {
                "hidden_act": "silu",
                "rms_norm_eps": 1e-5,
                "rope_theta": 500_000.0,
                "sliding_window": 4096,
            },
            reads=frozenset({"attention_bias", "layer_types"}),
            eos=(50_279,),
        ),
        parts={"qk_norm": "all", "norm_placement": "post"},
        window_layers="pattern",
        window_pattern=4,
        local_rope_base="global",
    ),
    "smollm3": Architecture(
        Gguf("smollm3", GGUF | GGUF_BIASES | GGUF_MORE_BIASES, rope_pairs="neighbours"),
        HuggingFace(
            ("smollm3",),
            FOLDER | FOLDER_BIASES | FOLDER_MORE_BIASES,
            _COMMON
            | {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
            reads=_BIASES | {"layer_types", "no_rope_layers"},
            eos=(128_001,),
        ),
        window_layers="unrotated",
        rope_layers="pattern",
        rope_pattern=4,
    ),
    "granite": Architecture(
        Gguf(
            "granite",
            GGUF | GGUF_BIASES | GGUF_MORE_BIASES,
            rope_pairs="neighbours",
            reads=frozenset(
                {"embedding_scale", "residual_scale", "logit_scale", "rope.scaling.finetuned"}
            ),
        ),
        HuggingFace(
            ("granite",),
            FOLDER | FOLDER_BIASES | FOLDER_MORE_BIASES,
            _COMMON | _GRANITE_SCALES,
            reads=_BIASES | _GRANITE_SCALES.keys(),
            eos=(2,),
        ),
    ),
    "exaone4": Architecture(
        Gguf("exaone4", GGUF_OLMO2 | GGUF_HEAD_NORMS),
        HuggingFace(
            ("exaone4",),
            FOLDER_OLMO2 | FOLDER_HEAD_NORMS,
            {
                "hidden_act": "silu",
                "num_key_value_heads": 32,
                "rms_norm_eps": 1e-5,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
            },
            reads=frozenset({"layer_types", "sliding_window_pattern"}),
            eos=(2,),
        ),
        parts={"qk_norm": "head", "norm_placement": "post"},
        window_layers="pattern",
        window_pattern=4,
        rope_layers="local",
    ),
    "mixtral": Architecture(
        None,  # its GGUF files are of the architecture llama
        HuggingFace(
            ("mixtral",),
            without(FOLDER, *EXPERTS) | FOLDER_MIXTRAL,
            {
                "hidden_act": "silu",
                "rms_norm_eps": 1e-5,
                "num_key_value_heads": 8,
                "rope_theta": 1_000_000.0,
                "num_experts_per_tok": 2,
            },
            experts=8,
            reads=_EXPERT_ENTRIES,
            eos=(2,),
        ),
        window_layers="all",
    ),
    "qwen3_moe": Architecture(
        Gguf(
            "qwen3moe",
            without(GGUF, *EXPERTS) | GGUF_HEAD_NORMS | GGUF_EXPERTS,
            reads=_MORE_EXPERT_KEYS | {"expert_weights_norm"},
        ),
        HuggingFace(
            ("qwen3_moe",),
            without(FOLDER, *EXPERTS)
            | FOLDER_HEAD_NORMS
            | FOLDER_BIASES
            | without(FOLDER_MORE_BIASES, *(f"{x}_bias" for x in EXPERTS))
            | FOLDER_EXPERTS,
            _COMMON
            | {
                "num_key_value_heads": 4,
                "sliding_window": 4096,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": False,
            },
            experts=128,
            names={"intermediate_size": "moe_intermediate_size"},
            reads=_EXPERT_ENTRIES
            | {
                *("attention_bias", "moe_intermediate_size", "norm_topk_prob"),
                "use_sliding_window",
            },
            # intermediate_size is for layers without experts, which other entries exclude.
            harmless=frozenset({"intermediate_size", "max_window_layers"}),
        ),
        parts={"qk_norm": "head"},
        window_layers="all",
    ),
    "gpt_oss": Architecture(
        Gguf(
            "gpt-oss",
            without(GGUF, *EXPERTS, "mlp_norm")
            | GGUF_BIASES
            | GGUF_EXPERTS
            | GGUF_EXPERT_BIASES
            | {
                "blk.N.attn_output.bias": "layers.N.o_bias",
                "blk.N.attn_sinks.weight": "layers.N.sinks",
                "blk.N.ffn_gate_inp.bias": "layers.N.router_bias",
                "blk.N.post_attention_norm.weight": "layers.N.mlp_norm",
            },
            yarn_truncate=False,
            reads=_MORE_EXPERT_KEYS,
        ),
        HuggingFace(
            ("gpt_oss",),
            without(FOLDER, *EXPERTS) | FOLDER_BIASES | FOLDER_GPT_OSS,
            {
                "hidden_act": "silu",
                "rms_norm_eps": 1e-5,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "rope_theta": 150_000.0,
                "rope_parameters": _GPT_OSS_ROPE,
                "attention_bias": True,
                "sliding_window": 128,
                "num_experts_per_tok": 4,
            },
            experts=128,
            reads=_EXPERT_ENTRIES
            | {"attention_bias", "layer_types", "swiglu_alpha", "swiglu_limit"},
            # Copies of num_experts_per_tok and of an entry of the rotation.
            harmless=frozenset({"experts_per_token", "initial_context_length"}),
            alternate=True,
            null_is_default=frozenset({"rope_parameters"}),
        ),
        parts={
            "activation": "gpt_oss",
            "mlp_bias": True,
            "router_bias": True,
            "sinks": True,
        },
        window_layers="pattern",
        window_pattern=2,
    ),
}
