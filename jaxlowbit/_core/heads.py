"""Names of the layers that stay in floats unless a rule names them."""

HEADS = r"(^|\.)(lm_head|head|heads|logits|classifier|score|output_projection|unembed)$"
"""Usual names of the layer that makes logits: what a lone `Format` keeps in floats."""
