"""Code written for float weights, run with packed weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowbit import INT8, quantize
from jaxlowbit._flax.equation import Equation
from jaxlowbit._flax.weight_program import run
from jaxlowbit._flax.weight_view import WeightView


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


X = normal(1, (2, 3, 64))
IDS = jnp.array([[3, 1, -1], [0, 2, 99]])
HALF = jnp.bfloat16


@pytest.fixture(autouse=True)
def code_of_others():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def packed(text: str, shape: tuple[int, ...], stacked: int = 0) -> tuple[WeightView, jax.Array]:
    """A random packed weight, and its dequantized floats in the same shape."""
    equation = Equation.parse(text, shape[stacked:])
    weight = normal(0, shape) / 8  # sums of 64 products are near 1
    kernel = quantize(equation.matrix(weight), INT8)
    sizes = (*shape[:stacked], *equation.batch, *equation.contracted, *equation.features)
    order = [*range(stacked), *(stacked + np.argsort(equation.order))]
    return WeightView.of(kernel, equation), kernel.dequantize().reshape(sizes).transpose(order)


def computed(function: Callable[[Any], Any], view: WeightView) -> Any:
    return run(lambda weights: function(weights["w"]), {"w": view})


TABLE = ("...d,vd->...v", (100, 64), 0)
EXPERTS = ("e...d,edf->e...f", (4, 64, 96), 0)
HEADS = ("btd,ndh->btnh", (4, 64, 16), 0)
OUT = ("btnh,nhd->btd", (4, 16, 64), 0)
LAYERS = ("...k,kn->...n", (3, 64, 64), 1)
MATRIX = ("...k,kn->...n", (64, 64), 0)
UNNAMED = ("bd,edf->bef", (4, 64, 16), 0)  # the expert axis acts as a feature axis

USES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "lookup by an index": (TABLE, lambda w: w[(IDS,)]),
    "lookup by take, with tokens that the table has not": (TABLE, lambda w: w.at[IDS - 2].get()),
    "lookup by take": (TABLE, lambda w: jnp.take(w, IDS, axis=0)),
    "lookup in a transposed table": (TABLE, lambda w: w.T[:, IDS]),
    "tied head": (TABLE, lambda w: jnp.dot(X, w.T)),
    "weight first": (TABLE, lambda w: jnp.einsum("vd,btd->vbt", w, X)),
    "one expert": (EXPERTS, lambda w: jnp.einsum("btd,df->btf", X, w[1].astype(X.dtype))),
    "an expert that is computed": (EXPERTS, lambda w: X @ w[IDS[0, 0]]),
    "all experts": (EXPERTS, lambda w: jnp.einsum("btd,edf->btef", X, w)),
    "experts with inputs of their own": (
        EXPERTS,
        lambda w: jnp.einsum("ebd,edf->ebf", jnp.stack([X[0]] * 4), w),
    ),
    "experts whose results are added": (
        EXPERTS,
        lambda w: jnp.einsum("ebd,edf->bf", jnp.stack([X[0]] * 4).astype(HALF), w.astype(HALF)),
    ),
    "experts of tokens": (EXPERTS, lambda w: jnp.einsum("td,tdf->tf", X[0], w[IDS[0] % 4])),
    "heads": (HEADS, lambda w: jnp.einsum("btd,ndh->nhbt", X, w)),
    "heads as one matrix": (HEADS, lambda w: X @ jnp.swapaxes(w, 0, 1).reshape(64, -1)),
    "heads contracted": (OUT, lambda w: jnp.einsum("btnh,nhd->btd", X.reshape(2, 3, 4, 16), w)),
    "heads contracted as one axis": (OUT, lambda w: X @ w.reshape(64, 64)),
    "bfloat16": (OUT, lambda w: X.astype(HALF) @ w.reshape(64, 64).astype(HALF)),
    "a result in bfloat16": (
        MATRIX,
        lambda w: jax.lax.dot_general(X, w, (((2,), (0,)), ((), ())), preferred_element_type=HALF),
    ),
    "a vector": (MATRIX, lambda w: X[0, 0] @ w),
    "more features": (UNNAMED, lambda w: jnp.einsum("btd,edf->bfet", X, w)),
    "scan": (LAYERS, lambda w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), X, w)),
    "scan around it": (MATRIX, lambda w: jax.lax.scan(lambda x, _: (x @ w, None), X, length=2)[0]),
    "checkpoint": (MATRIX, lambda w: jax.checkpoint(lambda x: jnp.tanh(x @ w))(X)),
    "cond": (MATRIX, lambda w: jax.lax.cond(X[0, 0, 0] > 9, lambda: X, lambda: X @ w)),
    "jit": (MATRIX, lambda w: X @ jax.jit(lambda w: w[None])(w)[0]),
    "vmap": (MATRIX, lambda w: jax.vmap(lambda x: x @ w)(X)),
    "barrier": (MATRIX, lambda w: X @ jax.lax.optimization_barrier((w, X))[0]),
    "no arrays in the result": (MATRIX, lambda w: (X @ w, "name", 3, None)),
}


@pytest.mark.parametrize("name", USES)
def test_results_match_the_floats(name):
    arguments, function = USES[name]
    view, floats = packed(*arguments)
    found, wanted = computed(function, view), function(floats)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if not isinstance(other, jax.Array):
            assert one == other
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        size = 0.02 if other.dtype == HALF else 1e-5
        np.testing.assert_allclose(
            np.float32(one), np.float32(other), atol=size * float(jnp.nanmax(jnp.abs(other)))
        )


def test_products_are_of_packed_words_and_can_be_differentiated():
    view, floats = packed(*EXPERTS)

    def loss(x: Any, function: Any) -> Any:
        return jnp.sin(function(x)).sum()

    def product(x: Any) -> Any:
        return computed(lambda w: jax.nn.relu(jnp.einsum("btd,edf->btef", x, w)), view)

    def wanted(x: Any) -> Any:
        return jax.nn.relu(jnp.einsum("btd,edf->btef", x, floats))

    found = jax.grad(loss)(X, product)
    np.testing.assert_allclose(found, jax.grad(loss)(X, wanted), atol=1e-3)
    assert "quantized_matmul" in str(jax.make_jaxpr(product)(X))


REFUSED: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "an operation": (MATRIX, lambda w: X @ (w * 2), "applies mul to it"),
    "two weights": (MATRIX, lambda w: w @ w, "applies dot_general to it"),
    "other axes": (MATRIX, lambda w: X @ w.T, r"sums over its axes \(0,\) .* equation contracts"),
    "a part": (MATRIX, lambda w: X @ w[:, :3], r"takes a part \(64, 3\) of its shape"),
    "strides": (EXPERTS, lambda w: X @ w[::2], "in strides"),
    "a row": (MATRIX, lambda w: w[3], "takes a part of its axis 0, which is no batch axis"),
    "rows of k": (TABLE, lambda w: w.T[IDS], "looks up parts of its axis 0"),
    "integers": (MATRIX, lambda w: w.astype(jnp.int8), "casts it to int8"),
    "broadcasting": (MATRIX, lambda w: jnp.broadcast_to(w, (2, 64, 64)), "broadcasts it"),
    "another shape": (MATRIX, lambda w: X[..., :32] @ w.reshape(32, 128), "reshapes it"),
    "no product": (MATRIX, lambda w: w, "returns it"),
    "a carry": (
        MATRIX,
        lambda w: jax.lax.scan(lambda w, _: (w.T, X @ w), w, length=2),
        "carries it",
    ),
    "a precision": (
        MATRIX,
        lambda w: jnp.dot(X, w, precision="BF16_BF16_F32_X3"),
        "with precision=",
    ),
    "batch": (
        UNNAMED,
        lambda w: jnp.einsum("ebd,edf->ebf", jnp.stack([X[0]] * 4), w),
        "as batch axes, which the equation does not",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_use_raises(name):
    arguments, function, words = REFUSED[name]
    with pytest.raises(ValueError, match=f"^The code of the model .*{words}.*w is a packed weight"):
        computed(function, packed(*arguments)[0])
