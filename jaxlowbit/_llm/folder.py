"""Files of a Hugging Face folder: JSON documents, and tensors in safetensors, single or sharded.

The header of a safetensors file is JSON, behind its length in 8 bytes; it says where tensors lie.
The package safetensors checks it against the file; of its tensors it returns no 8-bit floats.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

AGAIN = "fetch the folder again"
MLX = (
    "such weights are not read: use the model's folder of floats or a GGUF file, or convert the "
    "folder with mlx_lm.convert --dequantize"
)
_POINTER = b"version https://git-lfs.github.com/spec/"
FLOATS = ("F32", "F16", "BF16")
# The types that are read; others raise an error with their names.
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
    "F8_E4M3": jnp.dtype(jnp.float8_e4m3fn),
    "F8_E8M0": jnp.dtype(jnp.float8_e8m0fnu),
}
_KINDS: dict[str, tuple[type, ...]] = {
    "an integer": (int,),
    "a number": (int, float),
    "a string": (str,),
    "true or false": (bool,),
    "an object": (dict,),
    "a list": (list,),
}


class Tensor(NamedTuple):
    """A tensor: its type and shape, outermost axis first, its file and its offset there."""

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def dtype(self) -> np.dtype:
        return _DTYPES[self.kind]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The numbers of rows from one up to another, (rows, k); a vector is one row."""
        k = self.shape[-1] if self.shape else 1
        return self.bytes(start, stop).view(self.dtype).reshape(-1, k)

    def bytes(self, start: int, stop: int) -> np.ndarray:
        """The bytes of rows from one up to another, as the file has them."""
        size = (self.shape[-1] if self.shape else 1) * self.dtype.itemsize
        offset = self.offset + start * size
        return np.fromfile(self.file, np.uint8, (stop - start) * size, offset=offset)


class Fields:
    """Entries of a JSON object with the kind of each value checked; null means a missing entry.

    `names` maps keys of `get` and `need` to the keys of this object, for keys that differ. `read`
    has the keys of this object that `get` and `need` were asked for.
    """

    read: set[str]

    def __init__(
        self, path: Path, values: Mapping[str, Any], names: Mapping[str, str] | None = None
    ):
        self.path, self.values, self.names, self.read = path, values, names or {}, set()

    def get(self, key: str, kind: str, default: Any = None) -> Any:
        key = self.names.get(key, key)
        self.read.add(key)
        value = self.values.get(key)
        if value is None:
            return default
        truth = isinstance(value, bool) and kind != "true or false"
        if truth or not isinstance(value, _KINDS[kind]):
            raise ValueError(f"{self.path}: {key!r} is {value!r}, but it is {kind}; {AGAIN}.")
        return value

    def need(self, key: str, kind: str) -> Any:
        value = self.get(key, kind)
        if value is None:
            key = self.names.get(key, key)
            raise ValueError(f"{self.path} lacks {key!r}, {kind}; {AGAIN}.")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    **Raises:** `ValueError` for a missing file and for anything else than an object.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing, but the folder of a Hugging Face model has it; {AGAIN}."
        ) from None
    except (ValueError, RecursionError) as error:  # of JSON and of UTF-8
        raise ValueError(f"{path} is no JSON ({error}); {AGAIN}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}, but an object belongs there.")
    return found


def check_pointer(path: Path) -> None:
    """Checks that a file is no pointer of Git LFS, a text in place of the file itself.

    **Raises:** `ValueError`.
    """
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(
                f"{path} is a pointer of Git LFS and not the file itself; run git lfs pull in its "
                "folder, or fetch it again."
            )


def check_folder(folder: Path) -> None:
    """Checks by the names of its files that a folder is a model in safetensors.

    **Raises:** `ValueError` with the kind of another folder, and the way from it to a model.
    """

    def there(pattern: str) -> list[str]:
        return sorted(path.name for path in folder.glob(pattern))

    if there("adapter_config.json"):
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        raise ValueError(
            f"{folder} is a PEFT adapter of {base!r} (adapter_config.json), not a whole model; "
            "merge it into its model with peft's merge_and_unload() and save_pretrained(), and "
            "name that folder."
        )
    if not there("config.json"):
        if files := there("*.gguf"):
            raise ValueError(
                f"{folder} holds GGUF files and no config.json; name a file, such as "
                f"{folder / files[0]}."
            )
        if found := there("params.json"):
            raise ValueError(
                f"{folder} is in the format of the model's authors ({found[0]}), without "
                "config.json; fetch the model in the format of transformers."
            )
        if found := sorted(folder.glob("snapshots/*/config.json")):
            raise ValueError(
                f"{folder} is an entry of the cache of huggingface_hub, which holds the model's "
                f"folder further down; name {found[0].parent}."
            )
    if not there("model*.safetensors") and not there("model.safetensors.index.json"):
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


def tensors_of(folder: Path) -> list[Tensor]:
    """All tensors of the file or shards of a folder; reads headers only.

    As in transformers, model.safetensors goes before shards.

    **Raises:** `ValueError` for files that are missing or damaged, for an index that names other
    tensors than its shards have, and for a tensor that is there twice.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.exists() or not index.exists():
        return _tensors_of_file(single)
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise ValueError(f"{index} has no 'weight_map' of tensors to files; {AGAIN}.")
    if outside := [x for x in places.values() if Path(x).name != x]:
        raise ValueError(
            f"{index} names the file {outside[0]!r}, but shards lie beside it; {AGAIN}."
        )
    found: dict[str, Tensor] = {}
    for file in dict.fromkeys(places.values()):
        for tensor in _tensors_of_file(folder / file):
            if tensor.name in found:
                raise ValueError(
                    f"{tensor.file}: tensor {tensor.name!r} is also in "
                    f"{found[tensor.name].file.name}; {AGAIN}."
                )
            found[tensor.name] = tensor
    for name, file in places.items():
        if name not in found or found[name].file.name != file:
            raise ValueError(
                f"{index} has tensor {name!r} in {file}, but that file is without it; {AGAIN}."
            )
    return list(found.values())


def _tensors_of_file(path: Path) -> list[Tensor]:
    if not path.is_file():
        raise ValueError(f"{path} is missing; {AGAIN}, or name a .gguf file.")
    check_pointer(path)
    try:
        with safe_open(path, framework="numpy"):  # checks the header
            pass
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no safetensors file, or it is cut off ({error}); {AGAIN}."
        ) from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return [
        Tensor(
            name, entry["dtype"], tuple(entry["shape"]), path, 8 + length + entry["data_offsets"][0]
        )
        for name, entry in sorted(header.items())
    ]
