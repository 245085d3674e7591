"""Kinds of calls with golden bits, each made from a format, rows and a dtype."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import problems as products
from combinations import WIDE_SCALES, Combination
from jax import Array, export, lax

import jaxlowbit as jl
from jaxlowbit import Format, QuantizedActivations, QuantizedArray
from jaxlowbit._backends import cuda_attend
from jaxlowbit._backends.cuda_calls import DecodeLayer
from jaxlowbit._composite.decode_block import decode_layers
from jaxlowbit._composite.normalized import normalized_matmuls, normalized_mlp


class Case(NamedTuple):
    function: Callable[..., Any]  # takes arrays; gets jitted
    operands: tuple[Any, ...]
    donated: tuple[int, ...] = ()


def combination(
    format: Format, shape: tuple[int, int, int], epilogue: str = "none", dtype: str = "bfloat16"
) -> Combination:
    """The combination with the weights of a named format."""
    m, k, n = shape
    weights = f"int{format.bits}" if format.codebook is None else format.codebook
    scales = WIDE_SCALES[0] if format.scale is None else format.scale
    zero, group = format.zero, format.group_size
    return Combination(cast(str, weights), scales, dtype, zero, group, epilogue, m, (k, n), "lhs")


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes the operands of a call from its name."""

    name: str
    platform: str
    format: Format
    m: int
    dtype: str = "bfloat16"
    k: int = 256
    n: int = 192

    @functools.cached_property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(products.seed(self.name))

    def rows(self, *shape: int) -> np.ndarray:
        values = self.rng.normal(size=shape) / math.sqrt(shape[-1])
        return values.astype(jnp.dtype(self.dtype))

    def lhs(self) -> np.ndarray:
        return self.rows(self.m, self.k)

    def vector(self, size: int) -> np.ndarray:
        return self.rng.uniform(0.5, 1.5, size).astype(jnp.dtype(self.dtype))

    def weight(
        self, stack: tuple[int, ...] = (), *, k: int = 0, n: int = 0, permuted: bool = False
    ) -> QuantizedArray:
        base = combination(self.format, (1, k or self.k, n or self.n), dtype=self.dtype).problem
        return products.weights(dataclasses.replace(base, stack=stack, permuted=permuted), self.rng)

    @property
    def options(self) -> dict[str, Any]:
        return {"backend": self.platform}


def matmuls(x: Maker) -> Case:
    rhss = [x.weight(n=n) for n in (192, 128, 70)]
    return Case(lambda a, b: jl.quantized_matmuls(a, b, **x.options), (x.lhs(), rhss))


def glu(x: Maker) -> Case:
    bias = x.rows(2, x.n)
    return Case(
        lambda a, b, c: jl.quantized_glu(a, b, bias=c, activation="gelu", **x.options),
        (x.lhs(), x.weight((2,)), bias),
    )


def mlp(x: Maker) -> Case:
    pair, down = x.weight((2,)), x.weight(k=x.n, n=x.k)
    return Case(
        lambda a, b, c: jl.quantized_mlp(a, gate_up=b, down=c, **x.options), (x.lhs(), pair, down)
    )


def block(x: Maker, **options: Any) -> Case:
    weights = x.weight(n=x.k), x.weight((2,)), x.weight(k=x.n, n=x.k)
    following = x.vector(x.k), [x.weight(), x.weight(n=64)]
    return Case(
        lambda rows, residual, norm, weights, following: jl.quantized_block(
            rows,
            residual,
            norm=norm,
            **dict(zip(("out", "gate_up", "down"), weights, strict=True)),
            following=following,
            **options,
            **x.options,
        ),
        (x.lhs(), x.lhs(), x.vector(x.k), weights, following),
    )


def rounded_block(x: Maker) -> Case:
    return block(x, lhs_qtype="int8")


