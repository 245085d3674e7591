"""Checks of a Hugging Face folder by the names of its files."""

from pathlib import Path

from ..checkpoint._files import read_json


def check_folder(folder: Path) -> None:
    """Checks by the names of its files that a folder is a model in safetensors.

    **Raises:** `ValueError` with the kind of the folder, and how to get a model from it.
    """

    def there(pattern: str) -> list[str]:
        return sorted(path.name for path in folder.glob(pattern))

    if there("adapter_config.json"):
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        raise ValueError(
            f"{folder} is a PEFT adapter of {base!r} (adapter_config.json), not a whole model; "
            "load its model with llm.load(model, adapter=folder), or --adapter of the commands."
        )
    if not there("config.json"):
        if files := there("*.gguf"):
            raise ValueError(
                f"{folder} contains GGUF files and no config.json; name a file, such as "
                f"{folder / files[0]}."
            )
        if found := there("params.json"):
            raise ValueError(
                f"{folder} is in the format of the model's authors ({found[0]}), without "
                "config.json; fetch the model in the format of transformers."
            )
        if found := sorted(folder.glob("snapshots/*/config.json")):
            raise ValueError(
                f"{folder} is an entry of the cache of huggingface_hub, which contains the model's "
                f"folder further down; name {found[0].parent}."
            )
    if not there("*.safetensors") and not there("model.safetensors.index.json"):
        kinds = ("pytorch_model*.bin", "*.pth", "*.pt", "tf_model*.h5", "flax_model*.msgpack")
        if found := [name for kind in kinds for name in there(kind)]:
            raise ValueError(
                f"{folder} has its weights in {found[0]}, a format that is not read, and not in "
                "safetensors; convert the folder with transformers, AutoModelForCausalLM."
                "from_pretrained(folder).save_pretrained(other), or fetch one with safetensors."
            )
        if found := there("*.gguf"):
            raise ValueError(
                f"{folder} has its weights in GGUF files; name one, such as {folder / found[0]}."
            )
    other = there("tokenizer.model*") + there("vocab.json") + there("tekken.json")
    if there("config.json") and other and not there("tokenizer.json"):
        raise ValueError(
            f"{folder} has its tokenizer in {other[0]}, a format that is not read, and not in "
            "tokenizer.json; convert it with transformers, AutoTokenizer.from_pretrained("
            "folder).save_pretrained(folder)."
        )
