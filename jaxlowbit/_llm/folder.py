"""What a Hugging Face folder holds: JSON documents, and tensors in safetensors, single or sharded.

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
FLOATS = ("F32", "F16", "BF16")
# The types that are read; others are refused by their names.
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
    """A tensor: its type and shape, outermost axis first, and where it begins in which file."""

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
        size = k * self.dtype.itemsize
        offset = self.offset + start * size
        data = np.fromfile(self.file, np.uint8, (stop - start) * size, offset=offset)
        return data.view(self.dtype).reshape(-1, k)


class Fields:
    """Entries of a JSON object with the kind of each value checked; null stands for none."""

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self.path, self.values = path, values

    def get(self, key: str, kind: str, default: Any = None) -> Any:
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
            raise ValueError(f"{self.path} lacks {key!r}, {kind}; {AGAIN}.")
        return value

    def refuse(self, key: str, reason: str) -> None:
        """Refuses a feature that an entry turns on."""
        if self.values.get(key):
            raise ValueError(
                f"{self.path}: {key!r} is {self.values[key]!r}, but {reason}; use another model."
            )


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


def tensors_of(folder: Path) -> list[Tensor]:
    """All tensors of the file or shards of a folder; reads headers only.

    **Raises:** `ValueError` for files that are missing or damaged.
    """
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors": None}
    if index.exists():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
            raise ValueError(f"{index} has no 'weight_map' of tensors to files; {AGAIN}.")
        if outside := [x for x in places.values() if Path(x).name != x]:
            raise ValueError(
                f"{index} names the file {outside[0]!r}, but shards lie beside it; {AGAIN}."
            )
        files = dict.fromkeys(places.values())
    found: list[Tensor] = []
    for name in files:
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing; {AGAIN}, or name a .gguf file.")
        found += _tensors_of_file(path)
    return found


def _tensors_of_file(path: Path) -> list[Tensor]:
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
