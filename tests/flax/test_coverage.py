"""Reports of `quantize_model` for whole models, and layers that a single format skips."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from helpers import initial

from jaxlowbit import INT4, INT8, UINT4, Format
from jaxlowbit import linen as jl_linen
from jaxlowbit import nnx as jl_nnx

WIDTH, HIDDEN, VOCABULARY = 64, 128, 256
TOKENS = jnp.arange(6)[None]


class Einsum(nnx.Module):
    """A third-party layer with a raw parameter."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(initial(rngs.params(), (WIDTH, 4, 16)))

    def __call__(self, x: Any) -> Any:
        return jnp.einsum("btd,dnh->btnh", x, self.w[...]).reshape(x.shape)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=initial, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, kernel_init=initial, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, 4, kernel_init=initial, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.relu(self.up(x))) * nnx.softmax(self.gate(x)).max()


class NnxModel(nnx.Module):
    """A model; `vocabulary` may equal the width of the hidden layers."""

    def __init__(self, vocabulary: int = VOCABULARY):
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(vocabulary, WIDTH, embedding_init=initial, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.attention = Einsum(rngs)
        self.final = nnx.Linear(WIDTH, vocabulary, use_bias=False, kernel_init=initial, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.final(self.attention(x))


class LinenModel(nn.Module):
    vocabulary: int = VOCABULARY

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, WIDTH, embedding_init=initial, name="tokens")(tokens)
        for i in range(2):
            gate = nn.softmax(nn.Dense(4, kernel_init=initial, name=f"block_{i}_gate")(x)).max()
            h = nn.relu(nn.Dense(HIDDEN, kernel_init=initial, name=f"block_{i}_up")(x))
            x = x + nn.Dense(WIDTH, kernel_init=initial, name=f"block_{i}_down")(h) * gate
        w = self.param("w", initial, (WIDTH, 4, 16))
        x = jnp.einsum("btd,dnh->btnh", x, w).reshape(x.shape)
        return nn.Dense(self.vocabulary, use_bias=False, kernel_init=initial, name="final")(x)


def quantize(api: str, rules: Any, vocabulary: int = VOCABULARY, **options: Any) -> Any:
    """The report, the bytes of all arrays afterwards, and the paths of the quantized layers."""
    if api == "nnx":
        model = NnxModel(vocabulary)
        report = jl_nnx.quantize_model(model, rules, **options)
        arrays: Any = nnx.state(model)
    else:
        module = LinenModel(vocabulary)
        floats = module.init(jax.random.key(0), TOKENS)
        _, arrays, report = jl_linen.quantize_model(module, floats, rules, TOKENS, **options)
    leaves = jax.tree.leaves_with_path(arrays)
    nbytes = sum(x.nbytes for path, x in leaves if "padding" not in jax.tree_util.keystr(path))
    return report, nbytes, {layer.path for layer in report.layers if layer.format}


@pytest.fixture(params=["nnx", "linen"])
def api(request):
    return request.param


@pytest.fixture(autouse=True)
def flax_promotes_dtypes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def blocks(api: str) -> set[str]:
    names = ("up", "down")
    return {
        f"blocks.{i}.{name}" if api == "nnx" else f"block_{i}_{name}"
        for i in range(2)
        for name in names
    }


# --- the report ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:quantize_model")
def test_every_parameter_counts_once(api):
    report, nbytes, _ = quantize(api, INT8)
    assert report.nbytes_after == nbytes < report.nbytes_before
    (w,) = report.uncovered
    assert (w.shape, w.nbytes) == ((WIDTH, 4, 16), 4 * WIDTH * WIDTH)
    assert (w.path, w.module) == {
        "nnx": ("attention.w", "Einsum"),
        "linen": ("w", "LinenModel"),
    }[api]
    assert report.vectors == 4 * 2 * (HIDDEN + WIDTH + 4)
    lines = str(report).splitlines()
    assert repr(report) == str(report)
    assert f"  {w.path}  0.02 MB  64 x 4 x 16  {w.module}" in lines
    assert any(line.startswith("not covered              0.02 MB  5.8%") for line in lines), lines


@pytest.mark.filterwarnings("ignore:quantize_model")
def test_requantized_weights_are_already_quantized():
    model = NnxModel()
    jl_nnx.quantize_model(model, {"blocks": INT8, "": None})
    report = jl_nnx.quantize_model(model, {"final": INT8})
    arrays = nnx.state(model)
    assert report.nbytes_after == sum(x.nbytes for x in jax.tree.leaves(arrays))
    assert report.packed and "quantized before" in str(report)


def test_a_warning_names_uncovered_parameters(api):
    path = {"nnx": r"attention\.w", "linen": "w"}[api]
    message = rf"^quantize_model: 1\d% of the bytes .* the largest {path} of shape \(64, 4, 16\) in"
    with pytest.warns(UserWarning, match=message):
        quantize(api, INT4, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report, *_ = quantize(api, INT4, 16, keep=rf"^{path}$")
        assert "kept by rules" in str(report) and report.uncovered[0].by_rule
        quantize(api, {f"^{path}$": None, "": INT4}, 16)
        quantize(api, INT4)  # less than a tenth of the bytes


def test_linen_layers_that_the_call_does_not_reach_are_named():
    class Model(nn.Module):
        def setup(self):
            self.used, self.other = nn.Dense(WIDTH), nn.Dense(WIDTH)

        def __call__(self, x, other=False):
            return self.other(x) + self.used(x) if other else self.used(x)

    x = jnp.ones((2, WIDTH))
    variables = Model().init(jax.random.key(0), x, True)
    with pytest.warns(UserWarning, match=r"other\.kernel .* in a module that this call does not"):
        jl_linen.quantize_model(Model(), variables, INT4, x)


# --- defaults ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:quantize_model")
def test_a_single_format_leaves_tables_heads_and_routers_in_floats(api):
    for vocabulary in (VOCABULARY, HIDDEN):  # blocks are not heads, whatever their width
        report, _, found = quantize(api, "int4", vocabulary)
        assert found == blocks(api)
        kept = {layer.path: layer.backend for layer in report.layers if layer.by_default}
        assert kept.pop("tokens") == "kept by default: an embedding"
        assert kept.pop("final") == "kept by default: a head, as wide as the vocabulary"
        assert set(kept.values()) == {"kept by default: a router"} and len(kept) == 2


@pytest.mark.filterwarnings("ignore:quantize_model")
def test_rules_override_defaults_and_keep_adds_to_them(api):
    _, _, found = quantize(api, {"": "uint4"})
    assert found == blocks(api) | {"tokens", "final"} | {
        path.replace("up", "gate") for path in blocks(api) if "up" in path
    }
    report, _, found = quantize(api, INT4, keep="up$")
    assert found == {path for path in blocks(api) if "down" in path}
    assert {x.backend for x in report.layers if x.path.endswith("up")} == {"kept by a rule"}
    _, _, found = quantize(api, {"blocks?[._]": "int8", "final": UINT4}, keep=["gate", "up$"])
    assert found == {path for path in blocks(api) if "down" in path} | {"final"}


@pytest.mark.parametrize(
    ("sizes", "format", "grows"),
    [
        ((64, 8), INT4, True),  # padded to 64 columns
        ((64, 64), INT4, False),
        ((64, 64), Format(8, 16, "float"), False),
        ((16, 64), Format(8, 16), True),
    ],
)
def test_layers_that_would_grow_stay_in_floats(sizes, format, grows):
    model: Any = nnx.Sequential(
        nnx.Linear(*sizes, use_bias=False, rngs=nnx.Rngs(0)),
        nnx.Linear(256, 256, use_bias=False, rngs=nnx.Rngs(0)),
    )
    report = jl_nnx.quantize_model(model, format)
    assert (report.layers[0].format is None) == grows
    forced: Any = nnx.Sequential(nnx.Linear(*sizes, use_bias=False, rngs=nnx.Rngs(0)))
    found = jl_nnx.quantize_model(forced, {"": format})
    assert (found.nbytes_after >= found.nbytes_before) == grows


def test_a_tied_head_applied_to_the_table_is_not_a_layer():
    class Tied(nn.Module):
        def setup(self):
            self.table = nn.Embed(VOCABULARY, WIDTH)
            self.up = nn.Dense(WIDTH)
            self.lm_head = nn.Dense(VOCABULARY, use_bias=False)

        def __call__(self, tokens):
            x = self.up(self.table(tokens))
            kernel = self.table.variables["params"]["embedding"].T
            return self.lm_head.apply({"params": {"kernel": kernel}}, x)

    variables = Tied().init(jax.random.key(0), TOKENS)
    model, quantized, report = jl_linen.quantize_model(Tied(), variables, INT8, TOKENS)
    assert [layer.path for layer in report.layers] == ["table", "up"]
    expected = Tied().apply(variables, TOKENS)
    difference = jnp.linalg.norm(model.apply(quantized, TOKENS) - expected)
    assert difference < 0.02 * jnp.linalg.norm(expected)


# --- objects that are not models, and rules that quantize nothing --------------------------------


def test_a_choice_that_quantizes_nothing_raises(api):
    wrong: Any = ({"rules": {"": None}}, {"rules": INT4, "keep": "."})
    for options in wrong:
        with pytest.raises(ValueError, match=r"no layer would be quantized.*\n- .*kept by a rule"):
            quantize(api, **options)


class Stranger:
    """Pretends to be a class of another library."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nnx.state(NnxModel()), "a State of arrays, which does not say what multiplies"),
        (lambda: {"kernel": jnp.ones((4, 4))}, r"a dict of arrays, .* pass the nnx\.Module itself"),
        (lambda: NnxModel, "the class NnxModel, not an instance of it"),
        (lambda: LinenModel(), r"of class LinenModel; use jaxlowbit\.linen\.quantize_model"),
        (lambda: None, "None; pass the nnx.Module"),
        (lambda: [1, 2], r"\[1, 2\]; pass the nnx.Module"),
    ],
)
def test_values_other_than_nnx_models_raise(make, message):
    with pytest.raises(TypeError, match=f"^quantize_model: the model is {message}"):
        jl_nnx.quantize_model(make(), INT4)


@pytest.mark.parametrize("library", ["equinox", "penzai", "haiku", "keras", "torch"])
def test_models_of_other_libraries_are_named(library, monkeypatch):
    monkeypatch.setattr(Stranger, "__module__", f"{library}.nn")
    for refused in (
        lambda: jl_nnx.quantize_model(Stranger(), INT4),  # pyright: ignore
        lambda: jl_linen.quantize_model(Stranger(), {}, INT4),  # pyright: ignore
    ):
        with pytest.raises(TypeError, match=rf"the model is .*{library[1:]}.*\.$"):
            refused()


def test_values_other_than_linen_models_raise():
    module = LinenModel()
    variables = module.init(jax.random.key(0), TOKENS)

    class Wrapper:
        def __init__(self):
            self.module, self.params = module, variables["params"]

    for wrong, message in (
        ((NnxModel(), variables), r"use jaxlowbit\.nnx\.quantize_model\(model, rules\)"),
        (
            (Wrapper(), variables),
            r"pass what it wraps: model\.module and {'params': model\.params}",
        ),
        ((module, variables["params"]), r"no 'params'; pass all .*, or {'params': params} if"),
        ((module, INT4), "variables is of class Format, but it must be what init returned"),
        (({}, variables), r"the model is a dict of arrays, .* pass the nn\.Module and what its"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^quantize_model: .*{message}"):
            jl_linen.quantize_model(*wrong, INT4, TOKENS)  # pyright: ignore
