"""What a lone format keeps in floats: tables, heads, routers and layers that would grow."""

import collections
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .._core import layout, padding, super_blocks
from .._core.format import Format
from .._core.heads import HEADS, is_router
from .weights import Shards


class Candidate(NamedTuple):
    """A layer that could be quantized.

    - `paths`: all of its dotted paths.
    - `matrix`: (k, n), or None if it is no product.
    - `matrices`: the number of such matrices in its weight.
    - `nbytes`, `itemsize`: bytes of the weight, and of one of its elements.
    - `table`: whether it is an embedding.
    """

    paths: Sequence[str]
    matrix: tuple[int, int] | None
    matrices: int
    nbytes: int
    itemsize: int
    table: bool


def kept(
    candidates: Sequence[Candidate],
    tables: Iterable[tuple[int, ...]],
    shards: Sequence[Shards],
    format: Format,
) -> list[str | None]:
    """Why a lone format keeps each layer in floats, or None.

    `tables` are the shapes of parameters that may be embeddings, beside those of the candidates.
    """
    heads = _heads(candidates, tables)
    reasons = []
    for i, (layer, parts) in enumerate(zip(candidates, shards, strict=True)):
        if layer.table:
            reason = "an embedding"
        elif any(re.search(HEADS, path) for path in layer.paths):
            reason = "a head, by its name"
        elif i in heads:
            reason = "a head, as wide as the vocabulary"
        elif layer.matrix and any(is_router(path, *layer.matrix) for path in layer.paths):
            reason = "a router"
        elif _grows(layer, format, parts):
            reason = "it would grow"
        else:
            reason = None
        reasons.append(reason)
    return reasons


def _heads(candidates: Sequence[Candidate], tables: Iterable[tuple[int, ...]]) -> set[int]:
    """The layers whose result is as wide as a vocabulary, by their numbers.

    A vocabulary is wider than its embeddings. A head stands alone: a layer that a block repeats is
    none, even if it is as wide by chance, and of others the outermost are heads.
    """
    known = [layer.matrix for layer in candidates if layer.table and layer.matrix]
    sizes = {(width, size) for width, size in known if size > width}
    sizes |= {(min(shape), max(shape)) for shape in tables if len(shape) == 2}
    sizes = {size for width, size in sizes if size > width}
    found = {
        i: re.sub(r"\d+", "#", layer.paths[0])
        for i, layer in enumerate(candidates)
        if not layer.table
        and layer.matrices == 1
        and layer.matrix
        and layer.matrix[1] in sizes
        and layer.matrix[1] > layer.matrix[0]
    }
    repeated = collections.Counter(found.values())
    alone = {i: path.count(".") for i, path in found.items() if repeated[path] == 1}
    return {i for i, depth in alone.items() if depth == min(alone.values())}


def _grows(layer: Candidate, format: Format, shards: Shards) -> bool:
    """Whether the arrays that `quantize` would make of a weight are no smaller than it is."""
    if layer.matrix is None:
        return False
    unit = padding.shard_unit(format.scale_span)
    sizes = tuple(zip(layer.matrix, shards, (unit, layout.ATOM), strict=True))
    if any(count < 1 or size % count for size, count, _ in sizes):
        return False  # such shards are refused
    k, n = (padding.spread_size(*size) for size in sizes)
    floats = layer.itemsize if format.scale is None else 1
    zero = {"none": 0, "integer": 1, "float": floats}[format.zero]
    words = 4 * math.prod(layout.packed_shape(k, n, format.bits))
    groups = math.prod(super_blocks.scale_shape(k, n, format))
    others = 4 + 4 * format.has_tensor_scale * (n if format.scales_channels else 1)  # the version
    return layer.matrices * (words + groups * (floats + zero) + others) >= layer.nbytes


def is_table(path: str, shape: Any) -> bool:
    """Whether a parameter that no known layer holds may be an embedding, by its name."""
    return len(shape) == 2 and re.search(r"embed|wte|vocab", path, re.I) is not None
