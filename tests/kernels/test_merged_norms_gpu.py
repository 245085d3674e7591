"""Products that normalize their rows themselves have the bits of a separate kernel.

Each call is compared with a call in which one more product reads the normalized rows, so that they
must be written.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_problems import uniform
from jax import lax

from jaxlowbit import INT4, Format, quantized_block
from jaxlowbit._backends.block import add_block
from jaxlowbit._backends.call import Call, stored_weight
from jaxlowbit._backends.extension import ffi
from jaxlowbit._backends.layers import Layer, run_layers

pytestmark = pytest.mark.gpu

EPSILON = np.float32(1e-5)


def merged(call: Call) -> int:
    """The number of launches of a call that normalize their rows."""
    found = ffi.instances_of_call(call._products, call._steps)
    return sum("kNormalizes" in expression for _, expression in found)


def same(got: Any, want: Any) -> bool:
    return all(
        np.asarray(one).tobytes() == np.asarray(other).tobytes()
        for one, other in zip(got, want, strict=True)
    )


def rows(*shape: int, dtype: Any, seed: int, size: float = 1) -> Any:
    return jnp.asarray(size * np.random.default_rng(seed).normal(size=shape), dtype)


def chain(
    attended: Any,
    residual: Any,
    norm: Any,
    out: Any,
    weights: Any,
    *,
    gated: bool = False,
    apart: bool = False,
    aliases: Any = None,
) -> list[Any]:
    """The sum and the products, in one call; `apart`: with a separate normalization."""
    call, dtype, (_, m, d) = Call("test"), residual.dtype, residual.shape
    read = functools.partial(stored_weight, dtype=dtype)
    x, y = call.operand(attended), call.operand(residual)
    total = call.result(residual.shape, dtype)
    results = [call.result((1, m, weight.n), dtype) for weight in weights]
    projected, normed = (call.result(residual.shape, dtype) for _ in range(2))
    call.multiply(call.add_product(read(out), x, projected))
    call.step(
        "normalize", x=y, addend=projected, scales=call.operand(norm), total=total, out=normed
    )
    fields: dict[str, Any] = {"gated": True, "activation": "silu"} if gated else {}
    call.multiply(
        *(
            call.add_product(read(weight), normed, result, **fields)
            for weight, result in zip(weights, results, strict=True)
        )
    )
    if apart:
        more = call.result((1, m, 64), dtype)
        call.multiply(call.add_product(read(uniform(d, 64, dtype=str(dtype))), normed, more))
    assert merged(call) == (0 if apart or m > 2 or d % 64 != 0 else 1)
    return call.run(epsilon=EPSILON, aliases=aliases)[: 1 + len(weights)]


def operands(m: int, d: int, widths: Any, *, dtype: Any, format: Any = INT4, gated: bool = False):
    name = str(jnp.dtype(dtype))
    out = uniform(256, d, INT4, dtype=name, seed=2)
    stack = (2,) if gated else ()
    weights = [uniform(d, n, format, stack=stack, dtype=name, seed=n) for n in widths]
    attended = rows(1, m, 256, dtype=dtype, seed=3)
    return attended, rows(1, m, d, dtype=dtype, seed=4, size=3), out, weights


def assert_same(attended: Any, residual: Any, norm: Any, out: Any, weights: Any, **options: Any):
    programs = [
        jax.jit(functools.partial(chain, out=out, weights=weights, apart=apart, **options))
        for apart in (False, True)
    ]
    got, want = (program(attended, residual, norm) for program in programs)
    assert same(got, want)
    for _ in range(10):
        assert same(programs[0](attended, residual, norm), got)
    return got


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("d", [64, 576, 1000, 1024, 4096, 5120, 8192])
def test_rows_of_every_length(d, m, dtype):
    """1000 is not a multiple of 64, and 3 rows are too many: there is a separate kernel."""
    norm = 1 + rows(d, dtype=jnp.float32, seed=5)
    wide = norm if d % 128 == 0 else norm.astype(dtype)
    for widths in ([320], [1024, 256, 200]):
        attended, residual, out, weights = operands(m, d, widths, dtype=dtype)
        assert_same(attended, residual, wide, out, weights)


@pytest.mark.parametrize("d", [8256, 9216, 12288])
def test_rows_of_which_a_thread_of_the_kernel_has_two_vectors(d):
    attended, residual, out, weights = operands(1, d, [1024, 256], dtype=jnp.bfloat16)
    assert_same(attended, residual, 1 + rows(d, dtype=jnp.float32, seed=5), out, weights)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(
    "format",
    [INT4, Format(4, 64, "integer"), Format(4, 32, "float"), Format(8), Format(2, 64), Format(6)],
    ids=str,
)
def test_formats_and_gated_pairs(format, m):
    norm = (1 + rows(2048, dtype=jnp.float32, seed=5)).astype(jnp.bfloat16)
    for gated in (False, True):
        options: dict[str, Any] = {"dtype": jnp.bfloat16, "format": format, "gated": gated}
        attended, residual, out, weights = operands(m, 2048, [1536], **options)
        assert_same(attended, residual, norm, out, weights, gated=gated)


@pytest.mark.parametrize(("dtype", "large"), [(jnp.bfloat16, 1e25), (jnp.float16, 6e4)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, "large", 0])
def test_special_values(value, dtype, large):
    """A row with one, and a row without."""
    attended, residual, out, weights = operands(2, 4096, [1024, 64], dtype=dtype)
    norm = 1 + rows(4096, dtype=jnp.float32, seed=5)
    if value == 0:
        attended, residual = attended * 0, residual * 0
    else:
        element = large if value == "large" else value
        residual = residual.at[0, 1, 1234].set(jnp.asarray(element, dtype))
    total, product, _ = assert_same(attended, residual, norm, out, weights)
    assert np.isfinite(np.asarray(product[0, 0], np.float32)).all()
    if value is np.nan:
        assert np.isnan(np.asarray(product[0, 1], np.float32)).all()
        assert np.isnan(np.asarray(total[0, 1, 1234], np.float32))


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("start", [0, 1, 8])
def test_rows_within_larger_buffers(start, m):
    """Unaligned rows, and a sum that is stored over the residual or over a part of it."""
    d = 1024
    attended, residual, out, weights = operands(m, d, [512, 64], dtype=jnp.bfloat16)
    norm = 1 + rows(d + 8, dtype=jnp.float32, seed=5)
    buffer = jnp.pad(residual.reshape(-1), (start, 4096))

    def program(apart: bool, buffer: Any) -> Any:
        own = lax.dynamic_slice_in_dim(buffer, start, m * d).reshape(1, m, d)
        total, *products = chain(
            attended, own, norm[start % 8 : start % 8 + d], out, weights, apart=apart
        )
        moved = [
            lax.dynamic_update_slice(buffer, total.reshape(-1), (start + shift,))
            for shift in (0, 512)
        ]
        return *moved, *products

    got, want = (jax.jit(functools.partial(program, apart))(buffer) for apart in (False, True))
    assert same(got, want)


@pytest.mark.parametrize("m", [1, 2])
def test_a_sum_in_place_of_the_residual(m):
    attended, residual, out, weights = operands(m, 2048, [512, 64], dtype=jnp.bfloat16)
    norm = 1 + rows(2048, dtype=jnp.float32, seed=5)
    programs = [
        jax.jit(functools.partial(chain, out=out, weights=weights, aliases=aliases))
        for aliases in (None, {1: 0})
    ]
    got, want = (program(attended, residual, norm) for program in programs)
    assert same(got, want)


def block(x: Any, residual: Any, weights: Any, *, apart: bool) -> Call:
    """A block, whose first results are the residual and the following products."""
    call, dtype, (_, m, d) = Call("test"), residual.dtype, residual.shape
    read = functools.partial(stored_weight, dtype=dtype)
    norm = 1 + rows(d, dtype=jnp.float32, seed=6)
    normed = []

    def more() -> None:
        if apart:
            result = call.result((1, m, 64), dtype)
            call.multiply(call.add_product(read(uniform(d, 64)), normed[0], result))

    def mlp(x: int, out: int) -> None:
        normed.append(x)
        hidden = call.result((1, m, weights[1].n), dtype)
        fields: dict[str, Any] = {"gated": True, "activation": "silu"}
        call.multiply(call.add_product(read(weights[1]), x, hidden, **fields))
        call.multiply(call.add_product(read(weights[2]), hidden, out))
        more()

    add_block(
        *(call, call.operand(x), residual, norm, norm, weights),
        read=read,
        activation="silu",
        mlp=mlp,
    )
    more()
    return call


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(("d", "f"), [(1024, 1536), (4096, 2048)])
def test_layers_in_one_call(d, f, m):
    """Four blocks; each reads a product and the residual of the block before."""
    weights = [
        [
            *(uniform(d, d, seed=i), uniform(d, f, stack=(2,), seed=i), uniform(f, d, seed=i)),
            *(uniform(d, n, seed=i + n) for n in (d, 256, 256)),
        ]
        for i in range(4)
    ]
    x, residual = (rows(1, m, d, dtype=jnp.bfloat16, seed=i) for i in (7, 8))

    @functools.partial(jax.jit, static_argnums=0)
    def program(apart: bool, x: Any, residual: Any, weights: Any) -> Any:
        layers: list[Layer] = []
        for own in weights:
            call = block(x, residual, own, apart=apart)
            assert merged(call) == (0 if apart else 2)
            links = {1: -2, call.place_of(residual): -1} if layers else {}
            layers.append(Layer(call, links, attributes={"epsilon": EPSILON}))
        found = run_layers(layers)[-1]
        return [found[place] for place in (-1, -2, -3, -4)]

    got, want = (program(apart, x, residual, weights) for apart in (False, True))
    assert same(got, want)
    for _ in range(50):
        assert same(program(False, x, residual, weights), got)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("m", [1, 2])
def test_blocks(m, dtype):
    """`quantized_block` at one and two rows, against blocks with separate normalizations."""
    d, f, name = 1024, 1536, str(jnp.dtype(dtype))
    make = functools.partial(uniform, dtype=name)
    weights = [make(d, d), make(d, f, stack=(2,)), make(f, d), make(d, 512), make(d, 200)]
    x, residual = (rows(1, m, d, dtype=dtype, seed=i) for i in (7, 8))
    norm = 1 + rows(d, dtype=jnp.float32, seed=6)
    out, gate_up, down, *following = weights
    y, products = jax.jit(
        functools.partial(
            quantized_block,
            out=out,
            norm=norm,
            gate_up=gate_up,
            down=down,
            following=(norm, following),
            backend="cuda",
        )
    )(x[0], residual[0])

    @jax.jit
    def apart(x: Any, residual: Any) -> Any:
        return block(x, residual, weights, apart=True).run(epsilon=EPSILON)[:3]

    assert same([y, *products], apart(x, residual))
