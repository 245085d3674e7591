"""Method of the benchmark: its clock, weights, check and shapes."""

import time

import contenders
import jax
import jax.numpy as jnp
import numpy as np
import peers
import peers.humming
import peers.torch
import pytest
import shapes
import timing
import weights

import jaxlowbit
from jaxlowbit import Format


@pytest.mark.parametrize("name", ["definition", "pallas", "xla", "xla-int4", "xla-int4-grouped"])
def test_contenders_are_right(name):
    if name == "pallas" and jax.default_backend() == "gpu":
        pytest.skip("the Pallas kernel is for TPUs, and interpreted on the CPU")
    check(contenders.table()[name], weights.parse_format("int4-g128"))


@pytest.mark.parametrize("format", ["nf4", "e4m3", "mxfp4", "nvfp4"])
def test_numbers_are_right(format):
    for name in ("definition", "xla"):
        check(contenders.table()[name], weights.parse_format(format))


@pytest.mark.parametrize(
    "format", ["int5-g128", "int4-g64-integer", "nf4", "e4m3", "mxfp4", "nvfp4"]
)
def test_weights_of_pytorch_are_the_same(format):
    torch = pytest.importorskip("torch", reason="PyTorch is no dependency")
    format = weights.parse_format(format)
    codes = weights.random_codes(jax.random.key(0), 192, 256, format, "bfloat16")
    expected = weights.dequantize(codes, format)
    found = peers.torch.dequantize(jax.tree.map(torch.from_dlpack, codes), format)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_formats_of_other_packages(monkeypatch):
    monkeypatch.setattr(peers, "missing", lambda peer: None)

    def taken(name):
        peer = peers.PEERS[name]
        asked = ["int4-g128", "int5-g128", "nf4", "e4m3", "mxfp4", "nvfp4", "e2m1-g64"]
        formats = map(weights.parse_format, asked)
        taken = [peers.unsupported(peer, format, "bfloat16") is None for format in formats]
        return [name for name, is_taken in zip(asked, taken, strict=True) if is_taken]

    assert taken("bitsandbytes") == ["int4-g128", "nf4"]
    assert taken("gemlite") == ["int4-g128", "e4m3", "mxfp4", "nvfp4"]
    assert taken("humming") == ["int4-g128", "int5-g128", "e4m3", "mxfp4", "nvfp4", "e2m1-g64"]
    assert taken("fbgemm") == ["e4m3"]
    assert taken("marlin") == taken("tinygemm") == taken("qwix") == ["int4-g128"]
    assert len(taken("cublas")) == 7


def test_names_of_humming():
    named = peers.humming.weight_config(weights.parse_format("nvfp4"))
    assert named.pop("has_zero_point") is False
    assert named == {
        "dtype": "float4e2m1",
        "group_size": 16,
        "scale_dtype": "float8e4m3",
        "scale_2_type": "tensor",
    }
    named = peers.humming.weight_config(weights.parse_format("e4m3"))
    assert (named["dtype"], named["group_size"]) == ("float8e4m3", 0)


@pytest.mark.parametrize("format", ["int4-g128", "int8"])
def test_qwix_is_right(format):
    pytest.importorskip("qwix", reason="the other package that runs on a CPU")
    check(contenders.table()["qwix"], weights.parse_format(format))


def check(contender, format):
    assert contender.unsupported(format, "bfloat16") is None
    codes = weights.random_codes(jax.random.key(0), 192, 256, format, "bfloat16")
    x = jax.random.normal(jax.random.key(1), (3, 256), jnp.bfloat16)
    product = jax.jit(contender.call)(x, contender.make(codes, format))
    assert 0 < weights.error_over_bound(product, x, weights.dequantize(codes, format)) <= 1


@pytest.mark.parametrize("wide", [16, 24])
def test_the_time_of_a_call_excludes_other_calls(monkeypatch, wide):
    """The measured time of a sleeping call is its sleep, with and without links in the chain."""
    monkeypatch.setattr(timing, "BLOCKS", 3)

    def sleep(x):
        time.sleep(0.04)
        return np.ones((1, wide), np.float32)

    def call(x, weight):
        return jax.pure_callback(sleep, jax.ShapeDtypeStruct((1, wide), jnp.float32), x)

    found = timing.microseconds_per_call(call, jnp.ones((1, 16)), [None], 1)
    assert 36000 < found.median < 56000


def test_a_host_that_falls_behind_gets_longer_programs(monkeypatch):
    monkeypatch.setattr(timing, "BLOCKS", 3)
    monkeypatch.setattr(timing, "_runs_ahead", lambda x: True)
    monkeypatch.setattr(timing, "MOST_CALLS", 8)

    def traced(share):
        monkeypatch.setattr(timing, "HOST_SHARE", share)
        count = 0

        def call(x, weight):
            nonlocal count
            count += 1
            return x + weight

        timing.microseconds_per_call(call, jnp.ones((1, 16)), [jnp.ones((1, 16))], 2)
        return count

    # Tracing also finds the shape of the result, once or for each number of calls.
    assert 2 + 4 < traced(2) < 2 + 4 + 8  # the host's share is at most 1
    assert traced(0) > 2 + 4 + 8 + 16


