"""References for products: the layout in NumPy, a float64 oracle and its error bound.

Nothing here calls the packing or dequantization of the package; `problems.py` has the cases.
"""

import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.core import Tracer
from scipy import special

import jaxlowbit
from jaxlowbit import Format, QuantizedArray
from jaxlowbit._backends.extension import ffi
from jaxlowbit._core import super_blocks

PLATFORM = {"cpu": "cpu", "gpu": "cuda"}[jax.default_backend()]
TARGET = "jaxlowbit_sequence"

_STATIC = ("preferred_element_type", "precision", "backend")
matmul = jax.jit(jaxlowbit.quantized_matmul, static_argnames=_STATIC)
# `array.dequantize(dtype)` as one program; eager execution would compile ten.
dequantized = jax.jit(QuantizedArray.dequantize, static_argnums=1)
# Interpreted kernels take longer to optimize than to run.
UNOPTIMIZED: dict[str, Any] = {"xla_backend_optimization_level": 0}
interpreted_matmul = jax.jit(
    jaxlowbit.quantized_matmul, static_argnames=_STATIC, compiler_options=UNOPTIMIZED
)


@functools.cache
def weight_of(format: Format, k: int = 1, n: int = 1) -> QuantizedArray:
    """The shapes and dtypes of a weight."""
    shape: Any = jax.ShapeDtypeStruct
    words, groups = super_blocks.stored_shapes(k, n, format)
    scale_dtype = format.scale_dtype or jnp.dtype("float32")
    zero_dtype = {"integer": jnp.dtype("uint8"), "float": scale_dtype}.get(format.zero)
    channels = (n,) if format.scales_channels else ()
    return QuantizedArray(
        packed=shape(words, jnp.uint32),
        scale=shape(groups, scale_dtype),
        zero=None if zero_dtype is None else shape(groups, zero_dtype),
        index=None,
        version=shape((), jnp.uint32),
        format=format,
        k=k,
        n=n,
        tensor_scale=shape(channels, jnp.float32) if format.has_tensor_scale else None,
    )


@functools.cache
def reasons(dtype: str, format: Format) -> dict[str, str | None]:
    """The result of `supported_backends` for this kind of product."""
    lhs = jax.ShapeDtypeStruct((1, 1), jnp.dtype(dtype))
    return jaxlowbit.supported_backends(lhs, weight_of(format))


def backends(dtype: str, format: Format) -> list[str]:
    """The backends that compute this kind of product on this machine."""
    compiled = (PLATFORM, "pallas", "xla") if PLATFORM == "cpu" else (PLATFORM, "xla")
    return [name for name in compiled if reasons(dtype, format)[name] is None]


# --- the layout -----------------------------------------------------------------------------------

# Planes of a width: bits, lowest bit of the code, and the digits of a slot number, highest first.
# Digits of a position: n = 16 w + 8 h + g, k = 32 s1 + 16 s0 + 8 v + 2 t + e.
_PLANES = {
    1: [(1, 0, "e s1 s0 v h")],
    2: [(2, 0, "s1 e s0 v h")],
    3: [(2, 0, "s1 e v h s0"), (1, 2, "e v h s1 s0")],
    4: [(4, 0, "s1 s0 e v h")],
    5: [(4, 0, "s1 s0 e h v"), (1, 4, "e h s1 s0 v")],
    6: [(4, 0, "s1 s0 e h v"), (2, 4, "s1 e h s0 v")],
    7: [(4, 0, "s1 s0 e h v"), (2, 4, "s1 e h s0 v"), (1, 6, "e h s1 s0 v")],
    8: [(8, 0, "s1 s0 v e h")],
}


