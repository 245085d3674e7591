"""`quantize_model` on whole NNX and Linen transformers: results, memory and checkpoints."""

import functools
import gc
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import transformers
from flax import nnx, traverse_util
from helpers import dequantized
from jax.core import Tracer
from transformers import DEPTH, LINEAR, TOKENS, VOCABULARY, WIDTH

import jaxlowbit
import jaxlowbit.linen
import jaxlowbit.nnx
from jaxlowbit import Format, QuantizedArray

FORMAT = Format(bits=4, group_size=32, zero="integer")
EVERY = {"": FORMAT}  # includes the embedding, tied to the logits


@pytest.fixture(autouse=True)
def flax_promotes_dtypes():
    with jax.numpy_dtype_promotion("standard"):
        yield


class NnxModel:
    """A transformer with the operations of the tests, with one interface for both libraries."""

    def __init__(self, **options: Any):
        self.options = options
        self.model: Any = transformers.NnxTransformer(**options)

    def quantize(self, rules: Any = EVERY) -> jaxlowbit.nnx.QuantizationReport:
        return jaxlowbit.nnx.quantize_model(self.model, rules)

    def twin(self, **options: Any) -> "NnxModel":
        """The float model with the dequantized kernels."""
        twin = NnxModel(**self.options | options)
        layers: dict[Any, Any] = dict(nnx.iter_modules(twin.model))
        for path, layer in nnx.iter_modules(self.model):
            if isinstance(layer, jaxlowbit.nnx.QuantizedLinear):
                layers[path].kernel.set_value(dequantized(layer.kernel))
            if isinstance(layer, jaxlowbit.nnx.QuantizedEmbed):
                layers[path].embedding.set_value(dequantized(layer.kernel).T)
        return twin

    def forget(self) -> None:
        """Leaves the shapes and dtypes of its arrays only."""
        self.model = nnx.eval_shape(lambda: transformers.NnxTransformer(**self.options))

    @property
    def arrays(self) -> Any:
        return nnx.to_pure_dict(nnx.state(self.model))

    def load(self, arrays: Any) -> None:
        state = nnx.state(self.model)
        nnx.replace_by_pure_dict(state, arrays)
        nnx.update(self.model, state)

    def run(self, x: Any) -> Any:
        return _run_nnx(*nnx.split(self.model), x)

    def pull(self, x: Any, cotangent: Any) -> Any:
        return _pull_nnx(*nnx.split(self.model), x, cotangent)


@functools.partial(jax.jit, static_argnums=0)
def _run_nnx(graph: Any, state: Any, x: Any) -> Any:
    return nnx.merge(graph, state)(x)


@functools.partial(jax.jit, static_argnums=0)
def _pull_nnx(graph: Any, state: Any, x: Any, cotangent: Any) -> Any:
    logits, pull = jax.vjp(lambda x: nnx.merge(graph, state).logits(x), x)
    return logits, *pull(cotangent)


class LinenModel:
    """A Linen module and its variables, with the interface of `NnxModel`."""

    def __init__(self, **options: Any):
        self.options = options
        self.model: Any = transformers.LinenTransformer(**options)
        self.arrays: Any = jax.tree.map(jnp.copy, _linen_arrays(self.model.distinct))

    def quantize(
        self, rules: Any = EVERY, donate: bool = True
    ) -> jaxlowbit.linen.QuantizationReport:
        self.model, self.arrays, report = jaxlowbit.linen.quantize_model(
            self.model, self.arrays, rules, TOKENS, donate=donate
        )
        return report

    def twin(self, **options: Any) -> "LinenModel":
        twin = LinenModel(**self.options | options)
        params: Any = traverse_util.flatten_dict(twin.arrays["params"])
        leaves: Any = traverse_util.flatten_dict(self.arrays["quantized"])
        for path, format in self.model.formats:
            names = ("packed", "scale", "zero", "version")
            arrays: Any = {name: leaves.get((*path, name)) for name in names}
            table = (*path, "embedding") in params
            key = (*path, "embedding" if table else "kernel")
            k, n = params[key].shape[:: -1 if table else 1]
            matrix = dequantized(QuantizedArray(**arrays, index=None, format=format, k=k, n=n))
            params[key] = matrix.T if table else matrix
        twin.arrays = {"params": traverse_util.unflatten_dict(params)}
        return twin

    def forget(self) -> None:
        """Leaves the shapes and dtypes of its arrays only."""
        self.arrays = jax.eval_shape(self.model.init, jax.random.key(0), TOKENS)

    def load(self, arrays: Any) -> None:
        self.arrays = arrays

    def run(self, x: Any) -> Any:
        return _run_linen(self.model, self.arrays, x)

    def pull(self, x: Any, cotangent: Any) -> Any:
        return _pull_linen(self.model, self.arrays, x, cotangent)


