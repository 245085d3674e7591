"""The custom call itself: operands that break its contract are refused, in a sentence.

Only a caller of `jax.ffi` sees these: what the package passes fits. The CPU's handler is asked; the
one of CUDA reads its operands with the same code.
"""

import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TARGET

from jaxlowbit._backends import extension
from jaxlowbit._core import layout

# A batch of 2 rows of 70 by a 70 x 40 matrix in 4 bits, with a scale for each 32 of k.
OPERANDS = {
    "lhs": ((1, 2, 70), "float32"),
    "packed": ((1, 1, 2, 512), "uint32"),
    "scale": ((1, 1, 4, 64), "float32"),
    "zero": ((0,), "uint8"),
    "index": ((0,), "int32"),
    "out": ((1, 2, 40), "float32"),
}
ATTRIBUTES = {"version": 1, "layout_version": 1, "bits": 4, "group_size": 32}


def call(without=(), **changes):
    attributes: dict[str, Any] = {
        name: np.int64(changes.pop(name, ATTRIBUTES[name])) for name in ATTRIBUTES
    }
    for name in without:
        del attributes[name]
    flags = ("transposed", "scale_sums", "half_sums")
    attributes |= {name: changes.pop(name, False) for name in flags}
    if (numbers := changes.pop("codebook", 0)) > 0:
        attributes["codebook"] = np.ones(numbers, np.float32)
    specs = {**OPERANDS, **changes}
    *operands, out = (jax.ShapeDtypeStruct(shape, jnp.dtype(t)) for shape, t in specs.values())
    with jax.default_device(jax.devices("cpu")[0]):
        zeros = [np.zeros(x.shape, x.dtype) for x in operands]
        return jax.block_until_ready(jax.ffi.ffi_call(TARGET, out)(*zeros, **attributes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero": ((1, 1, 4, 64), "uint8")},
        {"zero": ((1, 1, 4, 64), "float32")},
        {
            "index": ((1,), "int32"),
            "packed": ((3, 1, 2, 512), "uint32"),
            "scale": ((3, 1, 4, 64), "float16"),
        },
        {"lhs": ((1, 0, 70), "bfloat16"), "out": ((1, 0, 40), "bfloat16")},
        {"group_size": -1, "scale": ((1, 1, 1, 64), "bfloat16")},
        {"bits": 3, "packed": ((1, 1, 2, 384), "uint32")},
        {"codebook": 16, "version": 2},
        {"scale": ((1, 1, 4, 64), "float8_e4m3fn"), "version": 3},
        {"scale": ((1, 1, 4, 64), "float8_e8m0fnu"), "codebook": 16, "version": 3},
        {"scale": ((1, 1, 4, 64), "float8_e4m3fn"), "version": 5, "zero": ((1,), "float32")},
        {"scale": ((1, 1, 4, 64), "int8"), "version": 5, "zero": ((1, 40), "float32")},
    ],
    ids=[
        *("no zero", "integer zero", "float zero", "index", "no rows", "one group", "3 bits"),
        *("a codebook", "8-bit scales", "8-bit scales, a codebook"),
        *("a unit", "units of channels"),
    ],
)
def test_what_fits_is_computed(changes):
    out = call(**changes)
    assert not np.asarray(out).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 9}, "bits is 9 but must be from 1 to 8"),
        ({"bits": 0}, "bits is 0 but must be from 1 to 8"),
        ({"group_size": 20}, "group_size is 20 but must be a positive multiple of 16, or -1"),
        ({"group_size": 0}, "group_size is 0 but must be"),
        ({"lhs": ((1, 2, 70), "int8")}, "lhs is .* but must be f32, bf16 or f16"),
        ({"packed": ((1, 1, 2, 512), "int32")}, "packed is s32 but must be u32"),
        ({"scale": ((1, 1, 4, 64), "int32")}, "scale is s32 but must be f32, bf16, f16, f8e8m0fnu"),
        ({"index": ((1,), "uint32")}, "index is u32 but must be s32"),
        ({"out": ((1, 2, 40), "float16")}, "out is f16 but must be f32 or the type of lhs, f32"),
        ({"lhs": ((2, 70), "float32")}, r"lhs has shape \[2, 70\] but must be \[batch, m, k\]"),
        ({"out": ((2, 40), "float32")}, r"out has shape \[2, 40\] but must be \[batch, m, n\]"),
        ({"packed": ((2, 512), "uint32")}, r"packed has shape \[2, 512\] but must be \[weights"),
        ({"lhs": ((1, 2, 0), "float32")}, "n is 40 and k is 0 but both must be positive"),
        ({"out": ((1, 3, 40), "float32")}, r"out has shape \[1, 3, 40\] .* = \[1, 2, 40\]"),
        ({"packed": ((1, 1, 1, 512), "uint32")}, r"packed has shape .* = \[1, 1, 2, 512\]"),
        ({"bits": 8}, r"packed has shape \[1, 1, 2, 512\] .* words\] = \[1, 1, 2, 1024\]"),
        ({"scale": ((1, 1, 3, 64), "float32")}, r"scale has shape .* groups, 64\] = \[1, 1, 4, 64"),
        ({"group_size": -1}, r"scale has shape \[1, 1, 4, 64\] but must be .* = \[1, 1, 1, 64\]"),
        ({"zero": ((1, 1, 4, 64), "float16")}, "zero is f16 but must be u8 or the type of scale"),
        (
            {"codebook": 15, "version": 2},
            "codebook has 15 numbers but must have 16, one for each value of 4 bits",
        ),
        (
            {"codebook": 16, "version": 2, "zero": ((1, 1, 4, 64), "uint8")},
            "zero is given beside a codebook",
        ),
        (
            {
                "scale": ((1, 1, 4, 64), "float8_e4m3fn"),
                "version": 3,
                "zero": ((1, 1, 4, 64), "uint8"),
            },
            "zero beside 8-bit scales is u8 but must be f32",
        ),
        (
            {"scale": ((1, 1, 4, 64), "int8"), "version": 5, "zero": ((2,), "float32")},
            r"zero beside 8-bit scales has shape \[2\] but must be .* = \[1\]",
        ),
        (
            {"scale": ((1, 1, 4, 64), "int8"), "version": 5, "zero": ((1, 64), "float32")},
            r"zero beside 8-bit scales has shape .* or \[weights, n\] = \[1, 40\]",
        ),
        (
            {"scale": ((1, 1, 4, 64), "float8_e8m0fnu"), "version": 5, "zero": ((1,), "float32")},
            "zero is given beside 8-bit scales that have neither zeros nor, as powers of two",
        ),
        (
            {"scale": ((1, 1, 10, 64), "uint8"), "version": 4},
            "scale is u8 but the CPU kernels read no scales of two levels; expand them to f32",
        ),
        (
            {"scale": ((1, 1, 4, 64), "uint8"), "version": 4},
            r"scale has shape .* but must be .* scale_rows, 64\] = \[1, 1, 10, 64\]",
        ),
        (
            {"scale": ((1, 1, 10, 64), "uint8"), "version": 4, "group_size": 48},
            "group_size is 48 but beside scales of u8 it must be 16, 32, 64 or 128",
        ),
        ({"zero": ((1, 1, 3, 64), "uint8")}, r"zero has shape .* but must be \[0\] or \[weights"),
        (
            {"index": ((2,), "int32")},
            r"index has shape \[2\] but must be \[0\] or \[batch\] = \[1\]",
        ),
        (
            {"packed": ((3, 1, 2, 512), "uint32"), "scale": ((3, 1, 4, 64), "float32")},
            "packed holds 3 weights for a batch of 1 but without index there must be one weight",
        ),
        (
            {
                "packed": ((0, 1, 2, 512), "uint32"),
                "scale": ((0, 1, 4, 64), "float32"),
                "index": ((1,), "int32"),
            },
            "packed holds no weight but the batch of 1 needs at least one",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(map(str, value)),
)
def test_what_breaks_the_contract_is_refused(changes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"quantized_matmul: {message}.*\."):
        call(**changes)


