"""Golden checkpoint of gpt-oss's experts: transformers' `convert_moe_packed_tensors`."""

import torch
from checkpoints import save
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

torch.manual_seed(0)
SHAPES = {"gate_up_proj": (3, 32, 3), "down_proj": (3, 24, 2)}
tensors, expected = {}, {}
for name, (experts, n, blocks) in SHAPES.items():
    data = torch.randint(0, 256, (experts, n, blocks, 16), dtype=torch.uint8)
    scales = torch.randint(110, 135, (experts, n, blocks), dtype=torch.uint8)
    prefix = f"model.layers.0.mlp.experts.{name}"
    tensors |= {f"{prefix}_blocks": data, f"{prefix}_scales": scales}
    tensors[f"{prefix}_bias"] = torch.randn(experts, n, dtype=torch.bfloat16)
    own = convert_moe_packed_tensors(data, scales, dtype=torch.bfloat16)
    expected[prefix] = own.transpose(1, 2)
config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
save("mxfp4-gpt-oss", {"quantization_config": config}, tensors, expected)
