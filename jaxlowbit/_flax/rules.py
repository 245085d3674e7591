"""Chooses a format for each layer, by regular expressions on its paths or by a single format."""

import collections
import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from .._core import layout, padding, super_blocks
from .._core.checks import brief
from .._core.format import Format, as_format
from .._core.heads import HEADS, is_router
from .arguments import lhs_qtype as dtype_of
from .arguments import some
from .equation import Equation
from .report import ParameterReport, nbytes_of
from .weights import Shards

Rules = Format | str | Mapping[str, Format | str | None] | Sequence[tuple[str, Format | str | None]]
ShardRules = tuple[int, int] | Mapping[str, tuple[int, int]]
ActivationRules = Any
"""A dtype of quantized activations, None, or a mapping of regular expressions to these."""
Keep = str | Sequence[str]
_CALLER = "quantize_model"
_LISTED = 8


class Candidate(NamedTuple):
    """A layer that could be quantized.

    - `paths`: all of its dotted paths; rules match any of them.
    - `holders`: for a raw parameter, the paths of its modules.
    - `shape`: the shape of the weight.
    - `matrix`: (k, n), or None if it is not a product.
    - `matrices`: the number of such matrices in its weight.
    - `nbytes`, `itemsize`: bytes of the weight, and of one of its elements.
    - `table`: whether it is an embedding, which only a rule that matches its path quantizes.
    """

    paths: Sequence[str]
    holders: Sequence[str]
    shape: tuple[int, ...]
    matrix: tuple[int, int] | None
    matrices: int
    nbytes: int
    itemsize: int
    table: bool

    @classmethod
    def of(
        cls,
        paths: Sequence[str],
        weight: Any,
        equation: Callable[[], Equation],
        *,
        table: bool,
        holders: Sequence[str] = (),
    ) -> "Candidate":
        matrix = None
        with contextlib.suppress(ValueError):  # raised later, if the layer is chosen
            matrix = equation().matrix_shape
        count = math.prod(weight.shape) // math.prod(matrix) if matrix else 1
        sizes = nbytes_of(weight), weight.dtype.itemsize
        return cls(paths, holders, tuple(weight.shape), matrix, count, *sizes, table)


class Choice(NamedTuple):
    """The format of a layer, or None and the reason why it stays in floats."""

    format: Format | None
    reason: str = ""
    by_default: bool = False
    shards: Shards = (1, 1)
    lhs_qtype: Any = None


def choose(
    candidates: Sequence[Candidate],
    uncovered: Sequence[ParameterReport],
    rules: Rules,
    keep: Keep,
    shards: ShardRules,
    lhs_qtype: ActivationRules,
) -> tuple[list[Choice], list[bool]]:
    """Returns a choice for each layer, and whether a rule matches each uncovered parameter.

    **Raises:** `TypeError` for invalid rules; `ValueError` for invalid regular expressions, for
    rules that match no layer (all in one error), and if no layer would be quantized.
    """
    paths = [layer.paths for layer in candidates]
    parts = _choose_shards(shards, paths)
    choices, kept = _choose_formats(candidates, uncovered, rules, keep, parts)
    _check_any(candidates, choices)
    dtypes = _choose_activations(lhs_qtype, candidates, choices)
    options = zip(choices, parts, dtypes, strict=True)
    return [x._replace(shards=part, lhs_qtype=dtype) for x, part, dtype in options], kept


