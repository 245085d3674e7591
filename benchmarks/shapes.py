"""Weight shapes of real models by name, for benchmarks and tests.

- `llama3-70b/down`: one layer.
- `llama3-70b/down/tp4`: its part on one of 4 devices, split along k for row-parallel layers and
  along n for the others.
- `llama3-70b`, `llama3-70b/tp4`: all layers of the model on one device, or on one of 4.
- `28672x8192`: any n x k.
- `standard`: the default set.
- `decode`: eight more layers of models of 7B to 405B parameters.
- `unseen`: forty layers and parts of many models, including small and odd ones, for validating a
  selection that was fitted to the others.
- `random-40`: forty random shapes, the same in every run.
"""

import random
import re
from typing import NamedTuple


class Shape(NamedTuple):
    """A weight with n output channels and k input features."""

    name: str
    n: int
    k: int


class Model(NamedTuple):
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int  # hidden features of the MLP, or of one expert
    devices: tuple[int, ...] = (1,)  # numbers of devices whose tensor-parallel parts are listed

    def layers(self, devices: int) -> dict[str, tuple[int, int]]:
        """(n, k) of each projection on one of `devices`."""
        queries = self.heads * self.head_size
        everything = queries + 2 * self.kv_heads * self.head_size
        return {
            "qkv": (everything // devices, self.hidden),
            "output": (self.hidden, queries // devices),
            "gate-up": (2 * self.mlp // devices, self.hidden),
            "down": (self.hidden, self.mlp // devices),
        }


MODELS = {
    "mistral-7b": Model(4096, 32, 8, 128, 14336),
    "qwen2.5-7b": Model(3584, 28, 4, 128, 18944, (1, 2, 4)),
    "llama3-8b": Model(4096, 32, 8, 128, 14336, (1, 2)),
    "gemma2-27b": Model(4608, 32, 16, 128, 36864, (1, 2)),
    "qwen2.5-32b": Model(5120, 40, 8, 128, 27648, (1, 2, 4)),
    "mixtral-8x7b": Model(4096, 32, 8, 128, 14336, (1, 2)),
    "mixtral-8x22b": Model(6144, 48, 8, 128, 16384, (1, 4)),
    "llama3-70b": Model(8192, 64, 8, 128, 28672, (1, 2, 4, 8)),
    "qwen2.5-72b": Model(8192, 64, 8, 128, 29568, (1, 2, 4)),
    "llama3-405b": Model(16384, 128, 8, 128, 53248, (1, 8)),
}

# Latent attention and small experts have other projections.
_OTHERS = {
    "deepseek-v3/query-down": (1536, 7168),
    "deepseek-v3/query-up": (24576, 1536),
    "deepseek-v3/latent-up": (32768, 512),
    "deepseek-v3/output": (7168, 16384),
    "deepseek-v3/expert-gate-up": (4096, 7168),
    "deepseek-v3/expert-down": (7168, 2048),
}


def _named() -> dict[str, Shape]:
    shapes = dict(_OTHERS)
    for model, sizes in MODELS.items():
        for devices in sizes.devices:
            part = "" if devices == 1 else f"/tp{devices}"
            for layer, shape in sizes.layers(devices).items():
                shapes[f"{model}/{layer}{part}"] = shape
    return {name: Shape(name, *shape) for name, shape in shapes.items()}


SHAPES = _named()
# Five layers of models of 8B to 70B parameters.
STANDARD = ("4096x4096", "14336x4096", "8192x8192", "28672x8192", "8192x28672")
DECODE = (
    "6144x4096",  # Llama 3 8B: queries, keys and values
    "4096x14336",  # Llama 3 8B: down
    "37888x3584",  # Qwen2.5 7B: gate and up
    "3584x18944",  # Qwen2.5 7B: down
    "5120x27648",  # Qwen2.5 32B: down
    "14336x8192",  # Llama 3 70B: gate and up, on 4 devices
    "8192x7168",  # Llama 3 70B: down, on 4
    "13312x16384",  # Llama 3 405B: gate and up, on 8
)
UNSEEN = (
    "12288x4096",  # Llama 2 7B: queries, keys and values
    "22016x4096",  # Llama 2 7B: gate and up
    "4096x11008",  # Llama 2 7B: down
    "5504x4096",  # Llama 2 7B: gate, on 2 devices
    "4096x5504",  # Llama 2 7B: down, on 2
    "4096x2752",  # Llama 2 7B: down, on 4
    "15360x5120",  # Llama 2 13B: queries, keys and values
    "6912x5120",  # Llama 2 13B: gate, on 2
    "5120x13824",  # Llama 2 13B: down
    "5120x1728",  # Llama 2 13B: down, on 8
    "1024x4096",  # Llama 3 8B: keys
    "1280x8192",  # Llama 3 70B: queries, keys and values, on 8
    "8192x3584",  # Llama 3 70B: down, on 8
    "2304x16384",  # Llama 3 405B: queries, keys and values, on 8
    "16384x2048",  # Llama 3 405B: output, on 8
    "16384x6656",  # Llama 3 405B: down, on 8
    "1536x1536",  # Qwen2.5 1.5B: output
    "1536x8960",  # Qwen2.5 1.5B: down
    "4608x3584",  # Qwen2.5 7B: queries, keys and values
    "9472x3584",  # Qwen2.5 7B: gate and up, on 4
    "3584x2368",  # Qwen2.5 7B: down, on 8
    "7392x8192",  # Qwen2.5 72B: gate, on 4
    "8192x7392",  # Qwen2.5 72B: down, on 4
    "8192x14784",  # Qwen2.5 72B: down, on 2
    "4096x7168",  # Mixtral 8x7B: down of an expert, on 2
    "8192x6144",  # Mixtral 8x22B: queries, keys and values
    "6144x16384",  # Mixtral 8x22B: down of an expert
    "10944x2048",  # DeepSeek-V2-Lite: gate of the first layer
    "2048x10944",  # DeepSeek-V2-Lite: down of the first layer
    "1408x2048",  # DeepSeek-V2-Lite: gate of an expert
    "2048x1408",  # DeepSeek-V2-Lite: down of an expert
    "1536x7168",  # DeepSeek-V3: queries, down
    "24576x1536",  # DeepSeek-V3: queries, up
    "7168x2304",  # DeepSeek-V3: down of a layer without experts, on 8
    "9216x3072",  # Phi-3 mini: queries, keys and values
    "5120x17920",  # Phi-3 medium: down
    "5120x2240",  # Phi-3 medium: down, on 8
    "3584x14336",  # Gemma 2 9B: down
    "30720x3840",  # Gemma 3 12B: gate and up
    "5376x21504",  # Gemma 3 27B: down
)
SETS = {"standard": STANDARD, "decode": DECODE, "unseen": UNSEEN}


def random_shapes(count: int) -> list[Shape]:
    """Shapes with n and k multiples of 64 from 1,024 to 28,672, uniform in their logarithms."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        n, k = (round(1024 * 28 ** draw.random() / 64) * 64 for _ in range(2))
        found.append(Shape(f"{n}x{k}", n, k))
    return found


def find(name: str) -> list[Shape]:
    """Returns the shapes of a name.

    **Raises:** `ValueError` for an unknown name.
    """
    if size := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", name):
        return [Shape(name, int(size[1]), int(size[2]))]
    if drawn := re.fullmatch(r"random-([1-9]\d{0,3})", name):
        return random_shapes(int(drawn[1]))
    if name in SETS:
        return [shape for size in SETS[name] for shape in find(size)]
    if name in SHAPES:
        return [SHAPES[name]]
    model, _, part = name.partition("/")
    found = [
        shape
        for shape in SHAPES.values()
        if shape.name.split("/")[0] == model and shape.name.split("/")[2:] == part.split()
    ]
    if not found:
        models = sorted({shape.split("/")[0] for shape in SHAPES})
        raise ValueError(
            f"{name!r} names no shape; give N x K as 14336x4096, a set ({', '.join(SETS)}, or "
            "random-40 for forty random ones), a "
            f"model ({', '.join(models)}), or one of its layers, such as llama3-70b/down or "
            "llama3-70b/down/tp4."
        )
    return found
