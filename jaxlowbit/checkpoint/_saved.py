"""Trees of arrays and `QuantizedArray`s as folders of safetensors, in the packed layout.

A `QuantizedArray` NAME is stored as the tensors NAME.packed, NAME.scale and, if present, NAME.zero,
NAME.permutation and NAME.tensor_scale; another array as the tensor NAME. The metadata of a file has
the entries

    jaxlowbit                 the version of the library that wrote it
    jaxlowbit.array.NAME      of each QuantizedArray: layout version, format, k, n, shards, in JSON
    jaxlowbit.sha256.TENSOR   of each tensor

Tensors are memory-mapped, so devices read them from the page cache. Offsets are multiples of 64
bytes, which lets XLA's CPU client use the mapped memory directly.
"""

import collections
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from tqdm import tqdm

from .._core import checks, layout
from .._core.array import LEAVES, QuantizedArray
from .._core.format import Format
from .._core.sharding import placed
from .._version import __version__
from ._files import AGAIN, DTYPES, Folder, Tensor, read_folder
from ._replace import new_folder

KEY = "jaxlowbit"
"""An entry of the metadata, and the prefix of the others."""
_ARRAY, _HASH = f"{KEY}.array.", f"{KEY}.sha256."
_SHARD = 4 * 2**30
_ALIGNMENT = 64
_STORED = tuple(name for name in LEAVES if name not in ("index", "version"))
_REQUIRED = ("packed", "scale")
_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}

Leaf = QuantizedArray | jax.Array | np.ndarray
Sharding = Any
"""A `jax.sharding.Sharding` or a device; for a `QuantizedArray` also a tree of them."""


# --- saving ---------------------------------------------------------------------------------------


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    shard_bytes: int = _SHARD,
    overwrite: bool = False,
) -> None:
    """Writes a tree of arrays to a folder of safetensors; packed weights are written unchanged.

    The folder gets its name when it is complete: a process that is killed leaves the old folder or
    the complete new one.

    **Arguments:**

    - `path`: the folder.
    - `tree`: any pytree of `QuantizedArray`s and arrays, such as a dict or `nnx.state(model)`. The
      name of an array is its path in the tree, joined by dots: `{"mlp": {"up": q}}` has `mlp.up`.
    - `shard_bytes`: the maximum bytes of a file, unless one array is larger.
    - `overwrite`: whether to replace a folder that exists.

    **Raises:** `TypeError` for a leaf that is not an array; `ValueError` for an existing `path`,
    two leaves with one name, a dtype that safetensors lacks, a view made by `select`, and arrays
    with shards in other processes; `OSError` if the folder cannot be written.

    ```py
    save("folder", {"up": quantize(jnp.ones((64, 64)), INT4), "bias": jnp.zeros(64)})
    load("folder")["up"].shape  # (64, 64)
    ```
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"save: path is {checks.brief(path)}, but it must be the path of a folder.")
    checks.boolean("save", "overwrite", overwrite)
    shard_bytes = checks.integer("save", "shard_bytes", shard_bytes, "a number of bytes")
    leaves = named_leaves("save", tree)
    with new_folder("save", Path(path), overwrite) as folder:
        write(folder, leaves, shard_bytes=shard_bytes)


def named_leaves(caller: str, tree: Any) -> dict[str, Any]:
    """The arrays of a tree by name."""
    found: dict[str, Any] = {}
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_quantized)
    for keys, leaf in paths:
        name = _name(keys)
        if name in found:
            raise ValueError(f"{caller}: two arrays have the name {name!r}; rename one of them.")
        if not isinstance(leaf, Leaf):
            raise TypeError(
                f"{caller}: {name or 'the tree'} is {checks.brief(leaf)}, but leaves are arrays "
                "and QuantizedArrays; convert it with jnp.asarray, or leave it out."
            )
        found[name] = leaf
    return found


def write(
    folder: Path,
    leaves: Mapping[str, Any],
    *,
    shard_bytes: int = _SHARD,
    own: bool = True,
    progress: bool = False,
) -> None:
    """Writes arrays by name to files in a folder, one array at a time in host memory.

    **Arguments:** `own`: whether to write our metadata, or files for transformers.
    """
    tensors: dict[str, dict[str, Any]] = {name: _tensors(name, x) for name, x in leaves.items()}
    _check_names(tensors)
    sizes = {name: sum(x.nbytes for x in parts.values()) for name, parts in tensors.items()}
    shards = _shards(sizes, shard_bytes)
    total = sum(sizes.values())
    places: dict[str, str] = {}
    with tqdm(total=total, desc="write", unit="B", unit_scale=True, disable=not progress) as bar:
        for i, names in enumerate(shards, 1):
            file = "model.safetensors"
            if len(shards) > 1:
                file = f"model-{i:05}-of-{len(shards):05}.safetensors"
            parts = {tensor: x for name in names for tensor, x in tensors[name].items()}
            arrays = {x: _description(leaves[x]) for x in names if _is_quantized(leaves[x])}
            metadata = {"format": "np", KEY: __version__} if own else {"format": "pt"}
            metadata |= {_ARRAY + name: text for name, text in arrays.items()} if own else {}
            write_file(folder / file, parts, metadata, hashes=own, advance=bar.update)
            places |= dict.fromkeys(parts, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        text = json.dumps(index, indent=1)
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """The names of the arrays of each file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _tensors(name: str, leaf: Any) -> dict[str, Any]:
    """The tensors of one leaf."""
    if not _is_quantized(leaf):
        return {name: _checked(name, leaf)}
    if leaf.index is not None:
        raise ValueError(
            f"save: {name} is a view made by select, whose stack would be stored whole; save the "
            "stack, or stack[i]."
        )
    leaf.check_words()
    found = {part: getattr(leaf, part) for part in _STORED}
    return {f"{name}.{x}": _checked(name, a) for x, a in found.items() if a is not None}


