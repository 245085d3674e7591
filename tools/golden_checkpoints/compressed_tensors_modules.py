"""Golden modules of compressed-tensors: every format, by the library's own compressors.

pip install torch compressed-tensors==0.20.0 transformers
python tools/golden_checkpoints/compressed_tensors_modules.py
"""

from typing import Any

import torch
from checkpoints import save
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

N, K = 24, 96


def integers(bits: int, strategy: str, symmetric: bool = True, size: int | None = None):
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": strategy,
        "symmetric": symmetric,
        "group_size": size,
    }


def floats(bits: int, strategy: str, size: int | None = None, **others: Any):
    return integers(bits, strategy, True, size) | {"type": "float"} | others


INT8_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8_TOKENS = INT8_TOKENS | {"type": "float"}
# The format, the weights and the inputs of each module.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    **{
        f"w{bits}{'' if symmetric else '_asym'}": (
            "pack-quantized",
            integers(bits, "group", symmetric, 32),
            None,
        )
        for bits in (2, 3, 4, 5, 6, 7, 8)
        for symmetric in (True, False)
        if bits in (3, 4) or symmetric
    },
    "w4_channel": ("pack-quantized", integers(4, "channel", False), None),
    "w8a8": ("int-quantized", integers(8, "channel"), INT8_TOKENS),
    "w8a8_asym": ("int-quantized", integers(8, "channel", False), INT8_TOKENS),
    "w4a8": ("int-quantized", integers(4, "group", True, 32), INT8_TOKENS),
    "fp8_tensor": ("float-quantized", floats(8, "tensor"), None),
    "fp8_channel": ("float-quantized", floats(8, "channel"), FP8_TOKENS),
    "fp8_block": ("float-quantized", floats(8, "block", block_structure=[16, 48]), FP8_TOKENS),
    "nvfp4": (
        "nvfp4-pack-quantized",
        floats(4, "tensor_group", 16, scale_dtype="torch.float8_e4m3fn"),
        None,
    ),
    "mxfp4": ("mxfp4-pack-quantized", floats(4, "group", 32, scale_dtype="torch.uint8"), None),
    "mxfp6": ("mxfp6-pack-quantized", floats(6, "group", 32, scale_dtype="torch.uint8"), None),
    "mxfp8": ("mxfp8-quantized", floats(8, "group", 32, scale_dtype="torch.uint8"), None),
}


def module(name: str, seed: int) -> tuple[dict[str, Any], torch.Tensor, dict[str, Any]]:
    """The tensors of a module, the weights that they mean, and its entry of the config."""
    layout, weights, inputs = CASES[name]
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=[f"m.{name}"],
        weights=args,
        input_activations=QuantizationArgs(**inputs) if inputs else None,
        format=layout,
    )
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).bfloat16() / 16
    state = {"weight": weight}
    options = {}
    if layout.startswith("nvfp4"):
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
        options["global_scale"] = state["weight_global_scale"]
    low, high = extremes(weight, weights)
    scale, zero = calculate_qparams(low, high, args, **options)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    if weights["strategy"] != "tensor":
        assert scale.dtype != torch.float32 or layout.startswith("nv"), scale.dtype
    compressor = BaseCompressor.get_value_from_registry(layout)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    return stored, expected, scheme.model_dump(mode="json")


def extremes(weight: torch.Tensor, args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    if args["strategy"] == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args["strategy"] == "channel":
        return weight.min(1, keepdim=True)[0], weight.max(1, keepdim=True)[0]
    if args["strategy"] == "block":
        rows, columns = args["block_structure"]
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -N % rows))
        blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, args["group_size"]))
    return groups.amin(2), groups.amax(2)


def main() -> None:
    tensors, expected, groups = {}, {}, {}
    for seed, name in enumerate(CASES):
        stored, weight, groups[f"group_{seed}"] = module(name, seed)
        tensors |= {f"m.{name}.{key}": value for key, value in stored.items()}
        expected[f"m.{name}.weight"] = weight
    tensors["m.float.weight"] = torch.ones(4, 4, dtype=torch.bfloat16)
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["m.float"],
        "quantization_status": "compressed",
        "version": "0.20.0",
    }
    save("compressed_tensors", {"quantization_config": config}, tensors, expected)


if __name__ == "__main__":
    main()
