"""Formats: what the numbers of a quantized weight mean."""

import dataclasses
import re
from typing import Any, Literal

from .checks import brief, choice

Zero = Literal["none", "integer", "float"]
_ZEROS = ("none", "integer", "float")


@dataclasses.dataclass(frozen=True)
class Format:
    """A linear integer format: integers of `bits` bits, with a scale and perhaps a zero per group.

    With a quantized value `q` in `[0, 2**bits)`, scale `s` and the zero of its group, a weight is

    | `zero` | weight | zero is |
    |---|---|---|
    | `"none"` | `(q - 2**(bits - 1)) * s` | fixed: a two's complement integer times `s` |
    | `"integer"` | `(q - z) * s` | a quantized value, as in GPTQ and AWQ |
    | `"float"` | `q * s + b` | a float in the units of the weight, as in HQQ |

    **Arguments:**

    - `bits`: width of a quantized value, 1 to 8.
    - `group_size`: consecutive input features (along k) that share a scale: a multiple of 16, or
      -1 for one scale per output channel.
    - `zero`: see the table.

    **Raises:** `ValueError` for a width, group size or zero outside these rules.

    ```python
    Format(bits=4, group_size=128)
    INT4.replace(group_size=64)
    ```
    """

    bits: int
    group_size: int = -1
    zero: Zero = "none"

    def __post_init__(self) -> None:
        if not _is_int(self.bits) or not 1 <= self.bits <= 8:
            raise ValueError(f"Format: bits={self.bits!r}, but a code has 1 to 8 bits.")
        size = self.group_size
        if not _is_int(size) or (size != -1 and (size <= 0 or size % 16)):
            raise ValueError(
                f"Format: group_size={size!r}, but a group is a positive multiple of 16 input "
                "features, or -1 for one scale per output channel."
            )
        choice("Format", "zero", self.zero, _ZEROS)

    def replace(self, **changes: Any) -> "Format":
        """Returns this format with some fields changed, checked like a new one."""
        return dataclasses.replace(self, **changes)

    @property
    def offset(self) -> int:
        """The quantized value that stands for zero in a format without a zero of its own."""
        return 1 << (self.bits - 1)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


INT4 = Format(bits=4, group_size=128)
UINT4 = Format(bits=4, group_size=128, zero="integer")
INT8 = Format(bits=8)
UINT8 = Format(bits=8, zero="integer")

_NAME = re.compile(r"(u?)int(\d+)(?:-(?:g(\d+)|(channel)))?(?:-(integer|float))?")
_NAMES = (
    "'int4' (groups of 128), 'int8' (one scale per channel), 'uint4' (with an integer zero), "
    "'int4-g64', 'int4-channel' or 'int3-g32-float'"
)


def parse_format(text: str) -> Format:
    """Reads names such as `int4`, `int8`, `uint4` (the presets), `int3-g64-float`, `int4-channel`.

    Without a group size, 8 bits have one scale per channel, and fewer have groups of 128.

    **Raises:** `ValueError` for other words, and for what `Format` refuses.
    """
    if (found := _NAME.fullmatch(text.lower())) is None or (found[1] and found[5]):
        raise ValueError(f"{text!r} names no format; write a name such as {_NAMES}.")
    unsigned, bits, group, channel, zero = found.groups()
    by_width = -1 if channel or int(bits) >= 8 else 128
    zero = "integer" if unsigned else zero or "none"
    return Format(int(bits), int(group) if group else by_width).replace(zero=zero)


def format_name(format: Format) -> str:
    """The name that `parse_format` reads."""
    channel = "" if format.bits == 8 else "-channel"
    group = channel if format.group_size == -1 else f"-g{format.group_size}"
    return f"int{format.bits}{group}{'' if format.zero == 'none' else f'-{format.zero}'}"


def as_format(caller: str, value: Any) -> Format:
    """A format, perhaps given by its name.

    **Raises:** `TypeError` for what is neither, `ValueError` for an unknown name.
    """
    if isinstance(value, Format):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"{caller}: format is {brief(value)}, but it is a Format, such as jaxlowbit.INT4 or "
            f"Format(bits=4, group_size=128), or a name such as {_NAMES}."
        )
    try:
        return parse_format(value)
    except ValueError as error:
        raise ValueError(f"{caller}: {error}") from None