def normalized_products(x: Maker) -> Case:
    weights = [x.weight(), x.weight(n=64)]
    return Case(
        lambda *operands: normalized_matmuls(*operands, epsilon=1e-5),
        (x.lhs(), x.lhs(), x.vector(x.k), weights),
    )


def normalized_gated(x: Maker) -> Case:
    weights = x.weight((2,)), x.weight(k=x.n, n=x.k)
    options: dict[str, Any] = {"activation": "silu", "epsilon": 1e-5, "dtype": jnp.float32}
    return Case(
        lambda *operands: normalized_mlp(*operands, **options),
        (x.lhs(), x.lhs(), x.vector(x.k), *weights),
    )


def rounded(x: Maker, dtype: str = "int8") -> Case:
    return Case(
        lambda a, b: jl.quantized_matmul(a, b, lhs_qtype=dtype, **x.options),
        (x.lhs(), x.weight()),
    )


def rounded_float8(x: Maker) -> Case:
    return rounded(x, "float8_e4m3fn")


def given_int8(x: Maker) -> Case:
    values = x.rng.integers(-127, 128, (x.m, x.k), np.int8)
    return _given(x, values)


def given_float8(x: Maker) -> Case:
    values = np.clip(64 * x.rng.normal(size=(x.m, x.k)), -448, 448)
    return _given(x, values.astype(jnp.float8_e4m3fn))


def _given(x: Maker, values: np.ndarray) -> Case:
    scale = x.rng.uniform(0.005, 0.015, (x.m, 1)).astype(np.float32)
    lhs = QuantizedActivations(jnp.asarray(values), jnp.asarray(scale), jnp.dtype(x.dtype))
    arrays = {"bias": x.vector(x.n)}
    return Case(
        lambda a, b, c: jl.quantized_matmul(a, b, **c, **x.options), (lhs, x.weight(), arrays)
    )


def integers(x: Maker) -> Case:
    lhs = x.rng.integers(-127, 128, (x.m, x.k), np.int8)
    return Case(jl.integer_matmul, (lhs, x.weight()))


def select(x: Maker) -> Case:
    return Case(
        lambda a, b, i: jl.quantized_matmul(a, b.select(i), **x.options),
        (x.lhs(), x.weight((3,)), np.int32(1)),
    )


def experts(x: Maker) -> Case:
    index = np.array([2, 0, 2, -1], np.int32)
    return Case(
        lambda a, b, i: jl.quantized_matmul(a, b.select(i), activation="relu", **x.options),
        (x.rows(4, x.m, x.k), x.weight((3,)), index),
    )


def batched(x: Maker) -> Case:
    operands = x.rows(3, x.m, x.k), x.weight((3,)), x.rows(3, x.m, x.n)
    return Case(lambda a, b, c: jl.quantized_matmul(a, b, residual=c, **x.options), operands)


def shared(x: Maker) -> Case:
    return Case(lambda a, b: jl.quantized_matmul(a, b, **x.options), (x.lhs(), x.weight((2, 2))))


def vmapped(x: Maker) -> Case:
    def product(a: Array, i: Array, b: QuantizedArray) -> Array:
        return jl.quantized_matmul(a, b.select(i), **x.options)

    operands = x.rows(3, x.m, x.k), np.array([1, 0, 1], np.int32), x.weight((2,))
    return Case(jax.vmap(product, (0, 0, None)), operands)


def permuted(x: Maker) -> Case:
    return Case(
        lambda a, b, c: jl.quantized_matmul(a, b, bias=c, **x.options),
        (x.lhs(), x.weight(permuted=True), x.vector(x.n)),
    )


def transposed(x: Maker) -> Case:
    like = jax.ShapeDtypeStruct((x.m, x.k), jnp.dtype(x.dtype))

    def function(rows: Array, weight: QuantizedArray) -> Any:
        product = functools.partial(jl.quantized_matmul, rhs=weight, **_gradient_options(x))
        return jax.linear_transpose(product, like)(rows)

    return Case(function, (x.rows(x.m, x.n), x.weight()))


