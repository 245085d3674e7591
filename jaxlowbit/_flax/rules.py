"""Rules for what each layer gets: regular expressions on its paths, the first match wins."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from .._core.format import Format
from .._core.heads import HEADS

Rules = Format | Mapping[str, Format | None] | Sequence[tuple[str, Format | None]]
ShardRules = tuple[int, int] | Mapping[str, tuple[int, int]]


def choose(
    rules: Rules, layers: Sequence[Sequence[str]], named: Sequence[bool]
) -> list[Format | None]:
    """The format of each layer, given by all of its paths, or None to keep its floats.

    `named` layers are those that only a rule, and no lone format, chooses.

    **Raises:** `TypeError` for what is no rule; `ValueError` for a pattern that is no regular
    expression and for a rule that decides about no layer.
    """
    if isinstance(rules, Format):
        kept = re.compile(HEADS)
        return [
            None if only or any(map(kept.search, paths)) else rules
            for paths, only in zip(layers, named, strict=True)
        ]
    return _decide(rules, layers, _is_format, "a Format, or with None to keep the layer")


def choose_shards(shards: ShardRules, layers: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """The shards of each layer, given by all of its paths.

    **Raises:** as `choose` does.
    """
    if _is_shards(shards):
        return [shards] * len(layers)
    found = _decide(shards, layers, _is_shards, "shards of k and n, such as (1, 8)")
    return [pair or (1, 1) for pair in found]


def _is_format(value: object) -> bool:
    return value is None or isinstance(value, Format)


def _is_shards(value: object) -> TypeGuard[tuple[int, int]]:
    match value:
        case (int(), int()):
            return isinstance(value, tuple)
        case _:
            return False


def _decide(
    rules: Any, layers: Sequence[Sequence[str]], allowed: Callable[[object], bool], values: str
) -> list[Any]:
    """The value of the first rule that matches each layer, or None."""
    pairs = rules.items() if isinstance(rules, Mapping) else rules
    compiled = [_compile(rule, allowed, values) for rule in pairs]
    winners = [
        next((i for i, (rule, _) in enumerate(compiled) if any(map(rule.search, paths))), None)
        for paths in layers
    ]
    for i, (rule, _) in enumerate(compiled):
        if i not in winners:
            raise ValueError(_idle(rule, layers))
    return [None if i is None else compiled[i][1] for i in winners]


def _compile(
    rule: object, allowed: Callable[[object], bool], values: str
) -> tuple[re.Pattern[str], Any]:
    match rule:
        case (str(pattern), value) if allowed(value):
            pass
        case _:
            raise TypeError(
                f"quantize_model: {rule!r} is no rule; a rule is a regular expression on the "
                f"dotted path of a layer with {values}."
            )
    try:
        return re.compile(pattern), value
    except re.error as error:
        raise ValueError(
            f"quantize_model: the rule {pattern!r} is no regular expression: {error}; correct it."
        ) from None


def _idle(rule: re.Pattern[str], layers: Sequence[Sequence[str]]) -> str:
    paths = [path for layer in layers for path in layer]
    if any(map(rule.search, paths)):
        return (
            f"quantize_model: the rule {rule.pattern!r} decides about no layer, since earlier "
            "rules match all that it does; put it before them, or remove it."
        )
    listed = ", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")
    return (
        f"quantize_model: the rule {rule.pattern!r} matches no layer; correct or remove it. "
        f"The layers are {listed}."
    )
