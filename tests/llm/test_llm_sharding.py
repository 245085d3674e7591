"""Language models on a mesh: same results as on one device, and no words are sent."""

import collections
import dataclasses
import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import CONFIGS, INT4_G32, PARTS, random
from flax import nnx
from helpers import call_names, dequantized
from jax.sharding import AxisType
from model_files import metadata, tensors, write_gguf

from jaxlowbit import MXFP4, NVFP4, Format
from jaxlowbit._backends import cuda_calls
from jaxlowbit._command import main
from jaxlowbit._llm import command
from jaxlowbit._llm import programs as loop
from jaxlowbit._llm.sampling import Sampling
from jaxlowbit._llm.structure import split
from jaxlowbit.llm import (
    Config,
    Decoder,
    LanguageModel,
    bench,
    generate,
    init,
    load,
    perplexity,
    shard,
    stream,
)

# On four devices, each shard has whole heads and whole atoms, except for the vocabulary.
SIZES: dict[str, Any] = {
    "width": 64, "heads": 8, "kv_heads": 4, "head_size": 64, "hidden": 256, "vocabulary": 160,
}  # fmt: skip
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], list(range(20, 60))]


def config(name: str = "llama") -> Config:
    return (CONFIGS | PARTS)[name].replace(**SIZES)


def make_mesh(devices: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    found = jax.devices("cpu")[:devices]
    return jax.make_mesh((devices,), ("model",), axis_types=(kind,), devices=found)


@functools.cache
def weights(name: str) -> dict[str, Any]:
    return random(config(name))


@functools.cache
def model(name: str = "llama", devices: int | None = None) -> LanguageModel:
    mesh = None if devices is None else make_mesh(devices)
    return LanguageModel(Decoder(config(name), weights(name), dtype=jnp.float32, mesh=mesh))


def tokens(model: LanguageModel, **options: Any) -> list[list[int]]:
    return [x.tokens for x in generate(model, PROMPTS, max_new_tokens=12, **options)]


def logits(decoder: Decoder) -> np.ndarray:
    graph, state = nnx.split(decoder)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    return np.asarray(call(state, np.array([PROMPTS[2]])))


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "devices"),
    [("llama", 4), ("qwen2", 2), ("qwen3", 4), ("gemma3", 2), ("olmo3", 4), ("granite", 2)],
)
def test_logits_match_one_device(name, devices):
    want = logits(model(name).decoder)
    found = logits(model(name, devices).decoder)
    assert found.shape == want.shape
    assert np.abs(found - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(("name", "devices"), [("llama", 4), ("gemma3", 2)])
def test_tokens_match_one_device(name, devices):
    """Greedy, with prompts of different lengths."""
    assert tokens(model(name, devices)) == tokens(model(name))


def test_draws_match_the_seed():
    options = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "seed": 3}
    first = tokens(model("llama", 2), **options)
    assert first == tokens(model("llama", 2), **options) == tokens(model(), **options)


def test_a_stream_and_a_perplexity_match_one_device():
    found = list(stream(model("llama", 2), PROMPTS[0], max_new_tokens=12))
    assert found == list(stream(model(), PROMPTS[0], max_new_tokens=12))
    text = np.random.default_rng(0).integers(0, 160, 50).tolist()
    found, want = (perplexity(x, text, context=32) for x in (model("llama", 2), model()))
    assert found.perplexity == pytest.approx(want.perplexity, rel=1e-5)


def test_floats_and_mixed_formats():
    mixed = dict(weights("llama"))
    others = random(config(), Format(6, group_size=16, zero="float"))
    for name, format in {"layers.0.q": NVFP4, "layers.1.gate": MXFP4}.items():
        mixed[name] = random(config(), format)[name]
    mixed |= {name: others[name] for name in ("layers.0.v", "layers.0.gate", "layers.1.down")}
    for name in ("embedding", "layers.0.down", "layers.1.o", "layers.1.up", "head"):
        mixed[name] = dequantized(mixed[name])
    one = Decoder(config(), mixed, dtype=jnp.float32)
    want = logits(one)
    found = logits(shard(LanguageModel(one), make_mesh(2)).decoder)
    assert np.abs(found - want).max() < 1e-5 * np.abs(want).max()


def test_a_decoder_runs_outside_jit_and_looks_up_as_one_device():
    """Negative tokens count from the end; tokens beyond the vocabulary give NaN."""
    tokens = np.array([[3, 159, -1], [3, 1, 160]])
    want = np.asarray(model().decoder(tokens))
    assert np.isfinite(want[0]).all() and np.isnan(want[1, 2]).all()
    np.testing.assert_allclose(model("llama", 2).decoder(tokens), want, atol=1e-5)


# --- shardings ------------------------------------------------------------------------------------


