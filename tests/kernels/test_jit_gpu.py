"""JIT-compiled kernels on a GPU: each case is a process with a separate cache."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_programs
from gpu_problems import normal, uniform
from helpers import Oracle, Weight, assert_within, dequantize, program_cache
from jax import export, lax

import jaxlowbit
from jaxlowbit import Format, quantized_matmul
from jaxlowbit._backends.extension import ffi

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NVRTC = os.environ.get("JAXLOWBIT_TEST_NVRTC", "")
TARGET = "jaxlowbit_sequence"
TWO = Format(2, 64, "integer")
K, N = 1024, 512
ROWS = (1, 16, 100, 300)  # select different kernels


# --- programs of the processes --------------------------------------------------------------------


def assert_right(got: Any, lhs: Any, rhs: Any) -> None:
    oracle = Oracle.of(lhs, dequantize(rhs))
    assert_within(got, oracle.exact, oracle.bound(got.dtype))


def products() -> None:
    rhs, program = uniform(K, N, TWO), jax.jit(quantized_matmul)
    for m in ROWS:
        lhs = normal(m, K)
        assert_right(program(lhs, rhs), lhs, rhs)
    lhs = normal(16, N)
    like = jax.ShapeDtypeStruct((16, K), lhs.dtype)
    turned = jax.jit(lambda ct, q: jax.linear_transpose(lambda x: x @ q, like)(ct)[0])(lhs, rhs)
    weight = dequantize(rhs)
    oracle = Oracle.of(lhs, Weight(weight.value.T, weight.terms.T))
    assert_within(turned, oracle.exact, oracle.bound(lhs.dtype))


def eager() -> None:
    rhs = uniform(K, N, TWO)
    for m in ROWS:
        lhs = normal(m, K)
        assert_right(lhs @ rhs, lhs, rhs)


def loop() -> None:
    """Kernels are first used in the body of a loop that XLA captures."""
    rhs, other, lhs = uniform(K, K, TWO), uniform(K, K, TWO, seed=2), normal(4, K)

    def body(state: Any) -> Any:
        i, x = state
        for weight in (rhs, other) * 3:
            x = x @ weight
            x = (x / (1e-3 + jnp.abs(x).max())).astype(x.dtype)
        return i + 1, x

    program = jax.jit(lambda x: lax.while_loop(lambda state: state[0] < 5, body, (0, x))[1])
    first = np.asarray(program(lhs))
    for _ in range(3):
        assert np.asarray(program(lhs)).tobytes() == first.tobytes()
    steps = (0, lhs)
    for _ in range(5):
        steps = jax.jit(body)(steps)
    assert np.asarray(steps[1]).tobytes() == first.tobytes()


def devices() -> None:
    rhs, lhs = uniform(K, N, TWO), normal(16, K)
    for device in jax.devices()[:2]:
        here = jax.device_put((lhs, rhs), device)
        got = jax.jit(quantized_matmul)(*here)
        assert got.devices() == {device}
        assert_right(got, lhs, rhs)


def exports() -> None:
    leaves, tree = jax.tree.flatten(uniform(K, N, TWO))
    exported = export.export(
        jax.jit(lambda x, *leaves: x @ tree.unflatten(leaves)),
        platforms=["cuda"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call(TARGET)],
    )(normal(16, K), *leaves)
    assert exported.mlir_module().count(f"@{TARGET}(") == 1
    Path(os.environ["EXPORTED"]).write_bytes(exported.serialize())


def imports() -> None:
    rhs, lhs = uniform(K, N, TWO), normal(16, K)
    exported = export.deserialize(bytearray(Path(os.environ["EXPORTED"]).read_bytes()))
    assert_right(jax.jit(exported.call)(lhs, *jax.tree.leaves(rhs)), lhs, rhs)


def definition() -> None:
    """Runs the products available without a compiler."""
    rhs, lhs = uniform(K, N, TWO), normal(16, K)
    reason = jaxlowbit.supported_backends(lhs, rhs)["cuda"]
    assert reason is not None and "JAXLOWBIT_COMPILE=0 turns compiling off" in reason
    assert reason in jaxlowbit.explain(lhs, rhs)
    assert_right(jax.jit(quantized_matmul)(lhs, rhs), lhs, rhs)


def compiles() -> None:
    """Compiling a program without running it starts compiling its kernels."""
    rhs, lhs = uniform(K, N, TWO), normal(16, K)
    jax.jit(quantized_matmul).lower(lhs, rhs).compile()
    cache, end = Path(os.environ["JAXLOWBIT_CACHE_DIR"]), time.monotonic() + 300
    while not list(cache.glob("*.cubin")) and time.monotonic() < end:
        time.sleep(0.05)


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (products, eager, loop, devices, exports, imports, definition, compiles)
}


def main(case: str) -> None:
    if NVRTC:
        ffi.set_nvrtc_paths([NVRTC])
    CASES[case]()
    print(json.dumps(ffi.loaded()))


# --- the processes --------------------------------------------------------------------------------


def start(case: str, cache: Path | str | None, **env: str) -> subprocess.Popen[str]:
    support, tools = Path(__file__).parents[1] / "support", Path(run_programs.__file__).parent
    paths = [str(support), str(tools), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAXLOWBIT_TUNED": "",
        "PYTHONPATH": os.pathsep.join(paths),
        **env,
    }
    if cache is not None:
        env["JAXLOWBIT_CACHE_DIR"] = str(cache)
    command = [sys.executable, __file__, case]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def ended(process: subprocess.Popen[str]) -> dict[str, int]:
    """Number of instances that the process loaded, by origin."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])


