"""Flax NNX: layers whose weights are quantized, and the surgery that puts them into a model."""

from ._flax import serialization as _serialization
from ._flax.einsum_layers import EinsumLayer as EinsumLayer
from ._flax.einsum_layers import EinsumParameter as EinsumParameter
from ._flax.nnx_layers import QuantizedEinsum as QuantizedEinsum
from ._flax.nnx_layers import QuantizedEmbed as QuantizedEmbed
from ._flax.nnx_layers import QuantizedLinear as QuantizedLinear
from ._flax.nnx_layers import QuantizedLinearGeneral as QuantizedLinearGeneral
from ._flax.nnx_model import quantize_model as quantize_model
from ._flax.nnx_variables import QuantizedVariable as QuantizedVariable
from ._flax.report import QuantizationReport as QuantizationReport

_serialization.register()
