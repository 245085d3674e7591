"""gemma: Gemma 3 in Linen, including its embeddings and the tied head."""

import dataclasses

import common
import jax
from gemma import gm

from jaxlowbit import INT8
from jaxlowbit.linen import quantize_model

CONFIG = dataclasses.replace(
    gm.nn.Gemma3_270M().config,
    num_embed=common.VOCABULARY,
    embed_dim=256,
    hidden_dim=512,
    num_heads=4,
    head_dim=64,
    num_kv_heads=1,
    attention_types=gm.nn.Gemma3_270M().config.attention_types[4:6],
)


class Tiny(gm.nn.Gemma3_270M):
    config: gm.nn.config.TransformerConfig = CONFIG


module = Tiny(tokens="batch.input")
variables = common.randomized(module.init(jax.random.key(0), common.IDS))
wanted = module.apply(variables, common.IDS).logits
# A single INT8 would keep the table in floats; this rule matches it too.
model, variables, report = quantize_model(module, variables, {"": INT8}, common.IDS)
found = jax.jit(model.apply)(variables, common.IDS).logits
common.check("gemma", "Gemma 3", found, wanted, report.coverage)
