"""Keyword arguments shared by all products, and checks of their operands."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from .._core import checks
from .._core.array import QuantizedArray
from .._core.dtypes import FLOATS
from .._core.explicit import Sharding
from .support import supported_backends

Backend = Literal["cuda", "cpu", "pallas", "xla"]
FLOAT16_SUMS = lax.DotAlgorithmPreset.F16_F16_F16


@dataclasses.dataclass(frozen=True)
class Options:
    """Keyword arguments of `quantized_matmul` other than operands, hashable.

    `accumulate_float16`: whether `precision` lets kernels accumulate in float16.
    """

    preferred_element_type: Any = None
    accumulate_float16: bool = False
    out_sharding: Sharding | None = None
    backend: Backend | None = None

    @classmethod
    def checked(
        cls,
        caller: str,
        preferred_element_type: Any = None,
        precision: Any = None,
        out_sharding: Any = None,
        backend: Any = None,
    ) -> "Options":
        """Validates the keyword arguments."""
        if preferred_element_type is not None:
            name = "preferred_element_type"
            preferred_element_type = checks.dtype(caller, name, preferred_element_type)
        preset = isinstance(precision, lax.DotAlgorithmPreset | None)
        if not preset or precision not in (None, FLOAT16_SUMS):
            raise ValueError(
                f"{caller}: precision is {checks.brief(precision)}, but it must be None or "
                "jax.lax.DotAlgorithmPreset.F16_F16_F16; leave it out to accumulate in float32."
            )
        if not isinstance(out_sharding, jax.NamedSharding | jax.P | None):
            raise TypeError(
                f"{caller}: out_sharding is {checks.brief(out_sharding)}, but it must be a jax.P, "
                "a jax.NamedSharding or None."
            )
        if backend is not None:
            checks.choice(caller, "backend", backend, get_args(Backend), optional=True)
        return cls(preferred_element_type, precision is not None, out_sharding, backend)

    def replace(self, **changes: Any) -> "Options":
        return dataclasses.replace(self, **changes)

    def out_dtype(self, lhs: Any) -> jnp.dtype:
        """The requested dtype of the result, by default the dtype of lhs."""
        return lhs.dtype if self.preferred_element_type is None else self.preferred_element_type

    def check(self, caller: str, lhs: Any, rhs: QuantizedArray) -> None:
        """Raises if the requested backend, or every backend, lacks this product."""
        rhs.check_words()
        if lhs.dtype not in FLOATS:
            exact = ", or call integer_matmul" if lhs.dtype == jnp.int8 else ""
            raise ValueError(
                f"{caller}: lhs is {lhs.dtype}, but activations are float32, bfloat16 or "
                f"float16; cast them{exact}."
            )
        if lhs.ndim == 0 or lhs.shape[-1] != rhs.k:
            raise ValueError(
                f"{caller}: lhs has shape {lhs.shape} and rhs {rhs.shape}, but the last axis "
                f"of lhs must be k={rhs.k}; for an (n, k) weight, quantize its transpose."
            )
        try:
            jnp.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
        except ValueError:
            raise ValueError(
                f"{caller}: the leading axes {lhs.shape[:-2]} of lhs and {rhs.shape[:-2]} of "
                "rhs do not broadcast; make them equal or 1."
            ) from None
        dtype = self.preferred_element_type
        if dtype not in (None, lhs.dtype, jnp.float32):
            raise ValueError(
                f"{caller}: preferred_element_type is {dtype}, but the result has the "
                f"dtype of lhs ({lhs.dtype}) or float32; cast the result."
            )
        if self.backend is not None:
            self._check_backend(caller, self.backend, lhs, rhs)
        if self.accumulate_float16 and lhs.dtype != jnp.float16:
            raise ValueError(
                f"{caller}: precision is {FLOAT16_SUMS}, but lhs is {lhs.dtype} and float16 sums "
                "need float16 lhs; cast it, or leave precision out."
            )

    def check_rows(self, caller: str, lhs: Any, rhs: QuantizedArray) -> None:
        """Like `check` for one row of lhs: its leading axes are rows, for any axes of rhs."""
        self.check(caller, jax.ShapeDtypeStruct(lhs.shape[-1:], lhs.dtype), rhs)

    @staticmethod
    def _check_backend(caller: str, backend: Backend, lhs: Any, rhs: QuantizedArray) -> None:
        reason = supported_backends(lhs, rhs)[backend]
        if reason is not None:
            raise ValueError(
                f"{caller}: backend {backend!r} cannot compute this product: {reason}. Use "
                "backend=None to let another one run."
            )


def check_all_quantized(caller: str, name: str, arrays: Sequence[Any]) -> None:
    """Raises if a weight in a sequence is not quantized."""
    for i, array in enumerate(arrays):
        checks.quantized(caller, f"{name}[{i}]", array, QuantizedArray)
