"""Gemma 4 with experts: files with images, single experts and quantized stacks; steps, saved
models, meshes and calibration. Other tests compare its logits with transformers."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import gguf  # noqa: E402
from decoders import INT4_G32, floats, random  # noqa: E402
from flax import nnx  # noqa: E402
from golden_architectures import CASES, TOKENS  # noqa: E402
from golden_files import hf_weights, keys_of, tensors_of  # noqa: E402
from model_files import load, write_folder, write_gguf  # noqa: E402

from jaxlowbit import INT8, llm  # noqa: E402
from jaxlowbit._llm import calibration  # noqa: E402
from jaxlowbit._llm.architectures import ARCHITECTURES  # noqa: E402
from jaxlowbit._llm.cache import make_cache  # noqa: E402
from jaxlowbit._llm.huggingface import config_of  # noqa: E402
from jaxlowbit.llm import Config, Decoder, LanguageModel  # noqa: E402

NAME = "gemma4_moe"
# On two devices, each has whole heads and whole atoms of every matrix.
CONFIG = Config(
    NAME, layers=2, width=64, heads=8, kv_heads=4, head_size=32, hidden=64, vocabulary=160,
    context=256, global_head_size=64, global_kv_heads=2, keys_as_values=True, window=5,
    window_layers=(True, False), local_rope_base=100.0, tied_head=True, experts=4,
    experts_per_token=2, dense_hidden=128, logit_softcap=30.0, **ARCHITECTURES[NAME].fields(64),
)  # fmt: skip


def near(found: Any, wanted: Any, tolerance: float = 1e-5) -> bool:
    return bool(np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max())


def logits(decoder: Decoder) -> np.ndarray:
    graph, state = nnx.split(decoder)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    return np.asarray(call(state, np.array([TOKENS])))[0]


@functools.cache
def quantized() -> LanguageModel:
    return LanguageModel(Decoder(CONFIG, random(CONFIG), dtype=jnp.float32))


@functools.cache
def plain() -> np.ndarray:
    return logits(quantized().decoder)


def folder_of(path: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The entries of config.json and the tensors of the golden model."""
    path.mkdir()
    entries = CASES[NAME] | changes
    (path / "config.json").write_text(json.dumps(entries))
    return entries, hf_weights(config_of(path))


def same_weights(found: Any, wanted: Any) -> None:
    assert found.config == wanted.config
    assert all(map(np.array_equal, *(jax.tree.leaves(x.weights) for x in (found, wanted))))


# --- files ----------------------------------------------------------------------------------------


def test_images_and_sounds_are_skipped(tmp_path):
    entries, tensors = folder_of(tmp_path / "text")
    wanted = load(write_folder(tmp_path / "text", entries, tensors))
    whole = {key.replace("model.", "model.language_model."): x for key, x in tensors.items()}
    for name in ("vision_tower.encoder.layers.0.layer_scalar", "embed_vision.projection.weight",
                 "audio_tower.conv.weight", "embed_audio.projection.weight"):  # fmt: skip
        whole[f"model.{name}"] = np.ones((2, 2), np.float32)
    outer = {"model_type": "gemma4", "text_config": entries, "image_token_id": 10}
    same_weights(load(write_folder(tmp_path / "whole", outer, whole)), wanted)
    name = "model.language_model.layers.0.per_layer_input_gate.weight"
    write_folder(tmp_path / "whole", outer, whole | {name: np.ones((2, 64), np.float32)})
    with pytest.raises(ValueError, match=rf"{name}' is no part of gemma4_moe"):
        load(tmp_path / "whole")


def test_a_tensor_per_expert_and_wrong_stacks(tmp_path):
    entries, tensors = folder_of(tmp_path / "model")
    wanted = load(write_folder(tmp_path / "model", entries, tensors))
    single = {}
    for key, value in tensors.items():
        stem, _, last = key.rpartition(".")
        if value.ndim != 3:
            single[key] = value
            continue
        names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        for i, expert in enumerate(value):
            parts = np.split(expert, len(names))
            single |= {f"{stem}.{i}.{x}.weight": p for x, p in zip(names, parts, strict=True)}
    same_weights(load(write_folder(tmp_path / "single", entries, single)), wanted)
    name = "model.layers.1.experts.gate_up_proj"
    turned = tensors | {name: np.ascontiguousarray(tensors[name].swapaxes(1, 2)[..., :-1])}
    with pytest.raises(ValueError, match=r"gate_up_proj' is F32 of shape \(5, 64, 63\), but .* of"):
        load(write_folder(tmp_path / "model", entries, turned))
    write_folder(tmp_path / "model", entries, single | {name: tensors[name]})
    with pytest.raises(ValueError, match=r"gate_up_proj'.*'layers.1.gate' is also in other"):
        load(tmp_path / "model")


