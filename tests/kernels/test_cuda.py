"""Properties that need a GPU: CUDA graphs, concurrent programs, split accumulation."""

import dataclasses
import functools
import json
import operator
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_problems import ROWS, normal
from helpers import (
    TARGET,
    Oracle,
    Weight,
    assert_within,
    dequantize,
    global_order,
    matmul,
    quantize,
)

import jaxlowbit
from jaxlowbit import (
    INT4,
    UINT4,
    Format,
    quantized_matmul,
    quantized_mlp,
)
from jaxlowbit._backends import call
from jaxlowbit._backends.extension import ffi

pytestmark = pytest.mark.gpu

# --- CUDA graphs ----------------------------------------------------------------------------------

CHAIN = """
    import json
    import jax, jax.numpy as jnp, numpy as np
    import jaxlowbit
    from jaxlowbit._backends.extension import ffi

    weight = np.random.default_rng(0).normal(size=(8, 256, 256)).astype(jnp.bfloat16)
    rhs = jax.jit(jaxlowbit.quantize, static_argnums=1)(weight / 16, jaxlowbit.INT4)
    layers = list(rhs)

    def chain(x, multiply):
        for layer in layers:
            x = multiply(x, layer)
        return x / jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))).astype(x.dtype)

    step = jax.jit(lambda x: chain(x, lambda x, q: x @ q), donate_argnums=0)
    start = np.random.default_rng(1).normal(size=(4, 256)).astype(jnp.bfloat16)
    x, counts = jnp.asarray(start), []
    for _ in range(100):
        x = step(x)
        x.block_until_ready()
        counts.append(ffi.execute_count())

    # The same step on fresh inputs: a replay reads its arguments anew.
    errors = []
    for scale in (1, -2):
        want = chain(jnp.asarray(start) * scale, lambda x, q: x @ q.dequantize(x.dtype))
        got = step(jnp.asarray(start) * scale)
        wide = lambda x: np.asarray(x).astype(np.float32)
        errors.append(float(np.abs(wide(got) - wide(want)).max() / np.abs(wide(want)).max()))
    print(json.dumps({"counts": counts, "errors": errors}))
"""


def test_a_chain_of_calls_is_replayed_from_a_graph():
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHAIN)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    counts = found["counts"]
    assert counts[0] >= 8, "the first run executes the calls"
    assert counts[-1] <= 8 * 10, f"most of 100 runs should replay a graph: {counts}"
    assert counts[-1] == counts[49], f"the last 50 runs should only replay: {counts}"
    assert max(found["errors"]) < 0.1


# --- programs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [INT4, UINT4, Format(8)], ids=["INT4", "UINT4", "INT8"])
def test_weights_computed_in_the_same_program(format):
    """The call waits for the kernels that write its operands."""
    lhs, weight = normal(7, 512), normal(512, 384, seed=1)

    @jax.jit
    def program(x, w):
        rhs = jaxlowbit.quantize(w * 1, format)  # on the device, to round ties in the same way
        return x @ rhs, rhs

    for _ in range(5):
        out, rhs = program(lhs, weight)
        oracle = Oracle.of(lhs, dequantize(rhs))
        assert_within(out, oracle.exact, oracle.bound(lhs.dtype))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 8192), (5, 200, 4104), (16, 128, 16384)])
def test_split_sums_are_bitwise_equal_from_run_to_run(m, n, k):
    lhs, rhs = normal(m, k), quantize(normal(k, n, seed=1), INT4)
    program = jax.jit(
        lambda x, q: quantized_matmul(x, q, backend="cuda", preferred_element_type=jnp.float32)
    )
    first = np.asarray(program(lhs, rhs))
    for _ in range(20):
        assert np.asarray(program(lhs, rhs)).tobytes() == first.tobytes()
    oracle = Oracle.of(lhs, dequantize(rhs))
    assert_within(first, oracle.exact, oracle.bound(jnp.float32))


