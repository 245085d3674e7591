"""Checkpoints: packed weights from Hugging Face folders, saved and loaded in the packed layout.

It needs the extra `checkpoint`, which importing `jaxlowbit` does not require. Each module of
`_kinds` reads one kind of quantized checkpoint (`_registry.py`).
"""

from .._requirements import require_extra as _require_extra

_require_extra("checkpoint", "safetensors", "tqdm")

from ._load import load as load  # noqa: E402
from ._saved import save as save  # noqa: E402
