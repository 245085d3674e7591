"""Joins several custom calls to one that runs them in order (`xla_ffi/layers.h`)."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from .call import SEQUENCE_TARGET, Call


class Layer(NamedTuple):
    """One of the calls to join.

    - `links`: operands by place that are results, by place, of the call before.
    - `aliases`, `sums`, `attributes`: as for `Call.run`.
    """

    call: Call
    links: Mapping[int, int] = {}
    aliases: Mapping[int, int] = {}
    sums: int = 0
    attributes: Mapping[str, Any] = {}

    def updates(self, place: int) -> bool:
        """Whether a result overwrites an operand."""
        return -place - 1 in self.aliases.values()


def run_layers(layers: Sequence[Layer]) -> list[dict[int, Array]]:
    """Returns for each call its results by place: all results of the last call, and from other
    calls the results that overwrite operands."""
    if len(layers) == 1:
        (only,) = layers
        outs = only.call.run(sums=only.sums, aliases={**only.aliases}, **only.attributes)
        return [dict(zip(only.call.result_places, outs, strict=True))]
    joined, numbers = _Joined(), []
    sizes = [layer.call.workspace(layer.sums) for layer in layers]
    workspace = joined.result(max(sizes, key=lambda size: size.shape))
    attributes, kinds = _kinds([{**x.call.attributes(), **x.attributes} for x in layers])
    places: list[dict[int, int]] = []
    for i, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        results = joined.results_of(layer, i)
        operands = joined.operands_of(layer, results, places[-1] if places else {})
        places.append(results)
        own = [*operands, *results.values(), workspace]
        numbers += [kind, len(operands), len(own) - len(operands), *own]
    call = jax.ffi.ffi_call(
        SEQUENCE_TARGET, joined.results, input_output_aliases=joined.input_output
    )
    outs = call(*joined.operands, layers=np.array(numbers, np.int64), **attributes)
    return [
        {
            place: outs[-number - 1]
            for place, number in results.items()
            if layer is layers[-1] or layer.updates(place)
        }
        for layer, results in zip(layers, places, strict=True)
    ]


@dataclasses.dataclass
class _Joined:
    """Operands and results of the joined call."""

    operands: list[Array] = dataclasses.field(default_factory=list)
    results: list[jax.ShapeDtypeStruct] = dataclasses.field(default_factory=list)
    input_output: dict[int, int] = dataclasses.field(default_factory=dict)
    _reused: dict[Any, int] = dataclasses.field(default_factory=dict)

    def result(self, like: Any) -> int:
        """Appends a result, and returns its place."""
        self.results.append(like)
        return -len(self.results)

    def results_of(self, layer: Layer, number: int) -> dict[int, int]:
        """The places of the results of call `number`, by their places in this call.

        A result that overwrites no operand shares its buffer with other calls, but not with the
        call before, since this call may read results of that one.
        """
        used, places = collections.Counter[Any](), {}
        for place in layer.call.result_places:
            like = layer.call.at[place]
            if layer.updates(place):
                places[place] = self.result(like)
                continue
            kind = number % 2, like.shape, like.dtype
            used[kind] += 1
            key = kind, used[kind]
            if key not in self._reused:
                self._reused[key] = self.result(like)
            places[place] = self._reused[key]
        return places

    def operands_of(
        self, layer: Layer, results: dict[int, int], before: dict[int, int]
    ) -> list[int]:
        """The places of the operands; `results`, `before`: of this call and the one before."""
        places = []
        for place in layer.call.operand_places:
            if place in layer.links:
                places.append(before[layer.links[place]])
                continue
            self.operands.append(layer.call.at[place])
            places.append(len(self.operands))
            if place - 1 in layer.aliases:
                updated = results[-layer.aliases[place - 1] - 1]
                self.input_output[len(self.operands) - 1] = -updated - 1
        return places


def _kinds(attributes: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[int]]:
    """The attributes of the joined call, and the kind of each call: equal attributes, equal kind.

    An attribute with different values has the kind as a suffix.
    """
    kinds: list[Mapping[str, Any]] = []
    known: dict[Any, int] = {}
    of_calls = []
    for own in attributes:
        key = tuple((name, _frozen(value)) for name, value in sorted(own.items()))
        if key not in known:
            known[key] = len(kinds)
            kinds.append(own)
        of_calls.append(known[key])
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for own in kinds for name in own):
        values = {i: own[name] for i, own in enumerate(kinds) if name in own}
        if len(values) == len(kinds) and len({_frozen(value) for value in values.values()}) == 1:
            joined[name] = values[0]
        else:
            joined |= {f"{name}.{i}": value for i, value in values.items()}
    return joined, of_calls


def _frozen(value: Any) -> Any:
    return value if isinstance(value, str) else (value.dtype.str, value.tobytes())
