"""Damage of model files, drawn by hypothesis: JSON documents, tensors and bytes."""

import json
from pathlib import Path

import numpy as np
import safetensors_bytes
from hypothesis import strategies as st
from safetensors_bytes import Part

KINDS = {
    1: ["U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"],
    2: ["F16", "BF16", "I16", "U16"],
    4: ["F32", "I32", "U32"],
    8: ["F64", "I64", "U64"],
}
SIZES = {kind: size for size, kinds in KINDS.items() for kind in kinds}
VALUES = st.one_of(
    st.sampled_from([None, True, False, -1, 0, 1, 7, 2**31, 10**30, 1.5, "", "x", "int4", "../x"]),
    st.sampled_from([[], {}, [1, 2], [0, 0], [-1, 64], {"a": 1}, [[]], "F8_E4M3", "gptq", "mlx"]),
    st.integers(-(2**65), 2**65),
    st.text(max_size=4),
)


def changed_tree(data, tree):
    """A JSON document with one entry replaced, removed or renamed."""
    places = []

    def walk(node):
        entries = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in entries:
            places.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    tree = json.loads(json.dumps(tree))
    walk(tree)
    if not places:
        return data.draw(VALUES)
    node, key = data.draw(st.sampled_from(places))
    change = data.draw(st.sampled_from(["replace", "remove", "rename"]))
    value = node.pop(key)
    if change == "replace" and isinstance(node, list):
        node.insert(key, data.draw(VALUES))
    elif change == "replace":
        node[key] = data.draw(VALUES)
    elif change == "rename" and isinstance(node, dict):
        node[data.draw(st.text(max_size=8))] = value
    return tree


def changed_text(data, text):
    """JSON with one entry changed, or another text with some characters changed."""
    try:
        return json.dumps(changed_tree(data, json.loads(text)))
    except (ValueError, TypeError):
        return text[:1] + data.draw(st.text(max_size=8))


def changed_shape(data, shape):
    shape = list(shape)
    change = data.draw(st.sampled_from(["swap", "split", "flat", "one", "last"]))
    if change == "swap" and len(shape) > 1:
        return [shape[1], shape[0], *shape[2:]]
    if change == "split" and shape and shape[-1] % 2 == 0:
        return [*shape[:-1], shape[-1] // 2, 2]
    if change == "flat":
        return [int(np.prod(shape))]
    if change == "one":
        return [1, *shape]
    return shape[:-1] if shape and shape[-1] == 1 else [*shape, 1]


def changed_part(data, part):
    """A tensor of another type or shape, or with other bytes."""
    kind, shape, stored = part
    match data.draw(st.sampled_from(["kind", "shape", "cut", "bytes", "fill", "state"])):
        case "kind":
            return Part(data.draw(st.sampled_from(KINDS[SIZES[kind]])), shape, stored)
        case "shape":
            return Part(kind, changed_shape(data, shape), stored)
        case "cut" if shape and shape[0] > 0:
            rows = data.draw(st.integers(0, shape[0] - 1))
            return Part(kind, [rows, *shape[1:]], stored[: len(stored) // shape[0] * rows])
        case "fill":
            return Part(
                kind, shape, bytes([data.draw(st.sampled_from([0, 255, 127]))] * len(stored))
            )
        case "state" if stored[:1] == b"{":
            text = changed_text(data, stored.decode()).encode()
            return Part(kind, [len(text)], text)
        case _ if stored:
            place = data.draw(st.integers(0, len(stored) - 1))
            byte = bytes([data.draw(st.integers(0, 255))])
            return Part(kind, shape, stored[:place] + byte + stored[place + 1 :])
    return part


def flip(data, path):
    """Changes a byte of a file, and may cut the file there."""
    whole = path.read_bytes()
    place = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    rest = whole[place + 1 :] if data.draw(st.booleans()) else b""
    replace(path, whole[:place] + bytes([data.draw(st.integers(0, 255))]) + rest)


def change(data, path: Path):
    """Changes an entry of a JSON file, a tensor or the metadata of a safetensors file, or bytes."""
    kind = data.draw(st.sampled_from(["flip", "missing", *["content"] * 6]))
    if kind == "missing":
        path.unlink()
    elif kind == "content" and path.suffix == ".json":
        replace(path, json.dumps(changed_tree(data, json.loads(path.read_text()))).encode())
    elif kind == "content" and path.suffix == ".safetensors":
        parts, metadata = safetensors_bytes.read(path)
        change_tensors(data, parts, metadata)
        replace(path, safetensors_bytes.joined(parts, metadata))
    else:
        flip(data, path)


def change_tensors(data, parts, metadata):
    """Changes, removes or renames a tensor, or changes an entry of the metadata."""
    kind = data.draw(st.sampled_from(["tensor", "names", *["metadata"] * bool(metadata)]))
    if kind == "metadata":
        name = data.draw(st.sampled_from(sorted(metadata)))
        metadata[name] = changed_text(data, metadata[name])
        return
    name = data.draw(st.sampled_from(sorted(parts)))
    if kind == "tensor":
        parts[name] = changed_part(data, parts[name])
        return
    part = parts.pop(name)
    if data.draw(st.booleans()):
        parts[data.draw(st.text(max_size=6)) + name[data.draw(st.integers(0, 9)) :]] = part


def replace(path: Path, content: bytes):
    """Writes a file anew: the old one may be memory-mapped."""
    path.unlink()
    path.write_bytes(content)
