"""Loads exported models in the libraries that they are exported for, and compares the results.

    python tools/check_exports.py transformers FOLDER LOGITS.npy TOKENS...
    python tools/check_exports.py llama_cpp FILE.gguf LOGITS.npy TOKENS...
    python tools/check_exports.py floats FILE.gguf TARGET.gguf

The first two compare logits with a file, float32 (1, length, vocabulary). The first needs
transformers and compressed-tensors. The second needs llama-cpp-python, and prints twelve greedy
tokens. The third needs gguf: it writes a file whose weights are float32. On CPUs llama.cpp rounds
the inputs of products with quantized weights to 8 bits, so only such files show whether the logits
are the same.
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


def check_llama_cpp(file: str, logits: str, tokens: list[int]) -> None:
    float32 = {"type_k": 0, "type_v": 0}  # dtype of the cache
    options = {"n_ctx": 512, "n_threads": 2, "logits_all": True, "verbose": False}
    model = importlib.import_module("llama_cpp").Llama(file, **options, **float32)
    model.eval(tokens)
    difference = np.abs(np.array(model.scores[: len(tokens)]) - np.load(logits)[0])
    model.reset()
    found: list[int] = []
    for token in model.generate(tokens, temp=0.0, top_k=1, repeat_penalty=1.0):
        if len(found) == 12 or token == model.token_eos():
            break
        found.append(token)
    print(f"{Path(file).name}: {found} {model.detokenize(found).decode(errors='replace')!r}")
    print(f"largest difference of logits {difference.max():.1e}, mean {difference.mean():.1e}")


def write_floats(file: str, target: str) -> None:
    gguf = importlib.import_module("gguf")
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in (
            "general.architecture",
            "general.file_type",
        ):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    kind, path, other, *rest = sys.argv[1:]
    if kind == "floats":
        write_floats(path, other)
    else:
        check = check_transformers if kind == "transformers" else check_llama_cpp
        check(path, other, [int(token) for token in rest])
