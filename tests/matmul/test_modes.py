"""Products under settings of JAX other than the defaults: 64-bit types, no rank promotion."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quantize

import jaxlowbit
from jaxlowbit import Format, quantized_matmul, quantized_mlp

K, N = 128, 192
FORMAT = Format(4, 64, "integer")
INDEX = np.array([2, 0, 1, 2, 0])


@pytest.fixture(params=[False, True], ids=["32 bits", "64 bits"], autouse=True)
def x64(request):
    """conftest.py disables the promotion of ranks and types for all tests."""
    with jax.enable_x64(request.param):
        yield request.param


def normal(*shape, seed=0):
    values = np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-2])
    return jnp.asarray(values.astype(np.float32))


def mapped(x, stack):
    return jax.vmap(lambda x, i: quantized_matmul(x, stack.select(i), bias=jnp.ones(N, x.dtype)))(
        x, jnp.asarray(INDEX)
    )


# A function of lhs (5, K) and a stack (3, K, N), and its reference on the dequantized stack.
FORMS = {
    "a gradient": (
        lambda x, q: jax.grad(lambda x: (x @ q[0]).sum())(x),
        lambda x, w: jax.grad(lambda x: (x @ w[0]).sum())(x),
    ),
    "a Hessian": (
        lambda x, q: jax.hessian(
            lambda x: quantized_matmul(x[None], q[0], activation="gelu_tanh").sum()
        )(x[0]),
        lambda x, w: jax.hessian(lambda x: jax.nn.gelu(x @ w[0]).sum())(x[0]),
    ),
    "an index": (
        lambda x, q: jax.vmap(lambda i: x @ q.select(i))(jnp.arange(3)),
        lambda x, w: jnp.stack([x @ w[i] for i in range(3)]),
    ),
    "an index for each row": (
        mapped,
        lambda x, w: jnp.stack([x[row] @ w[i] + 1 for row, i in enumerate(INDEX)]),
    ),
    "a named axis": (
        lambda x, q: jax.vmap(lambda x: x @ q[0], spmd_axis_name="b")(x),
        lambda x, w: x @ w[0],
    ),
    "a checkpoint": (
        lambda x, q: jax.grad(
            jax.checkpoint(lambda x: quantized_mlp(x, gate_up=q[:2], down=down(q)).sum())
        )(x),
        lambda x, w: jax.grad(lambda x: ((jax.nn.silu(x @ w[0]) * (x @ w[1])) @ down(w)).sum())(x),
    ),
    "a scalar factor": (lambda x, q: (2.0 * x) @ q[0], lambda x, w: 2 * (x @ w[0])),
}


def down(stack: Any) -> Any:
    """A matrix (N, K)."""
    weight = jaxlowbit.quantize(normal(N, K, seed=2), FORMAT)
    return weight if isinstance(stack, type(weight)) else weight.dequantize()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.ways("form")
def test_results_have_the_dtype_of_lhs(form):
    lhs, stack = normal(5, K, seed=1), quantize(normal(3, K, N), FORMAT)
    compute, reference = FORMS[form]
    got, want = jax.jit(compute)(lhs, stack), jax.jit(reference)(lhs, stack.dequantize())
    assert got.dtype == want.dtype == jnp.float32 and not got.weak_type
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