@functools.partial(jax.jit, static_argnums=0)
def _run_linen(model: Any, arrays: Any, x: Any) -> Any:
    return model.apply(arrays, x)


@functools.partial(jax.jit, static_argnums=0)
def _pull_linen(model: Any, arrays: Any, x: Any, cotangent: Any) -> Any:
    logits, pull = jax.vjp(lambda x: model.apply(arrays, x, method="logits"), x)
    return logits, *pull(cotangent)


@functools.cache
def _linen_arrays(distinct: int) -> Any:
    model: Any = transformers.LinenTransformer(distinct, distinct)
    return jax.jit(model.init)(jax.random.key(0), TOKENS)


@pytest.fixture(params=[NnxModel, LinenModel], ids=["nnx", "linen"])
def make(request):
    return request.param


# --- results -------------------------------------------------------------------------------------


@functools.cache
def evaluated(make: Any, dtype: Any, **options: Any) -> dict[str, dict[str, np.ndarray]]:
    """Logits and input gradients of the quantized model and of three reference models."""
    rng = np.random.default_rng(0)
    x, direction = rng.normal(size=(2, 9, WIDTH)), rng.normal(size=(2, 9, VOCABULARY))

    def evaluate(model: Any, dtype: Any) -> dict[str, np.ndarray]:
        logits, gradient = model.pull(jnp.asarray(x, dtype), jnp.asarray(direction, dtype))
        assert logits.dtype == gradient.dtype == dtype
        return {"logits": np.asarray(logits), "gradient": np.asarray(gradient)}

    model = make(dtype=dtype, **options)
    floats = evaluate(model, dtype)
    model.quantize()
    found = {"floats": floats, "quantized": evaluate(model, dtype)}
    found["twin"] = evaluate(model.twin(), dtype)
    with jax.enable_x64(True):
        exact = model.twin(dtype=jnp.float64)
        exact.load(jax.tree.map(lambda leaf: leaf.astype(jnp.float64), exact.arrays))
        found["exact"] = evaluate(exact, jnp.float64)
    return found


def assert_as_good_as_the_twin(found: dict[str, dict[str, np.ndarray]], name: str) -> None:
    """The quantized model is as close to the float64 twin as the twin in the model's dtype.

    Both round each weight, product and sum to the dtype of the activations, in different orders of
    addition. Their errors against float64 therefore have similar size, which depends on the layers,
    so no fixed tolerance applies. Twice the error of the twin is allowed; the model before
    quantization is far outside.
    """

    def error(which: str) -> float:
        return float(np.linalg.norm(found[which][name].astype(np.float64) - found["exact"][name]))

    assert 0 < error("quantized") <= 2 * error("twin")
    assert error("floats") > 10 * error("twin")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logits", "gradient"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_model_equals_its_fake_quantized_twin(make, dtype, name):
    depth = 2 if dtype == jnp.float32 else 1
    assert_as_good_as_the_twin(evaluated(make, dtype, depth=depth, distinct=depth), name)


# --- layers used twice ---------------------------------------------------------------------------


def test_nnx_layers_that_are_tied_stay_tied():
    model = NnxModel(distinct=2)
    report = model.quantize()
    first, again = model.model.blocks[1], model.model.blocks[3]
    assert first is again
    assert isinstance(first.mlp.up, jaxlowbit.nnx.QuantizedLinear)
    assert isinstance(model.model.embed, jaxlowbit.nnx.QuantizedEmbed)  # also computes the logits
    assert len(report.layers) == 2 * len(LINEAR) + 1
    state = nnx.to_flat_state(nnx.state(model.model, nnx.PathContains("packed")))
    assert len(state) == len({id(leaf) for _, leaf in state}) == 2 * len(LINEAR) + 1


def test_linen_layers_that_are_tied_stay_tied():
    model = LinenModel(distinct=2)
    report = model.quantize()
    assert len(report.layers) == 2 * len(LINEAR) + 1
    assert set(model.arrays["quantized"]) == {"embed", *(f"blocks_{i}" for i in range(2))}
    floats: Any = traverse_util.flatten_dict(model.arrays["params"])
    assert {path[-1] for path in floats} == {"scale", "bias"}  # of norms, and of attention


@pytest.mark.slow
def test_tied_layers_match_the_twin(make):
    found = evaluated(make, jnp.float32, depth=2, distinct=1)
    assert_as_good_as_the_twin(found, "logits")


# --- memory --------------------------------------------------------------------------------------


@functools.cache  # called for every Python call and return
def in_core(filename: str) -> bool:
    return Path(filename).parent.name in ("_core", "quantizers")


