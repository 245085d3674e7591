"""Golden checkpoints of nvidia-modelopt 0.47: a tiny Llama, quantized and exported on the CPU."""

import copy
import json
import tempfile
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from folders import write
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

CASES = {
    "fp8": mtq.FP8_DEFAULT_CFG,
    "fp8-channel": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "fp8-block": mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
    "nvfp4": mtq.NVFP4_DEFAULT_CFG,
    "nvfp4-awq": mtq.NVFP4_AWQ_LITE_CFG,
    "int4-awq": mtq.INT4_AWQ_CFG,
    "w4a8-awq": mtq.W4A8_AWQ_BETA_CFG,
    "int8-smoothquant": mtq.INT8_SMOOTHQUANT_CFG,
    "mxfp8": mtq.MXFP8_DEFAULT_CFG,
    "mxfp4": mtq.MXFP4_DEFAULT_CFG,
}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


for name, config in CASES.items():
    try:
        llama = model()
        inputs = torch.randint(0, 32, (4, 16))
        mtq.quantize(llama, copy.deepcopy(config), lambda m: m(inputs))
        with tempfile.TemporaryDirectory() as folder:
            export_hf_checkpoint(llama, export_dir=folder)
            files = sorted(x.name for x in Path(folder).iterdir())
            tensors = load_file(Path(folder) / "model.safetensors")
            values = json.loads((Path(folder) / "config.json").read_text())
            print(name, files, json.dumps(values.get("quantization_config")))
            print(json.loads((Path(folder) / "hf_quant_config.json").read_text()))
            for key, value in tensors.items():
                if "layers.0" in key: print("  ", key, value.dtype, tuple(value.shape))
    except Exception as error:
        import traceback; traceback.print_exc()