def test_quantized_stacks_of_gguf_files(tmp_path):
    """Gate and up of an expert follow each other in one tensor."""
    _, tensors = folder_of(tmp_path / "model", moe_intermediate_size=64)
    stored = tensors_of(NAME, "gemma4", tensors)
    kind = gguf.GGMLQuantizationType.Q8_0
    for key in [key for key in stored if key.endswith("_exps.weight")]:
        stored[key] = ("Q8_0", gguf.quants.quantize(stored[key][1], kind))
    keys = keys_of(NAME, "gemma4")
    keys |= {"gemma4.expert_feed_forward_length": 64}
    found = load(write_gguf(tmp_path / "model.gguf", keys, stored))
    values = gguf.quants.dequantize(stored["blk.1.ffn_gate_up_exps.weight"][1], kind)
    for part, rows in (("gate", values[:, :64]), ("up", values[:, 64:])):
        stack = found.weights[f"layers.1.{part}"]
        assert stack.shape == (5, 64, 64) and stack.format is not None
        np.testing.assert_array_equal(stack.dequantize(jnp.float32), rows.swapaxes(1, 2))
    keys["gemma4.attention.head_count_kv"] = [2, 1, 1]
    with pytest.raises(ValueError, match=r"head_count_kv' is \[2, 1, 1\] and"):
        load(write_gguf(tmp_path / "model.gguf", keys, stored))


# --- results --------------------------------------------------------------------------------------


def test_steps_give_the_logits_of_a_prompt():
    """With a cache of floats; with one of 8 bits within its error."""
    graph, state = nnx.split(quantized().decoder)

    @jax.jit
    def step(state, token, position, cache):
        decoder = nnx.merge(graph, state)
        x, cache = decoder.forward(token, position, cache)
        return decoder.logits(x)[0, 0], cache

    def error(dtype: Any) -> float:
        cache, found = make_cache(CONFIG, 1, 32, dtype), []
        assert [x.shape[2:] for x in cache.keys] == [(4, 32), (2, 64)]
        for i, token in enumerate(TOKENS):
            row, cache = step(state, jnp.array([[token]]), jnp.array([[i]]), cache)
            found.append(row)
        return np.abs(np.stack(found) - plain()).max() / np.abs(plain()).max()

    assert error(jnp.float32) < 1e-5 < error(jnp.int8) < 0.05


def test_several_devices_and_a_saved_model_give_the_same_logits(tmp_path):
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("model",), axis_types=kinds, devices=jax.devices("cpu")[:2])
    several = llm.shard(quantized(), mesh).decoder
    block = several.blocks[0]
    assert block.down.get_metadata("out_sharding") == ("model", None, None)
    assert block.dense_down.get_metadata("out_sharding") == ("model", None)
    assert near(logits(several), plain())
    llm.save(quantized(), tmp_path / "saved")
    again = llm.load(tmp_path / "saved", dtype=jnp.float32, progress=False)
    assert again.config == CONFIG
    states = (nnx.state(model.decoder) for model in (again, quantized()))
    assert all(map(np.array_equal, *map(jax.tree.leaves, states)))
    with pytest.raises(ValueError, match="dense_hidden=130 is no multiple of 4"):
        config = CONFIG.replace(dense_hidden=130, heads=8, global_kv_heads=4)
        four = jax.make_mesh((4,), ("model",), axis_types=kinds, devices=jax.devices("cpu")[:4])
        llm.init(config, INT4_G32, mesh=four)


def test_factors_are_folded_without_a_change():
    """Into the norms of the MLP and of the experts; router and values have separate norms."""
    weights = {name: jnp.asarray(x, jnp.float32) for name, x in floats(random(CONFIG)).items()}
    formats = dict.fromkeys(CONFIG.matrices(), INT8)
    source = calibration.Source(CONFIG, weights.__getitem__, weights.__getitem__)
    rounding = calibration.Rounding(formats, "smoothquant", jnp.float32, None)
    names = [name for name in CONFIG.shapes() if name.startswith("layers.1.")]
    block = calibration._Block(source, rounding, 1, names)
    x = jax.random.normal(jax.random.key(0), (2, 16, 64))
    wanted = block.outputs(x, jnp.float32)
    changed = block._fold(block._statistics(x))
    norms = {"attention_norm", "mlp_norm", "expert_norm"}
    assert changed == {
        *norms,
        "q",
        "k",
        *("gate", "up", "down"),
        "dense_gate",
        "dense_up",
        "dense_down",
    }
    assert near(block.outputs(x, jnp.float32), wanted, 1e-4)
    for name in norms:
        assert np.abs(block.floats[name] / weights[f"layers.1.{name}"] - 1).max() > 0.05


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp_bias": True},
        {"norm_placement": "pre"},
        {"residual_scale": 0.5},
        {"global_kv_heads": 3},
        {"global_head_size": 33},
        {"experts": 0, "experts_per_token": 0},
    ],
)
def test_wrong_configurations_raise(changes):
    name = next(iter(changes)) if "experts" not in changes else "router_norm"
    with pytest.raises(ValueError, match=f"Config: .*{name}="):
        CONFIG.replace(**changes)
