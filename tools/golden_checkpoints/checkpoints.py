"""Folders of golden checkpoints: tensors that a library wrote, and the weights that it computes.

The other scripts of this folder write them into tests/data/checkpoints.
"""

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "tests" / "data" / "checkpoints"
N, K = 40, 128


def save(
    name: str,
    config: dict[str, Any],
    tensors: dict[str, Any],
    expected: dict[str, Any],
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes a folder: config.json, the tensors and the expected weights (out, in) of PyTorch."""
    from safetensors.torch import save_file

    folder = DATA / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for file, found in (("model", tensors), ("expected", expected)):
        contiguous = {key: value.detach().contiguous().clone() for key, value in found.items()}
        save_file(contiguous, folder / f"{file}.safetensors", metadata if file == "model" else None)
    print(folder, sum(file.stat().st_size for file in folder.iterdir()), "bytes")


def weights(count: int, n: int = N, k: int = K) -> list[Any]:
    """Random float32 matrices (n, k), one of whose columns has large values."""
    import torch

    torch.manual_seed(n * k)
    found = []
    for _ in range(count):
        matrix = torch.randn(n, k) / 8
        matrix[:, 3] *= 5
        found.append(matrix)
    return found


def load_module(path: str) -> Any:
    """Loads one Python file as a module."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