def run(case: str, cache: Path | str | None, **env: str) -> dict[str, int]:
    return ended(start(case, cache, **env))


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    if NVRTC:
        ffi.set_nvrtc_paths([NVRTC])
    if error := ffi.toolchain()["error"]:
        pytest.skip(error)


@pytest.mark.parametrize("case", ["products", "eager"])
def test_a_cache_is_filled_and_used(tmp_path, case):
    first, second = run(case, tmp_path), run(case, tmp_path)
    assert first["compiled"] >= 2 and first["cached"] == 0
    assert second["cached"] == first["compiled"] and second["compiled"] == 0
    assert len(list(tmp_path.glob("*.cubin"))) >= first["compiled"]


def test_two_processes_fill_one_cache(tmp_path):
    both = [start("products", tmp_path) for _ in range(2)]
    assert all(ended(process)["compiled"] > 0 for process in both)
    assert run("products", tmp_path)["compiled"] == 0
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("damage", ["cut short", "a bit flipped"])
def test_damaged_files_are_compiled_again(tmp_path, damage):
    compiled = run("products", tmp_path)["compiled"]
    for path in tmp_path.glob("*.cubin"):
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 1
        path.write_bytes(bytes(whole if "flipped" in damage else whole[: len(whole) // 2]))
    assert run("products", tmp_path)["compiled"] == compiled
    assert run("products", tmp_path)["compiled"] == 0


def test_a_home_that_cannot_be_written(tmp_path):
    home = {"HOME": "/proc", "XDG_CACHE_HOME": "", "JAXLOWBIT_CACHE_DIR": "/proc/none"}
    assert run("products", None, **home)["compiled"] >= 3


def test_without_a_compiler_the_definition_runs(tmp_path):
    loaded = run("definition", tmp_path, JAXLOWBIT_COMPILE="0")
    assert loaded["compiled"] == loaded["cached"] == 0


def test_kernels_first_used_in_a_captured_loop(tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} {run_programs.SETTINGS['loops in graphs']}"
    assert run("loop", tmp_path, XLA_FLAGS=flags)["compiled"] >= 1
    assert run("loop", tmp_path, XLA_FLAGS=flags)["cached"] >= 1


def test_two_devices_share_compiled_kernels(tmp_path):
    if len(jax.devices()) < 2:
        pytest.skip(f"needs 2 GPUs, JAX sees {len(jax.devices())}")
    loaded = run("devices", tmp_path)
    assert loaded["compiled"] + loaded["cached"] >= 2
    cubins = [path.read_bytes() for path in tmp_path.glob("*.cubin")]
    assert len(cubins) == 1, [re.findall(rb"Instance<[^>]*>", cubin)[:1] for cubin in cubins]


def test_exported_programs(tmp_path):
    """Exported programs JIT-compile their kernels, or report why they cannot."""
    exported = {"EXPORTED": str(tmp_path / "program")}
    run("exports", tmp_path / "here", **exported)
    assert run("imports", tmp_path / "there", **exported)["compiled"] == 1
    process = start("imports", tmp_path / "nowhere", JAXLOWBIT_COMPILE="0", **exported)
    _, err = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "quantized_matmul: loading the kernels of " in err
    assert "could not be compiled: JAXLOWBIT_COMPILE=0 turns compiling off" in err


def test_programs_of_jaxs_cache(tmp_path):
    """Loading a program from the JAX cache starts compiling its kernels."""
    settings = program_cache(tmp_path / "programs")
    assert run("products", tmp_path / "here", **settings)["compiled"] >= 3
    assert list((tmp_path / "programs").iterdir())
    assert run("products", tmp_path / "there", **settings)["compiled"] >= 3


def test_kernels_are_compiled_with_the_program(tmp_path):
    loaded = run("compiles", tmp_path)
    assert loaded["compiled"] == 0 and len(list(tmp_path.glob("*.cubin"))) >= 1


if __name__ == "__main__":
    main(*sys.argv[1:])
