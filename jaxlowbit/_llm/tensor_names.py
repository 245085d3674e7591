"""Names of tensors in GGUF files and Hugging Face folders, with our names of the weights.

Tables for `architectures.ARCHITECTURES`: N is the number of a layer, E the number of an expert.
"""

from collections.abc import Mapping

GGUF = {
    "token_embd.weight": "embedding",
    "output_norm.weight": "final_norm",
    "output.weight": "head",
    "blk.N.attn_q.weight": "layers.N.q",
    "blk.N.attn_k.weight": "layers.N.k",
    "blk.N.attn_v.weight": "layers.N.v",
    "blk.N.attn_output.weight": "layers.N.o",
    "blk.N.ffn_gate.weight": "layers.N.gate",
    "blk.N.ffn_up.weight": "layers.N.up",
    "blk.N.ffn_down.weight": "layers.N.down",
    "blk.N.attn_norm.weight": "layers.N.attention_norm",
    "blk.N.ffn_norm.weight": "layers.N.mlp_norm",
}
GGUF_BIASES = {
    "blk.N.attn_q.bias": "layers.N.q_bias",
    "blk.N.attn_k.bias": "layers.N.k_bias",
    "blk.N.attn_v.bias": "layers.N.v_bias",
}
GGUF_MORE_BIASES = {
    "blk.N.attn_output.bias": "layers.N.o_bias",
    "blk.N.ffn_gate.bias": "layers.N.gate_bias",
    "blk.N.ffn_up.bias": "layers.N.up_bias",
    "blk.N.ffn_down.bias": "layers.N.down_bias",
}
GGUF_HEAD_NORMS = {
    "blk.N.attn_q_norm.weight": "layers.N.q_norm",
    "blk.N.attn_k_norm.weight": "layers.N.k_norm",
}
GGUF_ALL_NORMS = {
    "blk.N.attn_q_norm.weight": "layers.N.q_all_norm",
    "blk.N.attn_k_norm.weight": "layers.N.k_all_norm",
}
GGUF_POST_NORMS = {
    "blk.N.post_attention_norm.weight": "layers.N.post_attention_norm",
    "blk.N.post_ffw_norm.weight": "layers.N.post_mlp_norm",
}
EXPERTS = ("gate", "up", "down")
GGUF_ROUTER = {"blk.N.ffn_gate_inp.weight": "layers.N.router"}
GGUF_EXPERTS = GGUF_ROUTER | {f"blk.N.ffn_{x}_exps.weight": f"layers.N.{x}" for x in EXPERTS}
GGUF_SINGLE_EXPERTS = {f"blk.N.ffn_{x}.E.weight": f"layers.N.{x}.E" for x in EXPERTS}
"""One tensor for each expert, in files of early versions of llama.cpp."""
GGUF_EXPERT_BIASES = {f"blk.N.ffn_{x}_exps.bias": f"layers.N.{x}_bias" for x in EXPERTS}

