"""mamba2-jax: Mamba 2 in NNX; its head is the transposed table of its `nnx.Embed`."""

from typing import Any

import common
import jax
from flax import nnx
from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

from jaxlowbit import INT8
from jaxlowbit.nnx import quantize_model


@nnx.jit
def logits(model: Any) -> jax.Array:
    return model(common.IDS)["logits"]


config = Mamba2Config(vocab_size=common.VOCABULARY, hidden_size=256, num_hidden_layers=2)
model = Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))
wanted = logits(model)
# A single INT8 would keep the table in floats; this rule matches it too.
report = quantize_model(model, {"": INT8})
common.check("mamba2-jax", "Mamba 2", logits(model), wanted, report.coverage)
