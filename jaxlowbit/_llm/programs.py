"""Programs that read prompts and sample tokens, and the host loop that calls them.

A prompt is written to the cache in chunks. Then one program samples several tokens in a loop on the
device, and the host gets them together. On a GPU the host starts a program before it gets the
tokens of the one before, so that the GPU never waits for the host. The number of cache slots and
the size of a chunk are powers of two, so other prompts and further tokens do not recompile.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import memory
from .cache import Cache, bucket, nbytes
from .decoder import Decoder
from .language_model import LanguageModel
from .sampling import NOT_A_NUMBER, Counts, Sampling, checked, random_key, sample
from .schema import Masks
from .structure import Structure, split

LARGEST_CHUNK = 512  # maximum tokens of a prompt per call
SMALLEST_CHUNK = 16
_TOKENS = 32  # maximum sampled tokens per call
_GPU_TOKENS = 8  # sampled tokens per call on a GPU
_PATIENCE = 0.1  # seconds; with `growing`, a call that takes longer stops the growth

_EOS, _LENGTH = -1, -2
FINISHES = {_EOS: "eos", _LENGTH: "length", NOT_A_NUMBER: "nan"}
"""The reason why a sequence ended, by its first negative token."""


class Drawn(NamedTuple):
    """Sampled tokens, and log-probabilities or None.

    - `tokens`: int32 (batch, n). The first one after the end of a sequence is a key of `FINISHES`;
      later ones are negative.
    - `logprobs`: float32 (batch, n), of these tokens.
    - `top_tokens`, `top_logprobs`: (batch, n, k), the k tokens with the highest probability.
    """

    tokens: Any
    logprobs: Any = None
    top_tokens: Any = None
    top_logprobs: Any = None


class Ends(NamedTuple):
    """Ends of sequences: the tokens `eos` (n,), and the first position (batch,) beyond each."""

    eos: Array
    positions: Array


class State(NamedTuple):
    """Input and output of a call of `decode`, besides the logits of the next token.

    `positions` (batch,) has the position of the next token of each sequence, `done` (batch,) marks
    sequences that have ended, and `counts` is for penalties.
    """

    cache: Cache
    positions: Array
    done: Array
    counts: Counts | None = None


class Kept:
    """The cache of a run, and the tokens in it: token i is in slot i, at position i.

    Another run with it reads only the tokens after the shared prefix of its prompt. It must not be
    used after a run with several sequences.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.cache: Cache | None = None

    @property
    def slots(self) -> int:
        return 0 if self.cache is None else self.cache.slots

    def shared(self, prompt: list[int]) -> int:
        """The number of tokens of a prompt that need not be read again; its last token is always
        read."""
        leaves = jax.tree.leaves(self.cache)
        # An interrupted call may have donated the cache.
        if not leaves or any(leaf.is_deleted() for leaf in leaves):
            self.cache, self.tokens = None, []
        pairs = zip(self.tokens, prompt[:-1], strict=False)
        differ = (i for i, (old, new) in enumerate(pairs) if old != new)
        return next(differ, min(len(self.tokens), len(prompt) - 1))


def chunks(length: int) -> list[int]:
    """The sizes of the chunks of a prompt: a padded remainder, then full chunks."""
    full, rest = divmod(length, LARGEST_CHUNK)
    first = [max(SMALLEST_CHUNK, 1 << (rest - 1).bit_length())] if rest else []
    return first + [LARGEST_CHUNK] * full


# --- the loop on the host -------------------------------------------------------------------------