@pytest.mark.parametrize(
    "format",
    [INT4, UINT4, Format(4, 32, "float"), Format(4, 128, "float"), Format(8, 128, "none")],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "large", "small"),
    [(jnp.bfloat16, [8, 40], [-40, 0]), (jnp.float16, [-3, 2], [-9, -6])],
    ids=["bfloat16", "float16"],
)
def test_scales_small_and_large(dtype, large, small, format):
    """Kernels have a fast path for small scales, which one large scale among many disables.

    Scales are 0.01 to 0.7 times a power of two: small is below 2, in float16 below 1/32.
    """
    rhs = quantize(normal(1024, 320, seed=1).astype(dtype), format)
    powers = np.random.default_rng(2).choice(large + 63 * small, rhs.scale.shape)
    powers[:, 64:192] = np.minimum(powers[:, 64:192], max(small))
    factor = jnp.asarray(2.0**powers, rhs.scale.dtype)
    zero = rhs.zero
    if zero is not None and format.zero == "float":
        zero = zero * factor
    rhs = dataclasses.replace(rhs, scale=rhs.scale * factor, zero=zero)
    for m in (1, 16, 32, 64, 130, 300):
        lhs = normal(m, 1024).astype(dtype)
        oracle = Oracle.of(lhs, dequantize(rhs))
        got = matmul(lhs, rhs, backend="cuda")
        assert_within(got, oracle.exact, oracle.bound(lhs.dtype))


F16_F16_F16 = jax.lax.DotAlgorithmPreset.F16_F16_F16


@pytest.mark.parametrize("scale_dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("format", [INT4, UINT4, Format(4, 48, "float"), Format(8, 16, "integer")])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 333, 200), (9, 128, 72), (32, 640, 1000), (33, 64, 8192), (200, 72, 1000)]
)
def test_float16_sums(m, n, k, format, scale_dtype):
    lhs = normal(m, k).astype(jnp.float16)
    rhs = quantize(normal(k, n, seed=1).astype(scale_dtype), format)
    oracle = Oracle.of(lhs, dequantize(rhs), half_stage=512 // format.bits)
    for dtype in (jnp.float16, jnp.float32):
        got = matmul(lhs, rhs, precision=F16_F16_F16, preferred_element_type=dtype, backend="cuda")
        assert_within(got, oracle.exact, oracle.bound(dtype))


def test_float16_sums_are_of_one_stage():
    """Float16 can represent the sum of a stage, 128 products, but not of 65536 or more.

    Groups of 16 exclude the other kernels, which accumulate in float32.
    """
    rhs = quantize(jnp.ones((1024, 128), jnp.float16), Format(4, 16))
    weight = float(rhs.dequantize()[0, 0])
    for stage_sum, finite in ((60000, True), (70000, False)):
        lhs = jnp.full((64, 1024), stage_sum / 128 / weight, jnp.float16)
        wide = matmul(lhs, rhs, preferred_element_type=jnp.float32, backend="cuda")
        half = matmul(
            lhs, rhs, precision=F16_F16_F16, preferred_element_type=jnp.float32, backend="cuda"
        )
        np.testing.assert_allclose(wide, 8 * stage_sum, rtol=2**-9)
        assert np.isfinite(half).all() == finite
        if finite:
            np.testing.assert_allclose(half, 8 * stage_sum, rtol=2**-7)


@pytest.mark.parametrize("format", [INT4, UINT4, Format(4, 48, "float"), Format(8, 16, "integer")])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 333, 200), (9, 128, 72), (33, 640, 64), (200, 72, 1000)]
)
def test_the_cotangent_of_lhs(m, n, k, format):
    rhs, cotangent = quantize(normal(k, n, seed=1), format), normal(m, n, seed=2)
    weight = dequantize(rhs)
    oracle = Oracle.of(cotangent, Weight(weight.value.T, weight.terms.T))
    got = jax.jit(lambda ct, rhs: jax.linear_transpose(lambda x: x @ rhs, normal(m, k))(ct)[0])
    first = got(cotangent, rhs)
    assert_within(first, oracle.exact, oracle.bound(cotangent.dtype))
    assert np.asarray(got(cotangent, rhs)).tobytes() == np.asarray(first).tobytes()


def test_a_gradient_contains_no_dequantized_weight():
    rhs = quantize(normal(4096, 4096), INT4)
    step = jax.jit(jax.grad(lambda x, rhs: jnp.sum(jnp.square((x @ rhs).astype(jnp.float32)))))
    memory = step.lower(normal(16, 4096), rhs).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 4096 * 4096  # half a bfloat16 weight


