"""A decoder-only transformer in NNX and in Linen, quantized by `test_models.py`.

Token embedding tied to the output head, RMSNorm, causal attention, gated MLP. Layers have the names
of Flax's attention, which `attention=` can substitute.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from helpers import initial

DEPTH, WIDTH, HIDDEN, HEADS, VOCABULARY = 4, 64, 160, 4, 97
PROJECTIONS = ("attention.query", "attention.key", "attention.value", "attention.out")
LINEAR = (*PROJECTIONS, "mlp.gate", "mlp.up", "mlp.down")
"""The linear layers of a block."""

TOKENS = jnp.arange(2 * 9).reshape(2, 9) * 5 % VOCABULARY


def attend(query: Any, key: Any, value: Any) -> Any:
    """Causal attention of activations (..., tokens, width)."""
    heads = (x.reshape(*x.shape[:-1], HEADS, -1) for x in (query, key, value))
    return jax.nn.dot_product_attention(*heads, is_causal=True).reshape(query.shape)


class NnxAttention(nnx.Module):
    def __init__(self, **options: Any):
        self.query = nnx.Linear(WIDTH, WIDTH, kernel_init=initial, **options)
        self.key = nnx.Linear(WIDTH, WIDTH, kernel_init=initial, **options)
        self.value = nnx.Linear(WIDTH, WIDTH, kernel_init=initial, **options)
        self.out = nnx.Linear(WIDTH, WIDTH, kernel_init=initial, **options)

    def __call__(self, x: Any) -> Any:
        return self.out(attend(self.query(x), self.key(x), self.value(x)))


class NnxMlp(nnx.Module):
    def __init__(self, **options: Any):
        self.gate = nnx.Linear(WIDTH, HIDDEN, use_bias=False, kernel_init=initial, **options)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, kernel_init=initial, **options)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, kernel_init=initial, **options)

    def __call__(self, x: Any) -> Any:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class NnxBlock(nnx.Module):
    def __init__(self, attention: Any, **options: Any):
        self.attention_norm = nnx.RMSNorm(WIDTH, **options)
        self.attention = attention(**options)
        self.mlp_norm = nnx.RMSNorm(WIDTH, **options)
        self.mlp = NnxMlp(**options)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class NnxTransformer(nnx.Module):
    """`depth` blocks; blocks after the first `distinct` reuse earlier ones."""

    def __init__(
        self, depth=DEPTH, distinct=DEPTH, dtype=None, attention: Any = NnxAttention, seed=0
    ):
        options: Any = {"dtype": dtype, "rngs": nnx.Rngs(seed)}
        self.embed = nnx.Embed(VOCABULARY, WIDTH, embedding_init=initial, **options)
        blocks = [NnxBlock(attention, **options) for _ in range(distinct)]
        self.blocks = nnx.List([blocks[i % distinct] for i in range(depth)])
        self.norm = nnx.RMSNorm(WIDTH, **options)

    def __call__(self, tokens: Any) -> Any:
        return self.logits(self.embed(tokens))

    def logits(self, x: Any) -> Any:
        """Logits of embedded tokens, to differentiate by them."""
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


class LinenAttention(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        query, key, value = (
            nn.Dense(WIDTH, name=name, dtype=self.dtype)(x) for name in ("query", "key", "value")
        )
        return nn.Dense(WIDTH, name="out", dtype=self.dtype)(attend(query, key, value))


class LinenMlp(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        options: Any = {"use_bias": False, "dtype": self.dtype}
        gate = nn.Dense(HIDDEN, name="gate", **options)(x)
        up = nn.Dense(HIDDEN, name="up", **options)(x)
        return nn.Dense(WIDTH, name="down", **options)(jax.nn.silu(gate) * up)


class LinenBlock(nn.Module):
    attention: Any = LinenAttention
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        dtype = self.dtype
        h = nn.RMSNorm(name="attention_norm", dtype=dtype)(x)
        x = x + self.attention(name="attention", dtype=dtype)(h)
        h = nn.RMSNorm(name="mlp_norm", dtype=dtype)(x)
        return x + LinenMlp(name="mlp", dtype=dtype)(h)


class LinenTransformer(nn.Module):
    """`depth` blocks; blocks after the first `distinct` reuse earlier ones."""

    depth: int = DEPTH
    distinct: int = DEPTH
    dtype: Any = None
    attention: Any = LinenAttention

    def setup(self) -> None:
        self.embed = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)
        self.blocks = [LinenBlock(self.attention, self.dtype) for _ in range(self.distinct)]
        self.norm = nn.RMSNorm(dtype=self.dtype)

    def __call__(self, tokens: Any) -> Any:
        return self.logits(self.embed(tokens))

    def logits(self, x: Any) -> Any:
        """Logits of embedded tokens, to differentiate by them."""
        for i in range(self.depth):
            x = self.blocks[i % self.distinct](x)
        return self.embed.attend(self.norm(x))
