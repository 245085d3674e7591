"""Checks prompts (texts, chats or tokens), and converts them to lists of tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array

from .._core import checks
from .language_model import LanguageModel

Prompt = str | Sequence[int] | Sequence[dict[str, str]]


def is_single(caller: str, prompt: Any) -> bool:
    """Whether this is one prompt (a text, tokens or a chat) and not a batch.

    **Raises:** `TypeError` for other objects.
    """
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, np.ndarray | Array):
        return prompt.ndim < 2
    if isinstance(prompt, list | tuple | range):
        several = str | list | tuple | range | np.ndarray | Array
        return len(prompt) == 0 or not isinstance(prompt[0], several)
    raise TypeError(
        f"{caller}: prompt is {checks.brief(prompt)}, but it must be a text, a list of messages "
        '{"role": "user", "content": text}, a list of tokens, or a list of these.'
    )


def batch(
    caller: str,
    model: LanguageModel,
    prompts: Any,
    template_options: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """The tokens of every prompt.

    **Raises:** the errors of `encoded`, and `ValueError` for a prompt that fills the context.
    """
    found = []
    for i, prompt in enumerate(prompts):
        name = f"prompt {i}" if len(prompts) > 1 else "the prompt"
        tokens = encoded(model, prompt, f"{caller}: {name}", template_options)
        if len(tokens) >= model.config.context:
            raise ValueError(
                f"{caller}: {name} has {len(tokens)} tokens, but the context has "
                f"{model.config.context} with what is generated; shorten it."
            )
        found.append(tokens)
    return found


def encoded(
    model: LanguageModel,
    prompt: Any,
    name: str,
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """The tokens of a text, a chat or tokens, checked; errors begin with `name`."""
    if isinstance(prompt, np.ndarray | Array):
        prompt = np.asarray(prompt).tolist() if prompt.ndim == 1 else None
    if not isinstance(prompt, str | list | tuple | range):
        raise TypeError(f"{name} is no text, no list of messages and no list of tokens; pass one.")
    if len(prompt) == 0:
        raise ValueError(f"{name} is empty; there must be a token to go on from.")
    is_chat = not isinstance(prompt, str) and isinstance(prompt[0], dict)
    if template_options is not None and not is_chat:
        raise ValueError(
            f"{name} is not a list of messages, but template_options go to the template of a chat; "
            "leave them out."
        )
    if isinstance(prompt, str) or is_chat:
        if model.tokenizer is None:
            raise ValueError(f"{name} is text, but the model has no tokenizer; pass tokens.")
        if isinstance(prompt, str):
            tokens = model.tokenizer.encode(prompt)
        else:
            extra = {} if template_options is None else {"template_options": template_options}
            with checks.within(name.partition(":")[0]):
                tokens = model.tokenizer.chat(list(prompt), add_generation_prompt=True, **extra)
    else:
        tokens = prompt
    found, vocabulary = [], model.config.vocabulary
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TypeError(
                f"{name} has {checks.brief(token)} for a token, but tokens are integers from 0 to "
                f"{vocabulary - 1}."
            )
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"{name} has {_named(model, int(token))}, but tokens are from 0 to "
                f"{vocabulary - 1}, the rows of the model's table."
            )
        found.append(int(token))
    return found


def _named(model: LanguageModel, token: int) -> str:
    """A token with its text, if it has any."""
    tokenizer = model.tokenizer if token >= 0 else None
    text = "" if tokenizer is None else tokenizer.decode([token], special=True)
    return f"token {token}" + (f" ({text!r})" if text else "")