@pytest.mark.parametrize(
    ("without", "changes", "message"),
    [
        (
            ["version", "layout_version"],
            {},
            "has the calls of version 0 .* reads version 5; export",
        ),
        ([], {"version": 6}, "has the calls of version 6 .* reads version 5; export"),
        (["layout_version"], {}, "has words packed with layout version 0 .* reads version 1"),
        ([], {"layout_version": 2}, "has words packed with layout version 2 .* reads version 1"),
        (["bits"], {}, "the call has no attribute bits"),
        ([], {"version": 2}, "the call has no attribute codebook"),
    ],
)
def test_programs_of_other_versions_are_refused(without, changes, message):
    """Attributes are read by name, so that the sentence is ours and not one of XLA's."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"quantized_matmul: .*{message}"):
        call(without, **changes)


def operands(m, k, n):
    """lhs, words, scales, no zero and no index, of 4 bits in one group."""
    rng = np.random.default_rng(m)
    shape = (1, -(-n // 64), -(-k // 64))
    words = rng.integers(0, 2**32, (*shape, 512), np.uint32)
    scale = rng.uniform(0.5, 1, (*shape[:2], 1, 64)).astype(np.float32)
    lhs = rng.normal(size=(1, m, k)).astype(np.float32)
    return lhs, words, scale, np.zeros(0, np.uint8), np.zeros(0, np.int32)


@pytest.mark.parametrize("m", [1, 5, 40])
def test_a_result_may_lie_over_an_operand(m):
    """Which XLA does where a call says that it may."""
    attributes = {
        name: np.int64(ATTRIBUTES[name]) for name in ("version", "layout_version", "bits")
    }
    attributes |= {"group_size": np.int64(-1), "transposed": False, "scale_sums": False}
    program = functools.partial(
        jax.ffi.ffi_call, TARGET, jax.ShapeDtypeStruct((1, m, 200), jnp.float32)
    )
    given = operands(m, 200, 200)
    with jax.default_device(jax.devices("cpu")[0]):
        apart, over = (
            jax.jit(
                lambda lhs, *others, aliases=aliases: program(input_output_aliases=aliases)(
                    lhs, *others, **attributes, half_sums=False
                ),
                donate_argnums=0,
            )(*map(jnp.asarray, given))
            for aliases in ({}, {0: 0})
        )
    np.testing.assert_array_equal(apart, over)


OUT_OF_MEMORY = """
import resource
import jax, numpy as np
import jax.numpy as jnp
from jaxlowbit import Format, QuantizedArray, quantized_matmul
k = 2**21
scale = jnp.ones((1, 64))
array = QuantizedArray.from_integers(jnp.ones((k, 64), jnp.int8), scale, format=Format(4))
lhs = jnp.ones((16, k))
program = jax.jit(quantized_matmul).lower(lhs, array).compile()
program(lhs, array).block_until_ready()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 2**26, -1))
try:
    program(lhs, array).block_until_ready()