def gradients(x: Maker) -> Case:
    """Gradients for lhs, the bias and float scales, through an activation."""
    plain = x.format.scale is None

    def function(lhs: Array, bias: Array, cotangent: Array, weight: QuantizedArray) -> Any:
        def product(lhs: Array, bias: Array, scale: Array) -> Array:
            rhs = dataclasses.replace(weight, scale=scale) if plain else weight
            options = {"activation": "silu", **_gradient_options(x)}
            return jl.quantized_matmul(lhs, rhs, bias=bias, **options)

        out, back = jax.vjp(product, lhs, bias, weight.scale if plain else jnp.zeros(0))
        return out, back(cotangent)

    return Case(function, (x.lhs(), x.vector(x.n), x.rows(x.m, x.n), x.weight()))


def _gradient_options(x: Maker) -> dict[str, Any]:
    return x.options if x.platform == "cuda" else {}  # the CPU has no transposed kernel


def remat(x: Maker) -> Case:
    def function(lhs: Array, cotangent: Array, weight: QuantizedArray) -> Any:
        product = functools.partial(jl.quantized_matmul, rhs=weight, **_gradient_options(x))
        out, back = jax.vjp(jax.checkpoint(lambda a: jnp.abs(product(a))), lhs)
        return out, back(cotangent)

    return Case(function, (x.lhs(), x.rows(x.m, x.n), x.weight()))


def float32(x: Maker) -> Case:
    lhs = (x.rng.normal(size=(x.m, x.k)) / math.sqrt(x.k)).astype(np.float32)
    return Case(
        lambda a, b: jl.quantized_matmul(a, b, activation="gelu_tanh", **x.options),
        (lhs, x.weight()),
    )


def float16_sums(x: Maker) -> Case:
    lhs = (x.rng.normal(size=(x.m, x.k)) / math.sqrt(x.k)).astype(np.float16)
    precision = lax.DotAlgorithmPreset.F16_F16_F16
    return Case(
        lambda a, b: jl.quantized_matmul(a, b, precision=precision, **x.options),
        (lhs, dataclasses.replace(x, dtype="float16").weight()),
    )


def wide_result(x: Maker) -> Case:
    return Case(
        lambda a, b: jl.quantized_matmul(a, b, preferred_element_type=jnp.float32, **x.options),
        (x.lhs(), x.weight()),
    )


def exported(x: Maker, rows: str = "") -> Case:
    """An exported program; M is symbolic if `rows` names it."""
    lhs, weight = x.lhs(), x.weight()
    shape = export.symbolic_shape(f"{rows}, {x.k}") if rows else lhs.shape
    program = export.export(
        jax.jit(lambda a, b: jl.quantized_matmul(a, b, activation="relu")),
        platforms=[x.platform],
        disabled_checks=jl.DISABLED_EXPORT_CHECKS,
    )(jax.ShapeDtypeStruct(shape, lhs.dtype), weight)
    return Case(program.call, (lhs, weight))


def symbolic(x: Maker) -> Case:
    return exported(x, "rows")


def in_place(x: Maker) -> Case:
    """The residual is donated, so the result may use its buffer."""
    return Case(
        lambda a, b, c: jl.quantized_matmul(a, b, residual=c, **x.options),
        (x.lhs(), x.weight(), x.rows(x.m, x.n)),
        donated=(2,),
    )


def scanned(x: Maker) -> Case:
    def body(rows: Array, weight: QuantizedArray) -> Any:
        return rows + jl.quantized_matmul(rows, weight, **x.options), rows[0]

    return Case(lambda rows, stack: jl.scan(body, rows, stack), (x.lhs(), x.weight((3,), n=x.k)))


