"""Writes entries of model files into tests/data/config_entries.json.

    python -m venv /tmp/hf && /tmp/hf/bin/pip install transformers
    /tmp/hf/bin/python tools/config_entries.py                      # of transformers' classes
    python tools/config_entries.py --llama llama.cpp/src/llama-arch.cpp  # keys of GGUF files

Each version of transformers has its own section, so that entries of older files stay in the data.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "tests" / "data" / "config_entries.json"
CLASSES = {
    "llama": "llama.LlamaConfig",
    "mistral": "mistral.MistralConfig",
    "mistral3": "mistral3.Mistral3Config",
    "ministral": "ministral.MinistralConfig",
    "ministral3": "ministral3.Ministral3Config",
    "qwen2": "qwen2.Qwen2Config",
    "qwen3": "qwen3.Qwen3Config",
    "gemma2": "gemma2.Gemma2Config",
    "gemma3_text": "gemma3.Gemma3TextConfig",
    "gemma3": "gemma3.Gemma3Config",
    "gemma4_text": "gemma4.Gemma4TextConfig",
    "gemma4": "gemma4.Gemma4Config",
    "phi3": "phi3.Phi3Config",
    "olmo2": "olmo2.Olmo2Config",
    "olmo3": "olmo3.Olmo3Config",
    "smollm3": "smollm3.SmolLM3Config",
    "granite": "granite.GraniteConfig",
    "exaone4": "exaone4.Exaone4Config",
    "mixtral": "mixtral.MixtralConfig",
    "qwen3_moe": "qwen3_moe.Qwen3MoeConfig",
    "gpt_oss": "gpt_oss.GptOssConfig",
}
IMAGES = ("gemma3", "gemma4", "mistral3")  # The decoder is in their text_config.


def class_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"transformers{module}"), name)


def entries(cls: Any, package: str = "") -> dict[str, Any]:
    """The arguments and the saved entries of a class, with their defaults."""
    found = cls().to_dict() | {
        name: None if parameter.default is inspect.Parameter.empty else parameter.default
        for base in reversed(cls.__mro__)
        if "__init__" in vars(base)
        for name, parameter in inspect.signature(base.__init__).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name != "self"
    }
    found |= dict.fromkeys(getattr(cls, "attribute_map", {}))
    if package:
        found = dict.fromkeys(read_elsewhere(cls, package)) | found
    return {name: value if plain(value) else None for name, value in sorted(found.items())}


def read_elsewhere(cls: Any, package: str) -> set[str]:
    """Entries that are not arguments: constructors read them from `kwargs`, or the model's code
    reads them as attributes."""
    methods = ("__init__", "__post_init__", "convert_rope_params_to_dict")
    bases = [base for base in cls.__mro__ if "transformers" in base.__module__]
    own = [vars(base)[name] for base in bases for name in methods if name in vars(base)]
    # Methods that dataclasses make have no source.
    own = [x for x in own if not inspect.unwrap(x).__code__.co_filename.startswith("<")]
    found = re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"', "".join(map(inspect.getsource, own)))
    spec = importlib.util.find_spec(f"transformers.models.{package}.modeling_{package}")
    origin = None if spec is None else spec.origin
    code = "" if origin is None else Path(origin).read_text(encoding="utf-8")
    found += re.findall(r'\bconfig(?:\.|, ")(\w+)', code)
    return {name for name in found if not callable(getattr(cls, name, None))}


def plain(value: Any) -> bool:
    return isinstance(value, str | int | float | list | None)


def of_transformers() -> dict[str, Any]:
    models = importlib.import_module("transformers.models")
    found = {
        name: entries(class_of(f".models.{path}"), "" if name in IMAGES else package)
        for name, path in CLASSES.items()
        if hasattr(models, package := path.partition(".")[0])  # in this version
    }
    found["generation_config.json"] = entries(class_of(".GenerationConfig"))
    rope = importlib.import_module("transformers.modeling_rope_utils")
    parameters = getattr(rope, "RopeParameters", None)
    found["rotation"] = dict.fromkeys(sorted(parameters.__annotations__)) if parameters else {}
    found["rotation"]["rope_type"] = list(dict.fromkeys(["default", *rope.ROPE_INIT_FUNCTIONS]))
    return {f"transformers {importlib.import_module('transformers').__version__}": found}


def of_llama(source: Path) -> dict[str, Any]:
    keys = re.findall(r'"%s\.([\w.]+)"', source.read_text(encoding="utf-8"))
    return {"llama.cpp": sorted(set(keys))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--llama", type=Path)
    options = parser.parse_args()
    data = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    data |= of_transformers() if options.llama is None else of_llama(options.llama)
    PATH.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
