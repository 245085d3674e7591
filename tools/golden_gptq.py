"""Writes the output errors of GPTQ of llm-compressor: `tests/data/gptq.json`.

    python tools/golden_gptq.py                  # the problems of tests/support/gptq_problems.py
    python tools/golden_gptq.py layers.npz       # prints the errors of real layers

It needs llmcompressor with torch, and imports nothing of this project except the problems. An npz
file has arrays `NAME/weight` (k, n) and `NAME/moments` (k, k), float32.
"""

import json
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from compressed_tensors.quantization import QuantizationArgs  # pyright: ignore[reportMissingImports]
from compressed_tensors.quantization.utils import calculate_qparams  # pyright: ignore[reportMissingImports]
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/support"))
import gptq_problems as problems  # noqa: E402

OUTPUT = ROOT / "tests/data/gptq.json"


def errors(weight: np.ndarray, moments: np.ndarray) -> dict[str, float]:
    """The relative output errors of llm-compressor, by our names of formats."""
    return {
        name: problems.output_error(weight, rounded(weight, moments, *kind), moments)
        for name, kind in problems.FORMATS.items()
    }


def rounded(weight: np.ndarray, moments: np.ndarray, bits: int, symmetric: bool) -> np.ndarray:
    """The weight after GPTQ in groups of 64, whose ranges reach the extremes, with act-order."""
    options = {"num_bits": bits, "symmetric": symmetric, "strategy": "group", "group_size": 64}
    args = QuantizationArgs(**options, actorder="weight")
    rows = torch.from_numpy(np.ascontiguousarray(weight.T))
    groups = rows.unflatten(-1, (-1, 64))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    operands = rows[None].clone(), torch.from_numpy(moments.copy())[None]
    result = quantize_weight(*operands, scale[None], zero[None], None, args)
    return result[0][0].numpy().T


def main() -> None:
    if len(sys.argv) > 1:
        with np.load(sys.argv[1]) as file:
            names = sorted({key.rpartition("/")[0] for key in file})
            found = {n: errors(file[f"{n}/weight"], file[f"{n}/moments"]) for n in names}
        print(json.dumps(found, indent=1))
        return
    found = {
        "llmcompressor": metadata.version("llmcompressor"),
        "errors": errors(*problems.problem(*problems.SIZE)),
    }
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
