"""`jax.export` of programs with quantized arguments: serialization, and runs elsewhere."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import TARGET, quantize
from jax import export

import jaxlowbit
from jaxlowbit import DISABLED_EXPORT_CHECKS, Format, QuantizedArray, linen
from jaxlowbit import nnx as layers
from jaxlowbit._backends import call, extension
from jaxlowbit._core import exporting

K, N = 72, 80


def floats(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


ARRAYS = {
    "4 bits": lambda: quantize(floats(K, N), Format(4, 32)),
    "3 bits, float zero": lambda: quantize(floats(K, N), Format(3, 16, "float")),
    "a stack": lambda: quantize(floats(3, K, N), Format(8, zero="integer")),
    "a view": lambda: quantize(floats(3, K, N), Format(8)).select(1),
    "permuted": lambda: quantize(floats(K, N), Format(4, 32), permutation=jnp.arange(K)[::-1]),
    "shards": lambda: quantize(floats(K, N), Format(4, 16), shards=(2, 1)),
}


def stored_and_loaded(exported: export.Exported) -> export.Exported:
    return export.deserialize(exported.serialize())


@pytest.mark.parametrize("kind", ARRAYS)
def test_the_structure_of_arguments_and_results_is_preserved(kind):
    array = ARRAYS[kind]()
    exported = export.export(jax.jit(lambda q: {"same": q}))(array)
    loaded = stored_and_loaded(exported)
    assert loaded.in_tree == jax.tree.structure(((array,), {}))
    result: Any = loaded.call(array)
    same: QuantizedArray = result["same"]
    assert jax.tree.structure(same) == jax.tree.structure(array)
    assert (same.k, same.n, same.shards, same.shape) == (K, N, array.shards, array.shape)
    np.testing.assert_array_equal(same.dequantize(), array.dequantize())


def test_programs_quantize():
    exported = export.export(jax.jit(lambda w: jaxlowbit.quantize(w, Format(4, 32))))(floats(K, N))
    array: Any = stored_and_loaded(exported).call(floats(K, N))
    assert array.format == Format(4, 32) and array.shape == (K, N)
    array.check_words()


IN_ANOTHER_PROCESS = f"""
import sys
import jax
import jax.numpy as jnp
import jaxlowbit
from jax import export

exported = export.deserialize(bytearray(sys.stdin.buffer.read()))
rows, weight = jnp.ones((5, {K})), jnp.ones(({K}, {N}))
for x in (rows, rows[:2]):
    y = exported.call(x, jaxlowbit.quantize(weight, "int8"))
    assert y.shape == (len(x), {N}) and abs(y - {K}).max() < 1e-3, y