def embedding(x: Maker) -> Case:
    """Columns of the weight, read like an embedding, and its dequantized matrix."""
    return Case(
        lambda a, b: (b.dequantize(jnp.float32), jl.quantized_matmul(a, b, **x.options)),
        (np.eye(x.m, x.k, 3).astype(jnp.dtype(x.dtype)), x.weight()),
    )


CALLS: dict[str, Callable[[Maker], Case]] = {
    "matmuls": matmuls,
    "glu": glu,
    "mlp": mlp,
    "block": block,
    "rounded block": rounded_block,
    "normalized matmuls": normalized_products,
    "normalized mlp": normalized_gated,
    "rounded to int8": rounded,
    "rounded to float8": rounded_float8,
    "given int8": given_int8,
    "given float8": given_float8,
    "integers": integers,
    "select": select,
    "experts": experts,
    "batched": batched,
    "shared lhs": shared,
    "vmap": vmapped,
    "permuted": permuted,
    "transposed": transposed,
    "gradients": gradients,
    "remat": remat,
    "float32": float32,
    "float16 sums": float16_sums,
    "float32 result": wide_result,
    "exported": exported,
    "symbolic": symbolic,
    "residual in place": in_place,
    "scan": scanned,
    "dequantize": embedding,
}


# --- attention of a decode step on GPUs -----------------------------------------------------------


class Attention(NamedTuple):
    batch: int = 2
    heads: int = 8
    kv_heads: int = 2
    size: int = 32
    slots: int = 300
    window: int | None = None
    pairs: str = "halves"
    norms: bool = False

    @property
    def options(self) -> cuda_attend.Options:
        scale = 1 / math.sqrt(self.size)
        return cuda_attend.Options(self.pairs, 1e-6, self.slots, self.window, scale)

    def operands(self, x: Maker) -> cuda_attend.Operands:
        heads, new = ((self.batch, count, self.size) for count in (self.heads, self.kv_heads))
        cache = (self.batch, self.slots, self.kv_heads, self.size)
        query, key, value, keys, values = (
            4 * x.rows(*shape) for shape in (heads, new, new, cache, cache)
        )
        angle = x.rng.uniform(0, 3, (self.batch, self.size // 2))
        norms = tuple(x.rng.uniform(0.5, 1.5, (2, self.size)).astype(np.float32))
        fields: dict[str, Any] = {
            "rotation": (np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)),
            "norms": norms if self.norms else None,
            "keys": keys,
            "values": values,
            "slot": np.int32(self.slots - 1),
            "position": np.full(self.batch, self.slots - 1, np.int32),
            "positions": np.tile(np.arange(self.slots, dtype=np.int32), (self.batch, 1)),
        }
        return cuda_attend.Operands(cast(Any, query), cast(Any, key), cast(Any, value), **fields)


ATTENTION = (
    Attention(),
    Attention(batch=1, window=40),
    Attention(batch=5, pairs="neighbours", norms=True),
    Attention(heads=6, kv_heads=6, size=64, slots=33),
    Attention(batch=1, heads=16, kv_heads=1, size=128, slots=2000),
    Attention(batch=3, heads=4, kv_heads=2, size=256, norms=True, window=7),
)


def attended(sizes: Attention) -> Callable[[Maker], Case]:
    return lambda x: Case(
        lambda operands: cuda_attend.attend(operands, sizes.options), (sizes.operands(x),)
    )


def attended_block(sizes: Attention, x: Maker) -> Case:
    weights = x.weight(n=x.k), x.weight((2,)), x.weight(k=x.n, n=x.k)
    following = x.vector(x.k), [x.weight(), x.weight(n=64)]

    def function(attention: Any, residual: Array, norm: Array, weights: Any, following: Any) -> Any:
        layer = DecodeLayer(attention, sizes.options, norm, following[0], (*weights, *following[1]))
        caches, y, products = decode_layers([layer], residual, activation="silu", epsilon=1e-5)
        return *caches[0], y, products

    return Case(function, (sizes.operands(x), x.lhs(), x.vector(x.k), weights, following))
