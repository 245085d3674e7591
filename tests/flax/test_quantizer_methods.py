"""Every quantizer: NNX and Linen models, foreign layers, meshes, interruptions, unusual weights and
inputs. The methods come from the registry, so a new one is tested too."""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxlowbit import linen as jl_linen
from jaxlowbit import nnx as jl_nnx
from jaxlowbit import quantize
from jaxlowbit._core.format import as_format
from jaxlowbit.quantizers import Calibration, Statistics, _registry
from jaxlowbit.quantizers._calibration import with_identity

WIDTH, GROUP, FORMAT = 128, 32, "int3-g32-float"
RNG = np.random.default_rng(0)
SIZES = np.exp(RNG.normal(size=WIDTH))
BATCHES = [jnp.asarray(RNG.normal(size=(80, WIDTH)) * SIZES, jnp.float32) for _ in range(2)]
WEIGHTS = {
    name: jnp.asarray(RNG.standard_t(4, size=(WIDTH, WIDTH)) / 8, jnp.float32)
    for name in ("first", "second", "last")
}
CALIBRATED = [name for name in _registry.NAMES if _registry.statistics_of(name)]


class Foreign(nnx.Module):
    """A layer of another package, with a transposed kernel."""

    def __init__(self, kernel):
        self.weight = nnx.Param(kernel.T)

    def __call__(self, x):
        return jnp.einsum("...k,nk->...n", x, self.weight[...])


class Model(nnx.Module):
    """Three products: of layers, or of a foreign layer, a raw parameter and a layer."""

    first: Any
    second: Any
    last: Any

    def __init__(self, foreign: bool = False):
        self.foreign = foreign
        for name, kernel in WEIGHTS.items():
            layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            layer.kernel.set_value(kernel)
            setattr(self, name, layer)
        if foreign:
            self.first, self.second = Foreign(WEIGHTS["first"]), nnx.Param(WEIGHTS["second"])

    def __call__(self, x):
        x = nnx.relu(self.first(x))
        x = x @ self.second[...] if self.foreign else self.second(x)
        return self.last(nnx.relu(x))


class ForeignLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.normal(), (WIDTH, WIDTH))
        return jnp.einsum("...k,nk->...n", x, weight)


class LinenModel(nn.Module):
    foreign: bool = False

    @nn.compact
    def __call__(self, x, depth=3):
        if not self.foreign:
            x = nn.relu(nn.Dense(WIDTH, name="first")(x))
            if depth == 1:
                return x
            x = nn.Dense(WIDTH, name="second")(x)
        else:
            x = nn.relu(ForeignLinen(name="first")(x))
            x = x @ self.param("second", nn.initializers.normal(), (WIDTH, WIDTH))
        return nn.Dense(WIDTH, name="last")(nn.relu(x))


def variables(foreign: bool = False) -> Any:
    params: Any = {
        name: {"kernel": kernel, "bias": jnp.zeros(WIDTH)} for name, kernel in WEIGHTS.items()
    }
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
    given: Any = {"layers": hooks(jl_nnx) if foreign else ()} | options(method) | more
    jl_nnx.quantize_model(model, FORMAT, **given)
    return model


def linen_quantized(method, foreign=False, **more):
    given: Any = {"layers": hooks(jl_linen) if foreign else ()} | options(method) | more
    return jl_linen.quantize_model(
        LinenModel(foreign), variables(foreign), FORMAT, BATCHES[0], **given
    )[:2]


def words(model: Any) -> dict[str, np.ndarray]:
    """The arrays of the three weights."""
    found: dict[str, np.ndarray] = {}
    for name in WEIGHTS:
        if isinstance(model, nnx.Module):
            layer: Any = getattr(model, name)
            arrays = {leaf: getattr(layer.kernel, leaf) for leaf in ("packed", "scale", "zero")}
            factor = getattr(layer, "lhs_factor", None)
            arrays |= {} if factor is None else {"lhs_factor": factor[...]}
        else:
            held = model[1]["quantized"][name]
            arrays = {k: x for k, x in held.get("weight", held).items() if k != "version"}
        found |= {f"{name}.{leaf}": np.asarray(x) for leaf, x in arrays.items()}
    return found


@functools.cache
def of_one_device(method):
    return words(nnx_quantized(method))


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        np.testing.assert_array_equal(x, wanted[name], err_msg=name)


