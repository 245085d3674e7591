"""`mixed`: a format for each layer of a model, for a target of bits per weight."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .._core import checks
from .._core.format import as_format, format_name
from .._core.format_table import bits_per_weight


class Plan(NamedTuple):
    """A format for each layer of a model; a table when printed.

    - `rules`: names of formats by regular expressions on the names of weights, as `quantize_model`
      and `llm.load` take them.
    - `bits`: bits per weight of these layers, with scales and zeros.
    - `error`: the sum of the errors of the layers.
    """

    rules: dict[str, str]
    bits: float
    error: float

    def __str__(self) -> str:
        width = max(map(len, self.rules), default=0)
        lines = [f"{rule:{width}}  {format}" for rule, format in self.rules.items()]
        return "\n".join([*lines, f"{self.bits:.3f} bits per weight, error {self.error:.4g}"])


class _Step(NamedTuple):
    """A change of a layer's format: reduction of the error per additional bit, and the bits."""

    gain: float
    bits: float
    rule: str
    format: str


def mixed(
    errors: Mapping[str, Mapping[str, float]],
    sizes: Mapping[str, int],
    bits: float,
) -> Plan:
    """Returns the formats with the smallest sum of errors within a number of bits per weight.

    The choice is greedy: changes to larger formats are made in the order of their reduction of the
    error per bit. It considers the formats on the lower convex hull of a layer's errors over its
    bits, so only the last changes can differ from the optimum.

    **Arguments:**

    - `errors`: for each layer, by a regular expression that matches its name, the error of the
      model with the layer in each format, by the name of the format, such as an increase of the
      loss. Errors add up.
    - `sizes`: the number of weights of each layer.
    - `bits`: bits per weight of all layers together, with scales (16 bits each) and zeros.

    **Returns:** a named tuple, a table when printed: `rules`, names of formats by regular
    expressions, as `quantize_model` and `llm.load` take them; `bits` per weight; and `error`, the
    sum of the errors.

    **Raises:** `ValueError` for fewer bits than the smallest formats take, for errors that are not
    finite or are below 0, and for layers without a format or a size.

    ```python
    errors = {"^first$": {"int3": 0.5, "int4": 0.1}, "^last$": {"int3": 0.1, "int4": 0.03}}
    mixed(errors, {"^first$": 1000, "^last$": 1000}, 3.7).rules  # int4 first
    ```
    """
    bits = checks.positive("mixed", "bits", bits)
    _check_layers("errors", errors, Mapping, "a dict of errors by format")
    _check_layers("sizes", sizes, int, "a number of weights")
    hulls = {rule: _hull(rule, found) for rule, found in errors.items()}
    if not hulls or hulls.keys() != sizes.keys():
        missing = ", ".join(sorted(hulls.keys() ^ sizes.keys())[:8]) or "all layers"
        raise ValueError(f"mixed: errors or sizes lack {missing}; pass both for each layer.")
    total = sum(sizes.values())
    chosen = {rule: hull[0] for rule, hull in hulls.items()}
    used = sum(sizes[rule] * point.bits for rule, point in chosen.items())
    if used > bits * total * (1 + 1e-9):
        raise ValueError(
            f"mixed: bits is {bits:g}, but the smallest formats take {used / total:.4g} bits per "
            "weight; allow more bits, or smaller formats."
        )
    steps = sorted(
        (step for rule, hull in hulls.items() for step in _steps(rule, hull, sizes[rule])),
        key=lambda step: -step.gain,
    )
    stopped: set[str] = set()
    for step in steps:
        if step.rule in stopped or used + step.bits > bits * total * (1 + 1e-9):
            stopped.add(step.rule)  # later steps of a layer start from this one
            continue
        used += step.bits
        chosen[step.rule] = next(x for x in hulls[step.rule] if x.format == step.format)
    rules = {rule: point.format for rule, point in chosen.items()}
    return Plan(rules, used / total, sum(point.error for point in chosen.values()))


def _check_layers(name: str, given: Any, kind: type, rule: str) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"mixed: {name} is {checks.brief(given)}, but it must be a dict with {rule} for each "
            "layer."
        )
    for layer, value in given.items():
        if not isinstance(value, kind):
            raise TypeError(
                f"mixed: {name}[{layer!r}] is {checks.brief(value)}, but it must be {rule}."
            )


class _Point(NamedTuple):
    """A format of a layer: its bits per weight, and the error."""

    bits: float
    error: float
    format: str


def _hull(rule: str, errors: Mapping[str, float]) -> list[_Point]:
    """The formats on the lower convex hull, by rising bits and falling errors."""
    points = []
    for given, error in errors.items():
        format = as_format("mixed", given)
        if not 0 <= error < float("inf"):
            raise ValueError(
                f"mixed: the error of {rule} is {error} in {format_name(format)}, but it must be a "
                "finite number from 0 on."
            )
        points.append(_Point(bits_per_weight(format), float(error), format_name(format)))
    if not points:
        raise ValueError(f"mixed: {rule} has no format; name one or more.")
    hull: list[_Point] = []
    for point in sorted(points):
        if hull and point.error >= hull[-1].error:
            continue
        if hull and point.bits == hull[-1].bits:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _gain(first: _Point, last: _Point) -> float:
    return (first.error - last.error) / (last.bits - first.bits)


def _steps(rule: str, hull: list[_Point], size: int) -> Iterator[_Step]:
    for first, last in itertools.pairwise(hull):
        more = size * (last.bits - first.bits)
        yield _Step((first.error - last.error) / more, more, rule, last.format)
