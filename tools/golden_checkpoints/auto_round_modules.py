"""Golden modules of AutoRound, by its own packers.

pip install torch transformers
pip download --no-deps auto-round==0.16.1   # unpack it; nothing is installed
python tools/golden_checkpoints/auto_round_modules.py FOLDER
"""

import argparse
import sys
import types
from pathlib import Path
from typing import Any

import torch
from checkpoints import load_module, save
from gptq_modules import GROUP, K, N, quantized

BITS = (2, 3, 4, 5, 6, 8)


def packed(packer: Any, bits: int, symmetric: bool) -> tuple[dict[str, Any], torch.Tensor]:
    weight, _, scale, zero, _ = quantized(bits, symmetric, False, bits)
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = weight
    module = packer.QuantLinear(bits, GROUP, K, N, False)
    module.device = "cpu"
    module.pack(linear, scale, 2 ** (bits - 1) if symmetric else zero, device="cpu")
    stored = {name: getattr(module, name) for name in ("qweight", "qzeros", "scales")}
    module.scales = module.scales.float()
    return stored, module(torch.eye(K)).T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    source = parser.parse_args().source
    # Stubs of the package's other modules.
    sys.modules["auto_round"] = types.ModuleType("auto_round")
    utils: Any = types.ModuleType("auto_round.utils")
    utils.get_packing_device = lambda device: device
    sys.modules["auto_round.utils"] = utils
    bits = load_module(str(source / "auto_round/utils/bit_packing.py"))
    sys.modules["auto_round.utils.bit_packing"] = bits
    folder = source / "auto_round_extension/torch"
    as_they_are = load_module(str(folder / "qlinear_torch.py"))
    sys.modules["auto_round_extension.torch.qlinear_torch"] = as_they_are
    minus_one = load_module(str(folder / "qlinear_torch_zp.py"))
    for form, packer in (("auto_round", as_they_are), ("auto_round:auto_gptq", minus_one)):
        tensors, expected = {}, {}
        for width in BITS:
            stored, weight = packed(packer, width, width in (2, 6))
            tensors |= {f"model.layers.0.w{width}.{key}": x for key, x in stored.items()}
            expected[f"model.layers.0.w{width}.weight"] = weight
        extra = {f"model.layers.0.w{width}": {"bits": width} for width in (2, 3, 6)}
        extra |= {r".*\.w5$": {"bits": 5}, r".*\.w8$": {"bits": 8}, "lm_head": {"bits": 16}}
        config = {
            "quant_method": "auto-round",
            "packing_format": form,
            "bits": 4,
            "group_size": GROUP,
            "sym": False,
            "data_type": "int",
            "iters": 0,
            "autoround_version": "0.16.1",
            "block_name_to_quantize": "model.layers",
            "extra_config": extra,
        }
        name = form.replace(":", "_")
        save(name, {"quantization_config": config}, tensors, expected)


if __name__ == "__main__":
    main()
