"""Shared by the scripts for google-tunix, whose models have the same interface."""

from typing import Any

import common
import jax
import jax.numpy as jnp
from flax import nnx

from jaxlowbit import INT8
from jaxlowbit.nnx import quantize_model

SIZES = {
    "num_layers": 2,
    "embed_dim": 256,
    "hidden_dim": 512,
    "num_heads": 4,
    "head_dim": 64,
}
MASK = jnp.tril(jnp.ones((common.SEQUENCES, common.LENGTH, common.LENGTH), bool))


def check(name: str, model: Any, **kwargs: Any) -> None:
    """Quantizes a model, and compares it with the float model."""
    nnx.update(model, common.randomized(nnx.state(model, nnx.Param)))
    wanted = logits(model)
    # A single INT8 would keep embeddings and heads in floats; this rule matches them too.
    report = quantize_model(model, {"": INT8}, **kwargs)
    common.check("google-tunix", name, logits(model), wanted, report.coverage)


@nnx.jit
def logits(model: Any) -> jax.Array:
    return model(common.IDS, common.POSITIONS, None, MASK)[0]
