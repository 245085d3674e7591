"""Files of a session: its tokens with their keys and values, for the same model.

A file is safetensors with the tensors `tokens`, int32 (n,), and `keys.N` and `values.N` of each
layer, (n, kv_heads, head_size). Its metadata `jaxlowbit.session` is JSON:

- `version`: the version of this form;
- `model`: the hash of the model (`fingerprint`);
- `slots`: the number of slots of the cache, which determines the factors of longrope;
- `notes`: values of the caller, such as the messages of a chat.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from .._core import checks
from .._core.array import QuantizedArray
from ..checkpoint._files import AGAIN, DTYPES, Tensor, read_file
from ..checkpoint._replace import new_file
from ..checkpoint._saved import write_file
from . import memory
from .cache import Cache, nbytes
from .decoder import Decoder
from .low_rank import Adapted

_KEY, _VERSION = "jaxlowbit.session", 1
_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


class Contents(NamedTuple):
    """The tokens of a session, its cache, and the notes of the caller."""

    tokens: list[int]
    cache: Cache
    notes: Any


def write_session(
    caller: str, path: Path, decoder: Decoder, contents: Contents, *, overwrite: bool
) -> None:
    """Writes a file, which gets its name when it is complete.

    **Raises:** `ValueError` for a `path` that exists and a session without tokens.
    """
    tokens, cache, notes = contents
    if not tokens:
        raise ValueError(f"{caller}: the session has no tokens yet; generate first.")
    tensors: dict[str, Any] = {"tokens": np.array(tokens, np.int32)}
    for name in _arrays_of(decoder):
        for i, layer in enumerate(getattr(cache, name)):
            tensors[f"{name}.{i}"] = layer[0, : len(tokens)]
    fields = {"version": _VERSION, "model": fingerprint(decoder), "slots": cache.slots}
    metadata = {_KEY: json.dumps(fields | {"notes": notes})}
    with new_file(caller, path, overwrite) as file:
        write_file(file, tensors, metadata)


def read_session(caller: str, path: Path, decoder: Decoder) -> Contents:
    """Reads a file for the model that wrote it.

    **Raises:** `FileNotFoundError`; `ValueError` for a file of another model, a damaged file, and a
    cache that exceeds the memory.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{caller}: {path} is no file; name one of Session.save.")
    try:
        found, metadata = read_file(path)
        tensors = {tensor.name: tensor for tensor in found}
        fields = _fields(path, metadata.get(_KEY), decoder)
        tokens = _tokens(path, tensors, decoder)
        slots = fields["slots"]
        if type(slots) is not int or not len(tokens) <= slots <= decoder.config.context:
            raise ValueError(
                f"{path}: the cache has {checks.brief(slots)} slots, but it must be {len(tokens)} "
                f"to {decoder.config.context}; {_AGAIN}."
            )
        arrays = _arrays(tensors, decoder, len(tokens))
        needed = nbytes(decoder.config, 1, slots, decoder.cache_dtype) // decoder.parts
        memory.check(caller, needed, f"a session with {slots} slots")
    except ValueError as error:
        text = str(error).removeprefix(f"{caller}: ").replace(f"; {AGAIN}", f"; {_AGAIN}")
        raise ValueError(f"{caller}: {text}") from None
    return Contents(tokens, _cache(decoder, arrays, len(tokens), slots), fields.get("notes"))


_AGAIN = "start a new session"


def _fields(path: Path, text: str | None, decoder: Decoder) -> dict[str, Any]:
    """The metadata of a file, of this version and this model."""
    try:
        fields = json.loads(text or "null")
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or fields.get("version") != _VERSION or "slots" not in fields:
        raise ValueError(f"{path} is no session of this version; {_AGAIN}.")
    if fields.get("model") != fingerprint(decoder):
        raise ValueError(
            f"{path} is a session of another model, another format or dtype of it, or another "
            f"adapter; load that model, or {_AGAIN}."
        )
    return fields


