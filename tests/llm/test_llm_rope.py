"""Rotations from config.json of transformers 4 and 5, compared with transformers."""

import json

import numpy as np
import pytest

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")


from jaxlowbit._llm import huggingface  # noqa: E402

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 16384,
}

# Entries of a config.json, and `inv_freq` and `attention_scaling` of transformers 5.24's model.
ROTATIONS = {
    "rope_theta": (
        "llama",
        {"rope_theta": 500000.0},
        [
            1.0,
            0.1939228,
            0.03760603,
            0.007292665,
            0.001414213,
            0.0002742482,
            5.318296e-05,
            1.031339e-05,
        ],
        1.0,
    ),
    "theta in rope_parameters": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        [
            1.0,
            0.1939228,
            0.03760603,
            0.007292665,
            0.001414213,
            0.0002742482,
            5.318296e-05,
            1.031339e-05,
        ],
        1.0,
    ),
    "both thetas": (
        "llama",
        {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        [
            1.0,
            0.1939228,
            0.03760603,
            0.007292665,
            0.001414213,
            0.0002742482,
            5.318296e-05,
            1.031339e-05,
        ],
        1.0,
    ),
    "type": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        [0.25, 0.07905694, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.0,
    ),
    "linear": (
        "qwen3",
        {"rope_theta": 1000000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        [
            0.25,
            0.04445698,
            0.007905695,
            0.001405853,
            0.00025,
            4.445699e-05,
            7.905694e-06,
            1.405853e-06,
        ],
        1.0,
    ),
    "dynamic": (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278],
        1.0,
    ),
    "llama3": (
        "llama",
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        },
        [
            1.0,
            0.1939228,
            0.02734413,
            0.0009115831,
            0.0001767767,
            3.428102e-05,
            6.64787e-06,
            1.289173e-06,
        ],
        1.0,
    ),
    "llama3, original at the top": (
        "llama",
        {
            "original_max_position_embeddings": 256,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        },
        [1.0, 0.3162278, 0.1, 0.006613107, 0.00125, 0.0003952847, 0.000125, 3.952847e-05],
        1.0,
    ),
    "yarn": (
        "llama",
        {
            "rope_theta": 1000000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 1024,
            },
        },
        [
            1.0,
            0.1222567,
            0.01185854,
            0.0003514633,
            6.25e-05,
            1.111425e-05,
            1.976423e-06,
            3.514633e-07,
        ],
        1.2772589,
    ),
    "yarn, type": (
        "qwen2",
        {
            "rope_theta": 1000000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 4096,
            },
        },
        [
            1.0,
            0.1778279,
            0.02371708,
            0.002811707,
            0.00025,
            4.445699e-05,
            7.905694e-06,
            1.405853e-06,
        ],
        1.1386294,
    ),
    "yarn, original by default": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        [1.0, 0.3162278, 0.1, 0.03162278, 0.008125, 0.001976424, 0.0004375, 7.905695e-05],
        1.1386294,
    ),
    "yarn, original at the top": (
        "llama",
        {
            "original_max_position_embeddings": 2048,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 1024,
            },
        },
        [1.0, 0.3162278, 0.1, 0.02421119, 0.0053125, 0.0009388012, 6.25e-05, 1.976424e-05],
        1.2772589,
    ),
    "yarn, null factor": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": None,
                "original_max_position_embeddings": 1024,
            }
        },
        [1.0, 0.3162278, 0.0765625, 0.0167996, 0.00296875, 0.0001976424, 6.25e-05, 1.976424e-05],
        1.2772589,
    ),
    "yarn, mscale": (
        "mistral",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 1024,
                "rope_theta": 10000.0,
                "mscale": 0.707,
                "mscale_all_dim": 1.3,
            }
        },
        [1.0, 0.3162278, 0.0765625, 0.0167996, 0.00296875, 0.0001976424, 6.25e-05, 1.976424e-05],
        0.8791458,
    ),
    "yarn, attention_factor": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 1024,
                "attention_factor": 0.8,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
            }
        },
        [1.0, 0.3162278, 0.0765625, 0.0167996, 0.00296875, 0.0001976424, 6.25e-05, 1.976424e-05],
        0.8,
    ),
    "yarn, truncate": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 1024,
                "truncate": False,
            }
        },
        [1.0, 0.3162278, 0.08174829, 0.01600278, 0.001946214, 0.0001976424, 6.25e-05, 1.976424e-05],
        1.2772589,
    ),
    "yarn, beta": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
            }
        },
        [1.0, 0.3162278, 0.1, 0.0167996, 0.000625, 0.0001976424, 6.25e-05, 1.976424e-05],
        1.2772589,
    ),
    "yarn, short": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 6,
            }
        },
        [1.0, 0.01976424, 0.00625, 0.001976424, 0.000625, 0.0001976424, 6.25e-05, 1.976424e-05],
        1.2772589,
    ),
}
# Entries, and `inv_freq` of the global and of the local layers.
GEMMA3 = {
    "gemma3, defaults": (
        {},
        [1.0, 0.1778279, 0.03162278, 0.005623413, 0.001, 0.0001778279, 3.162277e-05, 5.623413e-06],
        [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278],
    ),
    "gemma3, older": (
        {
            "rope_theta": 500000.0,
            "rope_local_base_freq": 20000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        [
            0.125,
            0.02424034,
            0.004700754,
            0.0009115831,
            0.0001767767,
            3.428102e-05,
            6.64787e-06,
            1.289173e-06,
        ],
        [
            1.0,
            0.2899821,
            0.08408964,
            0.02438449,
            0.007071068,
            0.002050483,
            0.0005946035,
            0.0001724244,
        ],
    ),
    "gemma3, newer": (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
            }
        },
        [
            0.125,
            0.02424034,
            0.004700754,
            0.0009115831,
            0.0001767767,
            3.428102e-05,
            6.64787e-06,
            1.289173e-06,
        ],
        [
            1.0,
            0.2899821,
            0.08408964,
            0.02438449,
            0.007071068,
            0.002050483,
            0.0005946035,
            0.0001724244,
        ],
    ),
    "gemma3, one kind": (
        {
            "rope_local_base_freq": 30000.0,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500000.0}},
        },
        [
            1.0,
            0.1939228,
            0.03760603,
            0.007292665,
            0.001414213,
            0.0002742482,
            5.318296e-05,
            1.031339e-05,
        ],
        [
            1.0,
            0.2756512,
            0.07598357,
            0.02094496,
            0.005773503,
            0.001591473,
            0.0004386913,
            0.0001209258,
        ],
    ),
}


