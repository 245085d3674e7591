"""Metadata of a GGUF file for a model from a Hugging Face folder: its configuration and tokenizer.

The keys are from llama.cpp's `convert_hf_to_gguf.py`. `check` reads them again: fields and
texts that would differ raise an error, so that this module writes only usual keys.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Regex, pre_tokenizers

from ..checkpoint._files import read_json
from . import gguf as reader
from .architectures import ARCHITECTURES, Gguf
from .config import Config
from .gguf_file import File
from .pre_tokenizers import COMPOSED, SPLITS, WHOLE_WORDS
from .tokenizer import Tokenizer
from .tokenizer_parts import SPACE

_PROBE = (
    "Hello, world! I'm it's WE'LL they've 1234567 3.14 a1b22c  two   spaces\n\n\ttab\r\nnaïve Ünï"
    "code 中文字符 日本語 한국어 привет 🙂🚀 foo_bar->baz(){x[0]+=1;} http://a.b/c?d=e&f ... --- "
    "'' \"q\"  leading and trailing  "
)


def names_of(config: Config) -> Gguf:
    """The names of the files for an architecture.

    **Raises:** `ValueError` if GGUF has none.
    """
    names = ARCHITECTURES[config.architecture].gguf
    if names is None and config.architecture == "mistral" and config.window is None:
        names = ARCHITECTURES["llama"].gguf
    if names is None:
        raise ValueError(f"export: GGUF has no files of {config.architecture} with a window.")
    return names


# --- the configuration ----------------------------------------------------------------------------


def factors_of(config: Config) -> np.ndarray | None:
    """The tensor rope_freqs, of rotations that no keys describe."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind not in ("llama3", "factors"):
        return None
    if scaling.kind == "factors":
        return np.array(scaling.factors, np.float32)
    plain = config.replace(rope_scaling=None).rope_frequencies()
    return (np.asarray(plain) / np.asarray(config.rope_frequencies())).astype(np.float32)


def add_configuration(writer: gguf.GGUFWriter, config: Config, names: Gguf) -> None:
    """Writes the keys of a configuration.

    **Raises:** `ValueError` for an architecture whose layers have heads of several sizes.
    """
    if "attention.key_length_swa" in names.reads:
        raise ValueError(
            f"export: the metadata of {config.architecture} is not written from a Hugging Face "
            "folder; convert that by llama.cpp's convert_hf_to_gguf.py, load the file and export "
            "it, or export compressed-tensors."
        )
    rotated = config.head_size if config.rope_size is None else config.rope_size
    integers: dict[str, int | None] = {
        "block_count": config.layers,
        "context_length": config.context,
        "embedding_length": config.width,
        "feed_forward_length": config.hidden,
        "vocab_size": config.vocabulary,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_size,
        "attention.value_length": config.head_size,
        "attention.sliding_window": config.window,
        "rope.dimension_count": rotated,
    }
    floats: dict[str, float | None] = {
        "attention.layer_norm_rms_epsilon": config.norm_epsilon,
        "rope.freq_base": config.rope_base,
        "final_logit_softcapping": config.logit_softcap,
    }
    options = {
        "attn_logit_softcapping": config.attention_softcap,
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": 1 / config.logit_scale,
    }
    floats |= {key: value for key, value in options.items() if key in names.reads}
    if "residual_scale" in names.reads:  # Granite's
        floats["attention.scale"] = config.attention_scale
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind in ("linear", "yarn"):
        writer.add_string(f"{names.name}.rope.scaling.type", scaling.kind)
        floats["rope.scaling.factor"] = scaling.factor
        if scaling.kind == "yarn":
            integers["rope.scaling.original_context_length"] = scaling.original_context
            floats |= {
                "rope.scaling.yarn_beta_fast": scaling.beta_fast,
                "rope.scaling.yarn_beta_slow": scaling.beta_slow,
                "rope.scaling.yarn_log_multiplier": scaling.mscale_all_dim,
            }
    for key, number in integers.items():
        if number is not None:
            writer.add_uint32(f"{names.name}.{key}", number)
    for key, value in floats.items():
        if value is not None:
            writer.add_float32(f"{names.name}.{key}", value)


# --- the tokenizer --------------------------------------------------------------------------------

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def add_tokenizer(
    writer: gguf.GGUFWriter, folder: Path, tokenizer: Tokenizer, config: Config
) -> None:
    """Writes the tokenizer of a folder.

    **Raises:** `ValueError` for one that is not BPE, and a pre-tokenizer that llama.cpp lacks.
    """
    path = folder / "tokenizer.json"
    model = read_json(path).get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise ValueError(f"export: {path} is not of the type BPE, which GGUF files store.")
    engine = tokenizer._engine
    byte_level = not model.get("byte_fallback")
    added = engine.get_added_tokens_decoder()
    if len(tokenizer.token_bytes()) > config.vocabulary:
        raise ValueError(
            f"export: {path} has {len(tokenizer.token_bytes())} tokens, but the embedding has "
            f"{config.vocabulary} rows."
        )
    tokens, kinds = [], []
    for i in range(config.vocabulary):
        name = engine.id_to_token(i)
        tokens.append(f"[PAD{i}]" if name is None else name)
        kinds.append(_kind(i, name, added, model, byte_level))
    merges = [x if isinstance(x, str) else " ".join(x) for x in model.get("merges", ())]
    writer.add_tokenizer_model("gpt2" if byte_level else "llama")
    if byte_level:
        writer.add_tokenizer_pre(_pre_tokenizer(path, engine, model))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if byte_level:
        writer.add_token_merges(merges)
    else:
        ranks = {x.replace(" ", "", 1): -float(i) for i, x in reversed([*enumerate(merges)])}
        writer.add_token_scores([ranks.get(token, -1e6) for token in tokens])
        writer.add_add_space_prefix(engine.encode("a").tokens[-1].startswith(SPACE))
    _add_ends(writer, tokenizer, config)
    for name, template in tokenizer._chat.templates.items():
        key = "tokenizer.chat_template" + ("" if name == "default" else f".{name}")
        writer.add_string(key, template)


