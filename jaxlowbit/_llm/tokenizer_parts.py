"""`Parts`: a tokenizer as a file describes it, and the facts about tokens that files share."""

import functools
from collections.abc import Collection, Mapping
from typing import NamedTuple

import tokenizers

from .chat_template import ChatTemplate

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece writes spaces so

# Tokens that end a turn or a text, by name, as in llama.cpp (`llama-vocab.cpp`).
_ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> "
    "<turn|> <|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~["
)
# Gemma has this name for an HTML tag, so it ends a text only if it is a control token.
_CONTROL_END = "</s>"
# Tokens of code infilling: the ends of a text, then the others.
_FILL_ENDS = (
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> "
    "<reponame> <|file_sep|>"
)
_FILLS = (
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> "
    "<|code_prefix|> <|prefix|> <|fim_suffix|> <fim-suffix> <fim_suffix> "
    "<\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> <|code_suffix|> <|suffix|> <|fim_middle|> "
    "<fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> <|code_middle|> "
    "<|middle|>"
)
CONTROL_NAMES = frozenset(f"{_ENDS} {_FILL_ENDS} {_FILLS}".split())
"""Names that only control tokens have."""


class Parts(NamedTuple):
    """The parts of a `Tokenizer`.

    - `engine`: text to tokens. Its post-processor adds the tokens around a text.
    - `pieces`: the bytes of each token, None for a token without text.
    - `special`: the control tokens.
    - `bos`: the token that begins texts, or None; `eos`: the tokens that end texts and turns.
    - `split_special`: whether names of control tokens are text unless the caller says otherwise.
    - `space_prefix`: whether a space in front of a decoded text is removed.
    - `chat`: the chat templates.
    """

    engine: tokenizers.Tokenizer
    pieces: list[bytes | None]
    special: Collection[int]
    bos: int | None
    eos: list[int]
    split_special: bool
    space_prefix: bool
    chat: ChatTemplate


def ends_by_name(
    tokens: Mapping[str, int], control: Collection[int], *, fill: bool = False
) -> list[int]:
    """The tokens that end a turn or a text, by their names.

    **Arguments:**

    - `tokens`: tokens by name.
    - `control`: the control tokens.
    - `fill`: whether the tokens that end code infilling are among them.
    """
    names = set(f"{_ENDS} {_FILL_ENDS}".split() if fill else _ENDS.split())
    if tokens.get(_CONTROL_END) in control:
        names.add(_CONTROL_END)
    # Harmony and Solar Open end messages with <|end|>, and turns with other tokens.
    if tokens.keys() >= {"<|return|>", "<|call|>"} or tokens.keys() >= {"<|flush|>", "<|calls|>"}:
        names.remove("<|end|>")
    return sorted(tokens[name] for name in names.intersection(tokens))


def of_characters(token: str) -> bytes:
    """The bytes of a byte-level token; of an added token, which is plain text, its UTF-8."""
    table = _byte_of()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode()


def of_sentencepiece(token: str) -> bytes:
    """The bytes of a SentencePiece token, which is one byte or text."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE, " ").encode()


@functools.cache
def _byte_of() -> dict[str, int]:
    """The byte of each character of byte-level tokens (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    plain += range(ord("®"), ord("ÿ") + 1)
    others = [byte for byte in range(256) if byte not in plain]
    shifted = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted
