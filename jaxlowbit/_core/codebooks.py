"""Codebooks: tables of the numbers that codes represent.

- `nf4`: quantiles of a normal distribution (Dettmers et al., QLoRA, 2023), as in bitsandbytes.
- `fp4`: the 4-bit float of bitsandbytes, whose smallest number is 1/192 of the largest.
- `e2m1`: the 4-bit float of the OCP Microscaling Formats specification 1.0 (MXFP4, NVFP4).
- `e4m3`, `e5m2`: the 8-bit floats of the OCP 8-bit Floating Point specification 1.0; e4m3 has no
  infinities. NaN and infinities are read unchanged, and `quantize` does not produce them.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np


class Codebook(NamedTuple):
    """The entries of a codebook, and the default group size of its formats.

    `dtype`: the JAX dtype with these bits, if there is one and it fills a byte.
    """

    values: tuple[float, ...]
    group_size: int
    dtype: jnp.dtype | None = None

    @property
    def bits(self) -> int:
        return int(math.log2(len(self.values)))


def _of_bytes(name: str) -> Codebook:
    dtype = jnp.dtype(name)
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    return Codebook(tuple(values.tolist()), -1, dtype)


def _with_signs(*magnitudes: float) -> tuple[float, ...]:
    return (*magnitudes, *(-x for x in magnitudes))


# fmt: off
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
_FP4 = _with_signs(*(float(np.float32(x / 12)) for x in (0.0, 0.0625, 8, 12, 4, 6, 2, 3)))
_E2M1 = _with_signs(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

CODEBOOKS: Mapping[str, Codebook] = {
    "nf4": Codebook(_NF4, 64),
    "fp4": Codebook(_FP4, 64),
    "e2m1": Codebook(_E2M1, 32),
    "e4m3": _of_bytes("float8_e4m3fn"),
    "e5m2": _of_bytes("float8_e5m2"),
}


EVEN = ("e2m1",)
"""Codebooks of floats below 8 bits; ties round to even."""


def nearest(values: tuple[float, ...], even: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds between neighbouring finite numbers, and the code of each number.

    A value on a bound belongs to the number below it or, if `even`, to the number with the even
    code, whose mantissa is even.
    """
    table = np.array(values, np.float32)
    finite = np.flatnonzero(np.isfinite(table))
    numbers, first = np.unique(table[finite], return_index=True)
    # Halve each first, since the sum of two numbers may overflow float32.
    bounds, codes = numbers[:-1] / 2 + numbers[1:] / 2, finite[first].astype(np.uint8)
    if even:
        bounds = np.where(codes[1:] % 2 == 0, np.nextafter(bounds, np.float32(-np.inf)), bounds)
    return bounds, codes
