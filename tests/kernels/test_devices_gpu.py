"""A process and its GPUs: visible devices, first use by many threads, and new backends."""

import ctypes
import functools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest
import run_programs
from gpu_problems import Cases, main, normal, uniform
from helpers import Oracle, assert_within, dequantize, finished

from jaxlowbit import quantized_matmul

pytestmark = pytest.mark.gpu


def assert_right(m: int, k: int, n: int) -> None:
    lhs, rhs = normal(m, k), uniform(k, n)
    oracle = Oracle.of(lhs, dequantize(rhs))
    got = jax.jit(lambda lhs, rhs: lhs @ rhs)(lhs, rhs)
    assert_within(got, oracle.exact, oracle.bound(got.dtype))


def has_context(gpu: int) -> bool:
    """Whether this process has a context on a GPU, given its CUDA index."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    assert driver.cuInit(0) == 0
    assert driver.cuDeviceGet(ctypes.byref(device), gpu) == 0
    state = driver.cuDevicePrimaryCtxGetState
    assert state(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)


def only_gpu_1() -> None:
    """XLA's first device is CUDA's second; no context is created on the other."""
    assert len(jax.devices()) == 1, jax.devices()
    jax.block_until_ready(normal(64, 64))
    before = has_context(0)
    for m, k in ((1, 4096), (64, 4096), (3, 100)):
        assert_right(m, k, 512)
    assert (has_context(0), has_context(1)) == (before, True), before


def backends_made_anew() -> None:
    from jax.extend.backend import clear_backends

    for _ in range(3):
        assert_right(64, 1024, 512)
        jax.clear_caches()
        clear_backends()


def first_uses_of_threads() -> None:
    """16 threads use kernels and compile programs for the first time."""
    sizes = [(512, 1024), (300, 100), (1024, 4096), (64, 64)]

    def run(m: int, n: int, k: int) -> None:
        lhs, rhs = normal(m, k), uniform(k, n, seed=m)
        oracle = Oracle.of(lhs, dequantize(rhs))
        wanted = finished(oracle, lhs.dtype, activation="gelu")
        product: Any = jax.jit(quantized_matmul)
        fused = jax.jit(functools.partial(quantized_matmul, activation="gelu"))
        for _ in range(20):
            assert_within(product(lhs, rhs), oracle.exact, oracle.bound(lhs.dtype))
            assert_within(fused(lhs, rhs), *wanted)

    with ThreadPoolExecutor(16) as pool:
        each = [pool.submit(run, m, n, k) for m in (1, 20, 64, 300) for n, k in sizes]
        for future in each:
            future.result()


CASES: Cases = {
    "first uses of threads": first_uses_of_threads,
    "backends made anew": backends_made_anew,
    "only GPU 1": only_gpu_1,
}


@pytest.mark.parametrize("case", [*CASES][:-1])
def test_devices(case):
    assert error_of(case) is None


def test_only_gpu_1_is_visible():
    if len(jax.devices()) < 2:
        pytest.skip(f"needs 2 GPUs, JAX sees {len(jax.devices())}")
    plain = [
        sys.executable,
        "-c",
        _ON_GPU_1.partition("runpy.run_path")[0] + "jax.numpy.ones(8) + 1",
    ]
    found = subprocess.run(plain, stderr=subprocess.PIPE, text=True)
    if found.returncode != 0:
        pytest.skip(f"JAX itself fails with jax_cuda_visible_devices=1: {found.stderr[-200:]}")
    assert error_of("only GPU 1", "-c", _ON_GPU_1) is None


# JAX has no environment variable for visible devices, and importing this file queries devices.
_ON_GPU_1 = """
import runpy, sys, jax
jax.config.update("jax_cuda_visible_devices", "1")
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def error_of(case: str, *options: str) -> str | None:
    """Runs a case in a separate process with `options` of Python; returns its error, if any."""
    number = [*CASES].index(case)
    (line,) = run_programs.outcomes([number], command=[sys.executable, *options, __file__])
    return line.get("error")


if __name__ == "__main__":
    main(CASES)
