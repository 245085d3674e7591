"""Lowering of our attention kernel, without a GPU; `test_attend_gpu.py` runs it."""

import collections
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from decoders import CONFIGS, PARTS, TINY, random
from flax import nnx
from helpers import call_names, described

from jaxlowbit import INT8
from jaxlowbit._backends import cuda_attend, cuda_calls, extension
from jaxlowbit._backends.cuda_attend import Operands, Options
from jaxlowbit._backends.extension import ffi
from jaxlowbit._backends.target import Target
from jaxlowbit._composite import decode_block
from jaxlowbit._llm import attention
from jaxlowbit._llm.cache import make_cache
from jaxlowbit.llm import Config, Decoder, init, shard

BATCH, SLOTS, REACH = 2, 320, 256


def like(*shape, dtype="bfloat16") -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def lowered(
    batch=BATCH, heads=32, kv_heads=8, size=128, reach: int = REACH, window=None, **added: Any
):
    new, cache = like(batch, kv_heads, size), like(batch, SLOTS, kv_heads, size)
    angles, norm = like(batch, size // 2, dtype="float32"), like(size, dtype="float32")
    numbers = (like(*shape, dtype="int32") for shape in ((), (batch,), (batch, SLOTS)))
    query = like(batch, heads, size)
    operands = Operands(
        *(query, new, new, (angles, angles), (norm, norm), cache, cache, *numbers), **added
    )
    options = Options("halves", 1e-6, reach, window, 0.5)
    attend = jax.jit(lambda operands: cuda_attend.attend(operands, options), donate_argnums=0)
    program = attend.trace(operands)
    assert [x.shape for x in program.out_info] == [(batch, heads, size), cache.shape, cache.shape]
    return program.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_one_custom_call_writes_the_whole_cache(cuda):
    text = lowered()
    assert re.findall(r"custom_call @(\w+)", text) == ["jaxlowbit_sequence"]
    assert f"reach = {REACH} : i64" in text and "window = 0 : i64" in text
    assert "scale = 5.000000e-01 : f32" in text and "neighbours = false" in text
    assert f"schema = {extension.ffi.SCHEMA} : i64" in text
    assert "slice" not in text and f"tensor<{BATCH}x{REACH}x" not in text
    # The caches are donated; the query, the new token and the result have separate buffers.
    aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", text)
    assert aliases == [("1", "7"), ("2", "8")]
    assert text.count("optimization_barrier") == 4


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_window_and_all_slots_are_attributes(cuda):
    text = lowered(reach=SLOTS, window=100)
    assert f"reach = {SLOTS} : i64" in text and "window = 100 : i64" in text


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_biases_and_sinks_are_operands_only_if_they_are_there(cuda):
    def operands(text):
        return text.partition(" : (")[2].partition(") -> ")[0].count("tensor<")

    def call(**added):
        return next(line for line in lowered(**added).splitlines() if "custom_call" in line)

    plain = call()
    assert operands(plain) == 12 and "sinks" not in plain and "biases" not in plain
    biases = tuple(like(n * 128, dtype="float32") for n in (32, 8, 8))
    sinks = like(32, dtype="float32")
    one, other = call(biases=biases), call(sinks=sinks)
    assert operands(one) == 15 and "biases = true" in one and "sinks" not in one
    assert operands(other) == 13 and "sinks = true" in other and "biases" not in other
    # Weights in another dtype are converted.
    assert "tensor<32xbf16>) -> tensor<32xf32>" in lowered(sinks=like(32))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(("batch", "splits"), [(1, 8), (8, 8), (16, 4), (64, 4)])
def test_the_workspace_has_room_for_the_splits(cuda, batch, splits):
    """The number of splits fills a GPU, limited by the number of slots."""
    (found,) = re.findall(r"tensor<(\d+)xui8>", lowered(batch=batch).partition("custom_call")[2])[
        :1
    ]
    assert int(found) == 4 * batch * 32 * splits * (128 + 2)


@pytest.mark.parametrize(
    ("dtype", "heads", "size", "reason"),
    [
        ("float32", 32, 128, "bfloat16 or float16"),
        ("bfloat16", 32, 100, "multiple of 8 up to 256"),
        ("bfloat16", 32, 264, "multiple of 8 up to 256"),
        ("bfloat16", 136, 128, "up to 16 heads"),
        ("bfloat16", 32, 72, "multiple of 16 elements for a cache of int8"),
    ],
)
def test_unsupported_problems_have_a_reason(cuda, dtype, heads, size, reason):
    sizes = {"heads": heads, "kv_heads": 8, "head_size": size}
    found = cuda_attend.unsupported(jnp.dtype(dtype), **sizes, cache_dtype=jnp.dtype(jnp.int8))
    assert reason in (found or "")


def test_a_build_without_kernels_has_a_reason(monkeypatch):
    monkeypatch.setattr(extension, "UNAVAILABLE", {name: f"no {name}" for name in ("cpu", "cuda")})
    sizes = {"heads": 32, "kv_heads": 8, "head_size": 128}
    assert cuda_attend.unsupported(jnp.dtype("bfloat16"), **sizes) == "no cuda"
    dtype = jnp.dtype("bfloat16")
    assert not attention.native(dtype, **sizes, cache_dtype=dtype)


def decode_step_text(
    config,
    monkeypatch,
    cache_dtype: Any = None,
    devices: tuple[int, ...] = (),
    *,
    logits: bool = False,
) -> str:
    """The lowered text of a decode step for CUDA, on one device or on several that exchange; with
    or without its logits."""
    monkeypatch.setattr(attention, "choose", lambda *args, **sizes: "native")
    monkeypatch.setattr(cuda_calls, "exchanging", lambda *_: devices)
    model = init(config, INT8, dtype=jnp.bfloat16, cache_dtype=cache_dtype)
    if devices:
        mesh = jax.make_mesh((len(devices),), ("model",), devices=jax.devices()[: len(devices)])
        model = shard(model, mesh)
    decoder = model.decoder
    graph, state = nnx.split(decoder)
    cache = jax.eval_shape(lambda: make_cache(config, BATCH, SLOTS, decoder.cache_dtype))

    def forward(state, tokens, cache):
        decoder = nnx.merge(graph, state)
        if logits:
            return decoder.decode(tokens[:, 0], tokens[:, 0], cache)
        return decoder.forward(tokens, tokens, cache, reach=REACH)

    program = jax.jit(forward).trace(state, like(BATCH, 1, dtype="int32"), cache)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert logits or f"tensor<{BATCH}x{REACH}x" not in text
    return text


def decode_step(config, monkeypatch):
    """The calls of a decode step."""
    return collections.Counter(call_names(decode_step_text(config, monkeypatch)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {"decode_blocks": 1}),
        ("qwen3", {"decode_blocks": 1}),
        ("qwen2", {"decode_blocks": 1}),  # biases of queries, keys and values
    ],
)
def test_blocks_of_a_decode_step_are_one_call(name, expected, cuda, monkeypatch):
    assert decode_step(CONFIGS[name].replace(layers=3), monkeypatch) == expected


