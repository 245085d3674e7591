"""Which layer gets which format: regular expressions on the paths of layers, the first one wins."""

import re
from collections.abc import Mapping, Sequence

from .._formats import Format

HEADS = r"(^|\.)(lm_head|head|heads|logits|classifier|score|output_projection|unembed)$"
"""Usual names of the layer that makes logits: what a lone `Format` keeps in floats."""

Rules = Format | Mapping[str, Format | None] | Sequence[tuple[str, Format | None]]


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
    pairs = rules.items() if isinstance(rules, Mapping) else rules
    compiled = [_compile(rule) for rule in pairs]
    winners = [
        next((i for i, (rule, _) in enumerate(compiled) if any(map(rule.search, paths))), None)
        for paths in layers
    ]
    for i, (rule, _) in enumerate(compiled):
        if i not in winners:
            raise ValueError(_idle(rule, layers))
    return [None if i is None else compiled[i][1] for i in winners]


def _compile(rule: object) -> tuple[re.Pattern[str], Format | None]:
    match rule:
        case (str(pattern), Format() | None as format):
            pass
        case _:
            raise TypeError(
                f"quantize_model: {rule!r} is no rule; a rule is a regular expression on the "
                "dotted path of a layer with a Format, or with None to keep the layer."
            )
    try:
        return re.compile(pattern), format
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
        f"The layers are {listed or 'none at all'}."
    )
