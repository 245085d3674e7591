"""`generate` and `stream`: prompts to tokens, in programs that run on the device by themselves.

A prompt is written to the cache in chunks. Then one program draws several tokens in a loop on the
device, and the host gets them together. Shapes come in buckets: the number of cache slots and the
size of a chunk are powers of two, so that another prompt, and another token, compile nothing.
"""

import functools
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from .._core import checks
from . import memory
from .cache import Cache, bucket, nbytes
from .language_model import LanguageModel, check_model
from .sampling import Sampling, sample
from .text import Text

Prompt = str | Sequence[int] | Sequence[dict[str, str]]

LARGEST_CHUNK = 512  # tokens of a prompt that one call takes
SMALLEST_CHUNK = 16
_TOKENS = 32  # that one call draws at most


class Generation(NamedTuple):
    """What was generated after one prompt.

    - `text`: None without a tokenizer; cut before a stop string.
    - `tokens`: without the one that ends a turn.
    - `prompt_tokens`: the number of tokens of the prompt.
    - `finish`: `"eos"`, `"stop"`, or `"length"` where `max_new_tokens` or the context ended it.
    - `tokens_per_second`: those of the whole batch, after its prompts were read.
    """

    text: str | None
    tokens: list[int]
    prompt_tokens: int
    finish: str
    tokens_per_second: float


def generate(
    model: LanguageModel,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
) -> Any:
    """Generates text after a prompt, or after each prompt of a batch.

    **Arguments:**

    - `model`: from `load` or `init`.
    - `prompt`: a text, which is taken as it is; a chat, a list of messages
      `{"role": "user", "content": text}`, which goes through the template of the model; or tokens.
      A list of these is a batch, whose prompts may differ in length.
    - `max_new_tokens`: how many tokens to generate at most; the context also ends it.
    - `temperature`: 0 takes the most likely token, always the same; above, tokens are drawn from
      the softmax of logits that are divided by it.
    - `top_k`, `top_p`: draw from the k most likely tokens, and from the most likely ones whose
      probabilities sum up to p; None for all.
    - `seed`: draws are the same for one seed, sequence of the batch and position.
    - `stop`: texts that end a generation; they are not part of it.

    **Returns:** a `Generation`, for a batch a list of them.

    **Raises:** `TypeError` for arguments of other types; `ValueError` for an empty prompt, one that
    leaves no room in the context, tokens that the vocabulary has not, options out of range, and for
    a batch whose cache does not fit in memory, with the bytes that it needs.

    ```python
    model = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8)
    generate(model, [[3, 1, 4], [1, 5, 9, 2]], max_new_tokens=4, temperature=0.7, seed=1)
    ```
    """
    check_model("generate", model)
    single = is_single("generate", prompt)
    prompts = _batch("generate", model, [prompt] if single else prompt)
    options = max_new_tokens, temperature, top_k, top_p, seed, stop
    generation = _generation(model, prompts, _Request.of("generate", model, *options))
    while True:
        try:
            next(generation)
        except StopIteration as end:
            return end.value[0] if single else end.value


def stream(
    model: LanguageModel,
    prompt: Prompt,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
) -> Iterator[Any]:
    """Generates as `generate` does after one prompt, and yields the text as it comes.

    Tokens come in groups that grow from 1 to 32. Text that may yet become a stop string, or half of
    a character, is held back until that is clear.

    **Returns:** an iterator of strings, without a tokenizer of lists of tokens. As a generator, it
    returns the `Generation` (`result = yield from stream(...)`).

    **Raises:** what `generate` raises, and `ValueError` for a batch.

    ```python
    model = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8)
    for tokens in stream(model, [3, 1, 4], max_new_tokens=4):
        print(tokens)
    ```
    """
    check_model("stream", model)
    if not is_single("stream", prompt):
        raise ValueError("stream: the prompt is a batch, but text comes of one; use generate.")
    prompts = _batch("stream", model, [prompt])
    options = max_new_tokens, temperature, top_k, top_p, seed, stop
    request = _Request.of("stream", model, *options)
    generation = _generation(model, prompts, request, growing=True)
    return _streamed(generation)


def _streamed(generation: Generator[list[Text], None, list[Generation]]) -> Iterator[Any]:
    text = None
    while True:
        try:
            (text,) = next(generation)
        except StopIteration as end:
            if text and (new := text.take()):
                yield new
            return end.value[0]
        if new := text.take():
            yield new


class _Request(NamedTuple):
    """What a caller asks for beside prompts."""

    caller: str
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stops: tuple[str, ...]

    @classmethod
    def of(
        cls,
        caller: str,
        model: LanguageModel,
        max_new_tokens: Any,
        temperature: Any,
        top_k: Any,
        top_p: Any,
        seed: Any,
        stop: Any,
    ) -> "_Request":
        """**Raises:** `TypeError` and `ValueError` for options that are none."""
        rule = "the number of tokens to generate at most, an integer from 1 on"
        max_new_tokens = checks.integer(caller, "max_new_tokens", max_new_tokens, rule)
        sampling = Sampling.of(temperature, top_k, top_p, caller)
        rule = "an integer of 64 bits"
        seed = checks.integer(caller, "seed", seed, rule, least=-(2**63), most=2**63 - 1)
        return cls(caller, max_new_tokens, sampling, seed, _stops(caller, model, stop))


