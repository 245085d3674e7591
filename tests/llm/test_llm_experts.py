"""Mixtures of experts: quantized stacks, files of several kinds, meshes and random models."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import gguf  # noqa: E402
from decoders import INT4_G32, PARTS, TINY, floats, random  # noqa: E402
from flax import nnx  # noqa: E402
from golden_architectures import CASES, PATH, TOKENS, mxfp4  # noqa: E402
from golden_files import hf_weights, keys_of, tensors_of  # noqa: E402
from model_files import load, write_folder, write_gguf  # noqa: E402

from jaxlowbit import INT8, MXFP4, Format, QuantizedArray  # noqa: E402
from jaxlowbit._llm import experts  # noqa: E402
from jaxlowbit._llm.bench import SHAPES  # noqa: E402
from jaxlowbit._llm.huggingface import config_of  # noqa: E402
from jaxlowbit._llm.random_weights import random_weights  # noqa: E402
from jaxlowbit._llm.saved import weights_of  # noqa: E402
from jaxlowbit.llm import (  # noqa: E402
    Config,
    Decoder,
    LanguageModel,
    export,
    generate,
    init,
    save,
    shard,
)
from jaxlowbit.llm import load as load_model  # noqa: E402

# On four devices, each has whole heads and whole atoms of the output projection.
SIZES: dict[str, Any] = TINY | {"heads": 8, "kv_heads": 4, "head_size": 64}
GPT_OSS = Config(
    "gpt_oss", **SIZES, experts=4, experts_per_token=3, attention_bias=True,
    output_bias=True, mlp_bias=True, router_bias=True, sinks=True, window=5, activation="gpt_oss",
).replace(layers=1)  # fmt: skip
QWEN3 = Config(
    "qwen3_moe", **SIZES, experts=8, experts_per_token=2, qk_norm="head", normalized_experts=False
)
CASES_OF = {"qwen3_moe": (QWEN3, INT4_G32), "gpt_oss": (GPT_OSS, MXFP4)}


def logits(decoder: Decoder) -> np.ndarray:
    graph, state = nnx.split(decoder)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    return np.asarray(call(state, np.array([TOKENS])))[0]


def near(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max())


def dense(weights: dict[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(x, jnp.float32) for name, x in floats(weights).items()}


@functools.cache
def decoder(name: str) -> Decoder:
    config, format = CASES_OF[name]
    return Decoder(config, random(config, format), dtype=jnp.float32)


@functools.cache
def quantized_logits(name: str) -> np.ndarray:
    return logits(decoder(name))


@pytest.mark.parametrize("name", CASES_OF)
def test_quantized_experts_match_float_experts(name):
    """Other tests compare float experts with transformers."""
    config, format = CASES_OF[name]
    quantized = decoder(name)
    stack = quantized.blocks[0].gate_up[0].get_value()
    assert stack.shape == (2, config.experts, 64, 96)
    floats = Decoder(config, dense(random(config, format)), dtype=jnp.float32)
    assert near(quantized_logits(name), logits(floats))


def test_experts_with_mixed_formats():
    weights = random(GPT_OSS, MXFP4) | {"layers.0.gate": random(GPT_OSS, INT8)["layers.0.gate"]}
    wide = dense(weights)
    x = jax.random.normal(jax.random.key(0), (2, 5, GPT_OSS.width))
    router, bias = (weights[f"layers.0.{name}"] for name in ("router", "router_bias"))
    choices = experts.route(GPT_OSS, x, router, bias)
    gate_up_bias = jnp.stack([weights[f"layers.0.{name}_bias"] for name in ("gate", "up")])

    def mixed(names: str, offset: int | None = None, count: int = 4) -> jax.Array:
        """`mix` with the stacks of these names quantized, of some of the experts."""
        own = slice(offset, None if offset is None else offset + count)
        stacks = [
            (weights if name in names.split() else wide)[f"layers.0.{name}"][own]
            for name in ("gate", "up", "down")
        ]
        return experts.mix(
            x,
            *choices,
            stacks[:2],
            stacks[2],
            gate_up_bias[:, own],
            weights["layers.0.down_bias"][own],
            activation="gpt_oss",
            offset=None if offset is None else jnp.int32(offset),
            num_experts=GPT_OSS.experts,
            lhs_qtype=None,
            dtype=jnp.float32,
        )

    want = np.asarray(mixed(""))
    assert near(np.asarray(mixed("gate down")), want)
    assert near(np.asarray(mixed("up", 0, 1) + mixed("up", 1, 3)), want)


@pytest.mark.parametrize(
    ("config", "format"), [(GPT_OSS, MXFP4), (PARTS["granite"], INT4_G32)], ids=["experts", "dense"]
)
def test_weights_of_a_decoder_are_those_it_was_made_of(config, format):
    given = random(config, format)
    found = weights_of(Decoder(config, given, dtype=jnp.float32))[1]
    assert found.keys() == given.keys()
    for name, weight in given.items():
        assert all(map(np.array_equal, jax.tree.leaves(found[name]), jax.tree.leaves(weight)))


def test_ties_select_the_first_expert():
    x = jnp.ones((1, 1, QWEN3.width))
    expert, weight = experts.route(QWEN3, x, jnp.zeros((QWEN3.width, 8)), None)
    assert expert.tolist() == [[[0, 1]]]
    np.testing.assert_allclose(weight, 1 / 8)
    _, weight = experts.route(QWEN3.replace(normalized_experts=True), x, jnp.zeros((64, 8)), None)
    np.testing.assert_allclose(weight, 1 / 2)


def test_routers_of_any_dtype():
    x = jax.random.normal(jax.random.key(0), (1, 5, QWEN3.width))
    router = jax.random.normal(jax.random.key(1), (QWEN3.width, 8), jnp.bfloat16)
    bias = jax.random.normal(jax.random.key(2), (8,), jnp.bfloat16)
    found = experts.route(QWEN3, x, router, bias)
    want = experts.route(QWEN3, x, router.astype(jnp.float32), bias.astype(jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, found, want)


# --- files ----------------------------------------------------------------------------------------


def of_case(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The entries of config.json and the tensors of a folder of a golden model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CASES[name]))
    return CASES[name], hf_weights(config_of(folder))


def stacks(checkpoint: Any) -> list[Any]:
    names = (f"layers.{i}.{name}" for i in (0, 1) for name in ("gate", "up", "down"))
    return [checkpoint.weights[name] for name in names]


def test_mxfp4_stacks_match_transformers(tmp_path):
    """gpt-oss as it is released, and with the blocks of GGUF."""
    entries, tensors = of_case("gpt_oss", tmp_path / "model")
    packed = dict(tensors)
    for key in [key for key, value in tensors.items() if value.ndim == 3]:
        _, codes, exponents = mxfp4(key, packed.pop(key).shape)
        blocks = codes.reshape(*codes.shape[:-1], -1, 16, 2)
        packed[f"{key}_blocks"] = blocks[..., 0] | blocks[..., 1] << 4
        packed[f"{key}_scales"] = np.ascontiguousarray(exponents[..., ::32])
    quantization = {"quantization_config": {"quant_method": "mxfp4"}}
    found = load(write_folder(tmp_path / "model", entries | quantization, packed))
    assert {stack.format for stack in stacks(found)} == {MXFP4}
    decoder = Decoder(found.config, found.weights, dtype=jnp.float32)
    assert near(logits(decoder), np.load(PATH)["gpt_oss"])

    stored = tensors_of("gpt_oss", "gpt-oss", tensors)
    for key, (_, values) in list(stored.items()):
        if values.ndim == 3:
            kind = gguf.GGMLQuantizationType.MXFP4
            stored[key] = ("MXFP4", gguf.quants.quantize(values, kind))
    file = load(write_gguf(tmp_path / "model.gguf", keys_of("gpt_oss", "gpt-oss"), stored))
    float32 = {"norm_epsilon": file.config.norm_epsilon}
    assert file.config == found.config.replace(**float32)
    for one, other in zip(stacks(found), stacks(file), strict=True):
        assert other.format == Format(4, group_size=32, codebook="e2m1")
        assert np.array_equal(one.dequantize(jnp.float32), other.dequantize(jnp.float32))


def test_early_gguf_files_with_a_tensor_per_expert(tmp_path):
    entries, tensors = of_case("mixtral", tmp_path / "model")
    expected = stacks(load(write_folder(tmp_path / "model", entries, tensors)))
    stored = {}
    for key, (kind, values) in tensors_of("mixtral", "llama", tensors).items():
        if values.ndim == 3:
            single = [key.replace("_exps", f".{i}") for i in range(4)]
            stored |= {name: (kind, part) for name, part in zip(single, values, strict=True)}
        else:
            stored[key] = (kind, values)
    keys = keys_of("mixtral", "llama")
    found = stacks(load(write_gguf(tmp_path / "single.gguf", keys, stored)))
    assert all(map(np.array_equal, found, expected))
    whole = {"blk.0.ffn_up_exps.weight": ("F32", np.ones((4, 96, 64), np.float32))}
    with pytest.raises(ValueError, match=r"'layers.0.up' is also one tensor"):
        load(write_gguf(tmp_path / "twice.gguf", keys, stored | whole))
    up = stored.pop("blk.1.ffn_up.2.weight")
    with pytest.raises(ValueError, match=r"expert 2 of 'layers.1.up' is missing"):
        load(write_gguf(tmp_path / "missing.gguf", keys, stored))
    stored |= {f"blk.1.ffn_up.{i}.weight": up for i in (2, 4)}
    with pytest.raises(ValueError, match=r"'layers.1.up' has expert 4"):
        load(write_gguf(tmp_path / "beyond.gguf", keys, stored))
    del stored["blk.1.ffn_up.4.weight"]
    stored["blk.1.ffn_up.2.weight"] = ("F16", up[1].astype(np.float16))
    with pytest.raises(ValueError, match=r"is F32 and .* is F16, but the experts of a layer"):
        load(write_gguf(tmp_path / "kinds.gguf", keys, stored))


def test_a_folder_is_quantized_saved_and_read_again(tmp_path):
    """Experts get the format, routers stay float32."""
    entries, tensors = of_case("qwen3_moe", tmp_path / "model")
    path = write_folder(tmp_path / "model", entries, tensors, shards=2)
    options: dict[str, Any] = {"dtype": jnp.float32, "progress": False}
    model = load_model(path, format=INT8, **options)
    found = {tensor.name: tensor.format for tensor in model.report.tensors}
    assert found["layers.0.up"] == found["layers.1.down"] == INT8
    assert found["layers.0.router"] is None
    save(model, tmp_path / "saved")
    again = load_model(tmp_path / "saved", **options)
    for one, other in zip(
        *(jax.tree.leaves(nnx.state(x.decoder)) for x in (model, again)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    rounded = load_model(tmp_path / "saved", rules={"gate|up|down": INT4_G32}, **options)
    assert rounded.decoder.blocks[1].down.get_value().format == INT4_G32
    with pytest.raises(ValueError, match="'router' decides about no matrix"):
        load_model(path, rules={"router": INT8}, **options)
    with pytest.raises(ValueError, match="5 experts in each layer, which are not written"):
        export(model, tmp_path / "exported", "compressed-tensors")


# --- meshes and random models ---------------------------------------------------------------------


def make_mesh(devices: int) -> jax.sharding.Mesh:
    kinds = (jax.sharding.AxisType.Auto,)
    found = jax.devices("cpu")[:devices]
    return jax.make_mesh((devices,), ("model",), axis_types=kinds, devices=found)


def test_experts_on_several_devices_match_one_device():
    several = shard(LanguageModel(decoder("qwen3_moe")), make_mesh(4)).decoder
    down = several.blocks[0].down
    assert down.get_metadata("out_sharding") == ("model", None, None)
    packed = down.get_value().packed
    assert packed.sharding.shard_shape(packed.shape)[0] == QWEN3.experts // 4
    assert near(logits(several), quantized_logits("qwen3_moe"))


def test_tokens_of_experts_on_several_devices_match_one_device():
    meshes = None, make_mesh(2), make_mesh(4)
    models = (init(GPT_OSS, INT4_G32, mesh=mesh) for mesh in meshes)
    one, *others = (generate(model, [3, 1, 4], max_new_tokens=5).tokens for model in models)
    assert others == [one, one]


def test_other_numbers_of_devices_raise():
    with pytest.raises(ValueError, match="experts=7 is no multiple of 2 devices"):
        init(QWEN3.replace(experts=7), INT4_G32, mesh=make_mesh(2))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("mixtral-8x7b", 46.7), ("qwen3-30b-a3b", 30.5), ("gemma-4-26b-a4b", 25.2)),
        *(("gpt-oss-20b", 20.9), ("gpt-oss-120b", 117)),
    ],
)
def test_bench_models_have_the_published_sizes(name, billions):
    config = SHAPES[name]
    numbers = sum(math.prod(shape) for shape in config.shapes().values())
    assert numbers == pytest.approx(billions * 1e9, rel=0.003)
    small = config.replace(layers=1, window_layers=(), vocabulary=128, experts=8)
    made = jax.eval_shape(lambda: random_weights(small, MXFP4))
    # A decode step would convert biases and sinks of another dtype in every layer.
    others = [x for x in made.values() if not isinstance(x, QuantizedArray)]
    assert {x.dtype for x in others} == {np.dtype("float32")}
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made))
    assert stored < 0.55 * sum(math.prod(shape) for shape in small.shapes().values())


def test_random_experts_differ():
    packed = random(QWEN3, INT4_G32)["layers.0.down"].packed
    assert not np.array_equal(packed[0], packed[1])
