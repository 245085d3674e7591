"""Wrong calls of public functions raise a sentence that names the function."""

import functools
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import pytest
import right_calls
import wrong_calls

import jaxlowbit
from jaxlowbit import linen as jl_linen
from jaxlowbit import llm, quantizers
from jaxlowbit import nnx as jl_nnx

QUICK, ALL = 300, 1300 if hypothesis.settings().derandomize else 2300
ELSEWHERE = {"from_qarray": "qwix", "tune": "a GPU"}
"""Calls that work only under further conditions."""
jl: Any = jaxlowbit  # `Any`: the calls below have wrong types


@pytest.fixture(autouse=True)
def promotion_of_users():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def complaints(seeds: range) -> list[str]:
    found = map(wrong_calls.complaint, seeds)
    return [reason for reason in found if reason is not None]


@pytest.mark.parametrize("name", right_calls.ELSEWHERE)
def test_unmodified_calls_are_valid(name):
    """The unchanged calls must work, so that each error is due to the change; `test_x64.py` calls
    the others."""
    if name not in ELSEWHERE:
        wrong_calls.CALLS[name].run({})


def test_every_public_function_and_class_is_called_wrongly():
    modules = jaxlowbit, jl_nnx, jl_linen, llm, quantizers
    assert right_calls.uncalled(*modules, but=right_calls.RESULTS + right_calls.WRITERS) == []


def test_some_wrong_calls():
    assert complaints(range(QUICK)) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, ALL, 500))
def test_many_wrong_calls(first):
    assert complaints(range(first, min(first + 500, ALL))) == []


def test_errors_of_other_libraries_are_not_sentences():
    def judge(function: Any) -> str | None:
        call = right_calls.Call(lambda given: function(), {"given": lambda: 0}, ("quantize",))
        wrong_calls.CALLS["judged"] = call
        try:
            seed = next(i for i in range(10_000) if wrong_calls.sample(i)[0] == "judged")
            return wrong_calls.complaint(seed)
        finally:
            del wrong_calls.CALLS["judged"]

    weight = jnp.ones((64, 64))
    assert judge(lambda: jl.quantize(weight, 4)) is None
    for function in (
        lambda: jnp.ones(3) @ jnp.ones(4),  # an error of JAX
        lambda: jl.Format(9),  # names another function
        lambda: jl.scan(lambda *_: 1 / 0, 0, None, 1),  # another kind of error
        lambda: jl.quantize(weight, "int4"),  # no error, despite a wrong argument
    ):
        assert re.search("judged", judge(function) or "")


PLAUSIBLE: Any = {
    "quantize: format is 4, but it must be a Format, such as": lambda a: jl.quantize(a["w"], 4),
    r"quantized_matmul: lhs is key<fry>\[\], but it must be": lambda a: jl.quantized_matmul(
        jax.random.key(0), a["q"]
    ),
    "quantize: shards is 2, but it must be two numbers": lambda a: jl.quantize(
        a["w"], "int4", shards=2
    ),
    r"quantize: shards is \(2,\), but it must be two": lambda a: jl.quantize(
        a["w"], "int4", shards=(2,)
    ),
    "quantize: scale_dtype is 'half4', which names no dtype": lambda a: jl.quantize(
        a["w"], "int4", scale_dtype="half4"
    ),
    r"partition_spec: n='typo' names no axis of the mesh, whose axes are \('model',\)": lambda a: a[
        "q"
    ].partition_spec(a["mesh"], n="typo"),
    "partition_spec: the mesh axis 'model' occurs twice": lambda a: a["q"].partition_spec(
        a["mesh"], n="model", k="model"
    ),
    r"QuantizedArray.dequantize: dtype is int8, but weights are floats": lambda a: a[
        "q"
    ].dequantize("int8"),
    r"supported_backends: rhs is float32\[64, 128\]": lambda a: jl.supported_backends(
        a["x"], a["w"]
    ),
    r"quantized_matmul: activation=\[\] is unknown": lambda a: jl.quantized_matmul(
        a["x"], a["q"], activation=[]
    ),
    "quantized_matmul: backend={} is unknown": lambda a: jl.quantized_matmul(
        a["x"], a["q"], backend={}
    ),
    "quantized_matmul: lhs is a QuantizedArray, but it must be activations": lambda a: (
        jl.quantized_matmul(a["q"], a["q"])
    ),
    r"explain: lhs has shape \(64, 128\) and rhs \(64, 128\)": lambda a: jl.explain(a["w"], a["q"]),
    "quantized_block: epsilon is nan, but it must be a finite number": lambda a: wrong_calls.CALLS[
        "block"
    ].run({"epsilon": float("nan")}),
}


