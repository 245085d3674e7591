"""`quantized_matmuls`: one lhs times several matrices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import Array, lax

from .._backends import cuda_calls
from .._core import checks
from .._core.array import QuantizedArray
from .._core.explicit import Sharding
from .._matmul.call import Call, run
from .._matmul.options import Backend, Options, check_all_quantized
from .._matmul.product import multiply


def quantized_matmuls(
    lhs: Any,
    rhss: Sequence[QuantizedArray],
    *,
    preferred_element_type: Any = None,
    precision: lax.DotAlgorithmPreset | None = None,
    out_sharding: Sharding | None = None,
    backend: Backend | None = None,
) -> tuple[Array, ...]:
    """Computes `lhs @ rhs` for several matrices, such as queries, keys and values.

    The results are the same as by `quantized_matmul`. On one NVIDIA GPU, and inside
    `jax.shard_map`, all are one custom call: for small M on Hopper, with one kernel for up to four
    matrices, which may add in another order, otherwise with kernels that read their weights before
    the previous one has ended. Elsewhere, for float32 lhs, permuted rows and arrays that are not
    whole, and when differentiating, there is one call per matrix.

    **Arguments:**

    - `lhs`: float32, bfloat16 or float16 (..., k).
    - `rhss`: matrices (k, n_i) of one format, or views of one (`QuantizedArray.select`).
    - `preferred_element_type`, `precision`, `out_sharding`, `backend`: for every product, as for
      `quantized_matmul`.

    **Returns:** a tuple of (..., n_i).

    **Raises:** as `quantized_matmul`; `TypeError` if `rhss` is not a sequence of quantized arrays,
    `ValueError` if it is empty, contains a stack, or formats differ.

    ```python
    q, k, v = (quantize(jnp.ones((256, n)), INT4) for n in (256, 64, 64))
    quantized_matmuls(jnp.ones((8, 256), jnp.bfloat16), (q, k, v))
    ```
    """
    if not isinstance(rhss, Sequence) or isinstance(rhss, str):
        raise TypeError(
            f"quantized_matmuls: rhss is {checks.brief(rhss)}, but it must be a sequence of "
            "matrices; pass a tuple of them."
        )
    check_all_quantized("quantized_matmuls", "rhss", rhss)
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
    caller = "quantized_matmuls"
    options = Options.checked(caller, preferred_element_type, precision, out_sharding, backend)
    lhs = checks.array(caller, "lhs", lhs, "activations (..., k)")
    for rhs in rhss:
        options.check_rows(caller, lhs, rhs)
    with checks.within(caller):
        return run(_Matmuls, (lhs,), tuple(rhss), options)


class _Matmuls(Call):
    def composition(self, *operands: Array) -> tuple[Array, ...]:
        (lhs,), weights, _ = self.named(operands)
        return tuple(multiply(lhs, weight, self.options) for weight in weights)

    @property
    def custom_calls(self) -> Mapping[str, Callable[..., tuple[Array, ...]]]:
        return {"cuda": self._cuda}

    def _cuda(self, *operands: Array) -> tuple[Array, ...]:
        (lhs,), weights, _ = self.named(operands)
        return cuda_calls.matmuls(
            lhs,
            weights,
            out_dtype=self.options.out_dtype(lhs),
            accumulate_float16=self.options.accumulate_float16,
        )
