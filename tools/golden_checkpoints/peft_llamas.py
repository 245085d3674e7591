"""A LoRA adapter that PEFT saves, and the logits of a small Llama in nf4 with it.

pip install torch transformers accelerate bitsandbytes==0.50.2 peft==0.21.2
python tools/golden_checkpoints/peft_llamas.py
"""

import json
import shutil

import bitsandbytes as bnb
import torch
from checkpoints import DATA
from llamas import finish, logits
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

FOLDER = DATA / "lora"

found = AutoModelForCausalLM.from_pretrained(DATA / "llama_nf4", dtype=torch.float32).eval()
for key, module in list(found.named_modules()):
    if isinstance(module, bnb.nn.Linear4bit):  # its kernel for CPUs rounds to bfloat16
        floats = torch.nn.Linear(module.in_features, module.out_features, bias=False)
        weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        floats.weight = torch.nn.Parameter(weight)
        found.set_submodule(key, floats)
torch.manual_seed(0)
config = LoraConfig(
    r=4,
    lora_alpha=12,
    target_modules=["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"],
    rank_pattern={"k_proj": 2},
    alpha_pattern={"layers.0.mlp.down_proj": 3},
    use_rslora=True,
    init_lora_weights=False,
    task_type="CAUSAL_LM",
)
adapted = get_peft_model(found, config).eval()
shutil.rmtree(FOLDER, ignore_errors=True)
adapted.save_pretrained(FOLDER)
(FOLDER / "README.md").unlink(missing_ok=True)
values = json.loads((FOLDER / "adapter_config.json").read_text())
values["base_model_name_or_path"] = "llama_nf4"  # not the path on this machine
(FOLDER / "adapter_config.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
finish(FOLDER, logits(adapted))
