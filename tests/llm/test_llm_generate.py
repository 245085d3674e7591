"""`jaxlowbit.llm.generate` and `stream`: prompts, chunks, batches, sampling and stopping."""

import collections
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import CONFIGS, LLAMA, floats, reference
from flax import nnx
from helpers import call_names
from language_models import LONG, PROMPT, SHORT, Letters, model, weights

from jaxlowbit._llm import memory
from jaxlowbit._llm import programs as loop
from jaxlowbit._llm.cache import make_cache
from jaxlowbit._llm.sampling import Sampling
from jaxlowbit._llm.structure import split
from jaxlowbit._llm.text import Text
from jaxlowbit.llm import Decoder, LanguageModel, generate, stream


# The other architectures differ in rotations, which test_llm_model.py compares.
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "gemma3"])
def test_greedy_tokens_match_a_plain_program(name):
    """Each token has the largest logit given the tokens before it."""
    found = generate(model(name), PROMPT, max_new_tokens=20)
    assert len(found.tokens) == 20 and found.finish == "length"
    rows = reference(CONFIGS[name], floats(weights(name)), [*PROMPT, *found.tokens])
    assert rows[len(PROMPT) - 1 : -1].argmax(-1).tolist() == found.tokens


@pytest.mark.parametrize(
    "name", ["mistral", "gemma3", "olmo3"]
)  # gemma3 has a block without a window
def test_chunks_padding_and_steps_give_the_logits_of_the_whole(name):
    decoder = model(name).decoder
    graph, state = nnx.split(decoder)

    @jax.jit
    def forward(tokens, positions, cache):
        return nnx.merge(graph, state).forward(tokens, positions, cache)

    prompt = LONG[:44]
    whole = forward(*_at(prompt), make_cache(decoder.config, 1, 128, jnp.float32))[0]
    for sizes in ((22, 22), (1,) * len(prompt)):
        cache, found, at = make_cache(decoder.config, 1, 128, jnp.float32), [], 0
        for size in sizes:
            tokens, positions = _at(prompt[at : at + size], start=at, padding=2 * (size > 1))
            x, cache = forward(tokens, positions, cache)
            found.append(x[:, -size:])
            at += size
        assert jnp.allclose(jnp.concatenate(found, axis=1), whole, atol=1e-4)


def _at(tokens, start=0, padding=0):
    positions = [-1] * padding + list(range(start, start + len(tokens)))
    return jnp.array([[0] * padding + tokens]), jnp.array([positions], jnp.int32)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_batch_of_unequal_prompts_equals_separate_calls(name):
    prompts = [PROMPT, SHORT, LONG[:30]]
    together = generate(model(name), prompts, max_new_tokens=12)
    alone = [generate(model(name), prompt, max_new_tokens=12) for prompt in prompts]
    assert [x.tokens for x in together] == [x.tokens for x in alone]
    assert [x.prompt_tokens for x in together] == [21, 3, 30]


def test_long_prompts_are_read_in_chunks(monkeypatch):
    whole = generate(model(), LONG, max_new_tokens=8)
    monkeypatch.setattr(loop, "LARGEST_CHUNK", 16)
    assert loop.chunks(len(LONG)) == [16, 16, 16]
    assert generate(model(), LONG, max_new_tokens=8).tokens == whole.tokens


def test_chunks_have_few_different_sizes():
    assert loop.chunks(1) == loop.chunks(16) == [16]
    assert loop.chunks(33) == [64]
    assert loop.chunks(1024) == [512, 512]
    assert loop.chunks(1025 + 16) == [32, 512, 512]


