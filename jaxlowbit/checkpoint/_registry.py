"""The kinds of quantized checkpoints: one for each module of `_kinds`.

A module in `_kinds` defines

- `METHODS`: the values of `quant_method` in the quantization config.
- `SUMMARY`: the supported layouts, in a line.
- `read(folder, config)`: returns a `Found` from headers only. It raises `ValueError` for unknown
  entries, tensors and shapes, with their names.
- `configured(folder)`, for kinds that may lack `quant_method`: returns the file and the object with
  the quantization config, or None.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._core.checks import brief
from ._fields import OTHER, Fields
from ._files import Folder
from ._matrix import Found

MODULES: Mapping[str, Any] = {
    name: importlib.import_module(f"{__package__}._kinds.{name}")
    for _, name, _ in pkgutil.iter_modules([str(Path(__file__).parent / "_kinds")])
}
_BY_METHOD = {method: module for module in MODULES.values() for method in module.METHODS}


def find(folder: Folder) -> Found:
    """The quantized matrices of a folder; none if its config.json has no quantization config.

    **Raises:** `ValueError` for an unknown `quant_method`; the errors of the kind.
    """
    path, values = config_of(folder)
    if values is None:
        return Found([])
    config = Fields(path, values)
    method = config.get("quant_method", "a string")
    if method is None:
        return _without_method(folder, path)
    if method not in _BY_METHOD:
        raise ValueError(
            f"{path}: 'quant_method' is {brief(method)}, but the quantized checkpoints that are "
            f"read are {', '.join(map(repr, sorted(_BY_METHOD)))}; {OTHER}."
        )
    return _BY_METHOD[method].read(folder, config)


def config_of(folder: Folder) -> tuple[Path, Mapping[str, Any] | None]:
    """The quantization config of a folder, with its file; None for a folder of floats."""
    path = folder.path / "config.json"
    outer = Fields(path, folder.config)
    for entries in (outer, outer.inner("text_config")):
        if found := entries.get("quantization_config", "an object"):
            return path, found
    for module in MODULES.values():
        if hasattr(module, "configured") and (own := module.configured(folder)) is not None:
            path, found = own
            return path, {"quant_method": module.METHODS[0], **found}
    return path, None


def _without_method(folder: Folder, path: Path) -> Found:
    found = {
        name: own
        for name, module in MODULES.items()
        if hasattr(module, "configured") and (own := module.configured(folder)) is not None
    }
    if len(found) != 1:
        raise ValueError(
            f"{path}: 'quantization_config' has no 'quant_method', and "
            f"{'fits ' + ' and '.join(found) if found else 'fits no kind that is read'}; add it, "
            f"one of {', '.join(map(repr, sorted(_BY_METHOD)))}."
        )
    ((name, (path, values)),) = found.items()
    return MODULES[name].read(folder, Fields(path, values))
