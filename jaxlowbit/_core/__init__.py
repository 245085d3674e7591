"""Quantized matrices: what their numbers mean, how they are packed, made and divided."""
