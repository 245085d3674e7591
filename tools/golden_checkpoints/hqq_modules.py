"""Golden checkpoints of hqq 0.2.8: `HQQLinear.state_dict`, which `save_to_safetensors` writes."""

import torch
from checkpoints import K, N, save, weights
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

CASES = {
    "4bit": (4, 64, 1, torch.float16),
    "3bit": (3, 32, 1, torch.bfloat16),
    "2bit": (2, 16, 1, torch.float16),
    "1bit": (1, 32, 1, torch.float32),
    "8bit": (8, 128, 1, torch.float32),
    "axis0": (4, 8, 0, torch.float16),
    "axis0-3bit": (3, 8, 0, torch.float32),
}

for name, (bits, size, axis, dtype) in CASES.items():
    (weight,) = weights(1)
    layer = torch.nn.Linear(K, N, bias=True)
    layer.weight.data = weight
    quantized = HQQLinear(
        layer.to(dtype),
        BaseQuantizeConfig(nbits=bits, group_size=size, axis=axis),
        compute_dtype=dtype,
        device="cpu",
    )
    tensors = {f"layer.{key}": value for key, value in quantized.state_dict().items()}
    # `Quantizer.dequantize` in float32, and so without rounding twice.
    meta = {
        key: value.float() if torch.is_tensor(value) else value
        for key, value in quantized.meta.items()
    }
    meta["compute_dtype"] = torch.float32
    own = Quantizer.dequantize(quantized.W_q.data, meta)
    options = {"nbits": bits, "group_size": size, "axis": axis, "view_as_float": False}
    config = {
        "quant_method": "hqq",
        "quant_config": {"weight_quant_params": options, "scale_quant_params": None},
        "skip_modules": ["lm_head"],
    }
    # hqq itself writes no quantization config.
    whole = {} if name == "4bit" else {"quantization_config": config}
    save(f"hqq-{name}", whole, tensors, {"layer.weight": own})
