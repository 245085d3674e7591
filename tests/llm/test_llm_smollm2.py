"""A real chat model, SmolLM2-135M-Instruct: weights, greedy text, and memory while loading."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from model_files import floats, same_bits, smollm2

from jaxlowbit._llm import gguf as files
from jaxlowbit._llm.load import read
from jaxlowbit._llm.programs import run
from jaxlowbit._llm.sampling import Sampling
from jaxlowbit.llm import load

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

# Tests all claims of the documentation; otherwise a sample.
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
TEXT = (Path(__file__).parents[2] / "examples/data/northanger_abbey.txt").read_text()
QUESTIONS = [
    "What is photosynthesis?",
    "What is the capital of France?",
    "Give me three tips for a good night's sleep.",
    "Write a short story about a lighthouse keeper and her cat.",
    "Explain what a prime number is, with five examples: 2, 3, 5, 7 and 11.",
]


@functools.cache
def tensors():
    """Tensors dequantized by the package gguf, by name: float32 (out, in)."""
    found = gguf.GGUFReader(smollm2()).tensors
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in found
    }


def plain_logits(tokens):
    """Logits (length, 49152) of a Llama in float32 NumPy, with the sizes of this model."""
    heads, kv_heads, size, weights = 9, 3, 64, tensors()
    steps = np.arange(len(tokens))
    turns = np.exp(1j * np.outer(steps, 1e5 ** (-np.arange(0, size, 2) / size)))[:, None]

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5)) * weights[name]

    def rotated(x, count):
        pairs = x.reshape(len(x), count, size // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turns
        return np.stack([turned.real, turned.imag], -1).reshape(len(x), count, size).astype("f4")

    x = weights["token_embd.weight"][tokens]
    for i in range(30):
        w = {
            key.split(".")[2]: value
            for key, value in weights.items()
            if key.startswith(f"blk.{i}.")
        }
        normed = norm(x, f"blk.{i}.attn_norm.weight")
        q = rotated(normed @ w["attn_q"].T, heads).reshape(len(x), kv_heads, -1, size)
        k = rotated(normed @ w["attn_k"].T, kv_heads)
        v = (normed @ w["attn_v"].T).reshape(len(x), kv_heads, size)
        scores = np.einsum("qgrh,kgh->grqk", q, k, optimize=True) / np.float32(np.sqrt(size))
        scores = np.where(steps[:, None] >= steps, scores, np.float32(-np.inf))
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        attended = np.einsum("grqk,kgh->qgrh", p, v, optimize=True).reshape(len(x), -1)
        x = x + attended @ w["attn_output"].T
        normed = norm(x, f"blk.{i}.ffn_norm.weight")
        gate = normed @ w["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ w["ffn_up"].T)) @ w["ffn_down"].T
    return norm(x, "output_norm.weight") @ weights["token_embd.weight"].T


def margins(model, prompt, count):
    """Margin of each greedy token in the reference logits; negative if it is not the largest."""
    groups = run(model, [prompt], count, Sampling(), 0, endless=True)
    tokens = np.concatenate([drawn.tokens for drawn in groups], axis=1)[0].tolist()
    assert len(tokens) == count
    rows = plain_logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    chosen = rows[np.arange(count), tokens]
    rows[np.arange(count), tokens] = -np.inf
    return chosen - rows.max(-1)


@functools.cache
def model():
    return load(smollm2(), dtype=jnp.float32, progress=False)


@pytest.mark.slow
def test_weights_match_the_file():
    checkpoint = read(smollm2(), dtype=jnp.float32, progress=False)
    places = files.weights_of(files.File(smollm2()), checkpoint.config)
    for name, weight in checkpoint.weights.items():
        same_bits(floats(weight), tensors()[places[name].name])


@pytest.mark.slow
@pytest.mark.parametrize("i", range(5 if THOROUGH else 1))
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_greedy_tokens_match_a_plain_program(kind, i):
    """Each token has the largest logit given the tokens before it."""
    tokenizer = model().tokenizer
    if kind == "chat":
        prompt = tokenizer.chat([{"role": "user", "content": QUESTIONS[i]}])
    else:
        prompt = tokenizer.encode(TEXT[5000 * i : 5000 * i + 300])
    found = margins(model(), prompt, 200 if THOROUGH else 32)
    print(f"the least margin is {found.min():.5f}")
    assert found.min() > 0


# Prints in bytes: peak memory added by loading, the packed weights, the largest float32 tensor.
LOADING = """
import sys
import jax

def memory(key):
    status = open("/proc/self/status").read()
    return int(status.split(f"{key}:")[1].split()[0]) * 1024

jax.devices()
before = memory("VmRSS")
from jaxlowbit import llm
from jaxlowbit._core.format import parse_format
format = parse_format(sys.argv[2]) if sys.argv[2:] else None
model = llm.load(sys.argv[1], format=format, progress=False)
tensors = model.report.tensors
largest = max(4 * tensor.shape[0] * tensor.shape[-1] for tensor in tensors)
print(memory("VmHWM") - before, model.report.nbytes, largest)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system tells no peak")
@pytest.mark.parametrize("format", [[], pytest.param(["int4-g128"], marks=pytest.mark.slow)])
def test_loading_needs_memory_for_the_weights_and_one_tensor(format):
    """Peak memory is at most the packed weights, the largest float32 tensor and 200 MB."""
    command = [sys.executable, "-c", LOADING, str(smollm2()), *format]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",  # weights must be in the memory of the process
        # Makes glibc return freed arrays; by default it retains up to 32 MB per arena.
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",  # running takes longer than compiling
    }
    printed = subprocess.check_output(command, env=environment, text=True)
    peak, packed, largest = map(int, printed.split())
    assert packed < peak < packed + largest + 200e6
