"""Quantize a matrix to 4 bits, multiply by it, and measure the loss of accuracy."""

import jax
import jax.numpy as jnp

import jaxlowbit as jl

x_key, w_key = jax.random.split(jax.random.key(0))
x = jax.random.normal(x_key, (8, 1024), jnp.bfloat16)
w = jax.random.normal(w_key, (1024, 4096), jnp.bfloat16)

q = jl.quantize(w, jl.INT4)  # 4 bits per weight, one scale per 128 weights
y = jax.jit(jnp.matmul)(x, w)
y_q = jax.jit(lambda x, q: x @ q)(x, q)  # like x @ q.dequantize(), from packed weights

error = jnp.linalg.norm((y_q - y).astype(jnp.float32)) / jnp.linalg.norm(y.astype(jnp.float32))
print(f"{w.nbytes / 1e6:.1f} MB became {q.nbytes / 1e6:.1f} MB")
print(f"relative error of the product: {error:.3f}")
