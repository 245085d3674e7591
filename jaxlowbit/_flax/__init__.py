"""Implementation of `jaxlowbit.nnx` and `jaxlowbit.linen`. `rules` and `report` serve both."""

from .._requirements import require

require("flax")
