"""`ChatTemplate`: renders conversations to text in the Jinja environment of transformers.

Templates are written for `apply_chat_template`. The environment here has the same tags, filters,
functions and variables (`transformers/utils/chat_template_utils.py`).
"""

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np

from .._core.checks import brief

TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The special tokens that every template may use."""
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate(NamedTuple):
    """The templates of a model.

    - `templates`: Jinja by name: "default" for conversations, "tool_use" for those with tools.
    - `tokens`: the special tokens that templates name, such as `bos_token`.
    """

    templates: Mapping[str, str]
    tokens: Mapping[str, str]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        options: Mapping[str, Any] | None,
    ) -> str:
        """The text of a conversation. **Raises:** as `Tokenizer.chat`."""
        options = self._checked(options)
        template = self._select(options["tools"])
        if not messages:
            raise ValueError("Tokenizer.chat: there are no messages; pass at least one.")
        found = [_message(i, message) for i, message in enumerate(messages)]
        try:
            return _compiled(template).render(
                **_plain(options),
                messages=found,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"Tokenizer.chat: line {error.lineno} of the file's template is not valid Jinja "
                f"({error.message}); use encode, with the text of a turn as the model knows it."
            ) from None
        except Exception as error:  # a template may raise anything, such as TypeError
            raise ValueError(
                f"Tokenizer.chat: the file's template raises for these messages: {error}; change "
                "them, or use encode."
            ) from None

    def _select(self, tools: Any) -> str:
        if not self.templates:
            raise ValueError(
                "Tokenizer.chat: the model file has no chat template; the model continues text, "
                "so use encode."
            )
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise ValueError(
                f"Tokenizer.chat: the model file has the chat templates "
                f"{', '.join(sorted(self.templates))}, but no default; rename one to 'default'."
            )
        return self.templates[name]

    def _checked(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        if not isinstance(options, Mapping | None) or not all(
            isinstance(name, str) for name in options or ()
        ):
            raise TypeError(
                f"Tokenizer.chat: template_options is {brief(options)}, but it must be a mapping "
                "from names of variables to their values, such as {'enable_thinking': False}, or "
                "None."
            )
        found = {"tools": None, "documents": None, **(options or {})}
        taken = {"messages", "add_generation_prompt", *TOKEN_NAMES, *self.tokens}
        if names := [name for name in found if name in taken]:
            raise ValueError(
                f"Tokenizer.chat: template_options has {names[0]!r}, but the template gets it from "
                "the other arguments or from the model file; remove it."
            )
        for name in ("tools", "documents"):
            values = found[name]
            fits = isinstance(values, list | tuple) and all(isinstance(x, Mapping) for x in values)
            if values is not None and not fits:
                raise TypeError(
                    f"Tokenizer.chat: {name} in template_options is {brief(values)}, but it must "
                    "be a list of mappings; a tool is the JSON schema of a function."
                )
        return found


def _message(index: int, message: Any) -> dict[str, Any]:
    """Converts a message as transformers does for templates.

    Entries that are None are omitted, and the two names of a model's reasoning are unified.
    """
    found = _plain(message)
    if not isinstance(found, dict) or "role" not in found:
        raise ValueError(
            f"Tokenizer.chat: message {index} is {message!r}, but a message is a mapping with "
            "'role' and, in most cases, 'content'."
        )
    found = {name: value for name, value in found.items() if value is not None}
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return found


def _plain(value: Any) -> Any:
    """Converts a value to JSON types; another object becomes the name of its type.

    Templates come from the model file, so methods of other objects are not safe in them.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {x.name: _plain(getattr(value, x.name)) for x in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):  # Pydantic
        return _plain(dump())
    return f"<{type(value).__name__}>"


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the model's text for training; renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = to_json
    return environment.from_string(template)
