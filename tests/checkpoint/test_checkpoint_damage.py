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
from damage import change  # noqa: E402

from jaxlowbit.checkpoint._fields import Fields  # noqa: E402
from jaxlowbit.checkpoint._load import open_folder  # noqa: E402

ROOT = Path(__file__).parents[1] / "data" / "checkpoints"
FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/expected.safetensors"))


def shards(source, folder):
    """Writes the tensors of a folder to two shards with an index."""
    parts, metadata = safetensors_bytes.read(source)
    places = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(parts)}
    for file in set(places.values()):
        some = {name: part for name, part in parts.items() if places[name] == file}
        (folder / file).write_bytes(safetensors_bytes.joined(some, metadata))
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def damage(data, source, folder):
    """Writes a damaged copy of a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copyfile(source / "config.json", folder / "config.json")
    if data.draw(st.booleans()):
        shutil.copyfile(source / "model.safetensors", folder / "model.safetensors")
    else:
        shards(source / "model.safetensors", folder)
    change(data, data.draw(st.sampled_from(sorted(folder.iterdir()))))


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