def test_a_stream_equals_generate(monkeypatch):
    whole = generate(model(), PROMPT, max_new_tokens=40)
    assert "".join(stream(model(), PROMPT, max_new_tokens=40)) == whole.text
    without = LanguageModel(model().decoder)
    for patience, sizes in ((math.inf, [1, 2, 4, 8, 16, 9]), (0.0, [1] * 40)):  # a slow model last
        monkeypatch.setattr(loop, "_PATIENCE", patience)
        groups = list(stream(without, PROMPT, max_new_tokens=40))
        assert [token for group in groups for token in group] == whole.tokens
        assert [len(group) for group in groups] == sizes


def test_steps_without_the_host_give_the_same_tokens(monkeypatch):
    """As on a GPU. The first sequence ends by a token of eos."""
    eos = generate(model(), PROMPT, max_new_tokens=40).tokens[11]
    one = model(eos=(eos,))
    want = generate(one, [PROMPT, LONG], max_new_tokens=45)
    monkeypatch.setattr(loop, "_fixed_tokens", lambda model: 8)
    found = generate(one, [PROMPT, LONG], max_new_tokens=45)
    assert [x[:4] for x in found] == [x[:4] for x in want]
    assert want[0].finish == "eos" and len(want[1].tokens) == 45
    without = LanguageModel(one.decoder)
    groups = list(stream(without, PROMPT, max_new_tokens=21))
    assert [len(group) for group in groups] == [8, 3]  # the first sequence's end


def test_draws_match_the_seed():
    options = {"max_new_tokens": 40, "temperature": 1.0, "top_k": 50, "top_p": 0.9}
    first = generate(model(), PROMPT, seed=3, **options)
    assert generate(model(), PROMPT, seed=3, **options).tokens == first.tokens
    assert "".join(stream(model(), PROMPT, seed=3, **options)) == first.text
    assert generate(model(), PROMPT, seed=4, **options).tokens != first.tokens
    one, other = generate(model(), [PROMPT, PROMPT], seed=3, **options)
    assert one.tokens == first.tokens != other.tokens


def test_text_and_chats_go_through_the_tokenizer():
    text = generate(model(), "user:hi\n", max_new_tokens=5)
    chat = generate(model(), [{"role": "user", "content": "hi"}], max_new_tokens=5)
    both = generate(model(), ["user:hi\n", [{"role": "user", "content": "hi"}]], max_new_tokens=5)
    assert [x.tokens for x in both] == [chat.tokens, text.tokens] == [text.tokens] * 2
    assert text.text == Letters().decode(text.tokens)


# --- programs -------------------------------------------------------------------------------------


def test_prompts_of_a_bucket_and_tokens_compile_nothing(caplog):
    fresh = LanguageModel(Decoder(LLAMA.replace(context=250), weights("llama"), dtype=jnp.float32))
    programs: list[Any] = [loop.prefill, loop.decode]
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):

        def compiled():
            """Number of programs compiled since the last call, including single operations,
            and the number of compiled versions of our two programs."""
            found = sum("Finished XLA compilation" in text for text in caplog.messages)
            caplog.clear()
            return found, [program._cache_size() for program in programs]

        generate(fresh, PROMPT, max_new_tokens=3)
        first, before = compiled()
        assert first >= 2
        generate(fresh, PROMPT[:18], max_new_tokens=70, seed=5)
        generate(fresh, LONG[:30], max_new_tokens=1)
        list(stream(fresh, PROMPT, max_new_tokens=50))
        assert compiled() == (0, before)
        generate(fresh, PROMPT, max_new_tokens=3, temperature=0.5, top_p=0.5)
        _, before = compiled()
        generate(fresh, PROMPT, max_new_tokens=3, temperature=0.7, top_p=0.6, seed=8)
        assert compiled() == (0, before)


def traced(decoder):
    """A traced call that draws eight tokens for two sequences as on a GPU, and its state."""
    cache = make_cache(decoder.config, 2, 256, decoder.dtype)
    zeros = jnp.zeros(2, jnp.int32)
    logits, start = jnp.zeros((2, LLAMA.vocabulary)), loop.State(cache, zeros, zeros == 1)
    ends, key = loop.Ends(jnp.zeros(0, jnp.int32), zeros + 256), jax.random.key(0)
    return loop.decode.trace(
        *split(decoder), logits, start, np.int32(8), ends, key, Sampling(), None, 8
    ), start


