"""Products with operands and results inside larger buffers.

For slices and updates XLA passes a custom call pointers into larger buffers, so a result may alias
an operand, and an operand may start at any element. Cases run in separate processes, because a
fault ends the process.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_problems import Cases, assert_close, isolated, main, normal, uniform
from helpers import Oracle, assert_within, dequantize, finished
from jax import lax

from jaxlowbit import (
    INT4,
    UINT4,
    Format,
    quantized_block,
    quantized_glu,
    quantized_matmul,
    quantized_matmuls,
    quantized_mlp,
)

pytestmark = pytest.mark.gpu
# Groups unsupported by the Hopper kernels.
GENERAL = Format(4, 16)


def rows_of(x: Any, start: int, count: int) -> Any:
    return lax.slice_in_dim(x, start, start + count)


# --- results that overwrite their operands --------------------------------------------------------

# Weights (d, d), and a function of them.
FORMS: dict[str, tuple[Any, Any]] = {
    "product": (uniform, quantized_matmul),
    "epilogue": (
        uniform,
        lambda x, q: quantized_matmul(x, q, bias=jnp.ones(q.n, x.dtype), activation="silu"),
    ),
    "permuted": (functools.partial(uniform, permuted=True), quantized_matmul),
    "gated pair": (functools.partial(uniform, stack=(2,)), quantized_glu),
    "mlp": (
        functools.partial(uniform, stack=(3,)),
        lambda x, q: quantized_mlp(x, gate_up=q[:2], down=q[2]),
    ),
    "the first of several": (
        functools.partial(uniform, stack=(2,)),
        lambda x, q: quantized_matmuls(x, [*q])[0],
    ),
    "the second of several": (
        functools.partial(uniform, stack=(2,)),
        lambda x, q: quantized_matmuls(x, [*q])[1],
    ),
}


def in_place(form: str, rows: int, d: int) -> None:
    """Rows of a buffer are replaced by results computed from them."""
    make, compute = FORMS[form]
    weights, x = make(d, d), normal(rows + 128, d)

    @jax.jit
    def program(x: Any, weights: Any) -> Any:
        out = compute(rows_of(x, 64, rows), weights)
        return lax.dynamic_update_slice(x, out, (64, 0))

    apart = jax.jit(compute)(x[64 : 64 + rows], weights)
    want = x.at[64 : 64 + rows].set(apart)
    assert_close(program(x, weights), want, k=d, products=2)


def in_place_in_a_loop() -> None:
    rows, count, d = 2048, 4, 4096
    rhs, x = uniform(d, d), normal(rows * count, d)

    def turn(i: Any, x: Any) -> Any:
        out = quantized_matmul(lax.dynamic_slice_in_dim(x, i * rows, rows), rhs)
        return lax.dynamic_update_slice(x, out, (i * rows, 0))

    got = jax.jit(lambda x: lax.fori_loop(0, count, turn, x))(x)
    assert_close(got, jax.jit(quantized_matmul)(x, rhs), k=d)


def residual_in_place(rows: int, d: int, shift: int) -> None:
    """The result replaces the residual, or rows that overlap it."""
    rhs, lhs, x = uniform(d, d), normal(rows, d, seed=7), normal(rows + 128, d)

    @jax.jit
    def program(x: Any, lhs: Any) -> Any:
        out = quantized_matmul(lhs, rhs, residual=rows_of(x, 64 + shift, rows))
        return lax.dynamic_update_slice(x, out, (64, 0))

    residual = x[64 + shift : 64 + shift + rows]
    apart = jax.jit(lambda lhs, residual: quantized_matmul(lhs, rhs, residual=residual))
    assert_close(program(x, lhs), x.at[64 : 64 + rows].set(apart(lhs, residual)), k=d)


PLACES = [(4096, 4096), (2048, 8192), (300, 2048), (16, 16384), (8, 16384), (1, 16384)]
IN_PLACE = [
    *(("product", m, d) for m, d in ((4096, 4096), (2048, 8192), (300, 2048))),
    *(("product", m, 16384) for m in (16, 8, 1)),
    *((form, 4096, 4096) for form in [*FORMS][1:-1]),
    *(("the second of several", 16, 8192), ("permuted", 1, 8192)),
]
CASES: Cases = {
    **{
        f"in place: {form}, {m} x {d}": functools.partial(in_place, form, m, d)
        for form, m, d in IN_PLACE
    },
    "in place in a loop": in_place_in_a_loop,
    **{
        f"residual {rows} x {d}, {shift} rows on": functools.partial(
            residual_in_place, rows, d, shift
        )
        for rows, d in ((4096, 4096), (300, 2048), (16, 8192), (1, 8192))
        for shift in (0, 3)
    },
}


# --- operands and results at any offset -----------------------------------------------------------


def inside(array: Any, start: int) -> tuple[Any, Any]:
    """A vector with `array` at element `start`, and a function that slices it out."""
    flat = jnp.concatenate([jnp.zeros(start, array.dtype), array.reshape(-1)])
    return flat, lambda flat: rows_of(flat, start, array.size).reshape(array.shape)


def lhs_at_3(m: int, format: Format, permuted: bool) -> None:
    lhs, rhs = normal(m, 4096), uniform(4096, 1024, format, permuted=permuted)
    flat, take = inside(lhs, 3)
    oracle = Oracle.of(lhs, dequantize(rhs))
    got = jax.jit(lambda flat: quantized_matmul(take(flat), rhs))(flat)
    assert_within(got, oracle.exact, oracle.bound(got.dtype))


def windows(loop: str) -> None:
    """Slices of a signal, each one element after the previous."""
    k, n, steps = 4096, 1024, 8
    rhs, signal = uniform(k, n), normal(k + 64)

    def window(i: Any) -> Any:
        return quantized_matmul(lax.dynamic_slice_in_dim(signal, i, k)[None], rhs)[0]

    def turn(i: Any, outs: Any) -> Any:
        return outs.at[i].set(window(i))

    if loop == "map":
        got = jax.jit(lambda: lax.map(window, jnp.arange(steps)))()
    else:
        got = jax.jit(lambda: lax.fori_loop(0, steps, turn, jnp.zeros((steps, n), signal.dtype)))()
    oracle = Oracle.of(jnp.stack([signal[i : i + k] for i in range(steps)]), dequantize(rhs))
    assert_within(got, oracle.exact, oracle.bound(got.dtype))


def leaf_at_1(name: str, m: int, format: Format) -> None:
    """Each array of a weight, from one buffer of parameters."""
    lhs, rhs = normal(m, 2048), uniform(2048, 2048, format, permuted=name == "permutation")
    flat, take = inside(getattr(rhs, name), 1)
    oracle = Oracle.of(lhs, dequantize(rhs))

    @jax.jit
    def program(lhs: Any, flat: Any) -> Any:
        return quantized_matmul(lhs, dataclasses.replace(rhs, **{name: take(flat)}))

    got = program(lhs, flat)
    assert_within(got, oracle.exact, oracle.bound(got.dtype))


def addend_at_3(name: str, m: int) -> None:
    lhs, rhs = normal(m, 2048), uniform(2048, 2048)
    addend = normal(*((m, 2048) if name == "residual" else (2048,)), seed=4)
    flat, take = inside(addend, 3)

    @jax.jit
    def program(lhs: Any, flat: Any) -> Any:
        return quantized_matmul(lhs, rhs, **{name: take(flat)})

    addends: dict[str, Any] = {name: addend}
    oracle = Oracle.of(lhs, dequantize(rhs))
    assert_within(program(lhs, flat), *finished(oracle, lhs.dtype, **addends))


def norm_at_1() -> None:
    d, f = 1024, 2048
    pair, out, down = uniform(d, f, stack=(2,)), uniform(d, d), uniform(f, d, seed=3)
    lhs, norm = normal(4, d), 1 + normal(d, seed=9)
    flat, take = inside(norm, 1)

    def block(lhs: Any, norm: Any) -> Any:
        return quantized_block(lhs, lhs, out=out, norm=norm, gate_up=pair, down=down)

    got = jax.jit(lambda lhs, flat: block(lhs, take(flat)))(lhs, flat)
    assert_close(got, jax.jit(block)(lhs, norm), k=f, products=3)


def result_at_3(m: int) -> None:
    lhs, rhs = normal(m, 2048), uniform(2048, 2048)
    base, oracle = jnp.zeros(lhs.size + 64, lhs.dtype), Oracle.of(lhs, dequantize(rhs))

    @jax.jit
    def program(base: Any, lhs: Any) -> Any:
        return lax.dynamic_update_slice(base, quantized_matmul(lhs, rhs).reshape(-1), (3,))

    got = np.asarray(program(base, lhs))
    end = 3 + lhs.size
    assert not got[:3].any() and not got[end:].any()
    assert_within(got[3:end].reshape(lhs.shape), oracle.exact, oracle.bound(lhs.dtype))


FLOAT = Format(4, 128, "float")
CASES |= {
    "lhs at 3, one row": functools.partial(lhs_at_3, 1, INT4, False),
    "lhs at 3, 64 rows": functools.partial(lhs_at_3, 64, INT4, False),
    "lhs at 3, the general kernel": functools.partial(lhs_at_3, 64, GENERAL, False),
    "lhs at 3, permuted": functools.partial(lhs_at_3, 256, INT4, True),
    "lhs at 3, one permuted row": functools.partial(lhs_at_3, 1, INT4, True),
    "windows of a map": functools.partial(windows, "map"),
    "windows of a loop": functools.partial(windows, "fori_loop"),
    **{
        f"{name} at 1, {m} rows, {format.zero}": functools.partial(leaf_at_1, name, m, format)
        for name, format in (
            *(("packed", INT4), ("scale", INT4), ("zero", UINT4), ("zero", FLOAT)),
            ("permutation", INT4),
        )
        for m in (1, 64)
    },
    **{
        f"{name} at 3, {m} rows": functools.partial(addend_at_3, name, m)
        for name in ("bias", "residual")
        for m in (1, 64)
    },
    "norm at 1": norm_at_1,
    **{f"result at 3, {m} rows": functools.partial(result_at_3, m) for m in (1, 64, 1024)},
}


# --- the tests ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return isolated(request, "case", CASES, __file__, workers=4)


@pytest.mark.parametrize("case", CASES)
def test_buffers(case, outcomes):
    assert outcomes[case] is None, outcomes[case]


if __name__ == "__main__":
    main(CASES)
