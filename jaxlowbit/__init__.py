"""Low-bit matrix products for JAX: weights in 1 to 8 bits, multiplied without unpacking to memory.

`jaxlowbit.nnx` and `jaxlowbit.linen` have the Flax layers; importing this package imports no Flax
and initialises no backend.
"""

from . import _command as _command  # first: the command `jaxlowbit` starts here
from . import _requirements as _requirements  # second: raises for a JAX that is too old
from . import quantizers as quantizers
from ._backends import extension as _extension
from ._backends.call import DISABLED_EXPORT_CHECKS as DISABLED_EXPORT_CHECKS
from ._composite.block import quantized_block as quantized_block
from ._composite.glu import quantized_glu as quantized_glu
from ._composite.matmuls import quantized_matmuls as quantized_matmuls
from ._composite.mlp import quantized_mlp as quantized_mlp
from ._composite.moe import quantized_moe as quantized_moe
from ._composite.ragged_dot import quantized_ragged_dot as quantized_ragged_dot
from ._core import exporting as _exporting
from ._core.activations import QuantizedActivations as QuantizedActivations
from ._core.activations import quantize_activations as quantize_activations
from ._core.array import QuantizedArray as QuantizedArray
from ._core.format import FP8 as FP8
from ._core.format import INT4 as INT4
from ._core.format import INT8 as INT8
from ._core.format import MXFP4 as MXFP4
from ._core.format import MXFP8 as MXFP8
from ._core.format import NF4 as NF4
from ._core.format import NVFP4 as NVFP4
from ._core.format import UINT4 as UINT4
from ._core.format import UINT8 as UINT8
from ._core.format import Format as Format
from ._core.scan import scan as scan
from ._core.versions import check_layout_version as check_layout_version
from ._matmul.api import quantized_matmul as quantized_matmul
from ._matmul.integers import integer_matmul as integer_matmul
from ._matmul.support import supported_backends as supported_backends
from ._tuning import table as _table
from ._tuning.explain import explain as explain
from ._tuning.tune import tune as tune
from ._version import __version__ as __version__
from .quantizers._quantize import quantize as quantize

_exporting.register()
_extension.register()
_table.load()

# Pickles name the public classes by this package, wherever they are defined.
for _public in (Format, QuantizedActivations, QuantizedArray):
    _public.__module__ = __name__
