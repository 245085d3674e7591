"""Tokenizers of folders: the same tokens and texts as transformers, from each kind of file.

The expected values are from transformers 5.24.
"""

import json
from typing import Any

import pytest

for package in ("gguf", "jinja2", "safetensors", "tokenizers"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import tokenizers  # noqa: E402
from tokenizers import (  # noqa: E402
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jaxlowbit._llm import tokenizer_folder  # noqa: E402
from jaxlowbit._llm.tokenizer import Tokenizer  # noqa: E402

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
ASK = [{"role": "user", "content": "hi"}]
SPACE = "\u2581"


def byte_level() -> tokenizers.Tokenizer:
    """Bytes, <pad> as an ordinary token 256, and the added tokens 257 to 261."""
    vocabulary = {x: i for i, x in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    engine = tokenizers.Tokenizer(models.BPE(vocab=vocabulary | {"<pad>": 256}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    control = [AddedToken(x, normalized=False) for x in ("<s>", "</s>", "<unk>")]
    engine.add_special_tokens(control)
    engine.add_tokens([AddedToken(x, normalized=False) for x in ("<|im_end|>", "<code>")])
    return engine


def read(
    folder, engine: tokenizers.Tokenizer | None = None, config: dict | None = None, **files
) -> Tokenizer:
    """The tokenizer of a folder with further files; `config` goes to tokenizer_config.json."""
    (engine or byte_level()).save(str(folder / "tokenizer.json"))
    files = {"tokenizer_config": NAMES if config is None else config, **files}
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return Tokenizer.from_folder(folder)


def token(content: str, **changes) -> dict:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **flags, "special": True, **changes}


def test_every_entry_that_transformers_reads_is_used_or_harmless():
    """Parameters of its base classes and of the classes of Llama, Qwen and Gemma."""
    read_by_transformers = """
        add_bos_token add_eos_token add_prefix_space added_tokens_decoder additional_special_tokens
        auto_map backend bos_token chat_control_tokens chat_template clean_up_tokenization_spaces
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output cls_token eos_token
        errors extra_special_tokens fast_tokenizer_files files_loaded fix_mistral_regex from_slow
        gguf_file init_inputs is_local legacy local_files_only mask_token max_len max_length merges
        model_input_names model_max_length model_specific_special_tokens name_or_path pad_token
        pad_to_multiple_of pad_token_type_id padding_side post_processor processor_class
        response_schema response_template sep_token sp_model_kwargs split_special_tokens stride
        tokenizer_class tokenizer_file tokenizer_object tokenizer_padding tokenizer_truncation
        truncation_side truncation_strategy unk_id unk_token use_default_system_prompt verbose vocab
        vocab_file
    """
    assert not tokenizer_folder.USED & tokenizer_folder.HARMLESS
    assert set(read_by_transformers.split()) <= tokenizer_folder.USED | tokenizer_folder.HARMLESS


def around(single: str) -> processors.TemplateProcessing:
    numbers = [(x, i) for i, x in enumerate(("<s>", "</s>", "<unk>"), 257) if x in single]
    return processors.TemplateProcessing(single=single, special_tokens=numbers)


A = 64  # the byte of "a"


@pytest.mark.parametrize("config", [NAMES, {}, {"bos_token": None}, {"bos_token": "<unk>"}])
@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (around("<s> $A"), [257, A]),
        (around("<s> <unk> $A"), [257, 259, A]),
        (around("<s> $A </s>"), [257, A, 258]),
        (around("$A </s>"), [A, 258]),
        (processors.BertProcessing(("</s>", 258), ("<s>", 257)), [257, A, 258]),
        (processors.RobertaProcessing(("</s>", 258), ("<s>", 257)), [257, A, 258]),
        (processors.Sequence([processors.ByteLevel(), around("<s> $A")]), [257, A]),
        (processors.ByteLevel(), [A]),
    ],
)
def test_tokens_around_a_text_match_the_post_processor(processor, expected, config, tmp_path):
    engine = byte_level()
    engine.post_processor = processor
    tokenizer = read(tmp_path, engine, config | {"add_bos_token": True, "add_eos_token": True})
    assert tokenizer.encode("a") == expected
    assert tokenizer.leading == tuple(expected[: expected.index(A)])
    assert tokenizer.encode("a", bos=False) == [A]
    assert tokenizer.encode("") == [x for x in expected if x != A]
    bos = {"<s>": 257, "<unk>": 259}.get(config.get("bos_token") or "")
    assert tokenizer.bos == (bos if bos or not tokenizer.leading else tokenizer.leading[0])
    if tokenizer.leading:
        assert tokenizer.encode("a", bos=True) == expected
    elif bos:
        assert tokenizer.encode("a", bos=True) == [bos, *expected]


def test_truncation_and_padding_of_the_file_change_nothing(tmp_path):
    engine = byte_level()
    engine.enable_truncation(4)
    engine.enable_padding(length=12, pad_id=256, pad_token="<pad>")
    tokenizer = read(tmp_path, engine)
    assert tokenizer.encode("a") == [A] and len(tokenizer.encode("abcdefgh")) == 8
    assert tokenizer.leading == ()


def test_an_expression_without_an_end_raises(tmp_path):
    engine = byte_level()
    split = pre_tokenizers.Split(tokenizers.Regex("(a|aa)+$"), "isolated")
    engine.pre_tokenizer = pre_tokenizers.Sequence([split, engine.pre_tokenizer])
    with pytest.raises(ValueError, match=r"Tokenizer.encode: a regular expression of .* too long"):
        read(tmp_path, engine).encode("a" * 60 + "!")


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        (NAMES, {}, "<s></s>|||"),
        (NAMES | {"pad_token": "<pad>", "unk_token": token("<unk>")}, {}, "<s></s>|<pad>|<unk>|"),
        (NAMES | {"image_token": "<img>"}, {}, "<s></s>|||<img>"),
        (NAMES | {"extra_special_tokens": {"image_token": "<img>"}}, {}, "<s></s>|||<img>"),
        (
            NAMES | {"model_specific_special_tokens": {"image_token": "<img>"}},
            {},
            "<s></s>|||<img>",
        ),
        ({}, {"special_tokens_map": NAMES | {"pad_token": token("<pad>")}}, "<s></s>|<pad>||"),
        ({"bos_token": "<unk>"}, {"special_tokens_map": NAMES}, "<s></s>|||"),
        # Newer folders list their tokens here; then the other file is not read.
        (
            NAMES | {"added_tokens_decoder": {"257": token("<s>")}},
            {"special_tokens_map": {"bos_token": "<unk>", "pad_token": "<pad>"}},
            "<s></s>|||",
        ),
    ],
)
def test_templates_get_special_tokens_from_every_file(config, files, expected, tmp_path):
    template = "{{ bos_token }}{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ image_token }}"
    tokenizer = read(tmp_path, None, config | {"chat_template": template}, **files)
    assert tokenizer.chat_text(ASK) == expected
    assert (tokenizer.bos, tokenizer.eos) == (257, (258, 260))


