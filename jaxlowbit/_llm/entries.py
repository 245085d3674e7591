"""Entries of config.json and generation_config.json that `huggingface` does not read.

Each entry of transformers' classes is read, harmless, or turns on a feature that the decoder lacks.
A test compares the tables with a list of these entries (tools/config_entries.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .._core.checks import brief
from ..checkpoint._fields import Fields

# By reason. None of them affects the logits or the tokens that end a text.
_HARMLESS = {
    "descriptions of the file": """
        _commit_hash _model_name_or_path _name_or_path architectures dtype finetuning_task id2label
        is_llama_config label2id model_name name_or_path num_labels prefix problem_type
        task_specific_params tokenizer_class torch_dtype transformers.js_config
        transformers_version unsloth_fixed unsloth_version""",
    "training": """
        attention_dropout embd_pdrop embedding_dropout gradient_checkpointing hidden_dropout
        initializer_range output_router_logits pretraining_tp resid_pdrop router_aux_loss_coef
        router_jitter_noise tf_legacy_loss use_bfloat16""",
    "choices between implementations of the same computation": """
        _attn_implementation _attn_implementation_autoset _attn_implementation_internal
        _experts_implementation _experts_implementation_internal _flash_attn_2_enabled
        attn_implementation cache_config cache_implementation chunk_size_feed_forward
        compile_config continuous_batching_config disable_compile experts_implementation is_decoder
        low_memory max_cache_len prefill_chunk_size return_legacy_cache tie_encoder_decoder
        torchscript use_cache use_mtp use_return_dict""",
    "outputs of transformers' methods": """
        output_attentions output_hidden_states output_logits output_scores return_dict
        return_dict_in_generate""",
    "tokens that no text of a decoder begins or ends with": """
        decoder_start_token_id pad_token_id sep_token_id""",
    "images and sounds, which are not read": """
        audio_config audio_token_id boa_token_id boi_token_id boi_token_index eoa_token_id
        eoa_token_index eoi_token_id eoi_token_index image_token_id image_token_index
        mm_tokens_per_image multimodal_projector_bias projector_hidden_act spatial_merge_size
        video_token_id vision_config vision_feature_layer vision_soft_tokens_per_image""",
    "a copy of layer_types or no_rope_layers, which are read": """
        _sliding_window_pattern""",
    "arguments of llm.generate, whose values are the caller's": """
        _from_model_config do_sample early_stopping epsilon_cutoff eta_cutoff length_penalty
        max_length max_new_tokens max_time min_p num_return_sequences remove_invalid_values
        renormalize_logits repetition_penalty temperature top_h top_k top_p typical_p""",
    "drafts of an assistant, which change the speed": """
        assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
        assistant_lookbehind is_assistant max_matching_ngram_size num_assistant_tokens
        num_assistant_tokens_schedule prompt_lookup_num_tokens speculation_type
        target_lookbehind""",
}
_IGNORED = frozenset(name for names in _HARMLESS.values() for name in names.split())


class _Feature(NamedTuple):
    """Entries that change the logits, unless their value is one of `off`."""

    names: str
    reason: str
    off: tuple[Any, ...] = (False, 0, [], {})


_FEATURES = (
    _Feature("mlp_bias attention_bias", "this architecture has no such biases"),
    _Feature("attn_logit_softcapping", "the scores of this architecture have no cap"),
    _Feature(
        "use_bidirectional_attention add_cross_attention cross_attention_hidden_size "
        "is_encoder_decoder",
        "each position of the decoder here attends only to those before it",
    ),
    _Feature(
        "is_causal causal",
        "each position of the decoder here attends only to those before it",
        (True,),
    ),
    _Feature(
        "num_experts num_local_experts n_routed_experts num_experts_per_tok moe_intermediate_size",
        "this architecture has no experts",
    ),
    _Feature(
        "decoder_sparse_step mlp_only_layers",
        "the decoder here has experts in every layer",
        (1, []),
    ),
    _Feature("pruned_heads per_layer_config", "all layers of the decoder here are alike"),
    _Feature(
        "hidden_size_per_layer_input", "the decoder here has no embeddings of tokens for each layer"
    ),
    _Feature(
        "embedding_multiplier residual_multiplier attention_multiplier logits_scaling logit_scale "
        "scale_emb scale_depth mup_width_scale",
        "this architecture scales neither embeddings, scores, residuals nor logits by the file",
        (1,),
    ),
    _Feature(
        "clip_qkv use_qk_norm qk_norm qk_layernorm attention_sinks",
        "the decoder here has it only for architectures that always use it",
    ),
    _Feature(
        "alibi use_alibi no_rope_layers rope_interleave rope_interleaved use_mrope",
        "this architecture rotates both halves of every head in every layer",
    ),
    _Feature(
        "attention_chunk_size attn_temperature_tuning llama_4_scaling_beta",
        "the attention of this architecture has neither chunks nor a temperature by position",
    ),
    _Feature(
        "kv_lora_rank q_lora_rank num_kv_shared_layers",
        "every layer of the decoder here has whole projections of queries, keys and values",
    ),
    _Feature("compression_config", "the weights are read by 'quantization_config'"),
)
_FEATURE_OF = {name: feature for feature in _FEATURES for name in feature.names.split()}

# Entries of generation_config.json, and of config.json in older files, with the neutral value.
_DECODING = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_decoder_ids": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "token_healing": False,
    "watermarking_config": None,
}


def check_features(path: Path, values: Mapping[str, Any], known: frozenset[str]) -> None:
    """Checks that no entry of a config.json turns on a feature that the decoder lacks.

    **Arguments:** `known`: entries that this architecture reads, or that have no effect.

    **Raises:** `ValueError` with the entry, its value and the reason.
    """
    for name, feature in _FEATURE_OF.items():
        value = values.get(name)
        if value is None or value in feature.off or name in known:
            continue
        raise ValueError(
            f"{path}: {name!r} is {brief(value)}, but {feature.reason}; use another model."
        )


def left_out(known: Fields, harmless: frozenset[str] = frozenset()) -> list[str]:
    """Sentences on entries that were not read and are in no table; most files have none.

    transformers sets them as attributes that its models do not read. Values that are null, false,
    zero or empty have no effect.
    """
    unknown, decoding = {}, {}
    for name, value in known.values.items():
        off = value is None or value in (False, 0, "", [], {})
        if name in known.read or name in _IGNORED | harmless:
            continue
        if name in _DECODING:
            if not off and value != _DECODING[name]:
                decoding[name] = value
        elif name not in _FEATURE_OF and not off:
            unknown[name] = value
    found = []
    if unknown:
        found.append(
            f"{known.path} has entries that transformers' class and the decoder here do not know: "
            f"{listed(unknown)}; they are left out. Compare the model's results with those of "
            "its own code."
        )
    if decoding:
        found.append(
            f"{known.path} has entries that change the texts of transformers' generate: "
            f"{listed(decoding)}; llm.generate has none of them, and leaves them out."
        )
    return found


def listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name!r}: {brief(value)}" for name, value in values.items())