def _checked(name: str, array: Any) -> Any:
    if isinstance(array, Tracer):
        raise TypeError(f"save: {name} is traced; call save outside of jax.jit.")
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise ValueError(
            f"save: {name} has parts on devices of other processes; save from one process, or "
            "with Orbax."
        )
    if array.dtype not in _KINDS:
        raise ValueError(
            f"save: {name} is {array.dtype}, which safetensors does not store here; convert it to "
            f"one of {', '.join(map(str, _KINDS))}."
        )
    return array


def _check_names(tensors: Mapping[str, Mapping[str, Any]]) -> None:
    found: dict[str, str] = {}
    for name, parts in tensors.items():
        for tensor in parts:
            if not tensor or tensor == "__metadata__" or tensor in found:
                raise ValueError(
                    f"save: {name!r} gives the tensor {tensor!r}, "
                    f"{f'as {found[tensor]!r} does' if tensor in found else 'which is no name'}; "
                    "rename it."
                )
            found[tensor] = name


def _description(array: QuantizedArray) -> str:
    format, k, n, shards = array.tree_flatten()[1]
    fields = {"format": dataclasses.asdict(format), "k": k, "n": n, "shards": shards}
    return json.dumps({"layout_version": layout.VERSION, **fields})


def write_file(
    path: Path,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str],
    *,
    hashes: bool = False,
    advance: Callable[[int], Any] = lambda nbytes: None,
) -> None:
    """Writes a safetensors file, its header last; `hashes` adds hashes to the metadata."""
    # Sizes that are not multiples of the alignment come last, so they shift no other tensor.
    order = sorted(tensors, key=lambda name: tensors[name].nbytes % _ALIGNMENT != 0)
    found = {_HASH + name: "0" * 64 for name in order} if hashes else {}
    length = len(_header(tensors, order, {**metadata, **found}))
    with path.open("wb") as file:
        file.seek(length)
        for name in order:
            data = np.ascontiguousarray(np.asarray(tensors[name])).reshape(-1).view(np.uint8)
            if hashes:
                found[_HASH + name] = hashlib.sha256(data).hexdigest()
            file.write(data)
            advance(data.size)
        file.seek(0)
        file.write(_header(tensors, order, {**metadata, **found}))


