"""The tokenizer of a Hugging Face folder.

`tokenizer.json` defines the conversion from text to tokens. The other files add special tokens and
chat templates, by the rules of transformers (`PreTrainedTokenizerBase.from_pretrained`).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from ..checkpoint._files import read_json
from ..checkpoint._warn import warn_of_file
from .chat_template import TOKEN_NAMES, ChatTemplate
from .tokenizer_parts import SPACE, Parts, ends_by_name, of_characters, of_sentencepiece

USED = frozenset(
    [
        *TOKEN_NAMES,
        *("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"),
        *("added_tokens_decoder", "split_special_tokens", "clean_up_tokenization_spaces"),
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
        *("chat_template", "fast_tokenizer_files"),
    ]
)
"""Entries of tokenizer_config.json that are read, in addition to names that end in "_token"."""
HARMLESS = frozenset(
    [
        # defined by tokenizer.json, which takes precedence in transformers
        *("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "from_slow"),
        *("vocab", "vocab_file", "merges", "merges_file", "tokenizer_file", "tokenizer_object"),
        *("tokenizer_class", "backend", "sp_model_kwargs", "post_processor", "errors", "gguf_file"),
        *("unk_id", "bos_token_id", "eos_token_id", "pad_token_id", "fix_mistral_regex"),
        # padding and truncation of batches, on request of a caller
        *("model_max_length", "max_len", "max_length", "padding_side", "truncation_side"),
        *("truncation_strategy", "stride", "pad_to_multiple_of", "pad_token_type_id"),
        *("tokenizer_padding", "tokenizer_truncation", "model_input_names"),
        # notes of the program that wrote the file
        *("name_or_path", "processor_class", "auto_map", "files_loaded", "init_inputs", "verbose"),
        *("is_local", "local_files_only", "trust_remote_code", "use_default_system_prompt"),
        # reading of replies, and control tokens in messages, on request in transformers
        *("response_template", "response_schema", "chat_control_tokens"),
    ]
)
"""Entries of tokenizer_config.json without effect here; unknown ones have none in transformers."""


class _Special(NamedTuple):
    """Special tokens: `named` ones for templates, and `extra` ones without names."""

    named: dict[str, tokenizers.AddedToken]
    extra: list[tokenizers.AddedToken]


def parts_of(folder: Path) -> Parts:
    """Reads the tokenizer of a folder. **Raises:** as `Tokenizer.from_folder`."""
    path = folder / "tokenizer.json"
    description = read_json(path)
    options = _optional(folder / "tokenizer_config.json")
    _check(folder, options, description)
    try:
        engine = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more specific
        raise ValueError(f"{path} is no tokenizer ({error}); fetch the folder again.") from None
    if engine.padding is not None:
        options = {"pad_token": engine.padding["pad_token"], **options}
    engine.no_truncation()
    engine.no_padding()
    decoder = json.dumps(description.get("decoder"), ensure_ascii=False)
    byte_level = '"ByteLevel"' in decoder
    if not byte_level and SPACE not in decoder:
        raise ValueError(
            f"{path}: its decoder is {decoder[:60]}, but those of byte-level BPE and SentencePiece "
            "are read; use another model."
        )
    try:
        special = _add_tokens(engine, folder, options)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'} describes special tokens wrongly ({error}); fetch "
            "the folder again."
        ) from None
    named = {name: token.content for name, token in special.named.items()}
    added = engine.get_added_tokens_decoder()
    control = [i for i, token in added.items() if token.special]
    bos, eos = (engine.token_to_id(named[x]) if x in named else None for x in TOKEN_NAMES[:2])
    ends = [] if eos is None else [eos]
    ends += ends_by_name({token.content: i for i, token in added.items()}, control)
    return Parts(
        engine,
        pieces=_pieces(engine, added, byte_level),
        special=frozenset(control),
        bos=bos,
        eos=ends,
        split_special=options.get("split_special_tokens") is True,
        space_prefix=any(map(_strips, _decoders(description.get("decoder")))),
        chat=ChatTemplate(_templates(folder, options), named),
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _check(folder: Path, options: Mapping[str, Any], description: Mapping[str, Any]) -> None:
    path = folder / "tokenizer_config.json"
    others = options.get("fast_tokenizer_files")
    if isinstance(others, list) and set(others) - {"tokenizer.json"}:
        raise ValueError(
            f"{path}: fast_tokenizer_files is {others}, but only tokenizer.json is read; rename "
            "the file of the last version to tokenizer.json, and remove the entry."
        )
    model = description.get("model")
    bpe = isinstance(model, dict) and model.get("type") == "BPE"
    force = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    if options.get("clean_up_tokenization_spaces") is True and (
        not bpe or options.get(force) is True
    ):
        warn_of_file(
            f"{path}: clean_up_tokenization_spaces is true, but decoded text keeps the "
            "spaces in front of punctuation here."
        )


def _pieces(
    engine: tokenizers.Tokenizer, added: Mapping[int, tokenizers.AddedToken], byte_level: bool
) -> list[bytes | None]:
    """The bytes of each token. Token numbers may have gaps, which have no text."""
    count = max([engine.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
    bytes_of = of_characters if byte_level else of_sentencepiece
    found: list[bytes | None] = []
    for i in range(count):
        name = engine.id_to_token(i)
        if i in added:
            text = added[i].content
            found.append((text if byte_level else text.replace(SPACE, " ")).encode())
        else:
            found.append(None if name is None else bytes_of(name))
    return found


def _decoders(decoder: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(decoder, dict):
        yield decoder
        for inner in decoder.get("decoders") or ():
            yield from _decoders(inner)


def _strips(decoder: Mapping[str, Any]) -> bool:
    """Whether a decoder removes a leading space."""
    if decoder.get("type") == "Strip":
        return decoder.get("content") == " " and decoder.get("start", 0) > 0
    never = decoder.get("prepend_scheme") == "never" or decoder.get("add_prefix_space") is False
    return decoder.get("type") == "Metaspace" and not never


# --- special tokens -------------------------------------------------------------------------------


def _add_tokens(engine: tokenizers.Tokenizer, folder: Path, options: Mapping[str, Any]) -> _Special:
    """Adds the tokens that tokenizer.json lacks, from the other files; returns the special
    tokens."""
    listed = options.get("added_tokens_decoder")
    if listed is None:  # older folders have them in two other files
        options = {**options, **_optional(folder / "special_tokens_map.json")}
    special = _special(options)
    if listed is None:
        names = {token.content for token in (*special.named.values(), *special.extra)}
        numbers = _optional(folder / "added_tokens.json")
        listed = {
            i: {"content": name, "special": name in names, "normalized": name not in names}
            for name, i in numbers.items()
        }
    more = [_token(token) for _, token in sorted(listed.items(), key=lambda item: int(item[0]))]
    known = {repr(token) for token in engine.get_added_tokens_decoder().values()}
    engine.add_tokens([token for token in more if repr(token) not in known])
    names = {token.content for token in engine.get_added_tokens_decoder().values()}
    rest = (*special.named.values(), *special.extra)
    engine.add_tokens([token for token in rest if token.content not in names])
    return special


def _special(options: Mapping[str, Any]) -> _Special:
    extra = options.get("extra_special_tokens") or options.get("additional_special_tokens") or ()
    named = {
        name: value
        for name, value in options.items()
        if name in TOKEN_NAMES or (name.endswith("_token") and isinstance(value, str))
    }
    named |= options.get("model_specific_special_tokens") or {}
    if isinstance(extra, dict):
        named |= extra
        extra = ()
    return _Special(
        {name: _token(value) for name, value in named.items() if value is not None},
        [_token(value) for value in extra],
    )


def _token(value: Any) -> tokenizers.AddedToken:
    """A token, stored as its text or as an object."""
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=True)
    fields = {"special": True, **value}
    fields.pop("__type", None)
    return tokenizers.AddedToken(**fields)


# --- chat templates -------------------------------------------------------------------------------


def _templates(folder: Path, options: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name. Separate files take precedence over tokenizer_config.json."""
    paths = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (default := folder / "chat_template.jinja").exists():
        paths["default"] = default
    if paths:
        return {name: _text(path) for name, path in paths.items()}
    found = options.get("chat_template")
    if isinstance(found, list):
        found = {x.get("name"): x.get("template") for x in found if isinstance(x, dict)}
    named: dict[Any, Any] = found if isinstance(found, dict) else {"default": found}
    return {str(name): text for name, text in named.items() if isinstance(text, str)}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); fetch the folder again.") from None
