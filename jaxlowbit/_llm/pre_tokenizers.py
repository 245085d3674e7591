"""Pre-tokenizers of byte-level BPE, by the names of `tokenizer.ggml.pre` in GGUF files.

Names and flags come from llama.cpp (`llama-vocab.cpp`). This table has the expression of the
original `tokenizer.json` if llama.cpp only approximates it. Four names are missing because their
tokens are not byte-level: gemma4, granite-embed-multi-311m, sarvam-moe, whitespace.
"""

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LEAD = r"[^\r\n\p{L}\p{N}]?"  # one character that a word may begin with
_WORD = _LEAD + r"\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HAN = "\u4e00-\u9fa5"
_KANA = "\u3040-\u30ff"


def _first_of(*alternatives: str) -> str:
    return "|".join(alternatives)


def _by_case(digits: str, contraction: str = f"{_CONTRACTION}?") -> str:
    """Words that end where lower case turns into upper case."""
    return _first_of(
        f"{_LEAD}{_UPPER}*{_LOWER}+{contraction}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{contraction}",
        digits,
        _MARKS + r"[\r\n/]*",
        _SPACES,
    )


_LLAMA3 = _first_of(_CONTRACTION, _WORD, r"\p{N}{1,3}", _MARKS + r"[\r\n]*", _SPACES)
_QWEN2 = _first_of(_CONTRACTION, _WORD, r"\p{N}", _MARKS + r"[\r\n]*", _SPACES)
_QWEN35 = _first_of(
    _CONTRACTION,
    _LEAD + r"[\p{L}\p{M}]+",
    r"\p{N}",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    _SPACES,
)
_JAIS2 = _first_of(
    _CONTRACTION,
    _WORD,
    r"\p{N}{1,3}",
    _MARKS + r"[\r\n]*",
    r"\s*[\r\n]+",
    *(rf"\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4)),
    r"\s{1,2}(?!\S)",
    r"\s",
)
# Words with one ASCII mark in front, runs of letters and marks, and runs of punctuation.
_DEEPSEEK_WORDS = _first_of(
    r"[!-/:-@\[-`{-~][A-Za-z]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
)
_DEEPSEEK_REST = _first_of(_DEEPSEEK_WORDS, r" ?[\p{P}\p{S}]+[\r\n]*", _SPACES)
_DEEPSEEK_V3 = (r"\p{N}{1,3}", f"[{_HAN}{_KANA}]+", _DEEPSEEK_REST)
# Letters with case, except of the scripts and blocks that DeepSeek's list of ranges leaves out.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^"
    "\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c8f\u2cf2\u2d00-\u2d2f\ua790-\ua7ff"
    "\uab30-\uab6f\U00010500-\U00010bff\U00010d00-\U0001189f\U00011900-\U0001e8ff]]"
)
_DEEPSEEK_CJK = f"[{_HAN}\u0800-\u4e00\uac00-\ud7ff]+"
_KIMI_UPPER, _KIMI_LOWER = (f"[{x[1:-1]}&&[^\\p{{Han}}]]" for x in (_UPPER, _LOWER))
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"  # noqa: RUF001

_LLAMA3_NAMES = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
_TABLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    (
        "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe "
        "gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4",
        (_GPT2,),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        (r"\p{N}", _GPT2),
    ),
    (
        f"{_LLAMA3_NAMES} dbrx smaug-bpe glm4 chatglm-bpe",
        (_LLAMA3,),
    ),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 "
        "bailingmoe bailingmoe2 llada-moe",
        (_QWEN2,),
    ),
    ("qwen35", (_QWEN35,)),
    ("tekken", (_by_case(r"\p{N}", contraction=""),)),
    (
        "gpt-4o llama4 kanana2 talkie granite-embed-multi-97m minimax-m2",
        (_by_case(r"\p{N}{1,3}"),),
    ),
    ("tiny_aya cohere2moe", (r"\d{1,3}(?=(?:\d{3})*\b)", _by_case(r"\p{N}{1,3}"))),
    ("jais-2", (_JAIS2,)),
    (
        "minicpm5",
        (
            r"\p{N}{1,3}",
            _first_of(_CONTRACTION, _WORD, r"\p{N}+", _MARKS + r"[\r\n]*", _SPACES),
        ),
    ),
    ("seed-coder", (_first_of(_CONTRACTION, _WORD, r"\p{N}", _MARKS, _SPACES),)),
    ("ufakzeka", (_first_of(_WORD, r"\p{N}", _MARKS + r"[\r\n]*", _SPACES),)),
    ("laguna", (r"[^\n]+|\n+", _QWEN2)),
    (
        "exaone-moe",
        (
            _first_of(
                _CONTRACTION,
                _LEAD + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                r"\p{N}",
                _MARKS + r"[\r\n/]?",
                _SPACES,
            ),
        ),
    ),
    (
        "youtu",
        (
            _first_of(
                "[\uac00-\ud7a3\u3131-\u318e]+",
                "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
                "\ufe30-\ufe4f]+",
                "[\u3105-\u312f]+",
                f"[{_HAN}{_KANA}]+",
            ),
            _by_case(r"\p{N}"),
        ),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK_V3),
    (
        "spark2_5",
        (
            *_DEEPSEEK_V3[:2],
            _first_of(_DEEPSEEK_WORDS, r" ?[\p{P}\p{S}]+", r"[\r\n]", r"\s+(?!\S)|\s+"),
            r"\p{N}",
        ),
    ),
    (
        "deepseek-llm",
        (
            r"[\r\n]",
            rf"\s?{_CASED}+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        ),
    ),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    ("falcon", (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("poro-chat bloom gpt3-finnish", (_BLOOM,)),
    ("viking", (_BLOOM, r"\p{N}")),
    (
        "chameleon",
        (
            r"<sentinel:[0-9]+>",
            r"IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
    ),
    (
        "kimi-k2",
        (
            _first_of(
                r"\p{Han}+",
                f"{_LEAD}{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTION}?",
                f"{_LEAD}{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTION}?",
                r"\p{N}{1,3}",
                _MARKS + r"[\r\n]*",
                _SPACES,
            ),
        ),
    ),
    ("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    (
        "afmoe",
        (
            r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
            "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
            "\u0e40-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
            "\u1100-\u11ff]+",
            _DEEPSEEK_REST,
        ),
    ),
)

SPLITS = {name: splits for names, splits in _TABLE for name in names.split()}
"""Expressions by name. Each expression splits the pieces that the previous ones leave."""

WHOLE_WORDS = frozenset(
    [*_LLAMA3_NAMES.split(), "tekken", "minicpm5", "youtu", "granite-embed-multi-97m"]
)
"""Pre-tokenizers that do not merge a word from parts if the whole word is a token."""
BEGIN = frozenset([*_LLAMA3_NAMES.split(), "tekken", "chameleon"])
"""Pre-tokenizers whose texts begin with bos by default."""
COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen", "qwen35", "f2llmv2"})
"""Pre-tokenizers of Qwen, whose texts are in Unicode's normal form C."""
