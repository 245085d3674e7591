"""Public functions under `jax_enable_x64`, with 64-bit arguments and values that float32 rounds.

`test_llm_sampling.py` has the same tests for `jaxlowbit.llm`.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import right_calls
import wrong_calls
from call_arguments import arrays
from flax import nnx

import jaxlowbit as jl
from jaxlowbit import linen as jl_linen
from jaxlowbit import nnx as jl_nnx

MODULES = (jl, jl_nnx, jl_linen, jl.quantizers)
CALLS = {
    name: call for name, call in right_calls.CALLS.items() if name not in right_calls.ELSEWHERE
}

WITHOUT_JIT = (*tuple(CALLS)[: tuple(CALLS).index("nnx.quantize_model")], "QuantizedLinear()")
"""Calls that also run without jit; layers consist of these."""


def wide(value: Any, float_dtype: Any, int_dtype: Any) -> Any:
    """Casts the numbers of an argument to other dtypes, as under x64."""
    if isinstance(value, jax.Array | np.ndarray):
        if jnp.issubdtype(value.dtype, jax.dtypes.extended) or value.dtype.itemsize < 4:
            return value
        floating = jnp.issubdtype(value.dtype, jnp.floating)
        return np.asarray(value, float_dtype if floating else int_dtype)
    if type(value) is int and np.issubdtype(int_dtype, np.signedinteger):
        return int_dtype(value)
    if type(value) is tuple:
        return tuple(wide(item, float_dtype, int_dtype) for item in value)
    return float_dtype(value) if type(value) is float else value


def result(call: Any, arguments: Mapping[str, Any]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return values(call.run(arguments))


def values(found: Any) -> list[Any]:
    leaves = jax.tree.leaves(nnx.state(found) if isinstance(found, nnx.Module) else found)
    return [leaf for leaf in leaves if not callable(leaf)]


def assert_same(found: list[Any], expected: list[Any], dtypes: bool = True) -> None:
    assert len(found) == len(expected)
    for leaf, wanted in zip(found, expected, strict=True):
        if not hasattr(wanted, "dtype"):
            assert leaf == wanted
        elif not jnp.issubdtype(wanted.dtype, jax.dtypes.extended):
            assert leaf.dtype == wanted.dtype or not dtypes
            leaf, wanted = np.asarray(leaf, np.float64), np.asarray(wanted, np.float64)
            np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=1e-6)


@contextlib.contextmanager
def frames() -> Iterator[None]:
    """Keeps all frames of tracebacks."""
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", filtering)


def in_floats(error: Exception, name: str) -> bool:
    """Whether the float model raises the same error: Flax layers do not promote dtypes."""
    return isinstance(error, jax.dtypes.TypePromotionError) and name in (
        "linen.quantize_model",
        "QuantizedModel",
    )


def test_every_public_function_is_called():
    assert right_calls.uncalled(*MODULES, but=right_calls.RESULTS) == []


@pytest.mark.parametrize("name", CALLS)
def test_values_are_those_without_x64(name):
    """64-bit integers give the same values with and without jit; 64-bit floats do or raise."""
    call = CALLS[name]
    made = [{key: make() for key, make in call.arguments.items()} for _ in range(4)]
    expected = values(call.run(made[0]))  # without a warning
    with jax.enable_x64(True), frames():
        found = {key: wide(value, np.float32, np.int64) for key, value in made[1].items()}
        assert_same(result(call, found), expected)
        if name in WITHOUT_JIT:
            found = {key: wide(value, np.float32, np.uint64) for key, value in made[2].items()}
            with jax.disable_jit():
                assert_same(result(call, found), expected)
        found = {key: wide(value, np.float64, np.int32) for key, value in made[3].items()}
        try:
            doubled = result(call, found)
        except (TypeError, ValueError) as error:
            assert wrong_calls.is_sentence(error, name, found) or in_floats(error, name), error
            return
    if name == "supported_backends":
        assert set(doubled) == {"lhs is float64, but activations are float32, bfloat16 or float16"}
    else:
        assert_same(doubled, expected, dtypes=name != "scan")  # carry keeps its dtype


# Arguments that float32 rounds to 0 or infinity, and integers beyond 32 bits.
ROUNDED: dict[str, tuple[Callable[[], Any], str]] = {
    "epsilon to 0": (lambda: block(1e-46), "quantized_block: epsilon is 1e-46, which float32"),
    "epsilon to inf": (
        lambda: block(1e39),
        r"quantized_block: epsilon is 1e\+39, but it must be a fini",
    ),
    "alpha to 0": (lambda: smoothing(1e-46), "smoothing_factor: alpha is 1e-46, which float32"),
    "codebook to 0": (
        lambda: jl.Format(1, codebook=(1e-46, 1)),
        "Format: number 0 of the codebook is 1e-46, which float32 rounds to 0",
    ),
    "codebook to inf": (
        lambda: jl.Format(1, codebook=(1, np.float64(1e39))),
        "Format: number 1 of the codebook is .*1e.39.*, but the numbers .* are finite in float32",
    ),
    "factor to 0": (lambda: factor(1e-46), "quantize_activations: factor has 64 values that are"),
    "factor subnormal": (lambda: factor(1e-40), "quantize_activations: factor has 64 values"),
    "factor to inf": (lambda: factor(1e39), "quantize_activations: factor has 64 values that are"),
    "scale to inf": (
        lambda: integers(scale=np.full((1, 8), 1e39)),
        "from_integers: scale has 8 va",
    ),
    "super_scale to 0": (
        lambda: integers("int4-g32-two_level", np.ones((2, 8), np.int8), super_scale=1e-8),
        "from_integers: super_scale has 8 values that float16 rounds to 0, the first at",
    ),
    "integer scale of 64 bits": (
        lambda: integers("int4-g32-two_level", np.full((2, 8), 2**32 + 1), super_scale=1.0),
        "from_integers: scale reaches from 4294967297 to 4294967297, but",
    ),
    "weight to inf": (
        lambda: jl.quantize(np.full((64, 8), 1e39), "int4"),
        "quantize: weight has 5",
    ),
    "permutation of 64 bits": (
        lambda: jl.quantize(jnp.ones((64, 8)), "int4", permutation=np.arange(64) + 2**32),
        r"quantize: permutation has 4294967296 at \(0,\), but each",
    ),
    "groups of 64 bits": (
        lambda: grouped(np.arange(64) // 16 + 2**32),
        "from_integers: group 0 of g_idx has 0 rows",
    ),
}


def block(epsilon: Any) -> Any:
    return CALLS["block"].run({"epsilon": epsilon})


def smoothing(alpha: float) -> Any:
    return jl.quantizers.smoothing_factor(jnp.ones(64), jnp.ones((64, 8)), alpha=alpha)


def factor(value: float) -> Any:
    return jl.quantize_activations(jnp.ones((2, 64)), factor=np.full(64, value))


def integers(format: str = "int4", scale: Any = None, super_scale: float | None = None) -> Any:
    options: Any = {} if super_scale is None else {"super_scale": np.full((1, 8), super_scale)}
    values = np.ones((64, 8), np.int8)
    return jl.QuantizedArray.from_integers(values, scale, format=format, **options)


def grouped(g_idx: Any, format: Any = "int4-g16") -> jl.QuantizedArray:
    values, scale = np.ones((64, 8), np.int8), np.ones((4, 8), np.float32)
    return jl.QuantizedArray.from_integers(values, scale, format=format, g_idx=g_idx)


@pytest.mark.parametrize("name", ROUNDED)
def test_numbers_beyond_array_dtypes(name):
    run, message = ROUNDED[name]
    with pytest.raises(ValueError, match=f"^{message}"), np.errstate(over="ignore"):
        run()


def test_numbers_of_numpy_are_numbers():
    four: Any = np.int64(4)
    size: Any = np.int32(16)
    assert jl.Format(four, size) == jl.Format(4, 16)
    assert type(jl.Format(four).bits) is int
    given, wanted = (
        grouped(np.arange(64)[::-1] // 16, jl.Format(4, x)).permutation for x in (size, 16)
    )
    np.testing.assert_array_equal(given, wanted)
    x = np.ones((2, 64))  # float64, which JAX converts to float32
    assert "float32 (2, 64)" in jl.explain(x, arrays()["q"], device="cpu")
    assert jl.supported_backends(x, arrays()["q"])["xla"] is None
