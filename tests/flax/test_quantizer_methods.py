"""Every quantizer on NNX and Linen models, on foreign layers, on meshes, and after interruptions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxlowbit import linen as jl_linen
from jaxlowbit import nnx as jl_nnx
from jaxlowbit.quantizers import Calibration, _registry

WIDTH, FORMAT = 128, "int3-g32"
RNG = np.random.default_rng(0)
SIZES = np.exp(RNG.normal(size=WIDTH))
BATCHES = [jnp.asarray(RNG.normal(size=(80, WIDTH)) * SIZES, jnp.float32) for _ in range(2)]
WEIGHTS = {
    name: jnp.asarray(RNG.standard_t(4, size=(WIDTH, WIDTH)) / 8, jnp.float32)
    for name in ("first", "second", "last")
}
CALIBRATED = [name for name in _registry.NAMES if _registry.statistics_of(name)]
REQUIRING = [name for name in CALIBRATED if name != "mse"]


class Foreign(nnx.Module):
    """A layer of another package, with a transposed kernel."""

    def __init__(self, kernel):
        self.weight = nnx.Param(kernel.T)

    def __call__(self, x):
        return jnp.einsum("...k,nk->...n", x, self.weight[...])


class Model(nnx.Module):
    """Three products: of layers, or of a foreign layer, a raw parameter and a layer."""

    def __init__(self, foreign: bool = False):
        for name, kernel in WEIGHTS.items():
            layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            layer.kernel.set_value(kernel)
            setattr(self, name, layer)
        if foreign:
            self.first, self.second = Foreign(WEIGHTS["first"]), nnx.Param(WEIGHTS["second"])

    def __call__(self, x):
        x = nnx.relu(self.first(x))
        second: Any = self.second
        x = x @ second[...] if isinstance(second, nnx.Param) else second(x)
        return self.last(nnx.relu(x))


class ForeignLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.normal(), (WIDTH, WIDTH))
        return jnp.einsum("...k,nk->...n", x, weight)


class LinenModel(nn.Module):
    foreign: bool = False

    @nn.compact
    def __call__(self, x):
        if not self.foreign:
            x = nn.relu(nn.Dense(WIDTH, name="first")(x))
            x = nn.Dense(WIDTH, name="second")(x)
        else:
            x = nn.relu(ForeignLinen(name="first")(x))
            x = x @ self.param("second", nn.initializers.normal(), (WIDTH, WIDTH))
        return nn.Dense(WIDTH, name="last")(nn.relu(x))


def variables(foreign: bool = False) -> Any:
    params: Any = {name: {"kernel": kernel, "bias": jnp.zeros(WIDTH)} for name, kernel in WEIGHTS.items()}
    if foreign:
        params |= {"first": {"weight": WEIGHTS["first"].T}, "second": WEIGHTS["second"]}
    return {"params": params}


def hooks(package):
    equation = "...k,nk->...n"
    return [
        package.EinsumLayer(r".*\.Foreign(Linen)?", "weight", equation),
        package.EinsumParameter("second", "...k,kn->...n"),
    ]


def options(method, calibration=BATCHES):
    return {"quantizer": method, "calibration": calibration if method in CALIBRATED else None}


def nnx_quantized(method, foreign=False, **more):
    model: Any = Model(foreign)
    given = {"layers": hooks(jl_nnx) if foreign else ()} | options(method) | more
    jl_nnx.quantize_model(model, FORMAT, **given)
    return model


def linen_quantized(method, foreign=False, **more):
    given = {"layers": hooks(jl_linen) if foreign else ()} | options(method) | more
    return jl_linen.quantize_model(
        LinenModel(foreign), variables(foreign), FORMAT, BATCHES[0], **given
    )[:2]


def words(model: Any) -> dict[str, np.ndarray]:
    """The arrays of the three weights."""
    found: dict[str, np.ndarray] = {}
    for name in WEIGHTS:
        if isinstance(model, nnx.Module):
            layer: Any = getattr(model, name)
            arrays = {leaf: getattr(layer.kernel, leaf) for leaf in ("packed", "scale")}
            factor = getattr(layer, "lhs_factor", None)
            arrays |= {} if factor is None else {"lhs_factor": factor[...]}
        else:
            held = model[1]["quantized"][name]
            arrays = {k: x for k, x in held.get("weight", held).items() if k != "version"}
        found |= {f"{name}.{leaf}": np.asarray(x) for leaf, x in arrays.items()}
    return found


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        np.testing.assert_array_equal(x, wanted[name], err_msg=name)


@pytest.mark.parametrize("method", _registry.NAMES)
def test_packages_and_hooks_agree(method):
    """Linen models and layers of other packages get the words of the NNX model."""
    model, (module, held) = nnx_quantized(method), linen_quantized(method)
    wanted = words(model)
    for found in ((module, held), nnx_quantized(method, True), linen_quantized(method, True)):
        assert_same(words(found), wanted)
    exact, rounded = Model()(BATCHES[0]), nnx_quantized("absmax")(BATCHES[0])
    error = jnp.linalg.norm(model(BATCHES[0]) - exact) / jnp.linalg.norm(rounded - exact)
    print(method, error)
    np.testing.assert_allclose(module.apply(held, BATCHES[0]), model(BATCHES[0]), atol=1e-5)


class Interrupted(Exception):
    pass


def counting(limit):
    """Runs batches of models, and raises in a call; with the number of calls."""
    calls = []

    def apply(*args):
        calls.append(1)
        if len(calls) == limit:
            raise Interrupted
        model, *given = args
        return model.apply(*given) if len(given) == 2 else model(*given)

    return apply, calls


@pytest.mark.parametrize("package", ["nnx", "linen"])
@pytest.mark.parametrize("method", CALIBRATED)
def test_interrupted_calibrations_resume(method, package, tmp_path):
    """An interruption in the second of three layers: two are left."""
    run = nnx_quantized if package == "nnx" else linen_quantized
    wanted = words(run(method))
    for limit, count in ((5, 5), (None, 5)):
        apply, calls = counting(limit)
        calibration = Calibration(BATCHES, apply=apply, folder=tmp_path)
        try:
            found = run(method, calibration=calibration)
        except Interrupted:
            assert limit
            continue
        finally:
            assert len(calls) == count
        assert_same(words(found), wanted)


SPEC = jax.P("a", "b")


class One(nnx.Module):
    """The first layer of the models, with sharding metadata."""

    def __init__(self):
        init = nnx.with_partitioning(lambda *_: WEIGHTS["first"], tuple(SPEC))
        self.first = nnx.Linear(WIDTH, WIDTH, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.first(x)


class LinenOne(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH, use_bias=False, name="first")(x)


def arrays_on(mesh: Any, package: str, method: str) -> Any:
    """The arrays of the quantized layer on a mesh."""

    def placed(x, spec):
        return jax.device_put(x, jax.NamedSharding(mesh, spec))

    kernel, batches = placed(WEIGHTS["first"], SPEC), [placed(x, jax.P()) for x in BATCHES]
    given = options(method, batches)
    if package == "linen":
        held = {"params": {"first": {"kernel": nn.Partitioned(kernel, tuple(SPEC))}}}
        found = jl_linen.quantize_model(LinenOne(), held, FORMAT, batches[0], **given)[1]
        return nn.unbox(found["quantized"]["first"])
    with nnx.use_eager_sharding(False):
        model: Any = One()
    model.first.kernel.set_value(kernel)
    jl_nnx.quantize_model(model, FORMAT, **given)
    return nnx.to_pure_dict(nnx.state(model.first))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("method", _registry.NAMES)
def test_words_on_a_mesh_are_those_of_one_device(method, kind):
    """Four devices have a quarter of the weight each."""
    types = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=types, devices=jax.devices("cpu")[:4])
    wanted = {name: x for name, x in words(nnx_quantized(method)).items() if "first" in name}
    for package in ("nnx", "linen"):
        with jax.set_mesh(mesh):
            found = arrays_on(mesh, package, method)
        assert found["packed"].sharding.spec == jax.P("b", "a", None)
        arrays = {f"first.{name}": np.asarray(x) for name, x in found.items() if name != "version"}
        assert_same(arrays, wanted)
