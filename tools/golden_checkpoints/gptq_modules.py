"""Golden modules of GPTQ, by AutoGPTQ's and GPTQModel's packers.

    pip install torch transformers
    pip download --no-deps auto_gptq==0.7.1 gptqmodel==7.7.0   # unpack both; nothing is installed
    python tools/golden_checkpoints/gptq_modules.py \\
        auto_gptq/nn_modules/qlinear/qlinear_cuda.py gptqmodel/utils/planar_packing.py
"""

import argparse
from typing import Any

import torch
from checkpoints import load_module, save

N, K, GROUP = 32, 64, 32
CONFIG = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "desc_act": True,
    "sym": False,
    "damp_percent": 0.1,
    "true_sequential": True,
    "lm_head": False,
}


def quantized(bits: int, symmetric: bool, act_order: bool, seed: int, size: int = GROUP):
    """A weight that integers represent, its scales and zeros (N, groups), and g_idx."""
    random = torch.Generator().manual_seed(seed)
    groups = K // size
    scale = (torch.rand(N, groups, generator=random) / 100 + 0.01).half().float()
    zero = torch.full((N, groups), float(2 ** (bits - 1)))
    if not symmetric:
        # Not 0, which AutoGPTQ's packer damages.
        zero = torch.randint(1, 2**bits, (N, groups), generator=random).float()
    order = torch.randperm(K, generator=random) if act_order else torch.arange(K)
    g_idx = (order // size).int()
    values = torch.randint(0, 2**bits, (N, K), generator=random)
    weight = (values - zero[:, g_idx.long()]) * scale[:, g_idx.long()]
    return weight, values, scale, zero, g_idx


def auto_gptq(packer: Any, bits: int, symmetric: bool, act_order: bool, seed: int):
    """The tensors that AutoGPTQ packs, and the weight that its forward multiplies by."""
    weight, _, scale, zero, g_idx = quantized(bits, symmetric, act_order, seed)
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = weight
    module = packer.QuantLinear(bits, GROUP, K, N, False, weight_dtype=torch.float32)
    module.pack(linear, scale, zero, g_idx)
    expected = module(torch.eye(K)).T
    names = ("qweight", "qzeros", "scales", "g_idx")
    stored = {name: getattr(module, name) for name in names}
    return stored | {"scales": stored["scales"].half()}, expected


def planar(packer: Any, bits: int, symmetric: bool, seed: int):
    """The tensors of `gptq_p`, whose zeros are stored as they are."""
    _, values, scale, zero, g_idx = quantized(bits, symmetric, True, seed)
    qweight = packer.planar_pack_rows(values.T.int().contiguous(), bits)
    qzeros = packer.planar_pack_cols(zero.T.int().contiguous(), bits)
    unpacked = (
        packer.planar_unpack_rows(qweight, bits)
        - packer.planar_unpack_cols(qzeros, bits)[g_idx.long()]
    )
    expected = (unpacked * scale.T[g_idx.long()]).T
    stored = {"qweight": qweight, "qzeros": qzeros, "scales": scale.T.half(), "g_idx": g_idx}
    return stored, expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("auto_gptq")
    parser.add_argument("planar")
    args = parser.parse_args()
    dense, planes = load_module(args.auto_gptq), load_module(args.planar)
    folders: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {}

    def add(folder: str, name: str, config: dict[str, Any], found: Any) -> None:
        _, tensors, expected = folders.setdefault(folder, (config, {}, {}))
        tensors |= {f"m.{name}.{key}": value for key, value in found[0].items()}
        expected[f"m.{name}.weight"] = found[1]

    dynamic = {f"+:.*\\.w{bits}(_.*)?$": {"bits": bits} for bits in (2, 3, 8)}
    dynamic = {"-:.*\\.float$": {}, **dynamic}
    for bits in (2, 3, 4, 8):
        config = CONFIG | {"dynamic": dynamic}
        add("gptq", f"w{bits}", config, auto_gptq(dense, bits, True, False, bits))
        add("gptq", f"w{bits}_asym", config, auto_gptq(dense, bits, False, True, bits + 10))
    for form, widths in (("gptq_v2", (4, 8)), ("gptq_p", (2, 3, 4, 5, 6, 7, 8))):
        others = {f".*\\.w{bits}$": {"bits": bits} for bits in widths if bits != 4}
        config = CONFIG | {"checkpoint_format": form, "format": form, "dynamic": others}
        config |= {"pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
        for bits in widths:
            add(form, f"w{bits}", config, planar(planes, bits, bits in (2, 6), bits + 20))
    folders["gptq"][1]["m.float.weight"] = torch.ones(4, 4, dtype=torch.float16)
    for name, (config, tensors, expected) in folders.items():
        save(name, {"quantization_config": config}, tensors, expected)


if __name__ == "__main__":
    main()