def run(
    model: LanguageModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    *,
    n: int = 1,
    logprobs: int | None = None,
    masks: Masks | None = None,
    kept: Kept | None = None,
    growing: bool = False,
    endless: bool = False,
    caller: str = "generate",
) -> Iterator[Drawn]:
    """Yields groups of tokens; the first one is empty and follows the reading of the prompts.

    The batch contains `n` sequences of each prompt, one after the other. A sequence ends by
    `config.eos` (unless `endless`), by `max_new_tokens`, or at the end of the context; the loop
    ends with the last one. With `kept`, for one prompt, only the tokens after its prefix are read.

    On a GPU groups are 8 tokens, elsewhere 32; with `masks`, one token. With `growing`, the first
    group elsewhere is one token, and groups double while they take less than 0.1 s.
    """
    division = model.decoder.division
    if division is not None:
        division.forget_failure()
    kept = Kept() if kept is None else kept
    config = model.config
    limits = [min(max_new_tokens, config.context - len(prompt)) for prompt in prompts]
    left = max(limits)
    start, slots = _room(model, prompts, kept, left, n, caller)
    parts = split(model.decoder)
    read = functools.partial(prefill, *parts)
    logits = _read(model.decoder, read, prompts, kept, start, slots)
    logits, state = _state(model, prompts, kept, logits, sampling, n)
    positions = np.repeat(np.add(limits, [len(prompt) for prompt in prompts]), n)
    ends = Ends(
        jnp.asarray(() if endless else config.eos, jnp.int32), jnp.asarray(positions, jnp.int32)
    )
    fixed = None if masks is not None else _fixed_tokens(model)
    size = fixed or (1 if growing or masks is not None else _TOKENS)
    options = ends, random_key(seed), sampling, logprobs, fixed
    draw = functools.partial(decode, *parts)
    calls = _Calls(draw, options, logits, state, kept if n == 1 else None, masks)
    # A caller can start measuring when the prompts are read: the loop is compiled, and a GPU has
    # its first call.
    left -= calls.start(0 if fixed is None else min(left, fixed))
    jax.block_until_ready(logits)
    if fixed is None:
        calls.take()
    yield Drawn(np.zeros((len(positions), 0), np.int32))
    while left > 0 or calls.started:
        began = time.perf_counter()
        while left > 0 and len(calls.started) <= (fixed is not None):
            left -= calls.start(min(left, size))
        drawn = calls.take()
        if division is not None:
            division.check_devices(caller)
        if n == 1:
            tokens = [token for token in drawn.tokens[0].tolist() if token >= 0]
            # Steps after the last token may have overwritten the last slot.
            kept.tokens = (kept.tokens + tokens)[: kept.slots - (fixed is not None)]
        if masks is None and fixed is None and time.perf_counter() - began < _PATIENCE:
            size = min(2 * size, _TOKENS)
        yield drawn
        if (drawn.tokens[:, -1] < 0).all():
            return


class _Calls:
    """Calls of `decode` in order: one may start before the tokens of the one before are taken."""

    def __init__(
        self,
        draw: Callable[..., tuple[Drawn, Array, State]],
        options: tuple[Any, ...],
        logits: Array,
        state: State,
        kept: Kept | None,
        masks: Masks | None,
    ) -> None:
        self.draw, self.options, self.logits, self.state = draw, options, logits, state
        self.kept, self.masks = kept, masks
        self.started: deque[tuple[int, Drawn]] = deque()

    def start(self, count: int) -> int:
        """Starts to sample `count` tokens."""
        if self.masks is not None and count > 0:
            self.logits = self.masks.apply(self.logits)
        drawn, self.logits, self.state = self.draw(
            self.logits, self.state, np.int32(count), *self.options
        )
        if self.kept is not None:
            self.kept.cache = self.state.cache
        self.started.append((count, drawn))
        return count

    def take(self) -> Drawn:
        """Waits for the tokens of the oldest call."""
        count, drawn = self.started.popleft()
        drawn = Drawn(*(None if x is None else np.asarray(x)[:, :count] for x in drawn))
        if self.masks is not None and count > 0:
            self.masks.add(drawn.tokens[:, 0])
        return drawn


def _room(
    model: LanguageModel, prompts: list[list[int]], kept: Kept, left: int, n: int, caller: str
) -> tuple[int, int]:
    """The first token to read of each prompt, and the slots of a cache for `left` more tokens.

    **Raises:** as `memory.check`, if a larger cache does not fit.
    """
    config, longest, batch = model.config, max(map(len, prompts)), len(prompts) * n

    def slots_from(start: int) -> int:
        first = chunks(longest - start)[0]
        return max(bucket(max(start + first, longest + left), config.context), kept.slots)

    start = kept.shared(prompts[0])
    slots = slots_from(start)
    if config.takes_long_factors(slots) != config.takes_long_factors(kept.slots):
        start = 0  # the keys in the cache have another rotation
        slots = slots_from(start)
    if kept.slots < slots or batch > 1:
        # If each prompt has several sequences, their caches are copies of the prompt's cache.
        sequences = batch if n == 1 else batch + len(prompts)
        cache_bytes = (
            nbytes(config, sequences, slots, model.decoder.cache_dtype) // model.decoder.parts
        )
        needed = cache_bytes + 3 * 4 * batch * config.vocabulary
        memory.check(caller, needed, f"a batch of {batch} with {slots} slots")
    return start, slots