def _stops(caller: str, model: LanguageModel, stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(x, str) for x in stops):
        raise TypeError(
            f"{caller}: stop is {checks.brief(stop)}, but it is a text, or a list of texts, that "
            "end a generation."
        )
    if stops and model.tokenizer is None:
        raise ValueError(
            f"{caller}: stop is text, but the model has no tokenizer; look for its tokens in the "
            "result."
        )
    if "" in stops:
        raise ValueError(f"{caller}: a stop string is empty; it would stop everything.")
    return tuple(stops)


def _generation(
    model: LanguageModel,
    prompts: list[list[int]],
    request: _Request,
    *,
    growing: bool = False,
) -> Generator[list[Text], None, list[Generation]]:
    """Yields the texts, which grow, after every group of tokens; returns what they became."""
    texts = [Text(model.tokenizer, model.config.eos, request.stops) for _ in prompts]
    options = request.max_new_tokens, request.sampling, request.seed
    groups = run(model, prompts, *options, growing=growing, caller=request.caller)
    next(groups)  # the prompts are read
    start = time.perf_counter()
    for tokens in groups:
        for text, row in zip(texts, tokens, strict=True):
            text.add(row)
        yield texts
        if all(text.finish for text in texts):
            break
    rate = sum(len(text.tokens) for text in texts) / (time.perf_counter() - start)
    for text in texts:
        text.close("length")
    return [
        Generation(text.text, text.tokens, len(prompt), text.finish or "", rate)
        for text, prompt in zip(texts, prompts, strict=True)
    ]


# --- prompts --------------------------------------------------------------------------------------


def is_single(caller: str, prompt: Any) -> bool:
    """Whether this is one prompt: a text, tokens, or a chat; otherwise it is several.

    **Raises:** `TypeError` for what is neither.
    """
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, np.ndarray | Array):
        return prompt.ndim < 2
    if isinstance(prompt, list | tuple | range):
        several = str | list | tuple | range | np.ndarray | Array
        return len(prompt) == 0 or not isinstance(prompt[0], several)
    raise TypeError(
        f"{caller}: prompt is {checks.brief(prompt)}, but it is a text, a list of messages "
        '{"role": "user", "content": text}, a list of tokens, or a list of these.'
    )


def _batch(caller: str, model: LanguageModel, prompts: Any) -> list[list[int]]:
    """The tokens of every prompt."""
    found = []
    for i, prompt in enumerate(prompts):
        name = f"prompt {i}" if len(prompts) > 1 else "the prompt"
        tokens = encoded(model, prompt, f"{caller}: {name}")
        if len(tokens) >= model.config.context:
            raise ValueError(
                f"{caller}: {name} has {len(tokens)} tokens, but the context holds "
                f"{model.config.context} with what is generated; shorten it."
            )
        found.append(tokens)
    return found


def encoded(model: LanguageModel, prompt: Any, name: str) -> list[int]:
    """The tokens of a text, a chat or tokens, checked; errors begin with `name`."""
    if isinstance(prompt, np.ndarray | Array):
        prompt = np.asarray(prompt).tolist() if prompt.ndim == 1 else None
    if not isinstance(prompt, str | list | tuple | range):
        raise TypeError(f"{name} is no text, no list of messages and no list of tokens; pass one.")
    if len(prompt) == 0:
        raise ValueError(f"{name} is empty; there must be a token to go on from.")
    if isinstance(prompt, str) or isinstance(prompt[0], dict):
        if model.tokenizer is None:
            raise ValueError(f"{name} is text, but the model has no tokenizer; pass tokens.")
        if isinstance(prompt, str):
            tokens = model.tokenizer.encode(prompt)
        else:
            with checks.within(name.partition(":")[0]):
                tokens = model.tokenizer.chat(list(prompt), add_generation_prompt=True)
    else:
        tokens = prompt
    found, vocabulary = [], model.config.vocabulary
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TypeError(
                f"{name} has {checks.brief(token)} for a token, but tokens are integers from 0 to "
                f"{vocabulary - 1}."
            )
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"{name} has {_named(model, int(token))}, but tokens are from 0 to "
                f"{vocabulary - 1}, the rows of the model's table."
            )
        found.append(int(token))
    return found


def _named(model: LanguageModel, token: int) -> str:
    """A token with its text, if it has one."""
    known = model.tokenizer is not None and token >= 0
    text = model.tokenizer.decode([token], special=True) if known else ""
    return f"token {token}" + (f" ({text!r})" if text else "")


