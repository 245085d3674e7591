"""Gemma 4 with experts: files with images, single experts and quantized stacks; steps, saved
models, meshes and calibration. Other tests compare its logits with transformers."""

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
from flax import nnx  # noqa: E402
from golden_architectures import CASES, PATH, TOKENS  # noqa: E402
from golden_files import hf_weights, keys_of, tensors_of  # noqa: E402
from model_files import load, write_folder, write_gguf  # noqa: E402

from jaxlowbit import INT8, llm, quantize  # noqa: E402
from jaxlowbit._llm import calibration  # noqa: E402
from jaxlowbit._llm.cache import make_cache  # noqa: E402
from jaxlowbit._llm.huggingface import config_of  # noqa: E402
from jaxlowbit.llm import Decoder  # noqa: E402
from jaxlowbit.quantizers import Statistics  # noqa: E402

NAME = "gemma4_moe"
ENTRIES = CASES[NAME]


def near(found: Any, wanted: Any, tolerance: float = 1e-5) -> bool:
    return bool(np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max())


def logits(decoder: Decoder) -> np.ndarray:
    graph, state = nnx.split(decoder)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    return np.asarray(call(state, np.array([TOKENS])))[0]


def folder_of(path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """The folder of the golden model, and its tensors."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(ENTRIES))
    tensors = hf_weights(config_of(path))
    return write_folder(path, ENTRIES, tensors), tensors


def same_weights(found: Any, wanted: Any) -> None:
    assert found.config == wanted.config
    assert all(map(np.array_equal, *(jax.tree.leaves(x.weights) for x in (found, wanted))))


# --- files ----------------------------------------------------------------------------------------


def test_images_and_sounds_are_skipped(tmp_path):
    path, tensors = folder_of(tmp_path / "text")
    wanted = load(path)
    whole = {key.replace("model.", "model.language_model."): x for key, x in tensors.items()}
    for name in ("vision_tower.encoder.layers.0.layer_scalar", "embed_vision.projection.weight",
                 "audio_tower.conv.weight", "embed_audio.projection.weight"):  # fmt: skip
        whole[f"model.{name}"] = np.ones((2, 2), np.float32)
    outer = {"model_type": "gemma4", "text_config": ENTRIES, "image_token_id": 10}
    same_weights(load(write_folder(tmp_path / "whole", outer, whole)), wanted)
    name = "model.language_model.layers.0.per_layer_input_gate.weight"
    write_folder(tmp_path / "whole", outer, whole | {name: np.ones((2, 64), np.float32)})
    with pytest.raises(ValueError, match=rf"{name}' is no part of gemma4_moe"):
        load(tmp_path / "whole")


def test_a_tensor_per_expert_and_wrong_stacks(tmp_path):
    path, tensors = folder_of(tmp_path / "model")
    wanted = load(path)
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
    same_weights(load(write_folder(tmp_path / "single", ENTRIES, single)), wanted)
    name = "model.layers.1.experts.gate_up_proj"
    turned = tensors | {name: np.ascontiguousarray(tensors[name].swapaxes(1, 2)[..., :-1])}
    with pytest.raises(
        ValueError, match=r"gate_up_proj' is F32 of shape \(4, 64, 127\), but .* of"
    ):
        load(write_folder(tmp_path / "model", ENTRIES, turned))
    write_folder(tmp_path / "model", ENTRIES, single | {name: tensors[name]})
    with pytest.raises(ValueError, match=r"gate_up_proj'.*'layers.1.gate' is also in other"):
        load(tmp_path / "model")


def test_quantized_stacks_of_gguf_files(tmp_path):
    """Gate and up of an expert follow each other in one tensor."""
    _, tensors = folder_of(tmp_path / "model")
    stored = tensors_of(NAME, "gemma4", tensors)
    kind = gguf.GGMLQuantizationType.Q8_0
    for key in [key for key in stored if key.endswith("_exps.weight")]:
        stored[key] = ("Q8_0", gguf.quants.quantize(stored[key][1], kind))
    keys = keys_of(NAME, "gemma4")
    found = load(write_gguf(tmp_path / "model.gguf", keys, stored))
    values = gguf.quants.dequantize(stored["blk.1.ffn_gate_up_exps.weight"][1], kind)
    for part, rows in (("gate", values[:, :64]), ("up", values[:, 64:])):
        stack = found.weights[f"layers.1.{part}"]
        assert stack.shape == (4, 64, 64) and stack.format is not None
        np.testing.assert_array_equal(stack.dequantize(jnp.float32), rows.swapaxes(1, 2))
    rest = {key: value for key, value in stored.items() if key != "rope_freqs.weight"}
    with pytest.raises(ValueError, match=r"no tensor 'rope_freqs.weight'"):
        load(write_gguf(tmp_path / "model.gguf", keys, rest))
    keys["gemma4.attention.head_count_kv"] = [2, 1, 1]
    with pytest.raises(ValueError, match=r"head_count_kv' is \[2, 1, 1\] and"):
        load(write_gguf(tmp_path / "model.gguf", keys, stored))


# --- results --------------------------------------------------------------------------------------


def test_steps_give_the_logits_of_a_prompt(tmp_path):
    """With a cache of floats; with one of 8 bits within its error."""
    found = load(folder_of(tmp_path / "model")[0])
    graph, state = nnx.split(Decoder(found.config, found.weights, dtype=jnp.float32))
    wanted = np.load(PATH)[NAME]

    @jax.jit
    def step(state, token, position, cache):
        decoder = nnx.merge(graph, state)
        x, cache = decoder.forward(token, position, cache)
        return decoder.logits(x)[0, 0], cache

    def error(dtype: Any) -> float:
        cache, rows = make_cache(found.config, 1, 32, dtype), []
        assert [x.shape[2:] for x in cache.keys] == [(4, 32), (2, 64)]
        for i, token in enumerate(TOKENS):
            row, cache = step(state, jnp.array([[token]]), jnp.array([[i]]), cache)
            rows.append(row)
        return np.abs(np.stack(rows) - wanted).max() / np.abs(wanted).max()

    assert error(jnp.float32) < 1e-5 < error(jnp.int8) < 0.05


def test_a_model_on_two_devices_is_saved_and_read_again(tmp_path):
    path, _ = folder_of(tmp_path / "model")
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("model",), axis_types=kinds, devices=jax.devices("cpu")[:2])
    options: dict[str, Any] = {"dtype": jnp.float32, "progress": False}
    model = llm.load(path, mesh=mesh, **options)
    block: Any = model.decoder.blocks[0]
    assert block.down.get_metadata("out_sharding") == ("model", None, None)
    assert block.dense_down.get_metadata("out_sharding") == ("model", None)
    graph, state = nnx.split(model.decoder)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    assert near(np.asarray(call(state, np.array([TOKENS])))[0], np.load(PATH)[NAME])
    llm.save(model, tmp_path / "saved")
    again = llm.load(tmp_path / "saved", mesh=mesh, **options)
    assert again.config == model.config
    states = (nnx.state(x.decoder) for x in (again, model))
    assert all(map(np.array_equal, *map(jax.tree.leaves, states)))
    with pytest.raises(ValueError, match="dense_hidden=129 is no multiple of 2"):
        llm.init(model.config.replace(dense_hidden=129), INT8, mesh=mesh)


def test_folded_factors_and_quantized_matrices_give_the_same_block(tmp_path):
    """Factors go into the norms of the MLP and of the experts; router and values have their own."""
    config, weights, *_ = load(folder_of(tmp_path / "model")[0])
    rounding = calibration.Rounding(
        dict.fromkeys(config.matrices(), INT8), "smoothquant", jnp.float32, None
    )
    source = calibration.Source(config, weights.__getitem__, weights.__getitem__)
    names = [name for name in config.shapes() if name.startswith("layers.1.")]
    block = calibration._Block(source, rounding, 1, names)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 64)), jnp.float32)
    wanted = block.outputs(x, jnp.float32)

    def made_up(weight: Any) -> Statistics:
        rows = np.random.default_rng(0).uniform(0.1, 2, weight.shape[:-1]).astype(np.float32)
        counts: Any = np.full(weight.shape[:-2], 32, np.int32)
        return Statistics(rows**2, rows, counts)

    changed = block._fold({name: made_up(block.floats[name]) for name in block.matrices})
    norms = {"attention_norm", "mlp_norm", "expert_norm"}
    dense = {f"dense_{name}" for name in ("gate", "up", "down")}
    assert changed == {*norms, *dense, "q", "k", "gate", "up", "down"}
    assert near(block.outputs(x, jnp.float32), wanted, 1e-4)
    for name in norms:
        assert np.abs(block.floats[name] / weights[f"layers.1.{name}"] - 1).max() > 0.05
    found = {name: quantize(block.floats[name], "int8-g32") for name in block.matrices}
    own = {f"layers.1.{name}": x for name, x in (block.floats | found).items()}
    result = jax.jit(lambda own, x: calibration.forward(config, own, 1, x))(own, x)
    block.floats |= {name: array.dequantize(jnp.float32) for name, array in found.items()}
    assert near(result, block.outputs(x, jnp.float32))


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
def test_wrong_configurations_raise(changes, tmp_path):
    name = next(iter(changes)) if "experts" not in changes else "router_norm"
    (tmp_path / "config.json").write_text(json.dumps(ENTRIES))
    with pytest.raises(ValueError, match=f"Config: .*{name}="):
        config_of(tmp_path).replace(**changes)
