"""The tokenizer in the metadata of a GGUF file."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from ..checkpoint._warn import warn_of_file
from .chat_template import ChatTemplate
from .gguf import File, Metadata
from .pre_tokenizers import BEGIN, COMPOSED, WHOLE_WORDS
from .tokenizer_parts import (
    CONTROL_NAMES,
    SPACE,
    Parts,
    ends_by_name,
    of_characters,
    of_sentencepiece,
)

# The values of tokenizer.ggml.token_type. Tokens of other types have no text.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

_TEMPLATE_TOKENS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "seperator": "sep_token",  # the spelling of the key in files
    "padding": "pad_token",
    "cls": "cls_token",
    "mask": "mask_token",
}
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

USED = frozenset(
    [
        *(f"ggml.{name}_token_id" for name in {*_TEMPLATE_TOKENS, *_ENDS}),
        *("ggml.model", "ggml.pre", "ggml.tokens", "ggml.token_type", "ggml.scores", "ggml.merges"),
        *("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix"),
        *("chat_template", "chat_templates"),
    ]
)
"""Keys after "tokenizer." that are read. So are all keys that begin with "chat_template."."""
HARMLESS = frozenset(
    [
        # Infilling is a matter of prompts.
        *("ggml.fim_pre_token_id", "ggml.fim_suf_token_id", "ggml.fim_mid_token_id"),
        *("ggml.prefix_token_id", "ggml.suffix_token_id", "ggml.middle_token_id"),
        # llama.cpp uses these only for the tokenizers "bert" and "t5".
        *("ggml.token_type_count", "ggml.add_sep_token", "ggml.remove_extra_whitespaces"),
        *("ggml.precompiled_charsmap", "ggml.normalizer.lowercase"),
        "ggml.normalizer.strip_accents",
        # Another form of this tokenizer.
        "huggingface.json",
    ]
)
"""Keys after "tokenizer." that change nothing for the tokenizers that are read."""
RAISING = frozenset(["rwkv.world"])
"""Keys after "tokenizer." of tokenizers that are not read."""


class _Engine(NamedTuple):
    """An engine, with the defaults of its kind for keys that a file may omit."""

    engine: tokenizers.Tokenizer
    begin: bool
    space_prefix: bool
    defaults: Mapping[str, int]


def parts_of(file: File, splits: Mapping[str, tuple[str, ...]]) -> Parts:
    """Reads the tokenizer of a file.

    **Arguments:** `splits`: the expressions of each pre-tokenizer.

    **Raises:** as `Tokenizer.from_gguf`.
    """
    known = Metadata(file.path, file.metadata, "tokenizer.")
    _check_keys(known)
    model = known.need("ggml.model", "a string")
    if model not in ("gpt2", "llama", "gemma4"):
        raise ValueError(
            f"{known.path}: 'tokenizer.ggml.model' is {model!r}, but 'gpt2', 'llama' and 'gemma4' "
            "are read; use another model, or the folder of its Hugging Face release."
        )
    tokens = _strings(known, "ggml.tokens")
    kinds = _kinds(known, tokens)
    byte_level = model == "gpt2"
    if byte_level:
        made = _bpe(known, tokens, splits)
    else:
        make = _sentencepiece if model == "llama" else _gemma4
        made = make(known, tokens, kinds)
    control = {i for i, kind in enumerate(kinds) if kind in (_CONTROL, _UNKNOWN)}
    added = {i for i, kind in enumerate(kinds) if kind == _USER_DEFINED}.union(control)
    strip = any(name in str(file.metadata.get("general.name")).lower() for name in _PHI3)
    _add_tokens(made.engine, tokens, added, control, strip)
    ids = {
        name: _token(known, name, len(tokens), made.defaults.get(name))
        for name in (*_TEMPLATE_TOKENS, *_ENDS)
    }
    ends = [ids[name] for name in _ENDS]
    vocabulary = {token: i for i, token in reversed(list(enumerate(tokens)))}
    ends += ends_by_name(vocabulary, control, fill=True)
    _add_around(known, made, tokens, ids)
    named = {name: ids[key] for key, name in _TEMPLATE_TOKENS.items()}

    def piece(i: int) -> bytes | None:
        if i in added:
            return (tokens[i] if byte_level else tokens[i].replace(SPACE, " ")).encode()
        if kinds[i] not in (_NORMAL, _BYTE):
            return None
        byte = not byte_level or kinds[i] == _BYTE
        return of_sentencepiece(tokens[i]) if byte else of_characters(tokens[i])

    return Parts(
        made.engine,
        pieces=[piece(i) for i in range(len(tokens))],
        special=control,
        bos=ids["bos"],
        eos=[end for end in ends if end is not None],
        split_special=False,
        space_prefix=made.space_prefix,
        chat=ChatTemplate(
            dict(_templates(known)),
            {name: tokens[i] for name, i in named.items() if i is not None},
        ),
    )


_PHI3 = ("phi-3", "phi3")  # the control tokens of these models take the spaces behind them


def _add_tokens(
    engine: tokenizers.Tokenizer, tokens: list[str], added: set[int], control: set[int], strip: bool
) -> None:
    """Adds tokens that are found in texts before any other, as control tokens or not.

    `strip`: whether control tokens take the spaces behind them.
    """
    engine.add_tokens(
        [
            tokenizers.AddedToken(
                tokens[i],
                normalized=False,
                special=i in control,
                rstrip=strip and tokens[i] not in ("<unk>", "<s>", "<|endoftext|>"),
            )
            for i in sorted(added)
            if tokens[i]
        ]
    )


def _check_keys(known: Metadata) -> None:
    keys = [key for key in known.values if key.startswith(known.prefix)]
    unknown = []
    for key in keys:
        name = key.removeprefix(known.prefix)
        if name in RAISING:
            raise ValueError(
                f"{known.path}: {key!r} describes a tokenizer that is not read here; use another "
                "model, or the folder of its Hugging Face release."
            )
        if name not in USED | HARMLESS and not name.startswith("chat_template."):
            unknown.append(key)
    if unknown:
        _warn(known, f"{', '.join(map(repr, unknown))} is not known here, and changes nothing")


def _warn(known: Metadata, sentence: str) -> None:
    warn_of_file(f"{known.path}: {sentence}.")


def _kinds(known: Metadata, tokens: list[str]) -> list[int]:
    """The type of each token. A name that only control tokens have decides first."""
    kinds = known.get("ggml.token_type", "a list", [_NORMAL] * len(tokens))
    if len(kinds) < len(tokens) or not all(type(kind) is int for kind in kinds):
        raise ValueError(
            f"{known.path}: 'tokenizer.ggml.token_type' has {len(kinds)} entries, but an integer "
            f"belongs to each of {len(tokens)} tokens; fetch the file again."
        )
    kinds = list(kinds[: len(tokens)])
    wrong = [i for i, token in enumerate(tokens) if token in CONTROL_NAMES and kinds[i] != _CONTROL]
    for i in wrong:
        kinds[i] = _CONTROL
    if wrong:
        names = ", ".join(repr(tokens[i]) for i in wrong)
        _warn(known, f"the file gives {names} another type, but by name these are control tokens")
    return kinds


def _add_around(
    known: Metadata, made: _Engine, tokens: list[str], ids: Mapping[str, int | None]
) -> None:
    """Makes the engine add the tokens in front of a text and behind it."""
    around = []
    for name, default in (("bos", made.begin), ("eos", False)):
        asked = known.get(f"ggml.add_{name}_token", "true or false")
        token = ids[name]
        if asked and token is None:
            raise ValueError(
                f"{known.path}: 'tokenizer.ggml.add_{name}_token' is true, but the file has no "
                f"'tokenizer.ggml.{name}_token_id'; convert the model again."
            )
        if token is not None and (default if asked is None else asked):
            around.append({"id": name, "ids": [token], "tokens": [tokens[token]]})
    names = [item["id"] for item in around]
    single = [*(x for x in names if x == "bos"), "$A", *(x for x in names if x == "eos")]
    made.engine.post_processor = processors.TemplateProcessing(single, None, around)


def _templates(known: Metadata) -> Iterator[tuple[str, str]]:
    default = known.get("chat_template", "a string")
    if default is not None:
        yield "default", default
    prefix = "chat_template."
    for key in known.values:
        if key.startswith(known.prefix + prefix):
            name = key.removeprefix(known.prefix + prefix)
            yield name, known.need(prefix + name, "a string")


def _bpe(known: Metadata, tokens: list[str], splits: Mapping[str, tuple[str, ...]]) -> _Engine:
    name = known.get("ggml.pre", "a string")
    if name is None:
        _warn(
            known,
            "'tokenizer.ggml.pre' is missing, so that texts may be cut into other tokens than in "
            "training; convert the model again with a recent llama.cpp",
        )
        name = "default"
    if name not in splits:
        raise ValueError(
            f"{known.path}: 'tokenizer.ggml.pre' is {name!r}, but no pre-tokenizer of byte-level "
            "BPE has this name here; use another model, or the folder of its Hugging Face release."
        )
    vocabulary, merges = _merges(known, tokens)
    whole = name in WHOLE_WORDS
    engine = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    cuts: list[Any] = [
        pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
        for expression in splits[name]
    ]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    engine.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    steps: list[Any] = [normalizers.NFC()] if name in COMPOSED else []
    prefix = known.get("ggml.add_space_prefix", "true or false", False)
    if prefix:  # a space, unless the text begins with one
        again = normalizers.Replace(tokenizers.Regex(r"\A (?= )"), "")
        steps += [normalizers.Prepend(" "), again]
    engine.normalizer = normalizers.Sequence(steps)
    return _Engine(engine, name in BEGIN, prefix, {})


def _merges(known: Metadata, tokens: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary, and the pairs of tokens that BPE merges, the first first."""
    merges = [
        (merge.partition(" ")[0], merge.partition(" ")[2])
        for merge in _strings(known, "ggml.merges")
    ]
    vocabulary = {token: i for i, token in reversed(list(enumerate(tokens)))}
    for merge in merges:
        if not all(token in vocabulary for token in (*merge, "".join(merge))):
            raise ValueError(
                f"{known.path}: 'tokenizer.ggml.merges' has {' '.join(merge)!r}, but a merge is of "
                "two tokens to a third, with a space between; fetch the file again."
            )
    return vocabulary, merges


