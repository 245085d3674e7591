"""Safetensors files as bytes, for tests that damage them."""

import json
from pathlib import Path
from typing import NamedTuple


class Part(NamedTuple):
    """A tensor: its type as the header names it, shape and bytes."""

    kind: str
    shape: list[int]
    data: bytes


def read(path: Path) -> tuple[dict[str, Part], dict[str, str]]:
    """The tensors and the metadata of a file."""
    text = path.read_bytes()
    start = 8 + int.from_bytes(text[:8], "little")
    header = json.loads(text[8:start])
    metadata = header.pop("__metadata__", {})
    parts = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        parts[name] = Part(entry["dtype"], entry["shape"], text[start + first : start + last])
    return parts, metadata


def joined(parts: dict[str, Part], metadata: dict[str, str]) -> bytes:
    """The file with these tensors."""
    header: dict = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, (kind, shape, data) in parts.items():
        entry = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        header[name] = entry
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(part.data for part in parts.values())
    return len(text).to_bytes(8, "little") + text + data
