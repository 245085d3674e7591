"""Ways to compute a quantized product; `definition` is the meaning, the others must equal it."""
