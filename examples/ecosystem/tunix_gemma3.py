"""google-tunix: Gemma 3, in bfloat16."""

import dataclasses

import common
import tunix_models
from flax import nnx
from tunix.models.gemma3 import model as gemma3

config = dataclasses.replace(
    gemma3.ModelConfig.gemma3_270m(),
    **tunix_models.SIZES,
    num_embed=common.VOCABULARY,
    num_kv_heads=1,
)
tunix_models.check("Gemma 3", gemma3.Gemma3(config, rngs=nnx.Rngs(0)))