def _choose_formats(
    candidates: Sequence[Candidate],
    uncovered: Sequence[ParameterReport],
    rules: Rules,
    keep: Keep,
    shards: Sequence[Shards],
) -> tuple[list[Choice], list[bool]]:
    kept = [(pattern, None) for pattern in ((keep,) if isinstance(keep, str) else _list(keep))]
    lone = isinstance(rules, Format | str)
    if not lone and not isinstance(rules, Mapping | Sequence):
        raise TypeError(
            f"{_CALLER}: rules is {brief(rules)}, but it must be a Format, such as jaxlowbit.INT4, "
            "a name of one, such as 'int4', or a mapping from regular expressions to them."
        )
    pairs = [] if lone else [*(rules.items() if isinstance(rules, Mapping) else rules)]
    values = "a Format, the name of one, or with None to keep the layer"
    layers = [layer.paths for layer in candidates]
    others = [found.path for found in uncovered]
    winners, kept_others = _decide([*kept, *pairs], layers, others, _format, values)
    by_rule = Choice(None, "kept by a rule")
    if not lone:
        unmatched = Choice(None, "kept: no rule matches")
        return [
            unmatched if winner is None else by_rule if winner[1] is None else Choice(winner[1])
            for winner in winners
        ], kept_others
    format = as_format(_CALLER, rules)
    tables = [x.shape for x in uncovered if _is_table(x)]
    reasons = _kept_by_default(candidates, tables, shards, format)
    return [
        by_rule
        if winner is not None
        else Choice(format)
        if reason is None
        else Choice(None, f"kept by default: {reason}", True)
        for winner, reason in zip(winners, reasons, strict=True)
    ], kept_others


def _choose_shards(shards: ShardRules, layers: Sequence[Sequence[str]]) -> list[Shards]:
    """The shards of each layer, given by all of its paths."""
    if _is_shards(shards):
        return [shards] * len(layers)
    values = "shards of k and n, such as (1, 8)"
    if not isinstance(shards, Mapping):
        raise TypeError(
            f"{_CALLER}: shards is {brief(shards)}, but it must be two numbers, {values}, or a "
            "mapping from regular expressions to such pairs."
        )
    winners, _ = _decide([*shards.items()], layers, (), _shards, values)
    return [(1, 1) if winner is None else winner[1] for winner in winners]


def _choose_activations(
    rules: ActivationRules, candidates: Sequence[Candidate], choices: Sequence[Choice]
) -> list[Any]:
    """The dtypes of the quantized activations of layers, or None.

    A float layer has none, and an embedding only by a rule.
    """
    read = functools.partial(dtype_of, _CALLER)
    at = [i for i, choice in enumerate(choices) if choice.format is not None]
    if isinstance(rules, Mapping):
        values = "jnp.int8, jnp.float8_e4m3fn or None"
        paths = [candidates[i].paths for i in at]
        winners, _ = _decide([*rules.items()], paths, (), read, values)
        chosen = [None if winner is None else winner[1] for winner in winners]
    else:
        lone = read(rules)
        chosen = [None if candidates[i].table else lone for i in at]
    found = dict(zip(at, chosen, strict=True))
    return [found.get(i) for i in range(len(choices))]


def _check_any(candidates: Sequence[Candidate], choices: Sequence[Choice]) -> None:
    """Raises `ValueError` if all layers stay in floats, with the reasons."""
    if any(choice.format is not None for choice in choices):
        return
    kept = [*zip(candidates, choices, strict=True)]
    listed = "".join(
        f"\n- {layer.paths[0] or 'the model'} {layer.shape}: {choice.reason}"
        for layer, choice in kept[:_LISTED]
    )
    more = f"\n- and {len(kept) - _LISTED} more" if len(kept) > _LISTED else ""
    raise ValueError(
        "quantize_model: no layer would be quantized, and the model is as it was; name layers by "
        f"rules, such as {{'': jaxlowbit.INT4}} for all. The layers are{listed}{more}."
    )


def check_replaceable(reasons: Iterable[tuple[str, str | None]]) -> None:
    """Raises one `ValueError` for all chosen layers that cannot be quantized, before any changes.

    `reasons`: for each layer, its path and the reason why it cannot be quantized, or None.
    """
    found = [(path, reason) for path, reason in reasons if reason is not None]
    if len(found) == 1:
        raise ValueError(f"quantize_model: {found[0][1]}")
    if found:
        more = ", ".join(path for path, _ in found[_LISTED:])
        rest = f"\n- and {len(found) - _LISTED} more: {more}" if more else ""
        listed = "".join(f"\n- {reason}" for _, reason in found[:_LISTED])
        raise ValueError(
            f"quantize_model: {len(found)} layers cannot be quantized, and none was: correct them, "
            f"or keep them, with keep= or rules of their paths and None.{listed}{rest}"
        )


# --- a single format
# --------------------------------------------------------------------------------


