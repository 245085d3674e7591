"""`Tokenizer`: text to tokens and back, as a model file says.

Pre-tokenizers are those of llama.cpp (`llama-vocab.cpp`), by the names that GGUF files use.
"""

import codecs
import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from .folder import read_json
from .gguf import File, Metadata

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST,)
_QWEN2 = (_CONTRACTIONS + _WORDS + r"\p{N}" + _REST,)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Each expression cuts the pieces that those before it leave.
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
# A word that is a token itself is not merged from its parts, and texts begin with bos.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # of tokenizer.ggml.token_type
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
"""Tokens that end a turn or a text wherever they are control tokens, as in llama.cpp."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece writes spaces so


class Tokenizer:
    """Text to tokens and back, and conversations to tokens by the model's template.

    Made by `from_gguf` or `from_folder`. `vocabulary` is the number of tokens, `bos` the token that
    begins texts or None, `eos` those that end texts and turns.

    ```python
    tokens = tokenizer.encode("Water boils at")
    tokenizer.decode(tokens)
    ```
    """

    bos: int | None
    eos: tuple[int, ...]

    def __init__(
        self,
        engine: tokenizers.Tokenizer,
        *,
        pieces: Sequence[bytes | None],
        special: Iterable[int],
        bos: int | None,
        eos: Iterable[int],
        add_bos: bool,
        space_prefix: bool,
        template: str | None,
        named: Mapping[str, str],
    ):
        """`pieces` are the bytes of each token, None for one that stands for no text."""
        self.bos, self.eos = bos, tuple(dict.fromkeys(eos))
        self._engine, self._pieces, self._special = engine, pieces, frozenset(special)
        self._add_bos = add_bos and bos is not None
        self._space_prefix = space_prefix
        self._template, self._named = template, dict(named)

    @property
    def vocabulary(self) -> int:
        """The number of tokens. A model's table may have more rows, for none."""
        return len(self._pieces)

    def encode(self, text: str, *, bos: bool | None = None, special: bool = True) -> list[int]:
        """The tokens of a text.

        **Arguments:**

        - `text`: any string.
        - `bos`: whether the token that begins texts comes first; None for what the file says.
        - `special`: whether the names of control tokens, such as `<|im_end|>`, become these tokens.
          False reads them as text: for text that others wrote.

        **Raises:** `ValueError` for `bos=True` where the model has no such token, and for text with
        half of a surrogate pair, which is no character.
        """
        add = self._add_bos if bos is None else bos
        if add and self.bos is None:
            raise ValueError(
                "Tokenizer.encode: bos=True, but the model has no token that begins texts; leave "
                "it out."
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"Tokenizer.encode: the text is no Unicode ({error}); decode it with "
                "errors='replace'."
            ) from None
        self._engine.encode_special_tokens = not special
        tokens = self._engine.encode(text, add_special_tokens=False).ids
        return [self.bos, *tokens] if add and self.bos is not None else tokens

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD.

        A space that the tokenizer puts in front of texts is removed.

        **Arguments:** `special`: whether control tokens show their names, or nothing.

        **Raises:** `ValueError` for a token that the vocabulary has not.
        """
        text = b"".join(self._bytes(token, special) for token in tokens).decode(errors="replace")
        return text[1:] if self._space_prefix and text.startswith(" ") else text

    def decode_stream(self, *, special: bool = False) -> "DecodeStream":
        """An object that turns tokens to text one by one, for text that continues another.

        ```python
        stream = tokenizer.decode_stream()
        text = "".join(stream.push(token) for token in tokens) + stream.finish()
        ```
        """
        return DecodeStream(self, special)

    @property
    def has_chat(self) -> bool:
        """Whether the file has a template of conversations."""
        return self._template is not None

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a conversation, by the template in the file.

        The template runs in Jinja's sandbox. It writes the names of control tokens itself, that of
        `bos` too, so none is added; the same names in messages become tokens as well.

        **Arguments:**

        - `messages`: mappings with `"role"` (`"system"`, `"user"`, `"assistant"`) and `"content"`.
        - `add_generation_prompt`: whether the beginning of the assistant's answer follows.
        - `template_options`: variables for the template, by name, such as
          `{"enable_thinking": False}`.

        **Raises:** `TypeError` for options of another form; `ValueError` without a template, for
        messages of another form, for an option that would replace another variable of the
        template, and for errors in the template.

        ```python
        tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
        ```
        """
        text = self.chat_text(messages, add_generation_prompt, template_options=template_options)
        return self.encode(text, bos=False)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text whose tokens `chat` returns."""
        if self._template is None:
            raise ValueError(
                "Tokenizer.chat: the model file has no template of conversations; it is a model "
                "that continues text, so use encode."
            )
        for i, message in enumerate(messages):
            fits = isinstance(message, Mapping) and {"role", "content"} <= message.keys()
            if not fits:
                raise ValueError(
                    f"Tokenizer.chat: message {i} is {message!r}, but a message is a mapping with "
                    "'role' and 'content'."
                )
        options = {} if template_options is None else template_options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise TypeError(
                f"Tokenizer.chat: template_options is {options!r}, but it is a mapping from names "
                "of variables to their values, such as {'enable_thinking': False}, or None."
            )
        taken = {"messages", "add_generation_prompt", *self._named}
        if names := [name for name in options if name in taken]:
            raise ValueError(
                f"Tokenizer.chat: template_options has {names[0]!r}, but the template gets it from "
                "the other arguments or from the model file; remove it."
            )
        try:
            return _compiled(self._template).render(
                **{"tools": None, "documents": None, **options},
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._named,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"Tokenizer.chat: line {error.lineno} of the file's template is no Jinja "
                f"({error.message}); use encode, with the text of a turn as the model knows it."
            ) from None
        except Exception as error:  # a template may raise anything, such as of adding None
            raise ValueError(
                f"Tokenizer.chat: the file's template refuses these messages: {error}; change "
                "them, or use encode."
            ) from None

    def _bytes(self, token: int, special: bool) -> bytes:
        if not 0 <= token < len(self._pieces):
            raise ValueError(
                f"Tokenizer.decode: there is no token {token}; they are 0 to "
                f"{len(self._pieces) - 1}."
            )
        if token in self._special and not special:
            return b""
        return self._pieces[token] or b""

    # --- from files -------------------------------------------------------------------------------

    @classmethod
    def from_gguf(cls, file: File) -> "Tokenizer":
        """The tokenizer in the metadata of a GGUF file.

        Of `tokenizer.ggml.model`, `"gpt2"` (byte-level BPE) and `"llama"` (SentencePiece's BPE by
        scores, bytes for what it lacks) are read.

        **Raises:** `ValueError` for another model or pre-tokenizer, and for keys that are missing,
        of the wrong kind or length.
        """
        return _from_gguf(Metadata(file.path, file.metadata, "tokenizer."))

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder: tokenizer.json and tokenizer_config.json.

        **Raises:** `ValueError` for files that are missing or damaged, and for tokenizers that
        write neither bytes nor SentencePiece's spaces.
        """
        return _from_folder(folder)


