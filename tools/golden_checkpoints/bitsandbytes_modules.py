"""Golden checkpoints of bitsandbytes 0.50: nf4, fp4 and int8, by its modules on the CPU."""

import bitsandbytes as bnb
import torch
from bitsandbytes.backends.default import ops
from checkpoints import K, N, save, weights

FOUR_BITS = {
    "nf4": {"quant_type": "nf4", "compress_statistics": False},
    "fp4": {"quant_type": "fp4", "compress_statistics": False},
    "nf4-double": {"quant_type": "nf4", "compress_statistics": True},
    "nf4-storage": {
        "quant_type": "nf4",
        "compress_statistics": True,
        "quant_storage": torch.bfloat16,
    },
}


def four_bits(name: str, n: int, k: int, **options) -> None:
    (weight,) = weights(1, n, k)
    layer = bnb.nn.Linear4bit(k, n, bias=True, compute_dtype=torch.float32, **options)
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=layer, **options)
    layer.to("cpu")
    tensors = {f"layer.{key}": value for key, value in layer.state_dict().items()}
    state = layer.weight.quant_state
    scales = state.absmax
    if state.nested:
        scales = bnb.functional.dequantize_blockwise(scales, state.state2) + state.offset
    data = layer.weight.data.view(torch.uint8).reshape(-1)
    # The compiled kernel for CPUs reads other scales if k is no multiple of the block size.
    own = ops._dequantize_4bit_compute(
        data, scales, state.code, state.blocksize, state.shape, torch.float32
    )
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "_load_in_4bit": True,
        "bnb_4bit_quant_type": options["quant_type"],
        "bnb_4bit_use_double_quant": options["compress_statistics"],
        "bnb_4bit_quant_storage": "bfloat16" if "quant_storage" in options else "uint8",
        "bnb_4bit_compute_dtype": "float32",
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
    }
    save(f"bitsandbytes-{name}", {"quantization_config": config}, tensors, {"layer.weight": own})


def eight_bits() -> None:
    (weight,) = weights(1)
    layer = bnb.nn.Linear8bitLt(K, N, bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    layer.to("cpu")
    tensors = {f"layer.{key}": value for key, value in layer.state_dict().items()}
    if "layer.SCB" not in tensors:  # quantized by the first product on CPUs
        raise SystemExit(f"no SCB in {list(tensors)}")
    own = bnb.functional.int8_vectorwise_dequant(tensors["layer.weight"], tensors["layer.SCB"])
    config = {
        "quant_method": "bitsandbytes",
        "load_in_8bit": True,
        "llm_int8_threshold": 6.0,
        "llm_int8_has_fp16_weight": False,
    }
    save("bitsandbytes-int8", {"quantization_config": config}, tensors, {"layer.weight": own})


for name, options in FOUR_BITS.items():
    four_bits(name, N, K, **options)
four_bits("nf4-rows", 24, 96, quant_type="nf4", compress_statistics=True)  # blocks cross rows
four_bits("nf4-ragged", 10, 40, quant_type="nf4", compress_statistics=False)  # held by no format
eight_bits()
