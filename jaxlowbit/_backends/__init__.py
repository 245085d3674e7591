"""Backends that compute a quantized product; all must equal `definition`."""
