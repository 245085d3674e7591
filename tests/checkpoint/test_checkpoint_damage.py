"""Damaged folders of every kind are read, or raise a `ValueError` with a name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

for package in ("safetensors", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import safetensors_bytes  # noqa: E402
from safetensors_bytes import Part  # noqa: E402

from jaxlowbit.checkpoint._fields import Fields  # noqa: E402
from jaxlowbit.checkpoint._load import open_folder  # noqa: E402

ROOT = Path(__file__).parents[1] / "data" / "checkpoints"
FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/expected.safetensors"))
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


def damage(data, source, folder):
    """Writes a damaged copy of a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    parts, metadata = safetensors_bytes.read(source / "model.safetensors")
    change = data.draw(st.sampled_from(["config", "config", "tensor", "tensor", "names", "file"]))
    if change == "config":
        config = changed_tree(data, config)
    elif change == "tensor":
        name = data.draw(st.sampled_from(sorted(parts)))
        parts[name] = changed_part(data, parts[name])
    elif change == "names" and metadata and data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(metadata)))
        metadata[name] = changed_text(data, metadata[name])
    elif change == "names":
        name = data.draw(st.sampled_from(sorted(parts)))
        part = parts.pop(name)
        if data.draw(st.booleans()):
            parts[data.draw(st.text(max_size=6)) + name[data.draw(st.integers(0, 9)) :]] = part
    whole = safetensors_bytes.joined(parts, metadata)
    if change == "file":
        place = data.draw(st.integers(0, len(whole) - 1))
        rest = whole[place + 1 :] if data.draw(st.booleans()) else b""
        whole = whole[:place] + bytes([data.draw(st.integers(0, 255))]) + rest
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(whole)


@pytest.mark.filterwarnings("ignore:load. ")
@given(data=st.data())
def test_damaged_folders_are_read_or_raise_with_a_name(data, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    damage(data, ROOT / data.draw(st.sampled_from(FOLDERS)), folder)
    try:
        matrices = open_folder(folder).matrices.values()
    except ValueError as error:
        assert str(folder) in str(error)
        return
    for matrix in matrices:
        n = matrix.shape[0] * (matrix.stack or 1)
        try:
            with np.errstate(all="ignore"):  # scales may be as large as they like
                rows = matrix.rows(0, n)
        except ValueError:
            continue
        assert rows.shape == (n, matrix.shape[1])


def test_patterns_that_may_take_exponential_time_raise():
    fields = Fields(Path("config.json"), {})
    for pattern in ("(a+)+", "(a|aa)+$", "(?:x(b*)c){2,}", "((a)*b?)*", "(a{1,3})*"):
        with pytest.raises(ValueError, match=r"'ignore' has .* matching it may not end"):
            fields.pattern("ignore", pattern)
    for pattern in (r".*\.(q|k)_proj(\.x)?$", "^(?!.*down_proj).*", r"[(*+)]+\(a\)+", "(ab|c){2}"):
        fields.pattern("ignore", pattern)
