"""Problems with golden results: refactoring must preserve their bits (`tools/golden.py`).

`problems(platform)` lists them: products by each kernel, products by forced choices, the
combinations and problems of other tests, and every kind of call by every named format. Operands
are made with NumPy. H100 and H200 choose the same kernel for each product here.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import combinations
import gpu_problems
import jax
import jax.numpy as jnp
import numpy as np
import problems as products
from combinations import ACTIVATIONS, COMBINATIONS, QUANTIZED, Combination
from golden_calls import (
    ATTENTION,
    CALLS,
    Attention,
    Case,
    Maker,
    attended,
    attended_block,
    combination,
)

import jaxlowbit as jl
from jaxlowbit import INT4, INT8, UINT4, UINT8, Format
from jaxlowbit._backends import registry, selection
from jaxlowbit._backends.selection import Choice, DeviceFacts, Product
from jaxlowbit._core.format_table import NAMED

EPILOGUES: tuple[str, ...] = combinations.DIMENSIONS["epilogue"]
ERROR = "!"  # prefix of the result of a problem that raises


@dataclasses.dataclass(frozen=True)
class Golden:
    name: str
    call: str
    format: Format | None  # None for attention
    case: Callable[[], Case]
    kernel: str | None = None  # the CUDA kernel selected on Hopper
    epilogue: str = "none"
    forced: tuple[Product, Choice] | None = None  # entry of a tuned table that forces the kernel

    def compute(self) -> str:
        """Hashes of operands and results, `operands:results`.

        **Raises:** `AssertionError` if a second run gives different bits.
        """
        function, operands, donated = self.case()
        jitted = jax.jit(function, donate_argnums=donated)
        given = digest(operands, 6)
        first, second = (digest(jitted(*jax.device_put(operands)), 12) for _ in range(2))
        assert first == second, f"two runs differ, {first} and {second}"
        return f"{given}:{first}"


def digest(tree: Any, size: int) -> str:
    """A hash of the bits, shapes and dtypes of arrays, in hexadecimal."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:size]


def problems(platform: str) -> tuple[Golden, ...]:
    """The problems for "cpu" or "cuda"."""
    forced = _forced() if platform == "cuda" else ()
    return tuple(
        [
            *_kernels(platform),
            *forced,
            *_combinations(platform),
            *_products(platform),
            *_calls(platform),
            *(_attention() if platform == "cuda" else ()),
        ]
    )


def force(problems: tuple[Golden, ...], device: DeviceFacts) -> dict[str, str]:
    """Installs the tuned table that forces choices, before the first product runs on `device`.

    **Returns:** the names of problems whose choice cannot run there, with the reasons.
    """
    named = {problem.name: problem.forced for problem in problems if problem.forced is not None}
    entries = [(product, choice, product.m) for product, choice in named.values()]
    found = zip(named, selection.set_tuned(device, entries), strict=True)
    return {name: reason for name, reason in found if reason}


def is_computed(platform: str, dtype: str, format: Format) -> bool:
    return registry.unsupported(platform, jnp.dtype(dtype), format, built=False) is None


# --- products by each kernel ----------------------------------------------------------------------

# (m, k, n) by kernel, selected on Hopper for every named format. Rows of 259 elements are
# unaligned, so only qmm_sm80 supports them.
SHAPES = {
    "qmm_sm80": (9, 259, 193),
    "qmm_sm90": (200, 512, 320),
    "qmm_sm90_stream": (5, 1024, 1024),
}
TRANSPOSED = "qmm_sm80_transposed"
KERNELS = (*SHAPES, TRANSPOSED)


def _kernels(platform: str) -> Iterator[Golden]:
    """Every kernel with every named format and epilogue; on CPUs the shapes alternate."""
    for i, (name, epilogue) in enumerate(itertools.product(NAMED, EPILOGUES)):
        for j, kernel in enumerate(SHAPES):
            if platform == "cuda" or j == i % len(SHAPES):
                dtype = ("bfloat16", "float16")[(i + j) % 4 == 3]
                chosen = combination(NAMED[name], SHAPES[kernel], epilogue, dtype)
                yield _combined(f"{kernel}, {name}", chosen, platform, kernel)


