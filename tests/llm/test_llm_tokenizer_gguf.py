"""Tokenizers of GGUF files: all keys of llama.cpp, types and names of tokens."""

import warnings
from types import SimpleNamespace

import pytest
from model_files import BPE, SPM, TOKENS

for package in ("gguf", "jinja2", "safetensors", "tokenizers"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import gguf  # noqa: E402
import tokenizers  # noqa: E402

from jaxlowbit._llm import tokenizer_gguf  # noqa: E402
from jaxlowbit._llm.tokenizer import Tokenizer  # noqa: E402

ASK = [{"role": "user", "content": "hello"}]
KINDS = BPE["tokenizer.ggml.token_type"]
HELLO = TOKENS.index("hello")


def read(base: dict, changes: dict | None = None, **general) -> Tokenizer:
    """The tokenizer of metadata with some keys changed, None for a missing one."""
    ggml = {f"tokenizer.{key}": value for key, value in (changes or {}).items()}
    entries = {key: value for key, value in (base | ggml).items() if value is not None}
    file = SimpleNamespace(path="m.gguf", metadata=entries | {"general.name": "m"} | general)
    return Tokenizer.from_gguf(file)  # pyright: ignore[reportArgumentType]


def with_tokens(*tokens: tuple[str, int]) -> dict:
    """`BPE` with more tokens of some types."""
    return BPE | {
        "tokenizer.ggml.tokens": [*TOKENS, *(token for token, _ in tokens)],
        "tokenizer.ggml.token_type": [*KINDS, *(kind for _, kind in tokens)],
    }


def test_every_key_of_llama_cpp_is_used_harmless_or_raises():
    tables = tokenizer_gguf.USED, tokenizer_gguf.HARMLESS, tokenizer_gguf.RAISING
    keys = [
        value.removeprefix("tokenizer.")
        for name, value in vars(gguf.Keys.Tokenizer).items()
        if not name.startswith("_") and name != "CHAT_TEMPLATE_N"
    ]
    # Keys in llama.cpp's table that the package gguf lacks.
    keys += ["ggml.cls_token_id", "ggml.normalizer.lowercase", "ggml.normalizer.strip_accents"]
    assert len(keys) > 30
    for key in keys:
        assert sum(key in table for table in tables) == 1, key


def test_tokens_of_gemma4_are_those_of_transformers():
    """Both have the same BPE: merges of characters, spaces as in SentencePiece."""
    merges = ["h e", "l l", "he ll", "hell o", "\u2581 hello", "\n \n", "\u2581 \u2581"]
    own = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    characters = ["\u2581", "\n", "h", "e", "l", "o", "w"]
    own += [*characters, *(merge.replace(" ", "") for merge in merges), "<turn|>"]
    kinds = [3, 3, 3, 2] + [6] * 256 + [1] * (len(own) - 261) + [3]
    found = read(
        {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": own,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.add_space_prefix": False,
            "tokenizer.ggml.add_bos_token": True,
        }
    )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocabulary = {token: i for i, token in enumerate(own)}
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs, **options))
    theirs.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    for text in ("hello hello", "  hello\n\n\nhello", "o w\u00e9\U0001f642", "\n", " ", ""):
        assert found.encode(text) == [2, *theirs.encode(text).ids], text
        assert found.decode(found.encode(text)) == text
    assert found.encode("hello<turn|>")[-1] == len(own) - 1
    with pytest.raises(ValueError, match=r"lacks 'tokenizer.ggml.merges'"):
        read({"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": ["a"]})


def test_unknown_and_foreign_keys_are_not_dropped_silently():
    with pytest.warns(UserWarning, match=r"m.gguf: 'tokenizer.ggml.new' is not known here"):
        read(BPE, {"ggml.new": 1})
    with pytest.raises(ValueError, match=r"'tokenizer.rwkv.world' describes a tokenizer that is"):
        read(BPE, {"rwkv.world": "x"})
    harmless = {"ggml.precompiled_charsmap": [0], "ggml.add_sep_token": True}
    assert read(BPE, {**harmless, "huggingface.json": "{}"}).encode("hello") == [HELLO]


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        (BPE, {}, [HELLO]),
        (BPE, {"ggml.add_bos_token": True}, [262, HELLO]),
        (BPE, {"ggml.add_eos_token": True}, [HELLO, 263]),
        (BPE, {"ggml.add_bos_token": True, "ggml.add_eos_token": True}, [262, HELLO, 263]),
        (BPE, {"ggml.pre": "falcon3"}, [262, HELLO]),
        (BPE, {"ggml.pre": "falcon3", "ggml.add_bos_token": False}, [HELLO]),
        (BPE, {"ggml.pre": "falcon3", "ggml.bos_token_id": None}, [HELLO]),
        (SPM, {}, [1, 268]),
        (SPM, {"ggml.add_bos_token": False, "ggml.add_eos_token": True}, [268, 2]),
        # llama.cpp's defaults for this model are 1 and 2.
        (SPM, {"ggml.bos_token_id": None, "ggml.eos_token_id": None}, [1, 268]),
        (SPM, {"ggml.add_space_prefix": False}, [1, 267]),
    ],
)
def test_tokens_around_a_text(base, changes, expected):
    tokenizer = read(base, changes)
    assert tokenizer.encode("hello") == expected
    assert tokenizer.leading == tuple(token for token in expected if token in (1, 262))
    text = [token for token in expected if token not in (1, 2, 262, 263)]
    assert tokenizer.encode("hello", bos=False) == text
    assert tokenizer.decode(expected) == "hello"