@pytest.mark.parametrize("method", _registry.NAMES)
def test_packages_and_hooks_agree(method):
    """Linen models and layers of other packages get the words of the NNX model. Its first layer
    gets the words of `quantize`."""
    statistics = Statistics.of(BATCHES[0], full=True) + Statistics.of(BATCHES[1], full=True)
    if not _registry.factors_of(method):
        given = statistics if method in CALIBRATED else None
        array = quantize(WEIGHTS["first"], FORMAT, quantizer=method, statistics=given)
        np.testing.assert_array_equal(of_one_device(method)["first.packed"], array.packed)
    for found in (
        linen_quantized(method),
        nnx_quantized(method, foreign=True),
        linen_quantized(method, foreign=True),
    ):
        assert_same(words(found), of_one_device(method))


class InterruptedRunError(Exception):
    pass


def counting(limit):
    """A function that runs a batch, and raises in the call of this number; and the calls."""
    calls = []

    def apply(model, held, batch):
        calls.append(batch)
        if len(calls) == limit:
            raise InterruptedRunError
        return model.apply(held, batch)

    return apply, calls


@pytest.mark.parametrize("method", CALIBRATED)
def test_interrupted_calibrations_of_linen_resume(method, tmp_path):
    """A run stops in the second of three layers, and the next one calibrates the two that are left:
    one call finds the order, and each layer takes two."""
    apply, calls = counting(limit=5)
    with pytest.raises(InterruptedRunError):
        linen_quantized(method, calibration=Calibration(BATCHES, apply=apply, folder=tmp_path))
    apply, calls = counting(limit=None)
    found = linen_quantized(method, calibration=Calibration(BATCHES, apply=apply, folder=tmp_path))
    assert len(calls) == 5
    assert_same(words(found), of_one_device(method))


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


@pytest.mark.parametrize("method", _registry.NAMES)
def test_words_on_a_mesh_are_those_of_one_device(method):
    """Four devices have a quarter of the weight each."""
    wanted = {name: x for name, x in of_one_device(method).items() if "first" in name}
    for package, kind in (("nnx", "Auto"), ("linen", "Explicit"))[: 1 + (method == "smoothquant")]:
        types = (getattr(jax.sharding.AxisType, kind),) * 2
        mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=types, devices=jax.devices("cpu")[:4])
        with jax.set_mesh(mesh):
            found = arrays_on(mesh, package, method)
        assert found["packed"].sharding.spec == jax.P("b", "a", None)
        arrays = {f"first.{name}": np.asarray(x) for name, x in found.items() if name != "version"}
        assert_same(arrays, wanted)


def refuses(message):
    return pytest.raises(ValueError, match=f"(?s)quantize_model: .*{message}")


@pytest.mark.parametrize("method", _registry.NAMES)
def test_weights_that_are_not_finite(method, monkeypatch):
    message = r"in second: weight has 1 values that are NaN or infinite, the first at \(3, 5\)"
    monkeypatch.setitem(WEIGHTS, "second", WEIGHTS["second"].at[3, 5].set(jnp.nan))
    model: Any = Model()
    with refuses(message):
        jl_nnx.quantize_model(model, FORMAT, **options(method))
    assert type(model.first) is nnx.Linear  # no layer has changed
    monkeypatch.setitem(WEIGHTS, "second", WEIGHTS["second"].at[3, 5].set(-jnp.inf))
    with refuses(message):
        linen_quantized(method, foreign=True)


@pytest.mark.parametrize("method", CALIBRATED)
def test_inputs_that_are_not_finite(method):
    for run, value, message in (
        (nnx_quantized, np.nan, "are NaN or infinite; leave"),
        (linen_quantized, np.inf, "are NaN or infinite; leave"),
        (linen_quantized, 1e20, r"reach 1e\+20, and their squares overflow float32"),
    ):
        with refuses(f"the inputs of first in the calibration {message}"):
            run(method, calibration=[BATCHES[0], BATCHES[1].at[7, 9].set(value)])


@pytest.mark.parametrize("method", CALIBRATED)
def test_layers_that_no_batch_reaches(method):
    model: Any = Model()
    calibration = Calibration(BATCHES, apply=lambda model, x: model.first(x))
    with refuses("no batch of calibration runs second, last, so"):
        given = options(method, calibration)
        jl_nnx.quantize_model(model, FORMAT, **given)
    assert type(model.first) is nnx.Linear
    calibration = Calibration(BATCHES, apply=lambda model, *x: model.apply(*x, depth=1))
    with refuses("no batch of calibration runs second, last, so"):
        linen_quantized(method, calibration=calibration)


@pytest.mark.parametrize("method", CALIBRATED)
def test_fewer_rows_than_features(method):
    """One warning with a layer, if the method reads full second moments."""
    full = _registry.statistics_of(method) == "full"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = nnx_quantized(method, calibration=[BATCHES[0][:8]])
    message = "quantize_model: calibration has 8 rows of inputs for first, fewer than its 128"
    assert [str(x.message)[: len(message)] for x in found] == [message] * full
    assert all(np.isfinite(getattr(model, name).kernel.dequantize()).all() for name in WEIGHTS)