@pytest.mark.parametrize("devices", [(), (0, 1)])
@pytest.mark.parametrize("tied_head", [True, False])
def test_one_call_gives_the_logits(devices, tied_head, cuda, monkeypatch):
    """It adds the embeddings of all devices, and multiplies by the head."""
    config = Config("llama", **TINY).replace(tied_head=tied_head, head_size=64, hidden=128)
    text = decode_step_text(config, monkeypatch, devices=devices, logits=True)
    (call,) = described(text)
    assert call.name == "decode_blocks"
    columns = -(-config.vocabulary // 128) * 64 if devices else config.vocabulary
    assert call.results.count(f"tensor<1x{BATCH}x{columns}xf32>") == 1
    (line,) = (line for line in text.splitlines() if "decode_blocks" in line)
    first, *_ = described(re.sub(r"\b(products|steps)\.0\b", r"\1", line))
    normalize, multiply = first.steps
    assert normalize["x"] == 0 and normalize["addend"] > 0 and multiply["count"] == 3


def test_a_float_head_is_not_in_the_call(cuda, monkeypatch):
    config = Config("llama", **TINY).replace(tied_head=False)
    weights: dict[str, Any] = random(config, INT8)
    weights["head"] = jnp.zeros(weights["head"].shape, jnp.bfloat16)
    monkeypatch.setattr(attention, "choose", lambda *args, **sizes: "native")
    decoder = Decoder(config, weights)
    cache = decoder.make_cache(BATCH, SLOTS)
    tokens = jnp.zeros(BATCH, jnp.int32)
    program = jax.jit(lambda cache: decoder.decode(tokens, tokens, cache)).trace(cache)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert call_names(text) == ["decode_blocks"]
    assert len(re.findall(r"stablehlo.dot_general", text)) == 1


MIXTRAL = Config("mixtral", **TINY, experts=8, experts_per_token=2)
MIXTURES = {
    "mixtral": MIXTRAL,
    "biases": MIXTRAL.replace(router_bias=True, mlp_bias=True, normalized_experts=False),
    "qwen3_moe": Config("qwen3_moe", **TINY, experts=32, experts_per_token=8, qk_norm="head"),
    "gpt_oss": MIXTRAL.replace(
        architecture="gpt_oss", attention_bias=True, output_bias=True, mlp_bias=True,
        router_bias=True, sinks=True, activation="gpt_oss", window=7,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_blocks_with_experts_are_one_call(name, cuda, monkeypatch):
    config = MIXTURES[name]
    windows = {"window_layers": (True, False, True)} if config.window else {}
    calls = decode_step(config.replace(layers=3, **windows), monkeypatch)
    assert calls == {"decode_blocks": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"experts": 6},
        {"experts": 64, "experts_per_token": 33},
        {"residual_scale": 0.5},
        {"dense_hidden": 96, "norm_placement": "pre_and_post"},
    ],
)
def test_other_blocks_with_experts_are_several_calls(changes, cuda, monkeypatch):
    calls = decode_step(MIXTRAL.replace(**changes), monkeypatch)
    assert calls["quantized_moe"] == MIXTRAL.layers and "decode_block" not in " ".join(calls)


def test_experts_are_in_one_call_on_hopper(cuda, monkeypatch):
    for capability, count in ((90, 0), (80, 1), (100, 1)):
        target = Target("cuda", frozenset({capability}))
        monkeypatch.setattr(decode_block, "local_gpus", lambda target=target: target)
        monkeypatch.setattr(Target, "unfit", None)
        assert decode_step(MIXTRAL.replace(layers=1), monkeypatch)["quantized_moe"] == count


def test_steps_of_a_block_with_experts(cuda, monkeypatch):
    """Router and experts read the normalized rows, and the residual is added to their sum."""
    config = MIXTURES["biases"].replace(layers=1)
    text = decode_step_text(config, monkeypatch)
    (call,) = described(re.sub(r"\b(products|steps)\.1\b", r"\1", text))  # 0: the first products
    assert call.caller == "decode_block"
    names = [
        "attend",
        "multiply",
        "normalize",
        "route",
        "group",
        "multiply",
        "multiply",
        "combine",
        "normalize",
    ]
    number = ffi.STEP_FIELDS.index("kind")
    assert [step["kind"] for step in call.steps] == [ffi.step(kind=x)[number] for x in names]
    _, _, before, route, group, *_, combine, after = call.steps
    out, gate_up, down = call.products
    assert before["out"] == route["x"] == group["x"] and before["addend"] == out["out_at"]
    assert route["expert"] == group["expert"] and route["out"] == combine["scales"]
    assert route["addend"] > 0 and not route["normalized"] and group["offset"] == 0
    assert gate_up["bias_at"] > 0 and down["bias_at"] > 0 and out["bias_at"] == 0
    assert combine["out"] == after["addend"] and before["total"] == after["x"]


@pytest.mark.parametrize("name", MIXTURES)
def test_blocks_with_experts_of_two_devices_are_one_call(name, cuda, monkeypatch):
    """Each device multiplies by its experts, and the kernels add their sums."""
    config = MIXTURES[name].replace(layers=3, head_size=64)
    windows = {"window_layers": (True, False, True)} if config.window else {}
    text = decode_step_text(config.replace(**windows), monkeypatch, devices=(0, 1))
    calls = collections.Counter(call_names(text))
    assert calls["decode_blocks"] == 1 and "quantized_moe" not in calls
    call = next(line for line in text.splitlines() if "decode_blocks" in line)
    assert "devices = dense<[0, 1]> : tensor<2xi64>" in call
    assert call.count("tensor<1xi32>") >= 3  # each layer's first expert


BIASED = CONFIGS["qwen2"].replace(layers=3, output_bias=True, sinks=True, window=7)


@pytest.mark.parametrize(
    ("config", "decode_blocks", "others"),
    [
        (BIASED, 1, {}),
        (BIASED.replace(qk_norm="head"), 1, {}),
        # XLA adds biases before the norms of all heads together: a call for each block.
        (BIASED.replace(qk_norm="all"), 0, {"decode_block": 3}),
        (BIASED.replace(mlp_bias=True), 0, {"attend": 3}),
    ],
)
def test_biases_and_sinks_stay_in_the_call(config, decode_blocks, others, cuda, monkeypatch):
    calls = decode_step(config, monkeypatch)
    assert calls["decode_blocks"] == decode_blocks
    assert others.items() <= calls.items()


def test_biases_are_added_once(cuda, monkeypatch):
    """By the kernel: XLA adds nothing to queries, keys or values."""

    def added(config):
        text = decode_step_text(config, monkeypatch)
        return text, re.findall(r"stablehlo.add .*: tensor<(.*xbf16)>", text)

    text, found = added(BIASED)
    call = next(line for line in text.splitlines() if "decode_blocks" in line)
    assert "biases.1 = true" in call and "sinks.1 = true" in call  # 0: the first products
    assert not found and len(added(BIASED.replace(qk_norm="all"))[1]) == 9


def test_gpt_oss_attends_in_our_kernel(cuda, monkeypatch):
    config = Config(
        "gpt_oss", **TINY, experts=4, experts_per_token=2, attention_bias=True, output_bias=True,
        mlp_bias=True, router_bias=True, sinks=True, activation="gpt_oss", window=7,
        window_layers=(True, False),
    )  # fmt: skip
    text = decode_step_text(config, monkeypatch)
    assert "biases = true" in text and "sinks = true" in text
    scores = re.findall(r"stablehlo.exponential .*: tensor<(.*)xf32>", text)
    assert not [x for x in scores if str(REACH) in x.split("x")], scores  # only of the router


def test_sinks_choose_an_implementation_that_has_them():
    sizes: dict[str, Any] = {"length": 4096, "head_size": 64, "batch": 8}
    bfloat16 = jnp.dtype("bfloat16")

    def choose(platform, queries, sinks, **options):
        own = sizes | options
        return attention.choose(platform, bfloat16, queries=queries, sinks=sinks, **own)

    assert choose("gpu", 1, True, native=True) == choose("gpu", 1, False, native=True) == "native"
    assert (choose("gpu", 1, True), choose("gpu", 1, False)) == ("xla", "cudnn")
    assert choose("gpu", 9, True, native=True) == "xla"
    assert choose("gpu", 1, True, native=True, plain=True) == "xla"
    assert choose("cpu", 1, True, native=True, cached=True) == "xla"


@pytest.mark.parametrize("cache_dtype", [None, jnp.int8])
def test_blocks_in_one_call_update_their_caches(cache_dtype, cuda, monkeypatch):
    """Windows may differ. A cache in 8 bits has scales."""
    layers = 4
    windows = tuple(i % 2 == 0 for i in range(layers))
    config = CONFIGS["llama"].replace(layers=layers, window=7, window_layers=windows)
    text = decode_step_text(config, monkeypatch, cache_dtype)
    call = next(line for line in text.splitlines() if "decode_blocks" in line)
    assert "window.1 = 7" in call and "window.2 = 0" in call  # 0: the first products
    aliases = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", call)
    types = re.findall(r"tensor<([^>]*)>", call.rpartition(" : (")[2].partition(") -> ")[0])
    updated = collections.Counter(types[int(number)] for _, number in aliases)
    shape = f"{BATCH}x{SLOTS}x{config.kv_heads}"
    kind = "bf16" if cache_dtype is None else "i8"
    expected = {f"{shape}x{config.head_size}x{kind}": 2 * layers}
    assert updated == expected | ({} if cache_dtype is None else {f"{shape}xf32": 2 * layers})


def test_blocks_that_are_not_fused_attend_in_place(cuda, monkeypatch):
    calls = decode_step(CONFIGS["gemma3"], monkeypatch)
    assert calls["attend"] == CONFIGS["gemma3"].layers and calls["decode_blocks"] == 0


def test_unsupported_parts_are_composed(cuda, monkeypatch):
    """Caps of scores and rotations of a part of a head; other parts attend in place."""
    config = PARTS["olmo3"].replace(rope_size=None, attention_softcap=None)
    calls = decode_step(config, monkeypatch)
    assert calls["attend"] == config.layers and calls["decode_blocks"] == 0
    given = []

    def choose(*args, native, plain, **sizes):
        given.append((native, plain))
        return "xla"

    monkeypatch.setattr(attention, "choose", choose)
    monkeypatch.setattr(attention, "native", lambda *_: True)
    for parts in (PARTS["olmo3"], PARTS["granite"], config):
        decoder = init(parts, INT8, dtype=jnp.bfloat16).decoder
        jax.eval_shape(lambda decoder=decoder: decoder(jnp.zeros((1, 1), jnp.int32)))
    # For layers without and with a window.
    assert given[::2] == given[1::2] == [(False, True), (False, False), (True, False)]


@pytest.mark.parametrize("window", [None, 5])
def test_xla_reads_only_the_first_slots(window):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, length, heads, 16))
        for key, length, heads in zip(keys, (1, 12, 12), (4, 2, 2), strict=True)
    )
    held = jnp.broadcast_to(jnp.arange(12), (2, 12))
    positions = jnp.array([[7], [3]])

    def attend(k, v, held, reach=None):
        return attention.attend(
            *(q, k, v, positions, held),
            window=window,
            scale=0.25,
            implementation="xla",
            reach=reach,
        )

    expected = attend(k[:, :8], v[:, :8], held[:, :8])
    assert jnp.array_equal(attend(k.at[:, 8:].set(jnp.nan), v, held, reach=8), expected)
