"""Layers of a decode step in one launch each (`cuda/kernels/sm90_stream/walk.h`) against separate
kernels and exact sums."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_problems import uniform
from helpers import dequantize

from jaxlowbit import INT4
from jaxlowbit._backends.cuda_attend import Operands, Options
from jaxlowbit._backends.cuda_calls import DecodeLayer
from jaxlowbit._backends.extension import ffi
from jaxlowbit._composite import decode_block
from jaxlowbit._llm.cache import make_cache
from jaxlowbit._llm.random_weights import random_weights
from jaxlowbit.llm import Config, Decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hasattr(ffi, "walk_count"), reason="the module has no CUDA kernels"),
]

SIZES: dict[str, Any] = {
    "layers": 5, "width": 2048, "heads": 16, "kv_heads": 4, "head_size": 128, "hidden": 4096,
    "vocabulary": 160, "context": 256,
}  # fmt: skip
MODELS = {
    "llama": Config("llama", **SIZES, rope_pairs="neighbours"),
    "mistral": Config("mistral", **SIZES, window=7),
    "qwen2": Config("qwen2", **SIZES, attention_bias=True),
    # Products of all heads are wider than x.
    "qwen3": Config("qwen3", **SIZES, qk_norm="head").replace(width=1024, hidden=3072),
}
GRAPHS = {"xla_gpu_graph_min_graph_size": 1}


@pytest.fixture(autouse=True)
def mode():
    yield ffi.set_walk
    ffi.set_walk("auto")


def decoder_of(config: Config) -> Decoder:
    weights = random_weights(config, INT4)
    rng = np.random.default_rng(0)
    weights = {
        name: jnp.asarray(1 + 0.2 * rng.normal(size=x.shape), jnp.bfloat16)
        if name.endswith("norm")
        else jnp.asarray(0.2 * rng.normal(size=x.shape), jnp.bfloat16)
        if name.endswith("bias")
        else x
        for name, x in weights.items()
    }
    return Decoder(config, weights, dtype=jnp.bfloat16)


def program_of(decoder: Decoder, batch: int, mode: str) -> Any:
    """A step, and the number of layers that are walks when it first runs."""

    @functools.partial(jax.jit, donate_argnums=2, compiler_options=GRAPHS)
    def step(token, position, cache):
        x, cache = decoder.forward(token, position, cache)
        return decoder.logits(x), cache

    cache, at = make_cache(decoder.config, batch, 256, jnp.bfloat16), jnp.zeros((batch, 1), int)
    ffi.set_walk(mode)
    before = ffi.walk_count()
    jax.block_until_ready(step(at, at, cache))
    return step, ffi.walk_count() - before


def logits_of(step: Any, config: Config, batch: int, steps: int) -> np.ndarray:
    cache, found = make_cache(config, batch, 256, jnp.bfloat16), []
    for i in range(steps):
        token = (3 * i + jnp.arange(batch)[:, None]) % config.vocabulary
        out, cache = step(token, jnp.full((batch, 1), i), cache)
        found.append(out)
    return np.stack(jax.device_get(found)).astype(np.float64)[:, :, 0]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_decoder_gives_the_tokens_of_separate_kernels(name, batch):
    config = MODELS[name]
    decoder = decoder_of(config)
    walks, count = program_of(decoder, batch, "always")
    found = logits_of(walks, config, batch, 64)
    assert count > 0 and count % (config.layers - 1) == 0
    separate, count = program_of(decoder, batch, "never")
    assert count == 0
    wanted = logits_of(separate, config, batch, 64)
    error = np.abs(found - wanted).max()
    assert error < 0.05 * np.abs(wanted).max()
    # Equal tokens, unless two are closer than the error.
    best = np.sort(wanted, axis=-1)[..., -2:]
    clear = best[..., 1] - best[..., 0] > 2 * error
    assert clear.any()
    np.testing.assert_array_equal(
        found.argmax(-1)[clear], wanted.argmax(-1)[clear], f"error {error}"
    )


def test_more_rows_and_other_formats_remain_separate_kernels():
    decoder = decoder_of(MODELS["llama"])
    assert program_of(decoder, 3, "always")[1] == 0
    small = MODELS["llama"].replace(width=512, hidden=1024, heads=4)
    assert program_of(decoder_of(small), 1, "always")[1] == 0
    assert program_of(decoder, 1, "auto")[1] == 0  # of small layers


@pytest.mark.parametrize("batch", [1, 2])
def test_a_thousand_replays_repeat_their_bits(batch):
    config = MODELS["llama"]
    decoder = decoder_of(config)
    ffi.set_walk("always")

    @functools.partial(jax.jit, compiler_options=GRAPHS)
    def step(token, position, cache):
        x, cache = decoder.forward(token, position, cache)
        return decoder.logits(x), [x for x in jax.tree.leaves(cache) if x.ndim == 4]

    cache = make_cache(config, batch, 256, jnp.bfloat16)
    token, position = jnp.full((batch, 1), 5), jnp.zeros((batch, 1), jnp.int32)
    before = ffi.walk_count()
    one = jax.device_get(step(token, position, cache))
    assert ffi.walk_count() > before
    compare = jax.jit(
        lambda a, b: jnp.array(
            [
                (x.view(jnp.uint16) == y.view(jnp.uint16)).all()
                if x.dtype == jnp.bfloat16
                else (x == y).all()
                for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
            ]
        ).all()
    )
    equal = [compare(step(token, position, cache), one) for _ in range(1000)]
    assert np.all(jax.device_get(equal))


def test_buffers_move_between_replays():
    """Results of replays stay alive, so that each run gets different buffers."""
    config = MODELS["llama"]
    decoder = decoder_of(config)
    ffi.set_walk("always")

    @functools.partial(jax.jit, compiler_options=GRAPHS)
    def step(token, position, cache):
        x, cache = decoder.forward(token, position, cache)
        return decoder.logits(x), cache

    cache, kept = make_cache(config, 1, 256, jnp.bfloat16), []
    for i in range(40):
        token = jnp.full((1, 1), i % 4)
        out, moved = step(token, jnp.zeros((1, 1), jnp.int32), cache)
        kept.append((np.asarray(out), moved, jnp.zeros(1000 * (i % 5 + 1))))
    for i, (out, _, _) in enumerate(kept):
        assert out.tobytes() == kept[i % 4][0].tobytes()
    assert kept[0][0].tobytes() != kept[1][0].tobytes()


# --- against exact sums ---------------------------------------------------------------------------

HEAD, KV_HEADS = 128, 4


def exact_layer(attended, x, norms, o, pair, down, following):
    """The following products of a layer in float64."""

    def normalized(x, norm):
        factor = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)
        return x / factor * np.asarray(norm).astype(np.float64)[None]

    gate, up = dequantize(pair).value
    x = x + attended @ dequantize(o).value
    h = normalized(x, norms[0])
    gated = h @ gate
    x = x + (gated / (1 + np.exp(-gated)) * (h @ up)) @ dequantize(down).value
    return [normalized(x, norms[1]) @ dequantize(weight).value for weight in following]


def two_layers(mode, operands, norms, weights, x):
    """Keys and values at slot 0 of the second layer; only the first layer can be a walk."""
    ffi.set_walk(mode)
    attending = Options("halves", 1e-5, 64, None, HEAD**-0.5)

    @jax.jit
    def program(x, operands):
        layers = [
            DecodeLayer(operands, attending, norms[0], norms[1], weights),
            DecodeLayer(operands, attending, norms[0], None, weights[:3]),
        ]
        return decode_block.decode_layers(layers, x, activation="silu", epsilon=1e-5)

    before = ffi.walk_count()
    caches, _, _ = jax.block_until_ready(program(x, operands))
    assert (ffi.walk_count() > before) == (mode == "always")
    return [np.asarray(held[:, 0]).astype(np.float64) for held in caches[1]]


@pytest.mark.parametrize("norm_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("width", "heads", "hidden"), [(2048, 16, 4096), (1024, 16, 3072), (4096, 32, 6144)]
)
def test_errors_are_those_of_separate_kernels(width, heads, hidden, rows, norm_dtype):
    """Attention to a single position returns its values, so a layer can be computed exactly; the
    cache of the next one has its keys, which position 0 does not rotate, and values."""
    wide, kv = heads * HEAD, KV_HEADS * HEAD
    o, pair, down = uniform(wide, width), uniform(width, hidden, stack=(2,)), uniform(hidden, width)
    following = [uniform(width, n, seed=n + i) for i, n in enumerate((wide, kv, kv))]
    rng = np.random.default_rng(rows)

    def random(*shape, dtype="bfloat16"):
        return jnp.asarray(rng.normal(size=shape).astype(np.float32)).astype(dtype)

    norms = 1 + 0.2 * random(2, width, dtype=norm_dtype)
    x, query = random(rows, width), random(rows, heads, HEAD)
    key, value = random(rows, KV_HEADS, HEAD), random(rows, KV_HEADS, HEAD)
    cache = jnp.zeros((rows, 64, KV_HEADS, HEAD), jnp.bfloat16)
    turn = jnp.ones((rows, HEAD // 2)), jnp.zeros((rows, HEAD // 2))
    position = jnp.zeros(rows, jnp.int32)
    positions = jnp.full((rows, 64), -1, jnp.int32).at[:, 0].set(0)
    numbers = jnp.int32(0), position, positions
    operands = Operands(query, key, value, turn, None, cache, cache + 0, *numbers)
    attended = np.repeat(np.asarray(value).astype(np.float64), heads // KV_HEADS, axis=1)
    rows64 = attended.reshape(rows, wide), np.asarray(x).astype(np.float64)
    exact = exact_layer(*rows64, norms, o, pair, down, following)
    weights = [o, pair, down, *following]
    walk, separate = (two_layers(mode, operands, norms, weights, x) for mode in ("always", "never"))
    for found, other, want in zip(walk, separate, exact[1:], strict=True):
        want = want.reshape(found.shape)
        ours, theirs = np.abs(found - want), np.abs(other - want)
        assert np.sqrt(np.mean(ours**2)) <= 1.2 * np.sqrt(np.mean(theirs**2))
        assert ours.max() <= 1.5 * theirs.max()
        assert ours.max() <= 0.02 * np.abs(want).max()
