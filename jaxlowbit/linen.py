"""Flax Linen: a layer whose kernel is quantized, and models run with quantized kernels."""

from ._flax import serialization as _serialization
from ._flax.einsum_layers import EinsumLayer as EinsumLayer
from ._flax.einsum_layers import EinsumParameter as EinsumParameter
from ._flax.linen_layers import QuantizedDense as QuantizedDense
from ._flax.linen_layers import QuantizedDenseGeneral as QuantizedDenseGeneral
from ._flax.linen_layers import QuantizedEinsum as QuantizedEinsum
from ._flax.linen_layers import QuantizedEmbed as QuantizedEmbed
from ._flax.linen_model import quantize_model as quantize_model
from ._flax.linen_pretrained import quantize_pretrained as quantize_pretrained
from ._flax.linen_quantized import QuantizedModel as QuantizedModel
from ._flax.report import QuantizationReport as QuantizationReport

_serialization.register()
