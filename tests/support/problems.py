"""The products that every backend must compute. Names of problems give their purpose."""

import dataclasses
import functools
import math
import zlib
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from helpers import Oracle, dequantize, pack

from jaxlowbit import Format, QuantizedArray


@dataclasses.dataclass(frozen=True)
class Problem:
    name: str
    m: int
    k: int
    n: int
    bits: int = 4
    group_size: int = 32
    zero: Literal["none", "integer", "float"] = "none"
    codebook: str | tuple[float, ...] | None = None
    narrow: Literal["e8m0", "e4m3", "int8", "two_level"] | None = None  # 8-bit scales
    dtype: str = "bfloat16"
    scale_dtype: str | None = None  # None: the dtype of lhs
    out_dtype: str | None = None
    rows: tuple[int, ...] = ()  # leading axes of lhs, before m
    stack: tuple[int, ...] = ()  # leading axes of the weights
    index: int | tuple[Any, ...] | None = None  # selection from the stack
    scale: float = 0.125  # scales are 0.5 to 1.5 times this
    lhs_scale: float = 1.0
    codes: str = "random"  # or "least", "most", "zero": one code everywhere
    permuted: bool = False  # the rows are stored in a random order
    shards: int = 1  # of k, each padded separately
    compiled: bool = False  # tests tiles and branches that only compiled kernels have

    @property
    def format(self) -> Format:
        return Format(self.bits, self.group_size, self.zero, self.codebook, self.narrow)

    @property
    def result_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.out_dtype or self.dtype)


class Operands(NamedTuple):
    lhs: np.ndarray
    rhs: QuantizedArray
    oracle: Oracle


@functools.cache
def operands(problem: Problem) -> Operands:
    """Random operands and their exact product."""
    p, rng = problem, generator(problem)
    rhs = weights(p, rng)
    if p.index is not None:
        rhs = rhs.select(np.asarray(p.index, np.int32))
    lhs = (p.lhs_scale * rng.normal(size=(*p.rows, p.m, p.k))).astype(jnp.dtype(p.dtype))
    return Operands(lhs, rhs, Oracle.of(lhs, dequantize(rhs)))


def generator(problem: Problem) -> np.random.Generator:
    return np.random.default_rng(seed(problem.name))


def seed(name: str) -> int:
    """The seed of a problem's operands. Golden hashes belong to operands drawn for "super"."""
    return zlib.crc32(name.replace("two_level", "super").encode())


