"""`jaxlowbit.llm.Session`: calls read only new tokens."""

from typing import Any, cast

import jax
import pytest
from language_models import LONG, PROMPT, SHORT, model
from safetensors import safe_open
from safetensors.numpy import load_file, save

from jaxlowbit import llm
from jaxlowbit._llm import memory, programs
from jaxlowbit.llm import RopeScaling, Session, generate


@pytest.fixture
def read(monkeypatch):
    """Numbers of prompt tokens that were read, one list entry per call of the program."""
    counts = []
    prefill = programs.prefill

    def counted(structure, weights, cache, tokens, positions, *rest):
        counts.append(int((positions >= 0).sum()))
        return prefill(structure, weights, cache, tokens, positions, *rest)

    monkeypatch.setattr(programs, "prefill", counted)
    return counts


def test_turns_read_only_new_tokens_and_match_generate(read):
    one = model("gemma3")  # has sliding windows
    session, history = Session(one), list(SHORT)
    for i, new in enumerate((PROMPT, LONG[:20], PROMPT[:5])):
        history += new
        del read[:]
        found = session.generate(history, max_new_tokens=9)
        assert sum(read) == len(new) + (len(SHORT) if i == 0 else 0)
        want = generate(one, history, max_new_tokens=9)
        assert found._replace(tokens_per_second=0) == want._replace(tokens_per_second=0)
        history += found.tokens
    del read[:]
    changed = history[:30] + SHORT
    assert session.generate(changed, max_new_tokens=9).tokens == (
        generate(one, changed, max_new_tokens=9).tokens
    )
    assert read[0] == len(SHORT)
    # Repeating a prompt reads only its last token; a different prompt reads all tokens.
    del read[:]
    session.generate(changed, max_new_tokens=2)
    session.generate([7, *changed], max_new_tokens=2)
    assert read == [1, len(changed) + 1]


def test_the_cache_grows_and_fills_the_context(read):
    one = model(context=300)
    session, history = Session(one), list(LONG)
    for count in (205, 100):
        found = session.generate(history, max_new_tokens=count)
        want = generate(one, history, max_new_tokens=count)
        assert found._replace(tokens_per_second=0) == want._replace(tokens_per_second=0)
        history += found.tokens + SHORT
    assert (len(found.tokens), found.finish) == (300 - 45 - 205 - 3, "length")
    del read[:]
    with pytest.raises(ValueError, match=r"Session.generate: the prompt has \d+ tokens, but the"):
        session.generate(history + LONG, max_new_tokens=5)
    # The session is unchanged, and continues with a shorter conversation.
    shorter = history[:270] + SHORT
    assert session.generate(shorter, max_new_tokens=5).tokens == (
        generate(one, shorter, max_new_tokens=5).tokens
    )
    assert read[0] == len(SHORT)


def test_steps_after_the_last_slot_leave_a_session_usable(monkeypatch):
    monkeypatch.setattr(programs, "_fixed_tokens", lambda model: 8)
    one = model(context=512)
    session = Session(one)
    found = session.generate(LONG, max_new_tokens=256 - len(LONG))  # all 256 slots
    history = [*LONG, *found.tokens, *SHORT]
    assert session.generate(history, max_new_tokens=9).tokens == (
        generate(one, history, max_new_tokens=9).tokens
    )


def test_longer_conversations_have_the_long_factors(read):
    """From 256 slots on, the keys of earlier turns have another rotation and are read again."""
    scaling = RopeScaling("longrope", 2.0, 256, factors=(1.0,) * 4, long_factors=(2.0,) * 4)
    one = model("granite", context=512, rope_scaling=scaling)
    session, history = Session(one), 4 * LONG
    for count in (60, 9):
        del read[:]
        found = session.generate(history, max_new_tokens=count)
        want = generate(one, history, max_new_tokens=count)
        assert found._replace(tokens_per_second=0) == want._replace(tokens_per_second=0)
        assert sum(read) == 2 * len(history)
        history += found.tokens + LONG


@pytest.mark.parametrize("fixed", [None, 8])  # 8: as on a GPU, programs run ahead
@pytest.mark.parametrize("end", ["close", "throw", "replace", "stop", "never"])
def test_a_stream_may_end_early(end, fixed, read, monkeypatch):
    monkeypatch.setattr(programs, "_fixed_tokens", lambda model: fixed)
    one = model()
    session = Session(one)
    pieces = session.stream(PROMPT, max_new_tokens=40)
    if end != "never":
        text = next(pieces)
        assert generate(one, PROMPT, max_new_tokens=40).text.startswith(text)
    if end == "close":
        pieces.close()
    elif end == "throw":
        with pytest.raises(KeyboardInterrupt):
            pieces.throw(KeyboardInterrupt)
    elif end == "stop":
        list(pieces)
    del read[:]
    prompt = PROMPT + SHORT
    found = session.generate(prompt, max_new_tokens=8)
    assert found.tokens == generate(one, prompt, max_new_tokens=8).tokens
    assert read[0] == (24 if end == "never" else 3)
    assert list(pieces) == []


