"""Weights with permuted rows: construction and products."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import call_names, dequantize, dequantized, described, global_order

import jaxlowbit
from jaxlowbit import Format, QuantizedArray
from jaxlowbit._core import permutations

K, N, LAYERS = 200, 70, 3
FORMAT = Format(4, 48, "integer")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def orders(*shape: int, seed: int = 1) -> np.ndarray:
    """Random permutations of the last axis."""
    return np.argsort(normal(*shape, seed=seed), axis=-1)


def quantize(*lead: int, shards: int = 1, format: Format = FORMAT) -> QuantizedArray:
    """A permuted array (*lead, K, N)."""
    permutation = orders(*lead, shards, K // shards).reshape(*lead, K)
    weight = normal(*lead, K, N) / np.float32(np.sqrt(K))
    return jit_quantize(weight, format, shards=(shards, 1), permutation=permutation)


# No test here depends on the accuracy of scales, so use the quantizer that compiles fastest.
jit_quantize = jax.jit(
    functools.partial(jaxlowbit.quantize, quantizer="absmax"),
    static_argnums=1,
    static_argnames="shards",
)


def product(lhs, rhs):
    return lhs @ rhs


@jax.jit
def reference(lhs, rhs):
    return lhs @ rhs.dequantize(lhs.dtype)


def loss(multiply, lhs, rhs):
    return jnp.sum(jnp.sin(multiply(lhs, rhs)))


def assert_close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max())


# --- construction ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "shards", "lead"),  # every format, and a pairwise cover of the rest
    [(FORMAT, 1, (2, 3)), (FORMAT, 2, ()), (Format(8), 1, ()), (Format(3, 32), 2, (2, 3))],
    ids=str,
)
def test_quantize_stores_and_groups_rows_in_that_order(format, shards, lead):
    weight, array = normal(*lead, K, N), quantize(*lead, shards=shards, format=format)
    order = global_order(np.asarray(array.permutation), shards)[..., None]
    stored = np.take_along_axis(weight / np.float32(np.sqrt(K)), order, axis=-2)
    want = jit_quantize(stored, format, shards=(shards, 1))
    for name in ("packed", "scale", "zero"):
        jax.tree.map(np.testing.assert_array_equal, getattr(array, name), getattr(want, name))
    value, unpermuted = (np.asarray(dequantized(x)) for x in (array, want))
    np.testing.assert_array_equal(value, dequantize(array).value.astype(np.float32))
    np.testing.assert_array_equal(np.take_along_axis(value, order, axis=-2), unpermuted)
    assert array.nbytes == want.nbytes + 4 * K * np.prod(lead, dtype=int)


def test_one_permutation_serves_all_leading_axes():
    weight, order = normal(LAYERS, K, N), orders(K)
    one = jaxlowbit.quantize(weight, FORMAT, permutation=order)
    each = jaxlowbit.quantize(weight, FORMAT, permutation=np.stack([order] * LAYERS))
    jax.tree.map(np.testing.assert_array_equal, one, each)


def grouped(g_idx, size, **options):
    """Distinct values per row, with a scale for each group."""
    rng = np.random.default_rng(0)
    lead, k = np.shape(g_idx)[:-1], np.shape(g_idx)[-1]
    parts = options.get("shards", (1, 1))[0]
    groups = 1 if size == -1 else -(-k // (parts * size)) * parts
    values = rng.integers(-8, 8, (*lead, k, N))
    scale = rng.uniform(0.5, 1.5, (*lead, groups, N)).astype(np.float32)
    format = Format(4, size)
    array = QuantizedArray.from_integers(values, scale, format=format, g_idx=g_idx, **options)
    want = values * np.take_along_axis(scale, np.asarray(g_idx)[..., None], -2)
    np.testing.assert_array_equal(array.dequantize(), want.astype(np.float32))
    return array.permutation


def test_groups_of_gptq():
    """Rows of a group may be scattered; each uses the scale of its group."""
    size, groups = 32, 4
    rng = np.random.default_rng(0)
    k = size * groups - 10
    group_index = rng.permutation(np.arange(k) // size)
    permutation = grouped(group_index, size)
    assert permutation is not None and permutation.dtype == jnp.int32
    np.testing.assert_array_equal(group_index[permutation], np.arange(k) // size)
    within = np.diff(permutation)[np.diff(group_index[permutation]) == 0]
    assert (within > 0).all(), "not stable"


def test_groups_of_a_stack_and_groups_in_order():
    group_index = np.stack([np.arange(64) // 32, np.arange(64) % 2])
    permutation = grouped(group_index, 32)
    assert permutation is not None
    np.testing.assert_array_equal(permutation[0], np.arange(64))
    np.testing.assert_array_equal(permutation[1], np.arange(64).reshape(32, 2).T.ravel())
    assert grouped(group_index[0], 32) is None
    assert grouped(np.zeros(64, int), -1) is None


def test_groups_of_parts():
    """Each shard of k has separate groups; the last one is partial."""
    parts = [np.random.default_rng(i).permutation(np.arange(80) // 32) + 3 * i for i in range(2)]
    permutation: Any = grouped(np.concatenate(parts), 32, shards=(2, 1))
    np.testing.assert_array_equal(permutation[80:], np.argsort(parts[1], kind="stable"))
    with refuses(r"group 1 of g_idx has 31 rows, but 80 rows of part 0 of k in groups of 32 make"):
        wrong = np.concatenate(parts)
        wrong[np.argmax(wrong == 1)] = 2
        grouped(wrong, 32, shards=(2, 1))


def test_one_g_idx_serves_all_leading_axes():
    values, scale = np.ones((LAYERS, 64, N), np.int8), np.ones((LAYERS, 2, N), np.float32)
    pack = functools.partial(QuantizedArray.from_integers, values, scale, format=Format(4, 32))
    found = pack(g_idx=np.arange(64) % 2).permutation
    np.testing.assert_array_equal(found, [np.arange(64).reshape(32, 2).T.ravel()] * LAYERS)
    with refuses("permutation and g_idx are both given, but g_idx determines the order"):
        pack(g_idx=np.arange(64) % 2, permutation=np.arange(64))
    with pytest.raises(TypeError, match="g_idx is traced, but the order of rows depends on"):
        jax.jit(lambda g_idx: pack(g_idx=g_idx))(np.arange(64) % 2)


# --- array operations -----------------------------------------------------------------------------


@pytest.mark.slow
def test_indexing_selecting_and_mapping():
    stack = quantize(LAYERS)
    value = stack.dequantize()
    np.testing.assert_array_equal(stack[1].dequantize(), value[1])
    for i, layer in ((9, 2), (-1, 2), (-3, 0), (-9, 0)):
        np.testing.assert_array_equal(stack.select(i).dequantize(), value[layer])
    index = np.array([[2, 0], [1, 1]])
    np.testing.assert_array_equal(stack.select(index).dequantize(), value[index])
    np.testing.assert_array_equal(jax.vmap(lambda q: q.dequantize())(stack), value)
    mapped = jax.lax.scan(lambda _, q: (None, q.dequantize()), None, stack)[1]
    np.testing.assert_array_equal(mapped, value)


def test_a_permutation_from_outside_is_checked(monkeypatch):
    """Arrays derived from another one skip the check, which takes longer than a product."""
    checked = []
    monkeypatch.setattr(permutations, "check_values", lambda caller, *args: checked.append(caller))
    values, scale = np.zeros((1, K, N), np.int8), np.ones((1, 1, N), np.float32)
    order = np.arange(K)
    stack = QuantizedArray.from_integers(values, scale, format=Format(4), permutation=order)
    assert checked == ["from_integers"]
    stack.select(0)
    assert (jnp.ones((3, 1, K)) @ stack).shape == (3, 1, N)  # a view
    assert checked == ["from_integers"]


def test_tree_path_and_abstract_arrays():
    flat, _ = jax.tree_util.tree_flatten_with_path(quantize())
    names = [jax.tree_util.keystr(path) for path, _ in flat]
    assert names == [".packed", ".scale", ".zero", ".permutation", ".version"]
    abstract = jax.eval_shape(lambda: quantize(2))
    assert abstract.permutation.shape == (2, K) and abstract.permutation.dtype == jnp.int32


def test_explain_names_it():
    text = jaxlowbit.explain(jax.ShapeDtypeStruct((1, K), jnp.float32), quantize())
    assert "zero integer, rows permuted: lhs is gathered first" in text
    assert "permuted" not in jaxlowbit.explain(
        jax.ShapeDtypeStruct((1, K), jnp.float32), dataclasses.replace(quantize(), permutation=None)
    )


# --- errors ---------------------------------------------------------------------------------------


def refuses(message: str):
    return pytest.raises(ValueError, match=rf"^\w+: .*{message}.*\.$")


@pytest.mark.parametrize(
    ("changes", "found"),
    [({3: 17}, "17 at (17,) again"), ({5: K}, "200 at (5,)"), ({0: -1}, "-1 at (0,)")],
)
def test_permutations_with_a_missing_row(changes, found):
    order = np.arange(K, dtype=np.int32)
    for at, value in changes.items():
        order[at] = value
    array = jaxlowbit.quantize(normal(K, N), FORMAT)
    message = re.escape(f"permutation has {found}, but each of the rows 0 to 199 comes once; pass")
    with refuses(message):
        jaxlowbit.quantize(normal(K, N), FORMAT, permutation=order)
    with refuses(message):
        dataclasses.replace(array, permutation=jnp.asarray(order))
    codes = np.zeros((K, N), np.int8)
    with refuses(message):
        QuantizedArray.from_integers(
            codes, np.ones((1, N)), format=Format(4, -1), permutation=order
        )


def test_permutations_stay_within_shards_and_layers():
    array = jaxlowbit.quantize(normal(2, K, N), FORMAT, shards=(2, 1))
    order = np.tile(np.arange(100, dtype=np.int32), (2, 2))
    dataclasses.replace(array, permutation=jnp.asarray(order))
    order[1, [20, 120]] = order[1, [120, 20]] + 1
    with refuses(r"21 at \(1, 21\) again, but each of the rows 0 to 99 of each of 2 shards comes"):
        dataclasses.replace(array, permutation=jnp.asarray(order))
    with refuses(r"100 at \(100,\), but each of the rows 0 to 99 of each of 2 shards comes once"):
        jaxlowbit.quantize(normal(K, N), FORMAT, shards=(2, 1), permutation=np.arange(K))


def test_restored_permutations_are_checked_on_request():
    leaves, treedef = jax.tree.flatten(quantize())
    stored = jax.tree.unflatten(treedef, [*leaves[:-2], jnp.zeros(K, jnp.int32), leaves[-1]])
    with refuses(r"permutation has 0 at \(1,\) again"):
        stored.check_permutation()
    jax.eval_shape(lambda q: q.check_permutation(), stored)
    quantize().check_permutation()


def test_shapes_and_dtypes():
    weight = normal(2, K, N)
    with refuses(r"permutation is float32\(200,\), but it has a position for each row, integers"):
        jaxlowbit.quantize(weight, FORMAT, permutation=np.zeros(K, np.float32))
    with refuses(r"permutation has shape \(3, 200\), but .* \(2, 200, 70\) needs \(2, 200\), or"):
        jaxlowbit.quantize(weight, FORMAT, permutation=orders(3, K))
    with refuses(r"permutation is int32\(199,\), but the other fields ask for int32\(200,\)"):
        dataclasses.replace(quantize(), permutation=jnp.arange(K - 1))
    for g_idx, found in ((np.zeros(32, np.float32), "float32"), (np.zeros((2, 32), int), "int")):
        with refuses(rf"g_idx is {found}.*, but it has the number of its group for each row"):
            pack_groups(g_idx, 16)


@pytest.mark.parametrize(
    ("group_index", "size", "message"),
    [
        (np.arange(64) % 2, 16, "0 of g_idx has 32 rows, but 64 rows in groups of 16 make it 16"),
        (np.r_[np.zeros(31), np.ones(33)].astype(int), 32, "0 of g_idx has 31 rows, .* make it 32"),
        (np.r_[np.zeros(8), np.ones(32)].astype(int), 32, "0 of g_idx has 8 rows, .* make it 32"),
        (np.arange(64) // 32 + 1, 32, "0 of g_idx has 0 rows, but 64 rows in .* 32 make it 32"),
        (np.arange(64) // 32, -1, "0 of g_idx has 32 rows, but 64 rows in .* -1 make it 64"),
    ],
)
def test_groups_of_another_size(group_index, size, message):
    with refuses(f"group {message}; use the group_size with which"):
        pack_groups(group_index, size)


def pack_groups(g_idx, size):
    k = g_idx.shape[-1]
    groups = 1 if size == -1 else -(-k // size)
    values, scale = np.ones((k, N), np.int8), np.ones((groups, N), np.float32)
    QuantizedArray.from_integers(values, scale, format=Format(4, size), g_idx=g_idx)


# --- programs -------------------------------------------------------------------------------------


def compiled(f, *args) -> str:
    with jax.default_device(jax.devices("cpu")[0]):
        text = jax.jit(lambda *args: f(*args)).lower(*args).compile().as_text()
    assert text is not None
    return text


def operations_on_words(text: str) -> set[str]:
    found = re.findall(r"= u32\[[\d,]+\]\S* ([\w-]+)\(", text)
    return set(found) - {"parameter", "get-tuple-element", "bitcast", "constant", "iota"}


def test_activations_are_gathered_and_words_are_not():
    lhs, stack = normal(5, K), quantize(LAYERS)
    assert operations_on_words(compiled(product, lhs, stack[0])) == set()
    layers = compiled(lambda x, q: x @ q.select(1), lhs, stack)
    assert operations_on_words(layers) == set()
    assert call_names(layers) == ["quantized_matmul"]


def gradient(lhs, rhs):
    return jax.grad(lambda x: (x @ rhs).astype(jnp.float32).sum())(lhs)


@pytest.mark.parametrize(
    ("f", "dtype", "rhs", "operand", "gathers"),
    [
        (product, "bfloat16", ((), 1), "1x200", 0),
        (product, "float16", ((), 2), "2x192", 0),
        (jax.vmap(product, (0, None)), "bfloat16", ((), 1), "1x200", 0),
        (product, "float32", ((), 1), "0", 1),
        (product, "bfloat16", ((5,), 1), "0", 1),
        (gradient, "bfloat16", ((), 1), "0", 1),
    ],
    ids=["matrix", "two parts", "vmap", "float32", "stack", "transposed"],
)
@pytest.mark.ways("f")
def test_calls_of_cuda_gather_activations(cuda, f, dtype, rhs, operand, gathers):
    """The call gathers for a single matrix, otherwise XLA does; words are never gathered."""
    lead, shards = rhs
    lhs = jax.ShapeDtypeStruct((5, 3, K), jnp.dtype(dtype))
    rhs = jax.eval_shape(lambda: quantize(*lead, shards=shards))
    program = jax.jit(lambda *args: f(*args)).trace(lhs, rhs)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = described(text)
    integers = [type for type in call.operands if type.endswith("xi32>")]
    assert integers == ([] if operand == "0" else [f"tensor<{operand}xi32>"])
    assert len(re.findall(r'"stablehlo\.gather"', text)) == gathers
    assert not re.search(r'"stablehlo\.gather".*xui32>', text)


@pytest.mark.parametrize("lead", [(), (2,)], ids=["matrix", "view"])
@pytest.mark.parametrize("lhs_axis", [None, 0, 1])
@pytest.mark.ways("lhs_axis")
def test_vmap_over_permutations_of_the_same_words(lhs_axis, lead):
    words, lhs = quantize(*lead), normal(LAYERS, 5, K)
    at = jnp.asarray(orders(LAYERS, *lead, K, seed=2), jnp.int32)
    x = {0: lhs, 1: np.swapaxes(lhs, 0, 1), None: lhs[0]}[lhs_axis]

    def mapped(multiply):
        def f(x, order):
            rhs = dataclasses.replace(words, permutation=order)
            rhs = rhs.select(jnp.array([1, 0, 1])) if lead else rhs
            x = jnp.stack([x, -x, 2 * x]) if lead else x
            return multiply(x, rhs), jax.grad(lambda x: loss(multiply, x, rhs))(x)

        return jax.vmap(f, (lhs_axis, 0))

    assert_close(jax.jit(mapped(product))(x, at), jax.jit(mapped(reference))(x, at))
    forward = jax.vmap(lambda x, order: x @ dataclasses.replace(words, permutation=order))
    if not lead:
        assert operations_on_words(compiled(forward, lhs, at)) == set()


@pytest.mark.parametrize("lhs_axis", [None, 0])
def test_vmap_over_words_with_one_permutation(lhs_axis):
    stack, lhs = quantize(LAYERS), normal(LAYERS, 5, K)
    order, stack = stack[0].permutation, dataclasses.replace(stack, permutation=None)

    def of(multiply):
        def f(x, q):
            return multiply(x, dataclasses.replace(q, permutation=order))

        return jax.vmap(f, (lhs_axis, 0))(lhs if lhs_axis == 0 else lhs[0], stack)

    assert_close(of(product), of(reference))


@pytest.mark.slow
def test_derivatives_in_scales_zeros_and_lhs():
    lhs, stack = normal(LAYERS, 5, K), quantize(LAYERS, shards=2, format=Format(4, 48, "float"))

    def of(multiply):
        def f(scale, zero, x):
            q = dataclasses.replace(stack, scale=scale, zero=zero)
            return loss(multiply, x, q) + loss(multiply, x[0], q.select(1))

        return jax.value_and_grad(f, (0, 1, 2))(stack.scale, stack.zero, lhs)

    assert_close(of(product), of(reference))


def test_orbax_round_trip(tmp_path):
    array, lhs = quantize(LAYERS), normal(LAYERS, 5, K)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "weight", {"w": array})
        checkpointer.wait_until_finished()
        again = checkpointer.restore(tmp_path / "weight", jax.eval_shape(lambda: {"w": array}))
    jax.tree.map(np.testing.assert_array_equal, again["w"], array)
    again["w"].check_permutation()
    np.testing.assert_array_equal(product(lhs, again["w"]), product(lhs, array))
