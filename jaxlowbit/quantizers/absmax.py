"""Rounds to nearest, with scales (and zeros) that reach the extremes of each group.

Every element is off by at most half a scale. This is the baseline of the quantization literature.
"""

from typing import Any

from jax import Array

from .._core.array import QuantizedArray
from .._core.format import Format
from .._core.groups import Groups
from .._core.scales import unsupported as unsupported

STATISTICS = None


def quantize(weight: Array, format: Format, statistics: Any, **options: Any) -> QuantizedArray:
    """Rounds a weight; ignores statistics."""
    groups = Groups.of(weight, format, **options)
    return groups.pack(*groups.fit(*groups.extremes()))
