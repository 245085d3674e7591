"""Golden checkpoints of fine-grained float8: weights by transformers, in float32."""

import torch
from checkpoints import save, weights
from transformers.integrations import finegrained_fp8
from transformers.utils.quantization_config import FineGrainedFP8Config

N, K, ROWS, COLUMNS = 40, 112, 16, 32
(weight,) = weights(1, N, K)
for name in ("float", "ue8m0", "tensor"):
    block = None if name == "tensor" else (ROWS, COLUMNS)
    config = FineGrainedFP8Config(
        weight_block_size=block,
        scale_fmt="ue8m0" if name == "ue8m0" else "float",
        modules_to_not_convert=["lm_head"],
    )
    if block is None:
        scale = weight.abs().max() / 448
        repeated = scale
    else:
        cut = torch.nn.functional.pad(weight, (0, -K % COLUMNS, 0, -N % ROWS))
        blocks = cut.unfold(0, ROWS, ROWS).unfold(1, COLUMNS, COLUMNS)
        scale = blocks.abs().amax((2, 3)) / 448
        if name == "ue8m0":
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        repeated = scale.repeat_interleave(ROWS, 0).repeat_interleave(COLUMNS, 1)[:N, :K]
    values = (weight / repeated).to(torch.float8_e4m3fn)
    stored = scale.to(torch.float8_e8m0fnu) if name == "ue8m0" else scale
    own = finegrained_fp8._dequantize_fp8_weight(values, stored, block, torch.float32)
    tensors = {"layer.weight": values, "layer.weight_scale_inv": stored}
    save(f"fp8-{name}", {"quantization_config": config.to_dict()}, tensors, {"layer.weight": own})

# Experts of 4-bit floats, as stacks.
config = FineGrainedFP8Config(scale_fmt="ue8m0", expert_dtype="fp4")
values = torch.randint(-128, 128, (3, 24, 48), dtype=torch.int8)
stored = torch.randint(110, 135, (3, 24, 3), dtype=torch.uint8).view(torch.float8_e8m0fnu)
own = finegrained_fp8.Fp8Dequantize(None)._dequantize_one(values, stored, torch.float32)
name = "model.layers.0.mlp.experts.down_proj"
tensors = {name: values, f"{name}_scale_inv": stored}
save("fp8-experts", {"quantization_config": config.to_dict()}, tensors, {name: own})
