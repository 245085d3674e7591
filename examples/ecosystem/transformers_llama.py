"""transformers: Llama in Flax, with calls and generation."""

import transformers_models
from transformers import FlaxLlamaForCausalLM, LlamaConfig

config = LlamaConfig(**transformers_models.SIZES, num_key_value_heads=2)
transformers_models.check("Llama", FlaxLlamaForCausalLM(config, seed=0))
