"""LoRA adapters that PEFT saves, and logits with them: a small Llama in nf4, and the tiny Phi 3 of
`tests/support/golden_architectures.py`, whose projections are fused.

pip install torch transformers accelerate bitsandbytes==0.50.2 peft==0.21.2
python tools/golden_checkpoints/peft_llamas.py
"""

import json
import shutil

import bitsandbytes as bnb
import torch
from checkpoints import DATA, load_module
from llamas import dequantize, finish, logits
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM


def save(model, name, expected, **options):
    torch.manual_seed(0)
    config = LoraConfig(**options, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config).eval()
    folder = DATA / name
    shutil.rmtree(folder, ignore_errors=True)
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    values = json.loads((folder / "adapter_config.json").read_text())
    values["base_model_name_or_path"] = "base"  # not the path on this machine
    values["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    finish(folder, expected(adapted))


def llama():
    found = AutoModelForCausalLM.from_pretrained(DATA / "llama_nf4", dtype=torch.float32).eval()
    dequantize(found, bnb)
    targets = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]
    patterns = {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"layers.0.mlp.down_proj": 3}}
    save(
        found,
        "lora",
        logits,
        r=4,
        lora_alpha=12,
        target_modules=targets,
        use_rslora=True,
        **patterns,
    )


def phi3():
    golden = load_module(str(DATA.parents[1] / "support" / "golden_architectures.py"))
    config = AutoConfig.for_model(**golden.CASES["phi3"])
    found = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for key, parameter in found.named_parameters():
        parameter.data = torch.from_numpy(golden.parameter("phi3", key, tuple(parameter.shape)))

    def expected(model):
        with torch.no_grad():
            return model(torch.tensor([golden.TOKENS])).logits

    targets = ["qkv_proj", "gate_up_proj", "down_proj"]
    save(found, "lora_phi3", expected, r=2, lora_alpha=3, target_modules=targets)


llama()
phi3()
