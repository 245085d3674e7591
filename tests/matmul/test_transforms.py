"""Transformations of the product match transformations of `lhs @ rhs.dequantize()`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLATFORM, TARGET, backends, positions, quantize
from jax import export

import jaxlowbit
from jaxlowbit import Format, QuantizedArray

K, N, LAYERS = 72, 72, 3
UNCHECKED = [export.DisabledSafetyCheck.custom_call(TARGET)]

# Dtypes and formats of the kernels, and one without a CUDA kernel.
PERMUTED = "permuted, float32"
KINDS = {
    "4 bits, bfloat16": ("bfloat16", Format(4, 32, "integer")),
    "8 bits, float32": ("float32", Format(8)),
    "3 bits, float32": ("float32", Format(3, 48, "float")),
    PERMUTED: ("float32", Format(4, 32, "float")),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def arrays(kind: str, *lead: int) -> tuple[jax.Array, QuantizedArray]:
    """lhs (*lead, 5, K) and rhs (*lead, K, N)."""
    dtype, format = KINDS[kind]
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=(*lead, K, N)) / np.sqrt(K)).astype(jnp.dtype(dtype))
    permutation = np.argsort(rng.normal(size=(*lead, K))) if kind == PERMUTED else None
    return normal(kind, *lead, 5, K), quantize(weight, format, permutation=permutation)


def normal(kind: str, *shape: int, seed: int = 1) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values.astype(jnp.dtype(KINDS[kind][0])))


def product(lhs, rhs):
    return lhs @ rhs


# Jitted: only the transformed product has to run operation by operation.
@jax.jit
def reference(lhs, rhs):
    return lhs @ rhs.dequantize(lhs.dtype)


def loss(multiply, lhs, rhs):
    return jnp.sum(jnp.sin(multiply(lhs, rhs).astype(jnp.float32)))


def assert_close(got, want):
    """Equal up to a few roundings of the coarsest dtype, relative to the largest element."""

    def compare(got, want):
        assert got.shape == want.shape and got.dtype == want.dtype
        if got.dtype == jax.dtypes.float0:
            return
        got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error <= tolerance, f"off by {error:.3g} of the largest element"

    exact = all(x.dtype != jnp.bfloat16 for x in jax.tree.leaves(want))
    tolerance = 1e-5 if exact else 0.03
    jax.tree.map(compare, got, want)


# Transformations of a function of lhs, called with lhs and then with further arrays.
UNARY = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(f(x).astype(jnp.float32)))),
    "value_and_grad in jit": lambda f: jax.jit(
        jax.value_and_grad(lambda x: jnp.sum(f(x).astype(jnp.float32) ** 2))
    ),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x[::-1],)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x[::-1]),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](f(x)),
    "linear_transpose": lambda f: lambda x: jax.linear_transpose(f, x)(f(x)),
    "jacfwd": lambda f: lambda x: jax.jacfwd(f)(x[0]),
    "jacrev": lambda f: lambda x: jax.jacrev(f)(x[0]),
    "hessian": lambda f: (
        lambda x: jax.hessian(lambda row: jnp.sum(jnp.sin(f(row).astype(jnp.float32))))(x[0])
    ),
    "vmap": lambda f: jax.vmap(f),
    "vmap of a later axis": lambda f: (
        lambda x: jax.vmap(f, in_axes=1, out_axes=1)(jnp.stack([x, 2 * x], axis=1))
    ),
    "vmap of vmap": lambda f: lambda x: jax.vmap(jax.vmap(f))(jnp.stack([x, 2 * x])),
    "vmap of grad": lambda f: jax.vmap(
        jax.grad(lambda x: jnp.sum(jnp.sin(f(x).astype(jnp.float32))))
    ),
    "remat": lambda f: jax.grad(
        lambda x: jnp.sum(jax.checkpoint(lambda y: jnp.sin(f(y)))(x).astype(jnp.float32))
    ),
    "lax.map": lambda f: lambda x: jax.lax.map(f, x),
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] > -100, f, lambda x: 2 * f(x), x),
    "fori_loop": lambda f: lambda x: jax.lax.fori_loop(0, 2, lambda i, x: jnp.tanh(f(x)), x),
}


# Permuted weights run under every transformation because they have more rules; others alternate.
OTHER_KINDS = [kind for kind in KINDS if kind != PERMUTED]
TRANSFORMED = [
    (transform, kind)
    for i, transform in enumerate(UNARY)
    for kind in (OTHER_KINDS[i % len(OTHER_KINDS)], PERMUTED)
]


@pytest.mark.parametrize(("transform", "kind"), TRANSFORMED)
@pytest.mark.ways("transform")
def test_transformations_of_lhs(transform, kind):
    lhs, rhs = arrays(kind)
    got = UNARY[transform](lambda x: product(x, rhs))(lhs)
    assert_close(got, jax.jit(UNARY[transform](lambda x: reference(x, rhs)))(lhs))


# --- with respect to scales and float zeros -------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "wrt", "bits"),
    [
        ("none", ("scale",), 4),
        ("none", ("scale",), 3),
        ("integer", ("scale",), 4),
        ("float", ("scale",), 3),
        ("float", ("zero",), 4),
        ("float", ("scale", "zero"), 3),
    ],
)
@pytest.mark.ways("wrt")
def test_derivatives_in_scales_and_zeros(zero, wrt, bits):
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=(K, N)) / np.sqrt(K)).astype(np.float32)
    rhs = quantize(weight, Format(bits, 32, zero))
    lhs = normal("8 bits, float32", 5, K)
    values = {name: getattr(rhs, name) for name in wrt}
    tangents = {
        name: jnp.asarray(rng.normal(size=value.shape).astype(np.float32))
        for name, value in values.items()
    }

    def of(multiply):
        def f(lhs, values):
            return loss(multiply, lhs, dataclasses.replace(rhs, **values))

        both = jax.grad(f, argnums=(0, 1))(lhs, values)
        moved = jax.jvp(f, (lhs, values), (lhs, tangents))
        linear = jax.linearize(lambda v: f(lhs, v), values)[1](tangents)
        mapped = jax.vmap(jax.grad(f, argnums=1), in_axes=(0, None))(lhs, values)
        return both, moved, linear, mapped

    assert_close(jax.jit(lambda: of(product))(), jax.jit(lambda: of(reference))())


def test_allow_int_grad_of_the_whole_array():
    lhs, rhs = arrays("8 bits, float32")
    grad = jax.grad(lambda q, f: loss(f, lhs, q), allow_int=True)
    got, want = grad(rhs, product), grad(rhs, reference)
    assert got.packed.dtype == jax.dtypes.float0
    assert_close(got.scale, want.scale)


# --- vmap over the weights ------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize(("lhs_axis", "rhs_axis"), [(0, 0), (None, 0), (1, 0)])
@pytest.mark.ways("lhs_axis")
def test_vmap_over_weights(kind, lhs_axis, rhs_axis):
    lhs, rhs = arrays(kind, LAYERS)
    lhs = {0: lhs, 1: jnp.swapaxes(lhs, 0, 1), None: lhs[0]}[lhs_axis]
    axes = (lhs_axis, rhs_axis)
    assert_close(jax.vmap(product, axes)(lhs, rhs), jax.vmap(reference, axes)(lhs, rhs))


def test_vmap_over_weights_of_grad():
    lhs, rhs = arrays(PERMUTED, LAYERS)
    grads = [jax.vmap(jax.grad(functools.partial(loss, f)))(lhs, rhs) for f in (product, reference)]
    assert_close(*grads)


@every_kind
def test_vmap_over_an_index(kind):
    lhs, rhs = arrays(kind, LAYERS)
    index = jnp.array([2, 0, 5, -1], jnp.int32)
    layers = positions(index, LAYERS)
    want = lhs[0] @ rhs.dequantize(lhs.dtype)[layers]
    assert_close(jax.vmap(lambda i: lhs[0] @ rhs.select(i))(index), want)
    mapped = jax.vmap(lambda x, i: x @ rhs.select(i), in_axes=(None, 0))
    assert_close(jax.jit(mapped)(lhs[0], index), want)


@every_kind
def test_vmap_over_stacks_and_indices(kind):
    lhs, rhs = arrays(kind, 2, LAYERS)
    value, index = rhs.dequantize(lhs.dtype), jnp.array([9, -2], jnp.int32)
    x = lhs[:, 0]
    want = jnp.stack([x[0] @ value[0, LAYERS - 1], x[1] @ value[1, LAYERS - 2]])
    assert_close(jax.vmap(lambda x, q, i: x @ q.select(i))(x, rhs, index), want)
    # An index with several elements, shared by different stacks.
    several = jnp.array([1, 0, 1], jnp.int32)
    got = jax.vmap(lambda q: lhs[0] @ q.select(several))(rhs)
    assert_close(got, jnp.stack([lhs[0] @ value[i][several] for i in range(2)]))
    # Mapped stacks with mapped indices of several elements.
    pairs = jnp.array([[1, 0], [2, 2]], jnp.int32)
    got = jax.vmap(lambda q, i: lhs[0, :2] @ q.select(i))(rhs, pairs)
    assert_close(got, jnp.stack([lhs[0, :2] @ value[i][pairs[i]] for i in range(2)]))


def test_nested_vmap_over_weights_then_rows():
    lhs, rhs = arrays(PERMUTED, LAYERS)
    rows = jnp.stack([lhs, -lhs])
    nested = [jax.vmap(jax.vmap(f), in_axes=(0, None))(rows, rhs) for f in (product, reference)]
    assert_close(*nested)


# --- loops over stacked layers --------------------------------------------------------------------


def through_layers(lhs, rhs):
    for layer in rhs.dequantize(lhs.dtype):
        lhs = jnp.tanh(lhs @ layer)
    return lhs


SCANS = {"lax": jax.lax.scan, "jaxlowbit": jaxlowbit.scan}


@every_kind
@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.ways("scan")
def test_scan_over_stacked_layers(scan, kind):
    lhs, rhs = arrays(kind, LAYERS)

    def run(x):
        return SCANS[scan](lambda x, layer: (jnp.tanh(x @ layer), None), x, rhs)[0]

    assert_close(jax.jit(run)(lhs[0]), through_layers(lhs[0], rhs))


def test_scan_differentiates_maps_and_passes_its_options():
    lhs, rhs = arrays("8 bits, float32", LAYERS)
    bias = normal("8 bits, float32", LAYERS, N)

    def step(x, layer):
        x = jnp.tanh(x @ layer["w"]) + layer["b"][None]
        return x, x.sum()

    def run(x):
        return jaxlowbit.scan(step, x, {"w": rhs, "b": bias}, length=LAYERS, reverse=True)

    def want(x):
        sums = []
        for i in reversed(range(LAYERS)):
            x = jnp.tanh(x @ rhs.dequantize()[i]) + bias[i][None]
            sums.append(x.sum())
        return x, jnp.stack(sums[::-1])

    assert_close(run(lhs[0]), want(lhs[0]))
    assert_close(jax.vmap(run)(lhs), jax.vmap(want)(lhs))
    grads = [jax.jit(jax.grad(lambda x, f=f: f(x)[0].sum()))(lhs[0]) for f in (run, want)]
    assert_close(*grads)


def test_scan_without_quantized_arrays_is_lax_scan():
    def step(carry, x):
        return carry + x, carry * x

    xs = jnp.arange(4.0)
    assert_close(jaxlowbit.scan(step, 1.0, xs), jax.lax.scan(step, 1.0, xs))
    counted = jaxlowbit.scan(lambda c, _: (c + 1, None), 0, None, length=3)
    assert counted[0] == 3


# --- other features of JAX ------------------------------------------------------------------------


def test_eval_shape_needs_no_arrays():
    lhs, rhs = arrays("4 bits, bfloat16")
    abstract = jax.eval_shape(product, lhs, rhs)
    assert (abstract.shape, abstract.dtype) == ((5, N), jnp.bfloat16)
    wide = jax.eval_shape(
        lambda x, q: jaxlowbit.quantized_matmul(x, q, preferred_element_type=jnp.float32), lhs, rhs
    )
    assert wide.dtype == jnp.float32


@every_kind
@pytest.mark.parametrize("symbolic", [False, True], ids=["fixed rows", "symbolic rows"])
@pytest.mark.ways("symbolic")
def test_export_and_call(kind, symbolic):
    lhs, rhs = arrays(kind)
    shape = export.symbolic_shape("b, 72") if symbolic else lhs.shape
    exported = export.export(jax.jit(lambda x: x @ rhs), disabled_checks=UNCHECKED)(
        jax.ShapeDtypeStruct(shape, lhs.dtype)
    )
    native = PLATFORM in backends(*KINDS[kind])
    assert (TARGET in exported.mlir_module()) == native
    again = export.deserialize(exported.serialize())
    assert_close(again.call(lhs), reference(lhs, rhs))


def test_weights_are_arguments_of_exported_programs():
    lhs, rhs = arrays("8 bits, float32")
    leaves, treedef = jax.tree.flatten(rhs)
    program = jax.jit(lambda x, *leaves: x @ jax.tree.unflatten(treedef, leaves))
    exported = export.export(program, disabled_checks=UNCHECKED)(lhs, *leaves)
    assert_close(exported.call(lhs, *leaves), reference(lhs, rhs))


def test_donated_lhs_is_reused():
    """The result of one call is the lhs of the next, in a jitted step whose lhs is donated."""
    lhs, rhs = arrays("8 bits, float32")
    step = jax.jit(lambda x: x + jnp.tanh(x @ rhs), donate_argnums=0)
    got, want = lhs + 0, lhs
    for _ in range(4):
        got, want = step(got), want + jnp.tanh(reference(want, rhs))
    assert_close(got, want)


@pytest.fixture
def mesh():
    devices = jax.devices()[:2]
    return jax.make_mesh(
        (len(devices),), ("a",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices
    )


@every_kind
def test_shard_map_over_rows(kind, mesh):
    lhs, rhs = arrays(kind)
    lhs = jnp.concatenate([lhs, -lhs])
    sharded = jax.shard_map(
        product, mesh=mesh, in_specs=(jax.P("a"), jax.P()), out_specs=jax.P("a")
    )
    assert_close(jax.jit(sharded)(lhs, rhs), reference(lhs, rhs))


@pytest.mark.parametrize("spec", [jax.P(), jax.P("a")], ids=["replicated", "sharded"])
def test_shard_map_over_a_stack_and_its_derivatives(spec, mesh):
    lhs, rhs = arrays("8 bits, float32", 2)
    lhs = lhs if spec else lhs[:1]

    def over_shards(f):
        return jax.shard_map(f, mesh=mesh, in_specs=(spec, jax.P("a")), out_specs=jax.P("a"))

    def results(f):
        grad = jax.grad(lambda x: loss(f, x, rhs))(lhs)
        scales = jax.grad(lambda s: loss(f, lhs, dataclasses.replace(rhs, scale=s)))(rhs.scale)
        return f(lhs, rhs), grad, scales

    got = jax.jit(lambda: results(over_shards(product)))()
    assert_close(got, jax.jit(lambda: results(reference))())


def test_shard_map_sums_over_shards_of_k(mesh):
    """Each device has a shard of k; the partial products are summed."""
    lhs, rhs = arrays("8 bits, float32", 2)

    def local(x, q):
        return jax.lax.psum((x @ q).sum(axis=0), "a")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(jax.P("a"), jax.P("a")), out_specs=jax.P())
    assert_close(jax.jit(sharded)(lhs, rhs), reference(lhs, rhs).sum(axis=0))


def test_shard_map_over_an_index(mesh):
    lhs, rhs = arrays("8 bits, float32", LAYERS)
    index = jnp.array([2, 0], jnp.int32)
    sharded = jax.shard_map(
        lambda x, q, i: x @ q.select(i),
        mesh=mesh,
        in_specs=(jax.P(), jax.P(), jax.P("a")),
        out_specs=jax.P("a"),
    )
    assert_close(jax.jit(sharded)(lhs[0], rhs, index), lhs[0] @ rhs.dequantize()[index])


def test_explicit_sharding_of_rows_is_kept():
    lhs, rhs = arrays("8 bits, float32")
    devices = jax.devices()[:2]
    mesh = jax.make_mesh(
        (len(devices),), ("a",), axis_types=(jax.sharding.AxisType.Explicit,), devices=devices
    )
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.concatenate([lhs, lhs]), jax.P("a", None))
        out = jax.jit(product)(x, jax.device_put(rhs, jax.P()))
        assert jax.typeof(out).sharding.spec == jax.P("a", None)
        assert_close(np.asarray(out)[:5], np.asarray(reference(lhs, rhs)))
        with pytest.raises(ValueError, match=r"the contracted axis is sharded \(lhs over 'a'"):
            jax.jit(product)(jax.device_put(lhs, jax.P(None, "a")), rhs)


def test_same_program_on_the_platform_of_its_arrays():
    """One jitted function runs on the device of its arguments."""
    lhs, rhs = arrays("8 bits, float32")
    program = jax.jit(product)
    for device in jax.devices("cpu"):
        x, q = jax.device_put((lhs, rhs), device)
        out = program(x, q)
        assert out.devices() == {device}
        assert_close(np.asarray(out), np.asarray(reference(lhs, rhs)))
    assert PLATFORM in ("cpu", "cuda")