@functools.cache
def compiled_step():
    """The optimized program of such a call, and its state."""
    program, start = traced(model().decoder)
    return program.lower().compile().as_text() or "", start


def test_a_step_copies_neither_cache_nor_weights():
    text, start = compiled_step()
    aliased = re.search(r"input_output_alias=\{(.*?)\}, entry", text)
    assert aliased and aliased[1].count("may-alias") == len(jax.tree.leaves(start))
    assert "f32[2,256,2,16]" in text
    assert not re.findall(r"= f32\[2,256,2,16\]\S* copy\(", text)
    # No copy is as large as packed words, in any type that may contain them.
    state = nnx.state(model().decoder)
    least = min(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim > 1)
    packed = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.uint32 and leaf.ndim > 1]
    assert packed and all(f"u32[{','.join(map(str, leaf.shape))}]" in text for leaf in packed)
    for bits, sizes in re.findall(r"= [su](8|16|32)\[([\d,]*)\]\S* (?:copy|transpose)\(", text):
        nbytes = int(bits) // 8 * math.prod(map(int, filter(None, sizes.split(","))))
        assert nbytes < least


def test_a_step_makes_few_calls():
    """A block is one call, or six if the CPU has no such call: q, k, v, o, gate and up, down."""
    targets = collections.Counter(call_names(compiled_step()[0]))
    layers, head = LLAMA.layers, 1
    if "quantized_block" in targets:
        assert targets["quantized_block"] == layers
        assert targets["quantized_matmul"] <= 3 + head
    else:
        assert targets == {"quantized_matmul": 6 * layers + head}


def test_a_block_is_one_call_on_a_gpu(cuda):
    """The first queries, keys and values, and the head, are additional calls."""
    decoder = Decoder(LLAMA, weights("llama"))
    text = traced(decoder)[0].lower(lowering_platforms=("cuda",)).as_text()
    assert collections.Counter(call_names(text)) == {
        "quantized_block": LLAMA.layers,
        "quantized_matmuls": 1,
        "quantized_matmul": 1,
    }


# --- stopping -------------------------------------------------------------------------------------


def test_a_token_of_eos_ends_a_sequence():
    tokens = generate(model(), PROMPT, max_new_tokens=20).tokens
    end = tokens[6]
    first = tokens.index(end)
    found = generate(model(eos=(end, 159)), PROMPT, max_new_tokens=20)
    assert (found.tokens, found.finish) == (tokens[:first], "eos")
    # The other sequence of the batch continues.
    found = generate(model(eos=(end,)), [PROMPT, SHORT], max_new_tokens=20)
    assert found[0].tokens == tokens[:first]
    expected = generate(model(), SHORT, max_new_tokens=20).tokens
    length = expected.index(end) if end in expected else 20
    assert found[1].tokens == expected[:length]


def test_a_stop_string_ends_a_text():
    whole = generate(model(), PROMPT, max_new_tokens=30)
    stop = whole.text[9:12]
    cut = whole.text.index(stop)
    found = generate(model(), PROMPT, max_new_tokens=30, stop=["nowhere", stop])
    assert (found.text, found.finish) == (whole.text[:cut], "stop")
    assert "".join(stream(model(), PROMPT, max_new_tokens=30, stop=stop)) == found.text


def test_the_context_ends_a_text():
    found = generate(model(context=30), PROMPT, max_new_tokens=100)
    assert (len(found.tokens), found.finish) == (9, "length")
    assert found.tokens == generate(model(), PROMPT, max_new_tokens=9).tokens