def test_every_device_stores_its_shard():
    decoder = model("llama", 4).decoder
    block = decoder.blocks[0]

    def part(variable: Any) -> list[tuple[int, ...]]:
        arrays = jax.tree.leaves(variable.get_value())
        return [x.sharding.shard_shape(x.shape) for x in arrays if x.ndim > 1]

    assert part(block.qkv[0])[0] == (2, 1, 512)  # n_blocks, k_blocks, words
    assert part(block.o) == [(1, 2, 512), (1, 4, 64)]
    assert part(block.gate_up[0])[0] == (2, 1, 1, 512)
    assert part(block.down)[0] == (1, 1, 512)
    assert part(decoder.embedding)[0] == part(decoder.head)[0] == (1, 1, 512)  # 160 padded to 256
    cache = decoder.make_cache(2, 32)
    assert cache.keys[0].sharding.shard_shape(cache.keys[0].shape) == (2, 32, 1, 64)


def test_metadata_match_nnx():
    """Metadata describes the sharding of the matrix; NNX derives the sharding of each array."""
    decoder = model("llama", 2).decoder
    assert decoder.blocks[0].o.get_metadata("out_sharding") == ("model", None)
    assert decoder.blocks[0].gate_up[0].get_metadata("out_sharding") == (None, None, "model")
    state = nnx.state(decoder)
    placed = nnx.get_named_sharding(state, make_mesh(2))
    moved = jax.device_put(jax.device_get(state), placed)
    arrays, found = jax.tree.leaves(state), jax.tree.leaves(moved)
    assert len(arrays) == len(found) > 40
    for x, y in zip(arrays, found, strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_shard_does_not_move_the_original_model():
    one = model()
    two = shard(one, make_mesh(2))
    four = shard(two, make_mesh(4))
    assert [x.decoder.parts for x in (one, two, four)] == [1, 2, 4]
    assert len(one.decoder.embedding.get_value().packed.devices()) == 1
    assert tokens(four) == tokens(one)


def test_random_weights_match_one_device():
    one, two = (init(config(), INT4_G32, mesh=mesh) for mesh in (None, make_mesh(2)))
    assert tokens(two) == tokens(one)


def test_a_file_is_sharded_while_it_is_read(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata("llama"), tensors("llama", ["Q4_1", "Q8_0", "Q6_K", "F16"]))
    one = load(path, dtype=jnp.float32, progress=False)
    two = load(path, dtype=jnp.float32, progress=False, mesh=make_mesh(2))
    for array in jax.tree.leaves(nnx.state(two.decoder)):
        assert len(array.devices()) == 2
    prompt = list(range(30))
    want, found = (generate(x, prompt, max_new_tokens=6).tokens for x in (one, two))
    assert found == want


# --- programs -------------------------------------------------------------------------------------


def traced(decoder: Decoder) -> tuple[Any, loop.State]:
    """A traced call that draws three tokens for two sequences, and its state."""
    numbers = jnp.zeros(2, jnp.int32), jnp.zeros(2, bool)
    logits = decoder.divided_logits(jnp.zeros((2, 64)))
    start = loop.State(decoder.make_cache(2, 256), *decoder.replicate(numbers))
    ends, key = loop.Ends(jnp.zeros(0, jnp.int32), numbers[0]), jax.random.key(0)
    operands = logits, start, np.int32(3), ends, key
    return loop.decode.trace(*split(decoder), *operands, Sampling()), start


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_step_sends_sums_and_the_largest_logits_only(name):
    """One all-reduce for the embedding, two per block, and a gather of the largest logits."""
    program, start = traced(model(name, 2).decoder)
    text = program.lower().compile().as_text() or ""
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    sent = collections.Counter(re.findall(rf"= \(?(\S+?)\{{\S* ((?:{kinds})(?:-start)?)\(", text))
    assert sent == {("f32[2,1,64]", "all-reduce"): 5, ("s32[2,2,2]", "all-gather"): 1}
    # The state is donated, so that caches are not copied.
    aliased = re.search(r"input_output_alias=\{(.*?)\}, entry", text)
    assert aliased and aliased[1].count("may-alias") == len(jax.tree.leaves(start))
    assert "f32[2,256,2,64]" in text
    assert not re.findall(r"= f32\[2,256,2,64\]\S* copy\(", text)


def test_a_device_makes_few_calls_on_a_gpu(cuda):
    """One call before a block's first all-reduce and one after each; one more at both ends."""
    decoder = Decoder(config(), weights("llama"), mesh=make_mesh(2))
    text = traced(decoder)[0].lower(lowering_platforms=("cuda",)).as_text()
    assert collections.Counter(call_names(text)) == {
        "quantized_matmul": 2 + 1,
        "normalized": 2 * 2 - 1,
        "quantized_matmuls": 1,
    }


def test_tokens_compile_nothing():
    fresh = shard(model(), make_mesh(2))
    programs: list[Any] = [loop.prefill, loop.decode]
    generate(fresh, PROMPTS[0], max_new_tokens=3)
    before = [program._cache_size() for program in programs]
    generate(fresh, PROMPTS[1], max_new_tokens=70, seed=5)
    list(stream(fresh, PROMPTS[0], max_new_tokens=40))
    assert [program._cache_size() for program in programs] == before


# --- errors ---------------------------------------------------------------------------------------


def refused(config: Config, devices: int, sentence: str, format: Format = INT4_G32) -> None:
    one = init(config, format)
    for make in (
        lambda mesh: init(config, format, mesh=mesh),
        lambda mesh: shard(one, mesh),
    ):
        with pytest.raises(ValueError, match=sentence):
            make(make_mesh(devices))


def test_sizes_that_do_not_divide_raise():
    nine = config().replace(heads=9, kv_heads=3)
    refused(nine, 2, r"heads=9 is no multiple of 2 devices.*number of devices: 1\.")
    three = config().replace(heads=6, kv_heads=3, hidden=384)
    refused(three, 2, r"kv_heads=3 is no multiple of 2 devices.*: 1, 3\.")
    refused(config(), 8, r"kv_heads=4 is no multiple of 8 devices.*: 1, 2, 4\.")
    hidden = config().replace(hidden=320)
    refused(hidden, 4, r"320 features of hidden are 80 on each of 4 devices.*multiples of 64")
    small = config().replace(head_size=16)
    refused(small, 2, r"64 features of kv_heads are 32 on each of 2 devices.*multiples of 64")
    groups = r"256 rows of layers\.0\.down are 64 on each of 4.*in groups of 128.*multiples of 128"
    refused(config(), 4, groups, Format(4, 128))


def test_a_file_raises_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata("llama"), tensors("llama", ["TQ2_0"]))
    monkeypatch.setattr("jaxlowbit._llm.load._weight", None)
    with pytest.raises(ValueError, match=r"rows of layers\.0\.o are 128 on .* in groups of 256"):
        load(path, progress=False, mesh=make_mesh(2))


