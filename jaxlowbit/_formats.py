"""The place of `Format` in files that version 0.1.0 pickled."""

from ._core.format import Format as Format