def test_tokens_of_other_files_are_added(tmp_path):
    config = NAMES | {
        "pad_token": "<pad>",  # a token of the vocabulary becomes a control token
        "unk_token": "[UNK]",
        "additional_special_tokens": ["<extra>", {"__type": "AddedToken", **token("<more>")}],
        "added_tokens_decoder": {
            "262": token("<think>", special=False, normalized=True),
            "261": token("<code>", rstrip=True),
        },
    }
    tokenizer = read(tmp_path, None, config)
    text = "<think><pad><code>  <extra><more>[UNK]"
    assert tokenizer.encode(text) == [262, 256, 261, 264, 265, 263]
    assert tokenizer.decode([262, 256, 261, 264, 265, 263, A]) == "<think>a"
    old = {"added_tokens": {"<think>": 262, "[UNK]": 263}, "special_tokens_map": NAMES}
    tokenizer = read(tmp_path, None, {"unk_token": "[UNK]"}, **old)
    assert tokenizer.encode("<think>[UNK]") == [262, 263]
    assert tokenizer.decode([262, 263]) == "<think>"
    with pytest.raises(ValueError, match=r"tokenizer_config.json describes special tokens wrongly"):
        read(tmp_path, None, {"added_tokens_decoder": {"262": 3}})


def test_control_tokens_are_text_on_request_of_the_file(tmp_path):
    tokenizer = read(tmp_path, None, NAMES | {"split_special_tokens": True})
    assert len(tokenizer.encode("<s>")) == 3
    assert tokenizer.encode("<s>", special=True) == [257]
    assert len(read(tmp_path).encode("<s>", special=False)) == 3