def _tokens(path: Path, tensors: dict[str, Tensor], decoder: Decoder) -> list[int]:
    names = [f"{name}.{i}" for name in _arrays_of(decoder) for i in range(decoder.config.layers)]
    if odd := sorted(tensors.keys() ^ {"tokens", *names}):
        raise ValueError(f"{path}: tensor {odd[0]!r} is missing or unknown; {_AGAIN}.")
    shape = tensors["tokens"].shape
    count = shape[0] if len(shape) == 1 else 0
    tokens = tensors["tokens"].check(("I32",), (count,)).array()
    if not 1 <= count < decoder.config.context:
        raise ValueError(f"{path} has {count} tokens, more than the context; {_AGAIN}.")
    if not 0 <= tokens.min() <= tokens.max() < decoder.config.vocabulary:
        raise ValueError(f"{path} has tokens outside the vocabulary; {_AGAIN}.")
    return tokens.tolist()


def _arrays(tensors: dict[str, Tensor], decoder: Decoder, count: int) -> dict[str, np.ndarray]:
    """Keys and values (count, kv_heads, head_size), and their scales (count, kv_heads), by name,
    memory-mapped."""
    config, kind = decoder.config, _KINDS[jnp.dtype(decoder.cache_dtype)]
    arrays = {}
    for name, tensor in tensors.items():
        if name == "tokens":
            continue
        field, _, number = name.partition(".")
        shape = (count, *config.head_sizes(local=config.is_local(int(number))))
        if field in ("keys", "values"):
            arrays[name] = tensor.check((kind,), shape).array()
        else:
            arrays[name] = tensor.check(("F32",), shape[:2]).array()
    return arrays


def _arrays_of(decoder: Decoder) -> list[str]:
    """The fields of a cache with an array per layer."""
    names = ["keys", "values"]
    return names if decoder.cache_dtype == decoder.dtype else [*names, "key_scales", "value_scales"]


def _cache(decoder: Decoder, arrays: dict[str, np.ndarray], count: int, slots: int) -> Cache:
    empty = decoder.make_cache(1, slots)

    def filled(name: str, layers: tuple[Array, ...]) -> tuple[Array, ...]:
        found = []
        for i, layer in enumerate(layers):
            padded = np.zeros(layer.shape, layer.dtype)
            padded[0, :count] = arrays[f"{name}.{i}"]
            found.append(jax.device_put(padded, layer.sharding))
        return tuple(found)

    positions = np.arange(slots, dtype=np.int32)[None]
    positions = np.where(positions < count, positions, np.int32(-1))
    return empty._replace(
        positions=jax.device_put(positions, empty.positions.sharding),
        used=jax.device_put(np.int32(count), empty.used.sharding),
        **{name: filled(name, getattr(empty, name)) for name in _arrays_of(decoder)},
    )


def fingerprint(decoder: Decoder) -> str:
    """A hash of a model: its configuration, dtypes, and a sum of the bits of each array.

    It is the same on any number of devices.
    """
    sums: dict[str, Any] = {}
    for path, node in nnx.iter_graph(decoder):
        name = ".".join(map(str, path))
        if isinstance(node, Adapted):
            sums[f"{name}.scaling"] = node.scaling
        if isinstance(node, nnx.Variable):
            value = node.get_value()
            if isinstance(value, QuantizedArray):
                sums[f"{name}.format"] = str(value.format)
            for i, leaf in enumerate(jax.tree.leaves(value)):
                sums[f"{name}.{i}"] = _sum(leaf)
    fields = {
        "config": dataclasses.asdict(decoder.config.replace(norm_offset=0.0)),
        "dtype": str(jnp.dtype(decoder.dtype)),
        "lhs_qtype": str(decoder.lhs_qtype),
        "cache_dtype": str(jnp.dtype(decoder.cache_dtype)),
        "sums": {n: int(x) if isinstance(x, Array) else x for n, x in sums.items()},
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


@jax.jit
def _sum(array: Array) -> Array:
    """The sum of the bits of all elements, as integers, modulo 2^32."""
    bits = lax.bitcast_convert_type(array, jnp.dtype(f"uint{array.dtype.itemsize * 8}"))
    return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)
