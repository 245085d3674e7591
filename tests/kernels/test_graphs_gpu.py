"""Calls in CUDA graphs: early kernel starts, moved or donated buffers, XLA flags."""

import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_programs
from gpu_problems import assert_close, main, normal, uniform
from helpers import Oracle, assert_within, dequantize, finished
from jax import lax

import jaxlowbit
from jaxlowbit import quantized_block, quantized_glu, quantized_matmul, quantized_matmuls

pytestmark = pytest.mark.gpu


def layers_of(d: int, f: int, count: int) -> list[tuple[Any, ...]]:
    return [
        (
            *(uniform(d, d, seed=4 * i), 1 + 0.1 * normal(d, seed=i)),
            *(uniform(d, f, stack=(2,), seed=4 * i + 1), uniform(f, d, seed=4 * i + 2)),
            [uniform(d, n, seed=4 * i + 3) for n in (d, 64)],
        )
        for i in range(count)
    ]


def blocks(layers: Any, x: Any) -> Any:
    attended = x
    for out, norm, pair, down, weights in layers:
        following = (norm, weights)
        x, (q, k) = quantized_block(
            attended, x, out=out, norm=norm, gate_up=pair, down=down, following=following
        )
        attended = q + jnp.tanh(k)[:, :1]
    return x, attended


def blocks_apart(layers: Any, x: Any) -> Any:
    def normalized(x: Any, norm: Any) -> Any:
        wide = x.astype(jnp.float32)
        factor = lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
        return (wide * factor * norm.astype(jnp.float32)[None]).astype(x.dtype)

    attended = x
    for out, norm, pair, down, weights in layers:
        x = x + quantized_matmul(attended, out)
        x = x + quantized_matmul(quantized_glu(normalized(x, norm), pair), down)
        q, k = (quantized_matmul(normalized(x, norm), weight) for weight in weights)
        attended = q + jnp.tanh(k)[:, :1]
    return x, attended


@pytest.mark.parametrize(
    ("d", "f", "m"), [(128, 128, 16), (256, 512, 132), (512, 256, 32), (1024, 256, 7)]
)
def test_small_blocks_repeat_their_bits(d, f, m):
    """All kernels of such a block are resident at the same time."""
    layers, x = layers_of(d, f, 4), 30 * normal(m, d)
    program = jax.jit(functools.partial(blocks, layers))
    one = jax.tree.map(np.asarray, program(x))
    for _ in range(300):
        for got, want in zip(program(x), one, strict=True):
            assert np.asarray(got).tobytes() == want.tobytes()
    for got, want in zip(one, jax.jit(functools.partial(blocks_apart, layers))(x), strict=True):
        assert_close(got, want, k=max(d, f), products=16)


def test_split_products_repeat_their_bits():
    """Products of one call, each split over k, share one workspace."""
    lhs = normal(128, 4096)
    weights = [uniform(4096, n, seed=n) for n in (1024, 512, 1000, 256, 1024, 768)]
    program = jax.jit(lambda lhs: quantized_matmuls(lhs, weights))
    one = [np.asarray(out) for out in program(lhs)]
    for _ in range(300):
        for got, want in zip(program(lhs), one, strict=True):
            assert np.asarray(got).tobytes() == want.tobytes()
    for got, weight in zip(one, weights, strict=True):
        oracle = Oracle.of(lhs, dequantize(weight))
        assert_within(got, oracle.exact, oracle.bound(lhs.dtype))


def test_buffers_move_between_replays():
    """Results of replays stay alive, so that each run gets different buffers."""
    layers, kept = layers_of(512, 1024, 6), []
    program = jax.jit(functools.partial(blocks, layers))
    apart = jax.jit(functools.partial(blocks_apart, layers))
    for i in range(40):
        x = 20 * normal(8, 512, seed=i)
        kept.append((x, program(x), jnp.zeros(1000 * (i % 5 + 1))))
    for x, got, _ in kept:
        assert_close(got[0], apart(x)[0], k=1024, products=24)


@pytest.mark.parametrize(("m", "d"), [(1, 4096), (64, 4096), (1024, 2048)])
@pytest.mark.parametrize("name", ["lhs", "residual"])
def test_donated_operands(name, m, d):
    rhs, lhs, residual = uniform(d, d), normal(m, d), normal(m, d, seed=4)
    oracle, dtype = Oracle.of(lhs, dequantize(rhs)), lhs.dtype
    if name == "residual":
        add = jax.jit(lambda x, r: quantized_matmul(x, rhs, residual=r), donate_argnums=1)
        wanted = finished(oracle, dtype, residual=np.asarray(residual))
        assert_within(add(lhs, residual), *wanted)
    else:
        multiply = jax.jit(lambda x: quantized_matmul(x, rhs), donate_argnums=0)
        assert_within(multiply(lhs), oracle.exact, oracle.bound(dtype))


def loops_over_layers() -> None:
    """A chain of blocks, and both scans over a stack, several times."""
    d, m = 512, 8
    layers, x = layers_of(d, 1024, 3), 20 * normal(m, d)
    apart = jax.jit(functools.partial(blocks_apart, layers))(x)
    for _ in range(3):
        got = jax.jit(functools.partial(blocks, layers))(x)
        assert_close(got[0], apart[0], k=1024, products=12)
    stack = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *[(out, norm, down) for out, norm, _, down, _ in layers]
    )

    def step(h: Any, layer: Any) -> Any:
        out, norm, _ = layer
        h = quantized_matmul(h, out, residual=h) * norm[None]
        return h, quantized_matmul(h, out)

    carried, outs = x, []
    for i in range(3):
        carried, out = jax.jit(step)(carried, jax.tree.map(lambda leaf, i=i: leaf[i], stack))
        outs.append(out)
    for scan in (lax.scan, jaxlowbit.scan):
        program = jax.jit(lambda x, scan=scan: scan(step, x, stack))
        for _ in range(3):
            got, results = program(x)
            assert_close(got, carried, k=d, products=3)
            assert_close(results, jnp.stack(outs), k=d, products=4)


@pytest.fixture(scope="module")
def under_settings() -> dict[str, list[dict[str, Any]]]:
    """Runs the loops in one process per XLA setting, concurrently."""

    def run(flags: str) -> list[dict[str, Any]]:
        return run_programs.outcomes([0], command=[sys.executable, __file__], flags=flags)

    with ThreadPoolExecutor() as pool:
        found = pool.map(run, run_programs.SETTINGS.values())
        return dict(zip(run_programs.SETTINGS, found, strict=True))


@pytest.mark.parametrize("setting", run_programs.SETTINGS)
def test_loops_under_each_setting(setting, under_settings):
    (line,) = under_settings[setting]
    assert "error" not in line, line["error"]


if __name__ == "__main__":
    main({"loops over layers": loops_over_layers})
