"""Formats: what the numbers of a quantized weight mean."""

import dataclasses
import re
from typing import Any, Literal

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
        if self.zero not in _ZEROS:
            raise ValueError(f"Format: zero={self.zero!r}, but it is one of {', '.join(_ZEROS)}.")

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

_NAME = re.compile(r"int(\d+)(?:-g(\d+))?(?:-(integer|float))?")


def parse_format(text: str) -> Format:
    """Reads names such as `int4-g128`, `int4-g128-integer` (the zero) and `int8` (per channel).

    **Raises:** `ValueError` for other words, and for what `Format` refuses.
    """
    if (found := _NAME.fullmatch(text)) is None:
        raise ValueError(
            f"{text!r} names no format; write int4-g128 for groups of 128, int8 for one scale per "
            "channel, and -integer or -float after it for a zero."
        )
    bits, group, zero = found.groups()
    format = Format(int(bits), int(group or -1))
    return format.replace(zero=zero) if zero else format


def format_name(format: Format) -> str:
    """The name that `parse_format` reads."""
    group = "" if format.group_size == -1 else f"-g{format.group_size}"
    return f"int{format.bits}{group}{'' if format.zero == 'none' else f'-{format.zero}'}"