@functools.cache
def _positions(bits: int) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
    """Per plane: its bits, its lowest bit, and the word and the bit of each (k, n) of an atom."""
    k, n = np.indices((64, 64))
    w, h, g = n // 16, n // 8 % 2, n % 8
    t = k // 2 % 4
    digits = {"s1": k // 32, "s0": k // 16 % 2, "v": k // 8 % 2, "e": k % 2, "h": h}
    found, start = [], 0
    for plane, shift, names in _PLANES[bits]:
        slot = functools.reduce(lambda number, name: 2 * number + digits[name], names.split(), 0)
        run = start + (w * 32 + 4 * g + t) * plane
        found.append((plane, shift, run + slot * plane // 32, slot * plane % 32))
        start += 128 * plane
    return found


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes (..., k, n), whole atoms, as words (..., n_blocks, k_blocks, 128 * bits)."""
    *lead, k, n = codes.shape
    atoms = codes.reshape(*lead, k // 64, 64, n // 64, 64).astype(np.uint32)
    atoms = np.moveaxis(atoms, -2, -4)
    planes = []
    for plane, shift, word, bit in _positions(bits):
        values = (atoms >> np.uint32(shift) & np.uint32(2**plane - 1)) << bit.astype(np.uint32)
        by_word = values.reshape(*atoms.shape[:-2], -1)[..., np.argsort(word, axis=None)]
        words = by_word.reshape(*atoms.shape[:-2], 128 * plane, 32 // plane)
        planes.append(np.bitwise_or.reduce(words, axis=-1))
    return np.concatenate(planes, axis=-1)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `pack`."""
    *lead, n_blocks, k_blocks, _ = packed.shape
    atoms = np.zeros((*packed.shape[:-1], 64, 64), np.uint32)
    for plane, shift, word, bit in _positions(bits):
        values = packed[..., word] >> bit.astype(np.uint32) & np.uint32(2**plane - 1)
        atoms |= values << np.uint32(shift)
    return np.moveaxis(atoms, -4, -2).reshape(*lead, k_blocks * 64, n_blocks * 64)


# Position in an atom of the scale of each of its 64 columns.
_IN_ATOM = np.arange(64) // 16 * 16 + np.arange(64) % 8 * 2 + np.arange(64) // 8 % 2


def unpack_groups(values: np.ndarray) -> np.ndarray:
    """Scales or zeros (..., n_blocks, groups, 64) as (..., groups, n)."""
    values = np.moveaxis(values[..., _IN_ATOM], -3, -2)
    return values.reshape(*values.shape[:-2], -1)


def pack_groups(values: np.ndarray) -> np.ndarray:
    """The inverse of `unpack_groups`, for whole atoms of n."""
    atoms = values.reshape(*values.shape[:-1], -1, 64)
    return np.moveaxis(atoms[..., np.argsort(_IN_ATOM)], -2, -3)


def quantize(
    weight: Any,
    format: Format,
    *,
    shards: tuple[int, int] = (1, 1),
    permutation: Any = None,
    scale_dtype: Any = None,
) -> QuantizedArray:
    """Quantizes by minimum and maximum in NumPy, for tests that only need an array.

    `jaxlowbit.quantize` would compile a program for every format and shape.
    """
    weight, levels = np.asarray(weight), 2**format.bits
    dtype = jnp.dtype(scale_dtype or weight.dtype)
    *lead, k, n = weight.shape
    values, stored = weight.astype(np.float32), None
    if permutation is not None:
        stored = np.broadcast_to(np.asarray(permutation, np.int32), (*lead, k))
        order = global_order(stored, shards[0])
        values = np.take_along_axis(values, order[..., None], axis=-2)
    whole = 64 if shards[0] == 1 or format.scale_span == -1 else math.lcm(64, format.scale_span)
    values = _parts_padded(_parts_padded(values, -2, shards[0], whole), -1, shards[1], 64)
    padded = values.shape[-2]
    size = padded if format.group_size == -1 else min(format.group_size, padded)
    if format.scale == "two_level":
        size = format.group_size
    values = _parts_padded(values, -2, 1, 256 if format.scale == "two_level" else size)
    values = values.reshape(*lead, -1, size, values.shape[-1])

    low, high, zero = values.min(-2), values.max(-2), None
    numbers = np.arange(levels) - float(levels // 2)
    if format.codebook is not None:
        numbers = np.array(format.values)
    if format.zero == "integer":
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    if format.zero == "none":
        reach = np.nanmax(np.where(np.isfinite(numbers), numbers, np.nan))
        scale = np.maximum(-low, high) / reach
    else:
        scale = (high - low) / (levels - 1)
    scale, tensor_scale = np.where(scale == 0, 1, scale).astype(np.float32), None
    if format.scale == "e8m0":
        exponents = np.ceil(np.log2(scale))
        narrow = (exponents + 127).astype(np.uint8).view(format.scale_dtype)
        scale = 2.0**exponents
    elif format.scale == "e4m3":
        tensor_scale = (scale.max((-2, -1)) / 448).astype(np.float32)
        unit = tensor_scale[..., None, None]
        narrow = np.maximum(scale / unit, 2.0**-9).astype(format.scale_dtype)
        scale = narrow.astype(np.float32) * unit
    elif format.scale == "int8":
        tensor_scale = (scale.max(-2) / format.max_scale).astype(np.float32)
        unit = tensor_scale[..., None, :]
        narrow = np.minimum(np.ceil(scale / unit), format.max_scale).astype(np.int8)
        scale = narrow.astype(np.float32) * unit
    elif format.scale == "two_level":
        narrow = two_levels(scale, format.group_size)
        scale = of_two_levels(narrow, format.group_size).astype(np.float32)
        scale = np.where(scale == 0, np.float32(1), scale)  # any code is 0
    else:
        narrow = scale.astype(dtype)
        scale = narrow.astype(np.float32)
    steps = values / scale[..., None, :]
    if format.codebook is not None:
        far = np.abs(steps[..., None] - np.where(np.isfinite(numbers), numbers, np.inf))
        codes = far.argmin(-1)
    elif format.zero == "integer":
        zero = np.clip(np.round(-low / scale), 0, levels - 1).astype(np.uint8)
        codes = np.round(steps) + zero[..., None, :]
    elif format.zero == "float":
        zero, wide = low.astype(dtype), low.astype(dtype).astype(np.float32)
        if format.scale == "two_level":
            zero = two_levels(low, format.group_size)
            wide = of_two_levels(zero, format.group_size).astype(np.float32)
        codes = np.round((values - wide[..., None, :]) / scale[..., None, :])
    else:
        codes = np.round(steps) + levels // 2
    codes = np.clip(codes, 0, levels - 1).reshape(*lead, -1, values.shape[-1])
    if tensor_scale is not None and format.scales_channels:
        tensor_scale = tensor_scale[..., :n]
    leaves: dict[str, Any] = {
        "packed": pack(codes[..., :padded, :].astype(np.uint32), format.bits),
        "scale": pack_groups(narrow),
        "zero": None if zero is None else pack_groups(zero),
        "version": np.ones(lead, np.uint32),
        "permutation": stored,
        "tensor_scale": tensor_scale,
    }
    return jax.device_put(
        QuantizedArray(**leaves, index=None, format=format, k=k, n=n, shards=shards)
    )


def from_codes(
    codes: np.ndarray, scale: Any, zero: Any, format: Format, tensor_scale: Any = None
) -> QuantizedArray:
    """Packs codes (..., k, n) in NumPy; `QuantizedArray.from_integers` would compile a program.

    Padding repeats the last row and column.
    """
    *lead, k, n = codes.shape
    words, groups = super_blocks.stored_shapes(k, n, format)

    def padded(values: Any, rows: int) -> np.ndarray:
        more = (0, rows - values.shape[-2]), (0, -n % 64)
        return np.pad(np.asarray(values), [(0, 0)] * len(lead) + [*more], mode="edge")

    scale, zero = (x if x is None else pack_groups(padded(x, groups[1])) for x in (scale, zero))
    leaves: dict[str, Any] = {
        "packed": pack(padded(codes, 64 * words[1]), format.bits),
        "scale": scale,
        "zero": zero,
        "version": np.ones(lead, np.uint32),
        "tensor_scale": tensor_scale,
    }
    return jax.device_put(QuantizedArray(**leaves, index=None, format=format, k=k, n=n))


def scaled_matrices(stack: QuantizedArray, factors: Sequence[float]) -> QuantizedArray:
    """Multiplies the tensor scale of each matrix of a stack by a factor."""
    assert stack.tensor_scale is not None
    scales = jnp.float32(factors).reshape(-1, *[1] * (stack.tensor_scale.ndim - 1))
    return stack._with(tensor_scale=stack.tensor_scale * scales)


def two_levels(values: np.ndarray, group_size: int) -> np.ndarray:
    """Approximates `values` (..., groups, n) by bytes (..., rows, n): integers, and a float16 per
    256 rows."""
    *lead, _, n = values.shape
    blocks = values.reshape(*lead, -1, 256 // group_size, n)
    floats = np.maximum(np.abs(blocks).max(-2) / 127, 2.0**-24).astype(np.float16)
    integers = np.clip(np.round(blocks / floats.astype(np.float32)[..., None, :]), -128, 127)
    halves = np.moveaxis(floats[..., None].view(np.uint8), -1, -2)
    both = np.concatenate([integers.astype(np.int8).view(np.uint8), halves], axis=-2)
    return both.reshape(*lead, -1, n)


def of_two_levels(values: np.ndarray, group_size: int) -> np.ndarray:
    """Decodes bytes of `two_levels` to scales (..., groups, n) in float64."""
    *lead, _, n = values.shape
    blocks = values.reshape(*lead, -1, 256 // group_size + 2, n)
    integers = blocks[..., :-2, :].view(np.int8).astype(np.float64)
    floats = np.ascontiguousarray(np.moveaxis(blocks[..., -2:, :], -2, -1)).view(np.float16)
    return (integers * floats[..., 0][..., None, :].astype(np.float64)).reshape(*lead, -1, n)


def _parts_padded(values: np.ndarray, axis: int, parts: int, unit: int) -> np.ndarray:
    """Pads each of equal parts of an axis, -1 or -2, to whole units with its last element."""
    pad = [(0, 0)] * values.ndim
    pad[axis] = (0, -(values.shape[axis] // parts) % unit)
    split = np.split(values, parts, axis)
    return np.concatenate([np.pad(part, pad, mode="edge") for part in split], axis)


# --- the reference --------------------------------------------------------------------------------


class Weight(NamedTuple):
    """A weight in float64, and the sum of magnitudes of its terms (for the float32 error)."""

    value: np.ndarray
    terms: np.ndarray


def dequantize(array: QuantizedArray) -> Weight:
    """The values of `array`, (..., k, n); k may have several shards, n only one."""
    format = array.format
    shards, padded = array.shards[0], 64 * array.packed.shape[-2]
    starts = padded // shards * np.arange(shards)
    stored = (starts[:, None] + np.arange(array.k // shards)).ravel()
    codes = unpack(np.asarray(array.packed), format.bits)[..., stored, : array.n]

    def rows(values: Any) -> np.ndarray:
        if format.scale == "two_level":
            found = unpack_groups(np.asarray(values))
            values = of_two_levels(found, format.group_size)
        else:
            values = unpack_groups(np.asarray(values).astype(np.float64))
        size = padded if format.group_size == -1 else format.group_size
        return np.repeat(values, size, axis=-2)[..., stored, : array.n]

    scale = rows(array.scale)
    if format.codebook is not None:
        value = np.array(format.values, np.float64)[codes] * scale
        terms = np.abs(value)
    elif array.zero is None:
        value = (codes - 2.0 ** (format.bits - 1)) * scale
        terms = np.abs(value)
    elif format.zero == "integer":
        value = (codes - rows(array.zero)) * scale
        terms = np.abs(value)
    else:
        zero = rows(array.zero)
        value, terms = codes * scale + zero, np.abs(codes * scale) + np.abs(zero)
    if array.tensor_scale is not None:
        unit = np.asarray(array.tensor_scale).astype(np.float64)
        unit = unit[..., None, :] if format.scales_channels else unit[..., None, None]
        value, terms = value * unit, terms * unit
    if array.permutation is not None:
        order = global_order(np.asarray(array.permutation), shards)[..., None]
        inverse = np.argsort(order, axis=-2)
        value, terms = (np.take_along_axis(x, inverse, axis=-2) for x in (value, terms))
    if array.index is not None:
        index = positions(array.index, len(value))
        value, terms = value[index], terms[index]
    return Weight(value, terms)


def positions(index: Any, depth: int) -> np.ndarray:
    """Positions selected by integers of any dtype: negative ones count from the end; clamped."""

    def position(i: int) -> int:
        return min(max(i + depth if i < 0 else i, 0), depth - 1)

    return np.vectorize(position, otypes=[np.int64])(np.asarray(index).astype(object))


def global_order(permutation: np.ndarray, shards: int) -> np.ndarray:
    """Converts positions relative to each shard to positions in the whole matrix."""
    k = permutation.shape[-1]
    return permutation + np.arange(k) // (k // shards) * (k // shards)


_FLOAT32 = 2.0**-24  # unit roundoff


class Oracle(NamedTuple):
    """The exact product and the error bound of each element.

    Standard forward error analysis: each weight is rounded in float32 and then to the dtype of
    lhs, k products are added in float32, the sum is rounded to the dtype of the result. All
    scale with |lhs| @ |weight|, so cancellation needs no tuned tolerance. With float16 accumulation
    a product is rounded with its sum up to twice for its step of 16 and for each later step in its
    stage of `half_stage` products.
    """

    exact: np.ndarray
    weights: np.ndarray
    sums: np.ndarray

    @classmethod
    def of(cls, lhs: Any, weight: Weight, half_stage: int = 0) -> "Oracle":
        dtype = jnp.dtype(lhs.dtype)
        lhs = np.asarray(lhs).astype(np.float64)
        k = lhs.shape[-1]
        size, entries = np.abs(lhs), np.abs(lhs).sum(axis=-1, keepdims=True)
        product = size @ np.abs(weight.value)
        weights = _roundoff(dtype) * product + 2 * _FLOAT32 * (size @ weight.terms)
        weights += _underflow(dtype) * entries
        sums = k * (_FLOAT32 * product + _underflow(jnp.dtype("float32")))
        if half_stage:
            half, steps = jnp.dtype("float16"), half_stage // 16
            roundings = 2 * (steps - np.arange(k) // 16 % steps)
            sums += _roundoff(half) * ((size * roundings) @ np.abs(weight.value))
            sums += -(-k // 8) * _underflow(half)
        return cls(lhs @ weight.value, weights, sums)

    def bound(self, dtype: Any, results: int = 1) -> np.ndarray:
        """The bound for a result of `dtype`, or for the difference of two results."""
        out = np.abs(self.exact) + self.weights + self.sums
        rounding = _roundoff(dtype) * out + _underflow(dtype)
        return self.weights * (1 if results == 1 else 2) + results * (self.sums + rounding)

    def scaled(self, scale: Any) -> "Oracle":
        """Multiplies by float32 factors, like token scales: sums and products are each rounded to
        float32 once more."""
        scale = np.asarray(scale).astype(np.float64)
        exact, weights, sums = (scale * x for x in self)
        sums += 2 * _FLOAT32 * (np.abs(exact) + weights + sums)
        return Oracle(exact, weights, sums + _underflow(jnp.dtype("float32")))


ACTIVATIONS: dict[str | None, Any] = {
    None: lambda x: x,
    "silu": lambda x: x * special.expit(x),
    "gelu": lambda x: x * special.ndtr(x),
    "gelu_tanh": lambda x: x * special.expit(np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)),
    "relu": lambda x: np.maximum(x, 0),
}
# JAX versions of these functions.
JAX_ACTIVATIONS: dict[str | None, Any] = {
    None: lambda x: x,
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


def finished(
    oracle: Oracle,
    dtype: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    up: tuple[Oracle, Any] | None = None,
    residual: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The exact result of an epilogue, and the error bound of a result of `dtype`.

    `up`: the other product of a gated pair, and its bias. Activations have slopes up to 1.13; their
    float32 formulas are accurate to 2^-20 of the argument.
    """

    def plus(exact: np.ndarray, error: np.ndarray, addend: Any) -> tuple[np.ndarray, np.ndarray]:
        if addend is None:
            return exact, error
        addend = np.asarray(addend).astype(np.float64)
        return exact + addend, error + _FLOAT32 * (np.abs(exact) + np.abs(addend))

    def sums(oracle: Oracle, bias: Any) -> tuple[np.ndarray, np.ndarray]:
        return plus(oracle.exact, oracle.weights + oracle.sums, bias)

    exact, error = sums(oracle, bias)
    if activation is not None:
        error = 1.13 * error + 2.0**-20 * np.abs(exact)
        exact = ACTIVATIONS[activation](exact)
    if up is not None:
        factor, factor_error = sums(*up)
        error = error * (np.abs(factor) + factor_error) + np.abs(exact) * factor_error
        exact = exact * factor
        error += _FLOAT32 * np.abs(exact)
    exact, error = plus(exact, error, residual)
    error += _underflow(jnp.dtype("float32"))
    return exact, error + _roundoff(dtype) * (np.abs(exact) + error) + _underflow(dtype)


def _roundoff(dtype: Any) -> float:
    return float(ml_dtypes.finfo(dtype).eps) / 2


def _underflow(dtype: Any) -> float:
    """The error of one rounding near zero; float32 units may flush subnormal numbers."""
    info = ml_dtypes.finfo(dtype)
    return float(info.smallest_subnormal if dtype == jnp.float16 else info.smallest_normal)


def initial(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """An initializer of layers in NumPy; JAX would compile programs for each shape."""
    if isinstance(key, Tracer):
        return jax.nn.initializers.normal(0.1)(key, shape, dtype)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    size = math.sqrt(math.prod(shape[:-1]) or 1)
    return jnp.asarray(rng.standard_normal(shape, np.float32) / size, dtype)


def calls(f: Any, *args: Any, platform: str = "cuda") -> list[str]:
    """The custom calls of a program. Wraps `f` in a new function to bypass the cache of JAX."""
    program = jax.jit(lambda *args: f(*args)).trace(*args)
    text = program.lower(lowering_platforms=(platform,)).as_text()
    return call_names(text)


class Described(NamedTuple):
    """A custom call in the text of a program."""

    target: str
    caller: str
    products: list[dict[str, int]]
    steps: list[dict[str, int]]
    operands: list[str]
    results: list[str]

    @property
    def name(self) -> str:
        """The caller, or a name for calls with 8-bit activations or an epilogue."""
        kinds = {step["kind"] for step in self.steps}
        rounds = len(kinds) > 1 and any(step["out_scale"] for step in self.steps)
        if self.caller == "quantized_block":
            return "rounded_block" if rounds else self.caller
        if self.caller not in ("quantized_matmul", "quantized_glu"):
            return self.caller.split()[0]
        (product,) = self.products
        if product["lhs_scale_at"] or product["out"] == ffi.product(out="int32")[OUT]:
            return "rounded_activations" if rounds else "quantized_activations"
        plain = not any(product[key] for key in ("activation", "gated", "bias_at", "residual_at"))
        return "quantized_matmul" if plain else "quantized_matmul_fused"


OUT = ffi.PRODUCT_FIELDS.index("out")


def described(text: str) -> list[Described]:
    """The custom calls of a program, in StableHLO or in compiled HLO."""
    found = []
    for line in text.splitlines():
        target = re.search(r'custom_call(?: @|_target=")(jaxlowbit_\w+)', line)
        caller = re.search(r'caller = "([^"]*)"', line)
        if target is None or caller is None:
            continue
        lists = {}
        for name, fields in (("products", ffi.PRODUCT_FIELDS), ("steps", ffi.STEP_FIELDS)):
            rows = np.reshape(_numbers(name, line), (-1, len(fields))).tolist()
            lists[name] = [dict(zip(fields, row, strict=True)) for row in rows]
        types = re.search(r" : \((.*?)\) -> (.*)", line)
        sides = (
            [re.findall(r"tensor<[^>]*>", side) for side in types.groups()] if types else [[]] * 2
        )
        found.append(Described(target[1], caller[1], lists["products"], lists["steps"], *sides))
    return found


def _numbers(name: str, line: str) -> list[int]:
    """The numbers of an attribute s64[]; long arrays are printed as bytes."""
    array = re.search(rf"\b{name} = array<i64: ([^>]*)>", line)
    if array is not None:
        return [int(x) for x in array[1].split(",")]
    dense = re.search(rf'\b{name} = dense<"?([^">]*)"?> : tensor<(\d+)xi64>', line)
    if dense is None:
        return []
    if dense[1].startswith("0x"):
        return np.frombuffer(bytes.fromhex(dense[1][2:]), np.int64).tolist()
    numbers = [int(x) for x in dense[1].strip("[]").split(",")]
    return numbers * int(dense[2]) if len(numbers) == 1 else numbers


def call_names(text: str) -> list[str]:
    return [call.name for call in described(text)]


def assert_within(got: Any, exact: np.ndarray, bound: np.ndarray) -> None:
    """Asserts that `got` is within `bound` of `exact`, and reports the worst element."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == exact.shape
    if not got.size:
        return
    ratio = np.nan_to_num(np.abs(got - exact) / bound, nan=np.inf)
    worst = np.unravel_index(ratio.argmax(), ratio.shape)
    assert ratio[worst] <= 1, (
        f"{np.sum(ratio > 1)} of {ratio.size} elements are outside their bound; the worst is "
        f"{ratio[worst]:.3g} times over at {tuple(map(int, worst))}: {got[worst]} for "
        f"{exact[worst]} +- {bound[worst]:.3g}"
    )


def program_cache(folder: Path) -> dict[str, str]:
    """Environment variables that make JAX keep every compiled program in a folder."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
