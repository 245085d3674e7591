"""Names of the layers that stay in floats unless a rule names them."""

import re

HEADS = r"(^|\.)(lm_head|head|heads|logits|classifier|score|output_projection|unembed)$"
"""Usual names of the layer that makes logits: what a lone `Format` keeps in floats."""

_ROUTERS = re.compile(r"router|(^|[._])(gate|gating)[^.]*$")


def is_router(path: str, k: int, n: int) -> bool:
    """Whether a layer (k, n) sends tokens to experts, as its name and its few results tell."""
    return _ROUTERS.search(path) is not None and 4 * n <= k
