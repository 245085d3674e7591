"""Reads GGUF files: header, metadata and the location of tensors, with every size checked.

ggml's `docs/gguf.md` defines the format; versions 2 and 3, little-endian, are supported. The `gguf`
package supplies only the table of types: its reader does not check counts and lengths, and needs
seconds for a vocabulary.
"""

import mmap
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..checkpoint._files import check_pointer

AGAIN = "the file is damaged or cut off; fetch it again"
FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""The float types that weights may have, as NumPy reads their bytes."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q"}
_SCALARS |= {12: "<d", 7: "<?"}
_STRING, _ARRAY = 8, 9
_TYPES = {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
# A type of llama.cpp (`ggml-common.h`) that the package lacks.
_TYPES.setdefault(42, ("Q2_0", 64, 18))
_MOST_DIMENSIONS = 4


class Tensor(NamedTuple):
    """A tensor: its type, its shape with the outermost axis first, and its bytes in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class File:
    """A memory-mapped GGUF file.

    **Arguments:** `path`: the file.

    **Raises:** `ValueError` with the place, the value and the rule for anything in the header that
    violates the format or points beyond the end of the file; `OSError` if it cannot be read.

    ```python
    file = File("model.gguf")
    file.metadata["general.architecture"], file.tensors["token_embd.weight"].shape
    ```
    """

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        check_pointer(self.path)
        with open(self.path, "rb") as file:
            magic = file.read(4)
            if magic != b"GGUF"[: len(magic)]:
                raise ValueError(
                    f"{self.path}: the file begins with {magic!r}, but a GGUF file with b'GGUF'; "
                    "name a .gguf file, or the folder of a Hugging Face model."
                )
            self.size = os.fstat(file.fileno()).st_size
            if self.size < 24:
                raise ValueError(
                    f"{self.path}: the file has {self.size} bytes, but the header of a GGUF file "
                    f"has 24; {AGAIN}."
                )
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _Header(self.path, self._map)
        self.metadata = header.metadata()
        self._metadata_end = header.at
        self.tensors = header.tensors(self.metadata.get("general.alignment", 32))

    def rows(self, tensor: Tensor) -> np.ndarray:
        """The stored rows of a tensor, read from the file as they are used.

        **Returns:** uint8 (rows, bytes of a row), or floats (rows, k); one row for a vector.
        """
        dtype = np.dtype(FLOATS.get(tensor.kind, "u1"))
        count = tensor.nbytes // dtype.itemsize
        flat = np.frombuffer(self._map, dtype, count, tensor.start)
        flat = flat.view(jnp.bfloat16) if tensor.kind == "BF16" else flat
        return flat.reshape(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1)

    def header(self) -> bytes:
        """A GGUF file with this metadata and without tensors."""
        counts = struct.pack("<Q", 0) + self._map[16:24]
        return self._map[:8] + counts + self._map[24 : self._metadata_end]

    def where(self, tensor: Tensor) -> str:
        """The file and the name of a tensor, as the beginning of errors."""
        return f"{self.path}: tensor {tensor.name!r}"

    def forget(self, tensor: Tensor) -> None:
        """Releases the memory of a tensor's pages; the system reads them again on access."""
        page = mmap.PAGESIZE
        start = -(-tensor.start // page) * page
        length = (tensor.start + tensor.nbytes) // page * page - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, length)


class SplitFile(File):
    """The files `NAME-00001-of-0000N.gguf` of one model, from llama.cpp's llama-gguf-split.

    The first has the metadata, and each has some of the tensors.

    **Arguments:** `path`: any of the files.

    **Raises:** as `File`, and `ValueError` for a missing file, a file of another model, and a
    tensor that occurs twice.
    """

    def __init__(self, path: str | os.PathLike[str]):
        paths = split_paths(Path(path))
        if missing := [x for x in paths if not x.exists()]:
            raise ValueError(
                f"{missing[0]} is missing, but the model is split into {len(paths)} files; fetch "
                "it into the same folder."
            )
        super().__init__(paths[0])
        self._owners = {name: self for name in self.tensors}
        self._check_split(self, 0, len(paths))
        for number, own in enumerate(paths[1:], 1):
            file = File(own)
            self._check_split(file, number, len(paths))
            if twice := self.tensors.keys() & file.tensors.keys():
                raise ValueError(
                    f"{own}: tensor {min(twice)!r} is also in "
                    f"{self._owners[min(twice)].path.name}; {AGAIN}."
                )
            self.tensors |= file.tensors
            self._owners |= dict.fromkeys(file.tensors, file)
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise ValueError(
                f"{self.path}: 'split.tensors.count' is {total!r}, but its {len(paths)} files have "
                f"{len(self.tensors)} tensors; fetch them again."
            )

    def _check_split(self, file: File, number: int, count: int) -> None:
        for key, expected in (("split.no", number), ("split.count", count)):
            if (found := file.metadata.get(key)) != expected:
                raise ValueError(
                    f"{file.path}: {key!r} is {short(found)}, but by its name it is {expected}; "
                    "restore the name that the file had, or fetch it again."
                )

    def rows(self, tensor: Tensor) -> np.ndarray:
        owner = self._owners[tensor.name]
        return super().rows(tensor) if owner is self else owner.rows(tensor)

    def forget(self, tensor: Tensor) -> None:
        owner = self._owners[tensor.name]
        return super().forget(tensor) if owner is self else owner.forget(tensor)

    def where(self, tensor: Tensor) -> str:
        return f"{self._owners[tensor.name].path}: tensor {tensor.name!r}"


_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def split_paths(path: Path) -> list[Path]:
    """The files of the split model that a file's name belongs to, or the file itself."""
    found = _SPLIT.search(path.name)
    if found is None:
        return [path]
    stem, count = path.name[: found.start()], int(found[2])
    return [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


def open_gguf(path: Path) -> File:
    """Opens the file or the files of a model.

    **Raises:** as `File` and `SplitFile`, and `ValueError` for a renamed part of a split model.
    """
    if len(split_paths(path)) > 1:
        return SplitFile(path)
    file = File(path)
    count = file.metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        raise ValueError(
            f"{path}: the model is split into {count} files, but this name tells of none; name "
            f"them ...-00001-of-{count:05}.gguf and so on, or join them with llama.cpp's "
            "llama-gguf-split --merge."
        )
    return file


class _Header:
    """Reads values after the magic number in sequence; raises at the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 4
        version = self._number("<I", "the version")
        if version not in (2, 3):
            swapped = version & 0xFFFF == 0
            reason = "it is big-endian" if swapped else "only versions 2 and 3 are read"
            raise ValueError(
                f"{path}: GGUF version {version}, but {reason}; convert the model again with a "
                "recent llama.cpp."
            )
        self.num_tensors = self._count("<Q", "the number of tensors", 24)
        self.num_entries = self._count("<Q", "the number of metadata entries", 13)

    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for i in range(self.num_entries):
            key = self._string(f"the key of metadata entry {i}")
            if key in found:
                raise ValueError(f"{self.path}: the metadata has {key!r} twice; {AGAIN}.")
            found[key] = self._value(key, self._number("<I", f"the type of {key!r}"))
        return found

    def tensors(self, alignment: Any) -> dict[str, Tensor]:
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(
                f"{self.path}: general.alignment is {alignment!r}, but it must be a power of two; "
                f"{AGAIN}."
            )
        found: dict[str, Tensor] = {}
        for i in range(self.num_tensors):
            name = self._string(f"the name of tensor {i}")
            if name in found:
                raise ValueError(f"{self.path}: tensor {name!r} is there twice; {AGAIN}.")
            found[name] = self._tensor(name, alignment)
        start = -(-self.at // alignment) * alignment
        placed = {name: t._replace(start=t.start + start) for name, t in found.items()}
        self._check_places(placed)
        return placed

    def _tensor(self, name: str, alignment: int) -> Tensor:
        """The next tensor of the list; its offset is relative to the beginning of the data."""
        count = self._number("<I", f"the dimensions of {name!r}")
        if not 1 <= count <= _MOST_DIMENSIONS:
            raise ValueError(
                f"{self.path}: tensor {name!r} has {count} dimensions, but tensors have 1 to "
                f"{_MOST_DIMENSIONS}; {AGAIN}."
            )
        sizes = [self._number("<Q", f"the shape of {name!r}") for _ in range(count)]
        number = self._number("<I", f"the type of {name!r}")
        offset = self._number("<Q", f"the offset of {name!r}")
        if number not in _TYPES:
            raise ValueError(
                f"{self.path}: tensor {name!r} has type {number}, which ggml does not have; "
                f"{AGAIN}, or install a newer gguf package."
            )
        kind, size, nbytes = _TYPES[number]
        elements = 1
        for length in sizes:
            elements *= length
        if elements == 0 or sizes[0] % size or elements // size * nbytes > len(self.data):
            raise ValueError(
                f"{self.path}: tensor {name!r} has the shape {sizes} in {kind}, but rows are "
                f"whole blocks of {size} and the file has {len(self.data)} bytes; {AGAIN}."
            )
        if offset % alignment:
            raise ValueError(
                f"{self.path}: tensor {name!r} begins at {offset}, but tensors begin at multiples "
                f"of {alignment}; {AGAIN}."
            )
        return Tensor(name, kind, tuple(sizes[::-1]), offset, elements // size * nbytes)

    def _check_places(self, tensors: Mapping[str, Tensor]) -> None:
        end, before = self.at, "the header"
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if tensor.start < end:
                raise ValueError(
                    f"{self.path}: tensor {tensor.name!r} begins at byte {tensor.start}, inside "
                    f"{before}, which ends at {end}; {AGAIN}."
                )
            end, before = tensor.start + tensor.nbytes, f"tensor {tensor.name!r}"
            if end > len(self.data):
                raise ValueError(
                    f"{self.path}: {before} ends at byte {end}, but the file at {len(self.data)}; "
                    f"{AGAIN}."
                )

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(f"the value of {key!r}")
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], f"the value of {key!r}")
        if kind != _ARRAY:
            raise ValueError(
                f"{self.path}: {key!r} has a value of type {kind}, but types are 0 to 12; {AGAIN}."
            )
        kind = self._number("<I", f"the type of {key!r}")
        if kind == _STRING:
            count = self._count("<Q", f"the length of {key!r}", 8)
            return [self._text(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(
                f"{self.path}: {key!r} is an array of type {kind}, but its elements must be "
                f"numbers, truth values or strings; {AGAIN}."
            )
        dtype = np.dtype("?" if kind == 7 else _SCALARS[kind])
        count = self._count("<Q", f"the length of {key!r}", dtype.itemsize)
        values = np.frombuffer(self.data, dtype, count, self.at).tolist()
        self.at += count * dtype.itemsize
        return values

    def _number(self, code: str, what: str) -> Any:
        end = self.at + struct.calcsize(code)
        if end > len(self.data):
            raise ValueError(
                f"{self.path}: {what} lies beyond the end of the file, {len(self.data)} bytes; "
                f"{AGAIN}."
            )
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at = end
        return value

    def _count(self, code: str, what: str, least: int) -> int:
        """A number of items that take at least `least` bytes each, which must fit in the file."""
        count = self._number(code, what)
        if count * least > len(self.data) - self.at:
            raise ValueError(
                f"{self.path}: {what} is {count}, which the remaining {len(self.data) - self.at} "
                f"bytes of the file do not fit; {AGAIN}."
            )
        return count

    def _string(self, what: str) -> str:
        found = self._text(what)
        if isinstance(found, bytes):
            raise ValueError(f"{self.path}: {what} is {found[:20]!r}, no UTF-8; {AGAIN}.")
        return found

    def _text(self, what: str) -> str | bytes:
        """A string, or its bytes if it is not UTF-8, which raises only if the string is used."""
        length = self._count("<Q", f"the length of {what}", 1)
        data = self.data[self.at : self.at + length]
        self.at += length
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


# --- values of the metadata -----------------------------------------------------------------------

_KINDS: dict[str, tuple[type, ...]] = {
    "an integer": (int,),
    "a number": (int, float),
    "a string": (str,),
    "true or false": (bool,),
    "a list": (list,),
}


class Metadata:
    """Metadata with checked types of values, and keys prefixed by an architecture.

    `read` contains the keys, without the prefix, that the methods have read.
    """

    read: set[str]

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = ""):
        self.path, self.values, self.prefix, self.read = path, values, prefix, set()

    def get(self, key: str, kind: str, default: Any = None) -> Any:
        """The value of a key, of one of `_KINDS`, or the default.

        **Raises:** `ValueError` for a value of another kind.
        """
        self.read.add(key)
        value = self.values.get(self.prefix + key)
        if value is None:
            return default
        truth = isinstance(value, bool) and kind != "true or false"
        if truth or not isinstance(value, _KINDS[kind]):
            raise ValueError(
                f"{self.path}: {self.prefix + key!r} is {short(value)}, but it must be {kind}; "
                "convert the model again, or fetch the file again."
            )
        return value

    def need(self, key: str, kind: str) -> Any:
        """The value of a key that every model has."""
        value = self.get(key, kind)
        if value is None:
            raise ValueError(
                f"{self.path}: the metadata lacks {self.prefix + key!r}, {kind}; convert the model "
                "again with a recent llama.cpp."
            )
        return value

    def same(self, key: str, default: int | None = None) -> int:
        """An integer, which some files repeat for each layer.

        **Raises:** `ValueError` if layers differ.
        """
        self.read.add(key)
        value = self.values.get(self.prefix + key, default)
        if isinstance(value, list) and value and all(x == value[0] for x in value):
            value = value[0]
        if isinstance(value, list):
            raise ValueError(
                f"{self.path}: {self.prefix + key!r} is {short(value)}, but the layers of the "
                "decoder here are alike; use a model whose layers are."
            )
        if value is None or type(value) is not int:
            return self.need(key, "an integer")
        return value


def short(value: object) -> str:
    """A value in at most 60 characters, for errors."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
