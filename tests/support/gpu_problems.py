"""Operands for the GPU tests, and separate processes for tests that may crash."""

import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import run_programs
from programs import bound, uniform_leaves

from jaxlowbit import INT4, Format, QuantizedArray

# M selects the kernel: the small-M kernel of Hopper (up to 32) or the kernel of every GPU.
ROWS = (1, 16, 40, 200)


def normal(*shape, seed=0):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray((values / np.sqrt(shape[-1])).astype(jnp.bfloat16))


def uniform(
    k: int,
    n: int,
    format: Format = INT4,
    *,
    stack: tuple[int, ...] = (),
    dtype: str = "bfloat16",
    permuted: bool = False,
    seed: int = 1,
) -> QuantizedArray:
    """Random codes with columns of norm near 1; fast for every size."""
    rng = np.random.default_rng(seed)
    leaves = uniform_leaves(rng, stack, k, n, format, jnp.dtype(dtype))
    return QuantizedArray(
        packed=jnp.asarray(leaves["packed"]),
        scale=jnp.asarray(leaves["scale"]),
        zero=jnp.asarray(leaves["zero"]) if "zero" in leaves else None,
        index=None,
        version=jnp.ones(stack, jnp.uint32),
        format=format,
        k=k,
        n=n,
        permutation=jnp.asarray(rng.permutation(k), jnp.int32) if permuted else None,
    )


def rounding(x: Any, dtype: str, factor: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Reference for `quantize_activations`: values in float32, and scales of tokens (m, 1).

    NumPy, since XLA's division on GPUs may be off by two units in the last place.
    """
    floats, most = np.asarray(x).astype(np.float32), np.float32(127 if dtype == "int8" else 448)
    with np.errstate(all="ignore"):
        floats = floats if factor is None else floats / np.asarray(factor)
        reach = np.abs(floats).max(-1, keepdims=True)
        scale = np.where(reach > 0, np.maximum(reach / most, np.float32(2.0**-126)), np.float32(1))
        scale = np.where(np.isfinite(reach), scale, np.float32(np.nan))
        steps = np.where(np.isfinite(reach), np.clip(floats / scale, -most, most), np.float32(0))
    values = np.rint(steps) if dtype == "int8" else steps.astype(ml_dtypes.float8_e4m3fn)
    return values.astype(np.float32), scale


def assert_close(got: Any, want: Any, *, k: int, products: int = 1) -> None:
    """Compares two computations by `programs.bound`, after scaling values to near 1."""
    assert got.shape == want.shape and got.dtype == want.dtype
    exact = np.asarray(want).astype(np.float64)
    size = np.sqrt(np.mean(np.square(exact)))
    within = size * bound(exact / size, want.dtype, k, products)
    error = np.nan_to_num(np.abs(np.asarray(got).astype(np.float64) - exact) / within, nan=np.inf)
    assert error.max() <= 1, (
        f"{np.sum(error > 1)} of {error.size} elements differ, the worst {error.max():.3g} bounds "
        f"at {tuple(map(int, np.unravel_index(error.argmax(), error.shape)))}"
    )


# --- processes ------------------------------------------------------------------------------------

Cases = dict[str, Callable[[], None]]


def isolated(
    request: pytest.FixtureRequest, parameter: str, cases: Cases, path: str, **options: Any
) -> dict[str, str | None]:
    """The error of each case that this session's tests use as `parameter`, or None.

    Cases run in processes that call `main`, because a CUDA fault would end all other tests.
    """
    names = list(cases)
    chosen = {
        names.index(item.callspec.params[parameter])  # type: ignore[attr-defined]
        for item in request.session.items
        if parameter in getattr(getattr(item, "callspec", None), "params", {})
        and item.path == request.path
    }
    command = [sys.executable, path]
    found = run_programs.outcomes(sorted(chosen), command=command, **options)
    return {names[line["number"]]: line.get("error") for line in found}


def main(cases: Cases) -> None:
    """Entry point of a test file with cases, run as a script."""
    names = list(cases)

    def run(number: int) -> dict[str, Any]:
        cases[names[number]]()
        return {}

    run_programs.work([*map(int, sys.argv[1:])], lambda number: names[number], run)
