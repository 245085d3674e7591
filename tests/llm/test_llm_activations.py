"""`lhs_qtype=` of `jaxlowbit.llm`: products of blocks with quantized activations."""

import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import CONFIGS, LLAMA, random
from flax import nnx
from helpers import dequantized
from jax.sharding import AxisType

from jaxlowbit import INT4, QuantizedArray, quantize_activations
from jaxlowbit._command import main
from jaxlowbit._composite.rms_norm import rms_norm
from jaxlowbit._llm import command
from jaxlowbit._llm.sharding import Division
from jaxlowbit.llm import Decoder, LanguageModel, generate, init, load, shard

DTYPES = ("int8", "float8_e4m3fn")
dtypes = pytest.mark.parametrize("dtype", DTYPES)
TOKENS = np.random.default_rng(1).integers(0, LLAMA.vocabulary, (1, 24))
# On two devices, each shard of a weight has whole heads and whole atoms.
SIZES: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_size": 64, "hidden": 256}


def make_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])


def decoder(config: Any, weights: Any, dtype: Any, **options: Any) -> Decoder:
    return Decoder(config, weights, dtype=jnp.float32, lhs_qtype=dtype, **options)


def logits(decoder: Decoder) -> np.ndarray:
    graph, state = nnx.split(decoder)
    return np.asarray(jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, TOKENS))


