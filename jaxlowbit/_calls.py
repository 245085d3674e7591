"""Several products in one custom call: `quantized_matmuls`, `quantized_mlp`, `quantized_block`.

What they mean, their derivatives and how XLA divides them are those of the composition of products
that each stands for. Only on one CUDA device are they lowered otherwise: to a call whose kernels
start before the one before them has ended.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax._src import dispatch  # the products ask which devices there are, as in _partition.py
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from . import _epilogue, _explicit, _partition
from ._array import QuantizedArray
from ._backends import native
from ._epilogue import Activation
from ._explicit import Sharding
from ._matmul import (
    Backend,
    allows_half_sums,
    check,
    equally_varying,
    quantized_matmul,
    unfit_gpus,
)


def quantized_matmuls(
    lhs: Any,
    rhss: Sequence[QuantizedArray],
    *,
    preferred_element_type: Any = None,
    precision: lax.DotAlgorithmPreset | None = None,
    out_sharding: Sharding | None = None,
    backend: Backend | None = None,
) -> tuple[Array, ...]:
    """Computes `lhs @ rhs` for several matrices, such as those of queries, keys and values.

    The same as `quantized_matmul` of each. On one NVIDIA GPU, and inside `jax.shard_map`, it is one
    custom call: of few rows on Hopper one kernel for up to four matrices, which may add in another
    order, else kernels that read their weights before the one before has ended. Elsewhere,
    for float32 lhs, permuted rows and other arrays than whole ones, and where it is differentiated,
    it is a call for each.

    **Arguments:**

    - `lhs`: float32, bfloat16 or float16 (..., k).
    - `rhss`: matrices (k, n_i) of one format, or views of one (`QuantizedArray.select`).
    - `preferred_element_type`, `precision`, `out_sharding`, `backend`: of every product, as of
      `quantized_matmul`.

    **Returns:** a tuple of (..., n_i).

    **Raises:** what `quantized_matmul` raises; `TypeError` if `rhss` is no sequence of quantized
    arrays, `ValueError` if it is empty, holds a stack, or formats differ.

    ```python
    q, k, v = (quantize(jnp.ones((256, n)), INT4) for n in (256, 64, 64))
    quantized_matmuls(jnp.ones((8, 256), jnp.bfloat16), (q, k, v))
    ```
    """
    if not isinstance(rhss, Sequence):
        raise TypeError(
            f"quantized_matmuls: rhss is {type(rhss).__name__}, but it is a sequence of matrices; "
            "pass a tuple of them."
        )
    rhss = _quantized("quantized_matmuls", "rhss", rhss)
    if not rhss:
        raise ValueError("quantized_matmuls: rhss is empty, but there must be a matrix; pass one.")
    for i, rhs in enumerate(rhss):
        if rhs.ndim != 2:
            raise ValueError(
                f"quantized_matmuls: rhss[{i}] has shape {rhs.shape}, but each is one matrix "
                "(k, n); use quantized_matmul for a stack."
            )
        if rhs.format != rhss[0].format:
            raise ValueError(
                f"quantized_matmuls: rhss[{i}] has {rhs.format} and rhss[0] {rhss[0].format}, but "
                "one call reads one format; use quantized_matmul for each."
            )
    options = Options(preferred_element_type, precision, out_sharding, backend)
    lhs = jnp.asarray(lhs)
    for rhs in rhss:
        options.check("quantized_matmuls", lhs, rhs)
    return run(_Matmuls, (lhs,), rhss, options)


def quantized_mlp(
    lhs: Any,
    gate_up: QuantizedArray,
    down: QuantizedArray,
    *,
    activation: Activation = "silu",
    preferred_element_type: Any = None,
    precision: lax.DotAlgorithmPreset | None = None,
    out_sharding: Sharding | None = None,
    backend: Backend | None = None,
) -> Array:
    """Computes a gated MLP, `(activation(lhs @ gate) * (lhs @ up)) @ down`.

    `quantized_glu` of gate and up, rounded to the dtype of `lhs`, times down. On one NVIDIA GPU,
    and inside `jax.shard_map`, it is one custom call; elsewhere, in the cases that
    `quantized_matmuls` names, and where it is differentiated, a call for both of gate and up and
    one for down.

    **Arguments:**

    - `lhs`: float32, bfloat16 or float16 (..., k).
    - `gate_up`: (2, k, f), gate first: `quantize(jnp.stack([gate, up]), format)`, or a view of a
      longer stack, `stack.select(jnp.array([2 * i, 2 * i + 1]))`.
    - `down`: (f, n), perhaps of another format.
    - `activation`: `"silu"`, `"gelu"` (by erf), `"gelu_tanh"` (its approximation) or `"relu"`, as
      in `jax.nn`.
    - `preferred_element_type`, `out_sharding`: of the result, as of `quantized_matmul`.
    - `precision`, `backend`: of every product.

    **Returns:** (..., n).

    **Raises:** what `quantized_matmul` raises; `TypeError` if a weight is not quantized,
    `ValueError` for weights whose shapes do not fit and for an unknown activation.

    ```python
    gate_up = quantize(jnp.ones((2, 256, 512)), INT4)
    down = quantize(jnp.ones((512, 256)), INT4)
    quantized_mlp(jnp.ones((8, 256), jnp.bfloat16), gate_up, down)
    ```
    """
    gate_up, down = _quantized("quantized_mlp", "gate_up and down", (gate_up, down))
    _epilogue.check_activation("quantized_mlp", activation)
    if gate_up.ndim != 3 or gate_up.shape[0] != 2:
        raise ValueError(
            f"quantized_mlp: gate_up has shape {gate_up.shape}, but it is two matrices (2, k, f), "
            "gate and up; stack them before they are quantized."
        )
    if down.ndim != 2 or down.k != gate_up.n:
        raise ValueError(
            f"quantized_mlp: down has shape {down.shape}, but it is one matrix (f, n) with "
            f"f={gate_up.n}, as gate_up has shape {gate_up.shape}; pass the down projection."
        )
    options = Options(preferred_element_type, precision, out_sharding, backend)
    lhs = jnp.asarray(lhs)
    options.check("quantized_mlp", lhs, gate_up)
    options.check("quantized_mlp", jax.ShapeDtypeStruct((down.k,), lhs.dtype), down)
    mlp = functools.partial(_Mlp, activation=activation)
    return run(mlp, (lhs,), (gate_up, down), options)[0]


def quantized_block(
    attended: Any,
    residual: Any,
    out: QuantizedArray,
    norm: Any,
    gate_up: QuantizedArray,
    down: QuantizedArray,
    *,
    following: tuple[Any, Sequence[QuantizedArray]] | None = None,
    activation: Activation = "silu",
    epsilon: float = 1e-5,
    backend: Backend | None = None,
) -> Any:
    """Computes a transformer's block from its attention to the attention of the next block.

    ```
    x = residual + attended @ out
    y = x + quantized_mlp(rms_norm(x) * norm, gate_up, down)
    rms_norm(y) * following[0] @ each of following[1]
    ```

    with `rms_norm(x) = x / sqrt(mean(x**2) + epsilon)` over the last axis, in float32. Every
    product, sum and normalized row is rounded to the dtype of `attended`. On one NVIDIA GPU, and
    inside `jax.shard_map`, all of it is one custom call, in which a kernel reads its weights before
    the one before it has ended; elsewhere, in the cases that `quantized_matmuls` names, for rows
    that are longer than 16384 or no multiple of 8, and where it is differentiated, it is what it
    stands for.

    **Arguments:**

    - `attended`: the result of the attention, float32, bfloat16 or float16 (..., a).
    - `residual`: of the same dtype (..., d), with the same leading axes.
    - `out`: the output projection (a, d).
    - `norm`: scales (d,) of the normalization before the MLP; of float type.
    - `gate_up`, `down`, `activation`: as of `quantized_mlp`: (2, d, f) and (f, d).
    - `following`: scales (d,) and weights (d, n_i) of the next block's first normalization and
      products, such as those of queries, keys and values; None where nothing follows.
    - `epsilon`: is added to the mean square.
    - `backend`: of every product.

    **Returns:** y (..., d); with `following` a tuple of it and of a tuple of (..., n_i).

    **Raises:** what `quantized_matmul` raises; `TypeError` if a weight is not quantized,
    `ValueError` for shapes and dtypes that do not fit and for an unknown activation.

    ```python
    gate_up = quantize(jnp.ones((2, 256, 512)), INT4)
    out, down = quantize(jnp.ones((128, 256)), INT4), quantize(jnp.ones((512, 256)), INT4)
    attended, x = jnp.ones((8, 128), jnp.bfloat16), jnp.ones((8, 256), jnp.bfloat16)
    quantized_block(attended, x, out, jnp.ones(256), gate_up, down)
    ```
    """
    following_norm, following_weights = (None, ()) if following is None else following
    weights = _quantized(
        "quantized_block",
        "out, gate_up, down and following",
        (out, gate_up, down, *following_weights),
    )
    _epilogue.check_activation("quantized_block", activation)
    attended, residual = jnp.asarray(attended), jnp.asarray(residual)
    scalar = attended.ndim == 0 or residual.ndim == 0
    if residual.dtype != attended.dtype or scalar or residual.shape[:-1] != attended.shape[:-1]:
        raise ValueError(
            f"quantized_block: residual is {residual.dtype}{list(residual.shape)} and attended "
            f"{attended.dtype}{list(attended.shape)}, but both have one dtype, an axis of features "
            "and the same axes before it; cast or reshape one."
        )
    d, f = residual.shape[-1], gate_up.n
    expected = [("out", (attended.shape[-1], d)), ("gate_up", (2, d, f)), ("down", (f, d))]
    expected += [(f"following[1][{i}]", (d, x.n)) for i, x in enumerate(weights[3:])]
    for (name, shape), weight in zip(expected, weights, strict=True):
        if weight.shape != shape:
            raise ValueError(
                f"quantized_block: {name} has shape {weight.shape}, but attended has "
                f"{attended.shape[-1]} and residual {d} features and gate_up {f} columns, so it is "
                f"{shape}; pass the projection of this block."
            )
    options = Options(backend=backend)
    for weight in weights:
        rows = jax.ShapeDtypeStruct((weight.k,), attended.dtype)
        options.check("quantized_block", rows, weight)
    norms = (norm,) if following is None else (norm, following_norm)
    norms = tuple(jnp.asarray(scales).astype(attended.dtype) for scales in norms)
    for name, scales in zip(("norm", "following[0]"), norms, strict=False):
        if scales.shape != (d,):
            raise ValueError(
                f"quantized_block: {name} has shape {scales.shape}, but there is a scale for each "
                f"of the {d} features of residual; pass ({d},)."
            )
    block = functools.partial(_Block, activation=activation, epsilon=float(epsilon))
    y, *products = run(block, (attended, residual), weights, options, norms)
    return y if following is None else (y, tuple(products))


def _quantized(caller: str, name: str, weights: Sequence[Any]) -> tuple[QuantizedArray, ...]:
    for weight in weights:
        if not isinstance(weight, QuantizedArray):
            raise TypeError(
                f"{caller}: {name} must be QuantizedArrays, but there is {type(weight).__name__}; "
                "make them with jaxlowbit.quantize."
            )
    return tuple(weights)


@dataclasses.dataclass(frozen=True)
class Options:
    """The keyword arguments of `quantized_matmul`."""

    preferred_element_type: Any = None
    precision: lax.DotAlgorithmPreset | None = None
    out_sharding: Sharding | None = None
    backend: Backend | None = None

    def __post_init__(self) -> None:
        if self.preferred_element_type is not None:
            dtype = jnp.dtype(self.preferred_element_type)
            object.__setattr__(self, "preferred_element_type", dtype)

    def check(self, caller: str, lhs: Any, rhs: QuantizedArray) -> None:
        """Refuses what `quantized_matmul` of rows of lhs refuses, in the name of the caller."""
        row = jax.ShapeDtypeStruct(lhs.shape[-1:], lhs.dtype)
        check(caller, row, rhs, self.of_native(lhs)["out_dtype"], self.backend)
        allows_half_sums(caller, lhs, self.precision)

    def of_native(self, lhs: Any) -> dict[str, Any]:
        """Those of `native.matmuls` and `native.mlp`."""
        out_dtype = self.preferred_element_type
        return {
            "out_dtype": lhs.dtype if out_dtype is None else out_dtype,
            "half_sums": self.precision is not None,
        }


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call computes, hashable. Its operands are the leaves of `rows`, `weights`, `others`.

    `rows` are arrays with the same leading axes, lhs first.
    """

    treedef: Any
    options: Options

    def products(
        self, rows: Sequence[Array], weights: Sequence[QuantizedArray], *others: Array
    ) -> tuple[Array, ...]:
        """The results, as a composition of products."""
        raise NotImplementedError

    def custom_call(
        self, rows: Sequence[Array], weights: Sequence[QuantizedArray], *others: Array
    ) -> tuple[Array, ...]:
        """The same for CUDA."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        return self.treedef.children()[0].num_leaves

    @property
    def folds(self) -> bool:
        """Whether a batch of `rows` is more rows."""
        return True

    def composition(self, *operands: Array) -> tuple[Array, ...]:
        rows, weights, others = jax.tree.unflatten(self.treedef, operands)
        return self.products(rows, weights, *others)

    def one_call(self, *operands: Array) -> tuple[Array, ...]:
        rows, weights, others = jax.tree.unflatten(self.treedef, operands)
        lhs = rows[0]
        if (
            self.options.backend not in (None, "cuda")
            or lhs.dtype == jnp.float32  # whose parts are multiplied on their own
            or math.prod(lhs.shape[:-1]) == 0
            or any(weight.permutation is not None or weight.shards != (1, 1) for weight in weights)
            or any(
                native.unsupported("cuda", lhs.dtype, weight.format, sizes=weight.padded_shape)
                for weight in weights
            )
        ):
            return self.products(rows, weights, *others)
        return self.custom_call(rows, weights, *others)


class _Matmuls(Call):
    def products(
        self, rows: Sequence[Array], weights: Sequence[QuantizedArray], *others: Array
    ) -> tuple[Array, ...]:
        options = vars(self.options)
        return tuple(quantized_matmul(rows[0], weight, **options) for weight in weights)

    def custom_call(
        self, rows: Sequence[Array], weights: Sequence[QuantizedArray], *others: Array
    ) -> tuple[Array, ...]:
        return native.matmuls(rows[0], weights, **self.options.of_native(rows[0]))


@dataclasses.dataclass(frozen=True)
class _Mlp(Call):
    activation: str

    def products(
        self, rows: Sequence[Array], weights: Sequence[QuantizedArray], *others: Array
    ) -> tuple[Array, ...]:
        gate_up, down = weights
        (lhs,) = rows
        inner = dataclasses.replace(self.options, preferred_element_type=None, out_sharding=None)
        hidden = _epilogue.gated_product(lhs, gate_up, None, self.activation, **vars(inner))
        return (quantized_matmul(hidden, down, **vars(self.options)),)

    def custom_call(
        self, rows: Sequence[Array], weights: Sequence[QuantizedArray], *others: Array
    ) -> tuple[Array, ...]:
        options = self.options.of_native(rows[0])
        return (native.mlp(rows[0], *weights, activation=self.activation, **options),)


@dataclasses.dataclass(frozen=True)
class _Block(Call):
    activation: str
    epsilon: float

    def products(
        self, rows: Sequence[Array], weights: Sequence[QuantizedArray], *others: Array
    ) -> tuple[Array, ...]:
        attended, residual = rows
        out, gate_up, down, *following = weights
        backend = self.options.backend
        options = {"preferred_element_type": None, "out_sharding": None, "backend": backend}
        x = residual + quantized_matmul(attended, out, backend=backend)
        normed = self._normalize(x, others[0])
        hidden = _epilogue.gated_product(normed, gate_up, None, self.activation, **options)
        x += quantized_matmul(hidden, down, backend=backend)
        if not following:
            return (x,)
        normed = self._normalize(x, others[1])
        return (x, *(quantized_matmul(normed, weight, backend=backend) for weight in following))

    def _normalize(self, x: Array, scales: Array) -> Array:
        wide = x.astype(jnp.float32)
        factor = lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
        scales = lax.expand_dims(scales.astype(jnp.float32), range(x.ndim - 1))
        return (wide * factor * scales).astype(x.dtype)

    def custom_call(
        self, rows: Sequence[Array], weights: Sequence[QuantizedArray], *others: Array
    ) -> tuple[Array, ...]:
        attended, residual = rows
        if native.unnormalizable(residual.shape[-1]):
            return self.products(rows, weights, *others)
        norm, following_norm = others if len(others) == 2 else (others[0], None)
        options = {"activation": self.activation, "epsilon": self.epsilon}
        return native.block(attended, residual, norm, following_norm, weights, **options)


_call_p = Primitive("quantized_call")
_call_p.multiple_results = True
_call_p.def_impl(functools.partial(xla.apply_primitive, _call_p))
dispatch.prim_requires_devices_during_lowering.add(_call_p)


def run(
    kind: Callable[..., Call],
    rows: tuple[Any, ...],
    weights: tuple[QuantizedArray, ...],
    options: Options,
    others: tuple[Array | None, ...] = (),
) -> tuple[Array, ...]:
    rows = tuple(x if x is None else jnp.asarray(x) for x in rows)
    operands, treedef = jax.tree.flatten((rows, weights, others))
    call = kind(treedef, options)
    if options.out_sharding is not None or _explicit.mesh_of(operands) is not None:
        return call.composition(*operands)
    return tuple(_call_p.bind(*equally_varying(*operands), call=call))


@_call_p.def_abstract_eval
def _abstract_eval(lhs: Any, *operands: Any, call: Call) -> list[Any]:
    def aval(out: Any) -> Any:
        sharding = lhs.sharding.update(spec=jax.P(*[None] * len(out.shape)))
        return lhs.update(shape=out.shape, dtype=out.dtype, weak_type=False, sharding=sharding)

    # Also refuses what a product refuses.
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, *operands)]
    return [aval(out) for out in jax.eval_shape(call.composition, *shapes)]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> Any:
    moving = {i: dot for i, dot in enumerate(tangents) if type(dot) is not ad.Zero}

    def composition(*values: Array) -> tuple[Array, ...]:
        operands = [*primals]
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return call.composition(*operands)

    return jax.jvp(composition, [primals[i] for i in moving], [*moving.values()])


ad.primitive_jvps[_call_p] = _jvp


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, call: Call) -> Any:
    rows = call.num_rows
    if call.folds and all(dim is None for dim in dims[rows:]):
        # One set of weights for the whole batch: the batch is more rows.
        size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
        front = [
            batching.bdim_at_front(x, dim, size)
            for x, dim in zip(operands[:rows], dims[:rows], strict=True)
        ]
        outs = _call_p.bind(*front, *operands[rows:], call=call)
    else:
        outs = jax.vmap(call.composition, in_axes=tuple(dims))(*operands)
    return outs, [0] * len(outs)


batching.primitive_batchers[_call_p] = _batch


def _register(platform: str | None) -> None:
    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, call: Call) -> Any:
        alone = platform == "cuda" and _partition.divided(ctx) is None
        one_call = alone and not unfit_gpus(ctx.module_context)
        function = call.one_call if one_call else call.composition
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)

    mlir.register_lowering(_call_p, lower, platform=platform)


for _platform in (None, "cuda"):
    _register(_platform)