def test_programs_running_at_once_do_not_disturb_each_other():
    """Threads run programs with split accumulation, before and after a large XLA program.

    The bits equal the first run, when no other program was running.
    """
    rhs = quantize(normal(8192, 192), INT4)
    gate_up, down = quantize(normal(2, 192, 512, seed=1), INT4), quantize(normal(512, 256), INT4)
    large = normal(2048, 2048)

    @jax.jit
    def step(x):
        first = x @ rhs
        other = (large + jnp.max(first)) @ large
        x = jnp.where(jnp.isfinite(other).all(), x, 0)  # adds a dependency, no values
        return first, x @ rhs, quantized_mlp(first, gate_up=gate_up, down=down, backend="cuda")

    def run(lhs, want):
        outs = [step(lhs) for _ in range(50)]
        return all(bits(out) == want for out in outs)

    def bits(out):
        return [np.asarray(array).tobytes() for array in out]

    inputs = [normal(m, 8192, seed=m) for m in ROWS]
    first = [bits(step(lhs)) for lhs in inputs]
    with ThreadPoolExecutor(len(ROWS)) as pool:
        assert all(pool.map(run, inputs, first))


def test_calls_in_flight_do_not_share_their_workspace():
    """Independent products in one program, which XLA may run on several streams."""
    lhs, stack = normal(2, 8192), quantize(normal(6, 8192, 128, seed=1), INT4)
    layers = list(stack)
    got = jax.jit(lambda x: [x @ layer for layer in layers])(lhs)
    for one, layer in zip(got, layers, strict=True):
        oracle = Oracle.of(lhs, dequantize(layer))
        assert_within(one, oracle.exact, oracle.bound(lhs.dtype))


def test_several_devices_run_separate_products():
    lhs, rhs = normal(4, 256), quantize(normal(256, 192, seed=1), INT4)
    want = np.asarray(lhs @ rhs)
    for device in jax.devices():
        out = jax.jit(lambda x, q: x @ q)(*jax.device_put((lhs, rhs), device))
        assert out.devices() == {device}
        assert np.asarray(out).tobytes() == want.tobytes()


# --- permuted rows --------------------------------------------------------------------------------


def permuted(k, n, *, shards=1, seed=1):
    """A matrix with randomly permuted rows, and the permutation of k."""
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(k // shards) for _ in range(shards)])
    weight = normal(k, n, seed=seed)
    rhs = quantize(weight, UINT4, shards=(shards, 1), permutation=order)
    return rhs, global_order(order, shards)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("k", "shards"), [(20000, 1), (4096, 1), (1000, 1), (201, 1), (512, 2), (200, 2)]
)
def test_calls_gather_lhs(k, shards, dtype):
    """The bits equal a product of the stored rows and a permuted lhs."""
    rhs, order = permuted(k, 200, shards=shards)
    stored = dataclasses.replace(rhs, permutation=None)
    weight = dequantize(rhs)
    for m in (0, 1, 5, 33, 300):
        lhs = normal(m, k).astype(dtype)
        got = matmul(lhs, rhs, backend="cuda")
        want = matmul(lhs[:, order], stored, backend="cuda")
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes(), m
        oracle = Oracle.of(lhs, weight)
        assert_within(got, oracle.exact, oracle.bound(dtype))


@pytest.mark.parametrize("m", [*ROWS, 600])
def test_calls_that_gather_wait_for_their_operands(m):
    """A chain of layers in a graph; the same program computes lhs, permutations and weights."""
    layers = [permuted(512, 512, seed=seed)[0] for seed in range(4)]

    def step(product, x, one):
        for rhs in layers:
            scale = rhs.scale * one.astype(rhs.scale.dtype)
            rhs = dataclasses.replace(rhs, scale=scale, permutation=rhs.permutation * one)
            x = jax.lax.optimization_barrier(x + jnp.tanh(product(x, rhs)))
        return x

    def apart(x, rhs):
        x = jnp.take(x, rhs.permutation, axis=-1)
        return x @ dataclasses.replace(rhs, permutation=None)

    lhs, one = normal(m, 512), jnp.int32(1)
    program = jax.jit(functools.partial(step, operator.matmul))
    want = np.asarray(jax.jit(functools.partial(step, apart))(lhs, one)).tobytes()
    for _ in range(30):
        assert np.asarray(program(lhs, one)).tobytes() == want


