"""Files of a checkpoint folder: JSON documents, and tensors in safetensors, single or sharded.

A safetensors file begins with the length of its header (8 bytes) and the header, JSON with the
offsets of the tensors. The package safetensors checks the header, but cannot return 8-bit floats.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from .._core.checks import brief

AGAIN = "fetch the folder again"
_POINTER = b"version https://git-lfs.github.com/spec/"
FLOATS = ("F32", "F16", "BF16")
# Supported types; others raise an error with their names.
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
    "F8_E4M3": jnp.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": jnp.dtype(jnp.float8_e5m2),
    "F8_E8M0": jnp.dtype(jnp.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class Tensor(NamedTuple):
    """A tensor: its type, its shape (outermost axis first), its file and its offset there."""

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def where(self) -> str:
        """The file and the name, as the beginning of errors."""
        return f"{self.file}: tensor {self.name!r}"

    @property
    def dtype(self) -> np.dtype:
        """**Raises:** `ValueError` for an unsupported type."""
        if self.kind not in DTYPES:
            raise ValueError(
                f"{self.where} is {self.kind}, but tensors of {', '.join(DTYPES)} are read; "
                "convert it."
            )
        return DTYPES[self.kind]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self) -> np.ndarray:
        """The whole tensor, memory-mapped: pages are read when used and freed with the array."""
        if not self.nbytes:
            return np.zeros(self.shape, self.dtype)
        data = np.memmap(self.file, np.uint8, "r", self.offset, (self.nbytes,))
        return data.view(self.dtype).reshape(self.shape)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The elements of rows `start` to `stop` - 1, (rows, k); a vector is one row."""
        k = self.shape[-1] if self.shape else 1
        return self.bytes(start, stop).view(self.dtype).reshape(-1, k)

    def bytes(self, start: int, stop: int) -> np.ndarray:
        """The bytes of rows `start` to `stop` - 1, as in the file."""
        size = (self.shape[-1] if self.shape else 1) * self.dtype.itemsize
        offset = self.offset + start * size
        return np.fromfile(self.file, np.uint8, (stop - start) * size, offset=offset)

    def check(self, kinds: tuple[str, ...], *shapes: tuple[int, ...]) -> "Tensor":
        """Returns the tensor if its type and its shape are among the given ones.

        **Raises:** `ValueError` with the expected types and shapes.
        """
        if self.kind not in kinds or self.shape not in shapes:
            raise ValueError(
                f"{self.where} is {self.kind} of shape {self.shape}, but by its configuration it "
                f"must be {' or '.join(kinds)} of shape {' or '.join(map(str, shapes))}; {AGAIN}."
            )
        return self


class Folder(NamedTuple):
    """A checkpoint: tensors by name, the metadata of the safetensors files, and config.json."""

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    config: Mapping[str, Any]

    def need(self, name: str, user: str) -> Tensor:
        """The tensor `name`, which belongs to the tensor or module `user`.

        **Raises:** `ValueError` if it is missing.
        """
        found = self.tensors.get(name)
        if found is None:
            raise ValueError(
                f"{self.path}: tensor {name!r} is missing, but {user!r} needs it; {AGAIN}."
            )
        return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    **Raises:** `ValueError` if the file is missing or contains anything but an object.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing, but the folder of a Hugging Face model has it; {AGAIN}, or name "
            "such a folder or a .gguf file."
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {AGAIN}.") from None
    except (ValueError, RecursionError) as error:  # from JSON and from UTF-8
        raise ValueError(f"{path} is no JSON ({error}); {AGAIN}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} contains {type(found).__name__}, but it must be an object.")
    return found


def check_pointer(path: Path) -> None:
    """Raises for a Git LFS pointer, a text file that replaces the actual file.

    **Raises:** `ValueError`.
    """
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(
                f"{path} is a pointer of Git LFS and not the file itself; run git lfs pull in its "
                "folder, or fetch it again."
            )


def read_folder(path: Path) -> Folder:
    """Reads the headers of the file or shards of a folder, and its config.json, if there is one.

    As in transformers, model.safetensors takes precedence over shards. A folder with neither may
    have one safetensors file of any name.

    **Raises:** `ValueError` for missing or damaged files, for an index whose tensors differ from
    its shards', and for a tensor that occurs twice.
    """
    config = path / "config.json"
    values = read_json(config) if config.exists() else {}
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    files = sorted(path.glob("*.safetensors"))
    if not single.exists() and not index.exists() and len(files) == 1:
        single = files[0]
    if single.exists() or not index.exists():
        tensors, metadata = read_file(single)
        return Folder(path, {tensor.name: tensor for tensor in tensors}, metadata, values)
    return Folder(path, *_read_shards(path, index), values)


def _read_shards(path: Path, index: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise ValueError(f"{index} has no 'weight_map' of tensors to files; {AGAIN}.")
    if outside := [x for x in places.values() if not _is_file_name(x)]:
        raise ValueError(
            f"{index} names the file {brief(outside[0])}, but shards must be in the same "
            f"folder; {AGAIN}."
        )
    found: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for file in dict.fromkeys(places.values()):
        tensors, own = read_file(path / file)
        metadata |= own
        for tensor in tensors:
            if tensor.name in found:
                raise ValueError(
                    f"{tensor.where} is also in {found[tensor.name].file.name}; {AGAIN}."
                )
            found[tensor.name] = tensor
    for name, file in places.items():
        if name not in found or found[name].file.name != file:
            raise ValueError(
                f"{index} has tensor {name!r} in {file}, but the file does not contain it; {AGAIN}."
            )
    return found, metadata


def _is_file_name(text: str) -> bool:
    """Whether a text is a file name in the same folder, not a path."""
    size = len(text.encode(errors="surrogatepass"))
    return Path(text).name == text and text != ".." and size < 256 and "\0" not in text


def read_file(path: Path) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors of a safetensors file, whose header is checked, and its metadata."""
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
    metadata = header.pop("__metadata__", None) or {}
    tensors = [
        Tensor(
            name, entry["dtype"], tuple(entry["shape"]), path, 8 + length + entry["data_offsets"][0]
        )
        for name, entry in sorted(header.items())
    ]
    return tensors, metadata
