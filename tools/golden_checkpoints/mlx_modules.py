"""Golden checkpoints of mlx 0.32 (Linux CPU wheel): `mlx.core.quantize` as mlx-lm stores it."""

import mlx.core as mx
import numpy as np
import torch
from checkpoints import save, weights

CASES = {
    **{
        f"affine-{bits}bit": ("affine", 64 if bits < 8 else 32, bits) for bits in (2, 3, 4, 5, 6, 8)
    },
    "mxfp4": ("mxfp4", 32, 4),
    "mxfp8": ("mxfp8", 32, 8),
    "nvfp4": ("nvfp4", 16, 4),
}


def tensor(array: mx.array) -> torch.Tensor:
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.astype(mx.float32))).to(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def quantized(weight: torch.Tensor, mode: str, size: int, bits: int, dtype: mx.Dtype):
    """Tensors of a module, and its weights as MLX dequantizes them, affine ones in float32."""
    options = {"group_size": size, "bits": bits, "mode": mode}
    data, *rest = mx.quantize(mx.array(weight.numpy()).astype(dtype), **options)
    wide = [part if part.dtype == mx.uint8 else part.astype(mx.float32) for part in rest]
    own = mx.dequantize(data, *wide, **options)
    names = ("weight", "scales", "biases")
    return {name: tensor(part) for name, part in zip(names, (data, *rest), strict=False)}, tensor(
        own
    )


for name, (mode, size, bits) in CASES.items():
    first, second = weights(2, 24)
    dtype = mx.float16 if bits == 4 else mx.bfloat16
    tensors, expected = {}, {}
    for module, weight in (("first", first), ("second", second)):
        own = (mode, size, bits) if module == "first" else ("affine", 32, 6)
        found, expected[f"{module}.weight"] = quantized(weight, *own, dtype)
        tensors |= {f"{module}.{key}": value for key, value in found.items()}
    config = {
        "group_size": size,
        "bits": bits,
        "mode": mode,
        "second": {"group_size": 32, "bits": 6, "mode": "affine"},
        "floats": False,
    }
    if mode == "affine":
        del config["mode"], config["second"]["mode"]
    tensors["floats.weight"] = first[:2].to(torch.bfloat16)
    save(f"mlx-{name}", {"quantization": config, "quantization_config": config}, tensors, expected)

# A stack of experts.
found = [quantized(weight, "affine", 64, 4, mx.float16) for weight in weights(3, 16)]
tensors = {f"switch.{key}": torch.stack([one[key] for one, _ in found]) for key in found[0][0]}
save(
    "mlx-stack",
    {"quantization": {"group_size": 64, "bits": 4}},
    tensors,
    {"switch.weight": torch.stack([own for _, own in found])},
)
