"""Tokenizers of model files: texts, streams and conversations."""

import json

import model_files
import pytest
from model_files import (
    BPE,
    SPM,
    TOKENS,
    metadata,
    smollm2,
    tensors,
    write_gguf,
    write_tiny,
)

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import tokenizers  # noqa: E402
from tokenizers import decoders, processors  # noqa: E402

from jaxlowbit._llm import generate, language_model  # noqa: E402
from jaxlowbit._llm import gguf as files  # noqa: E402
from jaxlowbit._llm.text import Text  # noqa: E402
from jaxlowbit._llm.tokenizer import Tokenizer  # noqa: E402

TEXTS = ["hello world", " hello", "naïve 日本語 🎉\n\n  2024", "", "<|im_end|>", "\x00\x7f"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return Tokenizer.from_gguf(files.File(write_tiny(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    path = tmp_path_factory.mktemp("spm") / "spm.gguf"
    count = len(SPM["tokenizer.ggml.tokens"])
    entries = metadata("gemma3", SPM)
    write_gguf(path, entries, tensors("gemma3", vocabulary=count))
    return Tokenizer.from_gguf(files.File(path))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_texts_come_back(text, kind, request):
    tokenizer = request.getfixturevalue(kind)
    tokens = tokenizer.encode(text, bos=False, special=False)
    assert tokenizer.decode(tokens) == text
    stream = tokenizer.decode_stream()
    streamed = "".join([stream.push(token) for token in tokens]) + stream.finish()
    assert streamed == (f" {text}" if kind == "sentencepiece" and text else text)


def test_byte_level_tokens(byte_level):
    named = {token: i for i, token in enumerate(TOKENS)}
    assert byte_level.encode("hello 42") == [named["hello"], *map(named.get, ["Ġ", "4", "2"])]
    assert byte_level.encode("<|im_end|>hello", bos=True) == [262, 263, named["hello"]]
    assert len(byte_level.encode("<|im_end|>", special=False)) == 10
    assert byte_level.decode([263, named["hello"]]) == "hello"
    assert byte_level.decode([263], special=True) == "<|im_end|>"
    assert byte_level.eos == (263, 261)


def test_sentencepiece_tokens(sentencepiece):
    named = {token: i for i, token in enumerate(SPM["tokenizer.ggml.tokens"])}
    assert sentencepiece.encode("hello") == [1, named["▁hello"]]
    assert sentencepiece.encode("é", bos=False)[-2:] == [named["<0xC3>"], named["<0xA9>"]]
    assert sentencepiece.encode("</s>w", bos=False)[0] == 2


def test_streams_delay_incomplete_characters(byte_level):
    stream = byte_level.decode_stream()
    pieces = [stream.push(token) for token in byte_level.encode("é🎉")]
    assert pieces == ["", "é", "", "", "", "🎉"] and stream.finish() == ""
    stream.push(byte_level.encode("é")[0])
    assert stream.finish() == "\ufffd"


def test_conversations(byte_level):
    messages = [{"role": "user", "content": "hello"}]
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert byte_level.chat_text(messages) == text
    assert byte_level.chat(messages) == byte_level.encode(text, bos=False)
    assert byte_level.chat(messages, False)[-1] == byte_level.encode("\n")[0]


def test_tokenizers_raise(byte_level, sentencepiece):
    with pytest.raises(ValueError, match="no chat template"):
        sentencepiece.chat([{"role": "user", "content": "hello"}])
    with pytest.raises(ValueError, match="there is no token -1; they are 0 and above"):
        byte_level.decode([-1])
    with pytest.raises(ValueError, match="the text is no Unicode"):
        byte_level.encode("\ud800")


def test_tokens_beyond_the_vocabulary_have_no_text(byte_level, sentencepiece):
    """A model may have more rows than the tokenizer has tokens, and may draw any of them."""
    for tokenizer in (byte_level, sentencepiece):
        tokens = tokenizer.encode("hello", bos=False)
        first = tokenizer.vocabulary
        drawn = [first, *tokens, first + 1, 10**6]
        assert tokenizer.decode(drawn) == "hello"
        assert tokenizer.decode([first], special=True) == ""
        stream = tokenizer.decode_stream(special=True)
        assert "".join([stream.push(token) for token in drawn]).strip() == "hello"
        text = Text(tokenizer, eos=(), stops=())
        text.add(drawn)
        text.close("length")
        assert (str(text.text).strip(), text.tokens) == ("hello", drawn)


def test_a_prompt_with_a_token_beyond_the_table_raises(tmp_path):
    """The model still loads; only prompts with such a token raise."""
    entries = BPE | {
        "tokenizer.ggml.tokens": [*TOKENS, "<image>", "<|end|>"],
        "tokenizer.ggml.token_type": [*BPE["tokenizer.ggml.token_type"], 3, 3],
    }
    path = write_gguf(tmp_path / "m.gguf", metadata("llama", entries), tensors("llama"))
    model = language_model.load(path, progress=False)
    assert (model.config.vocabulary, model.tokenizer.vocabulary) == (264, 266)
    assert model.config.eos == (263, 261) and 265 in model.tokenizer.eos
    for prompt in ("hello <image>", [259, 264], ["hello", "<image>"]):
        with pytest.raises(ValueError, match=r"token 264 \('<image>'\), but tokens are from 0 to"):
            generate.generate(model, prompt)


def test_folders_have_the_same_tokenizer(byte_level, tmp_path):
    folder = model_files.write_folder(
        tmp_path / "m", model_files.hf_config("llama"), model_files.hf_weights("llama")
    )
    tokenizer = Tokenizer.from_folder(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == byte_level.encode(text)
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.chat(messages) == byte_level.chat(messages)
    assert (tokenizer.bos, tokenizer.eos) == (byte_level.bos, byte_level.eos)


def test_sentencepiece_in_a_folder(sentencepiece, tmp_path):
    """Like the folders of llama 2 and gemma: byte fallback, and bos in front."""
    engine = tokenizers.Tokenizer.from_str(sentencepiece._engine.to_str())
    engine.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    engine.post_processor = processors.TemplateProcessing("<s> $0", None, [("<s>", 1)])
    engine.save(str(tmp_path / "tokenizer.json"))
    options = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.has_chat) == (1, (2,), False)
    for text in TEXTS:
        assert tokenizer.encode(text) == sentencepiece.encode(text)
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text
    engine.decoder = decoders.WordPiece()
    engine.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"its decoder is .*WordPiece"):
        Tokenizer.from_folder(tmp_path)


def test_the_tokenizer_of_smollm2():
    tokenizer = Tokenizer.from_gguf(files.File(smollm2()))
    assert (tokenizer.vocabulary, tokenizer.bos, tokenizer.eos) == (49152, 1, (2, 0, 4))
    text = "Hello  world, it's 2024!\n\n  x=1.5 naïve 日本語 🎉 \t end "
    tokens = tokenizer.encode(text)
    assert tokens[:8] == [19556, 216, 905, 28, 357, 506, 216, 34]
    assert tokenizer.decode(tokens) == text
    chat = tokenizer.chat([{"role": "user", "content": "Hi?"}])
    assert chat[:5] == [1, 9690, 198, 2683, 359] and chat[-4:] == [1, 520, 9531, 198]
    assert tokenizer.decode(chat, special=True).endswith("Hi?<|im_end|>\n<|im_start|>assistant\n")