def _combined(title: str, chosen: Combination, platform: str, kernel: str | None = None) -> Golden:
    def case() -> Case:
        lhs, rhs, epilogue, *_ = combinations.operands(chosen)
        arrays = {name: x for name, x in epilogue.items() if name != "activation"}
        dtype = jnp.dtype("float32") if chosen.result == "float32" else None
        product = jl.quantized_glu if chosen.gated else jl.quantized_matmul
        static = {name: x for name, x in epilogue.items() if name == "activation"}
        static |= {"preferred_element_type": dtype, "backend": platform}
        return Case(
            lambda lhs, rhs, arrays: product(lhs, rhs, **arrays, **static), (lhs, rhs, arrays)
        )

    format, call = chosen.problem.format, "activations" if chosen.lhs in QUANTIZED else "matmul"
    call = "glu" if chosen.gated else call
    return Golden(f"{title}: {chosen.name}", call, format, case, kernel, chosen.epilogue)


def _combinations(platform: str) -> Iterator[Golden]:
    for chosen in COMBINATIONS:
        if is_computed(platform, chosen.dtype, chosen.problem.format):
            yield _combined("combination", chosen, platform)


def _products(platform: str) -> Iterator[Golden]:
    for problem in products.PROBLEMS:
        if is_computed(platform, problem.dtype, problem.format):
            yield Golden(
                f"problem: {problem.name}",
                "matmul",
                problem.format,
                functools.partial(_product, problem, platform),
            )


def _product(problem: products.Problem, platform: str) -> Case:
    lhs, rhs, _ = products.operands(problem)
    options = {"preferred_element_type": problem.out_dtype, "backend": platform}
    return Case(lambda lhs, rhs: jl.quantized_matmul(lhs, rhs, **options), (lhs, rhs))


# --- forced choices -------------------------------------------------------------------------------


def _choices(format: Format) -> Iterator[tuple[int, Choice]]:
    """M and a choice for it: every tile for 4 and 8 bits, and some for other widths."""
    whole = format in (INT4, UINT4, INT8)
    for block_m in (8, 16, 32, 64):
        for split_k in (1, 3) if whole else (2,):
            yield block_m + 1, Choice("qmm_sm80", block_m, split_k, 0, 0, 1)
    # Rows of the tiles in `cuda/kernels/sm90/plan.h`; the first seven are prebuilt.
    tiles = (256, 128, 64, 64, 32, 128, 128, 48, 80, 96, 96, 112, 144, 160, 192, 224, 80, 160)
    for tile, block_m in enumerate(tiles if whole else tiles[:7]):
        m = max(block_m + 5, 40)
        yield m, Choice("qmm_sm90", block_m, 1, 0, tile, 1)
        if whole or tile == 1:
            yield m, Choice("qmm_sm90", block_m, 1, 0, tile, 2)
    yield 100, Choice("qmm_sm90", 64, 2, 0, 2, 1)
    yield 100, Choice("qmm_sm90", 64, 3, 0, 3, 1)
    for m, block_m in ((3, 8), (13, 16), (30, 32))[: 3 if format.bits <= 4 else 2]:
        for ctas in (1, 2, 4):
            for slices in (4, 8, 12) if whole else (8,):
                yield m, Choice("qmm_sm90_stream", block_m, ctas, slices, 0, 1)


_FORCED_K = 64 * 13  # no other problem has this k, so the table affects no other
_FORCED = (
    *(INT4, UINT4, INT8, UINT8, Format(4), Format(4, 32), Format(4, 64, "float")),
    *(Format(bits, 128) for bits in (2, 3, 5, 6, 7)),
    *(Format(1, 128, "float"), Format(8, 128, "float"), Format(3, 64, "integer")),
)