def chunks(length: int) -> list[int]:
    """The sizes in which a prompt of so many tokens is read: a padded remainder, then full ones."""
    full, rest = divmod(length, LARGEST_CHUNK)
    first = [max(SMALLEST_CHUNK, 1 << (rest - 1).bit_length())] if rest else []
    return first + [LARGEST_CHUNK] * full


# --- programs -------------------------------------------------------------------------------------


class State(NamedTuple):
    """Where a generation stands: what its next call takes, and gives back changed.

    `logits` (batch, vocabulary) are those of the next token, `positions` (batch,) its positions,
    and `done` (batch,) says which sequences have ended.
    """

    cache: Cache
    logits: Array
    positions: Array
    done: Array


def run(
    model: LanguageModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    *,
    growing: bool = False,
    endless: bool = False,
    caller: str = "generate",
) -> Iterator[np.ndarray]:
    """Yields groups of tokens (batch, n), first an empty one when the prompts are read.

    A sequence that has ended has -1 for tokens; an `endless` one has no end. The loop ends when all
    have.
    """
    config, longest = model.config, max(map(len, prompts))
    left = min(max_new_tokens, config.context - longest)
    sizes = chunks(longest)
    slots = bucket(sum(sizes) + left, config.context)
    dtype, batch = model.decoder.dtype, len(prompts)
    kept = nbytes(config, batch, slots, dtype) // model.decoder.parts
    needed = kept + 3 * 4 * batch * config.vocabulary
    memory.check(caller, needed, f"a batch of {batch} with {slots} slots")

    # Prompts end together: padding is in front, where it has no positions.
    tokens = np.zeros((batch, sum(sizes)), np.int32)
    positions = np.full(tokens.shape, -1, np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, -len(prompt) :] = prompt
        positions[i, -len(prompt) :] = np.arange(len(prompt))
    graph, weights = nnx.split(model.decoder)
    cache, logits = model.decoder.make_cache(batch, slots), jnp.zeros(0)
    for at, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
        chunk = slice(at, at + size)
        reach = min(slots, 1 << int(at + size - 1).bit_length())
        inputs = tokens[:, chunk], positions[:, chunk]
        logits, cache = prefill(graph, weights, cache, *inputs, reach)
    lengths = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    # Where a call of `decode` leaves them, so that the second is the program of the first.
    lengths, done = model.decoder.replicate((lengths, jnp.zeros(batch, bool)))
    state = State(cache, logits, lengths, done)
    eos = jnp.asarray(() if endless else config.eos, jnp.int32)
    key, size = jax.random.key(seed), 1
    # Drawing nothing compiles the loop, so that whoever measures time starts after that.
    _, state = decode(graph, weights, state, np.int32(0), eos, key, sampling)
    jax.block_until_ready(state.logits)
    yield np.zeros((batch, 0), np.int32)

    while left > 0:
        count = min(left, size if growing else _TOKENS)
        drawn, state = decode(graph, weights, state, np.int32(count), eos, key, sampling)
        drawn = np.asarray(drawn)[:, :count]
        yield drawn
        if (drawn[:, -1] < 0).all():
            return
        left, size = left - count, min(2 * size, _TOKENS)


@functools.partial(jax.jit, static_argnums=(0, 5), donate_argnums=2)
def prefill(
    graph: Any, weights: Any, cache: Cache, tokens: Array, positions: Array, reach: int
) -> tuple[Array, Cache]:
    """Appends a chunk of prompts to a cache; logits (batch, vocabulary) after its last tokens."""
    decoder = nnx.merge(graph, weights)
    x, cache = decoder.forward(tokens, positions, cache, reach=reach)
    return decoder.logits(x[:, -1]), cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode(
    graph: Any,
    weights: Any,
    state: State,
    count: Array,
    eos: Array,
    key: Array,
    sampling: Sampling,
) -> tuple[Array, State]:
    """Draws `count` tokens, int32 (batch, 32), and -1 from the end of a sequence on."""
    decoder = nnx.merge(graph, weights)
    batch = state.positions.shape[0]
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(batch))

    def unfinished(loop: tuple[Array, Array, State]) -> Array:
        i, _, state = loop
        return (i < count) & ~state.done.all()

    def step(loop: tuple[Array, Array, State]) -> tuple[Array, Array, State]:
        i, drawn, (cache, logits, positions, done) = loop
        token = sample(logits, jax.vmap(jax.random.fold_in)(keys, positions), sampling)
        done |= (token[:, None] == eos[None]).any(axis=-1)
        token = jnp.where(done, -1, token)
        drawn = lax.dynamic_update_slice(drawn, token[:, None], (0, i))
        placed = jnp.where(done, -1, positions)
        x, cache = decoder.forward(jnp.maximum(token, 0)[:, None], placed[:, None], cache)
        return i + 1, drawn, State(cache, decoder.logits(x[:, 0]), positions + 1, done)

    drawn = jnp.full((batch, _TOKENS), -1, jnp.int32)
    _, drawn, state = lax.while_loop(unfinished, step, (jnp.int32(0), drawn, state))
    return drawn, state