class DecodeStream:
    """Turns tokens to text one by one, holding back bytes that end within a character."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False):
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that is complete with one more token, perhaps none."""
        return self._decoder.decode(self._tokenizer._bytes(token, self._special))

    def finish(self) -> str:
        """What was held back, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = to_json
    return environment.from_string(template)


@functools.cache
def _byte_of() -> dict[str, int]:
    """The byte that each character of byte-level tokens stands for (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    plain += range(ord("®"), ord("ÿ") + 1)
    others = [byte for byte in range(256) if byte not in plain]
    shifted = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted


def _of_characters(token: str) -> bytes:
    """The bytes of a byte-level token; of added ones, which are plain text, their own."""
    table = _byte_of()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode()


def _of_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE, " ").encode()


def _from_gguf(known: Metadata) -> Tokenizer:
    model = known.need("ggml.model", "a string")
    if model not in ("gpt2", "llama"):
        raise ValueError(
            f"{known.path}: 'tokenizer.ggml.model' is {model!r}, but 'gpt2' and 'llama' are read; "
            "use another model, or the folder of its Hugging Face release."
        )
    tokens = _strings(known, "ggml.tokens")
    kinds = known.get("ggml.token_type", "a list", [1] * len(tokens))
    if len(kinds) != len(tokens) or not all(type(kind) is int for kind in kinds):
        raise ValueError(
            f"{known.path}: 'tokenizer.ggml.token_type' has {len(kinds)} entries, but an integer "
            f"belongs to each of {len(tokens)} tokens; fetch the file again."
        )
    byte_level = model == "gpt2"
    engine, add_bos = _bpe(known, tokens) if byte_level else _sentencepiece(known, tokens, kinds)
    control = [i for i, kind in enumerate(kinds) if kind in (_CONTROL, _UNKNOWN)]
    added = {i for i, kind in enumerate(kinds) if kind == _USER_DEFINED}.union(control)
    engine.add_special_tokens(
        [tokenizers.AddedToken(tokens[i], normalized=False) for i in control if tokens[i]]
    )
    engine.add_tokens(
        [
            tokenizers.AddedToken(tokens[i], normalized=False)
            for i in sorted(added.difference(control))
            if tokens[i]
        ]
    )
    ids = {name: _token(known, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")}
    ends = [ids[name] for name in ("eos", "eot", "eom")]
    ends += [i for i in control if tokens[i] in _ENDS]

    def piece(i: int) -> bytes:
        if i in added:
            return tokens[i].replace(_SPACE, " ").encode()
        return _of_characters(tokens[i]) if byte_level else _of_sentencepiece(tokens[i])

    prefix = not byte_level and known.get("ggml.add_space_prefix", "true or false", True)
    names = {"bos_token": ids["bos"], "eos_token": ids["eos"]}
    return Tokenizer(
        engine,
        pieces=[piece(i) for i in range(len(tokens))],
        special=control,
        bos=ids["bos"],
        eos=[end for end in ends if end is not None],
        add_bos=known.get("ggml.add_bos_token", "true or false", add_bos),
        space_prefix=prefix,
        template=known.get("chat_template", "a string"),
        named={name: "" if i is None else tokens[i] for name, i in names.items()},
    )


def _bpe(known: Metadata, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    name = known.get("ggml.pre", "a string", "default")
    if name not in _SPLITS:
        raise ValueError(
            f"{known.path}: 'tokenizer.ggml.pre' is {name!r}, but {', '.join(_SPLITS)} are read; "
            "use another model, or the folder of its Hugging Face release."
        )
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
    whole = name in _WHOLE_WORDS
    engine = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    cuts: list[Any] = [
        pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
        for expression in _SPLITS[name]
    ]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    engine.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    if _SPLITS[name] is _QWEN2:
        engine.normalizer = normalizers.NFC()
    return engine, whole


def _sentencepiece(
    known: Metadata, tokens: list[str], kinds: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Merges two neighbours to the token of the highest score, again and again.

    BPE takes the first merge of a list instead, so the list is ordered by the scores.
    """
    scores = known.need("ggml.scores", "a list")
    if len(scores) != len(tokens) or not all(isinstance(score, float) for score in scores):
        raise ValueError(
            f"{known.path}: 'tokenizer.ggml.scores' has {len(scores)} entries, but a float belongs "
            f"to each of {len(tokens)} tokens; fetch the file again."
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
    unknown = next((tokens[i] for i, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    engine = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, _, left, right in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if known.get("ggml.add_space_prefix", "true or false", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
    engine.normalizer = normalizers.Sequence(steps)
    return engine, True


def _strings(known: Metadata, key: str) -> list[str]:
    found = known.need(key, "a list")
    if not found or not all(isinstance(item, str) for item in found):
        raise ValueError(
            f"{known.path}: 'tokenizer.{key}' holds {len(found)} entries, but it is a list of "
            "strings; fetch the file again."
        )
    return found


def _token(known: Metadata, name: str, count: int) -> int | None:
    key = f"ggml.{name}_token_id"
    token = known.get(key, "an integer")
    if token is not None and not 0 <= token < count:
        raise ValueError(
            f"{known.path}: 'tokenizer.{key}' is {token}, but tokens are 0 to {count - 1}; fetch "
            "the file again."
        )
    return token


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    description = read_json(path)
    options_path = folder / "tokenizer_config.json"
    options = read_json(options_path) if options_path.exists() else {}
    try:
        engine = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path} is no tokenizer ({error}); fetch the folder again.") from None
    decoder = json.dumps(description.get("decoder"), ensure_ascii=False)
    byte_level = '"ByteLevel"' in decoder
    if not byte_level and _SPACE not in decoder:
        raise ValueError(
            f"{path}: its decoder is {decoder[:60]}, but those of byte-level BPE and SentencePiece "
            "are read; use another model."
        )
    found = engine.get_added_tokens_decoder()
    added = {i: token.content.encode() for i, token in found.items()}
    count = engine.get_vocab_size(with_added_tokens=True)
    count = max([count, *(i + 1 for i in added)])
    bytes_of = _of_characters if byte_level else _of_sentencepiece
    names = [engine.id_to_token(i) for i in range(count)]
    pieces = [
        added.get(i, None if name is None else bytes_of(name)) for i, name in enumerate(names)
    ]
    special = [i for i, token in found.items() if token.special]
    named = {key: _name(options.get(key)) for key in ("bos_token", "eos_token")}
    bos, eos = (engine.token_to_id(name) if name else None for name in named.values())
    ends = [] if eos is None else [eos]
    ends += [i for i in special if added[i].decode() in _ENDS]
    first = engine.encode("").ids  # what the file's post-processor puts in front
    template = folder / "chat_template.jinja"
    return Tokenizer(
        engine,
        pieces=pieces,
        special=special,
        bos=bos,
        eos=ends,
        add_bos=bos is not None and first[:1] == [bos],
        space_prefix='"Strip"' in decoder or '"Metaspace"' in decoder,
        template=template.read_text() if template.exists() else _template(options),
        named=named,
    )


def _name(token: Any) -> str:
    """The text of a token, which files write as a string or an object."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else ""


def _template(options: Mapping[str, Any]) -> str | None:
    found = options.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {x.get("name"): x.get("template") for x in found if isinstance(x, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