@dtypes
@pytest.mark.parametrize("floats", ["", "down", "gate"])
def test_a_block_is_the_composition_of_its_products(floats, dtype):
    """Products with float matrices, such as `floats`, keep float activations."""
    weights = random(LLAMA)
    weights |= {x: dequantized(weights[x]) for x in weights if floats and x.endswith(floats)}
    block, following = decoder(LLAMA, weights, dtype).blocks
    rng = np.random.default_rng(0)
    shape = (2, 3, LLAMA.width)
    x, attended = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))

    def product(x: Any, name: str) -> Any:
        weight = weights[name]
        if not isinstance(weight, QuantizedArray):
            return x @ weight
        return quantize_activations(x, dtype) @ weight

    def norm(x: Any, name: str) -> Any:
        return rms_norm(x, weights[name], LLAMA.norm_epsilon)

    y = x + product(attended, "layers.0.o")
    normed = norm(y, "layers.0.mlp_norm")
    gate, up = (product(normed, f"layers.0.{name}") for name in ("gate", "up"))
    y += product(jax.nn.silu(gate) * up, "layers.0.down")
    normed = norm(y, "layers.1.attention_norm")
    found, products = block.finish(attended, x, following)
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-5)
    for name, one in zip("qkv", products, strict=True):
        np.testing.assert_allclose(one, product(normed, f"layers.1.{name}"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", "int8"), ("qwen2", "float8_e4m3fn"), ("gemma3", "int8")]
)
def test_models_are_close_to_float_models(name, dtype):
    config, weights = CONFIGS[name], random(CONFIGS[name])
    exact, found = (logits(decoder(config, weights, x)) for x in (None, dtype))
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < (0.05 if dtype == "int8" else 0.15)


@pytest.mark.parametrize(("name", "dtype"), [("llama", "int8"), ("gemma3", "float8_e4m3fn")])
def test_on_a_mesh_a_token_has_one_scale(name, dtype):
    """Sharded heads and hidden features round to the same values as on one device."""
    config = CONFIGS[name].replace(**SIZES)
    one = decoder(config, random(config), dtype)
    mesh = make_mesh()
    divided = shard(LanguageModel(one), mesh).decoder
    want, found = logits(one), logits(divided)
    assert divided.lhs_qtype == one.lhs_qtype == jnp.dtype(dtype)
    assert np.median(np.abs(found - want)) < 1e-5 * np.abs(want).max()
    assert np.abs(found - want).max() < 0.02 * np.abs(want).max()


def test_nonfinite_values_of_one_device_reach_all():
    mesh = make_mesh()
    division = Division(mesh)
    values = jnp.array([[1.0, jnp.nan, 2.0], [3.0, 1.0, jnp.inf]])
    whole = jax.shard_map(
        division.largest, mesh=mesh, in_specs=jax.P("model"), out_specs=jax.P("model")
    )(values)
    np.testing.assert_array_equal(whole, [[3, jnp.inf, jnp.inf]] * 2)


def test_a_model_generates():
    found = init(LLAMA, INT4.replace(group_size=32), lhs_qtype=jnp.int8)
    assert found.decoder.lhs_qtype == jnp.int8
    assert found.decoder.lhs_min_rows == 1
    x = jnp.zeros((1, 1, LLAMA.width))
    assert all(block.rounds(x) and block.fused(x) for block in found.decoder.blocks)
    assert len(generate(found, [3, 1, 4], max_new_tokens=4).tokens) == 4


def test_few_tokens_are_floats():
    """With fewer tokens than `lhs_min_rows`, results equal a model without `lhs_qtype`."""
    weights = random(LLAMA)
    floats = logits(decoder(LLAMA, weights, None))
    assert TOKENS.size == 24
    for rows in (24, 25):
        found = logits(decoder(LLAMA, weights, "int8", lhs_min_rows=rows))
        assert np.array_equal(found, floats) == (rows == 25)


def test_a_gpu_rounds_inputs_of_8_bit_products(monkeypatch):
    """The threshold depends on the formats of the weights."""
    weights = random(LLAMA)
    gpu = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr("jax.devices", lambda *_: [gpu])
    grouped = decoder(LLAMA, weights, "int8")
    assert grouped.lhs_min_rows == 192
    assert decoder(LLAMA, weights, None).lhs_min_rows == 1
    monkeypatch.setattr(
        "jaxlowbit._llm.decoder.least_rows",
        lambda dtype, weight: 32 + (weight.n == LLAMA.hidden),
    )
    assert grouped._rows_in_8_bits(None) == 33  # the maximum over all weights


# --- files and errors -----------------------------------------------------------------------------


def test_the_report_names_the_dtype(tmp_path):
    for package in ("gguf", "jinja2", "tokenizers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    from model_files import write_tiny

    loaded = load(write_tiny(tmp_path), lhs_qtype="int8", progress=False)
    chosen = {tensor.name: tensor.lhs_qtype for tensor in loaded.report.tensors}
    assert chosen["layers.0.q"] == chosen["layers.1.down"] == jnp.int8
    assert chosen["embedding"] is chosen["layers.0.attention_norm"] is None
    assert "int8 activations" in str(loaded.report)


WRONG = {
    "int4": (ValueError, "lhs_qtype is int4, but activations are quantized to int8 or"),
    3: (TypeError, "lhs_qtype is 3, which names no dtype"),
}


@pytest.mark.parametrize("value", WRONG)
def test_other_dtypes_raise(value):
    error, sentence = WRONG[value]
    with pytest.raises(error, match=f"^Decoder: {sentence}"):
        decoder(LLAMA, random(LLAMA), value)
    with pytest.raises(error, match=f"^init: {sentence}"):
        init(LLAMA, lhs_qtype=value)
    with pytest.raises(error, match=f"^load: {sentence}"):
        load("nowhere.gguf", lhs_qtype=value)


@pytest.mark.parametrize(("rows", "error"), [(0, ValueError), ("3", TypeError), (True, TypeError)])
def test_other_rows_raise(rows, error):
    sentence = f"lhs_min_rows is {rows!r}, but it must be a number of tokens from 1 on, or None"
    for caller, call in (
        ("Decoder", lambda: decoder(LLAMA, random(LLAMA), "int8", lhs_min_rows=rows)),
        ("init", lambda: init(LLAMA, lhs_min_rows=rows)),
        ("load", lambda: load("nowhere.gguf", lhs_min_rows=rows)),
    ):
        with pytest.raises(error, match=f"^{caller}: {sentence}"):
            call()


@pytest.mark.parametrize("name", ["init", "load"])
def test_the_command_passes_the_dtype_on(name, monkeypatch):
    given = []
    monkeypatch.setattr(command, name, lambda *_, **options: given.append(options))
    header = types.SimpleNamespace(config=command.SHAPES["llama3-8b"])
    monkeypatch.setattr(command, "open_file", lambda path: header)
    monkeypatch.setattr(command, "keep_programs", lambda: None)
    monkeypatch.setattr(command, "bench", lambda *_, **sizes: sys.exit())
    path = "llama3-8b" if name == "init" else "model.gguf"
    flags = ["--lhs-qtype", "float8_e4m3fn", "--lhs-min-rows", "3", "--cache-dtype", "int8"]
    with pytest.raises(SystemExit):
        main(["bench", path, *flags])
    assert [options["lhs_qtype"] for options in given] == ["float8_e4m3fn"]
    assert [options["lhs_min_rows"] for options in given] == [3]
    assert [options["cache_dtype"] for options in given] == ["int8"]


def test_the_command_raises_for_other_dtypes(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "llama3-8b", "--lhs-qtype", "int4"])
    assert "invalid choice: 'int4'" in capsys.readouterr().err
