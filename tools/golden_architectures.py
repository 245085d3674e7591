"""Writes the logits of tiny models of every architecture, by transformers, into
tests/data/golden/architectures.npz.

    python -m venv /tmp/hf && /tmp/hf/bin/pip install torch transformers
    /tmp/hf/bin/python tools/golden_architectures.py
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

CASES = Path(__file__).parents[1] / "tests" / "support" / "golden_architectures.py"


def cases() -> Any:
    """The module of the models; its folder has one named transformers."""
    spec: Any = importlib.util.spec_from_file_location("golden_architectures", CASES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    golden = cases()
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    found = {}
    for name, entries in golden.CASES.items():
        config = transformers.AutoConfig.for_model(**entries)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        stored = model.state_dict().keys()
        buffers = {key: x for key, x in model.named_buffers() if key in stored}
        parameters = dict(model.named_parameters()) | buffers
        with torch.no_grad():
            for key, parameter in parameters.items():
                values = golden.parameter(entries["model_type"], key, tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(values))
            logits = model.eval()(torch.tensor([golden.TOKENS])).logits[0]
        found[name] = logits.numpy().astype(np.float32)
        print(f"{name}: {len(parameters)} tensors, largest logit {np.abs(found[name]).max():.2f}")
    np.savez_compressed(golden.PATH, **found)
    print(
        f"{golden.PATH}: {golden.PATH.stat().st_size} bytes, transformers "
        f"{transformers.__version__}"
    )


if __name__ == "__main__":
    main()
