"""Clips: each group gets the range with the smallest squared error, of the full one and 63 smaller.

The full range is one of them, so no group is worse than with absmax. With statistics, the cost is
the expected squared error that the group causes in the product: the squared error of each row times
the mean square of its input feature, and with full second moments the correlations of the features
of a group too.

The search over ranges is the `mse` option of GPTQ's reference code (Frantar et al., 2023, which
sums powers of 2.4). AWQ (Lin et al., 2024) judges the same ranges by the output of the layer;
llama.cpp's importance matrix is the mean squares of inputs.
"""

from typing import Any

from jax import Array

from .._core.array import QuantizedArray
from .._core.format import Format
from .._core.groups import Groups
from .._core.scales import unsupported as unsupported
from ._ranges import best_ranges, of_products
from ._statistics import Statistics

STATISTICS = "full"


def quantize(
    weight: Array, format: Format, statistics: Statistics | None, **options: Any
) -> QuantizedArray:
    """Rounds a weight to nearest, within the best range of each group."""
    groups = Groups.of(weight, format, **options)
    return groups.pack(*best_ranges(groups, of_products(groups, statistics)))
