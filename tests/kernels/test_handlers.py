"""The custom call: operands that violate its contract raise a sentence.

Only direct callers of `jax.ffi` can get these errors. The tests use the CPU handler; the CUDA
handler reads its operands with the same code.
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

from jaxlowbit._backends import call, extension
from jaxlowbit._backends.extension import ffi
from jaxlowbit._core import layout

# lhs (2, 70) and a 4-bit matrix (70, 40) with groups of 32.
RECORD: dict[str, Any] = {"m": 2, "n": 40, "k": 70, "group_size": 32}
RECORD |= dict.fromkeys(("lhs", "scale", "out"), "float32")
OPERANDS: dict[str, Any] = {
    "lhs": ((1, 2, 70), "float32"),
    "packed": ((1, 1, 2, 512), "uint32"),
    "scale": ((1, 1, 4, 64), "float32"),
}
OUT = ((1, 2, 40), "float32")


def attributes(record, operands, codebook=0):
    """The attributes of a call with one product and these operands, by name."""
    places = {f"{name}_at": i + 1 for i, name in enumerate(operands)}
    found: dict[str, Any] = {"caller": "quantized_matmul", **call.VERSIONS}
    found["products"] = np.array(ffi.product(**RECORD | record, **places, out_at=-1))
    found["steps"] = np.array(ffi.step(kind="multiply"))
    if codebook > 0:
        found["numbers"] = np.ones(codebook, np.float32)
    return found


def run(record, out=OUT, codebook=0, changes=None, **others):
    """The result of a product of zeros; `others` replaces shapes and types of operands."""
    operands = OPERANDS | others
    given = attributes(record, operands, codebook) | (changes or {})
    given = {name: value for name, value in given.items() if value is not None}
    like = jax.ShapeDtypeStruct(out[0], jnp.dtype(out[1]))
    with jax.default_device(jax.devices("cpu")[0]):
        zeros = [np.zeros(shape, jnp.dtype(dtype)) for shape, dtype in operands.values()]
        return jax.block_until_ready(jax.ffi.ffi_call(TARGET, like)(*zeros, **given))


E4M3 = {"scale": ((1, 1, 4, 64), "float8_e4m3fn")}
FITS = {
    "no zero": ({}, {}),
    "integer zero": ({"zero": "integer"}, {"zero": ((1, 1, 4, 64), "uint8")}),
    "float zero": ({"zero": "float"}, {"zero": ((1, 1, 4, 64), "float32")}),
    "index": (
        {"num_weights": 3, "scale": "float16"},
        {
            "index": ((1,), "int32"),
            "packed": ((3, 1, 2, 512), "uint32"),
            "scale": ((3, 1, 4, 64), "float16"),
        },
    ),
    "symbolic rows": ({"m": -1}, {}),
    "no rows": (
        {"m": 0, "lhs": "bfloat16", "out": "bfloat16"},
        {"lhs": ((1, 0, 70), "bfloat16"), "out": ((1, 0, 40), "bfloat16")},
    ),
    "one group": ({"group_size": -1}, {"scale": ((1, 1, 1, 64), "float32")}),
    "3 bits": ({"bits": 3}, {"packed": ((1, 1, 2, 384), "uint32")}),
    "a codebook": ({"codebook": "table"}, {"codebook": 16}),
    "8-bit scales": ({"scale": "float8_e4m3fn"}, E4M3),
    "8-bit scales, a codebook": (
        {"scale": "float8_e8m0fnu", "codebook": "table"},
        {"scale": ((1, 1, 4, 64), "float8_e8m0fnu"), "codebook": 16},
    ),
    "a unit": ({"scale": "float8_e4m3fn", "units": 1}, {**E4M3, "unit": ((1,), "float32")}),
    "units of channels": (
        {"scale": "int8", "units": 40},
        {"scale": ((1, 1, 4, 64), "int8"), "unit": ((1, 40), "float32")},
    ),
}


@pytest.mark.parametrize(("record", "others"), FITS.values(), ids=FITS)
def test_supported_calls_are_computed(record, others):
    assert not np.asarray(run(record, **others)).any()


BROKEN = [
    ({"bits": 9}, {}, "bits is 9 but must be from 1 to 8"),
    ({"bits": 0}, {}, "bits is 0 but must be from 1 to 8"),
    ({"group_size": 20}, {}, "group_size is 20 but must be a positive multiple of 16, or -1"),
    ({"group_size": 0}, {}, "group_size is 0 but must be"),
    ({"lhs": "int32"}, {}, "lhs is s32 but must be f32, bf16, f16, s8 or f8e4m3fn"),
    ({"out": "float16"}, {}, "out is f16 but must be f32 or f32, or s32 with s8 lhs"),
    ({"k": 0}, {}, "n is 40 and k is 0 but both must be positive"),
    ({"units": 7}, {}, "units is 7 but must be 0, 1, n or n_blocks . 64"),
    ({"codebook": "table", "zero": "float"}, {}, "zero is given with 8-bit scales or a codebook"),
    (
        {"scale": "two_level", "group_size": 48},
        {},
        "group_size is 48 but must be 16, 32, 64 or 128",
    ),
    ({"permuted_parts": 3}, {}, "permuted_parts is 3 but must be a divisor of k"),
    ({"codebook": "table"}, {"codebook": 15}, "numbers has 15 numbers but the codebooks .* 16"),
    ({"codebook": "e2m1"}, {"codebook": 16}, "the codebook of a product is not e2m1"),
    ({}, {"lhs": ((1, 2, 70), "int8")}, "lhs is s8 but must be f32"),
    ({}, {"packed": ((1, 1, 2, 512), "int32")}, "packed is s32 but must be u32"),
    ({}, {"lhs": ((2, 70), "float32")}, r"lhs has shape \[2, 70\] but must be \[batch, m, col"),
    ({}, {"out": ((2, 40), "float32")}, r"out has shape \[2, 40\] but must be .* = \[1, 2, 40\]"),
    ({}, {"packed": ((1, 1, 1, 512), "uint32")}, r"packed has shape .* = \[1, 1, 2, 512\]"),
    ({"bits": 8}, {}, r"packed has shape \[1, 1, 2, 512\] .* words\] = \[1, 1, 2, 1024\]"),
    ({}, {"scale": ((1, 1, 3, 64), "float32")}, r"scale has shape .* 64\] = \[1, 1, 4, 64"),
    ({"zero": "float"}, {"zero": ((1, 1, 4, 64), "float16")}, "zero is f16 but must be f32"),
    ({"zero": "float"}, {}, "zero is missing but the record of the product says otherwise"),
    ({}, {"zero": ((1, 1, 4, 64), "float32")}, "zero is given but the record of the product"),
    ({"units": 1}, {"unit": ((2,), "float32")}, r"unit has shape \[2\] but must have .* = 1 el"),
    ({}, {"index": ((2,), "int32")}, r"index has shape \[2\] but must have batch = 1 elements"),
    ({}, {"index": ((1,), "uint32")}, "index is u32 but must be s32"),
    ({"num_weights": 3}, {}, "packed holds 3 weights for a batch of 1 but without index there"),
    (
        {"num_weights": 0},
        {"index": ((1,), "int32")},
        "packed holds no weight but the batch of 1 needs at least one",
    ),
    (
        {"scale": "two_level"},
        {"scale": ((1, 1, 10, 64), "uint8")},
        "scale is u8 but the CPU kernels read no scales of two levels; expand them to f32",
    ),
    ({"activation": "silu"}, {}, "the CPU kernels have no epilogue"),
]


@pytest.mark.parametrize(("record", "others", "message"), BROKEN)
def test_invalid_statistics_raise(record, others, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"quantized_matmul: {message}.*\."):
        run(record, **others)


NUMBERS = np.array(ffi.product(**RECORD, lhs_at=1, packed_at=2, scale_at=3, out_at=-1))
SCALE_AT = ffi.PRODUCT_FIELDS.index("scale_at")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": None}, f"has schema none but this library reads {ffi.SCHEMA}; export"),
        ({"schema": np.int64(1)}, f"has schema 1 but this library reads {ffi.SCHEMA}; export"),
        ({"layout_version": None}, "has layout_version none but this library reads 1; export"),
        ({"layout_version": np.int64(2)}, "has layout_version 2 but this library reads 1; export"),
        ({"steps": None}, "the call has no attribute steps"),
        ({"products": NUMBERS[:-1]}, "products and steps have .* numbers but must have multiples"),
        ({"products": NUMBERS + 100}, "is none that this library has"),
        (
            {"products": np.where(np.arange(len(NUMBERS)) == SCALE_AT, 9, NUMBERS)},
            "the call lacks a buffer: scale names none of its 3 operands and 1 results",
        ),
        (
            {"steps": np.array(ffi.step(kind="multiply", first=1))},
            "a step has the products 1 to 1 of 1",
        ),
        ({"steps": np.array(ffi.step(kind="normalize") * 2)}, "the steps of the call are none"),
    ],
)
def test_programs_of_other_versions_raise(changes, message):
    """The handler reads attributes by name, so that the error is ours rather than XLA's."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"quantized_matmul: .*{message}"):
        run({}, changes=changes)


