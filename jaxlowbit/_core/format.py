"""Formats: bit width, groups, zeros, codebook and scales of a quantized weight."""

import dataclasses
import functools
import math
import numbers
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from .checks import brief, choice
from .codebooks import CODEBOOKS
from .layout import ATOM

Zero = Literal["none", "integer", "float"]
_ZEROS = ("none", "integer", "float")
SCALES = {
    "e8m0": jnp.dtype("float8_e8m0fnu"),
    "e4m3": jnp.dtype("float8_e4m3fn"),
    "int8": jnp.dtype("int8"),
    "two_level": jnp.dtype("uint8"),
}
"""The dtypes of 8-bit scales by name."""
SUPER_BLOCK = 256
"""Input features of a super-block, as in the K types of ggml."""
_INTEGER_SCALED_BITS = (2, 3, 4)


@dataclasses.dataclass(frozen=True)
class Format:
    """Integers or codebook indices of `bits` bits, with a scale and perhaps a zero per group.

    For a quantized value `q` in `[0, 2**bits)`, scale `s` and the zero of its group, a weight is

    | `zero` | weight | zero is |
    |---|---|---|
    | `"none"` | `(q - 2**(bits - 1)) * s` | fixed: a two's complement integer times `s` |
    | `"integer"` | `(q - z) * s` | a quantized value, as in GPTQ and AWQ |
    | `"float"` | `q * s + b` | a float in the units of the weight, as in HQQ |

    With a codebook a weight is `codebook[q] * s`. 8-bit scales follow the OCP Microscaling Formats
    specification 1.0 (`"e8m0"`) or NVIDIA's NVFP4 (`"e4m3"`); with the latter each matrix has a
    tensor scale t, and a weight is `codebook[q] * s * t`. Integer scales (`"int8"`) follow QServe's
    progressive quantization (Lin et al., 2024): each channel has a scale t, and a weight is `(q -
    2**(bits - 1)) * s`, an 8-bit integer, times t. Two-level scales (`"two_level"`) follow
    the K types of ggml (llama.cpp): s, and likewise b, is an 8-bit integer times a float16 of its
    super-block of 256 input features.

    **Arguments:**

    - `bits`: width of a quantized value, 1 to 8.
    - `group_size`: consecutive input features (along k) that share a scale: a multiple of 16, or
      -1 for one scale per output channel.
    - `zero`: see the table.
    - `codebook`: None for integers; a name (`"nf4"` and `"fp4"` of bitsandbytes, `"e2m1"` of MXFP4
      and NVFP4, the 8-bit floats `"e4m3"` and `"e5m2"`); or the `2**bits` numbers of the quantized
      values, finite and not rounded to 0 in float32, in any order. A codebook excludes a zero.
    - `scale`: None for scales of float32, bfloat16 or float16; `"e8m0"` for powers of two in 8
      bits, 2^-127 to 2^127; `"e4m3"` for 8-bit floats up to 448 with a float32 tensor scale;
      `"int8"`, for integer formats of 2 to 4 bits, for integers from 0 to `max_scale` with a
      float32 scale per channel. These three exclude a zero. `"two_level"` for two-level scales,
      in groups of 16, 32, 64 or 128, with float zeros or none.

    **Raises:** `ValueError` for a width, group size, zero, codebook or scale outside these rules,
    `TypeError` for a codebook that is neither a name nor numbers, and a scale that is not a name.

    ```python
    Format(bits=4, group_size=128)
    INT4.replace(group_size=64)
    Format(bits=2, group_size=64, codebook=(-1.5, -0.4, 0.4, 1.5))
    Format(bits=4, group_size=32, codebook="e2m1", scale="e8m0")  # MXFP4
    Format(bits=4, group_size=32, zero="float", scale="two_level")  # Q4_K
    ```
    """

    bits: int
    group_size: int = -1
    zero: Zero = "none"
    codebook: str | Sequence[float] | None = None
    scale: Literal["e8m0", "e4m3", "int8", "two_level"] | None = None

    def __post_init__(self) -> None:
        for name in ("bits", "group_size"):
            if isinstance(value := getattr(self, name), np.integer):
                object.__setattr__(self, name, int(value))
        if not _is_int(self.bits) or not 1 <= self.bits <= 8:
            raise ValueError(f"Format: bits={self.bits!r}, but a code has 1 to 8 bits.")
        size = self.group_size
        if not _is_int(size) or (size != -1 and (size <= 0 or size % 16)):
            raise ValueError(
                f"Format: group_size={size!r}, but a group is a positive multiple of 16 input "
                "features, or -1 for one scale per output channel."
            )
        choice("Format", "zero", self.zero, _ZEROS)
        choice("Format", "scale", self.scale, tuple(SCALES), optional=True)
        if self.two_levels:
            self._check_super_blocks()
        elif self.scale is not None and self.zero != "none":
            raise ValueError(
                f"Format: zero={self.zero!r} with scale={self.scale!r}, but values with 8-bit "
                "scales have no zero; leave one of them out."
            )
        integers = self.codebook is None and self.bits in _INTEGER_SCALED_BITS
        if self.scale == "int8" and not integers:
            what = f"bits={self.bits}" if self.codebook is None else "a codebook"
            raise ValueError(
                f"Format: scale='int8' with {what}, but integer scales are for integers of 2, 3 or "
                "4 bits; leave scale out, or use other bits."
            )
        if self.codebook is None:
            return
        if self.zero != "none":
            raise ValueError(
                f"Format: zero={self.zero!r} with a codebook, which needs no zero; leave zero out."
            )
        object.__setattr__(self, "codebook", _codebook(self.codebook, self.bits))

    def _check_super_blocks(self) -> None:
        size = self.group_size
        if size < 0 or size >= SUPER_BLOCK or SUPER_BLOCK % size:
            raise ValueError(
                f"Format: group_size={size} with scale='two_level', but a super-block of "
                f"{SUPER_BLOCK} input features has whole groups; use 16, 32, 64 or 128, or leave "
                "scale out."
            )
        if self.zero == "integer":
            raise ValueError(
                "Format: zero='integer' with scale='two_level', whose zeros must be floats; "
                "use zero='float' or leave one of them out."
            )

    def replace(self, **changes: Any) -> "Format":
        """Returns this format with some fields changed; the result is checked."""
        return dataclasses.replace(self, **changes)

    @property
    def offset(self) -> int:
        """The quantized value of 0 in a format without zeros."""
        return 1 << (self.bits - 1)

    @property
    def float_dtype(self) -> Any:
        """The dtype of quantized values that are 8-bit floats; None for other formats."""
        return CODEBOOKS[self.codebook].dtype if isinstance(self.codebook, str) else None

    @functools.cached_property
    def scale_dtype(self) -> Any:
        """The dtype of 8-bit scales; None for wider floats."""
        return None if self.scale is None else SCALES[self.scale]

    @functools.cached_property
    def two_levels(self) -> bool:
        """Whether scales have two levels: a number per group, times a float per super-block."""
        return self.scale == "two_level"

    @property
    def scale_span(self) -> int:
        """Number of consecutive input features with inseparable scales: a group or a
        super-block; -1 for all."""
        return SUPER_BLOCK if self.two_levels else self.group_size

    @functools.cached_property
    def shard_unit(self) -> int:
        """The smallest number of input features that is whole atoms, groups and super-blocks."""
        span = self.scale_span
        return ATOM if span == -1 else math.lcm(ATOM, span)

    @functools.cached_property
    def expanded(self) -> "Format":
        """The format with a float scale per group in place of two-level scales; other formats
        unchanged."""
        return self.replace(scale=None) if self.two_levels else self

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a matrix has a second scale in addition to group scales: one per matrix or, if
        `scales_channels`, per channel."""
        return self.scale in ("e4m3", "int8")

    @property
    def scales_channels(self) -> bool:
        """Whether the second scale is per output channel."""
        return self.scale == "int8"

    @property
    def max_scale(self) -> int:
        """The maximum integer scale: its product with any quantized value fits 8 bits."""
        return 128 // self.offset

    @property
    def max_integer(self) -> int:
        """The largest magnitude of the integers that a float scale multiplies: quantized values
        less their zero, times integer scales."""
        if self.scales_channels:
            return self.offset * self.max_scale
        return self.offset if self.zero == "none" else 2**self.bits - 1

    @functools.cached_property
    def outgrows_float16(self) -> bool:
        """Whether the weights, divided by the tensor scale, may overflow float16."""
        if not self.has_tensor_scale or self.scales_channels:
            return False
        most = max((abs(x) for x in self.values if math.isfinite(x)), default=self.offset)
        return most * float(jnp.finfo(self.scale_dtype).max) > float(jnp.finfo(jnp.float16).max)

    @functools.cached_property
    def values(self) -> tuple[float, ...]:
        """The entries of the codebook, in the order of the quantized values; empty without one."""
        if isinstance(self.codebook, str):
            return CODEBOOKS[self.codebook].values
        return tuple(self.codebook or ())


def _codebook(codebook: Any, bits: int) -> str | tuple[float, ...]:
    """Checks a codebook of `bits` bits; numbers are rounded to float32."""
    if isinstance(codebook, str):
        choice("Format", "codebook", codebook, tuple(CODEBOOKS))
        if (own := CODEBOOKS[codebook].bits) != bits:
            raise ValueError(
                f"Format: bits={bits} with codebook={codebook!r}, whose values have {own} bits; "
                f"use bits={own}."
            )
        return codebook
    listed = np.ravel(codebook).tolist() if hasattr(codebook, "dtype") else codebook
    if not isinstance(listed, Sequence) or not all(isinstance(x, numbers.Real) for x in listed):
        raise TypeError(
            f"Format: codebook is {brief(codebook)}, but it must be a name "
            f"({', '.join(map(repr, CODEBOOKS))}) or a sequence of {2**bits} numbers."
        )
    if len(listed) != 2**bits:
        raise ValueError(
            f"Format: the codebook has {len(listed)} numbers, but {bits} bits represent {2**bits}; "
            "pass one for each quantized value."
        )
    with np.errstate(over="ignore"):
        found = tuple(np.array(listed, np.float64).astype(np.float32).tolist())
    wrong = [i for i, x in enumerate(found) if not math.isfinite(x)]
    if wrong:
        raise ValueError(
            f"Format: number {wrong[0]} of the codebook is {listed[wrong[0]]!r}, but the numbers "
            "of a codebook are finite in float32; replace it."
        )
    tiny = float(np.finfo(np.float32).smallest_normal)
    lost = [i for i, x in enumerate(found) if listed[i] != 0 and abs(x) < tiny]
    if lost:
        raise ValueError(
            f"Format: number {lost[0]} of the codebook is {listed[lost[0]]!r}, which float32 "
            f"rounds to 0; multiply the codebook by a factor, or write 0."
        )
    if not any(found):
        raise ValueError(
            "Format: all numbers of the codebook are 0, which represents no weight but 0."
        )
    return found


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


INT4 = Format(bits=4, group_size=128)
UINT4 = Format(bits=4, group_size=128, zero="integer")
INT8 = Format(bits=8)
UINT8 = Format(bits=8, zero="integer")
NF4 = Format(bits=4, group_size=64, codebook="nf4")
FP8 = Format(bits=8, codebook="e4m3")
MXFP4 = Format(bits=4, group_size=32, codebook="e2m1", scale="e8m0")
MXFP8 = Format(bits=8, group_size=32, codebook="e4m3", scale="e8m0")
NVFP4 = Format(bits=4, group_size=16, codebook="e2m1", scale="e4m3")

MICROSCALING = {"mxfp4": MXFP4, "mxfp8": MXFP8, "nvfp4": NVFP4}
"""Formats whose names imply codebook, group size and scales."""

_SCALE = rf"(?:-({'|'.join(SCALES)}))?"
_NAME = re.compile(rf"(u?)int(\d+)(?:-(?:g(\d+)|(channel)))?(?:-(integer|float))?{_SCALE}")
_CODEBOOK = re.compile(rf"({'|'.join(CODEBOOKS)})(?:-(?:g(\d+)|(channel)))?{_SCALE}")
_NAMES = (
    "'int4' (groups of 128), 'int8' (one scale per channel), 'uint4' (with an integer zero), "
    "'int4-g64', 'int4-channel', 'int3-g32-float', 'int4-int8' (scales that are integers), "
    "'int4-g32-float-two_level' (two-level scales), 'nf4' (groups of 64), 'e4m3-channel', "
    "'mxfp4', 'mxfp8', 'nvfp4' or 'e5m2-g32-e8m0'"
)


def parse_format(text: str) -> Format:
    """Reads names such as `int4`, `int8`, `uint4` (the presets), `int3-g64-float`, `nf4-g32`.

    Without a group size, 8-bit formats have one scale per channel and narrower ones groups of 128;
    `nf4` and `fp4` have groups of 64, and `e2m1` of 32. `mxfp4`, `mxfp8` and `nvfp4` name the
    microscaling formats. A suffix `-e8m0` or `-e4m3` sets the scales of others: `e5m2-g32-e8m0`.

    **Raises:** `ValueError` for other words, and for invalid combinations (see `Format`).
    """
    if text.lower() in MICROSCALING:
        return MICROSCALING[text.lower()]
    if (found := _CODEBOOK.fullmatch(text.lower())) is not None:
        name, group, channel, scale = found.groups()
        own = CODEBOOKS[name]
        size = -1 if channel else int(group) if group else own.group_size
        return Format(own.bits, size, codebook=name).replace(scale=scale)
    if (found := _NAME.fullmatch(text.lower())) is None or (found[1] and found[5]):
        raise ValueError(f"{text!r} names no format; write a name such as {_NAMES}.")
    unsigned, bits, group, channel, zero, scale = found.groups()
    by_width = -1 if channel or int(bits) >= 8 else 128
    zero = "integer" if unsigned else zero or "none"
    return Format(int(bits), int(group) if group else by_width).replace(zero=zero, scale=scale)


def format_name(format: Format) -> str:
    """The name of a format for `parse_format`, unless the codebook is user-defined."""
    if format.scale is not None:
        own = next((name for name, known in MICROSCALING.items() if known == format), None)
        return own or f"{format_name(format.replace(scale=None))}-{format.scale}"
    if format.codebook is not None:
        named = isinstance(format.codebook, str)
        name = format.codebook if named else f"codebook{format.bits}"
        own = CODEBOOKS[format.codebook].group_size if isinstance(format.codebook, str) else None
        if format.group_size == own:
            return str(name)
        return f"{name}-channel" if format.group_size == -1 else f"{name}-g{format.group_size}"
    channel = "" if format.bits == 8 else "-channel"
    group = channel if format.group_size == -1 else f"-g{format.group_size}"
    return f"int{format.bits}{group}{'' if format.zero == 'none' else f'-{format.zero}'}"


def as_format(caller: str, value: Any) -> Format:
    """Returns a format, given as such or by its name.

    **Raises:** `TypeError` for other types, `ValueError` for an unknown name.
    """
    if isinstance(value, Format):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"{caller}: format is {brief(value)}, but it must be a Format, such as jaxlowbit.INT4 "
            f"or Format(bits=4, group_size=128), or a name such as {_NAMES}."
        )
    try:
        return parse_format(value)
    except ValueError as error:
        raise ValueError(f"{caller}: {error}") from None