def weights(problem: Problem, rng: np.random.Generator) -> QuantizedArray:
    """Random weights of a problem, without its index. The padding is random too."""
    p, format = problem, problem.format
    n_blocks, k_blocks = -(-p.n // 64), -(-p.k // 64)
    if p.shards > 1:
        unit = math.lcm(64, max(format.scale_span, 1))
        k_blocks = p.shards * -(-p.k // (p.shards * unit)) * unit // 64
    groups = 1 if p.group_size == -1 else -(-64 * k_blocks // p.group_size)
    shape = (*p.stack, n_blocks, groups, 64)
    scale_dtype = jnp.dtype(p.scale_dtype or p.dtype)
    scale = (p.scale * rng.uniform(0.5, 1.5, shape)).astype(scale_dtype)
    tensor_scale = None
    if p.narrow == "e8m0":  # includes 2^-127, which is subnormal in float32
        bits = np.where(rng.random(shape) < 0.1, 0, rng.integers(117, 127, shape))
        scale = bits.astype(np.uint8).view(format.scale_dtype)
    elif p.narrow == "e4m3":
        scale = rng.integers(0, 127, shape, np.uint8).view(format.scale_dtype)
        tensor_scale = np.asarray(p.scale / 448 * rng.uniform(0.5, 1.5, p.stack), np.float32)
    elif p.narrow == "int8":
        scale = rng.integers(0, format.max_scale + 1, shape, np.int8)
        unit = p.scale / format.max_scale * rng.uniform(0.5, 1.5, (*p.stack, p.n))
        tensor_scale = unit.astype(np.float32)
    elif p.narrow == "two_level":
        shape = (*p.stack, n_blocks, -(-64 * k_blocks // 256), 64)
        scale = two_levels(rng, shape, p.group_size, p.scale)
    zero, levels = None, 2**p.bits
    middle = levels // 2
    if p.zero == "integer":
        zero = rng.integers(0, levels, shape, np.uint8)
        if p.codes == "zero":
            zero[:] = middle
    elif p.narrow == "two_level" and p.zero == "float":
        zero = two_levels(rng, shape, p.group_size, p.scale * middle)
    elif p.zero == "float":
        zero = (p.scale * middle * rng.normal(size=shape)).astype(scale_dtype)
    size = (*p.stack, 64 * k_blocks, 64 * n_blocks)
    codes = {"least": 0, "most": levels - 1, "zero": middle}.get(p.codes)
    codes = rng.integers(0, levels, size) if codes is None else np.full(size, codes)
    if p.codebook is not None:  # replaces codes without a finite number by 0
        codes = np.where(np.isfinite(np.array(format.values))[codes], codes, 0)
    permutation = None
    if p.permuted:
        rows = np.arange(p.k, dtype=np.int32) % (p.k // p.shards)
        rows = np.broadcast_to(rows.reshape(p.shards, -1), (*p.stack, p.shards, p.k // p.shards))
        permutation = rng.permuted(rows, axis=-1).reshape(*p.stack, p.k)
    leaves: dict[str, Any] = {
        "packed": pack(codes, p.bits),
        "scale": scale,
        "zero": zero,
        "version": np.ones(p.stack, np.uint32),
        "permutation": permutation,
        "tensor_scale": tensor_scale,
    }
    array = QuantizedArray(**leaves, index=None, format=format, k=p.k, n=p.n, shards=(p.shards, 1))
    return jax.device_put(array)  # `jnp.asarray` would compile a program for each shape


def two_levels(
    rng: np.random.Generator, shape: tuple[int, ...], group_size: int, largest: float
) -> np.ndarray:
    """Bytes of super-blocks (..., n_blocks, super-blocks, 64): random 8-bit integers, and floats up
    to `largest` / 128."""
    integers = rng.integers(-128, 128, (*shape[:-1], 256 // group_size, 64)).astype(np.int8)
    floats = (largest / 128 * rng.uniform(0.5, 1, shape)).astype(np.float16)
    halves = np.moveaxis(floats[..., None].view(np.uint8), -1, -2)
    both = np.concatenate([integers.view(np.uint8), halves], axis=-2)
    return both.reshape(*shape[:-2], -1, 64)


P = Problem
INTEGER: dict[str, Any] = {"zero": "integer"}
FLOAT: dict[str, Any] = {"zero": "float"}
F16: dict[str, Any] = {"dtype": "float16"}
F32: dict[str, Any] = {"dtype": "float32"}
PERMUTED: dict[str, Any] = {"permuted": True}
COMPILED: dict[str, Any] = {"compiled": True}

# A codebook of 256 distinct numbers, so that every bit of a code matters.
_NUMBERS = tuple(np.random.default_rng(0).standard_normal(256).tolist())

PROBLEMS = (
    # Rows: around the 8 rows of an mma tile and the multiples that kernels tile by.
    P("one row: decoding", 1, 256, 192),
    P("no rows", 0, 64, 64),
    P("7 rows: one below an mma tile", 7, 128, 64, **COMPILED),
    P("8 rows: one mma tile", 8, 128, 64, **COMPILED),
    P("9 rows: one past an mma tile", 9, 128, 64, **COMPILED),
    P("16 rows: two mma tiles", 16, 128, 128),
    P("17 rows: one past two mma tiles", 17, 128, 128, **INTEGER),
    P("33 rows: one past 32", 33, 128, 64, **COMPILED),
    P("64 rows: a wgmma tile", 64, 192, 64, **INTEGER, **COMPILED),
    P("65 rows: one past 64", 65, 100, 70, group_size=64, **COMPILED),
    P("129 rows: one past 128", 129, 128, 192, **COMPILED),
    P("1000 rows: many tiles, the last one ragged", 1000, 128, 128),
    # Shapes: atoms are 64 x 64, rows of lhs are 16-byte aligned only if k is a multiple of 8.
    P("1 x 1 x 1: the smallest product", 1, 1, 1),
    P("k = 1: one product per element", 5, 1, 70),
    P("n = 1: one column", 5, 70, 1),
    P("k = 7: below a step, unaligned rows", 9, 7, 65),
    P("k = 20: below a group of 128", 3, 20, 64, group_size=128, **COMPILED),
    P("k = 33: odd rows are unaligned", 17, 33, 64, **COMPILED),
    P("k = 63: one below an atom", 8, 63, 64, **INTEGER),
    P("k = 65: one past an atom", 8, 65, 64, **INTEGER),
    P("k = 100: rows aligned to 8 bytes only", 33, 100, 128, **COMPILED),
    P("k = 201: odd rows, one row", 1, 201, 128, **COMPILED),
    P("k = 201: odd rows, many rows", 130, 201, 64, group_size=16),
    P("k = 4160: long sums, one row", 1, 4160, 64),
    P("k = 4160: long sums, 16 rows", 16, 4160, 64, group_size=128, **COMPILED),
    P("k = 3001: long odd sums", 5, 3001, 70, **INTEGER, **COMPILED),
    P("n = 63: one below an atom", 8, 64, 63),
    P("n = 65: one past an atom", 8, 64, 65, **INTEGER),
    P("n = 67: an odd row of results", 33, 64, 67, **COMPILED),
    P("n = 129: one past two atoms", 64, 128, 129, **COMPILED),
    P("n = 4097: many blocks, the last has one column", 1, 64, 4097),
    P("n = 2050: many blocks, 16 rows", 16, 128, 2050, **COMPILED),
    # Groups: every alignment with a step of 16 and an atom of 64.
    P("group 16: one step", 9, 200, 70, group_size=16),
    P("group 32: half an atom", 9, 200, 70, group_size=32, **COMPILED),
    P("group 48: straddles atoms", 9, 200, 70, group_size=48),
    P("group 64: one atom", 9, 200, 70, group_size=64),
    P("group 96: straddles atoms", 9, 200, 70, group_size=96, **COMPILED),
    P("group 128: two atoms", 9, 200, 70, group_size=128),
    P("group 256: longer than k", 9, 200, 70, group_size=256),
    # Codebooks: named ones; unordered, one-sided and repeated numbers.
    P("nf4", 9, 200, 70, group_size=64, codebook="nf4"),
    P("fp4, float16", 33, 130, 65, codebook="fp4", **F16),
    P("e2m1, float32 scales", 1, 256, 64, codebook="e2m1", scale_dtype="float32"),
    P("e4m3, per channel", 17, 200, 130, bits=8, group_size=-1, codebook="e4m3"),
    P("e5m2, float32", 5, 100, 70, bits=8, codebook="e5m2", scale=2.0**-16, **F32),
    P("a codebook of 2 bits", 9, 100, 70, bits=2, codebook=(1.5, -0.25, 1.5, 0.0)),
    P("a codebook of 5 bits", 9, 70, 70, bits=5, codebook=tuple(1.25**i for i in range(32))),
    P("a codebook of 6 bits, float32", 3, 15, 70, 6, 16, codebook=_NUMBERS[:64], **F32),
    P("a codebook of 7 bits", 17, 130, 70, 7, codebook=_NUMBERS[:128]),
    P("a codebook of 8 bits, one row", 1, 100, 70, 8, -1, codebook=_NUMBERS, **F16),
    P("nf4, permuted rows, a stack", 3, 128, 70, codebook="nf4", stack=(2,), **PERMUTED),
    P("nf4, an index", 3, 128, 70, codebook="nf4", stack=(3,), index=1),
    # 8-bit scales and tensor scales.
    P("mxfp4", 9, 200, 70, codebook="e2m1", narrow="e8m0"),
    P(
        "mxfp4, permuted rows, a stack",
        3,
        128,
        70,
        codebook="e2m1",
        narrow="e8m0",
        stack=(2,),
        **PERMUTED,
    ),
    P("mxfp8, float32", 5, 100, 70, bits=8, codebook="e4m3", narrow="e8m0", **F32),
    P("nvfp4, float16", 9, 200, 70, group_size=16, codebook="e2m1", narrow="e4m3", **F16),
    P("nvfp4, a stack", 3, 64, 70, group_size=16, codebook="e2m1", narrow="e4m3", stack=(2, 2)),
    P("nvfp4, an index", 3, 64, 70, codebook="e2m1", narrow="e4m3", stack=(3,), index=(1, -1, 7)),
    P("int8 by powers of two", 3, 100, 70, bits=8, narrow="e8m0", rows=(2,)),
    P("int4 by integers", 9, 200, 70, narrow="int8"),
    P("int3 by integers, float16", 5, 100, 70, bits=3, group_size=32, narrow="int8", **F16),
    P("int2 by integers, a stack", 3, 64, 70, bits=2, narrow="int8", stack=(2, 2)),
    P("int4 by integers, an index", 3, 64, 70, narrow="int8", stack=(3,), index=(1, -1, 7)),
    # Two-level scales of super-blocks of 256: whole, partial, and less than one in all.
    P("Q4_K, one row", 1, 1024, 192, narrow="two_level", **FLOAT),
    P("Q4_K, k = 200", 9, 200, 70, narrow="two_level", **FLOAT),
    P("Q2_K, float16", 5, 704, 70, bits=2, group_size=16, narrow="two_level", **F16, **FLOAT),
    P("Q5_K, 16 rows", 16, 512, 130, bits=5, narrow="two_level", **FLOAT),
    P("Q6_K, many rows", 130, 300, 70, bits=6, group_size=16, narrow="two_level"),
    P("Q4_K, float32", 5, 300, 70, narrow="two_level", **F32, **FLOAT),
    P("IQ4_XS", 3, 512, 70, codebook="nf4", narrow="two_level"),
    P("two levels, 8 bits, groups of 64", 7, 576, 70, bits=8, group_size=64, narrow="two_level"),
    P("two levels, 7 bits, groups of 128", 16, 768, 70, 7, 128, narrow="two_level", **FLOAT),
    P(
        "two levels, an index",
        3,
        512,
        70,
        narrow="two_level",
        stack=(3,),
        index=(1, -1, 7),
        **FLOAT,
    ),
    P("two levels, a permuted stack", 3, 64, 70, narrow="two_level", stack=(2,), **PERMUTED),
    P("two levels, k in 2 padded shards", 3, 640, 70, narrow="two_level", shards=2, **FLOAT),
    P("group -1: one per channel", 9, 200, 70, group_size=-1),
    P("group 16, one row", 1, 200, 70, group_size=16, **INTEGER, **COMPILED),
    P("group 48, one row", 1, 200, 70, group_size=48, **INTEGER, **COMPILED),
    P("group 128, 40 rows", 40, 328, 70, group_size=128, **INTEGER, **COMPILED),
    P("group -1, one row", 1, 200, 70, group_size=-1, **INTEGER, **COMPILED),
    P("8 bits, group 16", 9, 200, 70, 8, 16),
    P("8 bits, group 48", 40, 200, 70, 8, 48),
    P("8 bits, group 128", 16, 256, 70, 8, 128),
    P("8 bits, group -1", 1, 200, 70, 8, -1),
    P("8 bits, group -1, many rows", 100, 200, 70, 8, -1, **COMPILED),
    # Zeros.
    P("integer zero, group 16", 9, 200, 70, 4, 16, **INTEGER),
    P("integer zero, group -1", 33, 200, 70, 4, -1, **INTEGER),
    P("8 bits, integer zero, group 48", 9, 200, 70, 8, 48, **INTEGER),
    P("8 bits, integer zero, group -1", 40, 200, 70, 8, -1, **INTEGER),
    P("8 bits, integer zero, one row", 1, 200, 70, 8, 64, **INTEGER, **COMPILED),
    P("float zero", 9, 200, 70, 4, 64, **FLOAT),
    P("float zero, group 48, many rows", 40, 200, 70, 4, 48, **FLOAT),
    P("float zero, one row per channel", 1, 200, 70, 4, -1, **FLOAT, **COMPILED),
    P("8 bits, float zero", 9, 200, 70, 8, 64, **FLOAT),
    # Dtypes.
    P("float16", 9, 200, 70, **F16),
    P("float16, integer zero", 33, 200, 70, **F16, **INTEGER),
    P("float16, 8 bits", 17, 200, 70, 8, -1, **F16),
    P("float16, float zero", 9, 200, 70, 4, 64, **F16, **FLOAT),
    P("float32", 9, 200, 70, **F32),
    P("float32, integer zero, one row", 1, 200, 70, **F32, **INTEGER),
    P("float32, 8 bits, many rows", 100, 200, 70, 8, -1, **F32),
    P("float32, float zero", 9, 200, 70, 4, 64, **F32, **FLOAT),
    P("float32 scales of bfloat16", 9, 200, 70, scale_dtype="float32"),
    P("float16 scales of bfloat16", 9, 200, 70, scale_dtype="float16", **INTEGER),
    P("float32 scales of float16", 33, 200, 70, scale_dtype="float32", **F16),
    P("bfloat16 scales of float16", 9, 200, 70, 8, scale_dtype="bfloat16", **F16),
    P("bfloat16 scales of float32", 9, 200, 70, scale_dtype="bfloat16", **F32),
    P("float16 scales of float32", 9, 200, 70, 8, scale_dtype="float16", **F32, **INTEGER),
    P("subnormal float16 scales of bfloat16", 9, 200, 70, scale=2e-7, scale_dtype="float16"),
    P("subnormal float16 scales of float32", 1, 200, 70, **F32, scale=2e-7, scale_dtype="float16"),
    P("float32 float zeros of bfloat16", 9, 200, 70, scale_dtype="float32", **FLOAT),
    P("float32 result of bfloat16", 9, 200, 70, out_dtype="float32"),
    P("float32 result of bfloat16, odd n", 64, 200, 67, 8, out_dtype="float32", **INTEGER),
    P("float32 result of float16", 1, 200, 70, out_dtype="float32", **F16),
    # Every width: one plane or more, small and large M, one group per atom and several.
    P("1 bit, float zero", 5, 100, 70, 1, 32, **FLOAT),
    P("1 bit, integer zero", 5, 100, 70, 1, 32, **INTEGER),
    P("2 bits", 5, 100, 70, 2),
    P("2 bits, float zero", 5, 100, 70, 2, 48, **FLOAT),
    P("3 bits", 5, 100, 70, 3, **F16),
    P("3 bits, integer zero", 5, 100, 70, 3, 64, **INTEGER),
    P("5 bits", 5, 100, 70, 5, -1, **F32),
    P("6 bits, integer zero", 5, 100, 70, 6, **INTEGER),
    P("7 bits", 5, 100, 70, 7, 16),
    P("7 bits, float zero", 5, 100, 70, 7, 96, **FLOAT),
    *(
        P(f"{bits} bits, one row, group 64", 1, 200, 70, bits, 64, **FLOAT, **COMPILED)
        for bits in range(1, 9)
    ),
    *(
        P(f"{bits} bits, 2 rows, group 16", 2, 100, 70, bits, 16, **F32, **COMPILED)
        for bits in range(1, 9)
    ),
    *(
        P(f"{bits} bits, 40 rows, group 64", 40, 200, 70, bits, 64, **COMPILED)
        for bits in range(1, 9)
    ),
    *(
        P(f"{bits} bits, 17 rows, group 48", 17, 99, 70, bits, 48, **INTEGER)
        for bits in range(1, 9)
    ),
    # Values that exponent arithmetic could lose.
    P("scales near the least normal", 9, 200, 70, scale=3e-38, lhs_scale=1e20),
    P("scales near the largest", 9, 200, 70, scale=1e37, lhs_scale=1e-20),
    P("8 bits, scales near the largest", 9, 200, 70, 8, scale=5e35, lhs_scale=1e-20, **INTEGER),
    P("float32, scales near the least normal", 1, 200, 70, **F32, scale=3e-38, lhs_scale=1e20),
    P("float32, scales near the largest", 9, 200, 70, 8, **F32, scale=1e36, lhs_scale=1e-20),
    P("float16, subnormal scales", 9, 200, 70, **F16, scale=2e-7, lhs_scale=1e3),
    P("float16, weights below subnormal", 9, 99, 70, **F16, scale=1e-9, scale_dtype="float32"),
    P("float16, large scales", 9, 200, 70, **F16, scale=5000.0, lhs_scale=1e-3),
    P(
        "float16, 8 bits, large scales",
        9,
        200,
        70,
        8,
        **F16,
        scale=160.0,
        lhs_scale=1e-3,
        **INTEGER,
    ),
    P("negative scales", 9, 200, 70, scale=-0.125, **INTEGER),
    P("all weights zero", 9, 200, 70, codes="zero"),
    P("all weights zero, integer zero", 9, 200, 70, codes="zero", **INTEGER),
    P("all codes least", 9, 200, 70, codes="least"),
    P("all codes most", 9, 200, 70, codes="most", **INTEGER),
    P("8 bits, all codes least", 9, 200, 70, 8, codes="least", **INTEGER),
    P("8 bits, all codes most", 9, 200, 70, 8, codes="most"),
    # Leading axes.
    P("rows in two axes", 3, 100, 70, rows=(2, 3)),
    P("a stack, one row each", 1, 100, 70, rows=(3,), stack=(3,)),
    P("a stack, many rows each", 33, 100, 70, rows=(3,), stack=(3,), **INTEGER),
    P("a stack in two axes", 5, 100, 70, rows=(2, 3), stack=(2, 3), **INTEGER),
    P("a stack shares one lhs", 5, 100, 70, stack=(3,)),
    P("a stack and further rows", 5, 100, 70, 8, rows=(2, 3), stack=(3,)),
    P("a stack of one is broadcast", 5, 100, 70, rows=(4,), stack=(1,)),
    P("a view of one layer", 5, 100, 70, stack=(3,), index=1, **INTEGER),
    P("a view with repeats", 5, 100, 70, rows=(5,), stack=(3,), index=(2, 0, 2, 1, 2)),
    P("a view, 8 bits, one row", 1, 100, 70, 8, -1, rows=(4,), stack=(3,), index=(0, 2, 1, 1)),
    P("a view from the end", 5, 100, 70, rows=(4,), stack=(3,), index=(-1, -3, -2, 0)),
    P("a view out of range is clamped", 5, 100, 70, rows=(3,), stack=(3,), index=(-4, 3, 99)),
    P(
        "a view far out of range, one row",
        1,
        100,
        70,
        rows=(4,),
        stack=(3,),
        index=(-(2**31), 2**31 - 1, 1, -1),
    ),
    P("a view, 3 bits", 5, 100, 70, 3, rows=(2,), stack=(3,), index=(2, 0)),
    # Permuted rows, and k in several shards.
    P("permuted, one row", 1, 256, 128, group_size=128, **PERMUTED),
    P("permuted, odd k", 17, 201, 70, **PERMUTED, **INTEGER),
    P("permuted, k = 1", 3, 1, 70, **PERMUTED),
    P("permuted, 8 bits per channel", 40, 200, 70, 8, -1, **F32, **PERMUTED),
    P("permuted, 3 bits", 5, 100, 70, 3, 48, **F16, **PERMUTED, **FLOAT),
    P("permuted, rows in two axes", 3, 100, 70, rows=(2, 3), **PERMUTED),
    P("permuted, a stack", 5, 100, 70, rows=(3,), stack=(3,), **PERMUTED),
    P("permuted, a stack in two axes", 5, 100, 70, rows=(4, 2, 3), stack=(2, 3), **PERMUTED),
    P("permuted, a stack is broadcast", 5, 100, 70, rows=(2, 3), stack=(2, 1), **PERMUTED),
    P("permuted, a view of one layer", 5, 100, 70, stack=(3,), index=1, **PERMUTED),
    P("permuted, a view", 5, 100, 70, rows=(4,), stack=(3,), index=(2, -1, 99, 2), **PERMUTED),
    P("k in 2 padded shards", 9, 200, 70, shards=2),
    P("permuted, k in 2 shards", 9, 256, 70, shards=2, **PERMUTED),
    P("permuted, k in 4 padded shards", 9, 200, 70, 4, 48, shards=4, **PERMUTED, **INTEGER),
    P("permuted, a stack of shards", 2, 200, 70, 8, rows=(3,), stack=(3,), shards=2, **PERMUTED),
    P("everything odd at once", 17, 203, 75, 4, 48, **F16, **INTEGER, scale_dtype="float32"),
)
