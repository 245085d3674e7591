"""Models that qwix has quantized, with products in the kernels of this package."""

from ._flax.qwix_provider import PackedProvider as PackedProvider
from ._flax.qwix_provider import pack as pack