@pytest.mark.parametrize("m", [1, 5, 40])
def test_a_result_may_overlap_an_operand(m):
    """XLA may assign the buffer of an operand that the call declares as an alias."""
    rng = np.random.default_rng(m)
    lhs = rng.normal(size=(1, m, 200)).astype(np.float32)
    words = rng.integers(0, 2**32, (1, 4, 4, 512), np.uint32)
    scale = rng.uniform(0.5, 1, (1, 4, 1, 64)).astype(np.float32)
    given = attributes({"m": m, "n": 200, "k": 200, "group_size": -1}, OPERANDS)
    program = functools.partial(
        jax.ffi.ffi_call, TARGET, jax.ShapeDtypeStruct(lhs.shape, lhs.dtype)
    )
    with jax.default_device(jax.devices("cpu")[0]):
        apart, over = (
            jax.jit(
                lambda *operands, aliases=aliases: program(input_output_aliases=aliases)(
                    *operands, **given
                ),
                donate_argnums=0,
            )(*map(jnp.asarray, (lhs, words, scale)))
            for aliases in ({}, {0: 0})
        )
    np.testing.assert_array_equal(apart, over)


OUT_OF_MEMORY = """
import resource
import jax, numpy as np
import jax.numpy as jnp
from jaxlowbit import Format, QuantizedArray, quantized_matmul
k = 2**20
scale = jnp.ones((1, 64))
array = QuantizedArray.from_integers(jnp.ones((k, 64), jnp.int8), scale, format=Format(4))
lhs = jnp.ones((16, k))
program = jax.jit(quantized_matmul).lower(lhs, array).compile()
program(lhs, array).block_until_ready()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 2**25, -1))
try:
    program(lhs, array).block_until_ready()
except Exception as error:  # of a type that depends on the version of JAX
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    print(error)
    print(float(program(lhs, array)[0, 0]))
"""


