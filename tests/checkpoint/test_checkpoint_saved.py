"""Trees and language models as folders in the packed layout, exports, and their commands."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxlowbit import INT4, Format, QuantizedArray, quantize

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import golden_files  # noqa: E402
from golden_architectures import CASES  # noqa: E402
from model_files import (  # noqa: E402
    hf_config,
    hf_weights,
    metadata,
    tensors,
    write_folder,
    write_gguf,
)

from jaxlowbit import checkpoint, llm  # noqa: E402
from jaxlowbit._command import main  # noqa: E402
from jaxlowbit._llm import ggml_blocks, ggml_types  # noqa: E402
from jaxlowbit._llm.huggingface import config_of  # noqa: E402
from jaxlowbit._llm.saved import weights_of  # noqa: E402
from jaxlowbit.checkpoint import _replace, _saved  # noqa: E402
from jaxlowbit.checkpoint._saved import read_saved  # noqa: E402

WEIGHT = np.random.default_rng(0).normal(size=(256, 70)).astype(np.float32)


def equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert own.dtype == other.dtype
        np.testing.assert_array_equal(own, other)


@pytest.fixture(scope="module")
def tree():
    own = Format(2, 64, codebook=(-1.5, -0.4, 0.4, 1.5))
    return {
        "a": {"b": quantize(WEIGHT, "int4-g64"), "c": [jnp.ones(3, jnp.bfloat16), np.float64(2)]},
        "stack": quantize(np.stack([WEIGHT, WEIGHT]), "int4-int8"),
        "super": quantize(WEIGHT, "int4-g32-float-two_level"),
        "nvfp4": quantize(WEIGHT, "nvfp4"),
        "own": quantize(WEIGHT, own),
        "order": quantize(WEIGHT, INT4, permutation=np.arange(256)[::-1]),
        "shards": quantize(WEIGHT, "uint4", shards=(2, 2)),
        "empty": np.zeros((0, 4), np.int8),
    }


@pytest.fixture(scope="module")
def folder(tree, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "tree"
    tree["a"]["c"][1] = np.asarray(tree["a"]["c"][1])
    checkpoint.save(path, tree, shard_bytes=40_000)
    return path


def test_trees_are_saved_and_loaded(tree, folder):
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    with jax.enable_x64(True):  # a leaf is float64
        equal(checkpoint.load(folder, target=tree), tree)
    flat = checkpoint.load(folder)
    equal(flat["a.b"], tree["a"]["b"])
    assert set(flat) == {"a.b", "a.c.0", "a.c.1", *tree} - {"a"}


def test_memory_is_mapped_and_sharded(tree, folder):
    mesh = jax.make_mesh((1,), ("model",))

    def sharding(name, leaf):
        if not isinstance(leaf, QuantizedArray) or leaf.ndim > 2 or leaf.shards != (1, 1):
            return None
        specs = leaf.partition_spec(mesh, n="model")
        return jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)

    found = checkpoint.load(folder, sharding=sharding)
    assert found["a.b"].packed.sharding.spec == jax.P("model", None, None)
    equal(found["nvfp4"], tree["nvfp4"])
    saved = read_saved(folder)
    mapped = saved.leaf("a.b").packed
    assert mapped.ctypes.data % 64 == 0  # XLA's CPU client uses such memory as it is
    array = jax.device_put(mapped, jax.devices("cpu")[0])
    assert array.unsafe_buffer_pointer() == mapped.ctypes.data


def test_transfers_wait_beyond_a_number_of_bytes(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    transfers, arrays = _saved.Transfers(), [np.zeros(n, np.uint8) for n in (40, 40, 40, 200)]
    transfers.MAX_BYTES = 100
    counts = []
    for array in arrays:
        assert transfers.add(array) is array
        counts.append(len(waited))
    assert counts == [0, 0, 1, 3] and waited[0] is arrays[0]


def test_an_nnx_state_is_a_tree(tmp_path):
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    checkpoint.save(tmp_path / "x", nnx.state(model))
    empty = nnx.state(nnx.eval_shape(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0))))
    equal(checkpoint.load(tmp_path / "x", target=empty), nnx.state(model))


@pytest.mark.parametrize(
    ("tree", "error", "match"),
    [
        ({"a": "x"}, TypeError, "save: a is 'x', but leaves are arrays"),
        ({"a.b": np.ones(1), "a": {"b": np.ones(1)}}, ValueError, "two arrays have the name 'a.b'"),
        ({"q.scale": np.ones(1), "q": quantize(WEIGHT, INT4)}, ValueError, "'q.scale'.*rename it"),
        ({"a": np.ones(1, np.complex64)}, ValueError, "a is complex64, which safetensors"),
        ({"a": jax.random.key(0)}, ValueError, "a is key<fry>"),
        ({"q": quantize(WEIGHT[None], INT4).select(0)}, ValueError, "is a view made by select"),
    ],
)
def test_invalid_trees_raise(tree, error, match, tmp_path):
    with pytest.raises(error, match=match):
        checkpoint.save(tmp_path / "x", tree)
    assert not list(tmp_path.iterdir())


def test_invalid_targets_raise(tree, folder, tmp_path):
    with pytest.raises(ValueError, match="the folder lacks the array 'other'"):
        checkpoint.load(folder, target=tree | {"other": np.ones(1)})
    wrong = tree | {"own": quantize(WEIGHT, INT4)}
    with pytest.raises(
        ValueError, match=r"array 'own' is QuantizedArray.*but target has Quantized"
    ):
        checkpoint.load(folder, target=wrong)
    with pytest.raises(ValueError, match=r"exists; .* or pass overwrite=True"):
        checkpoint.save(folder, {})
    with pytest.raises(FileNotFoundError, match="does not exist; make it"):
        checkpoint.save(tmp_path / "a" / "b", {})


def test_an_error_leaves_the_old_folder(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "x", {"a": np.ones(2)})
    checkpoint.save(tmp_path / "x", {"a": np.zeros(2)}, overwrite=True)
    (tmp_path / ".x.incomplete").mkdir()
    (tmp_path / ".x.incomplete" / "left").write_text("")
    monkeypatch.setattr(_replace, "_exchange", lambda new, old: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoint.save(tmp_path / "x", {"a": np.ones(2)}, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "x")["a"], np.zeros(2))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "x"
    checkpoint.save(path, {"q": quantize(WEIGHT[:64, :8], "uint4-g32"), "b": np.ones(3)})
    return path


@given(data=st.data())
def test_damaged_files_load_or_raise(small, data):
    """Bytes of the header, or the length of the file: no wrong number, no other exception."""
    file = small / "model.safetensors"
    good = file.read_bytes()
    length = 8 + int.from_bytes(good[:8], "little")
    expected = checkpoint.load(small)
    try:
        bad = bytearray(good)
        for _ in range(data.draw(st.integers(1, 3))):
            bad[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):
            bad = bad[: data.draw(st.integers(0, len(bad)))]
        file.unlink()  # arrays are mapped
        file.write_bytes(bad)
        try:
            found = checkpoint.load(small)
        except ValueError as error:
            assert str(small) in str(error)
        else:
            assert all(isinstance(leaf, QuantizedArray | jax.Array) for leaf in found.values())
            if found.keys() == expected.keys() and found["q"].k == 64 and found["q"].n == 8:
                assert found["q"].packed.shape == expected["q"].packed.shape
    finally:
        file.unlink()
        file.write_bytes(good)


def test_other_layout_versions_raise(small, tmp_path):
    shutil.copytree(small, tmp_path / "x")
    file = tmp_path / "x" / "model.safetensors"
    version = rb"layout_version\": 1"
    assert version in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(version, version[:-1] + b"7"))
    with pytest.raises(ValueError, match="packed with layout version 7, but this library reads"):
        checkpoint.load(tmp_path / "x")


# --- language models ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    write_gguf(path / "a.gguf", metadata("llama"), tensors("llama", ["Q8_0", "F16", "Q4_K"]))
    write_folder(path / "hf", hf_config("gemma3"), hf_weights("gemma3"))
    return path


@pytest.mark.parametrize(("source", "format"), [("a.gguf", None), ("hf", "int4-g64")])
def test_models_are_saved_and_loaded(source, format, files, tmp_path):
    model = llm.load(files / source, format=format, progress=False)
    llm.save(model, tmp_path / "x")
    found = llm.load(tmp_path / "x", progress=False)
    equal(nnx.state(found.decoder), nnx.state(model.decoder))
    assert found.config == model.config.replace(norm_offset=0.0)
    assert found.tokenizer.encode("hello w") == model.tokenizer.encode("hello w")
    assert found.tokenizer.eos == model.tokenizer.eos
    llm.save(found, tmp_path / "x", overwrite=True)
    mesh = jax.make_mesh((1,), ("model",))
    divided = llm.load(tmp_path / "x", mesh=mesh, progress=False)
    llm.save(divided, tmp_path / "y")  # without the padding of the vocabulary
    again = llm.load(tmp_path / "y", progress=False)
    equal(nnx.state(again.decoder), nnx.state(model.decoder))
    assert again.report.nbytes_stored == found.report.nbytes_stored


def test_models_without_a_tokenizer_and_formats_on_the_way_in(files, tmp_path):
    model = llm.load(files / "a.gguf", progress=False)
    llm.save(llm.LanguageModel(model.decoder), tmp_path / "x")
    found = llm.load(tmp_path / "x", rules={"layers.0.v": "int8"}, progress=False)
    assert found.tokenizer is None
    name = "layers.0.v"
    weight, rounded = (dict(weights_of(x.decoder)[1])[name] for x in (model, found))
    equal(rounded, quantize(weight.dequantize(jnp.float32), "int8"))
    with pytest.raises(ValueError, match="leave scale_dtype out"):
        llm.load(tmp_path / "x", scale_dtype="float16", progress=False)


# --- exports --------------------------------------------------------------------------------------


FORMATS = {
    "int4-g128": "Q4_0",
    "int5-g32": "Q5_0",
    "int8": "Q8_0",
    "uint4-g32": "Q5_0",
    "int7-g64-integer": "Q8_0",
    "int3-g32-float": "Q4_1",
    "int5-g32-float": "Q5_1",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
}


@pytest.mark.parametrize("name", [*FORMATS, "IQ4_NL"])
def test_blocks_have_the_same_weights(name):
    import gguf

    format = ggml_types.TYPES[name].format if name == "IQ4_NL" else name
    narrow: Any = {} if name in ("mxfp4", "nvfp4") else {"scale_dtype": jnp.float16}
    array = quantize(WEIGHT, format, **narrow)
    kind, data, unit = ggml_blocks.blocks_of(array)
    assert kind == FORMATS.get(name, name)
    found = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    weight = np.asarray(array.dequantize(jnp.float32)).T
    np.testing.assert_array_equal(found * np.float32(1 if unit is None else unit), weight)


def same_weights(found, model):
    assert found.config.replace(norm_offset=0.0) == model.config.replace(norm_offset=0.0)
    same_floats(found, model)


def same_floats(found, model):
    expected = weights_of(model.decoder)[1]
    for name, own in weights_of(found.decoder)[1].items():
        floats = [
            np.asarray(x.dequantize(jnp.float32) if isinstance(x, QuantizedArray) else x)
            for x in (own, expected[name])
        ]
        np.testing.assert_array_equal(floats[0], floats[1])


def test_wrong_arguments_of_writers(files, tmp_path):
    model, target = llm.load(files / "a.gguf", progress=False), tmp_path / "z"
    wrong: Any = (
        ((3, target), {}, "model is 3, "),
        ((model, 3), {}, "path is 3, but it must be the path of"),
        ((model, target), {"overwrite": "yes"}, "overwrite is 'yes', "),
        ((model, target), {"progress": None}, "progress is None, "),
    )
    for arguments, options, match in wrong:
        with pytest.raises(TypeError, match=f"^save: {match}.*[.]$"):
            llm.save(*arguments, **options)
        with pytest.raises(TypeError, match=f"^export: {match}.*[.]$"):
            llm.export(arguments[0], arguments[1], "gguf", **options)
    kinds: Any = ((ValueError, "onnx"), (TypeError, 3))
    for error, kind in kinds:
        with pytest.raises(error, match=r"^export: kind=.* is unknown; it is one of"):
            llm.export(model, target, kind)
    assert [*tmp_path.iterdir()] == []


def test_exports_have_the_same_weights(files, tmp_path):
    model = llm.load(files / "a.gguf", format="int4-g64", scale_dtype="float16", progress=False)
    llm.export(model, tmp_path / "x.gguf", "gguf")
    same_weights(llm.load(tmp_path / "x.gguf", progress=False), model)
    rules = {"embedding": None, "down": "int3-g64-integer", "gate|up": None}
    model = llm.load(files / "hf", format="int4-g64", rules=rules, progress=False)
    llm.export(model, tmp_path / "y", "compressed-tensors")
    same_weights(llm.load(tmp_path / "y", progress=False), model)
    config = json.loads((tmp_path / "y" / "config.json").read_text())["quantization_config"]
    assert {len(group["targets"]) for group in config["config_groups"].values()} == {2, 8}
    other = llm.load(files / "a.gguf", progress=False)
    without = llm.LanguageModel(model.decoder)
    for kind, wrong in (("gguf", without), ("compressed-tensors", other)):
        with pytest.raises(ValueError, match=r"export: the model came from .*; load that"):
            llm.export(wrong, tmp_path / "z", kind)
    target = str(tmp_path / "z.gguf")
    with pytest.raises(ValueError, match=r"export: embedding: GGUF stores float16, which would"):
        llm.export(llm.load(files / "a.gguf", rules={"embedding": "int8"}), target, "gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.gguf", "y"]


def test_fused_matrices_are_exported(tmp_path):
    """Phi 3 has one matrix for queries, keys and values, and one for gate and up."""
    (tmp_path / "hf").mkdir()
    config = CASES["phi3"] | {"head_dim": 32, "vocab_size": 264, "intermediate_size": 128}
    write_folder(tmp_path / "hf", config, {})
    write_folder(tmp_path / "hf", config, golden_files.hf_weights(config_of(tmp_path / "hf")))
    loading = {"format": "int4-g32", "scale_dtype": "float16", "progress": False}
    model = llm.load(tmp_path / "hf", rules={"embedding": None}, **loading)
    for kind, name in (("compressed-tensors", "x"), ("gguf", "x.gguf")):
        llm.export(model, tmp_path / name, kind)
        same_floats(llm.load(tmp_path / name, progress=False), model)
    rules = {"embedding": None, r"\.k": "int8"}
    with pytest.raises(ValueError, match=r"layers.0.q, k, v: .* their formats differ"):
        llm.export(llm.load(tmp_path / "hf", rules=rules, **loading), tmp_path / "y", kind)


def test_gguf_files_of_folders_compute_the_same(tmp_path):
    """Rows of queries and keys are permuted, the rotation of llama3 becomes a tensor."""
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 64}
    config = hf_config("llama") | {"rope_scaling": rope}
    write_folder(tmp_path / "hf", config, hf_weights("llama"))
    loading = {"format": "int4-g32", "scale_dtype": "float16", "progress": False}
    model = llm.load(tmp_path / "hf", **loading)
    llm.export(model, tmp_path / "x.gguf", "gguf")
    found = llm.load(tmp_path / "x.gguf", progress=False)
    assert found.config.rope_pairs == "neighbours"
    tokens = jnp.array([model.tokenizer.encode("a bc\n12 d")])
    assert found.tokenizer.encode("a bc\n12 d") == tokens[0].tolist()
    np.testing.assert_allclose(found.decoder(tokens), model.decoder(tokens), rtol=1e-3, atol=1e-3)
    assert found.tokenizer.has_chat == model.tokenizer.has_chat
    options = config | {"model_type": "mistral", "sliding_window": 8}
    options.pop("rope_scaling")
    write_folder(tmp_path / "window", options, hf_weights("llama"))
    with pytest.raises(ValueError, match="export: GGUF has no files of mistral with a window"):
        llm.export(llm.load(tmp_path / "window", **loading), tmp_path / "y.gguf", "gguf")
    description = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    description["pre_tokenizer"]["pretokenizers"].pop(0)
    description["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Whitespace"})
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="cuts texts as no pre-tokenizer of llama"):
        llm.export(llm.load(tmp_path / "hf", **loading), tmp_path / "y.gguf", "gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "window", "x.gguf"]


# --- commands -------------------------------------------------------------------------------------


def test_commands(files, tmp_path, capsys):
    target = str(tmp_path / "x")
    main(
        [
            "quantize",
            str(files / "hf"),
            target,
            "--format",
            "int4-g64",
            "--rule",
            "o=int8",
            "--json",
        ]
    )
    out = capsys.readouterr().out.splitlines()
    found = json.loads(out[-1])
    assert found["kind"] == "packed" and found["tensors"][0]["format"] == "int4-g64"
    main(["verify", target, "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tensors"] > 20
    main(["inspect", target])
    assert "layers.*.o" in capsys.readouterr().out
    main(["inspect", str(files / "a.gguf"), "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kind"] == "GGUF, llama"
    (tmp_path / "text").write_text("a b c d " * 150)
    inputs = ["--method", "gptq", "--calibration", str(tmp_path / "text"), "--samples", "1"]
    main(["quantize", str(files / "hf"), f"{target}4", "--format", "int4-g64", *inputs])
    weights = [checkpoint.load(path)["layers.0.gate"] for path in (target, f"{target}4")]
    assert weights[0].format == weights[1].format and (weights[0].packed != weights[1].packed).any()
    main(["convert", target, f"{target}2"])
    capsys.readouterr()
    file = tmp_path / "x2" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    cases = [
        (["verify", f"{target}2"], "has the hash .* the file was altered"),
        (["quantize", str(files / "hf"), target, "--format", "int4"], "pass --overwrite"),
        (
            ["quantize", str(files / "hf"), f"{target}3", "--format", "int4", "--rule", "x"],
            "--rule",
        ),
        (
            ["quantize", str(files / "hf"), f"{target}3", "--format", "int4", "--method", "gptq"],
            "needs statistics",
        ),
        (["inspect", f"{target}3"], "does not exist"),
    ]
    for arguments, match in cases:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        message = capsys.readouterr().err.splitlines()[-1]
        assert end.value.code == 1 and re.search(match, message), message


def test_a_killed_process_leaves_the_old_folder_or_the_new_one(tmp_path):
    """`tools/kill_writers.py` does the same with the commands, at more moments."""
    checkpoint.save(tmp_path / "x", {"a": np.zeros(2**20)})
    code = (
        "import sys, numpy as np\nfrom jaxlowbit import checkpoint\nprint(1, flush=True)\n"
        "while True: checkpoint.save(sys.argv[1], {'a': np.ones(2**20)}, overwrite=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "x")], stdout=subprocess.PIPE, env=os.environ
    )
    assert process.stdout is not None
    process.stdout.readline()
    for delay in (0.01, 0.04, 0.02):
        time.sleep(delay)
        process.send_signal(signal.SIGSTOP)  # it may end here
        (values,) = checkpoint.load(tmp_path / "x").values()
        assert np.unique(values).size == 1
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    process.stdout.close()
    (values,) = checkpoint.load(tmp_path / "x").values()
    assert np.unique(values).size == 1
    checkpoint.save(tmp_path / "x", {"a": np.ones(2)}, overwrite=True)
    assert [path.name for path in Path(tmp_path).iterdir()] == ["x"]
