"""Calls joined to one, run by the CPU handler; a decoder with its blocks in one call."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import CONFIGS, TINY, random
from jax import lax

from jaxlowbit import INT8, Format, quantize, quantized_matmul, quantized_moe
from jaxlowbit._backends import cuda_attend
from jaxlowbit._backends.block import add_block
from jaxlowbit._backends.call import Call, stored_weight
from jaxlowbit._backends.layers import Layer, run_layers
from jaxlowbit._composite import decode_block
from jaxlowbit._composite.block import quantized_block
from jaxlowbit._composite.matmuls import quantized_matmuls
from jaxlowbit._composite.mlp import quantized_mlp
from jaxlowbit._composite.normalized import normalized_matmuls
from jaxlowbit._composite.rms_norm import rms_norm
from jaxlowbit._llm import attention, block_steps, experts, rope
from jaxlowbit._llm.cache import make_cache
from jaxlowbit.llm import Config, Decoder

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
    new = [x.reshape(shape[0], -1) for x in operands[:3]]
    if operands.biases:
        new = [x + bias.astype(x.dtype)[None] for x, bias in zip(new, operands.biases, strict=True)]
    q, k, v = (x.reshape(shape[0], 1, -1, shape[3]) for x in new)
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
    out = attention.attend(*arrays, implementation="xla", sinks=operands.sinks, **sizes)
    return out.reshape(operands.query.shape), *caches


def decode_layers(layers: Any, residual, *, first, activation, epsilon, devices):
    """`decode_block.decode_layers`, layer by layer."""
    assert devices == ()
    caches, y = [], residual
    products: Any = layers[0].attention[:3]
    if first is not None:
        y = residual.astype(products[0].dtype)
        products = quantized_matmuls(rms_norm(y, first.norm, epsilon), first.weights)
    for layer in layers:
        query, key, value = products
        operands = layer.attention._replace(query=query, key=key, value=value)
        attended, *cache = attend(operands, layer.attending)
        caches.append(cache)
        out, gate_up, down, *following = layer.weights
        head = following if layer.following_dtype else []
        following = [] if head else following
        layer = layer._replace(weights=(out, gate_up, down, *following))
        options: dict[str, Any] = {"activation": activation, "epsilon": epsilon}
        options |= {"norm": layer.norm, "gate_up": gate_up, "down": down}
        attended = attended.reshape(len(y), -1)
        onward = None if not following else (layer.following_norm, following)
        found: Any
        if layer.mixture is not None:
            found = block_with_experts(layer, attended, y, activation, epsilon)
        elif layer.out_bias is None:
            found = quantized_block(attended, y, out=out, following=onward, **options)
        else:
            found = biased_block(attended, y, out, layer.out_bias, onward, **options)
        y, products = found if following else (found, ())
        if head:
            normed, dtype = rms_norm(y, layer.following_norm, epsilon), layer.following_dtype
            products = [quantized_matmul(normed, head[0], preferred_element_type=dtype)]
    return caches, y, products


def biased_block(
    attended, residual, out, bias, onward, *, activation, epsilon, norm, gate_up, down
):
    """`quantized_block` with a bias of `out`."""
    y = residual + (attended @ out + bias.astype(residual.dtype)[None])
    mlp = quantized_mlp(
        rms_norm(y, norm, epsilon), gate_up=gate_up, down=down, activation=activation
    )
    y = y + mlp
    if onward is None:
        return y
    normed = rms_norm(y, onward[0], epsilon)
    return y, tuple(normed @ weight for weight in onward[1])


def block_with_experts(layer: Any, attended, residual, activation, epsilon):
    """`quantized_block` with a mixture of experts."""
    out, gate_up, down, *following = layer.weights
    router, gate_up_bias, down_bias, _ = layer.mixture
    added = attended @ out
    if layer.out_bias is not None:
        added += layer.out_bias.astype(added.dtype)[None]
    y = residual + added
    x = rms_norm(y, layer.norm, epsilon)
    config: Any = types.SimpleNamespace(
        experts_per_token=router.top, normalized_experts=router.normalized
    )
    expert, weight = experts.route(config, x[:, None], router.weight, router.bias)
    mixed = quantized_moe(
        x, expert[:, 0], weight[:, 0], gate_up, down, activation=activation,
        gate_up_bias=gate_up_bias, down_bias=down_bias,
    )  # fmt: skip
    if not following:
        return y + mixed
    return normalized_matmuls(y, mixed, layer.following_norm, following, epsilon=epsilon)


BIASED = CONFIGS["qwen2"].replace(output_bias=True, sinks=True, window=2)
DECODERS = {
    "qwen3": CONFIGS["qwen3"],
    "qwen2": CONFIGS["qwen2"],
    "sinks": BIASED,
    "head norms": BIASED.replace(qk_norm="head"),
    "experts": Config(
        "mixtral", **TINY, experts=8, experts_per_token=3, router_bias=True, mlp_bias=True,
        normalized_experts=False,
    ),
    "gpt_oss": Config(
        "gpt_oss", **TINY, experts=8, experts_per_token=2, attention_bias=True, output_bias=True,
        mlp_bias=True, router_bias=True, sinks=True, activation="gpt_oss", window=2,
    ),
    # XLA adds the biases.
    "all norms": BIASED.replace(qk_norm="all", output_bias=False),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
def test_blocks_together_give_the_bits_of_a_call_each(name, monkeypatch):
    config = DECODERS[name]
    # Other decoders also have a block between two others.
    layers = 2 if name in ("sinks", "head norms", "all norms") else 3
    windows = {"window_layers": (True, False, True)[:layers]} if config.window else {}
    config = config.replace(layers=layers, **windows)
    decoder = Decoder(config, random(config, INT8), dtype=jnp.bfloat16)
    chosen, calls = "native", []

    def run(layers, *args, **options):
        calls.append(len(layers))
        return decode_layers(layers, *args, **options)

    monkeypatch.setattr(attention, "choose", lambda *args, **sizes: chosen)
    monkeypatch.setattr(cuda_attend, "attend", attend)
    monkeypatch.setattr(decode_block, "decode_layers", run)
    monkeypatch.setattr(decode_block, "unsupported", lambda *_: None)

    def logits():
        @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
        def step(token, position, cache):
            logits, cache = decoder.decode(token, position, cache)
            return decoder.joined(logits), cache

        cache, found = make_cache(config, 2, 64, jnp.bfloat16), []
        for i in range(3):
            token, position = jnp.full(2, 3 * i), jnp.full(2, i)
            out, cache = step(token, position, cache)
            found.append(np.asarray(out))
        return np.stack(found), jax.tree.map(np.asarray, cache)

    together = logits()
    assert set(calls) == ({1} if name == "all norms" else {config.layers})
    monkeypatch.setattr(block_steps, "together", lambda *_: 0)
    alone = logits()
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        assert one.tobytes() == other.tobytes()
    chosen = "xla"
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(logits()), strict=True):
        np.testing.assert_array_equal(one, other)
