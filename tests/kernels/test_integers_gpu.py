"""Integer products on a GPU: exact, with and without Hopper's int8 kernel."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import call_names
from integer_weights import FORMATS, exact, values, weights

from jaxlowbit import Format, QuantizedArray, integer_matmul
from jaxlowbit._core.format import format_name
from jaxlowbit._matmul.integers import max_k

pytestmark = pytest.mark.gpu
IN_8_BITS = [Format(4), Format(8), Format(4, 64, scale="int8"), Format(4, 128, scale="int8")]
IN_8_BITS += [Format(4, zero="integer")]
kernels = pytest.mark.parametrize("format", IN_8_BITS, ids=format_name)


def is_one_call(x: Any, rhs: Any) -> bool:
    return call_names(jax.jit(integer_matmul).lower(x, rhs).as_text()) == ["quantized_activations"]


@pytest.mark.parametrize("format", FORMATS, ids=format_name)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (45, 1000, 200)])
def test_every_format(format, m, k, n):
    integers, rhs = weights(format, k, n)
    x = values(m, k)
    np.testing.assert_array_equal(jax.jit(integer_matmul)(x, rhs), exact(x, integers))


@kernels
@pytest.mark.parametrize("m", [1, 7, 33, 64, 100, 160, 301, 2000])
@pytest.mark.parametrize(("k", "n"), [(17, 63), (1000, 200), (2048, 4096), (8192, 320)])
def test_every_sum_is_exact(format, m, k, n):
    """Full and partial tiles of every size; a small n with a long k and a split tail."""
    integers, rhs = weights(format, k, n)
    x = values(m, k)
    assert is_one_call(x, rhs)
    want = exact(x, integers) if k * n * m < 2**28 else _wide(x, integers)
    np.testing.assert_array_equal(jax.jit(integer_matmul)(x, rhs), want)


def _wide(x: Any, integers: np.ndarray) -> np.ndarray:
    """`exact` for large M: float64 represents all int32 sums."""
    return (np.asarray(x).astype(np.float64) @ integers.astype(np.float64)).astype(np.int64)


@kernels
@pytest.mark.parametrize("extreme", [-1, 1])
@pytest.mark.parametrize("of_values", [-1, 1])
def test_extremes(format, extreme, of_values):
    """The largest possible sums, up to the limit of int32."""
    k = max_k(Format(8))
    integers, rhs = weights(format, k, 3, extreme=extreme)
    for m in (2, 70):
        x = values(m, k, extreme=of_values)
        assert is_one_call(x, rhs)
        np.testing.assert_array_equal(jax.jit(integer_matmul)(x, rhs), _wide(x, integers))


@kernels
def test_one_of_a_stack_and_a_batch(format):
    integers, stack = weights(format, 512, 200, 3)
    x = values(3, 5, 512)
    for i in range(3):
        assert is_one_call(x[0], stack.select(i))
        found = jax.jit(integer_matmul)(x[0], stack.select(i))
        np.testing.assert_array_equal(found, exact(x[0], integers[i]))
    batch = jax.jit(jax.vmap(integer_matmul, (0, None)))
    assert call_names(batch.lower(x, stack.select(1)).as_text()) == ["quantized_activations"]
    np.testing.assert_array_equal(batch(x, stack.select(1)), exact(x, integers[1]))
    found = jax.jit(jax.vmap(integer_matmul))(x, stack)
    np.testing.assert_array_equal(found, np.einsum("bmk,bkn->bmn", np.int64(x), integers))


def test_bits_of_every_kind_pass():
    """Sums with the bit patterns of NaN, infinities and subnormals of float32."""
    integers = np.zeros((128, 64), np.int8)
    integers[0] = 1
    rhs = QuantizedArray.from_integers(integers, jnp.ones((1, 64)), format=Format(8))
    x = np.zeros((256, 128), np.int8)
    x[:, 0] = np.arange(-128, 128)
    found = jax.jit(integer_matmul)(jnp.asarray(x), rhs)
    np.testing.assert_array_equal(found, np.broadcast_to(x[:, :1], (256, 64)))
