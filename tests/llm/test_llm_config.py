"""Configurations of decoders, and errors for invalid values."""

import pytest

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")


from jaxlowbit._llm.config import Config, RopeScaling  # noqa: E402

CONFIG = Config(
    "llama",
    layers=2,
    width=64,
    heads=4,
    kv_heads=2,
    head_size=16,
    hidden=128,
    vocabulary=256,
    context=512,
)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architecture": "gpt2"}, "architecture='gpt2', but it must be one of 'llama'"),
        ({"layers": 0}, "layers=0, but it must be an integer from 1 to 10000"),
        ({"width": 64.0}, "width=64.0, but it must be an integer"),
        ({"kv_heads": 3}, "kv_heads divides heads"),
        ({"head_size": 15}, "head_size=15, but elements rotate in pairs"),
        ({"norm_epsilon": 0}, "norm_epsilon=0, but it must be above 0"),
        ({"rope_base": float("inf")}, "rope_base=inf, but it must be a finite number"),
        ({"rope_base": 10**400}, "but it must be a finite number, also in float32"),
        ({"norm_epsilon": 1e-40}, "norm_epsilon=1e-40, which float32 rounds to 0"),
        ({"rope_pairs": "thirds"}, "rope_pairs='thirds', but it must be one of"),
        ({"activation": "relu"}, "activation='relu'"),
        ({"qk_norm": 1}, "qk_norm=1, but it must be one of None, 'head', 'all'"),
        ({"window": 0}, "window=0, but"),
        ({"eos": (256,)}, "eos has the token 256, but tokens are integers from 0 to 255"),
        ({"eos": [1]}, "eos has the token"),
        ({"rope_base": 0.5, "rope_scaling": RopeScaling("yarn", 2.0, 64)}, "a base above 1"),
        ({"rope_scaling": 8}, "rope_scaling=8, but it must be None or a RopeScaling"),
        ({"rope_scaling": RopeScaling("factors", factors=(1.0,))}, "heads of 16 have 8 pairs"),
        ({"rope_size": 18}, "rope_size=18, but it must be an integer from 1 to 16"),
        ({"rope_size": 3}, "rope_size=3, but elements rotate in pairs"),
        (
            {"rope_layers": (True,)},
            r"rope_layers=\(True,\), but it must be a tuple of True or "
            r"False",
        ),
        ({"window_layers": [True, False]}, "for each of the 2 layers"),
        ({"residual_scale": 0.0}, "residual_scale=0.0, but it must be above 0"),
        ({"attention_softcap": -1.0}, "attention_softcap=-1.0, but it must be above 0"),
        ({"attention_temperature": 0.1}, "it must be None or a factor and a number of positions"),
        ({"attention_temperature": (0.1, 0)}, "an integer from 1"),
        ({"attention_temperature": (0.1, 8), "qk_norm": "head"}, "norms would cancel it"),
    ],
)
def test_configurations_raise(changes, match):
    with pytest.raises(ValueError, match=match):
        CONFIG.replace(**changes)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"kind": "ntk"}, "kind='ntk', but it must be one of"),
        ({"kind": "linear", "factor": 0.5}, "divided by 1 or more"),
        ({"kind": "yarn", "factor": 2.0}, "original_context=0, but"),
        ({"kind": "factors"}, "'factors' with 0 numbers in factors"),
        ({"kind": "longrope", "original_context": 8}, "'longrope' with 0 numbers in factors"),
        (
            {"kind": "longrope", "original_context": 8, "factors": (1.0,)},
            "'longrope' with 0 numbers in long_factors",
        ),
        (
            {
                "kind": "longrope",
                "original_context": 8,
                "factors": (1.0,),
                "long_factors": (1.0, 2.0),
            },
            "1 factors and 2 long_factors",
        ),
        ({"kind": "linear", "mscale": 1.0}, "mscale_all_dim=None, .* give both or neither"),
        (
            {"kind": "linear", "mscale": 0.0, "mscale_all_dim": 1.0},
            "mscale=0.0, but it must be above 0",
        ),
        ({"kind": "linear", "truncate": 1}, "truncate=1, but it must be one of False, True"),
        ({"kind": "llama3", "original_context": 8, "low": 4.0}, "low is below high"),
    ],
)
def test_scalings_raise(arguments, match):
    with pytest.raises(ValueError, match=match):
        RopeScaling(**arguments)


def test_layers_with_a_window():
    assert not any(CONFIG.is_local(i) for i in range(6))
    assert all(CONFIG.replace(window=16).is_local(i) for i in range(2))
    gemma = CONFIG.replace(window=16, window_layers=(True, False))
    assert [gemma.is_local(i) for i in range(2)] == [True, False]