def _forced() -> Iterator[Golden]:
    """Choices from a tuned table, which single products with integers look up by n."""
    epilogues = [name for name in EPILOGUES if name != "gated"]
    number = 0
    for format in _FORCED:
        for atoms, (m, choice) in enumerate(_choices(format), 3):
            dtype = ("bfloat16", "float16")[number % 5 == 4]
            epilogue = epilogues[number % len(epilogues)]
            n = 64 * atoms - number % 3 * 7
            product = Product(m, n, _FORCED_K, format, dtype, dtype)
            numbers = " ".join(map(str, choice[1:]))
            yield Golden(
                f"forced {choice.kernel} {numbers}: {m} x {_FORCED_K} x {n}, {dtype} by "
                f"{selection_name(format)}, {epilogue}",
                "matmul",
                format,
                functools.partial(_forced_case, product, epilogue),
                choice.kernel,
                epilogue,
                (product, choice),
            )
            number += 1


def selection_name(format: Format) -> str:
    group = "channel" if format.group_size == -1 else f"g{format.group_size}"
    return f"int{format.bits} {group} zero {format.zero}"


def _forced_case(product: Product, epilogue: str) -> Case:
    m, n, k, format, dtype, _ = product
    rng = np.random.default_rng(m + n)
    rhs = gpu_problems.uniform(k, n, format, dtype=dtype, seed=m + n)
    lhs = rng.normal(size=(m, k)).astype(jnp.dtype(dtype))
    arrays: dict[str, Any] = {}
    if epilogue in ("bias", "all"):
        arrays["bias"] = rng.normal(size=n).astype(jnp.dtype(dtype))
    if epilogue in ("residual", "all"):
        arrays["residual"] = rng.normal(size=(m, n)).astype(jnp.dtype(dtype))
    activation = epilogue if epilogue in ACTIVATIONS else "silu" if epilogue == "all" else None
    static: dict[str, Any] = {"activation": activation, "backend": "cuda"}
    return Case(
        lambda lhs, rhs, arrays: jl.quantized_matmul(lhs, rhs, **arrays, **static),
        (lhs, rhs, arrays),
    )


# --- other kinds of calls -------------------------------------------------------------------------

_ROWS = (1, 16, 40, 200, 7)
# 8-bit kernels are used from M = 192, or from M = 32 with one accumulator per channel.
_ROWS_IN_8_BITS = (200, 45, 320, 193, 5)
IN_8_BITS = ("rounded", "given", "integers")
ONE_SUM = (*(Format(bits) for bits in range(2, 9)), Format(4, -1, "integer"), NAMED["int4-int8"])


def _calls(platform: str) -> Iterator[Golden]:
    """Every kind with every format that it supports; values of M and dtypes alternate."""
    for number, (call, case) in enumerate(CALLS.items()):
        formats = NAMED
        if call == "integers":
            formats = {f"{selection_name(x)} {x.scale}": x for x in ONE_SUM}
        rows = _ROWS_IN_8_BITS if call.startswith(IN_8_BITS) else _ROWS
        for i, (title, format) in enumerate(formats.items()):
            if call == "float32" and not is_computed(platform, "float32", format):
                continue
            turn = number + i
            dtype = "float16" if turn % 4 == 3 and format.scale is None else "bfloat16"
            m = rows[turn % len(rows)]
            kernel = TRANSPOSED if call == "transposed" else None
            name = f"{call}: {title}, {m} rows of {dtype}"
            made = functools.partial(_made, case, name, platform, format, m, dtype)
            yield Golden(name, call, format, made, kernel)


def _made(case: Callable[[Maker], Case], *fields: Any) -> Case:
    return case(Maker(*fields))


def _attention() -> Iterator[Golden]:
    """Attention by itself, and with the subsequent block in every named format."""
    for sizes, dtype in itertools.product(ATTENTION, ("bfloat16", "float16")):
        name = f"attend: {' '.join(map(str, sizes))} in {dtype}"
        made = functools.partial(_made, attended(sizes), name, "cuda", INT4, 1, dtype)
        yield Golden(name, "attend", None, made)
    for i, (title, format) in enumerate(NAMED.items()):
        sizes = Attention(batch=(1, 2, 5, 9)[i % 4], window=(None, 50)[i % 2])
        dtype = "float16" if i % 4 == 3 and format.scale is None else "bfloat16"
        name = f"decode block: {title}, {sizes.batch} rows of {dtype}"
        case = functools.partial(attended_block, sizes)
        made = functools.partial(_made, case, name, "cuda", format, sizes.batch, dtype)
        yield Golden(name, "decode block", format, made)