def _kept_by_default(
    candidates: Sequence[Candidate],
    tables: Iterable[tuple[int, ...]],
    shards: Sequence[Shards],
    format: Format,
) -> list[str | None]:
    """The reason why a single format leaves each layer in floats, or None.

    `tables`: shapes of other parameters that may be embeddings.
    """
    heads = _heads(candidates, tables)
    reasons = []
    for i, (layer, parts) in enumerate(zip(candidates, shards, strict=True)):
        names = (*layer.paths, *layer.holders)
        if layer.table:
            reason = "an embedding"
        elif any(re.search(HEADS, name) for name in names):
            reason = "a head, by its name"
        elif i in heads:
            reason = "a head, as wide as the vocabulary"
        elif layer.matrix and any(is_router(name, *layer.matrix) for name in names):
            reason = "a router"
        elif _grows(layer, format, parts):
            reason = "it would grow"
        else:
            reason = None
        reasons.append(reason)
    return reasons


def _heads(candidates: Sequence[Candidate], tables: Iterable[tuple[int, ...]]) -> set[int]:
    """The numbers of the layers whose result is as wide as a vocabulary.

    A vocabulary is wider than its embeddings. A layer that is repeated in blocks is not a head,
    even if its width matches by chance. The outermost layers among the others are heads.
    """
    known = [layer.matrix for layer in candidates if layer.table and layer.matrix]
    sizes = {(width, size) for width, size in known if size > width}
    sizes |= {(min(shape), max(shape)) for shape in tables if len(shape) == 2}
    sizes = {size for width, size in sizes if size > width}
    found = {
        i: re.sub(r"\d+", "#", layer.paths[0])
        for i, layer in enumerate(candidates)
        if not layer.table
        and layer.matrices == 1
        and layer.matrix
        and layer.matrix[1] in sizes
        and layer.matrix[1] > layer.matrix[0]
    }
    repeated = collections.Counter(found.values())
    single = {i: path.count(".") for i, path in found.items() if repeated[path] == 1}
    return {i for i, depth in single.items() if depth == min(single.values())}


def _grows(layer: Candidate, format: Format, shards: Shards) -> bool:
    """Whether the quantized arrays of a weight would take at least as many bytes as the weight."""
    if layer.matrix is None:
        return False
    unit = format.shard_unit
    sizes = tuple(zip(layer.matrix, shards, (unit, layout.ATOM), strict=True))
    if any(count < 1 or size % count for size, count, _ in sizes):
        return False  # such shards raise an error later
    k, n = (padding.spread_size(*size) for size in sizes)
    floats = layer.itemsize if format.scale is None else 1
    zero = {"none": 0, "integer": 1, "float": floats}[format.zero]
    words, groups = map(math.prod, super_blocks.stored_shapes(k, n, format))
    # bytes of the version, and of tensor scales
    others = 4 + 4 * format.has_tensor_scale * (n if format.scales_channels else 1)
    return layer.matrices * (4 * words + groups * (floats + zero) + others) >= layer.nbytes


def _is_table(parameter: ParameterReport) -> bool:
    """Whether a parameter outside of known layers may be an embedding, by its name."""
    named = re.search(r"embed|wte|vocab", parameter.path, re.I)
    return len(parameter.shape) == 2 and named is not None


# --- rules ----------------------------------------------------------------------------------------


def _list(keep: Any) -> list[Any]:
    if not isinstance(keep, Sequence):
        raise TypeError(
            f"{_CALLER}: keep is {brief(keep)}, but it must be a regular expression on the dotted "
            "path of a layer, or several in a list."
        )
    return [*keep]


def _format(value: object) -> Any:
    return None if value is None else as_format(_CALLER, value)


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
    """The first rule that matches each layer, and whether each of `others` matches a rule with
    None."""
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
            "rules match all of its layers; put it before them, or remove it."
        )
    if found := [path for path in others if rule.search(path)]:
        return (
            f"the rule {rule.pattern!r} matches no layer that can be quantized, only parameters "
            f"of no such layer: {some(found)}; remove it. The layers are {some(paths)}."
        )
    return (
        f"the rule {rule.pattern!r} matches no layer; correct or remove it. "
        f"The layers are {some(paths)}."
    )