def _gemma4(known: Metadata, tokens: list[str], kinds: list[int]) -> _Engine:
    """Merges the characters of a line, with spaces as SentencePiece writes them, by a list of
    merges; other characters become tokens of their bytes."""
    vocabulary, merges = _merges(known, tokens)
    engine = _of_characters(vocabulary, merges, tokens, kinds)
    engine.normalizer = normalizers.Replace(" ", SPACE)
    lines = tokenizers.Regex(r"[^\n]+|\n+")
    engine.pre_tokenizer = pre_tokenizers.Split(lines, "isolated")
    return _Engine(engine, True, False, {})


def _of_characters(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], tokens: list[str], kinds: list[int]
) -> tokenizers.Tokenizer:
    unknown = next((tokens[i] for i, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    return tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )


def _sentencepiece(known: Metadata, tokens: list[str], kinds: list[int]) -> _Engine:
    """Merges two neighbours to the token of the highest score, again and again.

    BPE takes the first merge of a list instead, so the list is ordered by the scores.
    """
    scores = known.need("ggml.scores", "a list")
    if len(scores) < len(tokens) or not all(isinstance(score, float | int) for score in scores):
        raise ValueError(
            f"{known.path}: 'tokenizer.ggml.scores' has {len(scores)} entries, but a number "
            f"belongs to each of {len(tokens)} tokens; fetch the file again."
        )
    vocabulary = {token: i for i, token in reversed(list(enumerate(tokens)))}
    plain = {t: scores[i] for t, i in vocabulary.items() if kinds[i] not in (_CONTROL, _BYTE)}
    merges = [
        (-score, i, token[:i], token[i:])
        for token, score in plain.items()
        for i in range(1, len(token))
        if token[:i] in plain and token[i:] in plain
    ]
    merges.sort(key=lambda merge: merge[0])
    pairs = [(left, right) for _, _, left, right in merges]
    engine = _of_characters(vocabulary, pairs, tokens, kinds)
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    prefix = known.get("ggml.add_space_prefix", "true or false", True)
    if prefix:
        steps.insert(0, normalizers.Prepend(SPACE))
    engine.normalizer = normalizers.Sequence(steps)
    return _Engine(engine, True, prefix, {"bos": 1, "eos": 2, "unknown": 0})


def _strings(known: Metadata, key: str) -> list[str]:
    found = known.need(key, "a list")
    if not found or not all(isinstance(item, str) for item in found):
        raise ValueError(
            f"{known.path}: 'tokenizer.{key}' has {len(found)} entries, but it must be a list of "
            "strings; fetch the file again."
        )
    return found


def _token(known: Metadata, name: str, count: int, default: int | None) -> int | None:
    """The token of a key. A token that begins or ends texts has to be in the vocabulary."""
    key = f"ggml.{name}_token_id"
    token = known.get(key, "an integer", default if default in range(count) else None)
    if token is None or 0 <= token < count:
        return token
    if name in ("bos", "eos", "eot", "eom"):
        raise ValueError(
            f"{known.path}: 'tokenizer.{key}' is {token}, but tokens are 0 to {count - 1}; fetch "
            "the file again."
        )
    _warn(known, f"'tokenizer.{key}' is {token}, but tokens are 0 to {count - 1}; it is ignored")
    return None
