"""Rules for what each layer gets: regular expressions on its paths, the first match wins."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from .._core.activations import value_dtype
from .._core.checks import brief
from .._core.format import Format, as_format

Rules = Format | str | Mapping[str, Format | str | None] | Sequence[tuple[str, Format | str | None]]
ShardRules = tuple[int, int] | Mapping[str, tuple[int, int]]
ActivationRules = Any
"""A dtype of quantized activations, None, or a mapping of regular expressions to these."""
Keep = str | Sequence[str]
_CALLER = "quantize_model"


class Decision(NamedTuple):
    """The format of a layer, or None and why its floats are kept."""

    format: Format | None
    reason: str = ""
    by_default: bool = False


BY_RULE = Decision(None, "kept by a rule")
UNMATCHED = Decision(None, "kept: no rule matches")


def choose(
    rules: Rules,
    keep: Keep,
    layers: Sequence[Sequence[str]],
    others: Sequence[str],
    defaults: Callable[[Format], Sequence[str | None]],
) -> tuple[list[Decision], list[bool]]:
    """What becomes of each layer, given by all of its paths, and which others a rule keeps.

    `others` are the paths of parameters that cannot be quantized, and `defaults` says of a lone
    format which layers it keeps, and why.

    **Raises:** `TypeError` for what is no rule; `ValueError` for a pattern that is no regular
    expression and for rules that decide about no layer, all of them in one error.
    """
    kept = [(pattern, None) for pattern in ((keep,) if isinstance(keep, str) else _list(keep))]
    lone = isinstance(rules, Format | str)
    if not lone and not isinstance(rules, Mapping | Sequence):
        raise TypeError(
            f"{_CALLER}: rules is {brief(rules)}, but it is a Format, such as jaxlowbit.INT4, a "
            "name of one, such as 'int4', or a mapping from regular expressions to them."
        )
    pairs = [] if lone else [*(rules.items() if isinstance(rules, Mapping) else rules)]
    values = "a Format, the name of one, or with None to keep the layer"
    winners, kept_others = _decide([*kept, *pairs], layers, others, _format, values)
    if not lone:
        return [_decision(winner) for winner in winners], kept_others
    format = as_format(_CALLER, rules)
    return [
        BY_RULE
        if winner is not None
        else Decision(format)
        if reason is None
        else Decision(None, f"kept by default: {reason}", True)
        for winner, reason in zip(winners, defaults(format), strict=True)
    ], kept_others


def choose_shards(shards: ShardRules, layers: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """The shards of each layer, given by all of its paths.

    **Raises:** as `choose` does.
    """
    if _is_shards(shards):
        return [shards] * len(layers)
    values = "shards of k and n, such as (1, 8)"
    if not isinstance(shards, Mapping):
        raise TypeError(
            f"{_CALLER}: shards is {brief(shards)}, but it is two numbers, {values}, or a mapping "
            "from regular expressions to such pairs."
        )
    winners, _ = _decide([*shards.items()], layers, (), _shards, values)
    return [(1, 1) if winner is None else winner[1] for winner in winners]


def choose_activations(
    rules: ActivationRules,
    layers: Sequence[Sequence[str]],
    decisions: Sequence[Decision],
    tables: Sequence[bool],
) -> list[Any]:
    """The dtypes to which layers, given by all of their paths, quantize activations, or None.

    A layer that is kept in floats has none, and `tables`, the embeddings, have one by a rule alone.

    **Raises:** as `choose` does.
    """
    at = [i for i, decision in enumerate(decisions) if decision.format is not None]
    if isinstance(rules, Mapping):
        values = "jnp.int8, jnp.float8_e4m3fn or None"
        winners, _ = _decide(
            [*rules.items()], [layers[i] for i in at], (), _activation_dtype, values
        )
        chosen = [None if winner is None else winner[1] for winner in winners]
    else:
        lone = _activation_dtype(rules)
        chosen = [None if tables[i] else lone for i in at]
    found = dict(zip(at, chosen, strict=True))
    return [found.get(i) for i in range(len(layers))]


def _decision(winner: tuple[str, Any] | None) -> Decision:
    if winner is None:
        return UNMATCHED
    return BY_RULE if winner[1] is None else Decision(winner[1])


def _list(keep: Any) -> list[Any]:
    if not isinstance(keep, Sequence):
        raise TypeError(
            f"{_CALLER}: keep is {brief(keep)}, but it is a regular expression on the dotted "
            "path of a layer, or several in a list."
        )
    return [*keep]


def _format(value: object) -> Any:
    return None if value is None else as_format(_CALLER, value)


def _activation_dtype(value: object) -> Any:
    return None if value is None else value_dtype(_CALLER, "activation_dtype", value)


def _shards(value: object) -> tuple[int, int]:
    if not _is_shards(value):
        raise TypeError("no shards")
    return value


def _is_shards(value: object) -> TypeGuard[tuple[int, int]]:
    match value:
        case (int() | np.integer(), int() | np.integer()):
            return isinstance(value, tuple)
        case _:
            return False


def _decide(
    rules: Sequence[Any],
    layers: Sequence[Sequence[str]],
    others: Sequence[str],
    read: Callable[[object], Any],
    values: str,
) -> tuple[list[tuple[str, Any] | None], list[bool]]:
    """The first rule that matches each layer, and which others one with None matches."""
    found = [_compile(rule, read, values) for rule in rules]
    wrong = [error for error in found if isinstance(error, Exception)]
    if wrong:
        kind = type(wrong[0])
        raise kind(f"{_CALLER}: {_listed(list(map(str, wrong)))}")
    compiled = [rule for rule in found if not isinstance(rule, Exception)]

    def first(paths: Sequence[str]) -> int | None:
        return next(
            (i for i, (rule, _) in enumerate(compiled) if any(map(rule.search, paths))), None
        )

    winners = [first(paths) for paths in layers]
    by_others = [first([path]) for path in others]
    kept = [i is not None and compiled[i][1] is None for i in by_others]
    used = {*winners, *(i for i, keeps in zip(by_others, kept, strict=True) if keeps)}
    idle = [_idle(rule, layers, others) for i, (rule, _) in enumerate(compiled) if i not in used]
    if idle:
        raise ValueError(f"{_CALLER}: {_listed(idle)}")
    return [None if i is None else (compiled[i][0].pattern, compiled[i][1]) for i in winners], kept


def _listed(reasons: Sequence[str]) -> str:
    if len(reasons) == 1:
        return reasons[0]
    return f"{len(reasons)} rules are wrong:" + "".join(f"\n- {reason}" for reason in reasons)


def _compile(
    rule: object, read: Callable[[object], Any], values: str
) -> tuple[re.Pattern[str], Any] | Exception:
    try:
        match rule:
            case (str(pattern), value):
                value = read(value)
            case _:
                raise TypeError("no rule")
    except (TypeError, ValueError) as error:
        known = f" ({error.args[0].removeprefix(f'{_CALLER}: ')})" * isinstance(error, ValueError)
        return type(error)(
            f"{_rule_words(rule)} is no rule; a rule is a regular expression on the "
            f"dotted path of a layer with {values}{known}."
        )
    try:
        return re.compile(pattern), value
    except re.error as error:
        return ValueError(f"the rule {pattern!r} is no regular expression: {error}; correct it.")


def _rule_words(rule: object) -> str:
    match rule:
        case (str(pattern), value):
            return f"({pattern!r}, {brief(value)})"
        case _:
            return brief(rule)


def _idle(rule: re.Pattern[str], layers: Sequence[Sequence[str]], others: Sequence[str]) -> str:
    paths = [path for layer in layers for path in layer]
    if any(map(rule.search, paths)):
        return (
            f"the rule {rule.pattern!r} decides about no layer, since earlier "
            "rules match all that it does; put it before them, or remove it."
        )
    if found := [path for path in others if rule.search(path)]:
        return (
            f"the rule {rule.pattern!r} matches no layer that can be quantized, only parameters "
            f"that no such layer holds: {_some(found)}; remove it. The layers are {_some(paths)}."
        )
    return (
        f"the rule {rule.pattern!r} matches no layer; correct or remove it. "
        f"The layers are {_some(paths)}."
    )


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")
