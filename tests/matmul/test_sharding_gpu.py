"""Sharded products on two GPUs; `test_sharding.py` covers all layouts on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Oracle, assert_within, dequantize
from jax.sharding import AxisType
from meshes import assert_close, collectives, gradients, product, put, reference

from jaxlowbit import INT4, Format, quantize

pytestmark = pytest.mark.gpu
P = jax.P
K, N = 768, 384  # half of K is a multiple of both group sizes


@pytest.fixture
def mesh():
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip(f"needs 2 GPUs, JAX sees {len(devices)}")
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=devices[:2])


# Sharding of lhs, of k and n of rhs, and the collectives of the product.
LAYOUTS = {
    "data": (P("x"), {}, []),
    "column": (P(), {"n": "x"}, []),
    "row": (P(None, "x"), {"k": "x"}, ["all-reduce f32"]),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_format = pytest.mark.parametrize("format", [INT4, Format(8, 96, "integer")], ids=str)


def operands(format, dtype):
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.normal(size=(16, K)), dtype)
    weight = jnp.asarray(rng.normal(size=(K, N)) / np.sqrt(K), dtype)
    return lhs, jax.jit(quantize, static_argnums=1)(weight, format)


def sharded(lhs, rhs, layout, mesh):
    lhs_spec, axes, sent = LAYOUTS[layout]
    return put(lhs, mesh, lhs_spec), put(rhs, mesh, rhs.partition_spec(mesh, **axes)), sent


@every_format
@every_layout
def test_auto_mesh(layout, format, mesh):
    lhs, rhs = operands(format, "bfloat16")
    oracle = Oracle.of(lhs, dequantize(rhs))
    x, q, sent = sharded(lhs, rhs, layout, mesh)
    assert collectives(product, x, q) == sent
    got = jax.jit(product)(x, q)
    assert_within(got, oracle.exact, oracle.bound(lhs.dtype))
    assert np.asarray(jax.jit(product)(x, q)).tobytes() == np.asarray(got).tobytes()


@every_format
@every_layout
def test_gradients_on_an_auto_mesh(layout, format, mesh):
    lhs, rhs = operands(format, "float32")
    x, q, _ = sharded(lhs, rhs, layout, mesh)
    assert_close(gradients(product)(x, q), gradients(reference)(lhs, rhs))
    sent = collectives(gradients(product), x, q)
    assert not [operation for operation in sent if operation.endswith("u32")], "words were sent"


@every_format
@every_layout
def test_shard_map(layout, format, mesh):
    lhs, rhs = operands(format, "float32")
    lhs_spec, axes, sent = LAYOUTS[layout]

    def local(x, q):
        return jax.lax.psum(x @ q, "x") if layout == "row" else x @ q

    f = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(lhs_spec, rhs.partition_spec(mesh, **axes)),
        out_specs=P(*(lhs_spec[:1] or (None,)), axes.get("n")),
    )
    x, q, _ = sharded(lhs, rhs, layout, mesh)
    assert collectives(f, x, q) == sent
    assert_close(jax.jit(f)(x, q), reference(lhs, rhs))
    assert_close(gradients(f)(x, q), gradients(reference)(lhs, rhs))
