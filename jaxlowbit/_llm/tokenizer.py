"""`Tokenizer`: text to tokens and back, as defined by a model file."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from . import tokenizer_folder, tokenizer_gguf
from .gguf import File
from .pre_tokenizers import SPLITS as _SPLITS
from .tokenizer_parts import Parts


class Tokenizer:
    """Text to tokens and back, and conversations to tokens by the model's chat template.

    Made by `from_gguf` or `from_folder`. `vocabulary` is the number of tokens; `bos` the token that
    begins texts, or None; `eos` the tokens that end texts and turns; `leading` the tokens that
    `encode` puts before a text; `source` the GGUF file or the folder.

    ```python
    tokens = tokenizer.encode("Water boils at")
    tokenizer.decode(tokens)
    ```
    """

    bos: int | None
    eos: tuple[int, ...]
    leading: tuple[int, ...]
    source: Path | None

    def __init__(self, parts: Parts, source: Path | None = None):
        self.source = source
        self._engine, self._pieces = parts.engine, parts.pieces
        self._special = frozenset(parts.special)
        self._split_special, self._space_prefix = parts.split_special, parts.space_prefix
        self._chat = parts.chat
        self.eos = tuple(dict.fromkeys(parts.eos))
        probe = self._engine.encode("a")
        marked = zip(probe.ids, probe.special_tokens_mask, strict=True)
        self.leading = tuple(token for token, _ in takewhile(lambda item: item[1], marked))
        first = self.leading[0] if self.leading else None
        self.bos = first if parts.bos is None else parts.bos

    @property
    def vocabulary(self) -> int:
        """The number of tokens. A model's table may have more rows, or fewer."""
        return len(self._pieces)

    @property
    def control(self) -> frozenset[int]:
        """The control tokens."""
        return self._special

    def token_bytes(self) -> list[bytes]:
        """The bytes of each token; of control tokens the names, of others without text none."""
        return [piece or b"" for piece in self._pieces]

    def encode(
        self, text: str, *, bos: bool | None = None, special: bool | None = None
    ) -> list[int]:
        """The tokens of a text.

        **Arguments:**

        - `text`: any string.
        - `bos`: whether to add the tokens that begin and end texts. None: as the file defines.
          True: also `bos`, if the file puts no token before a text.
        - `special`: whether the names of control tokens, such as `<|im_end|>`, become these tokens.
          False encodes them as text, for text from other people. None is True, unless the file says
          otherwise.

        **Raises:** `ValueError` for `bos=True` if the model has no such token, and for text with an
        unpaired surrogate.
        """
        if bos and self.bos is None:
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
        self._engine.encode_special_tokens = self._split_special if special is None else not special
        tokens = self._encoded(text, bos is not False)
        return [self.bos, *tokens] if bos and not self.leading and self.bos is not None else tokens

    def _encoded(self, text: str, around: bool) -> list[int]:
        try:
            return self._engine.encode(text, add_special_tokens=around).ids
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # which is no `Exception`
                raise
            raise ValueError(
                f"Tokenizer.encode: a regular expression of {self.source or 'the tokenizer'} takes "
                f"too long for this text ({error}); shorten the text, or use another tokenizer."
            ) from None

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD.

        A space that the tokenizer puts before texts is removed. Tokens beyond the vocabulary, such
        as the padding rows of a model's table, have no text.

        **Arguments:** `special`: whether control tokens become their names, or nothing.

        **Raises:** `ValueError` for a negative token.
        """
        text = b"".join(self._bytes(token, special) for token in tokens).decode(errors="replace")
        return text[1:] if self._space_prefix and text.startswith(" ") else text

    def decode_stream(self, *, special: bool = False) -> "DecodeStream":
        """An object that converts tokens to text one by one, for text that continues another.

        ```python
        stream = tokenizer.decode_stream()
        text = "".join(stream.push(token) for token in tokens) + stream.finish()
        ```
        """
        return DecodeStream(self, special)

    @property
    def has_chat(self) -> bool:
        """Whether the file has a chat template."""
        return bool(self._chat.templates)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a conversation, rendered with the template in the file.

        The template runs in Jinja's sandbox. It writes the names of control tokens itself,
        including `bos`, so none is added. Names of control tokens in messages become tokens as
        well.

        **Arguments:**

        - `messages`: mappings with `"role"` (`"system"`, `"user"`, `"assistant"`, `"tool"`) and
          `"content"`, a text or a list of parts. Other entries, such as `"tool_calls"`, are passed
          to the template, unless they are None.
        - `add_generation_prompt`: whether to append the beginning of the assistant's answer.
        - `template_options`: variables for the template, by name, such as
          `{"enable_thinking": False}`. `"tools"` is a list of the JSON schemas of functions, and
          selects the template "tool_use" if the file has one; `"documents"` is a list of mappings.

        **Raises:** `TypeError` for options of another form; `ValueError` without a template, for
        messages of another form, for an option that would replace another variable of the template,
        and for errors in the template.

        ```python
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        tokenizer.chat(messages, template_options={"enable_thinking": False})
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
        return self._chat.render(messages, add_generation_prompt, template_options)

    def _bytes(self, token: int, special: bool) -> bytes:
        if token < 0:
            raise ValueError(f"Tokenizer.decode: there is no token {token}; they are 0 and above.")
        if token >= len(self._pieces) or (token in self._special and not special):
            return b""
        return self._pieces[token] or b""

    # --- from files -------------------------------------------------------------------------------

    @classmethod
    def from_gguf(cls, file: File) -> "Tokenizer":
        """The tokenizer in the metadata of a GGUF file.

        Two kinds of `tokenizer.ggml.model` are supported: `"gpt2"` (byte-level BPE, with the
        pre-tokenizers of llama.cpp) and `"llama"` (SentencePiece's BPE by scores, with bytes for
        unknown characters).

        **Raises:** `ValueError` for another model or pre-tokenizer, and for keys that are missing
        or have the wrong type or length.

        **Warns:** `UserWarning` for unknown keys, a missing pre-tokenizer, and tokens that are
        control tokens by their names but not by type.
        """
        return cls(tokenizer_gguf.parts_of(file, _SPLITS), file.path)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder, equal to transformers'.

        `tokenizer.json` defines the conversion, and the tokens around a text. Special tokens and
        chat templates are also read from `tokenizer_config.json`, `special_tokens_map.json`,
        `added_tokens.json`, `chat_template.jinja` and `additional_chat_templates/*.jinja`.

        **Raises:** `ValueError` for missing or damaged files, and for tokenizers with neither
        byte-level nor SentencePiece tokens.
        """
        return cls(tokenizer_folder.parts_of(folder), Path(folder))


class DecodeStream:
    """Converts tokens to text one by one, delaying the bytes of an incomplete character."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False):
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that is complete with one more token; may be empty."""
        return self._decoder.decode(self._tokenizer._bytes(token, self._special))

    def finish(self) -> str:
        """The delayed bytes, as U+FFFD."""
        return self._decoder.decode(b"", final=True)
