"""Weights captured as constants give the same results as weights passed as arguments.

XLA folds constants with an interpreter of HLO, which has had bugs.
"""

import functools
from collections.abc import Iterator
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import initial
from jax import export

from jaxlowbit import (
    DISABLED_EXPORT_CHECKS,
    Format,
    linen,
    quantize,
    quantize_activations,
    quantized_block,
    quantized_glu,
    quantized_matmul,
    quantized_matmuls,
    quantized_mlp,
    supported_backends,
)
from jaxlowbit import nnx as quantized_nnx
from jaxlowbit._core.columns import take_columns
from jaxlowbit._core.format import parse_format
from jaxlowbit._core.format_table import NAMED

ROWS, K, HIDDEN = 3, 256, 128
NUMBERS = tuple(np.random.default_rng(0).standard_normal(16).tolist())
TWO_LEVELS = (
    "int4-g32-two_level",
    "int6-g16-two_level",
    "int5-g32-float-two_level",
    "int2-g64-two_level",
)
FORMATS = {
    **NAMED,
    **{name: parse_format(name) for name in TWO_LEVELS},
    "int3-g32-integer": Format(3, 32, zero="integer"),
    "codebook": Format(4, 64, codebook=NUMBERS),
}
# Each kind of scale and zero once, for programs that are slow to compile.
KINDS = ("int4", "int3-g32-integer", "int4-int8", "nvfp4", "mxfp8", "int5-g32-float-two_level")


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-2])
    return jnp.asarray(values, dtype)


def weights_of(format: Format, quantize: Any = helpers.quantize) -> dict[str, Any]:
    return {
        "square": quantize(normal(K, K), format),
        "gate_up": quantize(normal(2, K, HIDDEN, seed=1), format),
        "down": quantize(normal(HIDDEN, K, seed=2), format),
        "permuted": quantize(
            normal(K, 64, seed=3), format, permutation=np.random.default_rng(4).permutation(K)
        ),
        "bias": normal(1, K, seed=5)[0],
        "norm": 1 + normal(1, K, seed=6)[0],
    }


def reads(weights: dict[str, Any], x: jax.Array, backend: Any) -> dict[str, Any]:
    """The result of each operation that reads packed weights, by name."""
    square = weights["square"]
    return {
        "product": quantized_matmul(x, square, backend=backend),
        "select": quantized_matmul(x, weights["gate_up"].select(jnp.int32(1)), backend=backend),
        "dequantize": square.dequantize(),
        "embed": take_columns(square, jnp.array([[0, 5], [-1, 70]]), x.dtype),
    }


def operations(weights: dict[str, Any], x: jax.Array, backend: Any) -> dict[str, Any]:
    """The result of each operation on packed weights, by name."""
    square, gate_up, down = (weights[name] for name in ("square", "gate_up", "down"))
    bias, norm = weights["bias"], weights["norm"]
    how = {"backend": backend}
    return reads(weights, x, backend) | {
        "definition": quantized_matmul(x, square, backend="xla"),
        "permuted": quantized_matmul(x, weights["permuted"], **how),
        "products": quantized_matmuls(x, (square, weights["permuted"]), **how),
        "epilogue": quantized_matmul(
            x, square, bias=bias.astype(x.dtype), activation="silu", residual=x, **how
        ),
        "glu": quantized_glu(x, gate_up, **how),
        "mlp": quantized_mlp(x, gate_up=gate_up, down=down, **how),
        "block": quantized_block(
            x,
            x,
            out=square,
            norm=norm,
            gate_up=gate_up,
            down=down,
            following=(norm, (square,)),
            **how,
        ),
        "indexed": x @ gate_up[1],
    }


def assert_same_as_arguments(
    run: Any, weights: dict[str, Any], x: jax.Array, rtol: float = 0
) -> None:
    want = jax.jit(run)(weights, x)
    got = jax.jit(lambda x: run(weights, x))(x)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for name, expected in want.items():
        bound = 0 if name in ("dequantize", "embed") else rtol
        for a, b in zip(*map(jax.tree.leaves, (got[name], expected)), strict=True):
            a, b = (np.asarray(leaf, np.float32) for leaf in (a, b))
            np.testing.assert_allclose(a, b, bound, bound * abs(b).max(), err_msg=name)


