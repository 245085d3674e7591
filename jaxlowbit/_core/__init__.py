"""Quantized matrices: formats, quantized arrays, packed layout and sharding."""
