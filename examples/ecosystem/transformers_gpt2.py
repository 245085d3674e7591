"""transformers: GPT-2 in Flax, with `FlaxConv1D` and a tied head."""

import common
import transformers_models
from transformers import FlaxGPT2LMHeadModel, GPT2Config

config = GPT2Config(vocab_size=common.VOCABULARY, n_embd=256, n_layer=2, n_head=4, n_positions=64)
transformers_models.check("GPT-2", FlaxGPT2LMHeadModel(config, seed=0))
