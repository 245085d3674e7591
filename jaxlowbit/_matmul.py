"""`quantized_matmul`: the public function and the rules of its primitive.

From here to the instruction that runs: `_compute` picks a backend, `_backends/native.py` makes the
custom call, `xla_ffi/cuda_handler.cc` decodes it, `cuda/dispatch.cc` selects, `cuda/qmm_*.cu`
computes.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.interpreters import ad, batching, mlir

from . import _explicit, _index, _layout, _partition, _permute
from ._array import QuantizedArray
from ._backends import definition, native, pallas
from ._explicit import Sharding
from ._primitive import Operands, quantized_matmul_p

Backend = Literal["cuda", "cpu", "pallas", "xla"]
_LHS_DTYPES = (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16"))


def quantized_matmul(
    lhs: Any,
    rhs: QuantizedArray,
    *,
    bias: Any = None,
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] | None = None,
    residual: Any = None,
    preferred_element_type: Any = None,
    precision: lax.DotAlgorithmPreset | None = None,
    out_sharding: Sharding | None = None,
    backend: Backend | None = None,
) -> Array:
    """Computes `lhs @ rhs.dequantize()` without writing the dequantized matrix to memory.

    Weights are rounded once to the dtype of `lhs`, products accumulate in float32 (see
    `precision`), the result is rounded once. Linear in `lhs` and in the scales (and float zeros) of
    `rhs`, and differentiable in both; the cotangent of `lhs` comes from the same packed weights,
    where the kernels have the transposed product (CUDA), and those of the scales dequantize.

    With an epilogue, `activation(lhs @ rhs.dequantize() + bias) + residual`: everything before the
    one rounding is float32. On one NVIDIA GPU, and inside `jax.shard_map`, the kernel computes it;
    elsewhere, in the cases that `quantized_matmuls` names, and where it is differentiated, XLA.

    **Arguments:**

    - `lhs`: float32, bfloat16 or float16 (..., k). Leading axes broadcast against those of `rhs`
      as in `jnp.matmul`.
    - `rhs`: (..., k, n).
    - `bias`: float32, bfloat16 or float16, (n,), or (..., n) with the leading axes of `rhs`.
    - `activation`: `"silu"`, `"gelu"` (by erf), `"gelu_tanh"` (its approximation) or `"relu"`, as
      in `jax.nn`.
    - `residual`: float32, bfloat16 or float16, of the shape of the result.
    - `preferred_element_type`: dtype of the result: that of `lhs` (the default) or float32.
    - `precision`: None for float32 accumulation. `jax.lax.DotAlgorithmPreset.F16_F16_F16`, for
      float16 `lhs`, allows kernels to add up to 128 products in float16, and those sums in float32:
      for GPUs on which float32 accumulation is slow. That adds an error of at most 2^-7
      `|lhs| @ |weights|` (2^-8 for 8 bits), whatever k is; where such a sum is beyond 65504, the
      result is not finite.
    - `out_sharding`: sharding of the result on a mesh with Explicit axes, needed where k is
      sharded; None for that of the rows of `lhs` and the columns of `rhs`.
    - `backend`: None for the custom call of the platform the program is compiled for where it
      supports the problem, else the definition; `"cuda"` or `"cpu"` for that custom call,
      `"pallas"` for a kernel that JAX compiles, on TPUs and GPUs (interpreted, slowly, on the CPU),
      each or an error with the reason; `"xla"` for the definition,
      `lhs @ rhs.dequantize(lhs.dtype)`.

    **Returns:** (..., n).

    **Raises:** `TypeError` if `rhs` is not quantized, `ValueError` for shapes, dtypes, shardings or
    a precision that do not fit and for a backend that cannot.

    ```python
    rhs = quantize(jnp.ones((256, 512)), INT4)
    quantized_matmul(jnp.ones((8, 256), jnp.bfloat16), rhs)
    quantized_matmul(jnp.ones((8, 256)), rhs, bias=jnp.zeros(512), activation="silu")
    ```
    """
    if not isinstance(rhs, QuantizedArray):
        raise TypeError(
            f"quantized_matmul: rhs is {type(rhs).__name__}, but it must be a QuantizedArray; "
            "make one with jaxlowbit.quantize."
        )
    lhs = jnp.asarray(lhs)
    out_dtype = jnp.dtype(lhs.dtype if preferred_element_type is None else preferred_element_type)
    check("quantized_matmul", lhs, rhs, out_dtype, backend)
    half_sums = allows_half_sums("quantized_matmul", lhs, precision)
    if bias is not None or activation is not None or residual is not None:
        from . import _fused  # built on this product

        return _fused.matmul(
            lhs,
            rhs,
            bias=bias,
            activation=activation,
            residual=residual,
            preferred_element_type=out_dtype,
            precision=precision,
            out_sharding=out_sharding,
            backend=backend,
        )
    product = functools.partial(_product, out_dtype=out_dtype, half_sums=half_sums, backend=backend)
    return _explicit.multiply(product, lhs, rhs, out_sharding)


def _product(
    lhs: Array, rhs: QuantizedArray, *, out_dtype: Any, half_sums: bool, backend: Any
) -> Array:
    k_shards, n_shards = rhs.shards
    lhs = _layout.spread(lhs, -1, k_shards, _layout.shard_unit(rhs.format.group_size))
    lead = rhs.shape[:-2]
    vector = lhs.ndim == 1
    lhs = lhs[None] if vector else lhs
    batch = jnp.broadcast_shapes(lhs.shape[:-2], lead)
    # Axes of lhs beyond those of the stack are more rows of the same weights.
    stacked, extra = range(len(lead)), len(batch) - len(lead)
    if lead:
        rhs = rhs if batch[extra:] == lead else _broadcast(rhs, batch[extra:])
        lhs = jnp.broadcast_to(lhs, (*batch, *lhs.shape[-2:]))
        lhs = jnp.moveaxis(lhs, [extra + i for i in stacked], stacked)
    permutation = rhs.permutation
    if permutation is not None:
        permutation = _permute.spread(permutation, k_shards, rhs.padded_shape[0])
    operands = Operands(
        *equally_varying(lhs, rhs.packed, rhs.scale, rhs.zero, rhs.index, permutation)
    )
    out = operands.bind(
        format=rhs.format,
        columns=rhs.padded_shape[1],
        transposed=False,
        orders=k_shards,
        out_dtype=out_dtype,
        half_sums=half_sums,
        backend=backend,
    )
    out = jnp.moveaxis(out, stacked, [extra + i for i in stacked])
    out = _layout.join(out, -1, n_shards, rhs.n)
    return out[..., 0, :] if vector else out


def supported_backends(lhs: Any, rhs: QuantizedArray) -> dict[str, str | None]:
    """Returns, for each backend, None if it can compute `lhs @ rhs`, else the reason why not.

    Computes nothing. `lhs` is anything with a dtype, such as a `jax.ShapeDtypeStruct`; whether a
    program is compiled for a platform decides which custom call it gets. `"cuda"` has a reason too
    where JAX sees GPUs of which one is none that the kernels were compiled for.

    ```python
    supported_backends(jax.ShapeDtypeStruct((1, 256), jnp.bfloat16), rhs)["cuda"]
    ```
    """
    dtype = jnp.dtype(lhs.dtype)
    reasons = {
        name: native.unsupported(name, dtype, rhs.format, sizes=rhs.padded_shape)
        for name in ("cuda", "cpu")
    }
    reasons["cuda"] = reasons["cuda"] or _unfit(_local_gpus())
    return {**reasons, "pallas": pallas.unsupported(rhs.format), "xla": None}


def _local_gpus() -> list[Any]:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:  # JAX has no such backend here
        return []


def _unfit(gpus: Sequence[Any]) -> str | None:
    capabilities = sorted({native.compute_capability(gpu) for gpu in gpus})
    return next(filter(None, map(native.unfit, capabilities)), None)


def check(
    caller: str, lhs: Any, rhs: QuantizedArray, out_dtype: Any, backend: Backend | None
) -> None:
    """Refuses what no backend, or not the one that is asked for, computes."""
    rhs.check_version()
    if lhs.dtype not in _LHS_DTYPES:
        raise ValueError(
            f"{caller}: lhs is {lhs.dtype}, but activations are float32, bfloat16 or "
            "float16; cast them."
        )
    if lhs.ndim == 0 or lhs.shape[-1] != rhs.k:
        raise ValueError(
            f"{caller}: lhs has shape {lhs.shape} and rhs {rhs.shape}, but the last axis "
            f"of lhs must be k={rhs.k}; for an (n, k) weight, quantize its transpose."
        )
    rhs.check_part()
    try:
        jnp.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    except ValueError:
        raise ValueError(
            f"{caller}: the leading axes {lhs.shape[:-2]} of lhs and {rhs.shape[:-2]} of "
            "rhs do not broadcast; make them equal or 1."
        ) from None
    if out_dtype not in (lhs.dtype, jnp.float32):
        raise ValueError(
            f"{caller}: preferred_element_type is {out_dtype}, but the result has the "
            f"dtype of lhs ({lhs.dtype}) or float32; cast the result."
        )
    if backend is None:
        return
    reasons = supported_backends(lhs, rhs)
    if backend not in reasons:
        raise ValueError(
            f"{caller}: backend={backend!r} is unknown; it is one of "
            f"{', '.join(map(repr, reasons))}, or None."
        )
    if reasons[backend] is not None:
        raise ValueError(
            f"{caller}: backend {backend!r} cannot compute this product: "
            f"{reasons[backend]}. Use backend=None to let another one run."
        )


def allows_half_sums(caller: str, lhs: Any, precision: lax.DotAlgorithmPreset | None) -> bool:
    """Whether float16 sums are allowed."""
    if precision is None:
        return False
    if precision != lax.DotAlgorithmPreset.F16_F16_F16:
        raise ValueError(
            f"{caller}: precision is {precision}, but it is None or "
            "jax.lax.DotAlgorithmPreset.F16_F16_F16; leave it out to accumulate in float32."
        )
    if lhs.dtype != jnp.float16:
        raise ValueError(
            f"{caller}: precision is {precision}, but lhs is {lhs.dtype} and float16 sums "
            "need float16 lhs; cast it, or leave precision out."
        )
    return True


def _broadcast(rhs: QuantizedArray, lead: tuple[Any, ...]) -> QuantizedArray:
    """A view of `rhs` with leading axes `lead`, to which its own broadcast."""
    if rhs.index is None:
        stack = rhs.shape[:-2]
        size = math.prod(stack)
        rhs = jax.tree.map(lambda leaf: leaf.reshape(size, *leaf.shape[len(stack) :]), rhs)
        rhs = rhs.select(jnp.arange(size, dtype=jnp.int32).reshape(stack))
    return rhs._with(index=jnp.broadcast_to(jnp.asarray(rhs.index), lead))


def _varying(array: Any) -> frozenset[Any]:
    """The mesh axes along which an array differs between the devices of a `jax.shard_map`."""
    return frozenset(jax.typeof(array).mat.varying)


def equally_varying(*operands: Array | None) -> list[Array | None]:
    """Inside `jax.shard_map`, marks operands as varying along every axis that one varies along."""
    axes = frozenset().union(*(_varying(x) for x in operands if x is not None))
    return [
        x
        if x is None or axes == _varying(x)
        else lax.pcast(x, tuple(axes - _varying(x)), to="varying")
        for x in operands
    ]


@quantized_matmul_p.def_abstract_eval
def _abstract_eval(lhs: Any, *operands: Any, columns: int, out_dtype: Any, **params: Any) -> Any:
    del operands, params
    sharding = lhs.sharding.update(spec=jax.P(*[None] * lhs.ndim))
    shape = (*lhs.shape[:-1], columns)
    return lhs.update(shape=shape, dtype=out_dtype, weak_type=False, sharding=sharding)


@_permute.of_stored_rows
def _definition(
    *operands: Any, backend: Any, half_sums: bool, indexed: bool, **params: Any
) -> Array:
    del backend, half_sums  # which allows float16 sums
    stored = Operands.of(operands, indexed=indexed, **params).stored()
    return definition.matmul(**stored, **params)


# Linear in lhs, and in scale and float zero together. Everything else is integers.
def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    values, dots = Operands.of(primals, **params), Operands.of(tangents, **params)
    out = values.bind(**params)
    terms = []
    if type(dots.lhs) is not ad.Zero:
        terms.append(values.replace(lhs=dots.lhs).bind(**params))
    float_zero = params["format"].zero == "float"
    if type(dots.scale) is not ad.Zero or (float_zero and type(dots.zero) is not ad.Zero):
        moved = values.replace(scale=ad.instantiate_zeros(dots.scale))
        if float_zero:
            moved = moved.replace(zero=ad.instantiate_zeros(dots.zero))
        terms.append(moved.bind(**params))
    if not terms:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, functools.reduce(lax.add, terms)


ad.primitive_jvps[quantized_matmul_p] = _jvp


def _transpose(cotangent: Any, *operands: Any, **params: Any) -> list[Any]:
    linear = [i for i, operand in enumerate(operands) if ad.is_undefined_primal(operand)]
    avals = [operands[i].aval for i in linear]
    if type(cotangent) is ad.Zero:
        cotangents = [ad.Zero(aval) for aval in avals]
    elif linear == [0]:
        # The same words through the transposed product, whose transpose is this one.
        turned = {
            "columns": avals[0].shape[-1],
            "transposed": not params["transposed"],
            "out_dtype": avals[0].dtype,
        }
        cotangents = [quantized_matmul_p.bind(cotangent, *operands[1:], **params | turned)]
    else:
        cotangents = _definition_transpose(cotangent, operands, linear, avals, **params)
    found = dict(zip(linear, cotangents, strict=True))
    return [found.get(i) for i in range(len(operands))]


def _definition_transpose(
    cotangent: Array, operands: Sequence[Any], linear: list[int], avals: list[Any], **params: Any
) -> Sequence[Array]:
    """Cotangents of scale and float zero: those of the definition."""

    def product(*values: Array) -> Array:
        filled = dict(zip(linear, values, strict=True))
        return _definition(*(filled.get(i, x) for i, x in enumerate(operands)), **params)

    # At zero, since scale without its float zero is affine: its linear part is transposed.
    at = [
        lax.pcast(jnp.zeros(aval.shape, aval.dtype), tuple(aval.mat.varying), to="varying")
        for aval in avals
    ]
    return jax.vjp(product, *at)[1](cotangent)


ad.primitive_transposes[quantized_matmul_p] = _transpose


def _batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Array, int]:
    values, axes = Operands.of(operands, **params), Operands.of(dims, **params)
    indexed = params["indexed"]
    mapped = {name for name, axis in axes.named().items() if axis is not None}
    if mapped == {"lhs"}:
        # One weight for the whole batch: the batch is more rows.
        axis = values.lead_ndim
        return values.replace(lhs=jnp.moveaxis(values.lhs, axes.lhs, axis)).bind(**params), axis
    if "permutation" in mapped and "packed" not in mapped:
        # Each element has its own order of the same words: only activations differ.
        bind = functools.partial(quantized_matmul_p.bind, orders=0)
        product = functools.partial(_permute.of_stored_rows(bind), **params)
        return jax.vmap(product, in_axes=tuple(dims))(*operands), 0
    size = next(getattr(values, name).shape[getattr(axes, name)] for name in mapped)
    front: dict[str, Any] = {
        name: None if value is None else batching.bdim_at_front(value, getattr(axes, name), size)
        for name, value in values.named().items()
    }
    if indexed and mapped <= {"lhs", "index"}:
        # Each element picks its own weights from one stack.
        return values.replace(lhs=front["lhs"], index=front["index"]).bind(**params), 0
    if indexed:
        # Each element has its own stack: one long stack, and positions in it.
        lhs, index = front.pop("lhs"), front.pop("index")
        depth = front["packed"].shape[1]
        start = jnp.arange(size, dtype=jnp.int32).reshape(-1, *[1] * (index.ndim - 1)) * depth
        front = jax.tree.map(lambda stacks: stacks.reshape(-1, *stacks.shape[2:]), front)
        front |= {"lhs": lhs, "index": _index.positions(index, depth) + start}
    return Operands(**front).bind(**params), 0


batching.primitive_batchers[quantized_matmul_p] = _batch


# Backends that run on some platforms only.
_PLATFORMS = {"cuda": ("cuda",), "cpu": ("cpu",), "pallas": pallas.PLATFORMS}


def _compute(
    *operands: Array, platform: str | None, unfit: str | None = None, **params: Any
) -> Array:
    """The product on `platform`, by the backend that is asked for or the best one there.

    `unfit` says why the kernels do not run on the device, if it is known and they do not.
    """
    lhs, backend, format = operands[0], params["backend"], params["format"]
    if platform not in _PLATFORMS.get(backend, (platform,)):
        raise ValueError(
            f"quantized_matmul: backend={backend!r}, but this program is compiled for "
            f"{platform or 'another platform'}; use backend=None or 'xla'."
        )
    if backend == "cuda" and unfit:
        raise ValueError(
            f"quantized_matmul: backend='cuda', but {unfit}; use backend=None or 'xla'."
        )
    if math.prod(lhs.shape[:-1]) == 0:
        return jnp.zeros((*lhs.shape[:-1], params["columns"]), params["out_dtype"])
    transposed = params["transposed"]
    n_blocks, k_blocks, _ = operands[1].shape[-3:]
    sizes = (k_blocks * _layout.ATOM, n_blocks * _layout.ATOM)
    if backend == "pallas" and not transposed:
        return _pallas(*operands, platform=platform, **params)
    if (
        platform is None
        or unfit
        or backend in ("xla", "pallas")
        or native.unsupported(platform, lhs.dtype, format, sizes=sizes, transposed=transposed)
    ):
        return _definition(*operands, **params)
    permutation = Operands.of(operands, **params).permutation
    gathers = native.gathers(platform, lhs.dtype, permutation, transposed=transposed)
    product = _native if gathers else _permute.of_stored_rows(_native)
    return product(*operands, platform=platform, **params)


@_permute.of_stored_rows
def _pallas(
    *operands: Array, backend: Any, half_sums: bool, transposed: bool, indexed: bool, **params: Any
) -> Array:
    del backend, half_sums, transposed
    stored = Operands.of(operands, indexed=indexed, format=params["format"]).stored()
    return pallas.matmul(**stored, **params)


def _native(*operands: Array, backend: Any, indexed: bool, orders: int = 0, **params: Any) -> Array:
    del backend
    ops = Operands.of(operands, format=params["format"], indexed=indexed, orders=orders)
    return native.matmul(**ops.named(), orders=orders, **params)


def unfit_gpus(context: Any) -> str | None:
    """Why the CUDA kernels do not run on the GPUs that a program is lowered for, or None.

    None too where these are not known. An exported program asks where it runs: the custom call
    refuses there.
    """
    if context.lowering_parameters.for_export or context.backend is None:
        return None
    return _unfit([gpu for gpu in context.backend.local_devices() if gpu.platform == "gpu"])


def _register(platform: str | None) -> None:
    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        divided = _partition.divided(ctx)
        if divided is None:
            unfit = unfit_gpus(ctx.module_context) if platform == "cuda" else None
            product = functools.partial(_compute, platform=platform, unfit=unfit)
        elif params["transposed"]:
            # XLA divides the definition by itself; the rules here are those of the product.
            product, divided = _definition, None
        else:
            product = _partition.matmul
        return mlir.lower_fun(product, multiple_results=False)(divided or ctx, *operands, **params)

    mlir.register_lowering(quantized_matmul_p, lower, platform=platform)


for _platform in (None, "cpu", "cuda", "tpu"):
    _register(_platform)