except Exception as error:  # of a type that depends on the version of JAX
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    print(error)
    print(float(program(lhs, array)[0, 0]))
"""


@pytest.mark.slow
def test_no_exception_leaves_a_handler():
    """Memory runs out in the handler, which says so; the next call of the process is right."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu", MALLOC_ARENA_MAX="1")
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY], env=environment, capture_output=True, text=True
    )
    assert "quantized_matmul: the handler failed with std::bad_alloc" in done.stdout, done.stderr
    assert str(float(2**21)) in done.stdout


def test_versions_are_one_fact():
    assert extension.ffi.LAYOUT_VERSION == layout.VERSION


# --- what a program compiles as it is instantiated ------------------------------------------------

PRODUCT = [1, 2, 40, 70, 2, 32, 1, 1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.skipif(not extension.build_info()["cuda"], reason="this build has no CUDA kernels")
@pytest.mark.parametrize(
    "products",
    [
        None,
        [],
        PRODUCT,
        PRODUCT * 3,
        PRODUCT[:5],
        [-1] * 15,
        [2**62] * 15,
        np.array([1.0], np.float32),
    ],
    ids=["absent", "none", "one", "three", "too short", "negative", "too large", "floats"],
)
def test_instantiating_never_fails(products):
    """Programs of other versions describe products in other ways; without a GPU nothing happens."""
    target = f"{TARGET}_instantiated"
    cuda, cpu = (extension.ffi.targets()[platform][TARGET] for platform in ("CUDA", "cpu"))
    handlers = {"instantiate": cuda["instantiate"], "execute": cpu["execute"]}
    jax.ffi.register_ffi_target(target, handlers, platform="cpu")
    attributes: dict[str, Any] = {name: np.int64(value) for name, value in ATTRIBUTES.items()}
    attributes |= dict.fromkeys(("transposed", "scale_sums", "half_sums"), False)
    if products is not None:
        attributes["products"] = np.array(products, getattr(products, "dtype", np.int64))
    *operands, out = (jax.ShapeDtypeStruct(shape, jnp.dtype(t)) for shape, t in OPERANDS.values())
    with jax.default_device(jax.devices("cpu")[0]):
        zeros = [jnp.zeros(x.shape, x.dtype) for x in operands]
        call = jax.jit(lambda *x: jax.ffi.ffi_call(target, out)(*x, **attributes))
        assert not call(*zeros).any()
