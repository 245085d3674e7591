"""A float32 reference decoder in NumPy, and tiny configurations."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import dequantized

from jaxlowbit import Format, QuantizedArray
from jaxlowbit._llm.random_weights import random_weights
from jaxlowbit.llm import Config, RopeScaling

TINY: dict[str, Any] = {
    "layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_size": 16, "hidden": 96,
    "vocabulary": 160, "context": 256,
}  # fmt: skip
LLAMA3 = RopeScaling("llama3", factor=8.0, original_context=32, low=1.0, high=4.0)
YARN = RopeScaling("yarn", factor=4.0, original_context=32)

GEMMA3: dict[str, Any] = {
    "rope_base": 1e6, "local_rope_base": 1e4, "rope_scaling": RopeScaling("linear", factor=2.0),
    "window": 5, "window_layers": (True, False), "qk_norm": "head", "tied_head": True,
    "activation": "gelu_tanh", "norm_offset": 1.0, "norm_placement": "pre_and_post",
    "embedding_scale": 8.0, "attention_scale": 0.3, "logit_softcap": 30.0,
}  # fmt: skip
LLAMA = Config("llama", **TINY, rope_pairs="neighbours")
CONFIGS = {
    "llama": LLAMA,
    "llama3": LLAMA.replace(rope_base=5e5, rope_scaling=LLAMA3, tied_head=True),
    "linear": LLAMA.replace(rope_scaling=RopeScaling("linear", factor=4.0)),
    "factors": LLAMA.replace(rope_scaling=RopeScaling("factors", factors=(1, 1, 1, 1, 2, 4, 8, 8))),
    "mistral": LLAMA.replace(architecture="mistral", window=7),
    "qwen2": Config("qwen2", **TINY, attention_bias=True, rope_scaling=YARN),
    "qwen3": Config("qwen3", **TINY, qk_norm="head", norm_epsilon=1e-6),
    "gemma3": Config("gemma3", **TINY, **GEMMA3),
}


LONGROPE = RopeScaling(
    "longrope", 8.0, 300, factors=(1.0, 1.5, 2.0, 2.5), long_factors=(1.0, 2.0, 4.0, 8.0)
)
# Parts that no kernel computes: the decoder composes them of products and XLA's operations.
PARTS = {
    "olmo3": Config(
        "olmo3", **TINY, rope_size=8, rope_layers=(False, True), window=5,
        window_layers=(False, True), local_rope_base=100.0, qk_norm="all", norm_placement="post",
        attention_softcap=2.0, attention_temperature=(0.1, 7),
    ),
    "granite": Config(
        "granite", **TINY, rope_pairs="neighbours", rope_size=8, rope_scaling=LONGROPE,
        attention_bias=True, output_bias=True, mlp_bias=True, embedding_scale=3.0,
        residual_scale=0.3, logit_scale=0.25,
    ),
}  # fmt: skip


INT4_G32 = Format(4, group_size=32)


def random(config: Config, format: Format = INT4_G32) -> dict[str, Any]:
    """Quantized matrices and random norms and biases, by name, in float32."""
    rng = np.random.default_rng(0)

    def vector(name: str, shape: tuple[int, ...]) -> jax.Array:
        middle = 0.0 if name.endswith("bias") else 1.0 - config.norm_offset
        return jnp.asarray(rng.normal(middle, 0.3, shape), jnp.float32)

    weights = random_weights(config, format, dtype=jnp.float32)
    return {
        name: x if isinstance(x, QuantizedArray) else vector(name, x.shape)
        for name, x in weights.items()
    }


def floats(weights: dict[str, Any]) -> dict[str, np.ndarray]:
    """The dequantized weights in float64."""
    return {
        name: np.asarray(dequantized(x) if isinstance(x, QuantizedArray) else x, np.float64)
        for name, x in weights.items()
    }


def reference(config: Config, weights: dict[str, np.ndarray], tokens: Any) -> np.ndarray:
    """Logits (length, vocabulary) of tokens (length,), computed token by token."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = weights[name] + config.norm_offset
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_epsilon) * scale

    keys: list[list[np.ndarray]] = [[] for _ in range(config.layers)]
    values: list[list[np.ndarray]] = [[] for _ in range(config.layers)]
    rows = []
    for position, token in enumerate(tokens):
        x = weights["embedding"][:, token] * config.embedding_scale
        for i in range(config.layers):
            of = f"layers.{i}."
            local = config.is_local(i)
            pre = config.norm_placement != "post"
            normed = norm(x, of + "attention_norm") if pre else x
            q, k, v = (normed @ weights[of + name] for name in "qkv")
            if config.attention_bias:
                q, k, v = (
                    y + weights[f"{of}{n}_bias"] for y, n in zip((q, k, v), "qkv", strict=True)
                )
            if config.qk_norm == "all":
                q, k = norm(q, of + "q_all_norm"), norm(k, of + "k_all_norm")
            q, k, v = (y.reshape(-1, config.head_size) for y in (q, k, v))
            if config.qk_norm == "head":
                q, k = norm(q, of + "q_norm"), norm(k, of + "k_norm")
            if config.rotates(i):
                q, k = (turned(config, y, position, local) for y in (q, k))
            if config.attention_temperature is not None:
                factor, length = config.attention_temperature
                q = q * (1 + factor * math.log(1 + position // length))
            keys[i].append(k)
            values[i].append(v)
            first = max(0, position - config.window + 1) if local and config.window else 0
            attended = []
            for head in range(config.heads):
                group = head * config.kv_heads // config.heads
                scale = config.attention_scale or 1 / math.sqrt(config.head_size)
                scores = np.stack([key[group] for key in keys[i][first:]]) @ q[head] * scale
                if config.attention_softcap is not None:
                    scores = config.attention_softcap * np.tanh(scores / config.attention_softcap)
                p = np.exp(scores - scores.max())
                attended.append(p / p.sum() @ np.stack([u[group] for u in values[i][first:]]))
            out = np.concatenate(attended) @ weights[of + "o"]
            out = out + weights[of + "o_bias"] if config.output_bias else out
            post, factor = config.norm_placement != "pre", config.residual_scale
            x = x + factor * (norm(out, of + "post_attention_norm") if post else out)
            normed = norm(x, of + "mlp_norm") if pre else x
            gate, up = normed @ weights[of + "gate"], normed @ weights[of + "up"]
            if config.mlp_bias:
                gate, up = gate + weights[of + "gate_bias"], up + weights[of + "up_bias"]
            if config.activation == "silu":
                gate = gate / (1 + np.exp(-gate))
            else:
                gate = (
                    0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
                )
            out = (gate * up) @ weights[of + "down"]
            out = out + weights[of + "down_bias"] if config.mlp_bias else out
            x = x + factor * (norm(out, of + "post_mlp_norm") if post else out)
        head = weights["embedding"] if config.tied_head else weights["head"]
        logits = config.logit_scale * (norm(x, "final_norm") @ head)
        cap = config.logit_softcap
        rows.append(logits if cap is None else cap * np.tanh(logits / cap))
    return np.stack(rows)


def turned(config: Config, x: np.ndarray, position: int, local: bool) -> np.ndarray:
    """Heads (n, head_size) with every pair rotated as a complex number."""
    own = local and config.local_rope_base is not None
    base = float((config.local_rope_base if own else config.rope_base) or 0)
    scaling = None if own else config.rope_scaling
    out = x.copy()
    half = config.rotated_size(local=local) // 2
    for i in range(half):
        turn, size = base ** (-i / half), 1.0
        if scaling is not None and scaling.kind == "longrope":
            turn /= scaling.factors[i]  # of caches of no more slots than the original context
            size = math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context))
        if scaling is not None and scaling.kind == "linear":
            turn /= scaling.factor
        if scaling is not None and scaling.kind == "factors":
            turn /= scaling.factors[i]
        if scaling is not None and scaling.kind == "llama3":
            length = 2 * math.pi / turn  # wavelength
            original = scaling.original_context
            low, high = scaling.low, scaling.high
            if length > original / low:
                turn /= scaling.factor
            elif length > original / high:
                smooth = (original / length - low) / (high - low)
                turn = (1 - smooth) * turn / scaling.factor + smooth * turn
        if scaling is not None and scaling.kind == "yarn":

            def dim(rotations: float, original: int = scaling.original_context) -> float:
                ratio = math.log(original / (rotations * 2 * math.pi))
                return config.head_size * ratio / (2 * math.log(base))

            low, high = max(math.floor(dim(32)), 0), min(math.ceil(dim(1)), config.head_size - 1)
            ramp = min(max((i - low) / max(high - low, 0.001), 0), 1)
            turn = turn / scaling.factor * ramp + turn * (1 - ramp)
            size = 0.1 * math.log(scaling.factor) + 1
        a, b = (2 * i, 2 * i + 1) if config.rope_pairs == "neighbours" else (i, i + half)
        z = (x[:, a] + 1j * x[:, b]) * np.exp(1j * position * turn) * size
        out[:, a], out[:, b] = z.real, z.imag
    return out
