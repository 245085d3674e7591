"""Penalties, candidate tokens, seeds, log-probabilities and several samples."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import LLAMA, floats, reference
from language_models import PROMPT, SHORT, model, weights

from jaxlowbit import INT8
from jaxlowbit._llm.sampling import Counts, Sampling, random_key, sample
from jaxlowbit.llm import (
    Config,
    Session,
    bench,
    generate,
    init,
    perplexity,
    shard,
    stream,
)

SMALL = Config("llama", 1, 64, 1, 1, 64, 64, 64, 128)  # equal sizes need fewer programs
DRAWS = 4000


def draw(logits, counts=None, **options):
    """Tokens drawn from the same logits."""
    keys = jax.random.split(jax.random.key(0), DRAWS)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (DRAWS, len(logits)))
    return np.asarray(sample(rows, keys, Sampling.of("test", **options), counts)).tolist()


def kept(logits, top_k=None, top_p=None, min_p=0.0):
    """The candidate tokens, computed by sorting."""
    order = np.argsort(-logits)[: top_k or logits.size]
    p = np.exp(logits[order] - logits.max())
    p /= p.sum()
    needed = int(np.searchsorted(np.cumsum(p), top_p)) + 1 if top_p else p.size
    return {int(token) for token, x in zip(order[:needed], p, strict=False) if x >= min_p * p[0]}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(None, None, None), (1, None, None), (5, None, None), (None, 0.3, None), (None, 0.9, None),
     (7, 0.6, None), (None, None, 0.1), (None, None, 1.0), (6, None, 0.2), (None, 0.9, 0.3),
     (None, None, 0.0)],
)  # fmt: skip
def test_tokens_are_sampled_from_the_top(top_k, top_p, min_p):
    logits = np.random.default_rng(0).normal(size=16).astype(np.float32) * 2
    drawn = draw(logits, temperature=1.5, top_k=top_k, top_p=top_p, min_p=min_p)
    allowed = kept(logits / 1.5, top_k, top_p, min_p or 0)
    assert set(drawn) <= allowed
    p = np.where([i in allowed for i in range(16)], np.exp(logits / 1.5), 0)
    assert np.abs(np.bincount(drawn, minlength=16) / DRAWS - p / p.sum()).max() < 0.03


def test_numbers_at_the_ends_of_float32():
    """Values that round to 0 in float32 act as the smallest number, unlike 0."""
    logits = [1.0, 3.0, 2.0, 2.5]
    for options in (
        {"temperature": 1e-46}, {"temperature": 5e-324}, {"temperature": 1e-39},
        {"temperature": 1.2e-38}, {"temperature": 1.0, "top_p": 1e-50},
        {"temperature": 1.0, "top_p": 5e-324}, {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "min_p": 1 - 1e-12},
    ):  # fmt: skip
        assert set(draw(logits, **options)) == {1}, options
    everything = {0, 1, 2, 3}
    for options in (
        {"temperature": 3e38}, {"temperature": 2**127}, {"temperature": np.float16(9)},
        {"top_p": 1 - 1e-12}, {"min_p": 1e-300}, {"min_p": 5e-324}, {"top_k": 2**31 - 1},
    ):  # fmt: skip
        assert set(draw(logits, **{"temperature": 9.0, **options})) == everything, options
    # Large differences of logits do not overflow, with either sign.
    for temperature in (1e-30, 1.0, 1e30):
        assert 1 in set(draw([-3e38, 3e38, 0.0, 0.0], temperature=temperature))
    counts = Counts(jnp.array([[0, 9, 0, 0]] * DRAWS), jnp.zeros((DRAWS, 4), bool))
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        for value in (3e38, 1.2e-38, *([] if name == "repetition_penalty" else [-3e38, 1e-50])):
            found = draw(logits, counts, **{name: value})
            assert set(found) == ({3} if value == 3e38 else {1}), (name, value)


def test_penalties_change_logits_as_documented():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 16)).astype(np.float32) * 2
    drawn, prompt = rng.integers(0, 3, (6, 16)), rng.integers(0, 2, (6, 16)) == 1
    changed = 0
    for repetition, frequency, presence in ((1.7, None, None), (3.0, 0.6, 0.9), (0.3, -0.4, None)):
        seen, want = (drawn > 0) | prompt, logits.copy()
        want = np.where(seen, np.where(want > 0, want / repetition, want * repetition), want)
        want -= (frequency or 0) * drawn + (presence or 0) * (drawn > 0)
        options: dict[str, Any] = {"repetition_penalty": repetition, "frequency_penalty": frequency}
        sampling = Sampling.of("test", presence_penalty=presence, **options)
        counts = Counts(jnp.asarray(drawn, jnp.int32), jnp.asarray(prompt))
        found = sample(jnp.asarray(logits), random_key(0), sampling, counts)
        assert found.tolist() == want.argmax(-1).tolist()
        changed += int((want.argmax(-1) != logits.argmax(-1)).sum())
    assert changed


def test_penalties_count_prompt_and_generated_tokens():
    """Reference: logits of the model, penalized by all previous tokens."""
    for name, value in (("repetition_penalty", 1.8), ("frequency_penalty", 0.7)):
        options: dict[str, Any] = {name: value}
        found = generate(model(), [PROMPT, SHORT], max_new_tokens=12, **options)
        for prompt, one in zip((PROMPT, SHORT), found, strict=True):
            rows = reference(LLAMA, floats(weights("llama")), [*prompt, *one.tokens])
            for i, token in enumerate(one.tokens):
                row, before = rows[len(prompt) - 1 + i], one.tokens[:i]
                if name == "frequency_penalty":
                    row = row - value * np.bincount(before, minlength=160)
                else:
                    seen = np.isin(np.arange(160), prompt + before)
                    row = np.where(seen, np.where(row > 0, row / value, row * value), row)
                assert row.argmax() == token
    several = generate(model(), PROMPT, max_new_tokens=100, presence_penalty=1e9, temperature=1.0)
    tokens = several.tokens
    assert len(set(tokens)) == 100
    neutral = {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "min_p": 0}
    assert Sampling.of("test", **neutral) == Sampling()


# --- seeds ----------------------------------------------------------------------------------------


def test_seeds_have_64_bits():
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63 - 1, -1, -(2**63), 2**32 - 1]
    found = [jax.random.key_data(random_key(seed)).tolist() for seed in seeds]
    assert len({tuple(data) for data in found}) == len(seeds)
    for seed in (0, 1, 2**31 - 1):  # equal to `jax.random.key`
        assert random_key(seed) == jax.random.key(seed)
    with jax.enable_x64(True):
        assert [jax.random.key_data(random_key(seed)).tolist() for seed in seeds] == found


def test_seeds_that_differ_in_high_bits_draw_and_make_other_things():
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.5}
    low, high = (generate(model(), PROMPT, seed=seed, **options) for seed in (1, 2**32 + 1))
    assert low.tokens != high.tokens
    low, high = (init(SMALL, INT8, seed=seed).decoder for seed in (1, 2**32 + 1))
    assert (low.embedding.get_value().packed != high.embedding.get_value().packed).any()


# --- log-probabilities and several samples --------------------------------------------------------


def test_logprobs_match_the_model():
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "temperature": 2.0,
        "frequency_penalty": 0.5,
        "top_k": 30,
    }
    found = generate(model(), PROMPT, logprobs=3, **options)
    assert found.tokens == generate(model(), PROMPT, **options).tokens
    rows = reference(LLAMA, floats(weights("llama")), [*PROMPT, *found.tokens])[len(PROMPT) - 1 :]
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    assert len(found.logprobs.chosen) == len(found.logprobs.top) == 8
    for row, token, own, top in zip(rows, found.tokens, *found.logprobs, strict=False):
        assert own == pytest.approx(row[token], abs=1e-3)
        assert list(top) == np.argsort(-row)[:3].tolist()
        assert list(top.values()) == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-3)
    chosen = generate(model(), PROMPT, logprobs=0, **options).logprobs
    assert chosen.chosen == pytest.approx(found.logprobs.chosen, abs=1e-5)
    assert chosen.top == [{}] * 8
    assert generate(model(), PROMPT, max_new_tokens=1).logprobs is None


def test_logprobs_end_with_the_tokens():
    whole = generate(model(), PROMPT, max_new_tokens=20, logprobs=1)
    ended = generate(model(eos=(whole.tokens[6],)), PROMPT, max_new_tokens=20, logprobs=1)
    first = whole.tokens.index(whole.tokens[6])
    assert len(ended.logprobs.chosen) == len(ended.logprobs.top) == len(ended.tokens) == first
    pieces = stream(model(), PROMPT, max_new_tokens=20, stop=whole.text[9:12], logprobs=1)
    with pytest.raises(StopIteration) as end:
        while True:
            next(pieces)
    stopped = end.value.value
    assert stopped.finish == "stop"
    assert stopped.logprobs.chosen == whole.logprobs.chosen[: len(stopped.tokens)]


def test_several_samples_are_as_many_sequences():
    options: dict[str, Any] = {"max_new_tokens": 9, "temperature": 1.0, "seed": 3}
    rows = generate(model(), [PROMPT, PROMPT, SHORT, SHORT], **options)
    found = generate(model(), [PROMPT, SHORT], n=2, **options)
    assert [[x.tokens for x in several] for several in found] == [
        [x.tokens for x in rows[:2]],
        [x.tokens for x in rows[2:]],
    ]
    assert [x.tokens for x in generate(model(), PROMPT, n=2, **options)] == [
        x.tokens for x in rows[:2]
    ]
    with pytest.raises(ValueError, match="without a temperature all of them would be the same"):
        generate(model(), PROMPT, n=2)


# --- modes of JAX ---------------------------------------------------------------------------------


EVERYTHING: dict[str, Any] = {
    "temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "n": 2, "logprobs": 2, "seed": -5,
    "max_new_tokens": 3,
}  # fmt: skip


def sampled():
    return [x.tokens for x in generate(small(), [3, 1, 4], **EVERYTHING)]


def decoded():
    """Results of a model on a mesh."""
    two = shard(small(), jax.make_mesh((1,), ("model",)))
    session = Session(two)
    logits = two.decoder(jnp.asarray([[3, 1, 4]]))
    assert logits.dtype == jnp.float32
    speed = bench(two, prompt_tokens=4, new_tokens=2, repeats=1)
    assert (speed.positions, speed.prompt_tokens) == (5, 4)
    return (
        logits.argmax(-1).tolist(),
        list(stream(two, [3, 1, 4], max_new_tokens=3)),
        [session.generate(x, max_new_tokens=2).tokens for x in ([3, 1], [3, 1, 4])],
    )


def measured():
    return round(perplexity(small(), [3, 1, 4, 1, 5], context=4).loss, 3)


def small():
    return init(SMALL, INT8, seed=2**40)


@pytest.mark.parametrize("results", [sampled, decoded, measured])
def test_functions_run_with_64_bit_types_and_strict_promotion(results):
    """The public functions of `llm`."""
    plain = results()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        assert results() == plain


def test_functions_run_without_jit():
    """Also with 64-bit types. Float weights and short texts save time."""
    options: dict[str, Any] = {**EVERYTHING, "max_new_tokens": 1}

    def run():
        model = init(SMALL, None)
        return (
            [x.tokens for x in generate(model, [3, 1, 4], **options)],
            Session(model).generate([3, 1], max_new_tokens=1).tokens,
            round(perplexity(model, [3, 1, 4], context=2).loss, 3),
        )

    plain = run()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.disable_jit():
        assert run() == plain
