"""LoRA adapters: PEFT's logits, training, saving, merging, and wrong folders."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import golden_architectures
import golden_files
import jax
import jax.numpy as jnp
import model_files
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxlowbit import Format, QuantizedArray, llm
from jaxlowbit._llm import adapters
from jaxlowbit._llm.huggingface import config_of
from jaxlowbit._llm.low_rank import LowRank

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 200, 100, 50, 25]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    shutil.copytree(DATA / "llama_nf4", path, dirs_exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(model_files.tokenizer_json()))
    return path


@pytest.fixture(scope="module")
def adapted(base):
    return llm.load(base, dtype=jnp.float32, adapter=DATA / "lora", progress=False)


def logits(model: llm.LanguageModel, tokens: Any = TOKENS) -> np.ndarray:
    graph, state = nnx.split(model.decoder)
    return np.asarray(jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, tokens))


def test_logits_match_peft(adapted):
    expected = load_file(DATA / "lora" / "logits.safetensors")["logits"]
    assert np.abs(logits(adapted) - expected).max() <= 1e-4 * np.abs(expected).max()
    block = adapted.decoder.blocks[0]
    assert isinstance(block.o.get_value().base, QuantizedArray)  # weights stay packed


def test_an_adapter_is_saved_and_loaded(adapted, base, tmp_path):
    llm.save_adapter(adapted, tmp_path / "x")
    folders = tmp_path / "x", DATA / "lora"
    own, other = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert own.keys() == other.keys()
    for name, values in own.items():
        np.testing.assert_array_equal(values, other[name])
    found = llm.adapt(llm.load(base, dtype=jnp.float32, progress=False), tmp_path / "x")
    np.testing.assert_array_equal(logits(found), logits(adapted))
    with pytest.raises(ValueError, match=r"save: layers.0.q has an adapter.*merge_adapter"):
        llm.save(adapted, tmp_path / "y")
    with pytest.raises(ValueError, match="adapt: the model has an adapter already"):
        llm.adapt(adapted, tmp_path / "x")


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    path = tmp_path_factory.mktemp("phi3")
    entries = golden_architectures.CASES["phi3"]
    model_files.write_folder(path, entries, {})
    model_files.write_folder(path, entries, golden_files.hf_weights(config_of(path)))
    return path


def test_adapters_of_fused_matrices(phi3, tmp_path):
    """PEFT's logits for Phi 3, and the same files again."""
    model = llm.load(phi3, dtype=jnp.float32, adapter=DATA / "lora_phi3", progress=False)
    expected = load_file(DATA / "lora_phi3" / "logits.safetensors")["logits"]
    found = logits(model, np.array([golden_architectures.TOKENS]))
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    llm.save_adapter(model, tmp_path / "x")
    own, other = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "x", DATA / "lora_phi3")
    )
    assert own.keys() == other.keys()
    for name, values in own.items():
        np.testing.assert_array_equal(values, other[name])