class LiveBytes:
    """Bytes of arrays, sampled at calls and returns of functions in `_core` and `quantizers`.

    Arrays of earlier tests, which may be thousands, are not counted, but referenced, so that their
    ids are not reused.
    """

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.at_layers: list[int] = []
        gc.collect()
        self._others = jax.live_arrays()
        self._ids = {id(array) for array in self._others}

    def now(self) -> int:
        return sum(array.nbytes for array in jax.live_arrays() if id(array) not in self._ids)

    def __enter__(self) -> "LiveBytes":
        sys.setprofile(self._sample)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _sample(self, frame: Any, event: str, arg: Any) -> None:
        del arg
        code = frame.f_code
        if event not in ("call", "return") or not in_core(code.co_filename):
            return
        self.samples.append(self.now())
        quantizes = event == "call" and code is jaxlowbit.quantize.__code__
        if quantizes and not isinstance(frame.f_locals["weight"], Tracer):  # as in a check
            self.at_layers.append(self.samples[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True], ids=["", "originals kept alive"])
def test_one_layer_exists_twice_at_most(make, kept):
    live = LiveBytes()
    model = make(depth=1, distinct=1)
    originals = [model.arrays] if kept else []
    start = live.now()
    with live:
        report = model.quantize(**{"donate": not kept} if make is LinenModel else {})
    sizes = [(layer.nbytes_before, layer.nbytes_after) for layer in report.layers]
    saved = [before - after for before, after in sizes]
    assert len(live.at_layers) == len(sizes) == len(LINEAR) + 1
    expected = start - np.cumsum([0, *saved[:-1]])
    turned = [layer.nbytes_before * (layer.path == "embed") for layer in report.layers]
    small = 512  # keys and versions
    surplus = np.array(live.at_layers) - expected - turned
    assert (np.abs(surplus) <= small).all() == (not kept)
    layer = max(before for before, _ in sizes)
    assert (max(live.samples) <= start + layer + small) == (not kept)
    del originals


def test_quantizing_one_weight_needs_less_memory_than_the_weight():
    weight = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    quantize = jax.jit(jaxlowbit.quantize, static_argnums=1)
    stats: Any = quantize.lower(weight, FORMAT).compile().memory_analysis()
    assert stats.temp_size_in_bytes + stats.output_size_in_bytes < weight.size * 4


# --- models without arrays, and stored ones ------------------------------------------------------


@pytest.mark.slow
def test_abstract_model_is_filled_from_a_checkpoint(make, tmp_path):
    model, restored = (make(depth=1, distinct=1) for _ in range(2))
    model.quantize()
    restored.forget()
    report = restored.quantize()
    assert all(layer.error is None for layer in report.layers)
    if make is NnxModel:
        assert nnx.graphdef(restored.model) == nnx.graphdef(model.model)
    abstract = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), restored.arrays)
    assert abstract == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), model.arrays)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", model.arrays)
        checkpointer.wait_until_finished()
        restored.load(checkpointer.restore(tmp_path / "model", restored.arrays))
    jax.tree.map(np.testing.assert_array_equal, restored.arrays, model.arrays)
    np.testing.assert_array_equal(restored.run(TOKENS), model.run(TOKENS))


# --- the report ----------------------------------------------------------------------------------


def test_report_covers_every_layer(make):
    model, floats = make(), make()
    report = model.quantize()
    block = {NnxModel: "blocks.{}", LinenModel: "blocks_{}"}[make]
    paths = {f"{block.format(i)}.{name}" for i in range(DEPTH) for name in LINEAR} | {"embed"}
    assert {layer.path for layer in report.layers} == paths
    assert len(report.layers) == len(paths)
    before, after = weights(floats), weights(model.twin())
    for layer in report.layers:
        weight, rounded = before[layer.path], after[layer.path]
        k, n = weight.shape
        blocks = -(-k // 64) * -(-n // 64)
        assert layer.shape == (k, n) and layer.format == FORMAT
        assert layer.nbytes_before == 4 * k * n
        # Words; per 32 rows of a channel a float32 scale and a byte of zero; the version.
        assert layer.nbytes_after == blocks * 64 * 64 // 2 + blocks * 2 * 64 * 5 + 4
        error = np.linalg.norm(rounded - weight) / np.linalg.norm(weight)
        assert layer.error == pytest.approx(float(error), rel=1e-4)
        assert layer.backend == {"cpu": "cpu", "gpu": "cuda"}[jax.default_backend()]
    lines = str(report).partition("\n\n")[0].splitlines()
    assert len(lines) == 1 + len(paths)
    assert all(any(line.startswith(f"{path} ") for line in lines) for path in paths)


def weights(model: Any) -> dict[str, np.ndarray]:
    arrays = model.arrays if isinstance(model, NnxModel) else model.arrays["params"]
    leaves: Any = traverse_util.flatten_dict(arrays)
    return {
        ".".join(map(str, path[:-1])): np.asarray(leaf)
        for path, leaf in leaves.items()
        if path[-1] in ("kernel", "embedding")
    }
