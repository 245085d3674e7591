"""Entries of config.json and generation_config.json, and keys of GGUF files: each is used, harmless
or raises. The lists of entries are from transformers and llama.cpp (tools/config_entries.py)."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from model_files import metadata  # noqa: E402

from jaxlowbit._llm import entries, gguf, gguf_file, huggingface  # noqa: E402
from jaxlowbit._llm.architectures import IMAGE_MODELS  # noqa: E402

DATA = json.loads((Path(__file__).parents[1] / "data" / "config_entries.json").read_text())
LLAMA_KEYS = DATA.pop("llama.cpp")
NEWEST = DATA["transformers 5.24.0"]
IMAGES = tuple(IMAGE_MODELS)
CLASSES = tuple(name for name in NEWEST if name not in ("generation_config.json", "rotation"))
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "vocab_size": 131_072,
    "max_position_embeddings": 512,
}
# Without it, transformers' default turns on a feature that the decoder lacks.
NEEDED = {kind: {"hidden_size_per_layer_input": 0} for kind in ("gemma4", "gemma4_text")}
# Candidate values in this order; one differs from the default.
PROBES = (True, False, 3, 0.5, "other", [3], ["other"], {"rope_theta": 7.0}, {"other": 1})
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
# Entries that have an effect only with other entries.
BESIDE = {
    "max_window_layers": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 6},
    "use_sliding_window": {"sliding_window": 8, "max_window_layers": 0},
}
GEMMA4_EXPERTS = {"num_experts": 8, "top_k_experts": 1, "moe_intermediate_size": 32}
OF_KIND = {
    "qwen2": BESIDE,
    "qwen3": BESIDE,
    "smollm3": {
        "sliding_window": {"use_sliding_window": True},
        "use_sliding_window": {"sliding_window": 8},
    },
    "phi3": {"original_max_position_embeddings": {"rope_scaling": _LONGROPE}},
    "qwen3_moe": {
        "sliding_window": {"use_sliding_window": True},
        "use_sliding_window": {"sliding_window": 8},
    },
    "gemma4_text": {
        "enable_moe_block": GEMMA4_EXPERTS | {"enable_moe_block": False},
        "num_global_key_value_heads": {"attention_k_eq_v": True},
    }
    | dict.fromkeys(GEMMA4_EXPERTS, GEMMA4_EXPERTS | {"enable_moe_block": True}),
}


def with_entries(folder, kind, changes, generation=None):
    """The configuration for a model class with some entries changed."""
    sizes = SIZES | NEEDED.get(kind, {})
    values = {"text_config": sizes} | changes if kind in IMAGES else sizes | changes
    (folder / "config.json").write_text(json.dumps({"model_type": kind} | values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return huggingface.config_of(folder)


def outcome(folder, kind, name, **options):
    """Whether a value of the entry changes the configuration, or raises an error with its name."""
    beside = OF_KIND.get(kind, {}).get(name, {})
    before = with_entries(folder, kind, beside)
    for value in PROBES:
        try:
            if with_entries(folder, kind, beside | {name: value}) != before:
                return "read"
        except (ValueError, UserWarning) as error:
            if name in str(error):
                return "answered"
            raise
    return "nothing"


@pytest.mark.parametrize("kind", CLASSES)
def test_every_entry_of_the_classes_is_in_a_table(kind, tmp_path):
    names = {name for version in DATA.values() for name in version.get(kind, ())}
    architecture = "mistral" if kind == "mistral3" else kind.removesuffix("_text")
    own = huggingface._names(architecture)
    ignored = names & (entries._IGNORED | own.harmless)
    assert len(names) > (20 if kind in IMAGES else 30)
    before = with_entries(tmp_path, kind, {})
    assert with_entries(tmp_path, kind, dict.fromkeys(ignored, 7)) == before
    assert not [x for x in names - ignored if outcome(tmp_path, kind, x) == "nothing"]


def test_entries_of_gemma4(tmp_path):
    """Entries of experts have an effect if these are turned on; sizes of heads without a window are
    in one of two forms."""

    def config(**changes):
        return with_entries(tmp_path, "gemma4_text", changes)

    for name in GEMMA4_EXPERTS:
        assert outcome(tmp_path, "gemma4_text", name) in ("read", "answered")
    assert config(**GEMMA4_EXPERTS) == config()
    found = config(**GEMMA4_EXPERTS, enable_moe_block=True)
    assert (found.architecture, found.experts, found.experts_per_token) == ("gemma4_moe", 8, 1)
    assert (found.hidden, found.dense_hidden) == (32, SIZES["intermediate_size"])
    for name in GEMMA4_EXPERTS:
        rest = {key: value for key, value in GEMMA4_EXPERTS.items() if key != name}
        with pytest.raises(ValueError, match=f"lacks {name!r}"):
            config(**rest, enable_moe_block=True)
    shared = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    found = config(**shared)
    assert (found.global_head_size, found.global_kv_heads) == (512, 1)
    assert config(num_global_key_value_heads=1).global_kv_heads is None
    sizes = {"head_dim": 512, "num_key_value_heads": 1}
    assert config(per_layer_config={"5": sizes}, attention_k_eq_v=True) == found
    for layers in (None, {}):
        assert config(per_layer_config=layers, global_head_dim=64).global_head_size is None
    assert config(global_head_dim=16).global_head_size is None
    for wrong in ({"4": sizes}, {"5": {"hidden_size": 32}}, {"5": sizes, "4": sizes}, {"5": 3}):
        with pytest.raises(ValueError, match=r"'per_layer_config' is .*only in all layers without"):
            config(per_layer_config=wrong)
    assert config(use_bidirectional_attention="vision") == config()


def test_every_entry_of_generation_configs_is_in_a_table(tmp_path):
    names = {name for version in DATA.values() for name in version["generation_config.json"]}
    known = entries._IGNORED | set(entries._DECODING) | {"eos_token_id", "bos_token_id"}
    assert names <= known
    found = with_entries(tmp_path, "llama", {"eos_token_id": 5}, {"eos_token_id": [7, 5]})
    assert found.eos == (7, 5)
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    with_entries(tmp_path, "llama", {}, recommended | {"bos_token_id": 1, "suppress_tokens": None})
    for name, off in entries._DECODING.items():
        with_entries(tmp_path, "llama", {}, {name: off})
        with pytest.raises(UserWarning, match=f"generation_config.json has entries .*{name!r}: "):
            with_entries(tmp_path, "llama", {}, {name: 2})
        (tmp_path / "generation_config.json").unlink()
        with pytest.raises(UserWarning, match=f"config.json has entries .*{name!r}: "):
            with_entries(tmp_path, "llama", {name: 2})


def test_every_entry_of_the_rotation_is_known(tmp_path):
    version = NEWEST["rotation"]
    for kind in version.pop("rope_type"):
        scaling = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0}
        scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        if kind == "longrope":
            scaling |= {name: [1.0] * 8 for name in ("short_factor", "long_factor")}
        for name in version:
            if kind == "longrope" and name in scaling:
                continue  # one number for each pair
            changes = {name: [2.0] if name.endswith(("_factor", "_section")) else 2.0}
            try:
                with_entries(tmp_path, "llama", {"rope_parameters": scaling | changes})
            except (ValueError, UserWarning) as error:
                assert name in str(error) or "does not read" in str(error)


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind not in IMAGES])
def test_missing_entries_have_the_defaults_of_the_class(kind, tmp_path):
    """A file without an entry raises, or reads like a file with the class's default."""
    own = with_entries(tmp_path, kind, {})
    for version in DATA.values():
        for name, value in version.get(kind, {}).items():
            # transformers does not put its own `bos_token_id` before texts; the last two depend on
            # the sizes of the class.
            if value is None or name in (*SIZES, "model_type", "bos_token_id", "layer_types"):
                continue
            if (kind, name) == ("olmo3", "rope_theta"):
                continue  # transformers 4 always writes it
            if name in NEEDED.get(kind, {}):
                continue  # the default raises
            found = with_entries(tmp_path, kind, {name: value})
            assert found == own, (name, value)
    for name in ("num_key_value_heads", "head_dim", "num_hidden_layers", "vocab_size"):
        default = NEWEST[kind].get(name)
        values = {key: value for key, value in SIZES.items() if key != name}
        values |= {"hidden_size": 1024, "num_attention_heads": 64, "model_type": kind}
        values |= NEEDED.get(kind, {})
        (tmp_path / "config.json").write_text(json.dumps(values))
        try:
            found = huggingface.config_of(tmp_path)
        except ValueError as error:
            assert f"lacks {name!r}" in str(error)
            continue
        field = {
            "num_key_value_heads": found.kv_heads,
            "head_dim": found.head_size,
            "num_hidden_layers": found.layers,
            "vocab_size": found.vocabulary,
        }[name]
        same = {"num_key_value_heads": 64, "head_dim": 16}  # derived from other entries
        assert field == (same[name] if default is None else default), name


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {"mlp_bias": True}),
        ("olmo2", {"mlp_bias": True}),
        ("mistral", {"attention_bias": True}),
        ("phi3", {"attention_bias": True}),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}),
        ("gemma3_text", {"use_bidirectional_attention": "all"}),
        ("gemma4_text", {"use_bidirectional_attention": "all"}),
        ("gemma4_text", {"hidden_size_per_layer_input": 256}),
        ("gemma4_text", {"num_kv_shared_layers": 2}),
        ("gemma4_text", {"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}),
        ("llama", {"is_causal": False}),
        ("llama", {"num_local_experts": 8}),
        ("mixtral", {"num_local_experts": 8, "num_experts": 4}),
        ("mixtral", {"num_local_experts": 0}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"mlp_only_layers": [3]}),
        ("gpt_oss", {"swiglu_limit": 6.0}),
        ("gpt_oss", {"swiglu_alpha": 1.0}),
        ("gpt_oss", {"hidden_act": "gelu_pytorch_tanh"}),
        ("qwen2", {"pruned_heads": {"0": [1]}}),
        ("qwen3", {"per_layer_config": {"0": {"hidden_size": 32}}}),
        ("llama", {"residual_multiplier": 0.22}),
        ("llama", {"logits_scaling": 8.0}),
        ("llama", {"add_cross_attention": True}),
        ("llama", {"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"] * 3}),
        ("qwen2", {"layer_types": ["full_attention"] * 5}),
        ("qwen3", {"layer_types": ["linear_attention"] * 6}),
        ("gemma2", {"layer_types": ["full_attention"] * 5}),
        ("exaone4", {"sliding_window_pattern": "LLLG"}),
        ("exaone4", {"sliding_window_pattern": 0}),
        ("smollm3", {"no_rope_layers": [1, 1, 1]}),
        ("smollm3", {"no_rope_layers": [2] * 6}),
        ("smollm3", {"no_rope_layer_interval": 0}),
        ("phi3", {"rope_scaling": {"type": "su"}}),
        ("phi3", {"rope_scaling": _LONGROPE | {"long_factor": [2.0] * 7}}),
        ("gemma3", {"text_config": SIZES | {"use_bidirectional_attention": True}}),
        (
            "gemma3",
            {"text_config": SIZES | {"tie_word_embeddings": False}} | {"tie_word_embeddings": True},
        ),
        ("gemma3", {"text_config": SIZES | {"model_type": "gemma2"}}),
        ("llama", {"compression_config": {"quant_method": "compressed-tensors"}}),
    ],
)
def test_features_that_the_decoder_lacks_raise(kind, changes, tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path / "config.json")) as raised:
        with_entries(tmp_path, kind, changes)
    names = [*changes, "short_factor", "long_factors", *changes.get("text_config", ())]
    assert any(name in str(raised.value) for name in names)