def _fixed_tokens(model: LanguageModel) -> int | None:
    """The number of tokens that a program samples wherever it runs ahead of the host; else None."""
    division = model.decoder.division
    platform = jax.default_backend() if division is None else division.platform
    return _GPU_TOKENS if platform == "gpu" else None


def _read(
    decoder: Decoder,
    read: Callable[..., tuple[Array, Cache]],
    prompts: list[list[int]],
    kept: Kept,
    start: int,
    slots: int,
) -> Array:
    """Reads prompts from token `start` on into `kept` with `read`, `prefill` of the decoder; the
    logits after their last tokens."""
    # Prompts end together: shorter ones are padded at the front, at no position. The first chunk is
    # padded at its end, which the next one overwrites.
    longest = max(map(len, prompts))
    tokens = np.zeros((len(prompts), longest), np.int32)
    positions = np.full(tokens.shape, -1, np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, -len(prompt) :] = prompt
        positions[i, -len(prompt) :] = np.arange(len(prompt))
    old = kept.cache if start > 0 or kept.slots == slots else None
    if kept.slots < slots:
        kept.cache = None
        empty = decoder.make_cache(len(prompts), slots)
        kept.cache = empty if old is None else copied(old, empty)
    if old is not None:
        kept.cache = cut(kept.cache, np.int32(start))
    kept.tokens = prompts[0][:start]
    logits, at, sizes = jnp.zeros(0), start, chunks(longest - start)
    for i, size in enumerate(sizes):
        count = size if i > 0 else longest - start - sum(sizes[1:])
        padding = (0, 0), (0, size - count)
        chunk = np.pad(tokens[:, at : at + count], padding)
        placed = np.pad(positions[:, at : at + count], padding, constant_values=-1)
        # After a shared prefix, one program serves all of its lengths.
        reach = slots if start > 0 else min(slots, 1 << int(at + size - 1).bit_length())
        logits, kept.cache = read(kept.cache, chunk, placed, np.int32(count), reach)
        at += count
        kept.tokens = prompts[0][:at]
    return logits


def _state(
    model: LanguageModel,
    prompts: list[list[int]],
    kept: Kept,
    logits: Array,
    sampling: Sampling,
    n: int,
) -> tuple[Array, State]:
    """The logits and the state before the first token of `n` sequences of each prompt."""
    rows = [prompt for prompt in prompts for _ in range(n)]
    cache: Any = kept.cache
    if n > 1:
        cache, logits = repeated(cache, logits, n)
    # On the devices that `decode` leaves them on, so that the first call needs no other program.
    return logits, State(
        cache,
        *model.decoder.replicate(
            (
                jnp.asarray([len(prompt) for prompt in rows], jnp.int32),
                jnp.zeros(len(rows), bool),
                Counts.of(sampling, rows, model.config.vocabulary),
            )
        ),
    )


# --- programs -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=2)
def prefill(
    structure: Structure,
    weights: list[Array],
    cache: Cache,
    tokens: Array,
    positions: Array,
    count: Array,
    reach: int,
) -> tuple[Array, Cache]:
    """Appends a chunk of prompts, whose first `count` columns are tokens, to a cache.

    **Returns:** logits (batch, vocabulary) after the last of these columns, and the cache.
    """
    decoder = structure.merge(weights)
    x, cache = decoder.forward(tokens, positions, cache, reach=reach)
    last = lax.dynamic_index_in_dim(x, count - 1, axis=1, keepdims=False)
    return decoder.divided_logits(last), cache._replace(used=cache.used - tokens.shape[1] + count)