FOLDER = {
    "embed_tokens.weight": "embedding",
    "norm.weight": "final_norm",
    "lm_head.weight": "head",
    "layers.N.self_attn.q_proj.weight": "layers.N.q",
    "layers.N.self_attn.k_proj.weight": "layers.N.k",
    "layers.N.self_attn.v_proj.weight": "layers.N.v",
    "layers.N.self_attn.o_proj.weight": "layers.N.o",
    "layers.N.mlp.gate_proj.weight": "layers.N.gate",
    "layers.N.mlp.up_proj.weight": "layers.N.up",
    "layers.N.mlp.down_proj.weight": "layers.N.down",
    "layers.N.input_layernorm.weight": "layers.N.attention_norm",
    "layers.N.post_attention_layernorm.weight": "layers.N.mlp_norm",
}
FOLDER_BIASES = {
    "layers.N.self_attn.q_proj.bias": "layers.N.q_bias",
    "layers.N.self_attn.k_proj.bias": "layers.N.k_bias",
    "layers.N.self_attn.v_proj.bias": "layers.N.v_bias",
}
FOLDER_MORE_BIASES = {
    "layers.N.self_attn.o_proj.bias": "layers.N.o_bias",
    "layers.N.mlp.gate_proj.bias": "layers.N.gate_bias",
    "layers.N.mlp.up_proj.bias": "layers.N.up_bias",
    "layers.N.mlp.down_proj.bias": "layers.N.down_bias",
}
FOLDER_FUSED = {
    "layers.N.self_attn.qkv_proj.weight": "layers.N.qkv",
    "layers.N.mlp.gate_up_proj.weight": "layers.N.gate_up",
}
FOLDER_HEAD_NORMS = {
    "layers.N.self_attn.q_norm.weight": "layers.N.q_norm",
    "layers.N.self_attn.k_norm.weight": "layers.N.k_norm",
}
FOLDER_ALL_NORMS = {
    "layers.N.self_attn.q_norm.weight": "layers.N.q_all_norm",
    "layers.N.self_attn.k_norm.weight": "layers.N.k_all_norm",
}
FOLDER_POST_NORMS = {
    "layers.N.post_attention_layernorm.weight": "layers.N.post_attention_norm",
    "layers.N.pre_feedforward_layernorm.weight": "layers.N.mlp_norm",
    "layers.N.post_feedforward_layernorm.weight": "layers.N.post_mlp_norm",
}
FOLDER_EXPERTS = {"layers.N.mlp.gate.weight": "layers.N.router"} | {
    f"layers.N.mlp.experts.E.{x}_proj.weight": f"layers.N.{x}.E" for x in EXPERTS
}
FOLDER_MIXTRAL = {
    "layers.N.block_sparse_moe.gate.weight": "layers.N.router",
    "layers.N.block_sparse_moe.experts.E.w1.weight": "layers.N.gate.E",
    "layers.N.block_sparse_moe.experts.E.w3.weight": "layers.N.up.E",
    "layers.N.block_sparse_moe.experts.E.w2.weight": "layers.N.down.E",
}
FOLDER_GPT_OSS = {
    "layers.N.self_attn.o_proj.bias": "layers.N.o_bias",
    "layers.N.self_attn.sinks": "layers.N.sinks",
    "layers.N.mlp.router.weight": "layers.N.router",
    "layers.N.mlp.router.bias": "layers.N.router_bias",
    "layers.N.mlp.experts.gate_up_proj": "layers.N.gate_up",
    "layers.N.mlp.experts.gate_up_proj_bias": "layers.N.gate_up_bias",
    "layers.N.mlp.experts.down_proj": "layers.N.down",
    "layers.N.mlp.experts.down_proj_bias": "layers.N.down_bias",
}


GGUF_DENSE = {f"blk.N.ffn_{x}.weight": f"layers.N.dense_{x}" for x in EXPERTS} | {
    "blk.N.ffn_gate_inp.scale": "layers.N.router_norm",
    "blk.N.ffn_gate_up_exps.weight": "layers.N.gate_up",
    "blk.N.ffn_down_exps.scale": "layers.N.expert_scale",
    "blk.N.pre_ffw_norm_2.weight": "layers.N.expert_norm",
    "blk.N.post_ffw_norm_1.weight": "layers.N.post_dense_norm",
    "blk.N.post_ffw_norm_2.weight": "layers.N.post_expert_norm",
}
"""A dense MLP in addition to the experts of Gemma 4."""
FOLDER_DENSE = {f"layers.N.mlp.{x}_proj.weight": f"layers.N.dense_{x}" for x in EXPERTS} | {
    "layers.N.router.proj.weight": "layers.N.router",
    "layers.N.router.scale": "layers.N.router_norm",
    "layers.N.router.per_expert_scale": "layers.N.expert_scale",
    "layers.N.experts.gate_up_proj": "layers.N.gate_up",
    "layers.N.experts.down_proj": "layers.N.down",
    **{f"layers.N.experts.E.{x}_proj.weight": f"layers.N.{x}.E" for x in EXPERTS},
    "layers.N.pre_feedforward_layernorm_2.weight": "layers.N.expert_norm",
    "layers.N.post_feedforward_layernorm_1.weight": "layers.N.post_dense_norm",
    "layers.N.post_feedforward_layernorm_2.weight": "layers.N.post_expert_norm",
}


def without(table: Mapping[str, str], *weights: str) -> dict[str, str]:
    """A table without the names of some weights of layers."""
    left_out = {f"layers.N.{name}" for name in weights}
    return {tensor: ours for tensor, ours in table.items() if ours not in left_out}


PRE_NORMS = ("attention_norm", "mlp_norm")
GGUF_OLMO2 = without(GGUF, *PRE_NORMS) | GGUF_POST_NORMS
FOLDER_OLMO2 = without(FOLDER, *PRE_NORMS) | without(FOLDER_POST_NORMS, "mlp_norm")
GGUF_GEMMA4 = (
    GGUF
    | GGUF_HEAD_NORMS
    | GGUF_POST_NORMS
    | {"blk.N.layer_output_scale.weight": "layers.N.layer_scale"}
)
FOLDER_GEMMA4 = (
    FOLDER
    | FOLDER_HEAD_NORMS
    | FOLDER_POST_NORMS
    | FOLDER_BIASES
    | without(FOLDER_MORE_BIASES, *(f"{x}_bias" for x in EXPERTS))
    | {"layers.N.layer_scalar": "layers.N.layer_scale"}
)