@pytest.mark.parametrize("message", PLAUSIBLE)
def test_plausible_mistakes(message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        PLAUSIBLE[message](wrong_calls.arrays())


NARROW_K, NARROW_N, NARROW = 60, 100, "int4-g32"


@functools.cache
def narrow(name: str) -> Any:
    """Weights with no size that is a multiple of 64."""
    w = jnp.ones((NARROW_K, NARROW_N))
    weights = {"q": w, "down": w.T, "square": w[:, :NARROW_K], "pair": jnp.stack([w, w])}
    return jl.quantize(weights[name], NARROW)


def initialised(layer: Any, given: Any, x: Any, **options: Any) -> Any:
    return layer.apply(layer.init(jax.random.key(0), given), x, **options)


# Calls whose inputs do not match the width of the weights.
MISMATCHED: dict[str, Callable[[Any, Any], Any]] = {
    "quantized_matmul": lambda x, given: x @ narrow("q"),
    "quantized_glu": lambda x, given: jl.quantized_glu(x, narrow("pair"), activation="silu"),
    "quantized_matmuls": lambda x, given: jl.quantized_matmuls(x, [narrow("q"), narrow("q")]),
    "quantized_mlp": lambda x, given: jl.quantized_mlp(
        x, gate_up=narrow("pair"), down=narrow("down"), activation="silu"
    ),
    "quantized_mlp of others": lambda x, given: jl.quantized_mlp(
        given, gate_up=narrow("pair"), down=narrow("q"), activation="silu"
    ),
    "quantized_block": lambda x, given: jl.quantized_block(
        x,
        given,
        out=narrow("square"),
        norm=jnp.ones(NARROW_K),
        gate_up=narrow("pair"),
        down=narrow("down"),
    ),
    "explain": lambda x, given: jl.explain(x, narrow("q")),
    "bias": lambda x, given: jl.quantized_matmul(given, narrow("q"), bias=jnp.ones(NARROW_N + 1)),
    "residual": lambda x, given: jl.quantized_matmul(given, narrow("q"), residual=x),
    "QuantizedLinear": lambda x, given: jl_nnx.QuantizedLinear(
        NARROW_K, NARROW_N, format=NARROW, rngs=right_calls.nnx.Rngs(0)
    )(x),
    "attend": lambda x, given: jl_nnx.QuantizedEmbed(
        NARROW_N, NARROW_K, format=NARROW, rngs=right_calls.nnx.Rngs(0)
    ).attend(x),
    "QuantizedLinearGeneral": lambda x, given: jl_nnx.QuantizedLinearGeneral(
        (2, 30), NARROW_N, axis=(-2, -1), format=NARROW, rngs=right_calls.nnx.Rngs(0)
    )(x),
    "QuantizedEinsum": lambda x, given: jl_nnx.QuantizedEinsum(
        "bk,kn->bn", (NARROW_K, NARROW_N), format=NARROW, rngs=right_calls.nnx.Rngs(0)
    )(x),
    "QuantizedDense": lambda x, given: initialised(
        jl_linen.QuantizedDense(NARROW_N, NARROW), given, x
    ),
    "linen.attend": lambda x, given: initialised(
        jl_linen.QuantizedEmbed(NARROW_N, NARROW_K, NARROW), jnp.array([1]), x, method="attend"
    ),
    "linen.QuantizedEinsum": lambda x, given: initialised(
        jl_linen.QuantizedEinsum((NARROW_K, NARROW_N), "bk,kn->bn", NARROW), given, x
    ),
    "from_integers": lambda x, given: jl.QuantizedArray.from_integers(
        jnp.ones((NARROW_K, NARROW_N), jnp.int8), jnp.ones((3, NARROW_N)), format=NARROW
    ),
    "getitem": lambda x, given: narrow("pair")[5, 0],
    "view": lambda x, given: narrow("q")[0],
}


@pytest.mark.parametrize("name", MISMATCHED)
def test_errors_have_the_shapes_of_the_caller(name):
    """Errors do not show the shapes of packed words, which are multiples of 64."""
    with pytest.raises((TypeError, ValueError, IndexError)) as raised:
        MISMATCHED[name](jnp.ones((2, 61)), jnp.ones((2, NARROW_K)))
    assert not re.search(r"\b(64|128)\b", str(raised.value)), raised.value
