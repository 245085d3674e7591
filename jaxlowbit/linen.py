"""Flax Linen: a layer whose kernel is quantized, and models run with quantized kernels."""

from ._core.heads import HEADS as HEADS
from ._flax import serialization as _serialization
from ._flax.einsum_layers import EinsumLayer as EinsumLayer
from ._flax.einsum_parameters import EinsumParameter as EinsumParameter
from ._flax.linen_dense import QuantizedDense as QuantizedDense
from ._flax.linen_einsum import QuantizedEinsum as QuantizedEinsum
from ._flax.linen_embed import QuantizedEmbed as QuantizedEmbed
from ._flax.linen_general import QuantizedDenseGeneral as QuantizedDenseGeneral
from ._flax.linen_model import quantize_model as quantize_model
from ._flax.linen_pretrained import quantize_pretrained as quantize_pretrained
from ._flax.linen_quantized import QuantizedModel as QuantizedModel
from ._flax.linen_variables import COLLECTION as COLLECTION
from ._flax.linen_variables import check_layout_version as check_layout_version
from ._flax.linen_variables import variables_of as variables_of
from ._flax.report import LayerReport as LayerReport
from ._flax.report import ParameterReport as ParameterReport
from ._flax.report import QuantizationReport as QuantizationReport

_serialization.register()