def test_each_sequence_of_a_batch_has_a_separate_context():
    one, prompts = model(context=60), [LONG, SHORT, LONG + PROMPT[:14]]
    together = generate(one, prompts, max_new_tokens=40)
    assert [len(x.tokens) for x in together] == [15, 40, 1]
    assert {x.finish for x in together} == {"length"}
    alone = generate(model(), [*prompts[:2]], max_new_tokens=40)
    assert [x.tokens for x in together[:2]] == [alone[0].tokens[:15], alone[1].tokens]


def test_a_sequence_with_nan_ends_without_the_others():
    arrays = {
        name: jnp.asarray(value, jnp.float32) for name, value in floats(weights("llama")).items()
    }
    arrays["embedding"] = arrays["embedding"].at[:, 7].set(jnp.nan)
    damaged = LanguageModel(Decoder(LLAMA, arrays, dtype=jnp.float32))
    plain = generate(damaged, PROMPT, max_new_tokens=5).tokens
    for options in ({}, {"temperature": 1.0, "top_k": 9, "top_p": 0.5, "presence_penalty": 0.5}):
        want = generate(damaged, PROMPT, max_new_tokens=5, **options)
        assert want.finish == "length" and (options or want.tokens == plain)
        found = generate(damaged, [PROMPT, [3, 7]], max_new_tokens=5, **options)
        assert found[0].tokens == want.tokens
        assert (found[1].tokens, found[1].finish) == ([], "nan")


def test_incomplete_characters_and_stop_strings_are_delayed():
    text = Text(Letters(), eos=(), stops=("</s>",))
    taken = []
    for byte in "a é<b </s> c".encode():
        text.add([byte])
        taken.append(text.take())
    assert "".join(taken) == text.text == "a é<b "
    assert taken[:6] == ["a", " ", "", "é", "", "<b"]
    assert text.finish == "stop"
    text = Text(Letters(), eos=(7,), stops=())
    text.add([65, 0xC3])
    assert text.take() == "A"
    text.add([7, 66])
    assert (text.tokens, text.take(), text.text) == ([65, 0xC3], "\ufffd", "A\ufffd")
    assert text.finish == "eos"


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0},
                {"top_p": 1.5}, {"max_new_tokens": 0}, {"stop": ""}, {"n": 0}, {"n": 2},
                {"repetition_penalty": 0}, {"presence_penalty": float("inf")}, {"min_p": -0.1},
                {"min_p": 1.1},
                {"logprobs": -1}, {"logprobs": 161}, {"seed": 2**63}, {"temperature": 1e39},
                {"temperature": 10**400}, {"repetition_penalty": 1e-40}, {"top_p": 1 + 1e-10},
                {"frequency_penalty": -1e39}, {"template_options": {}}],
)  # fmt: skip
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        generate(model(), PROMPT, **options)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        ([PROMPT, []], "prompt 1 is empty"),
        ([3, 160], "token 160 .*, but tokens are from 0 to 159"),
        ([-1], "token -1"),
        ([PROMPT, [200]], "prompt 1 has token 200"),
        (PROMPT * 13, "273 tokens, but the context has 256"),
    ],
)
def test_invalid_prompts_raise(prompt, sentence):
    with pytest.raises(ValueError, match=sentence):
        generate(model(), prompt)


def test_text_without_a_tokenizer_raises():
    without = LanguageModel(model().decoder)
    with pytest.raises(ValueError, match="no tokenizer; pass tokens"):
        generate(without, "text")
    with pytest.raises(ValueError, match="stop is text"):
        generate(without, PROMPT, stop="x")
    with pytest.raises(ValueError, match="the prompt is a batch"):
        stream(model(), [PROMPT, PROMPT])


def test_a_batch_too_large_for_memory_reports_its_size(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 1_000_000)
    with pytest.raises(ValueError, match=r"a batch of 50 with 256 slots needs \d+,\d+,\d+ bytes"):
        generate(model(), [SHORT] * 50)
    assert generate(model(), SHORT, max_new_tokens=1).tokens
