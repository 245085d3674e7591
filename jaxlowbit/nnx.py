"""Flax NNX: layers whose weights are quantized, and the surgery that puts them into a model."""

from ._core.heads import HEADS as HEADS
from ._flax import serialization as _serialization
from ._flax.einsum_layers import EinsumLayer as EinsumLayer
from ._flax.einsum_parameters import EinsumParameter as EinsumParameter
from ._flax.nnx_einsum import QuantizedEinsum as QuantizedEinsum
from ._flax.nnx_embed import QuantizedEmbed as QuantizedEmbed
from ._flax.nnx_general import QuantizedLinearGeneral as QuantizedLinearGeneral
from ._flax.nnx_linear import QuantizedLinear as QuantizedLinear
from ._flax.nnx_model import quantize_model as quantize_model
from ._flax.nnx_variables import LayoutVersion as LayoutVersion
from ._flax.nnx_variables import Packed as Packed
from ._flax.nnx_variables import Permutation as Permutation
from ._flax.nnx_variables import QuantizedVariable as QuantizedVariable
from ._flax.nnx_variables import Scale as Scale
from ._flax.nnx_variables import TensorScale as TensorScale
from ._flax.nnx_variables import Zero as Zero
from ._flax.nnx_variables import check_layout_version as check_layout_version
from ._flax.report import LayerReport as LayerReport
from ._flax.report import ParameterReport as ParameterReport
from ._flax.report import QuantizationReport as QuantizationReport

_serialization.register()
