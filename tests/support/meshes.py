"""Meshes, programs that tests run on them, and collectives of these programs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxlowbit import quantized_matmul

REDUCE, GATHER = "all-reduce f32", "all-gather f32"


def make_mesh(kind: AxisType) -> jax.sharding.Mesh:
    """Two by four devices, axes a and b."""
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices("cpu"))


def put(tree, mesh, specs):
    """Places arrays from the host; slicing device arrays would compile a program per shape."""
    tree = jax.tree.map(np.asarray, tree)
    return jax.device_put(tree, jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs))


def assert_close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max())


def assert_divides(mesh, kind, axis, specs, x, array):
    """Compares the product with an array sharded along `axis` ("n" or "k") with one device."""
    placed = put(array, mesh, specs)
    out = jax.P() if kind is AxisType.Explicit and axis == "k" else None
    multiply = functools.partial(quantized_matmul, out_sharding=out)
    with jax.set_mesh(mesh):
        assert_close(jax.jit(multiply)(x, placed), x @ array)


def collectives(f, *args) -> list[str]:
    """Communication of the compiled program, such as "all-reduce f32".

    The compiled program is cached for calls of `f` if it is jitted, else of `jax.jit(f)`.
    """
    text = (f if hasattr(f, "lower") else jax.jit(f)).lower(*args).compile().as_text()
    assert text is not None
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    started = rf"= \(?(\w+)\[.* ({kinds})(?:-start)?\("  # asynchronous ones have a separate end
    return [f"{op} {dtype}" for dtype, op in re.findall(started, text)]


def product(lhs, rhs):
    return lhs @ rhs


@jax.jit
def reference(lhs, rhs):
    return lhs @ rhs.dequantize(lhs.dtype)


@functools.cache
def gradients(multiply):
    """Gradients of a loss for lhs and for the scales."""

    def loss(lhs, scale, rhs):
        return jnp.sum(jnp.sin(multiply(lhs, dataclasses.replace(rhs, scale=scale))))

    return jax.jit(lambda lhs, rhs: jax.grad(loss, (0, 1))(lhs, rhs.scale, rhs))
