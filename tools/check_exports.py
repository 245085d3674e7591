"""Loads exported models in the libraries that they are exported for, and compares the results.

    python tools/check_exports.py transformers FOLDER LOGITS.npy TOKENS...
    python tools/check_exports.py llama_cpp FILE.gguf TOKENS...

The first needs transformers and compressed-tensors. It compares logits with a file, float32
(1, length, vocabulary). The second needs llama-cpp-python; it prints twelve greedy tokens.
"""

import importlib
import sys
from pathlib import Path

import numpy as np


def check_transformers(folder: str, logits: str, tokens: list[int]) -> None:
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor([tokens])).logits.numpy()
    expected = np.load(logits)
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    print(f"{Path(folder).name}: largest difference of logits {error:.1e} of the largest logit")
    if error > 1e-4:
        sys.exit("the logits differ")


def check_llama_cpp(file: str, tokens: list[int]) -> None:
    model = importlib.import_module("llama_cpp").Llama(file, n_ctx=512, verbose=False, n_threads=2)
    found: list[int] = []
    for token in model.generate(tokens, temp=0.0, top_k=1, repeat_penalty=1.0):
        if len(found) == 12 or token == model.token_eos():
            break
        found.append(token)
    print(f"{Path(file).name}: {found} {model.detokenize(found).decode(errors='replace')!r}")


if __name__ == "__main__":
    kind, path, *rest = sys.argv[1:]
    if kind == "transformers":
        check_transformers(path, rest[0], [int(token) for token in rest[1:]])
    else:
        check_llama_cpp(path, [int(token) for token in rest])
