"""Whole small Llamas that transformers quantizes, saves and computes on the CPU.

pip install torch transformers accelerate bitsandbytes==0.50.2 torchao==0.18.0
python tools/golden_checkpoints/transformers_llamas.py
"""

import json
import shutil
import tempfile
from typing import Any

import bitsandbytes as bnb
import torch
from checkpoints import DATA
from llamas import dequantize, finish, logits, model
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig


def quantized(name: str, config: Any) -> None:
    folder = DATA / name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as source:
        model().save_pretrained(source)
        options = {"quantization_config": config, "dtype": torch.float32, "device_map": "cpu"}
        found = AutoModelForCausalLM.from_pretrained(source, **options).eval()
    found.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n")
    dequantize(found, bnb)
    finish(folder, logits(found))


quantized("llama_torchao", TorchAoConfig(Int8WeightOnlyConfig()))
quantized(
    "llama_nf4",
    BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    ),
)
