"""Tiny language models with random weights, prompts, and a byte tokenizer."""

import codecs
import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from decoders import CONFIGS, LLAMA, PARTS, random

from jaxlowbit.llm import Decoder, LanguageModel

RNG = np.random.default_rng(2)
PROMPT = RNG.integers(0, LLAMA.vocabulary, 21).tolist()
SHORT = RNG.integers(0, LLAMA.vocabulary, 3).tolist()
LONG = RNG.integers(0, LLAMA.vocabulary, 45).tolist()


class Letters:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text, *, bos=None):
        return list(text.encode())

    def decode(self, tokens, *, special=False):
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def decode_stream(self):
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        finish = functools.partial(decoder.decode, b"", final=True)
        return SimpleNamespace(push=lambda token: decoder.decode(bytes([token])), finish=finish)

    def chat(self, messages, add_generation_prompt=True):
        return self.encode("".join(f"{m['role']}:{m['content']}\n" for m in messages))


@functools.cache
def weights(name):
    return random((CONFIGS | PARTS)[name])


@functools.cache
def model(name="llama", **changes):
    config = (CONFIGS | PARTS)[name].replace(**changes)
    return LanguageModel(Decoder(config, weights(name), dtype=jnp.float32), Letters())
