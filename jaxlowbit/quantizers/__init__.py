"""Quantizers: functions from a float weight, a format and statistics to a `QuantizedArray`.

Each module here whose name has no leading underscore is one quantizer, which `quantize`,
`quantize_model` and `llm.load` take by the name of the module (`docs/quantizers.md`).
"""

from .._core.groups import Groups as Groups
from ._calibration import Calibration as Calibration
from ._plan import mixed as mixed
from ._smoothing import smoothing_factor as smoothing_factor
from ._statistics import Statistics as Statistics
