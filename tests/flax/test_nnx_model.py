"""`jaxlowbit.nnx.quantize_model`: replaced layers, results and reports."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import dequantized, initial

from jaxlowbit import INT8, Format
from jaxlowbit._core.heads import HEADS
from jaxlowbit.nnx import QuantizedLinear, quantize_model

WIDTH, HEADS_COUNT, VOCABULARY = 64, 2, 96
FORMAT = Format(bits=4, group_size=32, zero="integer")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, kernel_init=initial, rngs=rngs)
        self.out_proj = nnx.Linear(WIDTH, WIDTH, kernel_init=initial, rngs=rngs)
        self.mlp = nnx.Dict(
            up=nnx.Linear(WIDTH, 2 * WIDTH, kernel_init=initial, rngs=rngs),
            down=nnx.Linear(2 * WIDTH, WIDTH, kernel_init=initial, rngs=rngs),
        )

    def __call__(self, x):
        q, k, v = jnp.split(self.qkv(self.norm(x)), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:-1], HEADS_COUNT, -1) for a in (q, k, v))
        x = x + self.out_proj(
            jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        )
        return x + self.mlp.down(jax.nn.gelu(self.mlp.up(x)))


class Transformer(nnx.Module):
    """Applies `depth` blocks, each `repeat` times: the second use is the same module."""

    def __init__(self, depth=2, repeat=1, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, embedding_init=initial, rngs=rngs)
        blocks = [Block(rngs) for _ in range(depth)]
        self.blocks = nnx.List(blocks * repeat)
        self.head = nnx.Linear(WIDTH, VOCABULARY, kernel_init=initial, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = jnp.arange(2 * 7).reshape(2, 7) * 5 % VOCABULARY


def rounded(model, quantized):
    """The float model with the dequantized weights."""
    layers: dict[Any, Any] = dict(nnx.iter_modules(model))
    for path, layer in nnx.iter_modules(quantized):
        if isinstance(layer, QuantizedLinear):
            layers[path].kernel.set_value(dequantized(layer.kernel))
    return model


def quantized_paths(model):
    modules = nnx.iter_modules(model)
    return {".".join(map(str, p)) for p, m in modules if isinstance(m, QuantizedLinear)}


# --- results -------------------------------------------------------------------------------------


def test_tied_blocks_stay_tied():
    model = Transformer(repeat=2)
    report = quantize_model(model, FORMAT)
    assert model.blocks[0] is model.blocks[2] and model.blocks[1] is model.blocks[3]
    assert len(nnx.to_flat_state(nnx.state(model, nnx.PathContains("packed")))) == 8
    assert len(report.layers) == 10

    class Tied(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.again = nnx.data([{"tied": self.first}])

    tied = Tied()
    (layer,) = quantize_model(tied, [(r"^again\.0\.tied$", FORMAT)]).layers
    assert isinstance(tied.first, QuantizedLinear)
    assert tied.again[0]["tied"] is tied.first
    assert layer.path == "first"


@pytest.mark.slow
def test_stacked_layers():
    @nnx.vmap
    def create(key):
        return Block(nnx.Rngs(key))

    def apply(stack):
        scanned = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scanned(jnp.ones((2, 3, WIDTH)), stack)

    stack = create(jax.random.split(jax.random.key(0), 3))
    twin = nnx.clone(stack)
    quantize_model(stack, FORMAT)
    np.testing.assert_allclose(apply(stack), apply(rounded(twin, stack)), atol=1e-4)


# --- adapters ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lora_on_a_quantized_base_trains_its_adapter_only():
    model: Any = Transformer()
    quantize_model(model, FORMAT)
    base = model.blocks[0].out_proj
    model.blocks[0].out_proj = nnx.LoRA(
        WIDTH, 4, WIDTH, base_module=base, b_initializer=nnx.initializers.ones, rngs=nnx.Rngs(1)
    )
    lora, x = model.blocks[0].out_proj, jnp.ones((3, WIDTH))
    expected = base(x) + x @ lora.lora_a[...] @ lora.lora_b[...]
    np.testing.assert_allclose(lora(x), expected, atol=1e-4)
    adapter = nnx.DiffState(0, nnx.LoRAParam)
    grads = nnx.jit(nnx.grad(lambda model: jnp.sum(model(TOKENS) ** 2), argnums=adapter))(model)
    found = {path[-1]: value[...] for path, value in nnx.to_flat_state(grads)}
    assert set(found) == {"lora_a", "lora_b"}
    assert all(jnp.abs(value).max() > 0 for value in found.values())


# --- rules ---------------------------------------------------------------------------------------


def test_a_single_format_leaves_heads_embeddings_and_norms_in_floats():
    model = Transformer()
    quantize_model(model, FORMAT)
    layers = ("qkv", "out_proj", "mlp.up", "mlp.down")
    assert quantized_paths(model) == {f"blocks.{i}.{name}" for i in range(2) for name in layers}
    assert type(model.embed) is nnx.Embed and type(model.head) is nnx.Linear


@pytest.mark.parametrize("name", ["lm_head", "decoder.head", "logits", "classifier"])
def test_names_of_heads(name):
    assert re.search(HEADS, name)


@pytest.mark.parametrize("name", ["out_proj", "header", "head.dense", "attention.output"])
def test_names_of_other_layers(name):
    assert not re.search(HEADS, name)


@pytest.mark.parametrize("kind", [dict, list])
def test_the_first_rule_that_matches_decides(kind):
    rules = {r"blocks\.0\.": None, "mlp": INT8, r"qkv$": FORMAT, "^head$": FORMAT}
    model = Transformer()
    report = quantize_model(model, rules if kind is dict else list(rules.items()))
    formats = {layer.path: layer.format for layer in report.layers if layer.format}
    assert formats == {
        "blocks.1.mlp.up": INT8,
        "blocks.1.mlp.down": INT8,
        "blocks.1.qkv": FORMAT,
        "head": FORMAT,
    }
    assert quantized_paths(model) == set(formats)
    assert isinstance(model.blocks[1].out_proj, nnx.Linear)  # no rule matches it


# --- the report ----------------------------------------------------------------------------------


def test_report():
    model = Transformer()
    kernel = model.blocks[0].mlp.up.kernel[...]
    report = quantize_model(model, [("head", Format(5, 32)), (r"0\.mlp\.up", FORMAT)])
    layers = {layer.path: layer for layer in report.layers}
    up, layer = layers["blocks.0.mlp.up"], model.blocks[0].mlp.up
    change = np.linalg.norm(layer.kernel.dequantize() - kernel) / np.linalg.norm(kernel)
    assert up.error == pytest.approx(float(change), rel=1e-4)
    assert (up.shape, up.nbytes_before) == ((WIDTH, 2 * WIDTH), kernel.nbytes)
    assert up.nbytes_after == layer.kernel.nbytes
    if jax.default_backend() == "cpu":
        assert up.backend == layers["head"].backend == "cpu"
    if jax.default_backend() == "gpu":
        assert re.fullmatch(
            "xla: its kernels read .* bits, the format has 5", layers["head"].backend
        )
    kept = layers["blocks.1.qkv"]
    assert kept.format is None and kept.nbytes_after == kept.nbytes_before
    state = nnx.state(model)
    assert report.nbytes_after == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    lines = str(report).splitlines()
    columns = ["layer", "shape", "format", "before", "after", "error", "backend"]
    assert lines[0].split() == columns
    assert re.search(
        r"^blocks\.0\.mlp\.up +64 x 128 +4 bits, groups of 32, integer zero +0\.03 MB +0\.01 MB +"
        r"0\.\d{4} +",
        next(line for line in lines if "0.mlp.up" in line),
    )
    (totals,) = (line for line in lines if "layers quantized" in line)
    assert totals == "2 of 10 layers quantized; all parameters: 0.31 MB became 0.27 MB"
    assert repr(report) == str(report)


# --- errors --------------------------------------------------------------------------------------


def untouched(model, rules, error, message):
    with pytest.raises(error, match=message):
        quantize_model(model, rules)
    assert not quantized_paths(model)


def test_wrong_rules_raise():
    model = Transformer()
    untouched(
        model,
        {"mlp": FORMAT, "atention": None},
        ValueError,
        r"the rule 'atention' matches no layer; .* blocks\.0\.qkv, .* and 2 more",
    )
    untouched(model, {"": FORMAT, "mlp": None}, ValueError, "'mlp' decides about no layer, since")
    untouched(model, {"(": FORMAT}, ValueError, r"the rule '\(' is no regular expression")
    untouched(model, {"mlp": 4}, TypeError, r"\('mlp', 4\) is no rule; a rule is a")
    untouched(model, {"mlp": "in4"}, ValueError, r"no rule; .* \('in4' names no format; write")
    two = r"2 rules are wrong:\n- the rule 'a_' matches no layer; .*\n- the rule 'b_' matches no"
    untouched(model, {"mlp": FORMAT, "a_": None, "b_": INT8}, ValueError, two)
    for rules in (FORMAT, {"mlp": FORMAT}):
        untouched(nnx.Dropout(0.5), rules, ValueError, r"none of nnx\.Linear, .* in the model")


def test_layers_that_cannot_be_replaced_raise_before_any_is_replaced():
    rngs = nnx.Rngs(0)

    class Special(nnx.Linear):
        pass

    for layer, message in (
        (
            nnx.Linear(64, 64, precision="highest", rngs=rngs),
            r"in layers\.1: .*precision='highest'",
        ),
        (Special(64, 64, rngs=rngs), r"in layers\.1: .*is Special, but .* Or keep the layer"),
    ):
        model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), layer)
        untouched(model, FORMAT, ValueError, message)
        quantize_model(model, {r"layers\.1": None, "": FORMAT})
        assert quantized_paths(model) == {"layers.0"}
    untouched(nnx.Linear(64, 64, rngs=rngs), FORMAT, ValueError, "is the model itself")
    shared: Any = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs))
    shared.layers[1].kernel = shared.layers[0].kernel
    untouched(shared, FORMAT, ValueError, r"layers\.0 and layers\.1 share one kernel variable")


def test_the_layer_with_unusable_weights_is_named():
    model = Transformer()
    kernel = model.blocks[1].qkv.kernel
    kernel.set_value(kernel[...].at[3, 4].set(jnp.nan))
    with pytest.raises(ValueError, match=r"in blocks\.1\.qkv: .* \(3, 4\)"):
        quantize_model(model, FORMAT)