def config_of(folder, **entries):
    (folder / "config.json").write_text(json.dumps(SIZES | entries))
    return huggingface.config_of(folder)


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_match_transformers(name, tmp_path):
    architecture, entries, frequencies, amplitude = ROTATIONS[name]
    config = config_of(tmp_path, model_type=architecture, **entries)
    np.testing.assert_allclose(config.rope_frequencies(), frequencies, rtol=2e-6)
    scaling = config.rope_scaling
    assert (1.0 if scaling is None else scaling.amplitude) == pytest.approx(amplitude, abs=1e-6)


@pytest.mark.parametrize("name", GEMMA3)
def test_rotations_of_both_kinds_of_layers(name, tmp_path):
    entries, full, local = GEMMA3[name]
    config = config_of(tmp_path, model_type="gemma3_text", **entries)
    np.testing.assert_allclose(config.rope_frequencies(), full, rtol=2e-6)
    np.testing.assert_allclose(config.rope_frequencies(local=True), local, rtol=2e-6)


NESTED = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}


def test_layers_of_one_kind_have_the_rotation_of_that_kind(tmp_path):
    """transformers 5 writes one for every class with `layer_types`."""
    full = config_of(tmp_path, model_type="qwen3", rope_parameters=NESTED)
    assert (full.rope_base, full.local_rope_base, full.window) == (5e5, None, None)
    local = config_of(
        tmp_path,
        model_type="qwen3",
        rope_parameters=NESTED,
        use_sliding_window=True,
        max_window_layers=0,
        sliding_window=64,
    )
    assert (local.window, local.window_layers, local.local_rope_base) == (64, (), 2e4)


def test_a_proportional_rotation_turns_the_first_pairs(tmp_path):
    def config(**scaling):
        return config_of(tmp_path, model_type="llama", rope_scaling=scaling or None)

    options = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}
    found, wanted = config(**options).rope_frequencies(), config().rope_frequencies() / 2
    half = len(wanted) // 2
    np.testing.assert_allclose(found[:half], wanted[:half], rtol=1e-6)
    assert np.abs(found[half:]).max() < 1e-29
    assert config(rope_type="proportional").rope_scaling is None


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "lacks 'short_factor', a list"),
        (
            {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 1.5}},
            "'partial_rotary_factor' is 1.5, but it is a part",
        ),
        ({"rope_parameters": {"rope_type": "mrope"}}, "scaling is 'mrope'"),
        ({"rope_scaling": {"type": "dynamic"}}, "lacks 'factor', a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "divided by 1 or more"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5, but this"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "'partial_rotary_factor' is 0.25"),
        ({"rope_scaling": {"mrope_section": [2, 3, 3]}}, r"'mrope_section' is \[2, 3, 3\]"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": "16"}},
            "'factor' is '16', but it must be a",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": 1}}, "'truncate' is 1"),
        ({"rope_parameters": NESTED | {"chunked_attention": {}}}, "entry 'chunked_attention'"),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "a base above 1"),
    ],
)
def test_other_rotations_raise(entries, match, tmp_path):
    with pytest.raises(ValueError, match=match) as raised:
        config_of(tmp_path, model_type="llama", **entries)
    assert str(tmp_path / "config.json") in str(raised.value)


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"rope_parameters": {"rope_theta": 5e5}}, "have different rotations; correct config.json"),
        (
            {"rope_parameters": NESTED | {"sliding_attention": {"type": "linear", "factor": 2.0}}},
            "scales only global layers",
        ),
    ],
)
def test_other_rotations_of_gemma3_raise(entries, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        config_of(tmp_path, model_type="gemma3_text", **entries)


@pytest.mark.parametrize(
    ("scaling", "name"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}, "mscale"),
        ({"rope_type": "linear", "factor": 4.0, "attention_factor": 0.5}, "attention_factor"),
        ({"rope_type": "default", "factor": 4.0}, "factor"),
        ({"rope_type": "dynamic", "factor": 4.0, "alpha": 1000.0}, "alpha"),
    ],
)
def test_entries_that_a_type_does_not_read_are_named(scaling, name, tmp_path):
    with pytest.warns(UserWarning, match=rf"does not read: {name!r}"):
        config_of(tmp_path, model_type="llama", rope_scaling=scaling)
