"""Names of the layers that stay in floats unless a rule names them."""

import re

HEADS = r"(^|\.)(lm_head|head|heads|logits|classifier|score|output_projection|unembed)$"
"""Usual names of the layer that computes logits, which a single `Format` leaves in floats."""

_ROUTERS = re.compile(r"router|(^|[._])(gate|gating)[^.]*$")


def is_router(path: str, k: int, n: int) -> bool:
    """Guesses from its name and small n whether a layer (k, n) routes tokens to experts."""
    return _ROUTERS.search(path) is not None and 4 * n <= k
