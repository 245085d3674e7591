"""The place of `QuantizedArray` in files that version 0.1.0 pickled."""

from ._core.array import QuantizedArray as QuantizedArray