def test_numbers_of_special_tokens_that_are_missing_or_wrong():
    assert read(SPM, {"ggml.eos_token_id": None}).eos == (2,)
    for name in ("bos", "eos"):
        changes = {f"ggml.add_{name}_token": True, f"ggml.{name}_token_id": None}
        with pytest.raises(ValueError, match=f"add_{name}_token' is true, but the file has no"):
            read(BPE, changes)
    for name in ("bos", "eot"):
        with pytest.raises(ValueError, match=f"'tokenizer.ggml.{name}_token_id' is 999, but"):
            read(BPE, {f"ggml.{name}_token_id": 999})
    for name in ("padding", "unknown", "seperator", "mask", "fim_pad"):
        with pytest.warns(UserWarning, match=f"{name}_token_id' is 4294967295.*it is ignored"):
            read(BPE, {f"ggml.{name}_token_id": 2**32 - 1})


def test_a_missing_pre_tokenizer_warns():
    with pytest.warns(UserWarning, match=r"'tokenizer.ggml.pre' is missing"):
        assert read(BPE, {"ggml.pre": None}).encode("hello") == [HELLO]


def test_types_of_tokens():
    """Unused tokens, such as [PAD264] in padded vocabularies, have no text."""
    base = with_tokens(("[PAD264]", 5), ("x", 0), ("<0x41>", 6), ("<0x41>", 1), ("<tag>", 4))
    tokenizer = read(base)
    assert tokenizer.decode([264, HELLO, 265], special=True) == "hello"
    assert tokenizer.decode([266, 267, 268]) == "A<0x41><tag>"
    assert tokenizer.encode("<tag>") == [268]
    spm = SPM | {"tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 11 + [5]}
    assert read(spm).decode([268, 270], special=True) == "hello"


def test_lists_may_be_longer_than_the_vocabulary():
    scores = SPM["tokenizer.ggml.scores"]
    kinds = SPM["tokenizer.ggml.token_type"]
    changes = {"ggml.scores": [int(x) for x in scores] + [0], "ggml.token_type": [*kinds, 1]}
    assert read(SPM, changes).encode("hello") == [1, 268]


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        ([("<|eot_id|>", 3), ("<|eom_id|>", 3)], [264, 265]),
        ([("<end_of_turn>", 1), ("</s>", 1)], [264]),
        ([("<EOT>", 4), ("</s>", 3)], [264, 265]),
        ([("_<EOT>", 1), ("[EOT]", 1), ("[EOS]", 3)], [264, 265, 266]),
        ([("<\uff5cend\u2581of\u2581sentence\uff5c>", 1)], [264]),
        ([("<|end|>", 3), ("<|return|>", 3)], [264, 265]),
        ([("<|end|>", 3), ("<|return|>", 3), ("<|call|>", 3)], [265, 266]),
        ([("<|end|>", 3), ("<|flush|>", 3), ("<|calls|>", 3)], [265, 266]),
        ([("<|fim_pad|>", 3), ("<|repo_name|>", 1), ("<|file_sep|>", 3)], [264, 265, 266]),
        ([("<|fim_prefix|>", 1), ("<PRE>", 3)], []),
    ],
)
def test_tokens_end_texts_by_name_as_well_as_by_type(tokens, ends):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tokenizer = read(with_tokens(*tokens))
    assert tokenizer.eos == (263, 261, *ends)
    changed = [token for token, kind in tokens if kind != 3 and token != "</s>"]
    assert len(found) == bool(changed)
    for i, (token, _) in enumerate(tokens):
        shown = token if token == "</s>" and token not in changed and 264 + i not in ends else ""
        assert tokenizer.decode([264 + i]) == shown
        assert tokenizer.decode([264 + i], special=True) == token
        if token in changed:
            assert f"gives {', '.join(map(repr, changed))} another type" in str(found[0].message)


def test_tokens_end_texts_by_keys():
    keys = {f"ggml.{name}_token_id": i for i, name in enumerate(("eot", "eom", "fim_sep"), 10)}
    assert read(BPE, keys).eos == (263, 10, 11, 12, 261)


def test_templates_have_names_and_every_special_token():
    template = "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ sep_token }}{{ pad_token }}"
    keys = {"ggml.unknown_token_id": 261, "ggml.seperator_token_id": HELLO}
    keys |= {"ggml.padding_token_id": 261, "chat_templates": ["tool_use", "rag"]}
    keys |= {"chat_template": template, "chat_template.tool_use": "tools"}
    tokenizer = read(BPE, keys)
    shown = "<|im_start|><|im_end|><|endoftext|>hello<|endoftext|>"
    assert tokenizer.chat_text(ASK) == shown
    assert tokenizer.chat(ASK, template_options={"tools": []}) == tokenizer.encode("tools")
    assert not read(BPE, {"chat_template": None}).has_chat


def test_a_space_in_front_of_byte_level_texts():
    """The pre-tokenizer adds the space, and decoding removes it."""
    tokenizer = read(BPE, {"ggml.add_space_prefix": True})
    space, word = TOKENS.index("\u0120"), TOKENS.index("\u0120w")
    assert tokenizer.encode("w") == tokenizer.encode(" w") == [word]
    assert tokenizer.encode("\nw") == [space, 10, ord("w")]
    assert tokenizer.encode("w <|im_end|>w") == [word, space, 263, word]
    assert tokenizer.encode("") == []
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_control_tokens_of_phi_3_absorb_following_spaces():
    name = {"general.name": "Phi-3 mini"}
    assert read(BPE, None, **name).encode("<|im_end|> \n hello") == [263, HELLO]
    assert len(read(BPE).encode("<|im_end|> \n hello")) > 3
