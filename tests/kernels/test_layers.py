"""Calls joined to one, run by the CPU handler; a decoder with its blocks in one call."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import CONFIGS, TINY
from jax import lax

from jaxlowbit import INT8, Format, quantize, quantized_moe
from jaxlowbit._backends import cuda_attend
from jaxlowbit._backends.block import add_block
from jaxlowbit._backends.call import Call, stored_weight
from jaxlowbit._backends.layers import Layer, run_layers
from jaxlowbit._composite import decode_block
from jaxlowbit._composite.block import quantized_block
from jaxlowbit._composite.normalized import normalized_matmuls
from jaxlowbit._composite.rms_norm import rms_norm
from jaxlowbit._llm import attention, block_steps, experts, rope
from jaxlowbit._llm.cache import make_cache
from jaxlowbit._matmul.api import quantized_matmul
from jaxlowbit.llm import Config, init

D, HIDDEN = 64, 128
INT4_G32 = Format(4, group_size=32)


def normal(*shape, seed, dtype="float32"):
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jnp.asarray(values).astype(dtype)


def block_weights(seed, format):
    shapes = (D, D), (2, D, HIDDEN), (HIDDEN, D), *[(D, D)] * 3
    return [quantize(normal(*shape, seed=seed + i) / 8, format) for i, shape in enumerate(shapes)]


def block_call(x, residual, weights):
    calls = Call("blocks")
    norm = jnp.ones(D, jnp.float32)
    add_block(
        *(calls, calls.operand(x), residual, norm, norm, weights),
        read=lambda weight: stored_weight(weight, weight.scale.dtype),
        activation="silu",
    )
    return calls


def test_joined_calls_give_the_bits_of_separate_calls():
    """Blocks of three formats; each reads a product and the residual of the block before."""
    formats = [INT4_G32, INT4_G32, INT8, INT4_G32, Format(4, group_size=32, zero="float")]
    x, residual = normal(1, 3, D, seed=0), normal(1, 3, D, seed=1)
    epsilon: dict[str, Any] = {"epsilon": np.float32(1e-5)}
    layers, want, y, products = [], [], residual, [x]
    for i, format in enumerate(formats):
        weights = block_weights(10 * i, format)
        calls = block_call(x, residual, weights)
        links = {1: -2, calls.place_of(residual): -1} if i > 0 else {}
        layers.append(Layer(calls, links, attributes=epsilon))
        own = block_call(products[0], y, weights)
        y, *products = own.run(workspace=False, **epsilon)[:4]
        want.append([y, *products])
    found = jax.jit(lambda: run_layers(layers))()
    assert not any(found[:-1])
    got = [found[-1][place] for place in (-1, -2, -3, -4)]
    for one, other in zip(got, want[-1], strict=True):
        assert jnp.array_equal(one, other)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([0, 1], "ends within a layer"),
        ([1, 0, 0], "has a layer of kind 1 with 0 operands"),
        ([0, 9, 0, 1], "has a layer of kind 0 with 9 operands"),
        ([0, 1, 1, 9, -1], "has the place 9"),
        ([0, 1, 1, 1, 1], "has the place 1"),
    ],
)
def test_wrong_layers_raise(numbers, message):
    call = jax.ffi.ffi_call("jaxlowbit_sequence", jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"test: the attribute layers {message}"):
        jax.block_until_ready(call(jnp.zeros(2), layers=np.array(numbers, np.int64), caller="test"))


# --- a decoder's blocks ---------------------------------------------------------------------------


def attend(operands: Any, options):
    """`cuda_attend.attend` in XLA."""
    shape = operands.keys.shape
    q, k, v = (x.reshape(shape[0], 1, -1, shape[3]) for x in operands[:3])
    if operands.norms is not None:
        norms = operands.norms
        q, k = (rms_norm(x, n, options.epsilon) for x, n in zip((q, k), norms, strict=True))
    cos, sin = (x[:, None, None] for x in operands.rotation)
    q, k = (rope.rotate(x, (cos, sin), options.pairs) for x in (q, k))
    caches = [
        lax.dynamic_update_slice(cache, new, (0, operands.slot, 0, 0))
        for cache, new in zip(operands[5:7], (k, v), strict=True)
    ]
    position, held = operands.position[:, None], operands.positions
    sizes = {"window": options.window, "scale": options.scale, "reach": options.reach}
    arrays = q, caches[0], caches[1], position, held
    out = attention.attend(*arrays, implementation="xla", **sizes)
    return out.reshape(operands.query.shape), *caches


def decode_layers(layers: Any, residual, *, activation, epsilon, devices):
    """`decode_block.decode_layers`, layer by layer."""
    assert devices == () and len(layers) > 1
    caches, y = [], residual
    products: Any = layers[0].attention[:3]
    for layer in layers:
        query, key, value = products
        operands = layer.attention._replace(query=query, key=key, value=value)
        attended, *cache = attend(operands, layer.attending)
        caches.append(cache)
        attended = attended.reshape(len(y), -1)
        out, gate_up, down, *following = layer.weights
        if layer.mixture is not None:
            y, products = with_experts(layer, attended, y, activation, epsilon)
            continue
        found = quantized_block(
            attended,
            y,
            out=out,
            norm=layer.norm,
            gate_up=gate_up,
            down=down,
            following=None if not following else (layer.following_norm, following),
            activation=activation,
            epsilon=epsilon,
        )
        y, products = found if following else (found, ())
    return caches, y, products


def with_experts(layer: Any, attended, residual, activation, epsilon):
    """A layer with a mixture, from the result of its attention on."""
    out, gate_up, down, *following = layer.weights
    router, *biases = layer.mixture
    y = residual + quantized_matmul(attended, out)
    x = rms_norm(y, layer.norm, epsilon)
    config: Any = types.SimpleNamespace(
        experts_per_token=router.top, normalized_experts=router.normalized
    )
    expert, weight = experts.route(config, x[:, None], router.weight, router.bias)
    options = dict(zip(("gate_up_bias", "down_bias"), biases, strict=True))
    mixed = quantized_moe(
        x, expert[:, 0], weight[:, 0], gate_up, down, activation=activation, **options
    )
    if not following:
        return y + mixed, ()
    return normalized_matmuls(y, mixed, layer.following_norm, following, epsilon=epsilon)


MIXTURE = Config(
    "mixtral", **TINY, experts=8, experts_per_token=3, router_bias=True, mlp_bias=True,
    normalized_experts=False,
)  # fmt: skip


@pytest.fixture
def steps(monkeypatch):
    """Returns a function that gives the logits and the cache of three decode steps, with all blocks
    together or in a call each."""
    monkeypatch.setattr(attention, "choose", lambda *args, **sizes: "native")
    monkeypatch.setattr(cuda_attend, "attend", attend)
    monkeypatch.setattr(decode_block, "decode_layers", decode_layers)
    monkeypatch.setattr(decode_block, "unsupported", lambda *_: None)

    def run(config, dtype, *, together):
        decoder = init(config, INT8, dtype=dtype).decoder

        @jax.jit
        def step(token, position, cache):
            x, cache = decoder.forward(token, position, cache)
            return decoder.logits(x), cache

        cache, found = make_cache(config, 2, 64, dtype), []
        with monkeypatch.context() as patch:
            if not together:
                patch.setattr(block_steps, "together", lambda *_: 0)
            for i in range(3):
                token, position = jnp.full((2, 1), 3 * i), jnp.full((2, 1), i)
                out, cache = step(token, position, cache)
                found.append(np.asarray(out))
        return [np.stack(found), *map(np.asarray, jax.tree.leaves(cache))]

    return run


def test_blocks_together_give_the_bits_of_a_call_each(steps):
    config = CONFIGS["qwen3"].replace(layers=3)
    found = (steps(config, jnp.dtype("bfloat16"), together=together) for together in (True, False))
    for one, other in zip(*found, strict=True):
        assert one.tobytes() == other.tobytes()


def test_blocks_with_experts_together_give_the_numbers_of_a_call_each(steps):
    """In float32: XLA does not always round the rows of a router to bfloat16."""
    config = MIXTURE.replace(layers=3)
    found = (steps(config, jnp.dtype("float32"), together=together) for together in (True, False))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())
