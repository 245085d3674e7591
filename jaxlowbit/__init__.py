"""Low-bit matrix products for JAX: weights in 1 to 8 bits, multiplied without unpacking to memory.

`jaxlowbit.nnx` and `jaxlowbit.linen` have the Flax layers; importing this package imports no Flax
and initialises no backend.
"""

from . import _tuned
from ._array import QuantizedArray as QuantizedArray
from ._backends import native as _native
from ._calls import quantized_block as quantized_block
from ._calls import quantized_matmuls as quantized_matmuls
from ._calls import quantized_mlp as quantized_mlp
from ._explain import explain as explain
from ._formats import INT4 as INT4
from ._formats import INT8 as INT8
from ._formats import UINT4 as UINT4
from ._formats import UINT8 as UINT8
from ._formats import Format as Format
from ._fused import quantized_glu as quantized_glu
from ._matmul import quantized_matmul as quantized_matmul
from ._matmul import supported_backends as supported_backends
from ._permute import group_permutation as group_permutation
from ._quantize import dequantize as dequantize
from ._quantize import quantize as quantize
from ._scan import scan as scan
from ._sharding import partition_spec as partition_spec
from ._version import __version__ as __version__

_native.register()
_tuned.load()