@pytest.mark.parametrize("name", FORMATS)
def test_closed_over_weights_match_arguments(name):
    run = operations if name in KINDS else reads
    run = functools.partial(run, backend=None)
    assert_same_as_arguments(run, weights_of(FORMATS[name]), normal(ROWS, K, seed=7))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("backend", ["cuda", "pallas", None])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_closed_over_weights_on_a_gpu(name, dtype, backend):
    x, weights = normal(ROWS, K, seed=7, dtype=dtype), weights_of(FORMATS[name])
    if backend and (reason := supported_backends(x, weights["square"])[backend]):
        pytest.skip(reason)
    run = functools.partial(operations, backend=backend)
    # XLA may add in a different order in dense products.
    assert_same_as_arguments(run, weights, x, rtol=float(jnp.finfo(dtype).eps))


# --- bitcasts -------------------------------------------------------------------------------------


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("name", FORMATS)
def test_no_program_changes_the_width_of_elements_by_a_bitcast(name):
    """XLA folds such a bitcast of a transposed constant incorrectly."""

    def program(w: jax.Array, x: jax.Array) -> Any:
        weights = {**weights_of(FORMATS[name], quantize), "square": quantize(w, FORMATS[name])}
        rounded = quantize_activations(x, jnp.int8)
        return operations(weights, x, None), rounded, weights["square"].dequantize()

    traced = jax.make_jaxpr(program)(normal(K, K), normal(ROWS, K))
    bitcasts = [e for e in equations(traced.jaxpr) if e.primitive.name == "bitcast_convert_type"]
    for equation in bitcasts:
        before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
        assert before.itemsize == after.itemsize, equation


# --- models, losses and exported programs ---------------------------------------------------------


class Model(nnx.Module):
    def __init__(self):
        self.table = nnx.Embed(96, K, embedding_init=initial, rngs=nnx.Rngs(0))
        self.up = nnx.Linear(K, HIDDEN, kernel_init=initial, rngs=nnx.Rngs(1))
        self.down = nnx.Linear(HIDDEN, K, kernel_init=initial, rngs=nnx.Rngs(2))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table(tokens)
        return self.table.attend(x + self.down(nnx.silu(self.up(x))))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(K, kernel_init=initial)(nn.silu(nn.Dense(HIDDEN, kernel_init=initial)(x)))


TOKENS = jnp.array([3, 1, 41, 59])


@pytest.mark.parametrize("name", ["int4-g32-two_level", "nvfp4"])
def test_models_as_constants(name):
    model = Model()
    quantized_nnx.quantize_model(model, {".*": FORMATS[name]})
    graph, state = nnx.split(model)
    want = jax.jit(lambda state: nnx.merge(graph, state)(TOKENS))(state)
    np.testing.assert_array_equal(jax.jit(lambda: model(TOKENS))(), want)

    x = normal(ROWS, K)
    module = LinenModel()
    variables = module.init(jax.random.key(0), x)
    module, variables, _ = linen.quantize_model(module, variables, FORMATS[name], x)
    want = jax.jit(module.apply)(variables, x)
    np.testing.assert_array_equal(jax.jit(lambda x: module.apply(variables, x))(x), want)


@pytest.mark.parametrize("name", ["int4-g32-two_level", "nvfp4"])
def test_losses_and_exported_programs_with_constants(name):
    weight, x = quantize(normal(K, HIDDEN), FORMATS[name]), normal(ROWS, K)

    def loss(x: jax.Array, weight: Any) -> jax.Array:
        return jnp.sum(quantized_matmul(x, weight) ** 2)

    want = jax.jit(jax.value_and_grad(loss))(x, weight)
    got = jax.jit(jax.value_and_grad(lambda x: loss(x, weight)))(x)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, got, want)  # XLA may add in a different order

    product = jax.jit(lambda x: x @ weight)
    exported = export.export(product, disabled_checks=DISABLED_EXPORT_CHECKS)(x)
    again = export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(x), x @ weight)
