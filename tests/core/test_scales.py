"""Clipping by least squared error, `quantize(..., quantizer="mse")`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dequantize

import jaxlowbit
from jaxlowbit import INT4, Format

quantize = jax.jit(jaxlowbit.quantize, static_argnames=("format", "quantizer", "scale_dtype"))
FORMATS = [
    Format(bits, 32, zero)
    for bits in (1, 2, 4, 8)
    for zero in ("none", "integer", "float")
    if (bits, zero) != (1, "none")
]
METHODS = ("absmax", "mse")
every_format = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f.bits}-{f.zero}")


def heavy(shape, dtype="float32", seed=0):
    """Values with a few outliers, as in the weights of language models."""
    values = np.random.default_rng(seed).standard_t(3, size=shape)
    return jnp.asarray(values.astype(jnp.dtype(dtype)))


def squared_error(weight, array) -> np.ndarray:
    """Summed over each group, (groups, n)."""
    size = array.k if array.format.group_size == -1 else array.format.group_size
    missed = dequantize(array).value - np.asarray(weight).astype(np.float64)
    return np.add.reduceat(missed**2, np.arange(0, array.k, size), axis=0)


WAYS = [(16, "float32"), (48, "bfloat16"), (64, "float16"), (-1, "float32")]


# A selection of widths, zeros and group sizes; the test below covers every format.
@pytest.mark.parametrize(
    ("format", "group_size", "dtype"),
    [(format, *WAYS[i % 4]) for i, format in enumerate(FORMATS[::2])],
    ids=str,
)
def test_no_group_is_worse_than_absmax(format, group_size, dtype):
    weight = heavy((200, 70), dtype)
    format = format.replace(group_size=group_size)
    absmax, mse = (squared_error(weight, quantize(weight, format, quantizer=m)) for m in METHODS)
    assert (mse <= absmax * (1 + 1e-4)).all(), (mse / absmax).max()
    if format.bits <= 4:  # clipping by 3 %, the smallest step, is too much at 8 bits
        assert mse.sum() < absmax.sum()


@every_format
def test_no_range_of_the_search_is_better(format):
    """Compares with the same search in float64. The last group has 8 rows."""
    weight = np.asarray(heavy((104, 70)), np.float64)
    array = quantize(jnp.asarray(weight, jnp.float32), format, quantizer="mse")
    found = squared_error(weight, array)
    levels = 2**format.bits - 1
    for group, errors in enumerate(found):
        values = weight[32 * group : 32 * (group + 1)]
        low, high = values.min(axis=0), values.max(axis=0)
        if format.zero == "integer":
            low, high = np.minimum(low, 0), np.maximum(high, 0)
        center = (low + high) / 2 if format.zero == "float" else 0.0
        least = np.full(70, np.inf)
        for part in 0.97 ** np.arange(64):
            bottom, top = center + part * (low - center), center + part * (high - center)
            if format.zero == "none":
                scale, first = np.maximum(-bottom, top) / (levels // 2), -(levels // 2 + 1)
            else:
                scale = (top - bottom) / levels
                first = -np.clip(np.round(-bottom / scale), 0, levels)
            if format.zero == "float":
                value = np.clip(np.round((values - bottom) / scale), 0, levels) * scale + bottom
            else:
                value = np.clip(np.round(values / scale), first, first + levels) * scale
            least = np.minimum(least, ((value - values) ** 2).sum(axis=0))
        np.testing.assert_allclose(errors, least, rtol=1e-3)


@pytest.mark.parametrize("zero", ["none", "integer"])
def test_zeros_stay_zero(zero):
    weight = heavy((100, 70)).at[::3].set(0.0)
    value = quantize(weight, Format(4, 16, zero), quantizer="mse").dequantize()
    assert not value[::3].any()


@pytest.mark.parametrize("value", [1e-45, 1e-38, 1e-30, 1e30, 1e38])
@every_format
def test_extreme_magnitudes_stay_finite(format, value):
    weight = np.full((104, 70), value, np.float32)  # the shape of the search above
    weight[::2] *= -0.5
    assert np.isfinite(dequantize(quantize(weight, format, quantizer="mse")).value).all()


def test_a_stack_is_its_matrices():
    weight = heavy((3, 100, 70))
    stack = quantize(weight, INT4, quantizer="mse")
    mapped = jax.vmap(lambda w: quantize(w, INT4, quantizer="mse"))(weight)
    jax.tree.map(np.testing.assert_array_equal, mapped, stack)
    np.testing.assert_array_equal(
        stack[1].dequantize(), quantize(weight[1], INT4, quantizer="mse").dequantize()
    )


def test_memory_does_not_grow_with_the_search():
    weight = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16)

    analysis = quantize.lower(weight, INT4, quantizer="mse").compile().memory_analysis()
    assert analysis is not None
    # Four float32 copies of the weight, not one for each range.
    assert analysis.temp_size_in_bytes <= 4 * 4 * weight.size
