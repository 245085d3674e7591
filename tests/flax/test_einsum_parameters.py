"""`EinsumParameter` in NNX: raw parameters, quantized in place."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxlowbit import INT4, INT8
from jaxlowbit.nnx import EinsumParameter, quantize_model

WIDTH, HIDDEN, EXPERTS, VOCABULARY = 64, 96, 3, 128
IDS = jnp.array([[1, 5, 2], [7, 0, 127]])


@pytest.fixture(autouse=True)
def flax_promotes_dtypes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Experts(nnx.Module):
    """Like the experts of google-tunix: a loop over experts, with casts."""

    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(WIDTH, EXPERTS, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, WIDTH, HIDDEN)))
        self.down = nnx.Param(jax.random.normal(rngs.params(), (EXPERTS, HIDDEN, WIDTH)))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        scores = jax.nn.softmax(self.router(x))
        results = [self.expert(x, i) for i in range(EXPERTS)]
        return jnp.einsum("bte,ebtd->btd", scores, jnp.stack(results)) / 100

    def expert(self, x: Any, i: int) -> Any:
        hidden = jnp.einsum("btd,df->btf", x, jnp.astype(self.up[i], x.dtype))
        return jnp.tanh(hidden) @ self.down.get_value()[i]


class Embedder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (VOCABULARY, WIDTH)))

    @staticmethod
    def pad() -> int:
        return 0

    @property
    def size(self) -> int:
        return self.table.shape[0]

    def encode(self, ids: Any) -> Any:
        return self.table[(ids,)]

    @nnx.jit
    def decode(self, x: Any) -> Any:
        assert x.shape[-1] == self.table.get_value().shape[1]
        return jnp.dot(x, self.table.get_value().T)


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embedder: Any = Embedder(rngs)
        self.blocks = nnx.List([Experts(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.embedder.encode(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.embedder.decode(self.norm(x))


UP = EinsumParameter(r"\.(up|down)$", "...k,kn->...n")
TABLE = EinsumParameter(r"table$", "...d,vd->...v", module=Embedder, embedding=True)


def rounded(model: Model, quantized: Any) -> Model:
    """The float model with the dequantized weights."""
    for block, new in zip(model.blocks, quantized.blocks, strict=True):
        for name in ("up", "down"):
            getattr(block, name).set_value(getattr(new, name).kernel.dequantize())
    model.embedder.table.set_value(quantized.embedder.table.kernel.dequantize().T)
    return model


def test_a_model_runs_on_packed_parameters():
    model = Model()
    report = quantize_model(model, {"router": None, "": INT8}, layers=[UP, TABLE])
    assert [layer.path for layer in report.layers if layer.format] == [
        "embedder.table",
        *(f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")),
    ]
    assert not report.uncovered and report.coverage > 0.98
    wanted = rounded(Model(), model)(IDS)
    np.testing.assert_allclose(model(IDS), wanted, atol=1e-3)
    np.testing.assert_allclose(nnx.jit(lambda model: model(IDS))(model), wanted, atol=1e-3)
    # Code of the modules ran: it updated a counter and can read other attributes.
    assert model.blocks[1].calls[...] == 2
    assert model.embedder.size == VOCABULARY and model.embedder.pad() == 0
    assert isinstance(model.embedder, Embedder) and isinstance(model.blocks[0], Experts)
    text = str(jax.make_jaxpr(model.embedder.decode)(jnp.ones((1, WIDTH))))
    assert "quantized_matmul" in text
    assert f"f32[{VOCABULARY},{WIDTH}]" not in text and f"f32[{WIDTH},{VOCABULARY}]" not in text


def test_a_single_format_leaves_embeddings_in_floats():
    model = Model()
    report = quantize_model(model, "int8", layers=[UP, TABLE])
    kept = {layer.path: layer.backend for layer in report.layers if layer.format is None}
    assert kept["embedder.table"] == "kept by default: an embedding"
    assert isinstance(model.embedder.table, nnx.Param)


def test_a_single_format_leaves_heads_and_routers_in_floats_by_module():
    model = nnx.Dict(up=Careless(), lm_head=Careless())
    report = quantize_model(model, "int8", layers=[EinsumParameter(r"\.w$", "a,ab->b")])
    kept = {layer.path: layer.backend for layer in report.layers if layer.format is None}
    assert kept == {"lm_head.w": "kept by default: a head, by its name"}


def test_a_rule_leaves_parts_of_a_module_in_floats():
    model = Model()
    quantize_model(model, {"down": None, "up": INT4}, layers=[UP])
    assert isinstance(model.blocks[0].down, nnx.Param)
    wanted = Model()
    for block, new in zip(wanted.blocks, model.blocks, strict=True):
        block.up.set_value(new.up.kernel.dequantize())
    np.testing.assert_allclose(model(IDS), wanted(IDS), atol=1e-3)


def test_an_abstract_model_is_filled_with_stored_arrays():
    rules: dict[str, Any] = {"router": None, "": INT8}
    model = Model()
    quantize_model(model, rules, layers=[UP, TABLE])
    wanted = model(IDS)
    shapes = nnx.eval_shape(Model)
    quantize_model(shapes, rules, layers=[UP, TABLE])
    nnx.update(shapes, nnx.state(model))
    shapes.blocks[0].calls[...] = 0
    np.testing.assert_array_equal(shapes(IDS), wanted)
    np.testing.assert_array_equal(nnx.clone(model)(IDS), wanted)


def test_gradients_pass_the_packed_words():
    model = Model()
    quantize_model(model, {"router": None, "": INT8}, layers=[UP, TABLE])
    floats = rounded(Model(), model)

    def loss(model: Any) -> Any:
        return jnp.sin(model(IDS)).sum()

    found, wanted = nnx.grad(loss)(model), nnx.grad(loss)(floats)
    np.testing.assert_allclose(
        found["norm"]["scale"].get_value(), wanted["norm"]["scale"].get_value(), atol=0.02
    )


def test_stacks_of_modules():
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(key: Any) -> Experts:
        return Experts(nnx.Rngs(params=key))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x: Any, layer: Any) -> Any:
        return layer(x)

    class Stacked(nnx.Module):
        def __init__(self) -> None:
            self.layers = stack(jax.random.split(jax.random.key(0), 2))

        def __call__(self, x: Any) -> Any:
            return run(x, self.layers)

    model, floats = Stacked(), Stacked()
    quantize_model(model, {"router": None, "": INT8}, layers=[UP])
    for name in ("up", "down"):
        kernel = getattr(model.layers, name).kernel
        assert kernel.shape[:2] == (2, EXPERTS)
        getattr(floats.layers, name).set_value(kernel.dequantize())
    x = jax.random.normal(jax.random.key(1), (2, 3, WIDTH))
    np.testing.assert_allclose(model(x), floats(x), atol=1e-3)


def test_parameters_are_divided_over_a_mesh():
    class Divided(nnx.Module):
        def __init__(self) -> None:
            rngs, sharding = nnx.Rngs(0), (None, "model")
            weight = jax.random.normal(rngs.params(), (WIDTH, 2 * WIDTH))
            self.up = nnx.Param(weight, out_sharding=sharding)
            self.down = nnx.Param(weight.T, out_sharding=sharding[::-1])

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(x @ self.up.get_value()) @ self.down.get_value()

    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
    both = EinsumParameter("up|down", "...k,kn->...n")
    with jax.set_mesh(mesh):
        model, floats = Divided(), Divided()
        shards = {"up": (1, 2), "down": (2, 1)}
        quantize_model(model, {"": INT8}, layers=[both], shards=shards)
        assert model.up.packed.get_value().sharding.spec[0] == "model"
        assert model.down.packed.get_value().sharding.spec[1] == "model"
        graph, state = nnx.split(model)
        run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        x = jax.random.normal(jax.random.key(1), (3, WIDTH))
        text = run.lower(state, x).compile().as_text() or ""
        assert not re.search(r"u32\[.*all-gather", text)
        for name in ("up", "down"):
            getattr(floats, name).set_value(getattr(model, name).kernel.dequantize())
        np.testing.assert_allclose(run(state, x), floats(x), atol=1e-3)
        specs = (nnx.get_partition_spec(state), jax.P())
        inside = jax.shard_map(run, in_specs=specs, out_specs=jax.P(), check_vma=False)
        with pytest.raises(ValueError, match=r"^A device has a part .* inside jax\.shard_map"):
            inside(state, x)


class Tied(nnx.Module):
    """A head that uses the table of another module, as in mamba2-jax."""

    def __init__(self) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, ids: Any) -> Any:
        return self.embed(ids) @ self.embed.embedding[:].T


def test_another_module_reads_a_parameter():
    model, floats = Tied(), Tied()
    tied = EinsumParameter(r"embed\.embedding", "...d,vd->...v", embedding=True, reader=r".*\.Tied")
    report = quantize_model(model, {"": INT8}, layers=[tied])
    assert report.coverage == 1
    floats.embed.embedding.set_value(model.embed.embedding.kernel.dequantize().T)
    np.testing.assert_allclose(model(IDS), floats(IDS), atol=1e-3)
    np.testing.assert_allclose(model.embed(IDS), floats.embed(IDS), atol=1e-5)


# --- errors ---------------------------------------------------------------------------------------


def refused(words: str, *layers: Any, model: Any = None, rules: Any = None) -> None:
    with pytest.raises(ValueError, match=words):
        quantize_model(model or Model(), rules or {"": INT8}, layers=layers)


def test_descriptions_without_a_match_raise():
    listed = r"The parameters are embedder\.table, blocks\.0\."
    refused(
        rf"EinsumParameter\('gate'\) matches no parameter; .*{listed}",
        EinsumParameter("gate", "a,ab->b"),
    )
    other = EinsumParameter("table", "...d,vd->...v", module=Experts)
    refused("matches no parameter in a module Experts", other)
    refused(
        r"in blocks\.0\.up: .* has 4 letters for a kernel of shape \(3, 64, 96\)",
        EinsumParameter("up", "d,abdf->abf"),
    )
    refused(r"in embedder\.table: .* is not of the form", EinsumParameter("table", lambda _: "dv"))
    refused(
        r"in embedder\.table: .* sums over no letter of both",
        EinsumParameter("table", lambda _: "a,vd->avd"),
    )
    with pytest.raises(ValueError, match=r"^EinsumParameter: .* sums over no letter of both"):
        EinsumParameter("table", "a,vd->avd")
    wrong = EinsumParameter("table", lambda module: module.equation)
    refused("equation of Embedder raises AttributeError", wrong)


def test_invalid_arguments_raise():
    for words, arguments in (
        ("path is 3", (3, "a,ab->b")),
        ("equation is None", ("up", None)),
        ("module is 3", ("up", "a,ab->b", 3)),
    ):
        with pytest.raises(TypeError, match=f"^EinsumParameter: {words}, but it must be"):
            EinsumParameter(*arguments)  # pyright: ignore
    with pytest.raises(ValueError, match=r"^EinsumParameter: path='\(' is no regular expression"):
        EinsumParameter("(", "a,ab->b")
    with pytest.raises(ValueError, match=r"^EinsumParameter: The equation 'dv' is not of the form"):
        EinsumParameter("table", "dv")


def test_a_parameter_in_two_modules_raises():
    model = Model()
    model.blocks[1].up = model.blocks[0].up
    refused(r"blocks\.0 and blocks\.1 share one kernel variable", UP, model=model)


class Careless(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((WIDTH, HIDDEN)))

    def __call__(self, x: Any) -> Any:
        return x @ (self.w * 2)

    def remember(self, x: Any) -> Any:
        self.last = nnx.Variable(x @ self.w.get_value())
        return self.last.get_value()


def test_code_with_an_unsupported_use_raises_when_it_runs():
    model = Careless()
    quantize_model(model, {"": INT8}, layers=[EinsumParameter("w", "a,ab->b")])
    with pytest.raises(ValueError, match=r"applies mul to it: Careless\.w is a packed weight"):
        model(jnp.ones((2, WIDTH)))
    with pytest.raises(ValueError, match=r"^Careless\.remember adds or removes"):
        model.remember(jnp.ones((2, WIDTH)))
