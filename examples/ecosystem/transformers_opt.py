"""transformers: OPT in Flax, with a tied head and learned positions."""

import common
import transformers_models
from transformers import FlaxOPTForCausalLM, OPTConfig

config = OPTConfig(
    vocab_size=common.VOCABULARY,
    hidden_size=256,
    ffn_dim=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    word_embed_proj_dim=256,
    max_position_embeddings=64,
)
transformers_models.check("OPT", FlaxOPTForCausalLM(config, seed=0))
