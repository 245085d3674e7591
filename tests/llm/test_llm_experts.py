"""Mixtures of experts: quantized stacks, files of several kinds, meshes and random models."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import gguf  # noqa: E402
from decoders import INT4_G32, TINY, floats, random  # noqa: E402
from flax import nnx  # noqa: E402
from golden_architectures import CASES, PATH, TOKENS, mxfp4  # noqa: E402
from golden_files import hf_weights, keys_of, tensors_of  # noqa: E402
from model_files import load, write_folder, write_gguf  # noqa: E402

from jaxlowbit import INT8, MXFP4, Format  # noqa: E402
from jaxlowbit._llm.bench import SHAPES  # noqa: E402
from jaxlowbit._llm.huggingface import config_of  # noqa: E402
from jaxlowbit._llm.random_weights import random_weights  # noqa: E402
from jaxlowbit.llm import Config, Decoder, LanguageModel, generate, init, save, shard  # noqa: E402
from jaxlowbit.llm import load as load_model  # noqa: E402

# On four devices, each has whole heads and whole atoms of the output projection.
SIZES: dict[str, Any] = TINY | {"heads": 8, "kv_heads": 4, "head_size": 64}
GPT_OSS = Config(
    "gpt_oss", **SIZES, experts=8, experts_per_token=3, attention_bias=True, output_bias=True,
    mlp_bias=True, router_bias=True, sinks=True, window=5, window_layers=(True, False),
    activation="gpt_oss",
)  # fmt: skip
QWEN3 = Config(
    "qwen3_moe", **SIZES, experts=8, experts_per_token=2, qk_norm="head", normalized_experts=False
)
PROMPTS = [[3, 1, 4, 1, 5], list(range(20, 40))]


def logits(decoder: Decoder) -> np.ndarray:
    graph, state = nnx.split(decoder)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    return np.asarray(call(state, np.array([TOKENS])))[0]


def near(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max())


@functools.cache
def weights(config: Config, format: Format) -> dict[str, Any]:
    return random(config, format)


@functools.cache
def expected(config: Config, format: Format) -> np.ndarray:
    """Logits by the same weights as floats; other tests compare these with transformers."""
    return logits(Decoder(config, dense(weights(config, format)), dtype=jnp.float32))


def dense(weights: dict[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(x, jnp.float32) for name, x in floats(weights).items()}


@pytest.mark.parametrize(("config", "format"), [(QWEN3, INT4_G32), (GPT_OSS, MXFP4)])
def test_quantized_experts_multiply_as_floats(config, format):
    decoder = Decoder(config, weights(config, format), dtype=jnp.float32)
    assert decoder.blocks[0].gate_up[0].get_value().shape == (2, 8, 64, 96)
    assert near(logits(decoder), expected(config, format))


def test_formats_of_experts_may_be_mixed():
    mixed = dict(weights(GPT_OSS, MXFP4))
    others = weights(GPT_OSS, INT8)
    mixed |= {name: others[name] for name in ("layers.0.gate", "layers.1.down")}
    mixed["layers.0.down"] = mixed["layers.0.down"].dequantize(jnp.float32)
    found, want = (Decoder(GPT_OSS, x, dtype=jnp.float32) for x in (mixed, dense(mixed)))
    assert near(logits(found), logits(want))


# --- files ----------------------------------------------------------------------------------------


def of_case(name: str, folder):
    """The entries of config.json and the tensors of a folder of a golden model."""
    write_folder(folder, CASES[name], {})
    return CASES[name], hf_weights(config_of(folder))


def check(checkpoint, name: str, format: Format | None = None) -> None:
    found = [checkpoint.weights[f"layers.{i}.{x}"] for i in (0, 1) for x in ("gate", "up", "down")]
    assert {getattr(x, "format", None) for x in found} == {format}
    decoder = Decoder(checkpoint.config, checkpoint.weights, dtype=jnp.float32)
    assert near(logits(decoder), np.load(PATH)[name])


def packed_folder(folder):
    """gpt-oss as it is released: stacks of experts in MXFP4."""
    entries, tensors = of_case("gpt_oss", folder)
    for key in [key for key, value in tensors.items() if value.ndim == 3]:
        _, codes, exponents = mxfp4(key, tensors.pop(key).shape)
        blocks = codes.reshape(*codes.shape[:-1], -1, 16, 2)
        tensors[f"{key}_blocks"] = blocks[..., 0] | blocks[..., 1] << 4
        tensors[f"{key}_scales"] = np.ascontiguousarray(exponents[..., ::32])
    quantization = {"quantization_config": {"quant_method": "mxfp4"}}
    return write_folder(folder, entries | quantization, tensors)


def test_stacks_in_mxfp4_give_the_logits_of_transformers(tmp_path):
    check(load(packed_folder(tmp_path / "model")), "gpt_oss", MXFP4)


def test_mxfp4_of_gguf_gives_the_logits_of_transformers(tmp_path):
    _, tensors = of_case("gpt_oss", tmp_path / "model")
    stored = tensors_of("gpt_oss", "gpt-oss", tensors)
    kind = gguf.GGMLQuantizationType.MXFP4
    for key, (_, values) in list(stored.items()):
        if values.ndim == 3:
            stored[key] = ("MXFP4", gguf.quants.quantize(values, kind))
    path = write_gguf(tmp_path / "model.gguf", keys_of("gpt_oss", "gpt-oss"), stored)
    check(load(path), "gpt_oss", Format(4, group_size=32, codebook="e2m1"))


def test_early_gguf_files_have_a_tensor_for_each_expert(tmp_path):
    _, tensors = of_case("mixtral", tmp_path / "model")
    stored = {}
    for key, (kind, values) in tensors_of("mixtral", "llama", tensors).items():
        if values.ndim == 3:
            single = [key.replace("_exps", f".{i}") for i in range(4)]
            stored |= {name: (kind, part) for name, part in zip(single, values, strict=True)}
        else:
            stored[key] = (kind, values)
    keys = keys_of("mixtral", "llama")
    check(load(write_gguf(tmp_path / "single.gguf", keys, stored)), "mixtral")
    whole = {"blk.0.ffn_up_exps.weight": ("F32", np.ones((4, 96, 64), np.float32))}
    with pytest.raises(ValueError, match=r"'layers.0.up' is also one tensor"):
        load(write_gguf(tmp_path / "twice.gguf", keys, stored | whole))
    up = stored.pop("blk.1.ffn_up.2.weight")
    with pytest.raises(ValueError, match=r"expert 2 of 'layers.1.up' is missing"):
        load(write_gguf(tmp_path / "missing.gguf", keys, stored))
    stored |= {f"blk.1.ffn_up.{i}.weight": up for i in (2, 4)}
    with pytest.raises(ValueError, match=r"'layers.1.up' has expert 4"):
        load(write_gguf(tmp_path / "beyond.gguf", keys, stored))


def test_a_folder_is_quantized_saved_and_read_again(tmp_path):
    """Experts get the format, routers stay float32."""
    entries, tensors = of_case("qwen3_moe", tmp_path / "model")
    path = write_folder(tmp_path / "model", entries, tensors, shards=2)
    options: dict[str, Any] = {"dtype": jnp.float32, "progress": False}
    model = load_model(path, format=INT8, **options)
    found = {tensor.name: tensor.format for tensor in model.report.tensors}
    assert found["layers.0.up"] == found["layers.1.down"] == INT8
    assert found["layers.0.router"] is None
    assert np.abs(logits(model.decoder) - np.load(PATH)["qwen3_moe"]).max() < 0.1
    save(model, tmp_path / "saved")
    again = load_model(tmp_path / "saved", **options)
    assert np.array_equal(logits(again.decoder), logits(model.decoder))
    rounded = load_model(tmp_path / "saved", rules={"gate|up|down": INT4_G32}, **options)
    assert rounded.decoder.blocks[1].down.get_value().format == INT4_G32
    with pytest.raises(ValueError, match="inputs of experts are not recorded"):
        load_model(path, format=INT8, quantizer="gptq", calibration=[[1, 2, 3]], **options)
    with pytest.raises(ValueError, match="'router' decides about no matrix"):
        load_model(path, rules={"router": INT8}, **options)
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    write_folder(tmp_path / "model", entries, tensors | {name: tensors[name].astype(np.float16)})
    with pytest.raises(ValueError, match=r"is F32 and .* is F16, but the experts of a layer"):
        load(tmp_path / "model")
    write_folder(tmp_path / "model", entries, {key: tensors[key] for key in tensors if key != name})
    with pytest.raises(ValueError, match=r"expert 3 of 'layers.0.up' is missing"):
        load(tmp_path / "model")


# --- meshes and random models ---------------------------------------------------------------------


def make_mesh(devices: int) -> jax.sharding.Mesh:
    kinds = (jax.sharding.AxisType.Auto,)
    found = jax.devices("cpu")[:devices]
    return jax.make_mesh((devices,), ("model",), axis_types=kinds, devices=found)


@pytest.mark.parametrize(
    ("config", "format", "devices"), [(QWEN3, INT4_G32, 4), (GPT_OSS, MXFP4, 2)]
)
def test_experts_on_several_devices_give_the_tokens_of_one(config, format, devices):
    one = LanguageModel(Decoder(config, weights(config, format), dtype=jnp.float32))
    several = shard(one, make_mesh(devices))
    down = several.decoder.blocks[0].down
    assert down.get_metadata("out_sharding") == ("model", None, None)
    packed = down.get_value().packed
    assert packed.sharding.shard_shape(packed.shape)[0] == 8 // devices
    texts = [
        [text.tokens for text in generate(model, PROMPTS, max_new_tokens=4)]
        for model in (one, several)
    ]
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="experts=7 is no multiple of 2 devices"):
        init(config.replace(experts=7), format, mesh=make_mesh(2))


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 46.7), ("qwen3-30b-a3b", 30.5), ("gpt-oss-20b", 20.9), ("gpt-oss-120b", 117)],
)
def test_models_of_bench_have_their_sizes(name, billions):
    config = SHAPES[name]
    numbers = sum(math.prod(shape) for shape in config.shapes().values())
    assert numbers == pytest.approx(billions * 1e9, rel=0.003)
    small = config.replace(layers=1, window_layers=(), vocabulary=128, experts=8)
    made = jax.eval_shape(lambda: random_weights(small, MXFP4))
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made))
    assert stored < 0.55 * sum(math.prod(shape) for shape in small.shapes().values())


def test_random_experts_differ():
    model = init(QWEN3.replace(layers=1), INT4_G32)
    stack = model.decoder.blocks[0].down.get_value()
    assert not np.array_equal(stack.packed[0], stack.packed[1])