"""


def test_any_number_of_rows_in_another_process():
    """The other process has only the library, without the function and the weights."""
    array = quantize(jnp.ones((K, N)), Format(8))
    rows = jax.ShapeDtypeStruct(export.symbolic_shape(f"rows, {K}"), jnp.float32)
    program = jax.jit(lambda x, q: x @ q)
    exported = export.export(program, disabled_checks=DISABLED_EXPORT_CHECKS, platforms=["cpu"])(
        rows, array
    )
    assert TARGET in exported.mlir_module()
    run = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        input=bytes(exported.serialize()),
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
    )
    assert run.returncode == 0, run.stderr.decode()


def test_a_stack_of_any_number_of_matrices():
    def sums(x: jax.Array, stack: QuantizedArray) -> jax.Array:
        return jax.vmap(lambda q: x @ q)(stack).sum(0)

    stack = ARRAYS["a stack"]()
    count, version = export.symbolic_shape("layers"), stack.version
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*count, *leaf.shape[version.ndim :]), leaf.dtype), stack
    )
    program = export.export(jax.jit(sums), disabled_checks=DISABLED_EXPORT_CHECKS)
    loaded = stored_and_loaded(program(floats(5, K), abstract))
    for some in (stack, stack[:2]):
        np.testing.assert_allclose(
            loaded.call(floats(5, K), some), sums(floats(5, K), some), rtol=1e-5, atol=1e-5
        )


def test_the_derivative_is_stored_too():
    array, x = ARRAYS["4 bits"](), floats(5, K)
    program = jax.jit(lambda x, q: x @ q)
    exported = export.export(program, disabled_checks=DISABLED_EXPORT_CHECKS)(x, array)
    loaded = export.deserialize(exported.serialize(vjp_order=1))
    got, want = (jax.grad(lambda x, f=f: f(x, array).sum())(x) for f in (loaded.call, program))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_models_of_linen():
    """Their variables are dicts of arrays."""
    x = floats(5, K)
    module = nn.Sequential([nn.Dense(N), nn.relu, nn.Dense(N)])
    variables: Any = module.init(jax.random.key(0), x)
    model, variables, _ = linen.quantize_model(module, variables, Format(8), x)
    exported = export.export(jax.jit(model.apply), disabled_checks=DISABLED_EXPORT_CHECKS)(
        variables, x
    )
    got = stored_and_loaded(exported).call(variables, x)
    np.testing.assert_allclose(got, model.apply(variables, x), rtol=1e-5, atol=1e-5)


def test_models_of_nnx():
    """States are passed as leaves, because JAX does not serialize the types of Flax."""
    x = floats(5, K)
    model = layers.QuantizedLinear(K, N, format=Format(8), rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)

    def program(leaves: list[jax.Array], x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))(x)

    exported = export.export(jax.jit(program), disabled_checks=DISABLED_EXPORT_CHECKS)(leaves, x)
    got = stored_and_loaded(exported).call(leaves, x)
    np.testing.assert_allclose(got, model(x), rtol=1e-5, atol=1e-5)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["quantized_matmul", "quantized_matmuls"])
def test_the_error_of_jax_names_the_call_and_the_way_out(name, platform, cuda):
    function = {
        "quantized_matmul": lambda x, q: x @ q,
        "quantized_matmuls": lambda x, q: jaxlowbit.quantized_matmuls(x, (q, q)),
    }[name]
    x = floats(5, K).astype(jnp.bfloat16)
    message = rf"jaxlowbit_sequence(.|\n)*{re.escape(exporting.REMEDY)}"
    with pytest.raises(ValueError, match=message):
        export.export(jax.jit(function), platforms=[platform])(x, ARRAYS["4 bits"]())
    checks = exporting.REMEDY.rpartition("=")[2].rstrip(")")
    assert checks == "jaxlowbit.DISABLED_EXPORT_CHECKS"
    export.export(jax.jit(function), platforms=[platform], disabled_checks=DISABLED_EXPORT_CHECKS)(
        x, ARRAYS["4 bits"]()
    )


def test_every_call_of_a_program_may_be_exported():
    targets = {name for names in extension.ffi.targets().values() for name in names}
    assert targets >= {TARGET}
    allowed = {check.is_custom_call() for check in DISABLED_EXPORT_CHECKS}
    assert targets - {call.TIMES_TARGET} <= allowed
    constants = {value for name, value in vars(call).items() if name.endswith("_TARGET")}
    assert allowed == constants - {call.TIMES_TARGET}


def test_weights_of_another_format_raise():
    exported = export.export(jax.jit(lambda q: q.dequantize()))(ARRAYS["4 bits"]())
    with pytest.raises(ValueError, match=r"Format\(bits=8(.|\n)*Format\(bits=4"):
        exported.call(quantize(floats(K, N), Format(8, 32)))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("form", 5, "stores it with form version 5, but this library reads version 4; export"),
        ("form", None, "stores it with form version None, but this library reads version 4"),
        ("layout", 2, "stores it with layout version 2, but this library reads version 1"),
    ],
)
def test_programs_of_other_versions_raise(monkeypatch, name, value, message):
    array = ARRAYS["4 bits"]()
    exported = export.export(jax.jit(lambda q: q.dequantize()))(array)
    dumps = json.dumps
    monkeypatch.setattr(exporting.json, "dumps", lambda fields: dumps(fields | {name: value}))
    stored = exported.serialize()
    with pytest.raises(ValueError, match=f"QuantizedArray: this program {message}"):
        export.deserialize(stored)
