"""google-tunix: Qwen 3 with experts, raw parameters of its `MoELayer`."""

import common
import tunix_models
from flax import nnx
from tunix.models.qwen3 import model as qwen3

config = qwen3.ModelConfig(
    **tunix_models.SIZES,
    vocab_size=common.VOCABULARY,
    num_kv_heads=2,
    rope_theta=10000,
    norm_eps=1e-6,
    num_experts=4,
    num_experts_per_tok=2,
)
# A small error in a router would send a token to other experts.
tunix_models.check("Qwen 3 MoE", qwen3.Qwen3(config, rngs=nnx.Rngs(0)), keep="router")
