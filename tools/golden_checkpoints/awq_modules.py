"""Golden modules of AWQ, by AutoAWQ's packers.

pip install torch numpy
pip download --no-deps --no-binary :all: autoawq==0.2.9   # unpack it; nothing is installed
python tools/golden_checkpoints/awq_modules.py autoawq-0.2.9
"""

import argparse
import sys
import types
from pathlib import Path
from typing import Any

import torch
from checkpoints import load_module, save

N, K, GROUP = 32, 64, 32


def quantized(symmetric: bool, seed: int):
    """A weight, the integers that represent it, and their scales and zeros (N, groups)."""
    random = torch.Generator().manual_seed(seed)
    scale = (torch.rand(N, K // GROUP, generator=random) / 100 + 0.01).half()
    zero = torch.full((N, K // GROUP), 8)
    if not symmetric:
        zero = torch.randint(0, 16, (N, K // GROUP), generator=random)
    values = torch.randint(0, 16, (N, K), generator=random)
    wide = zero.repeat_interleave(GROUP, 1)
    weight = (values - wide) * scale.float().repeat_interleave(GROUP, 1)
    return weight, values, scale, zero


def packed(layout: Any, name: str, symmetric: bool, seed: int) -> tuple[dict[str, Any], Any]:
    weight, values, scale, zero = quantized(symmetric, seed)
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = weight
    pair = (scale.float().T, zero.T) if name == "WQLinear_GEMM" else (scale.float(), zero)
    pair = tuple(x.contiguous() for x in pair)
    module = getattr(layout, name).from_linear(linear, 4, GROUP, scales=pair[0], zeros=pair[1])
    stored = {x: getattr(module, x) for x in ("qweight", "qzeros", "scales")}
    if name == "WQLinear_GEMVFast":  # zeros are rounded products, so that weights differ a little
        wide = [stored[x][: K // GROUP].T.float() for x in ("scales", "qzeros")]
        scale, zero = (x.repeat_interleave(GROUP, 1) for x in wide)
        weight = values * scale + zero
    return stored, weight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    root = parser.parse_args().source / "awq"
    # Stubs of the package's other modules, which are not needed on a CPU.
    utils = load_module(str(root / "utils" / "packing_utils.py"))
    missing = types.SimpleNamespace(try_import=lambda name: (None, ""))
    stubs = {
        "awq": types.ModuleType("awq"),
        "awq.utils.module": missing,
        "awq.utils.utils": types.SimpleNamespace(get_best_device=lambda: "cpu"),
        "awq.utils.packing_utils": utils,
        "awq.modules.triton.gemm": types.SimpleNamespace(
            awq_gemm_triton=None, awq_dequantize_triton=None
        ),
    }
    sys.modules.update(stubs)
    folder = root / "modules" / "linear"
    for version, name in (
        ("gemm", "WQLinear_GEMM"),
        ("gemv", "WQLinear_GEMV"),
        ("gemv_fast", "WQLinear_GEMVFast"),
    ):
        layout = load_module(str(folder / f"{version}.py"))
        tensors, expected = {}, {}
        for case in ("asym", "sym") if version == "gemm" else ("asym",):
            stored, weight = packed(layout, name, case == "sym", len(version))
            if version == "gemm":
                wide = stored | {"scales": stored["scales"].float()}
                weight = utils.dequantize_gemm(**wide, bits=4, group_size=GROUP).T
            tensors |= {f"m.{case}.{key}": value for key, value in stored.items()}
            expected[f"m.{case}.weight"] = weight
        config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
        config |= {"version": version, "modules_to_not_convert": None}
        save(f"awq_{version}", {"quantization_config": config}, tensors, expected)


if __name__ == "__main__":
    main()