def _kind(
    i: int, name: str | None, added: Mapping[int, Any], model: Mapping[str, Any], byte_level: bool
) -> int:
    """The value of tokenizer.ggml.token_type of a token."""
    if name is None:
        return _UNUSED
    if not byte_level and name == model.get("unk_token"):
        return _UNKNOWN
    if i in added:
        return _CONTROL if added[i].special else _USER_DEFINED
    byte = not byte_level and len(name) == 6 and name.startswith("<0x")
    return _BYTE if byte else _NORMAL


def _add_ends(writer: gguf.GGUFWriter, tokenizer: Tokenizer, config: Config) -> None:
    """Writes the tokens that begin and end texts."""
    probe = tokenizer._engine.encode("a")
    ending = probe.special_tokens_mask[-1] == 1
    if tokenizer.bos is not None:
        writer.add_bos_token_id(tokenizer.bos)
    ends = [*tokenizer.eos, *config.eos]
    if ends:
        writer.add_eos_token_id(ends[0])
    writer.add_add_bos_token(len(tokenizer.leading) > 0)
    writer.add_add_eos_token(ending)


def _pre_tokenizer(path: Path, engine: Any, model: Mapping[str, Any]) -> str:
    """The name of a pre-tokenizer of llama.cpp that cuts texts as this one does."""
    expected = engine.pre_tokenizer.pre_tokenize_str(_PROBE) if engine.pre_tokenizer else None
    composed = '"NFC"' in json.dumps(read_json(path).get("normalizer"))
    whole = bool(model.get("ignore_merges"))
    for name in sorted(SPLITS, key=lambda name: (name in COMPOSED) != composed):
        if (name in WHOLE_WORDS) != whole:
            continue
        cuts: list[Any] = [pre_tokenizers.Split(Regex(x), "isolated") for x in SPLITS[name]]
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        if pre_tokenizers.Sequence(cuts).pre_tokenize_str(_PROBE) == expected:
            return name
    raise ValueError(f"export: {path} cuts texts as no pre-tokenizer of llama.cpp does.")


# --- the check ------------------------------------------------------------------------------------


def check(path: Path, config: Config, tokenizer: Tokenizer | None) -> None:
    """Raises if the reader finds another configuration or other tokens in a file.

    **Raises:** `ValueError` with the field or the text.
    """
    file = File(path)
    found = reader.config_of(file)
    for name, own, other in _differences(config, found):
        raise ValueError(
            f"export: GGUF files of {found.architecture} cannot store {name}={own!r}; a reader "
            f"would take {other!r}."
        )
    if tokenizer is None:
        return
    again = Tokenizer.from_gguf(file)
    control = [tokenizer.decode([i], special=True) for i in sorted(tokenizer.control)[:4]]
    for text in (_PROBE, *_PROBE.split(), f"a{''.join(control)}b", "", " a"):
        if again.encode(text) != tokenizer.encode(text):
            raise ValueError(
                f"export: the tokenizer cannot be stored in GGUF: {text[:40]!r} would become "
                "other tokens."
            )


def _differences(config: Config, found: Config) -> Iterator[tuple[str, Any, Any]]:
    """Fields with another value in a file, except those about names and order."""
    for local in (False, True):
        own, other = (np.asarray(x.rope_frequencies(local=local)) for x in (config, found))
        if own.shape != other.shape or not np.allclose(own, other, rtol=1e-5, atol=0):
            yield "rope_scaling", config.rope_scaling, found.rope_scaling
    skipped = ("architecture", "rope_pairs", "rope_scaling", "bos", "eos", "local_rope_base")
    for field in dataclasses.fields(Config):
        own, other = getattr(config, field.name), getattr(found, field.name)
        if field.name == "attention_scale":
            own, other = (x.attention_scale or x.head_size**-0.5 for x in (config, found))
        numbers = isinstance(own, float) and isinstance(other, float)
        same = math.isclose(own, other, rel_tol=1e-6) if numbers else own == other
        if field.name not in skipped and not same:
            yield field.name, own, other
    amplitudes = [
        1.0 if x.rope_scaling is None else x.rope_scaling.amplitude for x in (config, found)
    ]
    if not math.isclose(*amplitudes, rel_tol=1e-6):
        yield "rope_scaling", config.rope_scaling, found.rope_scaling