def test_layers_with_a_window_follow_the_file(tmp_path):
    """qwen2 and qwen3 read `max_window_layers` and `layer_types`."""
    window = {"use_sliding_window": True, "sliding_window": 8}

    def local(**changes):
        config = with_entries(tmp_path, "qwen3", window | changes)
        return [config.is_local(i) for i in range(config.layers)]

    assert local(max_window_layers=6) == [False] * 6
    assert local(max_window_layers=0) == [True] * 6
    kinds = ["sliding_attention", "full_attention"] * 3
    assert local(layer_types=kinds) == [True, False] * 3
    assert local(layer_types=kinds, use_sliding_window=True) == [True, False] * 3
    with pytest.raises(ValueError, match="'sliding_window' is missing"):
        local(layer_types=kinds, use_sliding_window=False)
    assert local(max_window_layers=4) == [False] * 4 + [True] * 2
    found = with_entries(tmp_path, "smollm3", {"no_rope_layers": [0, 1, 1, 0, 1, 1]})
    assert [found.rotates(i) for i in range(6)] == [False, True, True] * 2
    found = with_entries(tmp_path, "smollm3", window | {"no_rope_layers": [0, 1, 1, 0, 1, 1]})
    assert [found.is_local(i) for i in range(6)] == [True, False, False] * 2
    kinds = ["full_attention", *["sliding_attention"] * 5]
    found = with_entries(
        tmp_path, "exaone4", {"layer_types": kinds, "sliding_window_pattern": "LLLG"}
    )
    assert found.window_layers == found.rope_layers == (False, *[True] * 5)
    assert with_entries(tmp_path, "exaone4", {"sliding_window": None}).rope_layers == ()
    assert with_entries(tmp_path, "mistral", {}).window == 4096
    assert with_entries(tmp_path, "mistral", {"sliding_window": None}).window is None


