"""Shared by the scripts for transformers, whose Flax models have the same interface."""

from typing import Any

import common
import jax

from jaxlowbit import INT8
from jaxlowbit.linen import quantize_pretrained

SIZES = {
    "vocab_size": common.VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def check(name: str, model: Any, inputs: jax.Array = common.IDS) -> None:
    """Quantizes a model, and compares its logits and generated tokens with the float model."""
    model.params = common.randomized(model.params)
    wanted = model(inputs).logits
    # A single INT8 would keep embeddings and heads in floats; this rule matches them too.
    report = quantize_pretrained(model, {"": INT8}, inputs)
    found = jax.jit(lambda params: model(inputs, params=params).logits)(model.params)
    common.check("transformers", name, found, wanted, report.coverage)
    if model.can_generate():
        prompt = inputs[:, :4]
        tokens = model.generate(prompt, max_new_tokens=4, do_sample=False).sequences
        assert tokens.shape == (common.SEQUENCES, 8)
