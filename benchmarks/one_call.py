"""Times calls of several kernels against the separate calls that they replace.

    python benchmarks/one_call.py

With layers of Llama 3 8B, in a jitted program: queries, keys and values by `quantized_matmuls`, and
the gated MLP by `quantized_mlp`. Then a product with a weight whose rows are stored in a permuted
order, against an unpermuted weight, and against activations that XLA gathers.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import shapes
from timing import microseconds_per_call

import jaxlowbit as jl

MODEL = shapes.MODELS["llama3-8b"]
CALLS = 32
COPIES = 16  # of the smallest set of weights, 13 MB: three times the L2
TOKENS = (1, 16)
MANY = 2048


def main() -> None:
    argparse.ArgumentParser(description="Several kernels in a call.").parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{'':24s} tokens  separate us  one call us  ratio")
    hidden, kv = MODEL.hidden, MODEL.kv_heads * MODEL.head_size
    qkv = [(quantized(hidden, hidden, i), quantized(hidden, kv, i), quantized(hidden, kv, -i))
           for i in range(1, COPIES + 1)]  # fmt: skip
    compare("queries, keys, values", qkv, separate_qkv, qkv_in_one)
    mlp = [(quantized(2, hidden, MODEL.mlp, i), quantized(MODEL.mlp, hidden, i)) for i in range(4)]
    compare("gated MLP", mlp, separate_mlp, mlp_in_one)
    order = jax.random.permutation(jax.random.key(0), hidden).astype(jnp.int32)
    plain = [(w, dataclasses.replace(w, permutation=order)) for w, *_ in qkv]
    compare("order: of the product", plain, lambda x, w: x @ w[0], lambda x, w: x @ w[1])
    compare(
        "order: gathered by XLA",
        plain,
        lambda x, w: jnp.take(x, order, axis=1) @ w[0],
        lambda x, w: x @ w[1],
        (*TOKENS, MANY),
    )


def quantized(*arguments: int) -> jl.QuantizedArray:
    *shape, seed = arguments
    weight = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) / shape[-2] ** 0.5
    return jl.quantize(weight, jl.INT4)


def separate_qkv(x: jax.Array, weights: Any) -> jax.Array:
    return joined(*(x @ weight for weight in weights))


def qkv_in_one(x: jax.Array, weights: Any) -> jax.Array:
    return joined(*jl.quantized_matmuls(x, weights))


def joined(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """A small kernel that uses both, so that XLA removes no product."""
    return q + jnp.pad(k + v, ((0, 0), (0, q.shape[-1] - k.shape[-1])))


def separate_mlp(x: jax.Array, weights: Any) -> jax.Array:
    gate_up, down = weights
    gate, up = x @ gate_up.select(0), x @ gate_up.select(1)
    return (jax.nn.silu(gate) * up) @ down


def mlp_in_one(x: jax.Array, weights: Any) -> jax.Array:
    gate_up, down = weights
    return jl.quantized_mlp(x, gate_up=gate_up, down=down)


Call = Callable[[jax.Array, Any], jax.Array]


def compare(
    name: str, weights: list, separate: Call, one: Call, tokens: tuple[int, ...] = TOKENS
) -> None:
    """Prints both."""
    for m in tokens:
        x = jax.random.normal(jax.random.key(1), (m, MODEL.hidden), jnp.bfloat16)
        before, after = (
            microseconds_per_call(call, x, weights, CALLS).median for call in (separate, one)
        )
        print(f"{name:24s} {m:6d} {before:12.2f} {after:12.2f} {after / before:6.2f}", flush=True)


if __name__ == "__main__":
    main()
