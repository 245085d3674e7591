"""`warn_of_file`: warnings about model files, at the line that loads the model."""

import sys
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn_of_file(sentence: str) -> None:
    """Warns at the line outside of this package that called it, at any depth of calls."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"load: {sentence}", stacklevel=level)