def test_separate_adapters_of_parts_are_joined(phi3, tmp_path):
    """A new adapter has an A for each part, and none for keys; the ranks add up."""
    base = llm.load(phi3, dtype=jnp.float32, progress=False)
    model = llm.adapt(base, llm.LoRA(rank=3, alpha=5, targets=r"\.(q|v|up)$"))
    state = nnx.state(model.decoder, nnx.LoRAParam)
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(state))))
    random = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), state)
    nnx.update(model.decoder, random)
    llm.save_adapter(model, tmp_path / "x")
    stored = load_file(tmp_path / "x" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1."
    assert stored[f"{prefix}self_attn.qkv_proj.lora_A.weight"].shape == (6, 64)
    assert stored[f"{prefix}mlp.gate_up_proj.lora_B.weight"].shape == (192, 3)
    found = llm.adapt(base, tmp_path / "x")
    tokens = np.array([golden_architectures.TOKENS])
    expected = logits(model, tokens)
    np.testing.assert_allclose(logits(found, tokens), expected, atol=1e-5 * np.abs(expected).max())


def test_modules_of_models_with_images(base, tmp_path):
    path = tmp_path / "images"
    shutil.copytree(base, path)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": values}))
    weight = LowRank(None, jnp.ones((64, 2)), jnp.ones((2, 64)), 1.0)
    config = llama().config
    adapters.write_adapter(tmp_path, {"layers.0.q": weight}, config, path)
    name = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    assert name in load_file(tmp_path / "adapter_model.safetensors")
    assert adapters.adapted("load", tmp_path, config).keys() == {"layers.0.q"}


def test_rows_of_queries_are_permuted_as_in_gguf():
    names = adapters._names(llama().config)
    config = llama().config.replace(rope_pairs="neighbours", heads=2)
    b = np.arange(64 * 3).reshape(64, 3)
    found = adapters._permuted(b, "layers.0.q", config, names)
    np.testing.assert_array_equal(found[[0, 1, 2, 33]], b[[0, 16, 1, 48]])
    back = adapters._permuted(found, "layers.0.q", config, names, back=True)
    np.testing.assert_array_equal(back, b)
    assert adapters._permuted(b, "layers.0.v", config, names) is b


def test_training_changes_the_adapter_only():
    model = llm.adapt(llama(), llm.LoRA(rank=4, alpha=8, targets=r"\.(q|down)$"))
    tokens = TOKENS[:, :6]

    @nnx.jit
    def loss_and_gradients(decoder):
        def loss(decoder):
            found = jax.nn.log_softmax(decoder(tokens))
            return -jnp.take_along_axis(found[:, :-1], tokens[:, 1:, None], axis=-1).mean()

        return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(decoder)

    before, gradients = loss_and_gradients(model.decoder)
    assert len(jax.tree.leaves(gradients)) == 2 * 2
    state = nnx.state(model.decoder, nnx.LoRAParam)
    nnx.update(model.decoder, jax.tree.map(lambda x, g: x - 0.1 * g, state, gradients))
    assert loss_and_gradients(model.decoder)[0] < before
    weight = model.decoder.blocks[0].down.get_value()
    merged = llm.merge_adapter(model, format="int8-g32").decoder.blocks[0]
    step = merged.down.get_value().scale.max()
    assert jnp.abs(merged.down.get_value().dequantize() - weight.dense()).max() <= step
    assert merged.o.get_value().format == Format(4, group_size=32)


def altered(path: Path, **entries: Any) -> Path:
    shutil.copytree(DATA / "lora", path)
    values = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(values | entries))
    return path


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"use_dora": True}, "'use_dora' is True"),
        ({"peft_type": "IA3"}, "'peft_type' is 'IA3'"),
        ({"bias": "all"}, "'bias' is 'all'"),
        ({"init_lora_weights": "pissa"}, "'init_lora_weights' is 'pissa'"),
        ({"modules_to_save": ["lm_head"]}, r"'modules_to_save' is .*merge_and_unload"),
        ({"from_the_future": 1}, "'from_the_future' is 1"),
        ({"rank_pattern": {"k_proj": "x"}}, "r is 'x'"),
        ({"rank_pattern": {"(": 2}}, "no regular expression"),
        ({"rank_pattern": {}}, r"k_proj.lora_A.weight' is F32 of shape \(2, 64\)"),
        ({"r": 0}, "r is 0"),
    ],
)
def test_other_adapters_raise(entries, match, tmp_path):
    path = altered(tmp_path / "x", **entries)
    with pytest.raises(ValueError, match=match):
        llm.adapt(llama(), path)


@functools.cache
def llama() -> Any:
    config = llm.Config("llama", 1, 64, 2, 1, 32, 128, 264, 64, tied_head=True)
    return llm.init(config, "int4-g32")


def test_other_tensors_raise(tmp_path):
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    path = tmp_path
    for i, (change, match) in enumerate(
        [
            ({name + "A.weight": None}, "q_proj' has no lora_A"),
            ({name + "B.weight": np.full((64, 4), np.nan, np.float32)}, "NaN"),
            ({"base_model.model.lm_head.weight": np.ones((1, 1))}, "no lora_A or lora_B"),
            ({name.replace("0", "7") + "A.weight": np.ones((4, 64))}, "layers.7.*is no matrix of"),
        ]
    ):
        path = altered(tmp_path / str(i))
        tensors = load_file(path / "adapter_model.safetensors") | change
        kept = {name: x for name, x in tensors.items() if x is not None}
        save_file(kept, path / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=match):
            llm.adapt(llama(), path)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"has its weights in adapter_model\.bin"):
        llm.adapt(llama(), path)
    with pytest.raises(FileNotFoundError, match=r"adapt: the adapter .* does not exist"):
        llm.adapt(llama(), tmp_path / "no")
    with pytest.raises(ValueError, match="merge_adapter: the model has no adapter"):
        llm.merge_adapter(llama())
    with pytest.raises(ValueError, match="finds no matrix"):
        llm.adapt(llama(), llm.LoRA(targets="query"))
