"""Golden checkpoints of torchao 0.18, by its tensors and `flatten_tensor_state_dict`.

torchao quantizes an `Int4Tensor` by two functions of mslk, which were in fbgemm_gpu before:

    pip install torch torchao==0.18.0
    pip download --no-deps fbgemm-gpu-genai==1.9.0  # unpack it; nothing is installed
    python tools/golden_checkpoints/torchao_modules.py fbgemm_gpu/experimental/gen_ai/quantize.py
"""

import sys
from unittest import mock

import torch
from checkpoints import K, N, load_module, save, weights
from torchao.core.config import config_to_dict
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int4Tensor,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.quant_primitives import MappingType

_KERNELS = "fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm"
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

with mock.patch.dict(sys.modules, {_KERNELS: mock.MagicMock()}):  # for 8-bit floats, on GPUs
    mslk = load_module(sys.argv[1])
(weight,) = weights(1)
values, scale, zero = mslk.int4_row_quantize_zp(weight, 32)
scale, zero = scale.to(torch.bfloat16), zero.to(torch.bfloat16)
stored = Int4Tensor(mslk.pack_int4(values), scale, zero, [1, 32], weight.shape)
tensors, metadata = flatten_tensor_state_dict({"layer.weight": stored})
repeated = [x.float().T.repeat_interleave(32, 1) for x in (scale, zero)]
expected = {"layer.weight": values.float() * repeated[0] + repeated[1]}
config = {"quantization_config": {"quant_method": "torchao"}}
save("torchao-int4-plain", config, tensors, expected, metadata)
