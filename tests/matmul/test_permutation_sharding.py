"""Products of permuted weights with k or n sharded over devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quantize
from jax.sharding import AxisType
from meshes import (
    GATHER,
    REDUCE,
    assert_close,
    collectives,
    gradients,
    make_mesh,
    product,
    put,
    reference,
)

import jaxlowbit
from jaxlowbit import Format, QuantizedArray, quantized_matmul

P = jax.P
FOUR, THREE = Format(4, 64, "integer"), Format(3, 48, "float")


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def mesh():
    return make_mesh(AxisType.Auto)


def arrays(k, n, format=FOUR, lead=(), shards=1) -> tuple[np.ndarray, QuantizedArray]:
    """lhs (*lead, 8, k), on the host, and rhs (*lead, k, n), permuted within each shard of k."""
    rng = np.random.default_rng(0)
    lhs = rng.normal(size=(*lead, 8, k)).astype(np.float32)
    weight = (rng.normal(size=(*lead, k, n)) / np.sqrt(k)).astype(np.float32)
    order = np.argsort(rng.normal(size=(*lead, shards, k // shards))).reshape(*lead, k)
    return lhs, quantize(weight, format, shards=(shards, 1), permutation=order)


# k and its shards, sharding of lhs and of k and n of rhs, and the collectives of the product:
# activations are sent only if a permutation crosses devices.
LAYOUTS = {
    "rows and n": (512, 1, P("a"), None, "b", []),
    "k, orders of its parts": (512, 4, P(None, "b"), "b", None, [REDUCE]),
    "k, several parts to a device": (512, 8, P("a", "b"), "b", None, [REDUCE]),
    "k, padded parts": (200, 4, P(None, "b"), "b", None, [REDUCE]),
    "k and n": (512, 2, P(None, "a"), "a", "b", [REDUCE]),
    "k over both axes": (512, 8, P(None, ("a", "b")), ("a", "b"), None, [REDUCE]),
    "k, one order of all": (512, 1, P(None, "b"), "b", None, [GATHER, REDUCE]),
    "k, one order of all, lhs on every device": (512, 1, P(), "b", None, [REDUCE]),
    "k, orders of more than a part": (768, 2, P(None, "b"), "b", None, [GATHER, REDUCE]),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def placed(layout, mesh, format=FOUR):
    k_size, shards, lhs_spec, k, n, _ = LAYOUTS[layout]
    lhs, rhs = arrays(k_size, 256, format, shards=shards)
    x = jax.device_put(lhs, jax.NamedSharding(mesh, lhs_spec))
    return lhs, rhs, x, put(rhs, mesh, rhs.partition_spec(mesh, k=k, n=n))


@pytest.mark.parametrize(
    ("layout", "format"), [(name, (FOUR, THREE)[i % 2]) for i, name in enumerate(LAYOUTS)], ids=str
)
def test_auto_mesh(layout, format, mesh):
    lhs, rhs, x, q = placed(layout, mesh, format)
    assert_close(jax.jit(product)(x, q), reference(lhs, rhs))
    assert sorted(collectives(product, x, q)) == LAYOUTS[layout][-1]


@every_layout
def test_gradients_on_an_auto_mesh(layout, mesh):
    lhs, rhs, x, q = placed(layout, mesh)
    assert_close(gradients(product)(x, q), gradients(reference)(lhs, rhs))
    assert not any("u32" in sent for sent in collectives(gradients(product), x, q))


@pytest.mark.parametrize("k", ["b", ("a", "b")], ids=str)
def test_one_permutation_sharded_by_hand(k, mesh):
    """The words stay; only the permutation, 4 bytes per row, is gathered."""
    lhs, rhs = arrays(512, 128)
    q = put(rhs, mesh, rhs.partition_spec(mesh, k=k))
    order = jax.device_put(rhs.permutation, jax.NamedSharding(mesh, P(k)))
    q = dataclasses.replace(q, permutation=order)
    x = jax.device_put(lhs, jax.NamedSharding(mesh, P()))
    assert_close(jax.jit(product)(x, q), reference(lhs, rhs))
    assert sorted(collectives(product, x, q)) == ["all-gather s32", REDUCE]


@pytest.mark.parametrize(("k", "shards"), [(None, 1), ("b", 1), ("b", 4)])
@pytest.mark.ways("k")
def test_experts(k, shards, mesh):
    lhs, rhs = arrays(256, 64, lead=(4,), shards=shards)
    x = jax.device_put(lhs, jax.NamedSharding(mesh, P("a")))
    q = put(rhs, mesh, rhs.partition_spec(mesh, k=k, lead=("a",)))
    for f in (product, jax.vmap(product)):
        assert_close(jax.jit(f)(x, q), reference(lhs, rhs))
        assert not any("u32" in sent for sent in collectives(f, x, q))


@pytest.mark.parametrize("shards", [1, 4])
def test_scan_over_layers_sharded_along_k(shards, mesh):
    lhs, rhs = arrays(256, 256, lead=(4,), shards=shards)
    q = put(rhs, mesh, rhs.partition_spec(mesh, k="b"))

    def run(x, layers):
        return jaxlowbit.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, layers)[0]

    def dense(x, weights):
        return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]

    assert_close(jax.jit(run)(lhs[0], q), dense(lhs[0], rhs.dequantize()))
    assert not any("u32" in sent for sent in collectives(run, lhs[0], q))


@pytest.mark.parametrize("shards", [1, 4])
def test_explicit_mesh(shards):
    lhs, rhs = arrays(512, 256, shards=shards)
    want = [f(lhs, rhs) for f in (reference, gradients(reference))]
    mesh = make_mesh(AxisType.Explicit)
    x = jax.device_put(lhs, jax.NamedSharding(mesh, P("a", "b")))
    q = put(rhs, mesh, rhs.partition_spec(mesh, k="b"))

    def f(x, q):
        return quantized_matmul(x, q, out_sharding=P("a", None))

    with jax.set_mesh(mesh):
        assert_close([jax.jit(f)(x, q), gradients(f)(x, q)], want)


@pytest.mark.parametrize(
    ("k", "shards", "format", "k_axis", "n_axis", "check_vma"),
    [
        (512, 1, FOUR, None, "b", True),
        (512, 2, FOUR, "a", "b", False),
        (400, 4, THREE, "a", None, True),
    ],
)
def test_shard_map(k, shards, format, k_axis, n_axis, check_vma, mesh):
    lhs, rhs = arrays(k, 256, format, shards=shards)
    specs = rhs.partition_spec(mesh, k=k_axis, n=n_axis)

    def local(x, q):
        assert q.shape[0] == x.shape[1] == q.permutation.shape[0]
        sums = x @ q, x @ q.dequantize()
        return jax.lax.psum(sums, k_axis) if k_axis else sums

    f = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(None, k_axis), specs),
        out_specs=(P(None, n_axis),) * 2,
        check_vma=check_vma,
    )
    assert_close(jax.jit(f)(lhs, rhs), [reference(lhs, rhs)] * 2)
    got = gradients(lambda x, q: f(x, q)[0])(lhs, rhs)
    assert_close(got, gradients(reference)(lhs, rhs))


@pytest.mark.parametrize("sharded", [False, True])
def test_shard_map_raises_for_a_permutation_across_shards(sharded, mesh):
    lhs, rhs = arrays(512, 256, shards=2)
    specs = rhs.partition_spec(mesh, k="b")
    assert specs.permutation == P(None)
    if sharded:
        leaves, treedef = jax.tree.flatten(specs)
        specs = jax.tree.unflatten(treedef, [*leaves[:-2], P("b"), leaves[-1]])
    f = jax.shard_map(product, mesh=mesh, in_specs=(P(None, "b"), specs), out_specs=P())
    with pytest.raises(
        ValueError, match=r"permuted within 2 parts of k=512, but a part here has 128"
    ):
        f(lhs, rhs)


def test_specs_of_orders(mesh):
    _, rhs = arrays(512, 256, lead=(2,), shards=4)
    assert rhs.partition_spec(mesh, k="b", lead=("a",)).permutation == P("a", "b")
    assert rhs.partition_spec(mesh, k=("a", "b")).permutation == P(None, None)
    assert rhs.partition_spec(mesh, n="b").permutation == P(None, None)
    whole = dataclasses.replace(rhs, permutation=None).partition_spec(mesh, k="b")
    assert whole.permutation is None
    specs = rhs.partition_spec(mesh, k="b")
    assert jax.tree.structure(specs) == jax.tree.structure(rhs)