@pytest.mark.slow
def test_no_exception_leaves_a_handler():
    """The handler runs out of memory and reports it; the next call succeeds."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu", MALLOC_ARENA_MAX="1")
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY], env=environment, capture_output=True, text=True
    )
    assert "quantized_matmul: the handler failed with std::bad_alloc" in done.stdout, done.stderr
    assert str(float(2**20)) in done.stdout


def test_versions_are_one_fact():
    assert extension.ffi.LAYOUT_VERSION == layout.VERSION


# --- compilation at instantiation -----------------------------------------------------------------


@pytest.mark.skipif(not extension.BUILD["cuda"], reason="this build has no CUDA kernels")
@pytest.mark.parametrize(
    "products",
    [None, NUMBERS, np.tile(NUMBERS, 3), NUMBERS[:5], NUMBERS - 100, NUMBERS * 2**50],
    ids=["absent", "one", "three", "too short", "negative", "too large"],
)
def test_instantiating_never_fails(products):
    """Errors come from the next stage; without a GPU, instantiating does nothing."""
    target = f"{TARGET}_instantiated"
    cuda, cpu = (ffi.targets()[platform][TARGET] for platform in ("CUDA", "cpu"))
    handlers = {"instantiate": cuda["instantiate"], "execute": cpu["execute"]}
    jax.ffi.register_ffi_target(target, handlers, platform="cpu")
    given = attributes({}, OPERANDS)
    described = dict(given) if products is None else given | {"products": products}
    if products is None:
        del described["products"]
    like = jax.ShapeDtypeStruct(OUT[0], jnp.dtype(OUT[1]))
    with jax.default_device(jax.devices("cpu")[0]):
        zeros = [jnp.zeros(shape, jnp.dtype(dtype)) for shape, dtype in OPERANDS.values()]
        program = jax.jit(lambda *x: jax.ffi.ffi_call(target, like)(*x, **described))
        compiled = program.lower(*zeros).compile()
        if products is None or (len(products) == len(NUMBERS) and (products == NUMBERS).all()):
            return
        with pytest.raises(jax.errors.JaxRuntimeError, match="quantized_matmul"):
            jax.block_until_ready(compiled(*zeros))
