"""Whole small Llamas, quantized by libraries, with the logits that transformers computes.

pip install torch transformers compressed-tensors==0.20.0
pip download --no-deps auto_gptq==0.7.1   # unpack it; nothing is installed
python tools/golden_checkpoints/llamas.py auto_gptq/nn_modules/qlinear/qlinear_cuda.py
"""

import argparse
import json
from typing import Any

import compressed_tensors_modules as modules
import torch
from checkpoints import DATA, load_module
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from gptq_modules import CONFIG as GPTQ
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

# The vocabulary of the tokenizer in tests/support/model_files.py.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 264,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 262,
    "eos_token_id": 263,
}
GROUP = 32


def model() -> Any:
    torch.manual_seed(0)
    found = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.2)).eval()
    for parameter in found.parameters():  # not buffers, the frequencies of the rotation
        parameter.data = parameter.data.bfloat16().float()
    return found


def linears(found: Any) -> dict[str, Any]:
    return {
        name: module
        for name, module in found.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }


def logits(found: Any) -> torch.Tensor:
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 200, 100, 50, 25]])
    with torch.no_grad():
        return found(tokens).logits.float()


def save(name: str, found: Any, tensors: dict[str, torch.Tensor], quantization: Any) -> Any:
    folder = DATA / name
    folder.mkdir(parents=True, exist_ok=True)
    config = found.config.to_dict() | {"quantization_config": quantization}
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    quantized = linears(found)
    for key, value in found.state_dict().items():
        module, _, last = key.rpartition(".")
        if key != "lm_head.weight" and not (module in quantized and last == "weight"):
            tensors[key] = value.bfloat16()
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def finish(folder: Any, values: torch.Tensor) -> None:
    save_file({"logits": values}, folder / "logits.safetensors")
    print(folder, sum(file.stat().st_size for file in folder.iterdir()), "bytes")


def dequantize(found: Any, bnb: Any) -> None:
    """Replaces the 4-bit layers of bitsandbytes, whose kernel for CPUs rounds to bfloat16."""
    for key, module in list(found.named_modules()):
        if isinstance(module, bnb.nn.Linear4bit):
            floats = torch.nn.Linear(module.in_features, module.out_features, bias=False)
            weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            floats.weight = torch.nn.Parameter(weight)
            found.set_submodule(key, floats)


def gptq(packer: Any) -> None:
    """By AutoGPTQ's packer, in an order by activation of each matrix."""
    found, tensors = model(), {}
    for seed, (name, module) in enumerate(linears(found).items()):
        n, k = module.weight.shape
        order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
        g_idx = (order // GROUP).int()
        groups = [module.weight.data[:, g_idx == i] for i in range(k // GROUP)]
        low = torch.stack([x.amin(1) for x in groups], 1)
        high = torch.stack([x.amax(1) for x in groups], 1)
        scale = ((high - low) / 15).half().float()
        zero = torch.clamp(torch.round(-low / scale), 1, 15)
        wide = torch.round(module.weight.data / scale[:, g_idx.long()]) + zero[:, g_idx.long()]
        wide = wide.clamp(0, 15) - zero[:, g_idx.long()]
        module.weight.data = wide * scale[:, g_idx.long()]
        packed = packer.QuantLinear(4, GROUP, k, n, False, weight_dtype=torch.float32)
        packed.pack(module, scale, zero, g_idx)
        tensors |= {f"{name}.{x}": getattr(packed, x) for x in ("qweight", "qzeros", "g_idx")}
        tensors[f"{name}.scales"] = packed.scales.half()
        # AutoGPTQ writes biases of zeros.
        tensors[f"{name}.bias"] = torch.zeros(n, dtype=torch.float16)
        module.weight.data = packed(torch.eye(k)).T.contiguous()
    finish(save("llama_gptq", found, tensors, GPTQ | {"group_size": GROUP}), logits(found))


def compressed(name: str, layout: str, weights: Any, inputs: Any) -> None:
    """By compressed-tensors, with the logits of transformers, which loads the folder."""
    found, tensors = model(), {}
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=args,
        input_activations=QuantizationArgs(**inputs) if inputs else None,
        format=layout,
    )
    compressor = BaseCompressor.get_value_from_registry(layout)
    for key, module in linears(found).items():
        weight = module.weight.data.bfloat16()
        scale, zero = calculate_qparams(*modules.extremes(weight, weights), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        tensors |= {f"{key}.{x}": y for x, y in compressor.compress(state, scheme).items()}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "version": "0.20.0",
    }
    folder = save(name, found, tensors, quantization)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    finish(folder, logits(loaded.eval()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("auto_gptq")
    packer = load_module(parser.parse_args().auto_gptq)
    gptq(packer)
    compressed("llama_w4a16", "pack-quantized", modules.integers(4, "group", True, GROUP), None)
    compressed("llama_w8a8", "int-quantized", modules.integers(8, "channel"), modules.INT8_TOKENS)


if __name__ == "__main__":
    main()
