"""Golden checkpoints of torchao 0.18, by its tensors and `flatten_tensor_state_dict`."""

import torch
from checkpoints import K, N, save, weights
from torchao.core.config import config_to_dict
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.quant_primitives import MappingType

CASES = {
    "int8": Int8WeightOnlyConfig(),
    "int8-group": Int8WeightOnlyConfig(granularity=PerGroup(32)),
    "int8-dynamic": Int8DynamicActivationInt8WeightConfig(),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "int3-asymmetric": IntxWeightOnlyConfig(
        weight_dtype=torch.int3, granularity=PerGroup(64), mapping_type=MappingType.ASYMMETRIC
    ),
    "int4-dynamic": Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    ),
    "int6-channel": IntxWeightOnlyConfig(weight_dtype=torch.int6, granularity=PerAxis(0)),
    "float8": Float8WeightOnlyConfig(),
}

for name, config in CASES.items():
    (weight,) = weights(1)
    model = torch.nn.Sequential()
    model.add_module("layer", torch.nn.Linear(K, N, bias=True))
    model.layer.weight.data = weight + (0.1 if "asymmetric" in name else 0)
    quantize_(model.to(torch.bfloat16), config)
    tensors, metadata = flatten_tensor_state_dict(
        {key: getattr(value, "data", value) for key, value in model.state_dict().items()}
    )
    stored = model.layer.weight
    own = stored.dequantize()
    values = {"quant_method": "torchao", "quant_type": {"default": config_to_dict(config)}}
    expected = {"layer.weight": own}
    save(f"torchao-{name}", {"quantization_config": values}, tensors, expected, metadata)