def test_permuted_rows_raise():
    permuted = dict(weights("llama"))
    o: Any = permuted["layers.0.o"]
    order = jnp.arange(o.k, dtype=jnp.int32)[::-1]
    permuted["layers.0.o"] = dataclasses.replace(o, permutation=order)
    with pytest.raises(ValueError, match=r"blocks\.0\.o cannot be divided over 2 .*are permuted"):
        Decoder(config(), permuted, mesh=make_mesh(2))


def test_other_meshes_raise():
    two: Any = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices("cpu")[:4])
    with pytest.raises(ValueError, match=r"the mesh has the axes \('a', 'b'\)"):
        shard(model(), two)
    none: Any = jax.devices("cpu")[:2]
    with pytest.raises(TypeError, match=r"mesh is list, but it must be a jax\.sharding\.Mesh"):
        shard(model(), none)


def test_meshes_of_the_context():
    """A mesh may have Explicit axes; in `jax.set_mesh` they must be Auto, like the decoder's."""
    mesh = make_mesh(2, AxisType.Explicit)
    sharded = shard(model(), mesh)
    want = generate(model(), PROMPTS[0], max_new_tokens=4).tokens
    assert generate(sharded, PROMPTS[0], max_new_tokens=4).tokens == want
    with jax.set_mesh(make_mesh(2)):
        assert generate(sharded, PROMPTS[0], max_new_tokens=4).tokens == want
    for other, sentence in ((mesh, "of Explicit axes"), (make_mesh(4), "{'model': 4} of Auto")):
        with jax.set_mesh(other), pytest.raises(ValueError, match=sentence):
            generate(sharded, PROMPTS[0], max_new_tokens=4)


def test_devices_that_stop_end_a_generation(monkeypatch):
    sharded = shard(model(), make_mesh(2))
    with monkeypatch.context() as patched:
        sentence = "CUDA device 1 waited in vain for rows of device 0"
        patched.setattr(cuda_calls, "exchange_failure", lambda: sentence)
        with pytest.raises(RuntimeError, match=f"generate: {sentence}"):
            generate(sharded, PROMPTS[0], max_new_tokens=4)
    assert generate(sharded, PROMPTS[0], max_new_tokens=4).finish == "length"


# --- the command ----------------------------------------------------------------------------------


def test_bench_on_devices(monkeypatch, capsys):
    monkeypatch.setitem(command.SHAPES, "tiny", config())
    arguments = ["bench", "tiny", "--devices", "2", "--prompt-tokens", "20", "--new-tokens", "3"]
    main([*arguments, "--format", "int4-g32", "--repeats", "1", "--json"])
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["devices"] == 2 and row["decode"] > 0
    assert bench(model(), prompt_tokens=4, new_tokens=2, repeats=1).devices == 1


@pytest.mark.parametrize("devices", ["0", "9"])
def test_missing_devices_are_named(devices, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "llama3-8b", "--devices", devices])
    assert f"--devices {devices}, but JAX sees" in capsys.readouterr().err