def unusual_weight():
    """A dead row, a dead column, and equal groups: of a column, and of a part of one."""
    weight = np.array(WEIGHTS["first"])
    weight[:, 3], weight[:, 5], weight[-GROUP:, 7] = 0, 1.5, -0.75
    weight[9] = 0
    return weight


def statistics_of(inputs):
    return Statistics.of(np.asarray(inputs, np.float32), full=True)


@functools.cache
def unusual_inputs():
    rows = np.concatenate(BATCHES)
    none = Statistics(jnp.zeros((WIDTH, WIDTH)), jnp.zeros(WIDTH), jnp.int32(0))
    return {
        "dead features": statistics_of(np.where(np.arange(WIDTH) % 2, rows, 0)),
        "constant": statistics_of(np.broadcast_to(rows[0], rows.shape)),
        "one row": statistics_of(rows[:1]),
        "zeros": statistics_of(0 * rows),
        "usual": statistics_of(rows),
        "large": statistics_of(2.0**53 * rows),
        "small": statistics_of(2.0**-53 * rows),
        "none": with_identity(none),  # as of an expert without rows
    }


def nearest_rows(method, name):
    """The rows that are rounded to nearest; GPTQ compensates errors in others."""
    if method not in ("gptq", "distill") or name == "zeros" or (method, name) == ("gptq", "none"):
        return range(WIDTH)
    return range(0, WIDTH, 2) if (method, name) == ("gptq", "dead features") else ()


def assert_nearest(weight, found, row):
    """Each value of a row is rounded to the nearest number of its group."""
    values = found[row // GROUP * GROUP :][:GROUP]
    nearest = np.abs(values - weight[row]).min(axis=0)
    assert (np.abs(found[row] - weight[row]) <= nearest + 1e-6).all()


@pytest.mark.parametrize("method", _registry.NAMES)
def test_unusual_weights_and_inputs(method):
    weight = unusual_weight()
    given = unusual_inputs() if method in CALIBRATED else {"no statistics": None}
    dtype = jnp.float32 if _registry.factors_of(method) else None  # as for models: one program
    seen: dict[str, Any] = {}
    for name, statistics in given.items():
        arrays = [
            quantize(weight, FORMAT, quantizer=method, statistics=statistics, scale_dtype=dtype)
            for _ in range(2)
        ]
        assert all(map(np.array_equal, *map(jax.tree.leaves, arrays))), name
        seen[name] = jax.tree.leaves(arrays[0])
        found = np.asarray(arrays[0].dequantize(jnp.float32))
        assert np.isfinite(found).all() and (found[:, 3] == 0).all(), name
        np.testing.assert_allclose(found[:, 5], weight[:, 5], atol=1e-6, err_msg=name)
        rows = nearest_rows(method, name)
        for row in rows:
            assert_nearest(weight, found, row)
        if len(rows) == WIDTH:
            np.testing.assert_allclose(found[-GROUP:, 7], -0.75, rtol=1e-6, err_msg=name)
    for name in seen.keys() & {"large", "small"}:  # powers of two change no bit
        assert all(map(np.array_equal, seen[name], seen["usual"])), name


@pytest.mark.parametrize("method", _registry._SCALING)
def test_factors_of_unusual_weights_and_inputs(method):
    weight, compute = jnp.asarray(unusual_weight()), _registry.factors_of(method)
    for name, statistics in unusual_inputs().items():
        given: Any = (weight,), statistics, compute, (as_format("test", FORMAT),)
        found, again = (np.asarray(_registry.stack_factors(*given)) for _ in range(2))
        np.testing.assert_array_equal(found, again)
        assert np.isfinite(found).all() and (found > 0).all(), name
        if name in ("zeros", "none"):
            assert (found == 1).all(), name
        if method == "awq" and name == "dead features":
            np.testing.assert_allclose(found[::2], found.max(), rtol=1e-6)
        if method == "smoothquant":
            assert found[9] == 1 and ((found[::2] == 1).all() or name != "dead features")


def test_statistics_that_are_not_finite():
    good = statistics_of(BATCHES[0])
    for value, message in ((np.nan, "are NaN"), (np.inf, "are NaN or infinite; leave those rows")):
        bad = dataclasses.replace(good, absmax=good.absmax.at[3].set(value))
        with pytest.raises(ValueError, match=f"quantize: the inputs of statistics {message}"):
            quantize(WEIGHTS["first"], FORMAT, quantizer="gptq", statistics=bad)
    with pytest.raises(ValueError, match="their squares overflow float32; scale these inputs"):
        large = Statistics.of(1e20 * BATCHES[0])
        quantize(WEIGHTS["first"], FORMAT, quantizer="mse", statistics=large)