def gathered_by_a_call(permutation, *, m, k=72, transposed=False, gathered=None):
    """lhs, and lhs as permuted by the custom call with all-zero weights (k, k)."""
    lhs = normal(m, k)[None]
    like = jax.ShapeDtypeStruct(lhs.shape, lhs.dtype)
    results = [like, like if gathered is None else gathered]
    results.append(jax.ShapeDtypeStruct((1 << 20,), jnp.uint8))
    blocks = -(-k // 64)
    places = {"lhs": 1, "packed": 2, "scale": 3, "permutation": 4, "out": -1, "gathered": -2}
    record = ffi.product(
        m=m,
        n=k,
        k=k,
        transposed=transposed,
        permuted_parts=len(permutation),
        **{f"{name}_at": place for name, place in places.items()},
    )
    _, found, _ = jax.ffi.ffi_call(TARGET, results)(
        lhs,
        jnp.zeros((1, blocks, blocks, 512), jnp.uint32),
        jnp.zeros((1, blocks, 1, 64), lhs.dtype),
        permutation,
        products=np.array(record),
        steps=np.array(ffi.step(kind="multiply")),
        caller="quantized_matmul",
        **call.VERSIONS,
    )
    return np.asarray(lhs), np.asarray(found)


@pytest.mark.parametrize("m", [3000, 5000])  # gathers from memory; stages whole rows first
@pytest.mark.parametrize(("k", "parts"), [(72, 6), (72, 1), (70, 10), (70, 1), (1, 1)])
def test_positions_beyond_a_part_are_clamped_to_it(k, parts, m):
    """Shards may end inside the columns of a thread; a thread processes several rows."""
    size = k // parts
    order = np.random.default_rng(0).integers(-3, size + 3, (parts, size))
    order[0, 0], order[-1, -1] = -(2**31), 2**31 - 1
    lhs, gathered = gathered_by_a_call(order.astype(np.int32), m=m, k=k)
    columns = np.clip(order, 0, size - 1) + size * np.arange(parts)[:, None]
    assert gathered.tobytes() == lhs[..., columns.ravel()].tobytes()


@pytest.mark.parametrize(
    ("shape", "dtype", "changes", "message"),
    [
        ((2, 35), "int32", {}, r"permutation has shape \[2, 35\] but must have k = 72 elements"),
        ((5, 15), "int32", {}, "permuted_parts is 5 but must be a divisor of k"),
        ((1, 72), "uint32", {}, "permutation is u32 but must be s32"),
        ((1, 72), "int32", {"transposed": True}, "permuted_parts is 1 but must be .* 0 if transp"),
        (
            *((1, 72), "int32", {"gathered": jax.ShapeDtypeStruct((1, 8, 72), jnp.float16)}),
            "gathered is f16 but must be bf16",
        ),
        (
            *((1, 72), "int32", {"gathered": jax.ShapeDtypeStruct((0,), jnp.bfloat16)}),
            r"gathered has shape \[0\] but must be \[batch, m, columns\] = \[1, 8, 72\]",
        ),
    ],
    ids=["rows", "parts", "type", "transposed", "type of gathered", "shape of gathered"],
)
def test_invalid_permutations_raise(shape, dtype, changes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"quantized_matmul: {message}.*\."):
        gathered_by_a_call(np.zeros(shape, dtype), m=8, **changes)


# --- stacks ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stacks_beyond_2_to_31_elements():
    """Strides have 64 bits: the last of 33 weights starts at element 2^31."""
    size = 8192
    lhs, last = normal(2, size), quantize(normal(size, size, seed=1), INT4)
    stack = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (33, *leaf.shape)), last)
    stack = dataclasses.replace(stack, packed=stack.packed.at[:-1].set(0))
    want = np.asarray(lhs @ last)
    np.testing.assert_array_equal(lhs @ stack.select(32), want)
    # A batch splits k differently than one product, so the last bit may differ.
    every = np.asarray(lhs @ stack, np.float32)
    np.testing.assert_allclose(every[-1], want.astype(np.float32), rtol=2**-7, atol=1e-4)
    assert (every[:-1] == every[0]).all() and (every[0] != every[-1]).any()
