"""Products of sharded arrays: values, and collectives of their programs."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import described, quantize
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
EIGHT, FOUR, THREE = Format(8), Format(4, 64, "integer"), Format(3, 48, "float")


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def mesh():
    return make_mesh(AxisType.Auto)


def arrays(k, n, format, lead=(), shards=(1, 1), dtype="float32"):
    """lhs (*lead, 8, k), on the host, and rhs (*lead, k, n)."""
    rng = np.random.default_rng(0)
    lhs = rng.normal(size=(*lead, 8, k)).astype(jnp.dtype(dtype))
    weight = (rng.normal(size=(*lead, k, n)) / np.sqrt(k)).astype(jnp.dtype(dtype))
    return lhs, quantize(weight, format, shards=shards)


def put_words(rhs, mesh, n, k):
    """Shards only the words, even by specs that `partition_spec` rejects."""
    packed = jax.NamedSharding(mesh, P(n, k))
    rhs = jax.device_put(rhs, jax.NamedSharding(mesh, P()))
    return dataclasses.replace(rhs, packed=jax.device_put(rhs.packed, packed))


# Sharding of lhs, of k and n of rhs, and the collectives of the product.
LAYOUTS = {
    "rows": (P("a"), None, None, []),
    "n": (P(), None, "b", []),
    "rows and n": (P("a"), None, "b", []),
    "k": (P(None, "b"), "b", None, [REDUCE]),
    "k, lhs on every device": (P(), "b", None, [REDUCE]),
    "rows and k": (P("a", "b"), "b", None, [REDUCE]),
    "k and n": (P(None, "a"), "a", "b", [REDUCE]),
    "k over both axes": (P(None, ("a", "b")), ("a", "b"), None, [REDUCE]),
    "rows and n over the same axis": (P("b"), None, "b", [GATHER]),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
# With 8 shards of k, some end inside a group of 96 or 128.
FORMATS = {
    "4 bits": (FOUR, LAYOUTS),
    "8 bits": (EIGHT, ["k and n"]),
    "groups of 96": (Format(3, 96, "float"), ["n", "k", "k over both axes"]),
    "groups of 128": (Format(4, 128), ["k over both axes"]),
}


@pytest.mark.parametrize(
    ("layout", "name"), [(layout, name) for name in FORMATS for layout in FORMATS[name][1]]
)
@pytest.mark.ways("layout")
def test_auto_mesh(layout, name, mesh):
    lhs_spec, k, n, sent = LAYOUTS[layout]
    format, _ = FORMATS[name]
    lhs, rhs = arrays(512 if format.group_size != 96 else 1536, 256, format)
    x = jax.device_put(lhs, jax.NamedSharding(mesh, lhs_spec))
    q = put(rhs, mesh, rhs.partition_spec(mesh, k=k, n=n))
    assert collectives(product, x, q) == sent
    assert_close(jax.jit(product)(x, q), reference(lhs, rhs))


@every_layout
@pytest.mark.ways("layout")
def test_gradients_on_an_auto_mesh(layout, mesh):
    lhs_spec, k, n, sent = LAYOUTS[layout]
    lhs, rhs = arrays(512, 256, FOUR)
    x = jax.device_put(lhs, jax.NamedSharding(mesh, lhs_spec))
    q = put(rhs, mesh, rhs.partition_spec(mesh, k=k, n=n))
    assert_close(gradients(product)(x, q), gradients(reference)(lhs, rhs))
    assert set(collectives(gradients(product), x, q)) <= {REDUCE, *sent}


def test_partial_sums_are_float32_and_rounded_once(mesh):
    lhs, rhs = arrays(256, 128, FOUR, dtype="bfloat16")
    q = put(rhs, mesh, rhs.partition_spec(mesh, k="a"))
    assert rhs.zero is not None
    halves = [
        quantized_matmul(
            lhs[:, 128 * i : 128 * (i + 1)],
            dataclasses.replace(
                rhs,
                packed=rhs.packed[:, 2 * i : 2 * i + 2],
                scale=rhs.scale[:, 2 * i : 2 * i + 2],
                zero=rhs.zero[:, 2 * i : 2 * i + 2],
                k=128,
                whole=None,
            ),
            preferred_element_type=jnp.float32,
        )
        for i in range(2)
    ]
    got = jax.jit(product)(lhs, q)
    np.testing.assert_array_equal(got, (halves[0] + halves[1]).astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("k", "n", "k_axis", "n_axis", "sent"),
    [
        (200, 128, "b", None, [REDUCE]),
        (128, 200, None, "b", [GATHER]),
        (72, 72, "a", None, [REDUCE]),
    ],
)
@pytest.mark.parametrize("format", [FOUR, THREE, Format(4, 2**40)], ids=str)
def test_words_that_end_inside_a_shard_are_not_moved(k, n, k_axis, n_axis, sent, format, mesh):
    lhs, rhs = arrays(k, n, format)
    with pytest.raises(ValueError, match=r"quantize with shards="):
        rhs.partition_spec(mesh, k=k_axis, n=n_axis)
    q = put_words(rhs, mesh, n_axis, k_axis)
    assert collectives(product, lhs, q) == sent
    assert_close(jax.jit(product)(lhs, q), reference(lhs, rhs))


@pytest.mark.parametrize("k", [None, "b"])
def test_experts_on_an_auto_mesh(k, mesh):
    lhs, rhs = arrays(256, 64, FOUR, (4,))
    x = jax.device_put(lhs, jax.NamedSharding(mesh, P("a")))
    q = put(rhs, mesh, rhs.partition_spec(mesh, k=k, lead=("a",)))
    for f in (product, jax.vmap(product)):
        assert collectives(f, x, q) == [REDUCE] * (k is not None)
        assert_close(jax.jit(f)(x, q), reference(lhs, rhs))


def test_scan_over_sharded_layers(mesh):
    lhs, rhs = arrays(256, 256, FOUR, (4,))
    q = put(rhs, mesh, rhs.partition_spec(mesh, n="b"))

    def run(x, layers):
        return jaxlowbit.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, layers)[0]

    def dense(x, weights):
        return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]

    assert collectives(run, lhs[0], q) == [GATHER]
    assert_close(jax.jit(run)(lhs[0], q), dense(lhs[0], rhs.dequantize()))


def test_vmap_of_a_shared_weight_on_an_auto_mesh(mesh):
    lhs, rhs = arrays(256, 256, FOUR)
    lhs = jnp.stack([lhs, -lhs])
    q = put(rhs, mesh, rhs.partition_spec(mesh, k="b"))
    mapped = jax.vmap(product, in_axes=(0, None))
    assert collectives(mapped, lhs, q) == [REDUCE]
    assert_close(jax.jit(mapped)(lhs, q), reference(lhs, rhs))


def test_arrays_without_a_mesh_in_the_context_of_a_mesh(mesh):
    lhs, rhs = arrays(256, 256, FOUR)
    with jax.set_mesh(mesh):
        assert_close(product(lhs, rhs), reference(lhs, rhs))


# --- jax.shard_map --------------------------------------------------------------------------------

# k and n, shards, format, sharding of lhs and of k and n of rhs.
MAPPED = {
    "rows": (200, 72, (1, 1), THREE, P("a"), None, None),
    "n": (72, 256, (1, 1), FOUR, P(), None, "b"),
    "k": (512, 72, (1, 1), FOUR, P(None, "b"), "b", None),
    "rows, k and n": (512, 256, (1, 1), EIGHT, P(None, "a"), "a", "b"),
    "padded parts": (200, 200, (2, 4), FOUR, P(None, "a"), "a", "b"),
    "several padded parts each": (400, 200, (4, 4), THREE, P(None, "a"), "a", "b"),
}


@pytest.mark.parametrize(
    ("case", "check_vma"), [(case, i % 2 == 0) for i, case in enumerate(MAPPED)]
)
@pytest.mark.ways("check_vma")
def test_shard_map(case, check_vma, mesh):
    k_size, n_size, shards, format, lhs_spec, k, n = MAPPED[case]
    lhs, rhs = arrays(k_size, n_size, format, shards=shards)
    specs = rhs.partition_spec(mesh, k=k, n=n)
    rows = lhs_spec[0] if lhs_spec else None

    def local(x, q):
        assert q.shape == (x.shape[-1], n_size // (4 if n else 1))
        assert q.dequantize().shape == q.shape
        return jax.lax.psum(x @ q, k) if k else x @ q

    f = jax.shard_map(
        local, mesh=mesh, in_specs=(lhs_spec, specs), out_specs=P(rows, n), check_vma=check_vma
    )
    assert_close(jax.jit(f)(lhs, rhs), reference(lhs, rhs))
    assert_close(gradients(f)(lhs, rhs), gradients(reference)(lhs, rhs))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shard_map_over_one_axis_of_two(kind):
    lhs, rhs = arrays(256, 256, FOUR)
    mesh = make_mesh(kind)
    f = jax.shard_map(
        product, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), axis_names={"a"}
    )
    q = put(rhs, mesh, rhs.partition_spec(mesh, n="b"))
    assert_close(jax.jit(f)(put(lhs, mesh, P("a")), q), reference(lhs, rhs))


def test_vmap_of_shard_map(mesh):
    lhs, rhs = arrays(200, 200, FOUR, shards=(2, 4))
    specs = (P(None, "a"), rhs.partition_spec(mesh, k="a", n="b"))
    f = jax.shard_map(
        lambda x, q: jax.lax.psum(x @ q, "a"), mesh=mesh, in_specs=specs, out_specs=P(None, "b")
    )
    mapped = jax.jit(jax.vmap(f, in_axes=(0, None)))
    assert_close(mapped(jnp.stack([lhs, -lhs]), rhs)[1], -reference(lhs, rhs))


def test_shard_map_returns_the_whole(mesh):
    _, rhs = arrays(400, 256, FOUR, shards=(2, 1))
    specs = rhs.partition_spec(mesh, k="a", n="b")
    whole = jax.shard_map(lambda q: q, mesh=mesh, in_specs=(specs,), out_specs=specs)(rhs)
    assert (whole.shape, whole.shards) == ((400, 256), (2, 1))
    np.testing.assert_array_equal(whole.dequantize(), rhs.dequantize())


def test_shard_map_raises_for_words_that_are_not_a_whole_shard(mesh):
    lhs, rhs = arrays(512, 64, Format(4, 128))
    specs = rhs.partition_spec(mesh, k=("a", "b"))
    with pytest.raises(ValueError, match=r"no whole part of a \(64, 64\) matrix in groups of 128"):
        jax.shard_map(product, mesh=mesh, in_specs=(P(None, ("a", "b")), specs), out_specs=P())(
            lhs, rhs
        )


# --- meshes with Explicit axes --------------------------------------------------------------------

EXPLICIT = {
    "rows and n": (P("a", None), None, "b", None, P("a", "b")),
    "k": (P(None, "b"), "b", None, P(None, None), P(None, None)),
    "k to columns": (P(None, "b"), "b", None, P(None, "b"), P(None, "b")),
    "rows and k": (P("a", "b"), "b", None, P("a", None), P("a", None)),
}


@pytest.mark.parametrize("context", [True, False], ids=["set_mesh", "no context"])
@pytest.mark.parametrize("layout", EXPLICIT)
@pytest.mark.ways("layout")
def test_explicit_mesh(layout, context):
    lhs_spec, k, n, out_sharding, expected = EXPLICIT[layout]
    lhs, rhs = arrays(512, 256, FOUR)
    want = [f(lhs, rhs) for f in (reference, gradients(reference))]
    mesh = make_mesh(AxisType.Explicit)
    x = jax.device_put(lhs, jax.NamedSharding(mesh, lhs_spec))
    q = put(rhs, mesh, rhs.partition_spec(mesh, k=k, n=n))

    def f(x, q):
        out = quantized_matmul(x, q, out_sharding=out_sharding)
        assert jax.typeof(out).sharding.spec == expected
        return out

    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        assert collectives(f, x, q) == [REDUCE] * (k is not None)
        got = [jax.jit(f)(x, q), gradients(f)(x, q)]
        eager = f(x, q)
    assert_close([*got, eager], [*want, want[0]])
    assert got[1][0].sharding.spec == lhs_spec


def test_an_explicit_mesh_raises_for_ambiguous_shardings():
    lhs, rhs = arrays(512, 256, FOUR)
    mesh = make_mesh(AxisType.Explicit)
    with pytest.raises(ValueError, match=r"the contracted axis is sharded .*out_sharding="):
        product(jax.device_put(lhs, jax.NamedSharding(mesh, P(None, "b"))), rhs)
    q = put(rhs, mesh, rhs.partition_spec(mesh, n="b"))
    with pytest.raises(ValueError, match=r"a mesh axis would occur twice"):
        product(jax.device_put(lhs, jax.NamedSharding(mesh, P("b"))), q)
    with pytest.raises(ValueError, match=r"on no mesh with Explicit axes"):
        quantized_matmul(lhs, rhs, out_sharding=P())


def test_experts_and_vmap_on_an_explicit_mesh():
    lhs, rhs = arrays(256, 64, FOUR, (4,))
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(lhs, P("a", None, None))
        q = put(rhs, mesh, rhs.partition_spec(mesh, lead=("a",)))
        for f in (product, jax.vmap(product)):
            out = jax.jit(f)(x, q)
            assert jax.typeof(out).sharding.spec == P("a", None, None)
            assert_close(out, reference(lhs, rhs))
        for shared in (lhs[0], lhs[0, 0]):
            out = jax.jit(product)(shared, q)
            assert jax.typeof(out).sharding.spec == P("a", *[None] * shared.ndim)
            assert_close(out, reference(shared, rhs))


# --- quantize(..., shards=) -----------------------------------------------------------------------


@pytest.mark.parametrize("shards", [(4, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("format", [FOUR, THREE], ids=str)
def test_parts_are_quantized_like_matrices(format, shards):
    weight = np.random.default_rng(0).normal(size=(200, 200)).astype(np.float32) / 16
    rhs = quantize(weight, format, shards=shards)
    dequantize = jax.jit(QuantizedArray.dequantize)
    parts = [
        [dequantize(quantize(part, format)) for part in np.split(rows, shards[1], axis=1)]
        for rows in np.split(weight, shards[0])
    ]
    assert rhs.shape == (200, 200)
    np.testing.assert_array_equal(dequantize(rhs), np.block(parts))
    lhs, _ = arrays(200, 200, format)
    for x in (lhs, lhs[0]):
        assert_close(product(x, rhs), jax.jit(reference)(x, rhs))
    assert_close(gradients(product)(lhs, rhs), gradients(reference)(lhs, rhs))


@pytest.mark.parametrize("format", [FOUR, THREE, EIGHT], ids=str)
def test_padded_parts_on_an_auto_mesh(format, mesh):
    lhs, rhs = arrays(200, 200, format, shards=(2, 4))
    x = jax.device_put(lhs, jax.NamedSharding(mesh, P(None, "a")))
    q = put(rhs, mesh, rhs.partition_spec(mesh, k="a", n="b"))
    assert collectives(product, x, q) == [REDUCE]
    assert_close(jax.jit(product)(x, q), reference(lhs, rhs))


def test_shards_divide_the_matrix():
    with pytest.raises(ValueError, match=r"cuts k=200 into 3 parts"):
        jaxlowbit.quantize(jnp.ones((200, 64)), FOUR, shards=(3, 1))


# --- programs for other machines ------------------------------------------------------------------


def test_programs_for_cuda_are_divided_too(mesh, cuda):
    lhs, rhs = arrays(256, 256, FOUR, dtype="bfloat16")
    q = put(rhs, mesh, rhs.partition_spec(mesh, k="b"))
    program = jax.jit(lambda x, q: x @ q).trace(lhs, q).lower(lowering_platforms=("cuda",))
    assert "CustomSPMDPartitioning" in program.as_text()


@pytest.mark.parametrize("allowed", [False, True])
def test_float16_sums_are_allowed_on_every_device(mesh, allowed):
    precision = jax.lax.DotAlgorithmPreset.F16_F16_F16 if allowed else None
    lhs, rhs = arrays(512, 256, FOUR, dtype="float16")
    rhs = put(rhs, mesh, rhs.partition_spec(mesh, k="a"))
    program = jax.jit(lambda x, q: quantized_matmul(x, q, precision=precision))
    text = program.lower(lhs, rhs).compile().as_text()
    assert text is not None
    assert {call.products[0]["accumulate_float16"] for call in described(text)} == {int(allowed)}


def test_specs_are_a_tree_like_the_array(mesh):
    rhs = jax.eval_shape(lambda: jaxlowbit.quantize(jnp.ones((2, 256, 256)), FOUR))
    specs = rhs.partition_spec(mesh, k="a", n="b", lead=(None,))
    assert isinstance(specs, QuantizedArray)
    assert jax.tree.structure(specs) == jax.tree.structure(rhs)
    assert (specs.packed, specs.scale) == (P(None, "b", "a", None),) * 2
    with pytest.raises(ValueError, match=r"view made by select"):
        quantize(jnp.ones((2, 64, 64)), EIGHT).select(0).partition_spec(mesh)
