"""Damaged models, adapters and sessions load, or raise a `ValueError` that names the file.

`HYPOTHESIS_PROFILE=thorough` draws 5,000.
"""

import functools
import json
import re
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

from damage import change  # noqa: E402
from golden_architectures import CASES  # noqa: E402
from golden_files import hf_weights  # noqa: E402
from model_files import tokenizer_json, write_folder, write_tiny  # noqa: E402

from jaxlowbit import llm  # noqa: E402
from jaxlowbit._llm import adapters  # noqa: E402
from jaxlowbit._llm.huggingface import config_of  # noqa: E402
from jaxlowbit._llm.load import read_header  # noqa: E402

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
MODELS = ("gemma3", "phi3, short factors", "ministral3", "gpt_oss", "gptq", "packed", "packed gguf")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Models by name, an adapter, and a session of the adapter's model."""
    root = tmp_path_factory.mktemp("models")
    for name in MODELS[:4]:
        folder = root / name
        folder.mkdir()
        write_folder(folder, CASES[name], {})
        weights = hf_weights(config_of(folder))
        (folder / "model.safetensors").unlink()
        write_folder(folder, CASES[name], weights, shards=2)
        (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3], "top_k": 5}')
    shutil.copytree(DATA / "llama_gptq", root / "gptq")
    (root / "gptq" / "logits.safetensors").unlink()
    (root / "gptq" / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    llm.save(llm.load(root / "gptq", progress=False), root / "packed")
    llm.save(llm.load(write_tiny(root), progress=False), root / "packed gguf")
    shutil.copytree(DATA / "lora", root / "adapter")
    (root / "adapter" / "logits.safetensors").unlink()
    model = llm.load(root / "gptq", progress=False)
    session = llm.Session(model)
    session.generate([3, 1, 4], max_new_tokens=2)
    (root / "session").mkdir()
    session.save(root / "session" / "x.safetensors")
    return root, model


@functools.lru_cache(maxsize=64)
def check_decoder(config):
    """A configuration that a file gives is one of a decoder that runs."""

    def logits():
        shapes = config.shapes().items()
        weights = {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes}
        return llm.Decoder(config, weights, dtype=jnp.float32)(jnp.zeros((1, 4), jnp.int32))

    assert jax.eval_shape(logits).shape == (1, 4, config.vocabulary)


def open_all(folder: Path, kind: str, model: llm.LanguageModel):
    if kind == "adapter":
        return adapters.adapted("adapt", folder, model.config)
    if kind == "session":
        return llm.Session(model).load(folder / "x.safetensors")
    header = read_header(folder)
    check_decoder(header.config)
    for name, shape in header.config.shapes().items():
        source = header.sources[name]
        assert source.nbytes > 0 and shape
    return header.tokenizer and header.tokenizer.encode("hello")


# HYPOTHESIS_PROFILE=thorough damages 5,000.
COUNT = 100 if settings().derandomize else 5000


@given(data=st.data())
@settings(max_examples=COUNT)
def test_damaged_files_load_or_raise(data, sources, tmp_path_factory):
    root, model = sources
    kind = data.draw(st.sampled_from([*MODELS, "adapter", "session"]))
    folder = tmp_path_factory.getbasetemp() / "damaged model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / kind, folder)
    change(data, data.draw(st.sampled_from(sorted(folder.iterdir()))))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown entries
            open_all(folder, kind, model)
    except ValueError as error:
        assert str(folder) in str(error) and len(str(error)) > 40
    except FileNotFoundError as error:
        assert re.search("is no file", str(error))