def test_unknown_entries_are_named_and_left_out(tmp_path):
    unknown = {"new_switch": True, "no_switch": False, "nothing": None, "zero": 0, "empty": []}
    with pytest.raises(UserWarning, match=r"do not know: 'new_switch': True; they are left out"):
        with_entries(tmp_path, "llama", unknown)
    with pytest.raises(UserWarning, match=r"'final_logit_softcapping': 30\.0"):
        with_entries(tmp_path, "llama", {"final_logit_softcapping": 30.0})
    with pytest.raises(UserWarning, match="'inner': 1"):
        with_entries(tmp_path, "gemma3", {"text_config": SIZES | {"inner": 1}})
    with pytest.raises(UserWarning, match="'outer': 1"):
        with_entries(tmp_path, "gemma3", {"outer": 1})


# Entries in files of released models, apart from sizes.
RELEASED = {
    "Llama-3.2-1B": ("llama", {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": [2, 3], "hidden_act": "silu", "initializer_range": 0.02,
        "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64, "rope_type": "llama3"},
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0",
        "use_cache": True, "unsloth_fixed": True, "_name_or_path": "meta-llama/Llama-3.2-1B"}),
    "SmolLM2-135M-Instruct": ("llama", {
        "is_llama_config": True, "pad_token_id": 2, "rope_interleaved": False, "rope_theta": 100000,
        "rope_scaling": None, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}),
    "Mistral-7B-v0.1": ("mistral", {
        "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10000.0, "sliding_window": 4096}),
    "Qwen2.5-7B-Instruct": ("qwen2", {
        "bos_token_id": 3, "eos_token_id": 4, "max_window_layers": 28, "rope_theta": 1000000.0,
        "sliding_window": 131072, "use_sliding_window": False, "use_mrope": False}),
    "Qwen3-0.6B": ("qwen3", {
        "attention_bias": False, "max_window_layers": 28, "rope_scaling": None,
        "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True}),
    "Mixtral-8x7B-Instruct-v0.1": ("mixtral", {
        "architectures": ["MixtralForCausalLM"], "eos_token_id": 2, "num_experts_per_tok": 2,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None}),
    "Qwen3-30B-A3B": ("qwen3_moe", {
        "decoder_sparse_step": 1, "eos_token_id": 5, "intermediate_size": 6144,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
        "output_router_logits": False, "rope_scaling": None, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False}),
    "gpt-oss-20b": ("gpt_oss", {
        "attention_bias": True, "eos_token_id": 2, "experts_per_token": 4,
        "hidden_act": "silu", "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "num_experts_per_tok": 4,
        "num_local_experts": 32, "output_router_logits": False, "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4"}}),
    "gemma-3-1b-it": ("gemma3_text", {
        "attn_logit_softcapping": None, "cache_implementation": "hybrid",
        "eos_token_id": [1, 106], "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6}),
    "gemma-3-4b-it": ("gemma3", {
        "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106],
        "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
        "text_config": SIZES | {
            "model_type": "gemma3_text", "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}}),
    "gemma-4-26B-A4B-it": ("gemma4", {
        "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None,
        "audio_token_id": 258881, "boa_token_id": 256000, "boi_token_id": 255999,
        "dtype": "bfloat16", "eoa_token_id": 258883, "eoa_token_index": 258883,
        "eoi_token_id": 258882, "eos_token_id": [1, 106], "image_token_id": 258880,
        "initializer_range": 0.02, "tie_word_embeddings": True, "video_token_id": 258884,
        "vision_soft_tokens_per_image": 280,
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 1152},
        "text_config": SIZES | {
            "model_type": "gemma4_text", "attention_bias": False, "attention_dropout": 0.0,
            "attention_k_eq_v": True, "enable_moe_block": True, "expert_intermediate_size": None,
            "final_logit_softcapping": 30.0, "global_head_dim": 32,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "moe_intermediate_size": 704, "num_experts": 128, "num_global_key_value_heads": 2,
            "num_kv_shared_layers": 0, "pad_token_id": 0, "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
                    "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
            "sliding_window": 1024, "top_k_experts": 8, "use_bidirectional_attention": "vision",
            "use_cache": True, "use_double_wide_mlp": False,
            "vocab_size_per_layer_input": 262144}}),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_files_of_released_models_are_read_without_a_warning(name, tmp_path):
    kind, changes = RELEASED[name]
    config = with_entries(tmp_path, kind, changes)
    tokens = changes.get("eos_token_id", {"llama": 2}.get(kind, []))
    assert config.eos[:2] == tuple(tokens if isinstance(tokens, list) else [tokens])


# --- GGUF -----------------------------------------------------------------------------------------


def of_gguf(architecture, changes, **tensors):
    """The configuration of a GGUF header with some keys, and optionally tensors, changed."""
    keys = {f"{architecture}.{key}": value for key, value in changes.items()}
    table = gguf_file.Tensor("token_embd.weight", "F32", (264, 256), 0, 0)
    found = {"token_embd.weight": table}
    found |= {f"{name}.weight": tensor for name, (tensor, _) in tensors.items()}
    rows = {tensor.name: values[None] for tensor, values in tensors.values()}
    file: Any = SimpleNamespace(
        path=Path("model.gguf"),
        metadata=metadata(architecture) | keys,
        tensors=found,
        rows=lambda tensor: rows[tensor.name],
        where=lambda tensor: f"model.gguf, tensor {tensor.name}",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return gguf.config_of(file)


def rope_freqs(kind, values):
    tensor = gguf_file.Tensor("rope_freqs.weight", kind, values.shape, 0, values.nbytes)
    return {"rope_freqs": (tensor, values)}


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "granite", "mistral3"])
def test_every_key_of_llama_cpp_is_in_a_table(architecture):
    before = of_gguf(architecture, {})
    probes: tuple[Any, ...] = (3, 3.0, "yarn", False, [True, False])
    for key in LLAMA_KEYS:
        changed = []
        for value in probes:
            try:
                changed.append(of_gguf(architecture, {key: value}) != before)
            except (ValueError, UserWarning) as error:
                changed.append(key in str(error))
        context = key == "rope.scaling.original_context_length"  # yarn is tested below
        pattern = key == "attention.sliding_window_pattern"
        assert any(changed) or context or pattern or key in gguf._HARMLESS, key


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"attention.causal": False}, "'llama.attention.causal' is False"),
        ({"expert_count": 8}, "'llama.expert_used_count' is 0, but both"),
        ({"expert_shared_count": 1}, "has no such experts"),
        ({"logit_scale": 0.125}, "scales neither"),
        ({"residual_scale": 0.22}, "scales neither"),
        ({"embedding_scale": 12.0}, "scales neither"),
        ({"attn_logit_softcapping": 50.0}, "no such step"),
        ({"attention.layer_norm_epsilon": 1e-5}, "RMS norms"),
        ({"rope.dimension_sections": [16, 24, 24, 0]}, "by one position"),
        ({"rope.global.freq_base": 1e6}, "keys that llama.cpp writes"),
        ({"classifier.output_labels": ["yes", "no"]}, "logits of tokens"),
        ({"attention.key_length_swa": 32}, "rotate alike in all layers"),
        ({"rope.scaling.type": "longrope"}, "'longrope', but the decoder"),
        ({"rope.scaling.factor": 0.5}, "divided by 1 or more"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, "yarn only with 1"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 0.5}, "yarn only with 1"),
        (
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": [False] * 3},
            "one value for each of 2 layers",
        ),
    ],
)
def test_features_of_gguf_files_raise(changes, match):
    with pytest.raises(ValueError, match=match):
        of_gguf("llama", changes)


def test_factors_and_switches_of_gguf_files():
    keys = {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0}
    found = of_gguf("granite", keys | {"attention.scale": 0.1})
    assert (found.embedding_scale, found.residual_scale, found.logit_scale) == (12.0, 0.22, 0.125)
    assert found.attention_scale == 0.1 and found.rotates(1)
    assert not of_gguf("granite", {"rope.scaling.finetuned": False}).rotates(1)
    found = of_gguf("gemma2", {"attn_logit_softcapping": 50.0})
    assert found.attention_softcap == 50.0
    assert (found.window, found.window_layers) == (4096, (True, False))
    found = of_gguf("phi3", {"rope.dimension_count": 48, "attention.sliding_window": 0})
    assert (found.rope_size, found.window) == (48, None)
    factors = {
        f"rope_factors_{kind}": rope_freqs("F32", np.ones(32, np.float32))["rope_freqs"]
        for kind in ("short", "long")
    }
    factors = {
        name: (tensor._replace(name=f"{name}.weight"), values)
        for name, (tensor, values) in factors.items()
    }
    keys = {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.19}
    scaling = of_gguf("phi3", keys, **factors).rope_scaling
    assert scaling is not None and (scaling.kind, scaling.amplitude) == ("longrope", 1.19)
    with pytest.raises(ValueError, match="'yarn' with the tensor rope_factors_long"):
        of_gguf("phi3", keys | {"rope.scaling.type": "yarn"}, **factors)
    with pytest.raises(ValueError, match="have 24 pairs of elements"):
        of_gguf("phi3", keys | {"rope.dimension_count": 48}, **factors)


def test_other_keys_of_gguf_files():
    before = of_gguf("llama", {})
    neutral = {"logit_scale": 1.0, "expert_used_count": 0, "attention.causal": True}
    assert of_gguf("llama", neutral | {"rope.scaling.finetuned": True}) == before
    with pytest.raises(UserWarning, match=r"does not know: 'llama.new_key': 1"):
        of_gguf("llama", {"new_key": 1})
    with pytest.raises(UserWarning, match=r"'llama.rope.scaling.yarn_beta_fast': 8.0"):
        of_gguf("llama", {"rope.scaling.yarn_beta_fast": 8.0})  # without yarn
    with pytest.raises(ValueError, match="files do not say which layers have the window"):
        of_gguf("qwen2", {"attention.sliding_window": 8})
    assert of_gguf("qwen2", {"attention.sliding_window": 4096}).window is None
    found = of_gguf(
        "llama",
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False]},
    )
    assert (found.window, found.window_layers) == (8, (True, False))


