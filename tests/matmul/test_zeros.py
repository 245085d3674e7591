"""Weights with zeros in every format: whole matrices, groups, channels and rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxlowbit import Format, quantize, quantized_matmul
from jaxlowbit import linen as jl_linen
from jaxlowbit import nnx as jl_nnx
from jaxlowbit._core.codebooks import CODEBOOKS
from jaxlowbit._core.format import SCALES, parse_format
from jaxlowbit._core.format_table import NAMED

K, GROUP = 256, 32
# User codebooks: without 0, with one sign, with one bit.
OWN = {
    "odd": (-1.5, -0.5, 0.5, 1.5),
    "positive": (4.0, 0.5, 1.0, 2.0),
    "negative": (-4.0, -0.5, -1.0, -2.0),
    "signs": (-1.0, 1.0),
}


def every_format() -> dict[str, Format]:
    """Every valid combination of width, codebook, kind of zero and kind of scale."""
    books: list[tuple[str, int, Any]] = [(f"int{bits}", bits, None) for bits in range(1, 9)]
    books += [(name, own.bits, name) for name, own in CODEBOOKS.items()]
    books += [(name, len(own).bit_length() - 1, own) for name, own in OWN.items()]
    found = {}
    for name, bits, codebook in books:
        for zero in ("none", "integer", "float"):
            scales: Any = (None, *SCALES)
            for scale in scales:
                try:
                    format = Format(bits, GROUP, zero, codebook, scale)
                except ValueError:
                    continue
                found[f"{name}-{zero}-{scale}"] = format
    return found


FORMATS = every_format()


def floats(weight: Any, format: Any) -> np.ndarray:
    # Without jit, operations are compiled once for all formats; a program would be for each.
    with jax.disable_jit():
        return np.asarray(quantize(weight, format, quantizer="absmax").dequantize(jnp.float32))


def example() -> tuple[np.ndarray, np.ndarray]:
    """A stack of matrices, and a mask of the elements in all-zero groups.

    The last two matrices differ only in their first groups.
    """
    rng = np.random.default_rng(0)
    stack = rng.normal(size=(4, K, 8)).astype(np.float32)
    stack[0, :, 0], stack[0, :, 1] = 0, -0.0
    stack[0, :GROUP, 2] = 0
    stack[0, GROUP:, 3] = 0
    stack[0, :, 4] = 1e-40  # XLA flushes it to 0
    stack[0, :, 5:7] = np.abs(stack[0, :, 5:7]) * [1, -1]
    stack[1] = 0
    stack[2] = stack[3] = 0.5 * stack[3]
    stack[2, :GROUP] = 0
    groups = stack.reshape(4, -1, GROUP, 8)
    empty = np.abs(groups).max(2, keepdims=True) < 2.0**-126
    return stack, np.broadcast_to(empty, groups.shape).reshape(stack.shape)


@pytest.mark.parametrize("name", FORMATS)
def test_groups_of_zeros_are_zeros(name):
    format, (stack, empty) = FORMATS[name], example()
    if format.bits == 1 and format.codebook is None and format.zero == "none":
        with pytest.raises(ValueError, match=r"represents only -scale and 0; use .* or a codebook"):
            quantize(stack, format)
        return
    found = floats(stack, format)
    least = 0.0
    if format.scale == "e8m0" and format.codebook is not None and 0 not in format.values:
        least = 2.0**-127 * np.abs(format.values).min()  # no power of two is 0
    assert np.abs(found[empty]).max() <= least
    pruned, whole = (np.linalg.norm((found[i] - stack[i])[GROUP:]) for i in (2, 3))
    assert pruned < 1.1 * whole  # zeros do not widen the scales of other groups


@pytest.mark.parametrize("scale", [None, "e4m3", "two_level"])
def test_a_codebook_of_one_sign_rounds_the_other_sign_to_zero(scale):
    stack = np.full((4, K, 8), -1, np.float32)
    assert not floats(stack, FORMATS[f"positive-none-{scale}"]).any()
    assert floats(stack, FORMATS[f"negative-none-{scale}"]).max() < -0.9


def test_groups_of_zeros_do_not_count_as_scales_too_small():
    """In weights pruned by channels or groups, most scales belong to zeros."""
    stack, _ = example()
    for pruned in (stack * (np.arange(8) == 7), stack * (np.arange(K)[:, None] < GROUP)):
        assert not floats(pruned, FORMATS["int4-none-int8"])[pruned == 0].any()
    lost = np.full_like(stack, 1e-4)
    lost[:, 0] = 1
    with pytest.raises(ValueError, match="the largest weight, 1, is so far from the others"):
        floats(lost, FORMATS["int4-none-int8"])


def test_models_with_a_layer_of_zeros():
    x, zeros = jnp.ones((2, 64)), nnx.initializers.zeros
    model = nnx.Sequential(
        nnx.Linear(64, 64, rngs=nnx.Rngs(0)),
        nnx.Linear(64, 64, kernel_init=zeros, rngs=nnx.Rngs(0)),
    )
    jl_nnx.quantize_model(model, "int4-int8")
    assert not model(x).any()
    module = nn.Sequential([nn.Dense(64), nn.Dense(64, kernel_init=zeros)])
    variables = module.init(jax.random.key(0), x)
    quantized, packed, _ = jl_linen.quantize_model(module, variables, "int4-int8", x)
    assert not quantized.apply(packed, x).any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize("name", [*NAMED, "int4-g32-two_level"])
def test_kernels_multiply_groups_of_zeros(name, rows):
    format = parse_format(name)
    weight = np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32)
    weight[:256, :64] = 0
    weight[:, 64:128] = 0
    x = np.random.default_rng(1).normal(size=(rows, 512)).astype(jnp.bfloat16)
    array = quantize(weight, format)
    got = np.asarray(quantized_matmul(x, array, preferred_element_type=jnp.float32))
    dense = np.asarray(array.dequantize(jnp.float32), np.float64)
    exact, sizes = (f(x.astype(np.float64)) @ f(dense) for f in (np.asarray, np.abs))
    np.testing.assert_array_less(np.abs(got - exact), sizes * 2.0**-8 + 1e-30)
    assert not got[:, 64:128].any()