def test_summary():
    found = timing.summary([5e-6, 1e-6, 2e-6, 4e-6, 3e-6])
    assert found.median == pytest.approx(3)
    assert found.quartiles == pytest.approx((2, 4))


@pytest.mark.parametrize(
    "text",
    [
        "int4-g128-integer",
        "int3-g48-float",
        "int8",
        "nf4",
        "e4m3",
        "nvfp4",
        "mxfp4",
        "int3-g48-e8m0",
    ],
)
def test_codes_decode_as_in_the_package(text):
    format = weights.parse_format(text)
    assert weights.name(format) == text
    codes = weights.random_codes(jax.random.key(0), 192, 256, format, "bfloat16")
    floats = np.asarray(weights.dequantize(codes, format))
    packed = contenders.quantized(codes, format)
    np.testing.assert_allclose(packed.dequantize(jnp.float32), floats, rtol=1e-6, atol=1e-8)
    version = 4
    assert weights.num_bytes(192, 256, format, "bfloat16") == packed.nbytes - version
    # Chains of products keep their magnitude.
    assert abs(floats.mean()) < 0.1 * floats.std()
    size = (floats**2).mean() * 256
    if format.scale == "e8m0":
        # Exponents are off by -1, 0 or 1 from the nearest, which is off by at most half a power:
        # the mean of 1/4, 1 and 4, times 1/2 to 2.
        assert 0.85 * 1.75 / 2 < size < 1.15 * 1.75 * 2
    else:
        assert size == pytest.approx(1, rel=0.15)


def test_parse_format():
    assert weights.parse_format("int5-g16-float") == Format(5, 16, "float")
    assert weights.parse_format("int4-g128-integer") == jaxlowbit.UINT4
    assert weights.parse_format("int8") == jaxlowbit.INT8
    with pytest.raises(ValueError, match="has integer scales"):
        weights.parse_format("int4-int8")


def test_error_over_bound_sees_one_element():
    x = jax.random.normal(jax.random.key(0), (40, 1024), jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(1), (1024, 128), jnp.float32).astype(jnp.bfloat16)
    right = x @ weight
    assert 0 < weights.error_over_bound(right, x, weight) < 0.5
    worst = jnp.unravel_index(jnp.abs(right).argmax(), right.shape)
    assert weights.error_over_bound(right.at[worst].set(0), x, weight) > 1
    assert weights.error_over_bound(right.at[0, 0].set(jnp.nan), x, weight) == np.inf


# Layers, vocabulary, whether embeddings are tied, and the published number of parameters.
PUBLISHED = {
    "mistral-7b": (32, 32000, False, 7.24e9),
    "qwen2.5-7b": (28, 152064, False, 7.62e9),
    "llama3-8b": (32, 128256, False, 8.03e9),
    "gemma2-27b": (46, 256000, True, 27.2e9),
    "qwen2.5-32b": (64, 152064, False, 32.8e9),
    "llama3-70b": (80, 128256, False, 70.6e9),
    "qwen2.5-72b": (80, 152064, False, 72.7e9),
    "llama3-405b": (126, 128256, False, 405.9e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_add_up_to_the_model(name):
    layers, vocabulary, tied, published = PUBLISHED[name]
    size = sum(shape.n * shape.k for shape in shapes.find(name))
    embeddings = (1 if tied else 2) * vocabulary * shapes.MODELS[name].hidden
    assert layers * size + embeddings == pytest.approx(published, rel=0.005)


def test_parts_add_up_to_layers():
    whole = {shape.name: shape for shape in shapes.find("llama3-70b")}
    parts = shapes.find("llama3-70b/tp4")
    assert len(parts) == len(whole) == 4
    for part in parts:
        layer = whole[part.name.removesuffix("/tp4")]
        assert part.n * part.k * 4 == layer.n * layer.k
    assert shapes.find("llama3-70b/down/tp4") == [("llama3-70b/down/tp4", 8192, 7168)]
    assert shapes.find("28672x8192") == [("28672x8192", 28672, 8192)]


def test_names_of_shapes_are_found():
    for name in shapes.SHAPES:
        assert [shape.name for shape in shapes.find(name)] == [name]
    assert all(len(shapes.find(name)) >= 4 for name in {n.split("/")[0] for n in shapes.SHAPES})


def test_sets_of_shapes():
    sizes = {name: [shape[1:] for shape in shapes.find(name)] for name in shapes.SETS}
    assert {name: len(found) for name, found in sizes.items()} == {
        "standard": 5,
        "decode": 8,
        "unseen": 40,
    }
    everything = [size for found in sizes.values() for size in found]
    assert len(set(everything)) == len(everything)  # "unseen" must not repeat other sizes
    assert {n for n, _ in sizes["unseen"]} >= {1024, 1536, 10944, 7392, 5504, 1408}
    assert any(k % 128 == 64 for _, k in sizes["unseen"])
