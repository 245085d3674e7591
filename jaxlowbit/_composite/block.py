"""`quantized_block`: a transformer's block from its attention to the next block's attention."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .._backends import call, cpu, cuda_calls
from .._backends.target import Target
from .._core import checks
from .._core.activations import value_dtype
from .._core.array import QuantizedArray
from .._matmul import epilogue, quantized_lhs
from .._matmul.call import Call, Rows, Weights, first, run
from .._matmul.epilogue import Activation
from .._matmul.options import Backend, Options, check_all_quantized
from .._matmul.product import multiply
from .rms_norm import rms_norm


def quantized_block(
    attended: Any,
    residual: Any,
    *,
    out: QuantizedArray,
    norm: Any,
    gate_up: QuantizedArray,
    down: QuantizedArray,
    following: tuple[Any, Sequence[QuantizedArray]] | None = None,
    activation: Activation = "silu",
    epsilon: float = 1e-5,
    lhs_qtype: Any = None,
    backend: Backend | None = None,
) -> Any:
    """Computes a transformer's block from its attention to the attention of the next block.

    ```
    x = residual + attended @ out
    y = x + quantized_mlp(rms_norm(x) * norm, gate_up=gate_up, down=down)
    rms_norm(y) * following[0] @ each of following[1]
    ```

    with `rms_norm(x) = x / sqrt(mean(x**2) + epsilon)` over the last axis, in float32. Every
    product, sum and normalized row is rounded to the dtype of `attended`. On one NVIDIA GPU, and
    inside `jax.shard_map`, this is one custom call. Each kernel reads its weights before the
    previous one has ended. With an `lhs_qtype`, only on Hopper, for bfloat16, if all products
    run in 8 bits (`docs/activations.md`). On a CPU it is also one custom call, for every
    dtype, if no rows are rounded. Otherwise it is a composition of separate products: elsewhere, in
    the cases listed in `quantized_matmuls`, for rows that are longer than 16384 or not a multiple
    of 8, and when differentiating.

    **Arguments:**

    - `attended`: the result of the attention, float32, bfloat16 or float16 (..., a).
    - `residual`: (..., d), with the dtype and the leading axes of `attended`.
    - `out`: the output projection (a, d).
    - `norm`: scales (d,) of the normalization before the MLP, float32 or in the dtype of
      `attended`; other dtypes are rounded to the latter.
    - `gate_up`, `down`, `activation`: as for `quantized_mlp`: (2, d, f) and (f, d).
    - `following`: scales (d,) and weights (d, n_i) of the next block's first normalization and
      products, such as queries, keys and values; None if nothing follows.
    - `epsilon`: a constant added to the mean square.
    - `lhs_qtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, to round each row to before
      every product, with a scale per row (`quantize_activations`). Derivatives use the
      straight-through estimator.
    - `backend`: the backend of every product.

    **Returns:** y (..., d); with `following`, a tuple of y and a tuple of (..., n_i).

    **Raises:** as `quantized_matmul`; `TypeError` if a weight is not quantized, `ValueError` for
    invalid shapes and dtypes and for an unknown activation.

    ```python
    gate_up = quantize(jnp.ones((2, 256, 512)), INT4)
    out, down = quantize(jnp.ones((128, 256)), INT4), quantize(jnp.ones((512, 256)), INT4)
    attended, x = jnp.ones((8, 128), jnp.bfloat16), jnp.ones((8, 256), jnp.bfloat16)
    norm = jnp.ones(256)
    quantized_block(attended, x, out=out, norm=norm, gate_up=gate_up, down=down)
    ```
    """
    caller = "quantized_block"
    if following is not None and not _is_pair(following):
        raise TypeError(
            f"{caller}: following is {checks.brief(following)}, but it must be a pair of scales "
            "and of a sequence of weights, or None."
        )
    following_norm, following_weights = (None, ()) if following is None else following
    weights = (out, gate_up, down, *following_weights)
    checks.quantized(caller, "out", out, QuantizedArray)
    checks.quantized(caller, "gate_up", gate_up, QuantizedArray)
    checks.quantized(caller, "down", down, QuantizedArray)
    check_all_quantized(caller, "following[1]", following_weights)
    epilogue.check_activation(caller, activation)
    epsilon = checks.positive(caller, "epsilon", epsilon)
    attended = checks.array(caller, "attended", attended, "floats (..., a)")
    residual = checks.array(caller, "residual", residual, "floats (..., d)")
    _check_shapes(attended, residual, weights)
    options = Options.checked(caller, backend=backend)
    if lhs_qtype is not None:
        lhs_qtype = value_dtype(caller, "lhs_qtype", lhs_qtype)
    for weight in weights:
        dtype = attended.dtype if lhs_qtype is None else quantized_lhs.EXACT
        rows = jax.ShapeDtypeStruct((weight.k,), dtype)
        options.check("quantized_block", rows, weight)
    given = {"norm": norm} | ({} if following is None else {"following[0]": following_norm})
    arrays = {name: checks.array(caller, name, x, "floats (d,)") for name, x in given.items()}
    norms = tuple(
        x if x.dtype == jnp.float32 else x.astype(attended.dtype) for x in arrays.values()
    )
    for name, scales in arrays.items():
        if scales.shape != residual.shape[-1:]:
            raise ValueError(
                f"quantized_block: {name} has shape {scales.shape}, but there is a scale for each "
                f"of the {residual.shape[-1]} features of residual; pass {residual.shape[-1:]}."
            )
    fields = {"activation": activation, "epsilon": epsilon, "dtype": lhs_qtype}
    y, *products = run(_Block, (attended, residual), weights, options, norms, **fields)
    return y if following is None else (y, tuple(products))


def _check_shapes(attended: Array, residual: Array, weights: Sequence[QuantizedArray]) -> None:
    """Raises if rows or weights do not fit each other."""
    scalar = attended.ndim == 0 or residual.ndim == 0
    if residual.dtype != attended.dtype or scalar or residual.shape[:-1] != attended.shape[:-1]:
        raise ValueError(
            f"quantized_block: residual is {residual.dtype}{list(residual.shape)} and attended "
            f"{attended.dtype}{list(attended.shape)}, but both have one dtype, an axis of features "
            "and the same axes before it; cast or reshape one."
        )
    _, gate_up, _, *following = weights
    d, f = residual.shape[-1], gate_up.n
    expected = [("out", (attended.shape[-1], d)), ("gate_up", (2, d, f)), ("down", (f, d))]
    expected += [(f"following[1][{i}]", (d, x.n)) for i, x in enumerate(following)]
    for (name, shape), weight in zip(expected, weights, strict=True):
        if weight.shape != shape:
            raise ValueError(
                f"quantized_block: {name} has shape {weight.shape}, but attended has "
                f"{attended.shape[-1]} and residual {d} features and gate_up {f} columns, so it is "
                f"{shape}; pass the projection of this block."
            )


def _is_pair(following: Any) -> bool:
    match following:
        case (_, [*_]):
            return True
        case _:
            return False


@dataclasses.dataclass(frozen=True)
class _Block(Call):
    activation: str
    epsilon: float
    dtype: Any  # 8-bit dtype of rows before each product; None: not rounded

    def composition(self, *operands: Array) -> tuple[Array, ...]:
        (attended, residual), (out, gate_up, down, *following), norms = self.named(operands)
        x = residual + self._multiply(attended, out)
        hidden = self._hidden(rms_norm(x, norms[0], self.epsilon), gate_up)
        x += self._multiply(hidden, down)
        if not following:
            return (x,)
        normed = rms_norm(x, norms[1], self.epsilon)
        return (x, *(self._multiply(normed, weight) for weight in following))

    def _multiply(self, x: Array, weight: QuantizedArray, out_dtype: Any = None) -> Array:
        if self.dtype is None:
            return multiply(x, weight, self.options)
        options = self.options.replace(preferred_element_type=out_dtype or x.dtype)
        return quantized_lhs.straight_through(options, self.dtype, x, weight, None)

    def _hidden(self, x: Array, gate_up: QuantizedArray) -> Array:
        if self.dtype is None:
            return epilogue.gated_product(x, gate_up, None, self.activation, self.options)
        gate, up = (self._multiply(x, gate_up.select(i), jnp.dtype("float32")) for i in range(2))
        return epilogue.gated(gate, up, self.activation, x.dtype)

    @property
    def custom_calls(self) -> Mapping[str, Callable[..., tuple[Array, ...]]]:
        cuda = functools.partial(cuda_calls.block, values=self.dtype)
        calls = {"cuda": cuda} if self.dtype else {"cuda": cuda, "cpu": cpu.block}
        return {name: functools.partial(self._one_call, calls[name]) for name in calls}

    def unsupported(self, rows: Rows, weights: Weights, target: Target) -> str | None:
        attended, residual = rows
        if reason := cuda_calls.unsupported_norm(residual.shape[-1]):
            return reason
        if self.dtype is None:
            return super().unsupported(rows, weights, target)
        if attended.dtype != jnp.bfloat16:
            return "the call rounds rows of bfloat16"
        if any(weight.k % call.INTERLEAVED != 0 for weight in weights):
            return f"the call rounds rows of a multiple of {call.INTERLEAVED}"
        values = [jax.ShapeDtypeStruct((*attended.shape[:-1], x.k), self.dtype) for x in weights]
        return first(
            quantized_lhs.slow_bytes(x, weight, self.options.backend, target, pair=i == 1)
            for i, (x, weight) in enumerate(zip(values, weights, strict=True))
        )

    def _one_call(
        self, block: Callable[..., tuple[Array, ...]], *operands: Array
    ) -> tuple[Array, ...]:
        (attended, residual), weights, norms = self.named(operands)
        norm, following_norm = norms if len(norms) == 2 else (norms[0], None)
        options = {"activation": self.activation, "epsilon": self.epsilon}
        return block(attended, residual, norm, following_norm, weights, **options)
