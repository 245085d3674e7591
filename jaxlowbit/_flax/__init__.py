"""What `jaxlowbit.nnx` and `jaxlowbit.linen` are made of; `rules` and `report` serve both."""

from .._requirements import require

require("flax")
