"""Hugging Face folders in 8-bit floats: loaded models, and errors for damaged folders."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import model_files
import numpy as np
import pytest
from flax import nnx
from helpers import assert_within
from jax.sharding import AxisType
from model_files import floats, hf_config, load, same_bits, write_folder

from jaxlowbit import INT4, Format, QuantizedArray, quantize, quantize_activations
from jaxlowbit._backends import extension

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from jaxlowbit import llm  # noqa: E402
from jaxlowbit.checkpoint._files import read_folder  # noqa: E402

Q = "model.layers.0.self_attn.q_proj"
TOKENS = np.random.default_rng(1).integers(0, 200, (1, 16))
MODEL = hf_config("qwen3") | {"num_hidden_layers": 1}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
}


def group(strategy: str, **others: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    weights |= {"strategy": strategy, "block_structure": None}
    return {"targets": ["Linear"], "weights": weights, "input_activations": inputs} | others


def compressed(*groups: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": ["lm_head"],
    } | others


def in_blocks(block: list[int], **others: Any) -> dict[str, Any]:
    found = group("block", **others)
    return found | {"weights": found["weights"] | {"block_structure": block}}


ATTENTION, MLP = {"targets": [r"re:.*self_attn\..*_proj$"]}, {"targets": [r"re:.*mlp\..*_proj$"]}
MIXED = compressed(group("channel", **ATTENTION), in_blocks([64, 32], **MLP))
# The config, the block of an attention matrix that shares a scale (0: the whole axis), and the
# dtype of scales. Blocks of 96 x 48 are partial at both edges.
CASES: dict[str, tuple[Any, tuple[int, int], Any]] = {
    "blocks": (FP8, (128, 128), np.float32),
    "cut blocks": (FP8 | {"weight_block_size": [96, 48]}, (96, 48), jnp.bfloat16),
    "powers of two": (FP8 | {"scale_fmt": "ue8m0"}, (128, 128), jnp.float8_e8m0fnu),
    "compressed blocks": (compressed(in_blocks([128, 64])), (128, 64), np.float16),
    "channel": (compressed(group("channel")), (1, 0), jnp.bfloat16),
    "tensor": (compressed(group("tensor")), (0, 0), np.float32),
    "mixed": (MIXED, (1, 0), np.float32),
}


def narrow(weight: np.ndarray, block: tuple[int, int], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """8-bit floats of a weight (n, k), and scales of blocks; a size of 0 spans the axis."""
    n, k = weight.shape
    rows, columns = block[0] or n, block[1] or k
    scale = np.zeros((-(-n // rows), -(-k // columns)), np.float32)
    for i, j in np.ndindex(*scale.shape):
        part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scale[i, j] = np.abs(part).max() / 448
    scale = np.exp2(np.ceil(np.log2(scale))) if dtype == jnp.float8_e8m0fnu else scale * 1.01
    scale = scale.astype(dtype)
    return (weight / spread(scale, weight.shape, block)).astype(jnp.float8_e4m3fn), scale


def spread(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    n, k = shape
    wide = scale.astype(np.float32).repeat(block[0] or n, 0).repeat(block[1] or k, 1)
    return wide[:n, :k]


def folder(path: Any, case: str) -> tuple[Any, dict[str, Any]]:
    """A folder with one layer in 8-bit floats, and the dequantized weights."""
    config, attention, dtype = CASES[case]
    suffix = "weight_scale_inv" if config["quant_method"] == "fp8" else "weight_scale"
    tensors, exact = {}, {}
    for name, weight in model_files.hf_weights("qwen3").items():
        if "layers.1" in name:
            continue
        tensors[name] = exact[name] = weight
        if not name.endswith("_proj.weight"):
            continue
        block = (64, 32) if config is MIXED and ".mlp." in name else attention
        tensors[name], scale = narrow(weight, block, dtype)
        wide = spread(scale, weight.shape, block).astype(np.float64)
        exact[name] = (tensors[name].astype(np.float64) * wide).astype(np.float32)
        if case == "tensor":  # files contain both shapes
            scale = scale.reshape(() if ".mlp." in name else (1,))
        tensors[name.replace("weight", suffix)] = scale
    return write_folder(path / "model", MODEL | {"quantization_config": config}, tensors), exact


def logits(model: llm.LanguageModel) -> np.ndarray:
    graph, state = nnx.split(model.decoder)
    return np.asarray(jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, TOKENS))


@pytest.mark.parametrize("case", CASES)
def test_weights_match_the_checkpoint(case, tmp_path):
    path, exact = folder(tmp_path, case)
    found = load(path, rules={"embedding": "int8"})
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        part = "mlp" if name in ("gate", "up", "down") else "self_attn"
        weight = found.weights[f"layers.0.{name}"]
        assert weight.format.codebook == "e4m3" and weight.scale.dtype == CASES[case][2]
        same_bits(floats(weight), exact[f"model.layers.0.{part}.{name}_proj.weight"])
    assert found.weights["layers.0.q"].format.group_size == (CASES[case][1][1] or -1)
    stored = {x.name: (x.stored, x.nbytes_stored) for x in found.report.tensors}
    scales = np.prod(narrow(np.ones((256, 256)), *CASES[case][1:])[1].shape)
    size = 256 * 256 + scales * jnp.dtype(CASES[case][2]).itemsize
    method = CASES[case][0]["quant_method"]
    assert stored["layers.0.q"] == ("float8" if method == "fp8" else method, size)
    np.testing.assert_array_equal(found.weights["head"], exact["lm_head.weight"].T)
    assert found.weights["embedding"].format == Format(8)


def test_models_match_the_weights_of_the_checkpoint(tmp_path):
    """Also on a mesh, with block-scaled matrices sharded along both axes."""
    path, exact = folder(tmp_path, "blocks")
    model = llm.load(path, dtype=jnp.float32, progress=False)
    (stack,) = model.decoder.blocks[0].gate_up
    same_bits(floats(stack.get_value()[1]), exact["model.layers.0.mlp.up_proj.weight"])
    plain = write_folder(tmp_path / "plain", MODEL, exact)
    want = logits(llm.load(plain, dtype=jnp.float32, progress=False))
    np.testing.assert_allclose(logits(model), want, rtol=1e-4, atol=1e-5)
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
    divided = llm.load(path, dtype=jnp.float32, mesh=mesh, progress=False)
    down = divided.decoder.blocks[0].down.get_value()
    assert down.scale.sharding.shard_shape(down.scale.shape) != down.scale.shape
    np.testing.assert_allclose(logits(divided), want, rtol=1e-4, atol=1e-5)


def test_activations_are_rounded_on_request(tmp_path):
    path, exact = folder(tmp_path, "channel")
    model = llm.load(path, dtype=jnp.float32, lhs_qtype="float8_e4m3fn", progress=False)
    assert "float8_e4m3fn activations" in str(model.report)
    (block,) = model.decoder.blocks
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 256)), jnp.float32)
    found = block.multiply(x, block.o.get_value())
    rounded = np.asarray(quantize_activations(x, jnp.float8_e4m3fn).dequantize(), np.float64)
    weight = exact[f"{Q}.weight".replace("q_proj", "o_proj")].T
    # AMX multiplies rounded rows in bfloat16: it rounds weights once.
    unit = len(weight) * 2.0**-24 + (2.0**-9 if extension.BUILD["cpu_isa"][0] == "amx" else 0)
    assert_within(found, rounded @ weight, unit * (np.abs(rounded) @ np.abs(weight)))


def test_blocks_that_devices_cut_raise(tmp_path):
    path, _ = folder(tmp_path, "cut blocks")
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
    with pytest.raises(
        ValueError, match=r"rows of layers\.0\.o are 128 on each of 2 devices, but in"
    ):
        llm.load(path, mesh=mesh, progress=False)


def test_options_round_existing_tensors(tmp_path):
    path, exact = folder(tmp_path, "cut blocks")
    found = load(path, format=INT4, rules={"k$": None}, scale_dtype=jnp.float16)
    weight: Any = found.weights["layers.0.q"]
    expected = quantize(jnp.asarray(exact[f"{Q}.weight"].T), INT4, scale_dtype=jnp.float16)
    np.testing.assert_array_equal(weight.packed, expected.packed)
    kept = found.weights["layers.0.k"]
    assert kept.format.codebook == "e4m3" and kept.scale.dtype == jnp.float16
    want = exact[f"{Q}.weight".replace("q_proj", "k_proj")]
    np.testing.assert_allclose(floats(kept), want, rtol=2**-10)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (FP8 | {"activation_scheme": "static"}, "static scales of activations or of a cach"),
        (compressed(group("channel", input_activations={"dynamic": False})), "static scales of"),
        (
            compressed(group("channel"), kv_cache_scheme={"num_bits": 8}),
            "scales of a cache, ",
        ),
        (
            compressed(group("channel", output_activations={"num_bits": 8})),
            "scales of results, ",
        ),
    ],
)
def test_static_scales_are_left_out(changes, sentence, tmp_path):
    path, _ = folder(tmp_path, "blocks" if changes["quant_method"] == "fp8" else "channel")
    rewrite(path, config=changes, tensors={f"{Q}.input_scale": np.ones((), np.float32)})
    with pytest.warns(UserWarning, match=f"^load: .*config.json has {sentence}"):
        found = load(path)
    assert isinstance(found.weights["layers.0.q"], QuantizedArray)


def test_scales_that_config_json_does_not_name_are_left_out_with_a_warning(tmp_path):
    path, _ = folder(tmp_path, "blocks")
    rewrite(path, tensors={f"{Q.replace('q_proj', 'k_scale')}": np.ones((), np.float32)})
    with pytest.warns(UserWarning, match="has static scales of activations or of a cache, left"):
        load(path)


def rewrite(path: Any, config: Any = None, tensors: Any = None, without: str = "") -> None:
    """Changes a folder in place."""
    from safetensors.numpy import save_file

    file = path / "model.safetensors"
    model = json.loads((path / "config.json").read_text())
    if config is not None:
        model["quantization_config"] = config
        (path / "config.json").write_text(json.dumps(model))
    found = {
        x.name: x.rows(0, x.shape[0] if len(x.shape) > 1 else 1).reshape(x.shape)
        for x in read_folder(path).tensors.values()
    } | (tensors or {})
    found.pop(without, None)
    save_file(found, file)


BITS = np.zeros((256, 256), np.uint8)
BITS[3, 5] = 0xFF
SCALE = f"{Q}.weight_scale_inv"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no scale": ({"without": SCALE}, f"'{Q}.weight' is F8_E4M3, but it is no part of a quantized"),
    "no weight": (
        {"tensors": {"model.x.weight_scale_inv": np.ones((1, 1))}},
        "'model.x.weight' is missing, but 'model.x.weight_scale_inv' needs it",
    ),
    "float weight": (
        {"tensors": {f"{Q}.weight": np.ones((256, 256), np.float32)}},
        f"'{Q}.weight' is F32 of shape",
    ),
    "transposed scale": (
        {"tensors": {SCALE: np.ones((2, 3), np.float32)}},
        rf"'{SCALE}' is F32 of shape \(2, 3\), but by its configuration .* of shape \(2, 2\)",
    ),
    "integer scale": ({"tensors": {SCALE: np.ones((2, 2), np.int32)}}, f"'{SCALE}' is I32"),
    "nan scale": (
        {"tensors": {SCALE: np.full((2, 2), np.nan, np.float32)}},
        f"'{Q}.weight' .*its scales '{SCALE}' have 4 that are NaN or infinite",
    ),
    "nan": (
        {"tensors": {f"{Q}.weight": BITS.view(jnp.float8_e4m3fn)}},
        rf"'{Q}.weight' \(float8\): 1 numbers are NaN, the first in row 3 and column 5",
    ),
    "other type": (
        {"tensors": {f"{Q}.weight": np.ones((256, 256), jnp.float8_e5m2)}},
        f"'{Q}.weight' is F8_E5M2 of shape",
    ),
    "other block": (
        {"config": FP8 | {"weight_block_size": [64, 64]}},
        r"weight_scale_inv' is F32 of shape \(2, 2\), but .* of shape \(4, 4\)",
    ),
    "no block": (
        {"config": FP8 | {"weight_block_size": None}},
        r"weight_scale_inv' is F32 of shape \(2, 2\), but .* of shape \(1, 1\)",
    ),
    "odd block": (
        {"config": FP8 | {"weight_block_size": [128, 100]}},
        r"'weight_block_size' is \[128, 100\], but a block must have a number of rows and a "
        "multiple of 16",
    ),
    "three sizes": ({"config": FP8 | {"weight_block_size": [1, 128, 128]}}, "'weight_block_size'"),
    "other floats": ({"config": FP8 | {"fmt": "e5m2"}}, "'fmt' is 'e5m2', but 'e4m3' is read"),
    "floats by name": (
        {"config": FP8 | {"modules_to_not_convert": ["self_attn"]}},
        r"_proj.weight' has scales, but .* keeps .* in floats",
    ),
    "method": (
        {"config": {"quant_method": "exl3", "bits": 4}},
        "'quant_method' is 'exl3', but the quantized checkpoints that are read are .*'gptq'.*; use "
        "the folder of the model's floats",
    ),
    "list": ({"config": [1]}, r"'quantization_config' is \[1\], but it must be an object"),
    "packed": (
        {"config": compressed(group("channel"), format="pack-quantized")},
        "'type' is 'float', but 'int' is read",
    ),
    "integers": (
        {"config": compressed(group("channel", weights={"type": "int"}))},
        "'type' is 'int', but 'float' is read",
    ),
    "strategy": ({"config": compressed(group("token"))}, "'strategy' is 'token', but 'tensor' or"),
    "no group": ({"config": compressed({"targets": []})}, "lacks 'weights', an object"),
    "text": (
        {"config": {**compressed(), "config_groups": {"a": 1}}},
        "'a' is 1, but it must be an object",
    ),
    "expression": (
        {"config": compressed(group("channel", targets=["re:("]))},
        r"'targets' has '\(', which is no regular expression \(missing \)",
    ),
    "rotated weights": (
        {
            "config": compressed(
                group("channel"),
                transform_config={"config_groups": {"R1": {"apply": [{"location": "input"}]}}},
            )
        },
        "'location' is 'input', but 'weight_input' or 'weight_output' is read",
    ),
    "sparse weights": (
        {"config": compressed(group("channel"), sparsity_config={"format": "sparse-24-bitmask"})},
        "'format' is 'sparse-24-bitmask', but 'dense' is read",
    ),
    "new entry of fp8": ({"config": FP8 | {"new_entry": 2}}, "'new_entry' is 2, an entry of a qua"),
    "name": (
        {"config": compressed(group("channel"), ignore=[3])},
        r"'ignore' is \[3\], but it must be strings",
    ),
}


def test_matrices_outside_of_all_groups_raise(tmp_path):
    path, _ = folder(tmp_path, "channel")
    rewrite(path, config=compressed(group("channel", **MLP)))
    with pytest.raises(ValueError, match=r"_proj\.weight' is quantized, but by 'ignore' and 'targ"):
        load(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("sound"), "blocks")[0]


@pytest.mark.parametrize("name", WRONG)
def test_damaged_folders_raise(name, sound):
    kept = {x: (sound / x).read_bytes() for x in ("config.json", "model.safetensors")}
    changes, sentence = WRONG[name]
    try:
        rewrite(sound, **changes)
        with pytest.raises(ValueError, match=sentence):
            load(sound)
    finally:
        for file, data in kept.items():
            (sound / file).write_bytes(data)
