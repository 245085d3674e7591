"""Golden checkpoints of nvidia-modelopt 0.47: a tiny Llama, quantized and exported on the CPU.

Its fake quantization gives the expected weights; for formats whose fake quantization needs a GPU,
`dequantize` of its tensors does. Only `down_proj` is quantized: for other modules the export fuses
factors of inputs into norms.

    pip install torch transformers
    pip install --no-deps nvidia-modelopt==0.47.0 "pulp<3" omegaconf scipy nvidia-ml-py
"""

import copy
import json
import tempfile
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from checkpoints import save
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

CASES = {
    "fp8": mtq.FP8_DEFAULT_CFG,
    "fp8-channel": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "fp8-block": mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
    "nvfp4": mtq.NVFP4_DEFAULT_CFG,
    "int4-awq": mtq.INT4_AWQ_CFG,
    "w4a8-awq": mtq.W4A8_AWQ_BETA_CFG,
    "int8-smoothquant": mtq.INT8_SMOOTHQUANT_CFG,
    "mxfp8": mtq.MXFP8_DEFAULT_CFG,
    "mxfp4": mtq.MXFP4_DEFAULT_CFG,
}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaForCausalLM(config).float().eval()


def dequantized(name: str, data: torch.Tensor, tensors: dict, prefix: str) -> torch.Tensor:
    shape = torch.Size((data.shape[0], data.shape[1] * (1 if name == "mxfp8" else 2)))
    scale = tensors[f"{prefix}weight_scale"]
    if name == "nvfp4":
        options = {"double_scale": tensors[f"{prefix}weight_scale_2"], "block_sizes": {-1: 16}}
        return NVFP4QTensor(shape, torch.float32, data).dequantize(scale=scale, **options)
    kind = MXFP8QTensor if name == "mxfp8" else MXFP4QTensor
    return kind(shape, torch.float32, data).dequantize(scale=scale, block_sizes={-1: 32})


def quantized(name: str, config: dict) -> None:
    llama = model()
    config = copy.deepcopy(config)
    for pattern in ("*self_attn*", "*gate_proj*", "*up_proj*"):
        config["quant_cfg"].append({"quantizer_name": pattern, "enable": False})
    inputs = torch.randint(0, 32, (4, 16))
    if name == "nvfp4":  # without a fake product
        mtq.quantize(llama, config, lambda m: m.model.layers[0].mlp.down_proj.weight)
    else:
        mtq.quantize(llama, config, lambda m: m(inputs))
    layer = llama.model.layers[0].mlp.down_proj
    own = None
    if name not in ("nvfp4", "mxfp4", "mxfp8"):
        quantizer = layer.weight_quantizer
        if name == "w4a8-awq":  # without its second stage, 8-bit floats of the products' operands
            quantizer = quantizer[0]
        own = quantizer(layer.weight).detach()
        if layer.input_quantizer.pre_quant_scale is not None:
            own = own * layer.input_quantizer.pre_quant_scale.float()
    with tempfile.TemporaryDirectory() as folder:
        export_hf_checkpoint(llama, export_dir=folder)
        tensors = load_file(Path(folder) / "model.safetensors")
        values = json.loads((Path(folder) / "config.json").read_text())
    prefix = "model.layers.0.mlp.down_proj."
    tensors = {key: value for key, value in tensors.items() if key.startswith(prefix)}
    if own is None:
        own = dequantized(name, tensors[f"{prefix}weight"], tensors, prefix)
    config = {"quantization_config": values["quantization_config"]}
    save(f"modelopt-{name}", config, tensors, {f"{prefix}weight": own})


for name, config in CASES.items():
    quantized(name, config)