@functools.partial(jax.jit, static_argnums=(0, 8, 9), donate_argnums=3)
def decode(
    structure: Structure,
    weights: list[Array],
    logits: Array,
    state: State,
    count: Array,
    ends: Ends,
    key: Array,
    sampling: Sampling,
    logprobs: int | None = None,
    fixed: int | None = None,
) -> tuple[Drawn, Array, State]:
    """Samples `count` tokens, up to 32, or fewer if all sequences end, with the `logprobs` top
    tokens for each. `logits` (batch, vocabulary) predict the next token
    (`Decoder.divided_logits`).

    With `fixed`, the program always samples this number of tokens: on a GPU the host would wait for
    the check whether sequences have ended, and could not start the next program meanwhile. Steps
    after the end may overwrite the last slot of the cache.
    """
    decoder = structure.merge(weights)
    batch = state.positions.shape[0]
    rows = jnp.arange(batch, dtype=jnp.int32)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(rows)

    def unfinished(loop: tuple[Array, Drawn, Array, State]) -> Array:
        i, _, _, state = loop
        return (i < count) & ~state.done.all()

    def step(loop: tuple[Array, Drawn, Array, State]) -> tuple[Array, Drawn, Array, State]:
        i, drawn, logits, (cache, positions, done, counts) = loop
        if counts is None and sampling.temperature is None and logprobs is None:
            token = checked(*decoder.largest(logits))  # several devices send no logits
            new = Drawn(token)
        else:
            logits = decoder.joined(logits)
            token = sample(logits, jax.vmap(jax.random.fold_in)(keys, positions), sampling, counts)
            new = Drawn(token, *_logprobs(logits, token, logprobs))
        token = jnp.where((token[:, None] == ends.eos[None]).any(axis=-1), _EOS, token)
        token = jnp.where(positions >= ends.positions, _LENGTH, token)
        token = jnp.where(done, _EOS, token)
        drawn = jax.tree.map(
            lambda all, one: lax.dynamic_update_slice_in_dim(all, one[:, None], i, axis=1),
            drawn,
            new._replace(tokens=token),
        )
        done |= token < 0
        placed = jnp.where(done, -1, positions)
        logits, cache = decoder.decode(jnp.maximum(token, 0), placed, cache)
        counts = None if counts is None else counts.add(token)
        state = State(cache, positions + 1, done, counts)
        return i + 1, drawn, logits, state

    size = _TOKENS if fixed is None else fixed
    tokens = jnp.full((batch, size), _EOS, jnp.int32)
    drawn = Drawn(tokens)
    if logprobs is not None:
        top = batch, size, logprobs
        numbers = jnp.zeros((batch, size), jnp.float32), jnp.zeros(top, jnp.float32)
        drawn = Drawn(tokens, numbers[0], jnp.zeros(top, jnp.int32), numbers[1])

    loop = jnp.int32(0), drawn, logits, state
    if fixed is None:
        _, drawn, logits, state = lax.while_loop(unfinished, step, loop)
    else:
        _, drawn, logits, state = lax.fori_loop(0, fixed, lambda _, loop: step(loop), loop)
    return drawn, logits, state


def _logprobs(logits: Array, token: Array, count: int | None) -> tuple[Array, ...]:
    """The last three fields of `Drawn` for one token (batch,), or nothing."""
    if count is None:
        return ()
    every = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(every, jnp.maximum(token, 0)[:, None], axis=-1)[:, 0]
    top, tokens = lax.top_k(every, count)
    return own, tokens.astype(jnp.int32), top


@functools.partial(jax.jit, donate_argnums=0)
def cut(cache: Cache, length: Array) -> Cache:
    """The cache with its first `length` slots in use only."""
    return cache.cut(length)


@functools.partial(jax.jit, donate_argnums=1)
def copied(cache: Cache, larger: Cache) -> Cache:
    """The cache in the slots of a larger, empty one."""
    return cache.copied_to(larger)


@functools.partial(jax.jit, static_argnums=2)
def repeated(cache: Cache, logits: Array, n: int) -> tuple[Cache, Array]:
    """A cache and logits with each sequence `n` times."""
    return cache.repeated(n), jnp.repeat(logits, n, axis=0)
