"""Layers with reshaped kernels and embeddings on meshes: values, and shardings of results."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxlowbit import Format
from jaxlowbit.nnx import QuantizedEinsum, QuantizedEmbed, QuantizedLinearGeneral

P = jax.P
FORMAT = Format(bits=4, group_size=64, zero="integer")


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def make_mesh(kind: AxisType) -> jax.sharding.Mesh:
    """Two by four devices, axes a and b."""
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices("cpu"))


@dataclasses.dataclass
class Case:
    """A layer, and the shardings of its kernel, inputs and result."""

    make: Callable[[], Any]
    kernel: dict[str, Any]
    shape: tuple[int, ...]
    inputs: jax.P
    out: jax.P
    asked: bool = True
    method: str = "__call__"


def query():
    init = nnx.initializers.normal(0.1)
    return QuantizedLinearGeneral(64, (4, 64), format=FORMAT, bias_init=init, rngs=nnx.Rngs(0))


def out_proj():
    return QuantizedLinearGeneral(
        (4, 64), 64, axis=(-2, -1), format=FORMAT, use_bias=False, rngs=nnx.Rngs(0)
    )


def experts():
    return QuantizedEinsum("bei,eio->beo", (4, 64, 96), format=FORMAT, rngs=nnx.Rngs(0))


def embed():
    return QuantizedEmbed(256, 64, format=FORMAT, rngs=nnx.Rngs(0))


ROWS, X = P("a", None, None), (8, 4, 64)
CASES = {
    "rows": Case(query, {}, X, P("a"), P("a", None, None, None), asked=False),
    "heads": Case(query, {"n": "b"}, X, P("a"), P("a", None, "b", None)),
    "contracted heads": Case(out_proj, {"k": "b"}, (8, 4, 4, 64), P("a", None, "b"), ROWS),
    "experts": Case(experts, {"lead": ("b",)}, X, P("a", "b"), P("a", "b", None)),
    "lookup": Case(embed, {}, (8, 4), P("a"), ROWS),
    "attend": Case(embed, {"n": "b"}, X, P("a"), P("a", None, "b"), False, "attend"),
}


def placed(case: Case, kind: AxisType):
    """A mesh, the layer, and its state and inputs on that mesh."""
    mesh, layer = make_mesh(kind), case.make()
    specs: Any = layer.kernel.partition_spec(mesh, **case.kernel)
    graphdef, state = nnx.split(layer)
    shardings = jax.tree.map(lambda leaf: jax.NamedSharding(mesh, P()), state)
    state = jax.device_put(state, shardings)
    for name in state.keys() & {"packed", "scale", "zero", "version"}:
        array = jax.device_put(
            state[name].get_value(), jax.NamedSharding(mesh, getattr(specs, name))
        )
        state[name].set_value(array)
    values = np.random.default_rng(0).standard_normal(case.shape, np.float32)
    inputs: Any = jnp.abs(values * 100).astype(int) if len(case.shape) == 2 else values
    expected = np.asarray(getattr(layer, case.method)(jnp.asarray(inputs)))
    inputs = jax.device_put(inputs, jax.NamedSharding(mesh, case.inputs))
    return mesh, graphdef, state, inputs, expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.ways("name")
def test_explicit_mesh(name):
    case = CASES[name]
    mesh, graphdef, state, inputs, expected = placed(case, AxisType.Explicit)
    options: Any = {"out_sharding": case.out} if case.asked else {}

    @jax.jit
    def apply(state, x):
        out = getattr(nnx.merge(graphdef, state), case.method)(x, **options)
        assert jax.typeof(out).sharding.spec == case.out
        return out

    with jax.set_mesh(mesh):
        np.testing.assert_allclose(apply(state, inputs), expected, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.ways("name")
def test_auto_mesh(name):
    case = CASES[name]
    _, graphdef, state, inputs, expected = placed(case, AxisType.Auto)
    apply = jax.jit(lambda state, x: getattr(nnx.merge(graphdef, state), case.method)(x))
    np.testing.assert_allclose(apply(state, inputs), expected, atol=1e-4)


@pytest.mark.parametrize(("axis", "sent"), [("n", ["all-reduce", "all-reduce"]), ("k", [])])
def test_a_lookup_sends_the_words_of_its_tokens_at_most(axis, sent):
    case = dataclasses.replace(CASES["lookup"], kernel={axis: "b"})
    case.make = lambda: QuantizedEmbed(1024, 512, format=Format(4, 64), rngs=nnx.Rngs(0))
    _, graphdef, state, inputs, expected = placed(case, AxisType.Auto)
    compiled = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).lower(state, inputs)
    compiled = compiled.compile()
    np.testing.assert_allclose(compiled(state, inputs), expected, atol=1e-4)
    # 16 of the 32 tokens on each device: 16 words of 4 bits for each of 8 k-blocks, and scales.
    text = compiled.as_text() or ""
    found = re.findall(r"= \w+\[([\d,]+)\]\S* (all-\w+|collective\S*|reduce-\w+)\(", text)
    assert [name for _, name in found] == sent
    assert all(np.prod([*map(int, shape.split(","))]) <= 16 * 8 * 16 for shape, _ in found)


def test_a_sharding_of_the_result_needs_a_mesh():
    with pytest.raises(ValueError, match=r"out_sharding is .* on no mesh with Explicit axes"):
        query()(jnp.ones(X), out_sharding=P())
