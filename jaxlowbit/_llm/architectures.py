"""`ARCHITECTURES`: the parts of each architecture of the decoder, and its names in model files.

A new architecture of known parts is one entry. `gguf.config_of` and `huggingface.config_of` turn a
file and its entry into a `Config`; the decoder reads only that.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from . import tensor_names as names

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
    "gemma4": ("gemma4_text",),
    "mistral3": ("mistral", "ministral", "ministral3"),
}
"""`model_type` of models with encoders of images and sounds, which are skipped, and the possible
kinds of decoder in their `text_config`, the default first."""

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

    @property
    def has_experts(self) -> bool:
        return self.huggingface is not None and self.huggingface.experts > 0

    def fields(self, width: int) -> dict[str, Any]:
        """The fields of a `Config` that follow from the architecture and the width."""
        scale = float(width) ** 0.5 if self.scaled_embedding else 1.0
        return {**self.parts, "embedding_scale": scale}


def entry_of(names: Sequence[str], experts: bool) -> str:
    """The architecture, of those with the same name in files, that has experts or has none.

    ```python
    entry_of(["gemma4", "gemma4_moe"], experts=True)  # gemma4_moe
    ```
    """
    found = [name for name in names if ARCHITECTURES[name].has_experts == experts]
    return found[0] if found else names[0]


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


_GEMMA4 = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
}
_GEMMA4_READS = frozenset(
    {
        *("attention_bias", "attention_k_eq_v", "final_logit_softcapping", "global_head_dim"),
        *("layer_types", "num_global_key_value_heads", "per_layer_config"),
        "use_bidirectional_attention",
    }
)
# They have an effect only with entries that the decoder lacks.
_GEMMA4_HARMLESS = frozenset({"use_double_wide_mlp", "vocab_size_per_layer_input"})
_GEMMA4_EXPERTS = frozenset({"num_experts", "top_k_experts", "moe_intermediate_size"})
_GEMMA4_PARTS = {
    "qk_norm": "head",
    "value_norm": True,
    "attention_scale": 1.0,
    "activation": "gelu_tanh",
    "norm_placement": "pre_and_post",
    "layer_scale": True,
}
_GEMMA4_LAYERS: Any = {
    "scaled_embedding": True,
    "window_layers": "pattern",
    "window_pattern": 6,
    "local_rope_base": 10_000.0,
}
_GEMMA4_KEYS = frozenset({"attention.key_length_swa"})


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
            names.GGUF
            | names.GGUF_BIASES
            | names.GGUF_MORE_BIASES
            | names.GGUF_EXPERTS
            | names.GGUF_SINGLE_EXPERTS,
            rope_pairs="neighbours",
            reads=_EXPERT_KEYS,
        ),
        HuggingFace(
            ("llama",),
            names.FOLDER | names.FOLDER_BIASES | names.FOLDER_MORE_BIASES,
            _COMMON,
            reads=_BIASES,
            eos=(2,),
        ),
    ),
    "mistral": Architecture(
        None,  # its names.GGUF files have the architecture llama
        HuggingFace(
            ("mistral",),
            names.FOLDER,
            _COMMON | {"num_key_value_heads": 8, "sliding_window": 4096},
            eos=(2,),
        ),
        window_layers="all",
    ),
    "ministral": Architecture(
        None,
        HuggingFace(
            ("ministral",),
            names.FOLDER,
            _COMMON | {"num_key_value_heads": 8, "sliding_window": 4096},
            reads=frozenset({"layer_types"}),
            eos=(2,),
        ),
        window_layers="all",
    ),
    "ministral3": Architecture(
        Gguf(
            "mistral3",
            names.GGUF | names.GGUF_BIASES | names.GGUF_MORE_BIASES,
            rope_pairs="neighbours",
            reads=frozenset({"attention.temperature_scale"}),
        ),
        HuggingFace(
            ("ministral3",),
            names.FOLDER,
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
        Gguf("qwen2", names.GGUF | names.GGUF_BIASES),
        HuggingFace(
            ("qwen2",),
            names.FOLDER | names.FOLDER_BIASES,
            _COMMON | _QWEN,
            reads=frozenset({"layer_types"}),
            harmless=frozenset({"attention_bias"}),
        ),
        parts={"attention_bias": True},
        window_layers="upper",
    ),
    "qwen3": Architecture(
        Gguf("qwen3", names.GGUF | names.GGUF_HEAD_NORMS),
        HuggingFace(
            ("qwen3",),
            names.FOLDER | names.FOLDER_HEAD_NORMS | names.FOLDER_BIASES | names.FOLDER_MORE_BIASES,
            _COMMON | _QWEN | {"head_dim": 128},
            reads=frozenset({"attention_bias", "layer_types"}),
        ),
        parts={"qk_norm": "head"},
        window_layers="upper",
    ),
    "gemma2": Architecture(
        Gguf(
            "gemma2",
            names.GGUF | names.GGUF_POST_NORMS,
            attention_scale=_scale_of_27b(46),
            defaults={"attention.sliding_window": 4096},
            reads=frozenset({"attn_logit_softcapping"}),
        ),
        HuggingFace(
            ("gemma2",),
            names.FOLDER | names.FOLDER_POST_NORMS | names.FOLDER_BIASES | names.FOLDER_MORE_BIASES,
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
            names.GGUF | names.GGUF_HEAD_NORMS | names.GGUF_POST_NORMS,
            attention_scale=_scale_of_27b(62),
        ),
        HuggingFace(
            ("gemma3_text",),
            names.FOLDER
            | names.FOLDER_HEAD_NORMS
            | names.FOLDER_POST_NORMS
            | names.FOLDER_BIASES
            | names.FOLDER_MORE_BIASES,
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
            names.without(names.GGUF, "gate", "up")
            | {"blk.N.attn_qkv.weight": "layers.N.qkv", "blk.N.ffn_up.weight": "layers.N.gate_up"},
        ),
        HuggingFace(
            ("phi3",),
            names.without(names.FOLDER, "q", "k", "v", "gate", "up") | names.FOLDER_FUSED,
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
        Gguf("olmo2", names.GGUF_OLMO2 | names.GGUF_ALL_NORMS),
        HuggingFace(
            ("olmo2",),
            names.FOLDER_OLMO2
            | names.FOLDER_ALL_NORMS
            | names.FOLDER_BIASES
            | names.FOLDER_MORE_BIASES,
            {"hidden_act": "silu", "rms_norm_eps": 1e-5},
            reads=frozenset({"attention_bias"}),
            eos=(50_279,),
        ),
        parts={"qk_norm": "all", "norm_placement": "post"},
        window_pattern=4,
        local_rope_base="global",
    ),
    "olmo3": Architecture(
        None,  # its names.GGUF files have the architecture olmo2
        HuggingFace(
            ("olmo3",),
            names.FOLDER_OLMO2
            | names.FOLDER_ALL_NORMS
            | names.FOLDER_BIASES
            | names.FOLDER_MORE_BIASES,
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
        Gguf(
            "smollm3",
            names.GGUF | names.GGUF_BIASES | names.GGUF_MORE_BIASES,
            rope_pairs="neighbours",
        ),
        HuggingFace(
            ("smollm3",),
            names.FOLDER | names.FOLDER_BIASES | names.FOLDER_MORE_BIASES,
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
            names.GGUF | names.GGUF_BIASES | names.GGUF_MORE_BIASES,
            rope_pairs="neighbours",
            reads=frozenset(
                {"embedding_scale", "residual_scale", "logit_scale", "rope.scaling.finetuned"}
            ),
        ),
        HuggingFace(
            ("granite",),
            names.FOLDER | names.FOLDER_BIASES | names.FOLDER_MORE_BIASES,
            _COMMON | _GRANITE_SCALES,
            reads=_BIASES | _GRANITE_SCALES.keys(),
            eos=(2,),
        ),
    ),
    "exaone4": Architecture(
        Gguf("exaone4", names.GGUF_OLMO2 | names.GGUF_HEAD_NORMS),
        HuggingFace(
            ("exaone4",),
            names.FOLDER_OLMO2 | names.FOLDER_HEAD_NORMS,
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
        None,  # its names.GGUF files are of the architecture llama
        HuggingFace(
            ("mixtral",),
            names.without(names.FOLDER, *names.EXPERTS) | names.FOLDER_MIXTRAL,
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
            names.without(names.GGUF, *names.EXPERTS) | names.GGUF_HEAD_NORMS | names.GGUF_EXPERTS,
            reads=_MORE_EXPERT_KEYS | {"expert_weights_norm"},
        ),
        HuggingFace(
            ("qwen3_moe",),
            names.without(names.FOLDER, *names.EXPERTS)
            | names.FOLDER_HEAD_NORMS
            | names.FOLDER_BIASES
            | names.without(names.FOLDER_MORE_BIASES, *(f"{x}_bias" for x in names.EXPERTS))
            | names.FOLDER_EXPERTS,
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
            # intermediate_size is for layers names.without experts, which other entries exclude.
            harmless=frozenset({"intermediate_size", "max_window_layers"}),
        ),
        parts={"qk_norm": "head"},
        window_layers="all",
    ),
    "gpt_oss": Architecture(
        Gguf(
            "gpt-oss",
            names.without(names.GGUF, *names.EXPERTS, "mlp_norm")
            | names.GGUF_BIASES
            | names.GGUF_EXPERTS
            | names.GGUF_EXPERT_BIASES
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
            names.without(names.FOLDER, *names.EXPERTS)
            | names.FOLDER_BIASES
            | names.FOLDER_GPT_OSS,
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
    "gemma4": Architecture(
        Gguf("gemma4", names.GGUF_GEMMA4, reads=_GEMMA4_KEYS),
        HuggingFace(
            ("gemma4_text",),
            names.FOLDER_GEMMA4,
            _GEMMA4,
            names={"hidden_act": "hidden_activation"},
            reads=_GEMMA4_READS,
            harmless=_GEMMA4_HARMLESS | _GEMMA4_EXPERTS,
            eos=(1,),
            null_is_default=frozenset(_GEMMA4),
        ),
        parts=_GEMMA4_PARTS,
        **_GEMMA4_LAYERS,
    ),
    "gemma4_moe": Architecture(
        Gguf(
            "gemma4",
            names.without(names.GGUF_GEMMA4, *names.EXPERTS)
            | names.GGUF_EXPERTS
            | names.GGUF_DENSE,
            reads=_GEMMA4_KEYS | _MORE_EXPERT_KEYS,
        ),
        HuggingFace(
            ("gemma4_text",),
            names.without(names.FOLDER_GEMMA4, *names.EXPERTS) | names.FOLDER_DENSE,
            _GEMMA4,
            names={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
            reads=_GEMMA4_READS | _GEMMA4_EXPERTS,
            harmless=_GEMMA4_HARMLESS,
            eos=(1,),
            null_is_default=frozenset(_GEMMA4),
            experts=128,
        ),
        parts=_GEMMA4_PARTS | {"router_norm": True},
        **_GEMMA4_LAYERS,
    ),
}