def _header(tensors: Mapping[str, Any], order: Sequence[str], metadata: Mapping[str, str]) -> bytes:
    """The header after its length, padded with spaces to a multiple of the alignment."""
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name in order:
        stop = start + tensors[name].nbytes
        shape = list(tensors[name].shape)
        kind = _KINDS[tensors[name].dtype]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


# --- loading --------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """A folder written by `save`, with checked headers; arrays have not been read yet.

    - `arrays`: by name, the tensors of each array, by the leaf names of a `QuantizedArray`.
    - `descriptions`: by name, the JSON of each `QuantizedArray`.
    - `sha256`: by tensor, its hash.
    """

    path: Path
    arrays: dict[str, dict[str, Tensor]]
    descriptions: dict[str, Mapping[str, Any]]
    sha256: dict[str, str]
    tensors: Mapping[str, Tensor]

    def leaf(self, name: str) -> Any:
        """The array `name`, memory-mapped: a NumPy array, or a `QuantizedArray` of NumPy arrays.

        **Raises:** `ValueError` for tensors that do not match its description.
        """
        parts = {part: tensor.array() for part, tensor in self.arrays[name].items()}
        if name not in self.descriptions:
            return parts[name]
        try:
            description = dict(self.descriptions[name])
            version: Any = np.full(parts["packed"].shape[:-3], layout.VERSION, np.uint32)
            sizes = (description.pop(x) for x in ("k", "n"))
            k, n = (checks.integer("load", "size", x, "a size", least=0) for x in sizes)
            shards = checks.shard_counts("load", description.pop("shards"))
            checks.shards("load", (k, n), shards)
            return QuantizedArray(
                **{"zero": None, **parts},
                index=None,
                version=version,
                format=Format(**description.pop("format")),
                k=k,
                n=n,
                shards=shards,
            )
        except (TypeError, ValueError, KeyError) as error:
            raise self._damaged(name, error) from None

    def nbytes(self, name: str) -> int:
        return sum(tensor.nbytes for tensor in self.arrays[name].values())

    def _damaged(self, name: str, reason: object) -> ValueError:
        return ValueError(f"{self.path}: the array {name!r} is damaged ({reason}); {AGAIN}.")


def is_saved(folder: Folder) -> bool:
    """Whether `save` wrote the files of a folder."""
    return KEY in folder.metadata


def read_saved(path: Path) -> Saved:
    """Reads and checks the headers of a folder that `save` wrote.

    **Raises:** `FileNotFoundError` if there is no folder; `ValueError` for missing or damaged
    files, files that `save` did not write, and another layout version.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"load: {path} is no folder; name one that save wrote.")
    return saved_of(read_folder(path))


def saved_of(folder: Folder) -> Saved:
    """`read_saved` of a folder whose headers are read."""
    path, metadata = folder.path, folder.metadata
    if not is_saved(folder):
        raise ValueError(
            f"{path} has no entry {KEY!r} in the metadata of its files, so checkpoint.save did "
            "not write it; name a folder that it wrote."
        )
    described, hashes = (
        {key.removeprefix(start): text for key, text in metadata.items() if key.startswith(start)}
        for start in (_ARRAY, _HASH)
    )
    if odd := sorted(hashes.keys() ^ folder.tensors.keys()):
        raise ValueError(f"{path}: tensor {odd[0]!r} has no hash, or no data; {AGAIN}.")
    rest = dict(folder.tensors)
    found = Saved(path, {}, {}, hashes, folder.tensors)
    for name, text in described.items():
        found.descriptions[name] = _description_of(found, name, text)
        parts = {part: rest.pop(f"{name}.{part}", None) for part in _STORED}
        found.arrays[name] = {part: tensor for part, tensor in parts.items() if tensor is not None}
        if missing := [part for part in _REQUIRED if part not in found.arrays[name]]:
            raise found._damaged(name, f"it lacks {missing[0]}")
    found.arrays.update({name: {name: tensor} for name, tensor in rest.items()})
    return found


