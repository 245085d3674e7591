"""Chat templates: the same text as transformers, and errors."""

import dataclasses

import chat_templates
import numpy as np
import pytest
from chat_templates import ASK, CASES, TOKENS, TOOL

pytest.importorskip("jinja2", reason="jinja2 is not installed")

from jaxlowbit._llm.chat_template import ChatTemplate


def chat(template: str, **others: str) -> ChatTemplate:
    return ChatTemplate({"default": template, **others}, TOKENS)


@pytest.mark.parametrize(("template", "messages", "options", "expected"), CASES)
def test_templates_render_as_in_transformers(template, messages, options, expected):
    assert chat(template).render(messages, True, options) == expected


def test_values_reach_templates_as_plain_data():
    @dataclasses.dataclass
    class Message:
        role: str
        content: object

    class Pydantic:
        def model_dump(self):
            return {"role": "user", "content": "b"}

    template = chat("{{ messages | tojson }}{{ flag is false }}")
    messages = [Message("user", ("a", np.int32(3), object())), Pydantic()]
    assert template.render(messages, True, {"flag": np.bool_(False)}) == (
        '[{"role": "user", "content": ["a", 3, "<object>"]}, {"role": "user", "content": "b"}]True'
    )
    asked = {"role": "assistant", "thinking": "t", "content": None}
    assert chat("{{ messages[0] | tojson }}").render([asked], True, None) == (
        '{"thinking": "t", "role": "assistant", "reasoning_content": "t"}'
    )


def test_dates_are_today():
    assert len(chat("{{ strftime_now('%Y-%m-%d') }}").render([ASK], True, None)) == 10


def test_tools_select_their_template():
    template = chat("default {{ tools }}", tool_use="tools {{ tools[0].function.name }}")
    assert template.render([ASK], True, None) == "default None"
    assert template.render([ASK], True, {"tools": [TOOL]}) == "tools weather"
    assert chat("{{ tools | length }}").render([ASK], True, {"tools": [TOOL]}) == "1"
    with pytest.raises(ValueError, match="has the chat templates rag, but no default"):
        ChatTemplate({"rag": ""}, {}).render([ASK], True, None)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ([], TypeError, r"template_options is \[\], but it must be a mapping from names"),
        ({1: 2}, TypeError, "template_options is {1: 2}, but it must be a mapping from names"),
        ({"messages": []}, ValueError, "template_options has 'messages', but the template gets"),
        ({"add_generation_prompt": True}, ValueError, "has 'add_generation_prompt'"),
        ({"bos_token": ""}, ValueError, "has 'bos_token'"),
        ({"mask_token": ""}, ValueError, "has 'mask_token'"),
        ({"tools": [print]}, TypeError, "tools in template_options is .* the JSON schema of a f"),
        (
            {"documents": "text"},
            TypeError,
            "documents in template_options is 'text', but it must be",
        ),
    ],
)
def test_options_raise(options, error, match):
    with pytest.raises(error, match=match):
        chat("").render([ASK], True, options)


def test_named_tokens_of_a_model_are_taken():
    template = ChatTemplate({"default": "{{ image_token }}"}, {"image_token": "<img>"})
    assert template.render([ASK], True, None) == "<img>"
    with pytest.raises(ValueError, match="template_options has 'image_token'"):
        template.render([ASK], True, {"image_token": ""})


@pytest.mark.parametrize(
    ("template", "messages", "match"),
    [
        ("", [], "there are no messages; pass at least one"),
        ("", ["hello"], "message 0 is 'hello', but a message is a mapping"),
        ("", [ASK, {"content": "x"}], "message 1 is .*, but a message is a mapping with 'role'"),
        ("{% if %}", [ASK], "line 1 of the file's template is not valid Jinja"),
        ("{% generation %}", [ASK], "line 1 of the file's template is not valid Jinja"),
        ("{{ raise_exception('alternate') }}", [ASK], "raises for these messages: alternate"),
        ("{{ ''.__class__.__mro__ }}", [ASK], "raises for these messages: .*unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", [ASK], "raises for these messages"),
        (chat_templates.GEMMA3, [ASK, ASK], "raises for these messages: .*must alternate"),
    ],
)
def test_templates_raise(template, messages, match):
    with pytest.raises(ValueError, match=match):
        chat(template).render(messages, True, None)


def test_a_model_without_a_template_raises():
    with pytest.raises(ValueError, match="the model file has no chat template"):
        ChatTemplate({}, {}).render([ASK], True, None)