def test_an_interrupted_program_leaves_the_session_usable(monkeypatch):
    """The interrupted call has consumed the cache; the next call reads the prompt again."""
    one = model()
    for name in ("prefill", "decode"):
        session, program = Session(one), getattr(programs, name)
        session.generate(PROMPT, max_new_tokens=3)

        def interrupted(*arguments, program=program):
            jax.block_until_ready(program(*arguments))
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(programs, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.generate(PROMPT + SHORT, max_new_tokens=3)
        found = session.generate(PROMPT + SHORT, max_new_tokens=3)
        assert found.tokens == generate(one, PROMPT + SHORT, max_new_tokens=3).tokens


def test_several_samples_keep_the_cache_of_the_prompt(read):
    one = model()
    session, options = Session(one), {"max_new_tokens": 5, "temperature": 1.0, "n": 3}
    session.generate(PROMPT, max_new_tokens=3)
    found = session.generate(PROMPT + SHORT, **options)
    want = generate(one, PROMPT + SHORT, **options)
    assert [x.tokens for x in found] == [x.tokens for x in want]
    del read[:]
    session.generate(PROMPT + SHORT + [5], max_new_tokens=3)
    assert read == [1]


def test_turns_of_a_bucket_compile_nothing(caplog):
    session = Session(model(context=250))
    session.generate(PROMPT, max_new_tokens=3)
    session.generate(PROMPT + SHORT, max_new_tokens=3)
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        session.generate(PROMPT + LONG[:4], max_new_tokens=9)
        list(session.stream(LONG[:25], max_new_tokens=9))
        session.generate(LONG[:30], max_new_tokens=9, seed=3)
    assert not [text for text in caplog.messages if "Finished XLA compilation" in text]


def test_arguments_that_a_session_rejects(monkeypatch):
    with pytest.raises(TypeError, match="Session: model is 3"):
        Session(cast(Any, 3))
    session = Session(model())
    for call in (session.generate, session.stream):
        with pytest.raises(ValueError, match="the prompt is a batch"):
            call([PROMPT, SHORT])
        with pytest.raises(TypeError, match="colour"):
            call(PROMPT, colour=3)
    with pytest.raises(TypeError, match="n"):
        session.stream(PROMPT, n=2)
    session.generate(PROMPT, max_new_tokens=3)
    monkeypatch.setattr(memory, "available", lambda: 1000)
    with pytest.raises(ValueError, match="a batch of 1 with 256 slots"):
        Session(model()).generate(PROMPT)
    session.generate(PROMPT, max_new_tokens=3)  # uses the existing cache


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The file of a session, and its prompt with the reply."""
    path = tmp_path_factory.mktemp("session") / "x"
    session = Session(model())
    tokens = [*PROMPT, *session.generate(PROMPT, max_new_tokens=4).tokens]
    session.save(path)
    return path, tokens


def test_a_session_continues_from_a_file(stored, read):
    path, tokens = stored
    session = Session(model())
    session.load(path)
    found = session.generate([*tokens, *SHORT], max_new_tokens=4)
    assert sum(read) == len(SHORT)
    want = generate(model(), [*tokens, *SHORT], max_new_tokens=4)
    assert found.tokens == want.tokens
    with pytest.raises(ValueError, match=r"Session.save: .* exists"):
        session.save(path)
    with pytest.raises(ValueError, match="has no tokens yet"):
        Session(model()).save(path, overwrite=True)


def test_files_of_other_models_raise(stored, tmp_path):
    path, _ = stored
    others = [model(norm_epsilon=1e-4), model("qwen3")]
    others.append(llm.adapt(model(), llm.LoRA(rank=1, targets=r"0\.q$")))
    for other in others:
        with pytest.raises(ValueError, match="a session of another model"):
            Session(other).load(path)
    session = Session(model())
    with pytest.raises(FileNotFoundError, match="is no file"):
        session.load(tmp_path / "no")
    data = path.read_bytes()
    tensors = load_file(path)
    metadata = safe_open(path, "numpy").metadata()
    slots = metadata["jaxlowbit.session"].replace('"slots": 256', '"slots": 3')
    for damaged in (
        data[:-5],
        data.replace(b"keys.1", b"keys.9"),
        save(tensors | {"tokens": tensors["tokens"] + 1000}, metadata),
        save(tensors | {"keys.0": tensors["keys.0"][1:]}, metadata),
        save(tensors),
        save(tensors, {"jaxlowbit.session": "{"}),
        save(tensors, {"jaxlowbit.session": slots}),
    ):
        (tmp_path / "x").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"Session.load: .*x.*start a new session"):
            session.load(tmp_path / "x")
    assert session.generate(SHORT, max_new_tokens=1).tokens
