"""Pre-tokenizers: names, flags and expressions of llama.cpp's table, by their splits of a text."""

import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from tokenizers import Regex, pre_tokenizers

from jaxlowbit._llm.pre_tokenizers import BEGIN, COMPOSED, SPLITS, WHOLE_WORDS

# Contractions, cases, digits, combining marks, scripts, punctuation, spaces and line ends.
TEXT = (
    "HelloWORLD  we'Re don't o'sab x1234567 =.5/;\n\n  e\u0301\u0928\u092e "
    "\u10d0\u6f22\u5b57\u304b\ud55c :-a       z  \nq"
)
# The splits were checked against the expressions of llama.cpp, or of the original tokenizer.json,
# with the package regex, on this and 4000 random texts.
CUTS = [
    (
        "default",
        (
            "HelloWORLD| | we|'|Re| don|'|t| o|'|sab| x|123|456|7| |=.|5|/;|\n\n | e|\u0301"
            "|\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| |:-|a|      | z|  |\n|q"
        ),
    ),
    (
        (
            "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code "
            "roberta-bpe gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion "
            "granite-docling exaone4"
        ),
        (
            "HelloWORLD| | we|'|Re| don|'t| o|'s|ab| x|1234567| =.|5|/;|\n\n | e|\u0301"
            "|\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  |\n|q"
        ),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        (
            "HelloWORLD| | we|'|Re| don|'t| o|'s|ab| x|1|2|3|4|5|6|7| =.|5|/;|\n\n | e|\u0301"
            "|\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  |\n|q"
        ),
    ),
    (
        (
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano "
            "dbrx smaug-bpe glm4 chatglm-bpe"
        ),
        (
            "HelloWORLD| | we|'Re| don|'t| o|'s|ab| x|123|456|7| =.|5|/;\n\n| | e"
            "|\u0301\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  \n|q"
        ),
    ),
    (
        (
            "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 "
            "bailingmoe bailingmoe2 llada-moe"
        ),
        (
            "HelloWORLD| | we|'Re| don|'t| o|'s|ab| x|1|2|3|4|5|6|7| =.|5|/;\n\n| | e"
            "|\u0301\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  \n|q"
        ),
    ),
    (
        "qwen35",
        (
            "HelloWORLD| | we|'Re| don|'t| o|'s|ab| x|1|2|3|4|5|6|7| =.|5|/;\n\n| "
            "| e\u0301\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  \n|q"
        ),
    ),
    (
        "tekken",
        (
            "Hello|WORLD| | we|'Re| don|'t| o|'sab| x|1|2|3|4|5|6|7| =.|5|/;\n\n| "
            "| e\u0301\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  \n|q"
        ),
    ),
    (
        "gpt-4o llama4 kanana2 talkie granite-embed-multi-97m minimax-m2",
        (
            "Hello|WORLD| | we'Re| don't| o's|ab| x|123|456|7| =.|5|/;\n\n| "
            "| e\u0301\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  \n|q"
        ),
    ),
    (
        "tiny_aya cohere2moe",
        (
            "Hello|WORLD| | we'Re| don't| o's|ab| x|1|234|567| =.|5|/;\n\n| "
            "| e\u0301\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  \n|q"
        ),
    ),
    (
        "jais-2",
        (
            "HelloWORLD| | we|'Re| don|'t| o|'s|ab| x|123|456|7| =.|5|/;\n\n| | e"
            "|\u0301\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| :-|a|    |  | z|  \n|q"
        ),
    ),
    (
        "minicpm5",
        (
            "HelloWORLD| | we|'Re| don|'t| o|'s|ab| x|123|456|7| =.|5|/;\n\n| | e"
            "|\u0301\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  \n|q"
        ),
    ),
    (
        "seed-coder",
        (
            "HelloWORLD| | we|'Re| don|'t| o|'s|ab| x|1|2|3|4|5|6|7| =.|5|/;|\n\n| | e"
            "|\u0301\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  \n|q"
        ),
    ),
    (
        "ufakzeka",
        (
            "HelloWORLD| | we|'Re| don|'t| o|'sab| x|1|2|3|4|5|6|7| =.|5|/;\n\n| | e"
            "|\u0301\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  \n|q"
        ),
    ),
    (
        "laguna",
        (
            "HelloWORLD| | we|'Re| don|'t| o|'s|ab| x|1|2|3|4|5|6|7| =.|5|/;|\n\n| | e"
            "|\u0301\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  |\n|q"
        ),
    ),
    (
        "exaone-moe",
        (
            "HelloWORLD| | we|'Re| don|'t| o|'s|ab x|1|2|3|4|5|6|7| =.|5|/;\n|\n| "
            "| e\u0301\u0928\u092e \u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  \n|q"
        ),
    ),
    (
        "youtu",
        (
            "Hello|WORLD| | we'Re| don't| o's|ab| x|1|2|3|4|5|6|7| =.|5|/;\n\n| "
            "| e\u0301\u0928\u092e| \u10d0|\u6f22\u5b57\u304b|\ud55c| :-|a|      | z|  \n|q"
        ),
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        (
            "HelloWORLD| | we|'Re| don|'t| o|'sab| x|123|456|7| =.|5|/;\n\n| "
            "| e\u0301\u0928\u092e| \u10d0|\u6f22\u5b57\u304b|\ud55c| :-|a|      | z|  \n|q"
        ),
    ),
    (
        "spark2_5",
        (
            "HelloWORLD| | we|'Re| don|'t| o|'sab| x|1|2|3|4|5|6|7| =.|5|/;|\n|\n| "
            "| e\u0301\u0928\u092e| \u10d0|\u6f22\u5b57\u304b|\ud55c| :-|a|      | z|  |\n|q"
        ),
    ),
    (
        "deepseek-llm",
        (
            "HelloWORLD| | we|'|Re| don|'|t| o|'|sab| x|1234567| =.|5|/;|\n|\n| | e|\u0301"
            "|\u0928\u092e| |\u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  |\n|q"
        ),
    ),
    (
        "deepseek-coder",
        (
            "HelloWORLD| | we|'|Re| don|'|t| o|'|sab| x|1|2|3|4|5|6|7| =|.|5|/;|\n|\n| | e"
            "|\u0301|\u0928\u092e| |\u10d0\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  |\n|q"
        ),
    ),
    (
        "falcon",
        (
            "HelloWORLD| | we|'|Re| don|'|t| o|'|sab| x|123|456|7| |=.|5|/;|\n\n | e|\u0301"
            "|\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| |:-|a|      | z|  |\n|q"
        ),
    ),
    (
        "poro-chat bloom gpt3-finnish",
        (
            "HelloWORLD| | we'Re| don't| o'sab| x1234567| =|.|5/;|\n\n | e\u0301\u0928\u092e"
            "| \u10d0\u6f22\u5b57\u304b\ud55c| :-a|      | z|  \n|q"
        ),
    ),
    (
        "viking",
        (
            "HelloWORLD| | we'Re| don't| o'sab| x|1|2|3|4|5|6|7| =|.|5|/;|\n\n "
            "| e\u0301\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| :-a|      | z|  \n|q"
        ),
    ),
    (
        "chameleon",
        (
            "HelloWORLD|  |we|'|Re| don|'|t| o|'|sab| x|1|2|3|4|5|6|7| |=|.|5|/|;|\n|\n|  |e"
            "|\u0301|\u0928\u092e| \u10d0\u6f22\u5b57\u304b\ud55c| |:|-|a|    |  | z|  |\n|q"
        ),
    ),
    (
        "kimi-k2",
        (
            "Hello|WORLD| | we'Re| don't| o's|ab| x|123|456|7| =.|5|/;\n\n| "
            "| e\u0301\u0928\u092e| \u10d0|\u6f22\u5b57|\u304b\ud55c| :-|a|      | z|  \n|q"
        ),
    ),
    (
        "superbpe",
        (
            "HelloWORLD  we'Re don't o'sab x|1|234|567| =.|5"
            "|/;\n\n  e\u0301\u0928\u092e \u10d0\u6f22\u5b57\u304b\ud55c :-a       z  \nq"
        ),
    ),
    (
        "afmoe",
        (
            "HelloWORLD| | we|'Re| don|'t| o|'sab| x|1|234|567| =.|5|/;\n\n| "
            "| e\u0301\u0928\u092e| \u10d0|\u6f22\u5b57\u304b\ud55c| :-|a|      | z|  \n|q"
        ),
    ),
]
LLAMA3 = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"


@pytest.mark.parametrize(("names", "cuts"), CUTS)
def test_pre_tokenizers_cut_as_in_llama_cpp(names, cuts):
    for name in names.split():
        steps = [pre_tokenizers.Split(Regex(x), "isolated") for x in SPLITS[name]]
        found = pre_tokenizers.Sequence(steps).pre_tokenize_str(TEXT)
        assert "|".join(piece for piece, _ in found) == cuts, name


def test_every_name_of_llama_cpp_is_known():
    assert {name for names, _ in CUTS for name in names.split()} == SPLITS.keys()
    # These use SentencePiece's spaces instead of bytes; their architectures are not supported.
    assert not SPLITS.keys() & {"gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace"}


def test_flags_match_llama_cpp():
    assert sorted(BEGIN) == sorted([*LLAMA3.split(), "tekken", "chameleon"])
    whole = [*LLAMA3.split(), "tekken", "minicpm5", "youtu", "granite-embed-multi-97m"]
    assert sorted(WHOLE_WORDS) == sorted(whole)
    assert SPLITS.keys() > COMPOSED