def _description_of(saved: Saved, name: str, text: str) -> Mapping[str, Any]:
    """**Raises:** `ValueError` for another layout version, and for text of another form."""
    try:
        found = json.loads(text)
        version = found["layout_version"]
        if found.keys() != {"layout_version", "format", "k", "n", "shards"}:
            raise ValueError(f"its description has the entries {', '.join(found)}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise saved._damaged(name, error) from None
    if version != layout.VERSION:
        raise ValueError(
            f"{saved.path}: the words of {name!r} were packed with layout version {version!r}, "
            f"but this library reads version {layout.VERSION}; quantize the weights again, or use "
            "the library that wrote them."
        )
    return found


def load_saved(
    path: Path,
    *,
    target: Any = None,
    sharding: Sharding | Callable[[str, Any], Sharding] = None,
) -> Any:
    """Loads what `save` wrote; arguments and errors as of `load`."""
    saved = read_saved(path)

    def place(name: str, like: Any = None) -> Any:
        leaf = saved.leaf(name)
        if like is not None:
            _check_like(name, leaf, like)
        chosen = sharding(name, leaf) if callable(sharding) else sharding
        return placed(leaf, _shardings(like) if chosen is None else chosen)

    transfers = Transfers()
    if target is None:
        return {name: transfers.add(place(name)) for name in saved.arrays}
    paths, structure = jax.tree_util.tree_flatten_with_path(target, is_leaf=_is_quantized)
    wanted = {_name(keys): like for keys, like in paths}
    if odd := sorted(wanted.keys() ^ saved.arrays.keys()):
        where = "the folder lacks" if odd[0] in wanted else "target lacks"
        raise ValueError(
            f"load: {where} the array {odd[0]!r}; target must have the structure of the tree "
            f"that was saved in {path}."
        )
    leaves = [transfers.add(place(name, like)) for name, like in wanted.items()]
    return jax.tree.unflatten(structure, leaves)


class Transfers:
    """Bounds the bytes of arrays on their way to devices.

    XLA stages each in pinned host memory, which it would otherwise allocate for all of them.
    """

    MAX_BYTES: int = 2**29

    def __init__(self) -> None:
        self._waiting: collections.deque[tuple[Any, int]] = collections.deque()
        self._nbytes = 0

    def add(self, array: Any) -> Any:
        """Waits for earlier arrays if there are too many bytes; returns the array."""
        self._waiting.append((array, array.nbytes))
        self._nbytes += array.nbytes
        while len(self._waiting) > 1 and self._nbytes > self.MAX_BYTES:
            earlier, nbytes = self._waiting.popleft()
            jax.block_until_ready(earlier)
            self._nbytes -= nbytes
        return array


def _shardings(like: Any) -> Any:
    """The shardings of the leaves of a target that has some; None for the default device."""
    found = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), like)
    return found if jax.tree.leaves(found) else None


def _check_like(name: str, leaf: Any, like: Any) -> None:
    """Raises unless an array has the structure, shapes and dtypes of the target."""

    def signature(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [(tuple(x.shape), jnp.dtype(x.dtype)) for x in leaves]

    if signature(leaf) != signature(like):
        raise ValueError(
            f"load: array {name!r} is {_words(leaf)}, but target has {_words(like)}; make the "
            "target like the saved tree."
        )


def _words(leaf: Any) -> str:
    return str(leaf) if _is_quantized(leaf) else checks.brief(leaf)


# --- verifying ------------------------------------------------------------------------------------


def hashes_of(saved: Saved) -> Iterator[tuple[str, int]]:
    """Compares the hash of each tensor of a folder; yields its name and size when it agrees.

    **Raises:** `ValueError` with the name of a tensor whose bytes differ.
    """
    for name, tensor in saved.tensors.items():
        data = tensor.array().reshape(-1).view(np.uint8)
        found = hashlib.sha256(data).hexdigest()
        if found != saved.sha256[name]:
            raise ValueError(
                f"{tensor.where} has the hash {found[:16]}..., but {saved.sha256[name][:16]}... "
                f"was saved: the file was altered; {AGAIN}."
            )
        yield name, tensor.nbytes


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedArray)


def _name(keys: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(keys), simple=True, separator=".")
