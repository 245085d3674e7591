"""Every error message of the package: a sentence with the value, the rule and the way out."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLATFORM
from jax.lax import DotAlgorithmPreset

import jaxlowbit
from jaxlowbit import FP8, MXFP8, Format, QuantizedArray, quantize, quantized_matmul
from jaxlowbit._backends import extension

K, N = 32, 16
FOUR = Format(4, 16)
INTEGER = FOUR.replace(zero="integer")


@pytest.fixture(scope="module")
def weight() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(3, K, N)).astype(np.float32))


@pytest.fixture(scope="module")
def stack(weight) -> QuantizedArray:
    return quantize(weight, INTEGER)


@pytest.fixture(scope="module")
def matrix(stack) -> QuantizedArray:
    return stack[0]


LHS = np.ones((2, K), np.float32)


def refuses(message: str, error: type[Exception] = ValueError):
    """Expects an error that contains `message`, starts with a name and ends as a sentence."""
    return pytest.raises(error, match=rf"^\w+(\.\w+)?: .*{message}.*\.(\n|$)")


# --- Format ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [0, 9, -1, 4.0, True, None])
def test_format_bits(bits):
    with refuses(re.escape(f"bits={bits!r}, but a code has 1 to 8 bits")):
        Format(bits)


@pytest.mark.parametrize("group_size", [0, 8, 20, -2, -16, 32.0, None])
def test_format_group_size(group_size):
    with refuses(re.escape(f"group_size={group_size!r}") + ", but .* multiple of 16 .* or -1"):
        Format(4, group_size)


def test_format_zero():
    with refuses("zero='symmetric' is unknown; it is one of 'none', 'integer', 'float'"):
        Format(4, zero="symmetric")  # pyright: ignore[reportArgumentType]


# --- quantize -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (4,), (0, 4), (4, 0), (3, 0, 4)])
def test_quantize_rank(shape):
    with refuses(re.escape(f"weight has shape {shape}") + r", but a matrix \(\.\.\., k, n\)"):
        quantize(jnp.ones(shape), FOUR)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.complex64])
def test_quantize_dtype(dtype):
    with refuses(f"weight is {jnp.dtype(dtype)}, but it must be float32, bfloat16 or float16"):
        quantize(jnp.ones((4, 4), dtype), FOUR)


def test_quantize_scale_dtype(weight):
    with refuses("scale_dtype is int32, but .*; cast it, or use QuantizedArray.from_integers"):
        quantize(weight, FOUR, scale_dtype=jnp.int32)


def test_quantize_method(weight):
    with refuses("quantizer='exl3' is unknown; it is one of 'absmax', "):
        quantize(weight, FOUR, quantizer="exl3")
    with refuses("quantizer='gptq' needs full second moments of the inputs, .* none; pass"):
        quantize(weight, FOUR, quantizer="gptq")


def test_quantize_one_bit_needs_a_zero(weight):
    with refuses("a 1-bit code without a zero .*; use zero='float'"):
        quantize(weight, Format(1))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_quantize_raises_for_nonfinite_weights(weight, value):
    bad = weight.at[1, 5, 7].set(value).at[2, 0, 0].set(value)
    with refuses(rf"2 values that are NaN or infinite, the first at \(1, 5, 7\) \({value}\)"):
        quantize(bad, FOUR)


@pytest.mark.parametrize("zero", ["none", "integer", "float"])
def test_quantize_raises_for_scales_out_of_range(weight, zero):
    large = weight.at[0, 0, 0].set(3e7)
    with refuses(r"weights up to 3e\+07 span a range larger than that of float16 scales; use"):
        quantize(large, Format(4, zero=zero), scale_dtype=jnp.float16)


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        (Format(2, 64), "bfloat16"),  # rounded up to infinity
        (Format(4, 64, "integer"), "float32"),  # the range is twice the largest weight
        (Format(4, 64, "float"), "bfloat16"),
        (FP8, "float16"),
    ],
    ids=str,
)
def test_quantize_raises_for_scales_beyond_every_dtype(format, dtype):
    large = jnp.full((64, 4), 3.4e38).at[::2].multiply(-1)
    with refuses(rf"weights up to 3\.4e\+38 span a range larger than that of {dtype} scales; use"):
        quantize(large, format, quantizer="absmax", scale_dtype=jnp.dtype(dtype))
    quantize(large, FP8)  # division by 448 keeps the scale finite


@pytest.mark.parametrize(
    ("size", "dtype", "message"),
    [
        (
            1e-9,
            "float16",
            "of float16, in most groups .*; use scale_dtype=jnp.float32, or scale",
        ),
        (1e-37, "float32", "of float32, in most groups of a matrix; scale the weights up"),
        (1e-37, "bfloat16", "of bfloat16, in most groups of a matrix; scale the weights up"),
    ],
)
def test_quantize_raises_for_weights_too_small_for_any_scale(weight, size, dtype, message):
    small = weight.at[1].multiply(size)
    with refuses(r"weights up to [\d.]+e-\d+ need scales below .*, the minimum " + message):
        quantize(small, Format(8), scale_dtype=jnp.dtype(dtype))
    quantize(small.astype(jnp.float16), Format(8))  # float16 scales represent these values


# --- from_integers --------------------------------------------------------------------------------

VALUES, SCALE = np.zeros((K, N), np.int8), np.ones((2, N), np.float32)


@pytest.mark.parametrize("values", [np.zeros((K, N), np.float32), np.zeros(K, np.int8)])
def test_from_integers_needs_integer_matrices(values):
    with refuses(r"values has shape .* and dtype .*, but it must be an integer matrix"):
        QuantizedArray.from_integers(values, SCALE, format=FOUR)


def test_from_integers_unsigned_needs_a_zero():
    with refuses(r"values are unsigned \(uint8\) and the format has no zero; pass signed values"):
        QuantizedArray.from_integers(VALUES.astype(np.uint8), SCALE, format=FOUR)


@pytest.mark.parametrize(
    ("format", "zero", "found"),
    [(FOUR, np.zeros((2, N), np.int8), "given"), (INTEGER, None, "missing")],
)
def test_from_integers_zero_and_format_agree(format, zero, found):
    with refuses(f"format.zero is '{format.zero}', but zero is {found}; make the two agree"):
        QuantizedArray.from_integers(VALUES, SCALE, zero, format=format)


def test_from_integers_shapes():
    with refuses(rf"scale has shape \(1, {N}\), but values .* in groups of 16 need \(2, {N}\)"):
        QuantizedArray.from_integers(VALUES, SCALE[:1], format=FOUR)
    with refuses(rf"zero has shape \(2, 3\), but values .* need \(2, {N}\)"):
        QuantizedArray.from_integers(VALUES, SCALE, np.zeros((2, 3), np.int8), format=INTEGER)


@pytest.mark.parametrize(("value", "low", "high"), [(8, 0, 8), (-9, -9, 0)])
def test_from_integers_range(value, low, high):
    values = VALUES.copy()
    values[3, 4] = value
    with refuses(f"values reaches from {low} to {high}, but 4 bits represent -8 to 7; use a wider"):
        QuantizedArray.from_integers(values, SCALE, format=FOUR)


@pytest.mark.parametrize(
    ("values", "zero", "format"),
    [
        (VALUES, np.zeros_like(SCALE), FOUR.replace(zero="float")),
        (VALUES.astype(np.uint8), np.zeros(SCALE.shape, np.uint8), FOUR.replace(zero="float")),
    ],
)
def test_from_integers_float_zero(values, zero, format):
    with refuses("values must be unsigned codes and zero floats; convert them"):
        QuantizedArray.from_integers(values, SCALE, zero, format=format)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_from_integers_zero_in_the_convention_of_values(dtype):
    with refuses("both must be signed or both unsigned"):
        QuantizedArray.from_integers(VALUES, SCALE, np.zeros(SCALE.shape, dtype), format=INTEGER)


WIDE = [np.int64(2**32 + 1), np.int64(-(2**40)), np.uint64(2**63), np.uint32(2**32 - 1)]


@pytest.mark.parametrize("value", [*WIDE, 2**32], ids=str)
@pytest.mark.parametrize("x64", [False, True], ids=["", "x64"])
def test_from_integers_beyond_32_bits(value, x64):
    dtype = np.asarray(value).dtype
    signed = dtype.kind == "i"
    values, format = VALUES.astype(dtype), FOUR if signed else INTEGER
    values[3, 4] = value
    zero = None if signed else np.zeros(SCALE.shape, dtype)
    limits = "-8 to 7" if signed else "0 to 15"
    with (
        jax.enable_x64(x64),
        refuses(f"values reaches from .*{value}.*, but 4 bits .* {limits}"),
    ):
        QuantizedArray.from_integers(values, SCALE, zero, format=format)
    zero = np.full(SCALE.shape, value)
    values = VALUES.astype(np.int8 if signed else np.uint8)
    with (
        jax.enable_x64(x64),
        refuses(f"zero reaches from {value} to {value}, but 4 bits "),
    ):
        QuantizedArray.from_integers(values, SCALE, zero, format=INTEGER)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_from_integers_raises_for_nonfinite_values(value):
    bad = SCALE.copy()
    bad[1, 3] = value
    rule = rf"has 1 values that are NaN or infinite, the first at \(1, 3\) \({value}\); they"
    with refuses("scale " + rule):
        QuantizedArray.from_integers(VALUES, bad, format=FOUR)
    unsigned = VALUES.astype(np.uint8)
    with refuses("zero " + rule):
        QuantizedArray.from_integers(unsigned, SCALE, bad, format=FOUR.replace(zero="float"))


def test_from_integers_raises_for_float_zeros_beyond_the_dtype_of_scales():
    values, scale = VALUES.astype(np.uint8), SCALE.astype(np.float16)
    zero = np.full(SCALE.shape, 70000.0, np.float32)
    with refuses("zero, in the float16 of scale, has 32 values .*; cast the scales to float32"):
        QuantizedArray.from_integers(values, scale, zero, format=FOUR.replace(zero="float"))


def test_from_integers_range_of_zeros():
    zero = np.full((2, N), 16, np.uint8)
    with refuses("zero reaches from 16 to 16, but 4 bits represent 0 to 15"):
        QuantizedArray.from_integers(VALUES.astype(np.uint8), SCALE, zero, format=INTEGER)


# --- QuantizedArray -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed": jnp.zeros((1, 1, 511), jnp.uint32)}, r"packed is uint32\(1, 1, 511\), but"),
        ({"packed": jnp.zeros((1, 1, 512), jnp.int32)}, r"packed is int32.* uint32\(1, 1, 512\)"),
        ({"scale": jnp.ones((1, 4, 64), jnp.int8)}, "scale has dtype int8, but it must be float32"),
        ({"scale": jnp.ones((1, 3, 64))}, r"scale is float32\(1, 3, 64\), but .*\(1, 4, 64\)"),
        ({"zero": jnp.zeros((1, 4, 64))}, r"zero is float32\(1, 4, 64\), but .* uint8\(1, 4, 64\)"),
        ({"zero": None}, "format.zero is 'integer', but the zero array is missing; make the two"),
        ({"format": FOUR}, "format.zero is 'none', but the zero array is given"),
        ({"version": jnp.ones((2,), jnp.uint32)}, r"version is uint32\(2,\), but .* uint32\(\)"),
        ({"index": jnp.zeros((), jnp.int32)}, r"along one stacked axis, but there are 0 \(shape"),
        ({"k": 65}, r"packed is .*, but the other fields ask for uint32\(1, 2, 512\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fields_agree(matrix, changes, message):
    with refuses(message):
        dataclasses.replace(matrix, **changes)


def test_index_is_int32(stack):
    with refuses(r"index is uint8\(\), but the other fields ask for int32\(\)"):
        dataclasses.replace(stack, index=jnp.zeros((), jnp.uint8))


@pytest.mark.parametrize("version", [0, 2])
def test_version(matrix, version):
    with refuses(rf"layout version \[{version}\], but this library reads version 1; quantize"):
        dataclasses.replace(matrix, version=jnp.uint32(version))


def test_versions_of_a_stack(stack):
    with refuses(r"layout version \[1, 7\], but this library reads version 1"):
        dataclasses.replace(stack, version=jnp.asarray([1, 7, 1], jnp.uint32))


@pytest.mark.parametrize("key", [(0, 1), (0, slice(None), 1), None, ...], ids=repr)
def test_indexing_stays_in_the_leading_axes(stack, key):
    with refuses(rf"index {re.escape(repr(key))} goes beyond the leading axes \(3,\)"):
        stack[key]


def test_a_matrix_has_no_axis_to_index(matrix):
    with refuses(r"index 0 goes beyond the leading axes \(\) of shape \(32, 16\)"):
        matrix[0]


def test_a_view_is_not_indexed(stack):
    with refuses("a view made by select and cannot be indexed again; index the stack"):
        stack.select(jnp.arange(3))[0]


def test_select_needs_integers(stack):
    with refuses("index has dtype float32, but a position in the stack is an integer"):
        stack.select(1.5)


def test_select_needs_a_stack(matrix, stack, weight):
    for array in (matrix, stack.select(0), quantize(weight[None], FOUR)):
        with refuses(r"shape \(.*\) is not a stack \(L, k, n\) with one leading axis; reshape"):
            array.select(0)


def test_select_from_an_empty_stack():
    empty = quantize(jnp.zeros((0, K, N)), FOUR)
    with refuses(r"the stack of shape \(0, 32, 16\) is empty, so there is nothing to select"):
        empty.select(0)


# --- quantized_matmul -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rhs", "words"),
    [(np.ones((K, N), np.float32), r"float32\[32, 16\]"), (None, "None"), ("w", "'w'")],
)
def test_rhs_is_quantized(rhs, words):
    message = f"rhs is {words}, but it must be a QuantizedArray; make one with"
    with refuses(message, TypeError):
        quantized_matmul(LHS, rhs)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.complex64])
def test_lhs_dtype(matrix, dtype):
    with refuses(f"lhs is {jnp.dtype(dtype)}, but activations are float32, bfloat16 or float16"):
        quantized_matmul(jnp.ones((2, K), dtype), matrix)


@pytest.mark.parametrize("shape", [(2, N), (), (K + 1,), (K, 1)])
def test_lhs_shape(matrix, shape):
    with refuses(rf"{re.escape(str(shape))} and rhs \(32, 16\), but the last axis .* must be k=32"):
        quantized_matmul(jnp.ones(shape), matrix)


def test_leading_axes_broadcast(stack):
    with refuses(r"the leading axes \(2,\) of lhs and \(3,\) of rhs do not broadcast; make them"):
        quantized_matmul(jnp.ones((2, 5, K)), stack)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int32])
def test_preferred_element_type(matrix, dtype):
    with refuses(rf"preferred_element_type is {jnp.dtype(dtype)}, but .* lhs \(float32\) or"):
        quantized_matmul(LHS, matrix, preferred_element_type=dtype)


@pytest.mark.parametrize(
    ("precision", "dtype", "message"),
    [
        (
            DotAlgorithmPreset.F32_F32_F32,
            "float16",
            "precision is F32_F32_F32, but it must be None or .*",
        ),
        ("highest", "float16", "precision is 'highest', but it must be None or .*; leave it out"),
        (
            DotAlgorithmPreset.F16_F16_F16,
            "bfloat16",
            "but lhs is bfloat16 .* need float16 lhs; cast",
        ),
        (DotAlgorithmPreset.F16_F16_F16, "float32", "but lhs is float32 and .*leave precision out"),
    ],
)
def test_precision(matrix, precision, dtype, message):
    with refuses(message):
        quantized_matmul(LHS.astype(jnp.dtype(dtype)), matrix, precision=precision)


@pytest.mark.parametrize("caller", ["matmul", "glu", "matmuls", "mlp", "block"])
def test_errors_name_the_function_that_was_called(weight, caller):
    """Errors of products begin with the name of the function that the user called."""
    square = quantize(weight[0, :16], FOUR)  # (16, 16)
    pair = quantize(weight[:2, :16], FOUR)
    function = {
        "matmul": lambda x: quantized_matmul(x, square),
        "glu": lambda x: jaxlowbit.quantized_glu(x, pair),
        "matmuls": lambda x: jaxlowbit.quantized_matmuls(x, (square, square)),
        "mlp": lambda x: jaxlowbit.quantized_mlp(x, gate_up=pair, down=square),
        "block": lambda x: jaxlowbit.quantized_block(
            x, x, out=square, norm=jnp.ones(16), gate_up=pair, down=square
        ),
    }[caller]
    with pytest.raises(ValueError, match=f"^quantized_{caller}: .*int32"):
        function(jnp.ones((2, 16), jnp.int32))
    if caller != "block":  # `block` has a separate error for shapes
        with pytest.raises(ValueError, match=rf"^quantized_{caller}: lhs has shape .* k=16"):
            function(jnp.ones((2, 24)))


def test_unknown_backend(matrix):
    with refuses("backend='tpu' is unknown; it is one of 'cuda', 'cpu', 'pallas', 'xla', or None"):
        quantized_matmul(LHS, matrix, backend="tpu")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("backend", "format", "dtype", "reason"),
    [
        ("cuda", MXFP8, "float32", "with float32 lhs the kernels take integers"),
        ("cuda", FOUR.replace(zero="float"), "float32", "with float32 lhs the kernels"),
    ],
)
def test_backend_that_cannot(cuda, weight, backend, format, dtype, reason):
    rhs, lhs = quantize(weight[0], format), LHS.astype(jnp.dtype(dtype))
    message = f"backend '{backend}' cannot compute this product: {reason}.*Use backend=None"
    with refuses(message):
        quantized_matmul(lhs, rhs, backend=backend)
    reasons = jaxlowbit.supported_backends(jax.ShapeDtypeStruct(lhs.shape, lhs.dtype), rhs)
    assert reasons["xla"] is None
    assert re.match(reason, reasons[backend] or "")


def test_build_without_cuda(monkeypatch, matrix):
    monkeypatch.setattr(extension, "BUILD", {"ffi_api": (0, 3), "cuda": False})
    reason = extension._unavailable("cuda")
    monkeypatch.setattr(extension, "UNAVAILABLE", {"cpu": None, "cuda": reason})
    with refuses("this build has no CUDA kernels; reinstall where nvcc is found"):
        quantized_matmul(LHS.astype(jnp.bfloat16), matrix, backend="cuda")


def test_backend_of_another_platform(cuda, matrix):
    other = "cuda" if PLATFORM == "cpu" else "cpu"
    lhs = jnp.asarray(LHS.astype(jnp.bfloat16))
    with refuses(f"backend='{other}', but this program is compiled for {PLATFORM}; use backend="):
        quantized_matmul(lhs, matrix, backend=other)
    program = jax.jit(lambda x: quantized_matmul(x, matrix, backend="cpu")).trace(lhs)
    with refuses("backend='cpu', but this program is compiled for tpu"):
        program.lower(lowering_platforms=("tpu",))


# --- scan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "length"), [(jnp.ones(4), None), (jnp.ones(3), 2), (jnp.ones(()), None)]
)
def test_scan_lengths(stack, extra, length):
    with refuses("do not name one number of steps; give every array the same leading axis"):
        jaxlowbit.scan(lambda c, x: (c, None), 0.0, (stack, extra), length=length)


@pytest.mark.parametrize("length", [-1, 2.5, np.int32(-3)])
@pytest.mark.parametrize("stacked", [True, False])
def test_scan_length_is_a_number_of_steps(stack, length, stacked):
    with refuses(
        rf"length={re.escape(repr(length))}, but it must be the number of steps, an "
        r"integer"
    ):
        jaxlowbit.scan(lambda c, x: (c, None), 0.0, stack if stacked else None, length=length)


def test_scan_over_nothing():
    with refuses(r"xs of shapes \[\] and length=None do not name one number of steps"):
        jaxlowbit.scan(lambda c, x: (c, None), 0.0, None)


def test_scan_needs_stacks_of_one_axis(weight):
    array = quantize(weight[:, None], FOUR)
    with refuses(r"shape \(3, 1, 32, 16\) is not a stack \(L, k, n\)"):
        jaxlowbit.scan(lambda c, x: (c, None), 0.0, array)
