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

    def run(self, **options: Any) -> list[Any]:
        return self.call.run(sums=self.sums, aliases={**self.aliases}, **options, **self.attributes)


def run_layers(layers: Sequence[Layer]) -> list[dict[int, Array]]:
    """Returns for each call its results by place: all results of the last call, and from other
    calls the results that overwrite operands."""
    if len(layers) == 1:
        return [{-i: out for i, out in enumerate(layers[0].run(), 1)}]
    joined, numbers = _Joined(), []
    recorded = [_Recorded() for _ in layers]
    for i, (layer, own) in enumerate(zip(layers, recorded, strict=True)):
        layer.run(custom_call=own, **({"follows": np.bool_(True)} if i > 0 else {}))
    workspace = joined.result(max((own.results[-1] for own in recorded), key=lambda x: x.shape))
    attributes, kinds = _kinds([own.attributes for own in recorded])
    places: list[list[int]] = []
    for i, (layer, own) in enumerate(zip(layers, recorded, strict=True)):
        results = joined.results_of(own, i)
        operands = joined.operands_of(own, layer.links, results, places[-1] if places else [])
        places.append(results)
        buffers = [*operands, *results, workspace]
        numbers += [kinds[i], len(operands), len(buffers) - len(operands), *buffers]
    call = jax.ffi.ffi_call(
        SEQUENCE_TARGET, joined.results, input_output_aliases=joined.input_output
    )
    outs = call(*joined.operands, layers=np.array(numbers, np.int64), **attributes)
    return [
        {
            -i - 1: outs[-place - 1]
            for i, place in enumerate(results)
            if own is recorded[-1] or i in own.aliases.values()
        }
        for own, results in zip(recorded, places, strict=True)
    ]


class _Recorded:
    """The arguments of a call of `jax.ffi.ffi_call`, which it replaces; the last result is the
    workspace."""

    def __call__(self, target: str, results: Any, *, input_output_aliases: Any) -> Any:
        self.results, self.aliases = results, input_output_aliases
        return self._record

    def _record(self, *operands: Array, **attributes: Any) -> Any:
        self.operands, self.attributes = operands, attributes
        return self.results


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

    def results_of(self, own: _Recorded, number: int) -> list[int]:
        """The places of the results of call `number`, without its workspace.

        A result that overwrites no operand shares its buffer with other calls, but not with the
        call before, since this call may read results of that one.
        """
        used, places = collections.Counter[Any](), []
        for i, like in enumerate(own.results[:-1]):
            if i in own.aliases.values():
                places.append(self.result(like))
                continue
            kind = number % 2, like.shape, like.dtype
            used[kind] += 1
            key = kind, used[kind]
            if key not in self._reused:
                self._reused[key] = self.result(like)
            places.append(self._reused[key])
        return places

    def operands_of(
        self, own: _Recorded, links: Mapping[int, int], results: list[int], before: list[int]
    ) -> list[int]:
        """The places of the operands; `results`, `before`: of this call and the one before."""
        places = []
        for i, operand in enumerate(own.operands):
            if i + 1 in links:
                places.append(before[-links[i + 1] - 1])
                continue
            self.operands.append(operand)
            places.append(len(self.operands))
            if i in own.aliases:
                self.input_output[len(self.operands) - 1] = -results[own.aliases[i]] - 1
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
