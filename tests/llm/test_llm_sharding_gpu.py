"""A language model on several GPUs; `test_llm_sharding.py` covers all architectures on the CPU."""

import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import random
from flax import nnx
from helpers import call_names

from jaxlowbit import INT4
from jaxlowbit._llm import programs as loop
from jaxlowbit._llm import sharding
from jaxlowbit._llm.sampling import Sampling
from jaxlowbit._llm.structure import split
from jaxlowbit.llm import Config, Decoder, LanguageModel, generate, init, shard

pytestmark = pytest.mark.gpu
CONFIG = Config(
    "llama", layers=3, width=512, heads=8, kv_heads=4, head_size=128, hidden=1536, vocabulary=4224,
    context=1024,
)  # fmt: skip
MIXTURE = CONFIG.replace(
    architecture="qwen3_moe", hidden=384, experts=16, experts_per_token=4, qk_norm="head"
)
CONFIGS = {"dense": CONFIG, "mixture": MIXTURE}
PROMPTS = [
    np.random.default_rng(i).integers(0, 4224, size).tolist()
    for i, size in enumerate((40, 9, *range(5, 35)))
]
NEAR = 0.03  # effect of bfloat16 rounding, relative to the largest logit


@pytest.fixture(scope="module", params=[2, 4])
def mesh(request):
    count, devices = request.param, jax.devices()
    if len(devices) < count:
        pytest.skip(f"needs {count} GPUs, JAX sees {len(devices)}")
    return jax.make_mesh((count,), ("model",), devices=devices[:count])


def logits(decoder: Decoder, tokens: Any) -> np.ndarray:
    graph, state = nnx.split(decoder)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    return np.asarray(call(state, np.asarray(tokens, np.int32)))


def test_float32_gives_the_tokens_of_one_device(mesh):
    one = init(CONFIG, INT4, dtype=jnp.float32)
    found = generate(shard(one, mesh), PROMPTS[:2], max_new_tokens=24)
    want = generate(one, PROMPTS[:2], max_new_tokens=24)
    assert [x.tokens for x in found] == [x.tokens for x in want]


def test_every_device_finds_the_largest_logit(mesh):
    division, parts = sharding.Division.of("test", CONFIG, mesh, {}), mesh.size
    values = np.random.default_rng(0).normal(size=(32, 64 * parts)).astype(np.float32)
    expected = (37 * np.arange(32)) % (64 * parts)  # of all devices
    values[np.arange(32), expected] = 4 + np.arange(32) / 8
    find = functools.partial(division.argmax, columns=64 * parts)
    largest, column = jax.jit(lambda x: division.on_columns(find, x, jax.P()))(values)
    assert len(column.addressable_shards) == parts
    for part in column.addressable_shards:
        np.testing.assert_array_equal(part.data, expected)
    for part in largest.addressable_shards:
        np.testing.assert_array_equal(part.data, values.max(axis=1))


def check_tokens(two: LanguageModel, one: LanguageModel, prompts: list, which: set) -> None:
    """Each token's logit is the largest up to rounding, given the tokens before it."""
    results = generate(two, prompts, max_new_tokens=40)
    for i in which:
        prompt, result = prompts[i], results[i]
        assert len(result.tokens) == 40
        tokens = [[*prompt, *result.tokens]]
        rows, others = logits(one.decoder, tokens)[0], logits(two.decoder, tokens)[0]
        slack = NEAR * np.abs(rows).max()
        assert np.abs(rows - others).max() < slack
        rows = rows[len(prompt) - 1 : -1]
        drawn = rows[np.arange(len(rows)), result.tokens]
        assert (rows.max(axis=-1) - drawn).max() < 2 * slack


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_bfloat16_gives_the_tokens_of_one_device_but_for_rounding(batch, mesh):
    one = init(CONFIG, INT4, dtype=jnp.bfloat16)
    check_tokens(shard(one, mesh), one, PROMPTS[:batch], {0, batch // 2, batch - 1})


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        ("uint4", "bfloat16"),
        ("int8", "float16"),
        ("int3-g32-float", "bfloat16"),
        ("nf4", "float16"),
        ("nvfp4", "bfloat16"),
        ("mxfp8", "float16"),
    ],
)
def test_formats_whose_kernels_are_compiled_here(format, dtype, mesh):
    one = init(CONFIG, format, dtype=dtype)
    for batch in (1, 16):
        check_tokens(shard(one, mesh), one, PROMPTS[:batch], {0, batch - 1})


@pytest.mark.parametrize("batch", [1, 16])
def test_each_device_has_the_biases_and_sinks_of_its_heads(batch, mesh):
    config = CONFIG.replace(attention_bias=True, sinks=True, window=24)
    decoder = Decoder(config, random(config, INT4), dtype=jnp.bfloat16)
    two = shard(LanguageModel(decoder), mesh)
    result = generate(two, PROMPTS[:batch], max_new_tokens=24)[0]
    # Prompts are computed by XLA.
    rows = logits(decoder, [[*PROMPTS[0], *result.tokens]])[0, len(PROMPTS[0]) - 1 : -1]
    drawn = rows[np.arange(24), result.tokens]
    assert (rows.max(axis=-1) - drawn).max() < 2 * NEAR * np.abs(rows).max()


@pytest.mark.parametrize("name", CONFIGS)
def test_two_runs_give_the_same_bits(name, mesh):
    two = shard(init(CONFIGS[name], INT4, dtype=jnp.bfloat16), mesh)
    rows = [logits(two.decoder, [PROMPTS[0]]) for _ in range(2)]
    assert rows[0].tobytes() == rows[1].tobytes()


@pytest.mark.parametrize("name", CONFIGS)
def test_batches_in_turn_do_not_disturb_each_other(name, mesh):
    """Kernels count the exchanges of each row of a batch between devices."""
    two = shard(init(CONFIGS[name], INT4, dtype=jnp.bfloat16), mesh)
    found = [
        [x.tokens for x in generate(two, PROMPTS[:batch], max_new_tokens=20)]
        for batch in (2, 1, 17, 1, 2)
    ]
    assert found[0] == found[4]
    assert found[1] == found[3]


@pytest.mark.parametrize("batch, in_calls", [(1, True), (32, True), (33, False)])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_sends_sums_and_the_largest_logits_only(name, batch, in_calls, mesh):
    decoder = shard(LanguageModel(init(CONFIGS[name], INT4).decoder), mesh).decoder
    numbers = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
    logits = decoder.divided_logits(jnp.zeros((batch, 512), jnp.bfloat16))
    start = loop.State(decoder.make_cache(batch, 256), *decoder.replicate(numbers))
    ends, key = loop.Ends(jnp.zeros(0, jnp.int32), numbers[0]), jax.random.key(0)
    program = loop.decode.trace(*split(decoder), logits, start, np.int32(3), ends, key, Sampling())
    text = program.lower().compile().as_text() or ""
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    sent = collections.Counter(re.findall(rf"= .*? ({kinds})(?:-start)?\(", text))
    # For small M, kernels exchange partial sums inside the calls.
    assert sent == ({} if in_calls else {"all-reduce": 2 * CONFIG.layers + 1, "all-gather": 1})
    calls = call_names(text)
    assert calls.count("decode_blocks") == (1 if in_calls else 0)
    assert calls.count("addition") == (1 if in_calls else 0)  # of the largest logits
    assert not re.findall(rf"= .*u32\[.*? ({kinds})(?:-start)?\(", text), "words were sent"