def test_templates_of_files_replace_those_of_the_configuration(tmp_path):
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tools: Any = {"template_options": {"tools": []}}
    for config in (listed, {"default": "D", "tool_use": "T"}):
        tokenizer = read(tmp_path, None, {"chat_template": config})
        assert (tokenizer.chat_text(ASK), tokenizer.chat_text(ASK, **tools)) == ("D", "T")
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("\xe9", encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_bytes("\u65e5{{ messages[0].content }}\n".encode())
    tokenizer = read(tmp_path, None, {"chat_template": "old"})
    assert (tokenizer.chat_text(ASK), tokenizer.chat_text(ASK, **tools)) == ("\u65e5hi", "\xe9")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xe9")
    with pytest.raises(ValueError, match=r"chat_template.jinja is not UTF-8"):
        read(tmp_path)


def test_entries_that_would_change_texts_raise_or_warn(tmp_path):
    with pytest.raises(ValueError, match=r"fast_tokenizer_files is .*only tokenizer.json is read"):
        read(tmp_path, None, {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]})
    clean = {"clean_up_tokenization_spaces": True}
    assert read(tmp_path, None, NAMES | clean).decode([A, 220, 0]) == "a !"
    with pytest.warns(UserWarning, match="clean_up_tokenization_spaces is true, but"):
        read(tmp_path, unigram("first"), NAMES | clean)


def unigram(scheme: str) -> tokenizers.Tokenizer:
    words = ["<unk>", "<s>", "</s>", SPACE, "a", f"{SPACE}a"]
    engine = tokenizers.Tokenizer(
        models.Unigram([(x, -float(i > 2)) for i, x in enumerate(words)], unk_id=0)
    )
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    engine.decoder = decoders.Metaspace(prepend_scheme=scheme)
    engine.add_special_tokens([AddedToken("<s>", normalized=False)])
    engine.add_tokens([AddedToken(SPACE * 2, normalized=False)])
    return engine


def sentencepiece(prefix: bool) -> tokenizers.Tokenizer:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a"]
    vocabulary = {word: i for i, word in enumerate(words)}
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    engine = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], **options))
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    engine.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    engine.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    engine.add_special_tokens([AddedToken("<s>", normalized=False)])
    engine.add_tokens([AddedToken(SPACE * 2, normalized=False)])
    return engine


@pytest.mark.parametrize(
    "engine",
    [
        *map(unigram, ("always", "first", "never")),
        *map(sentencepiece, (True, False)),
    ],
)
def test_texts_decode_as_by_the_decoder_of_the_file(engine, tmp_path):
    tokenizer = read(tmp_path, engine)
    double = engine.token_to_id(SPACE * 2)
    for text in ("a", " a", "  a  a", "<s>a", "<s> a"):
        tokens = engine.encode(text).ids
        assert tokenizer.encode(text) == tokens
        for found in (tokens, [*tokens, double]):
            assert tokenizer.decode(found) == engine.decode(found)
            assert tokenizer.decode(found, special=True) == engine.decode(found, False)
