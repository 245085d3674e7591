"""Float dtypes that the package computes with."""

import jax.numpy as jnp

FLOATS = (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16"))
"""Dtypes of activations, weights before quantization, scales, biases and residuals."""
