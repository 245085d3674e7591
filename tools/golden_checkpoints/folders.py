"""Writes golden checkpoints: folders as a library saves them, with its own dequantized weights."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2] / "tests" / "data" / "checkpoints"
N, K = 40, 128


def weights(count: int, n: int = N, k: int = K) -> list[torch.Tensor]:
    """Random float32 matrices (n, k), one of whose columns has large values."""
    torch.manual_seed(n * k)
    found = []
    for _ in range(count):
        matrix = torch.randn(n, k) / 8
        matrix[:, 3] *= 5
        found.append(matrix)
    return found


def write(
    name: str,
    tensors: dict[str, torch.Tensor],
    config: dict,
    expected: dict[str, torch.Tensor],
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes `ROOT / name` with config.json, model.safetensors and expected.safetensors."""
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for file, values in (("model", tensors), ("expected", expected)):
        own = {key: value.detach().clone().contiguous() for key, value in values.items()}
        save_file(own, folder / f"{file}.safetensors", metadata if file == "model" else None)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: {size} bytes")
