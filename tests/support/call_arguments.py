"""Arguments of the calls in `right_calls`: arrays, models and layers, made at first use."""

import atexit
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import jaxlowbit as jl
from jaxlowbit import linen as jl_linen
from jaxlowbit import llm
from jaxlowbit import nnx as jl_nnx

K, N = 64, 128


@functools.cache
def arrays() -> dict[str, Any]:
    w = jax.random.normal(jax.random.key(0), (K, N))
    return {
        "x": jnp.ones((3, K)),
        "w": w,
        "q": jl.quantize(w, jl.INT4),
        "down": jl.quantize(w.T, jl.INT4),
        "square": jl.quantize(w[:, :K], jl.INT8),
        "pair": jl.quantize(jnp.stack([w, w]), jl.INT4),
        "experts": jl.quantize(jnp.stack([w] * 3), jl.INT4),
        "gate_up": jl.quantize(jnp.broadcast_to(w, (2, 3, K, N)), jl.INT4),
        "downs": jl.quantize(jnp.stack([w.T] * 3), jl.INT4),
        "integers": jnp.ones((K, N), jnp.int8),
        "scale": jnp.ones((1, N)),
        "mesh": jax.make_mesh((1,), ("model",), devices=jax.devices("cpu")[:1]),
    }


def given(name: str) -> Callable[[], Any]:
    return lambda: arrays()[name]


def constant(value: Any) -> Callable[[], Any]:
    return lambda: value


class Model(nnx.Module):
    def __init__(self) -> None:
        self.up = nnx.Linear(K, N, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(N, K, rngs=nnx.Rngs(0))


MODULE = nn.Sequential([nn.Dense(N), nn.Dense(K)])


@functools.cache
def variables() -> Any:
    return MODULE.init(jax.random.key(0), jnp.ones((3, K)))


def initialised(layer: Any, inputs: Any) -> Callable[..., Any]:
    """An initialized Linen layer."""
    return lambda **fields: layer(**fields).init(jax.random.key(0), inputs())


@functools.cache
def quantized() -> Any:
    return jl_linen.quantize_model(MODULE, variables(), jl.INT4, jnp.ones((3, K)))[:2]


@functools.cache
def layers() -> dict[str, Any]:
    """An NNX layer of each kind."""
    options: Any = {"format": jl.INT4, "rngs": nnx.Rngs(0)}
    return {
        "linear": jl_nnx.QuantizedLinear(K, N, **options),
        "embed": jl_nnx.QuantizedEmbed(N, K, **options),
        "general": jl_nnx.QuantizedLinearGeneral((4, 16), N, axis=(-2, -1), **options),
        "einsum": jl_nnx.QuantizedEinsum("bd,dnh->bnh", (K, 4, 32), (4, 32), **options),
    }


@functools.cache
def applied(name: str) -> Callable[..., Any]:
    """The `apply` of a Linen layer of the given kind, with variables."""
    layer, inputs = {
        "QuantizedDense": (jl_linen.QuantizedDense(N, "int4"), arrays()["x"]),
        "QuantizedEmbed": (jl_linen.QuantizedEmbed(N, K, "int4"), jnp.array([3, 1])),
        "QuantizedDenseGeneral": (jl_linen.QuantizedDenseGeneral((4, 32), "int4"), arrays()["x"]),
        "QuantizedEinsum": (
            jl_linen.QuantizedEinsum((K, 4, 32), "bd,dnh->bnh", "int4"),
            arrays()["x"],
        ),
    }[name]
    return functools.partial(layer.apply, layer.init(jax.random.key(0), inputs))


SIZES: dict[str, Any] = {
    "architecture": "llama",
    "layers": 1,
    "width": 64,
    "heads": 2,
    "kv_heads": 1,
    "head_size": 32,
    "hidden": 64,
    "vocabulary": 64,
    "context": 32,
    "norm_epsilon": 1e-5,
    "rope_base": 1e4,
    "rope_pairs": "halves",
    "rope_size": None,
    "rope_scaling": None,
    "rope_layers": (),
    "local_rope_base": None,
    "window": None,
    "window_layers": (),
    "qk_norm": None,
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "tied_head": True,
    "activation": "silu",
    "norm_placement": "pre",
    "norm_offset": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "attention_scale": None,
    "attention_softcap": None,
    "attention_temperature": None,
    "logit_softcap": None,
    "bos": None,
    "eos": (2,),
}


@functools.cache
def config() -> llm.Config:
    return llm.Config(**SIZES)


@functools.cache
def adapted_model() -> llm.LanguageModel:
    return llm.adapt(language_model(), llm.LoRA(2))


@functools.cache
def language_model() -> llm.LanguageModel:
    return llm.init(config(), jl.INT8)


@functools.cache
def floats() -> dict[str, Any]:
    return {name: jnp.ones(shape) / 64 for name, shape in config().shapes().items()}


@functools.cache
def model_file() -> Path:
    from model_files import write_tiny

    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return write_tiny(Path(folder.name))