def test_scaling_of_gguf_files():
    """Defaults of llama.cpp: linear if the type is absent, trained on the whole context."""
    plain = of_gguf("llama", {}).rope_frequencies()

    def scaled(tensors=None, **changes):
        keys = {key.replace("__", "."): value for key, value in changes.items()}
        found = of_gguf("llama", keys, **(tensors or {}))
        amplitude = 1.0 if found.rope_scaling is None else found.rope_scaling.amplitude
        return plain / found.rope_frequencies(), amplitude

    for changes in (
        {"rope__scaling__factor": 4.0},
        {"rope__scale_linear": 4.0},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0, "rope__scale_linear": 2.0},
    ):
        ratio, amplitude = scaled(**changes)
        np.testing.assert_allclose(ratio, 4, rtol=1e-6)
        assert amplitude == 1
    ratio, amplitude = scaled(rope__scaling__type="none", rope__scaling__factor=4.0)
    np.testing.assert_allclose(ratio, 1)
    assert scaled(rope__scaling__attn_factor=1.25)[1] == 1.25
    factors = np.linspace(1, 8, 32).astype(np.float32)
    for kind, dtype in (("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")):
        tensors = rope_freqs(kind, factors.astype(jnp.dtype(dtype)))
        np.testing.assert_allclose(scaled(tensors)[0], factors, rtol=1e-2)
        ratio, _ = scaled(tensors, rope__scaling__factor=2.0)
        np.testing.assert_allclose(ratio, 2 * factors, rtol=1e-2)
    with pytest.raises(ValueError, match="'yarn' with the tensor rope_freqs"):
        scaled(tensors, rope__scaling__type="yarn")
    with pytest.raises(ValueError, match=r"is I32 of shape .*, but it is a vector of F32"):
        scaled(rope_freqs("I32", np.ones(32, np.int32)))
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    ratio, amplitude = scaled(**yarn)
    same, _ = scaled(**yarn, rope__scaling__original_context_length=512)
    np.testing.assert_array_equal(ratio, same)
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(4)
    grown = 0.1 * np.log(4)
    assert amplitude == pytest.approx(1 + grown)
    _, amplitude = scaled(**yarn, rope__scaling__yarn_log_multiplier=0.5)
    assert amplitude == pytest.approx((1 + grown) / (1 + 0.5 * grown))
    _, amplitude = scaled(**yarn, rope__scaling__attn_factor=0.5)
    assert amplitude == pytest.approx(0.5 * (1 + grown))
    with pytest.raises(ValueError, match="only in global layers"):
        of_gguf("gemma3", {"rope.scaling.attn_factor": 1.25})
