"""google-tunix: Llama 3 with a tied head, `Embedder.decode`."""

import common
import tunix_models
from flax import nnx
from tunix.models.llama3 import model as llama3

config = llama3.ModelConfig(
    **tunix_models.SIZES,
    vocab_size=common.VOCABULARY,
    num_kv_heads=2,
    rope_theta=10000,
    norm_eps=1e-5,
    weight_tying=True,
)
tunix_models.check("Llama 3", llama3.Llama3(config, rngs=nnx.Rngs(0)))
