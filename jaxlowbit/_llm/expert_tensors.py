"""Experts of model files, in a tensor each or in stacks, as lists with a tensor per expert."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..checkpoint._files import AGAIN, FLOATS, Tensor
from ..checkpoint._matrix import Matrix
from .architectures import fused
from .config import Config, is_matrix

_SINGLE = re.compile(r"(layers\.\d+\.\w+)\.(\d+)")


def split_name(name: str) -> tuple[str, int | None]:
    """Our name of a weight without the number of an expert, and that number or None.

    ```python
    split_name("layers.0.gate.3")  # layers.0.gate and 3
    ```
    """
    found = _SINGLE.fullmatch(name)
    return (name, None) if found is None else (found[1], int(found[2]))


def lists_of(path: Path, weights: Mapping[str, Any], experts: int) -> dict[str, Any]:
    """Weights by our names, with a list in place of the tensors of single experts.

    **Raises:** `ValueError` for an expert that is missing or beyond the configuration, and for a
    weight that the file also has as one tensor.
    """
    found: dict[str, Any] = {}
    singles: dict[str, dict[int, Any]] = {}
    for name, weight in weights.items():
        stem, number = split_name(name)
        if number is None:
            found[name] = weight
        else:
            singles.setdefault(stem, {})[number] = weight
    for stem, tensors in singles.items():
        missing = [i for i in range(experts) if i not in tensors]
        if missing or stem in found:
            fault = (
                f"expert {missing[0]} of {stem!r} is missing"
                if missing
                else (f"the weight {stem!r} is also one tensor")
            )
            raise ValueError(
                f"{path}: {fault}, but each of {experts} experts has one tensor; {AGAIN}."
            )
        if beyond := [i for i in tensors if i >= experts]:
            raise ValueError(
                f"{path}: the weight {stem!r} has expert {beyond[0]}, but there are {experts}, "
                f"counted from 0; {AGAIN}."
            )
        found[stem] = [tensors[i] for i in range(experts)]
    return found


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in a file of a weight, or of one of its experts, by its shape in
    `Config.shapes`."""
    if len(shape) == 2 and name.endswith("_bias"):
        return shape
    return shape[-2:][::-1]


class View(NamedTuple):
    """A part of a float tensor as a matrix (rows, k); `read` returns all of it."""

    tensor: Tensor
    shape: tuple[int, ...]
    read: Callable[[np.ndarray], np.ndarray]

    @property
    def where(self) -> str:
        return self.tensor.where

    @property
    def kind(self) -> str:
        return self.tensor.kind

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.tensor.dtype.itemsize

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.read(self.tensor.array())[start:stop]


def of_stacks(
    weights: Mapping[str, Tensor | Matrix], config: Config
) -> dict[str, Tensor | Matrix | View | list[Any]]:
    """Weights of gpt-oss by our names, with the stacks of experts as lists.

    Fused outputs alternate: gate at even indices, up at odd ones. Stacks of floats are
    (experts, in, out).

    **Raises:** `ValueError` for a stack of another shape.
    """
    shapes, found = config.shapes(), {}
    for name, weight in weights.items():
        parts = fused(name) or (name,)
        stacked = parts[0] in shapes and len(shapes[parts[0]]) == 3
        if not stacked and len(parts) == 1:
            found[name] = weight
            continue
        if stacked != is_matrix(parts[0]) or not _fits(weight, shapes[parts[0]], len(parts)):
            raise ValueError(
                f"{weight.where} is {weight.kind} of shape {weight.shape}, but config.json asks "
                f"for {len(parts)} times {shapes[parts[0]]}; fetch the folder again."
            )
        for i, part in enumerate(parts):
            if isinstance(weight, Matrix):
                numbers = range(config.experts)
                found[part] = [_rows(weight, n, i, len(parts)) for n in numbers]
            elif stacked:
                numbers = range(config.experts)
                found[part] = [_columns(weight, n, i, len(parts)) for n in numbers]
            else:
                found[part] = _bias(weight, i, len(parts))
    return found


def of_rows(weights: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Weights by our names, with stacks (experts, out, in) as lists. Fused outputs are the rows of
    gate, then the rows of up.

    **Raises:** `ValueError` for a stack of another shape, and for a weight that is there twice.
    """
    shapes, found = config.shapes(), {}
    for name, weight in weights.items():
        parts = fused(name) or (name,)
        shape = shapes.get(parts[0], ())
        if len(shape) != 3 or isinstance(weight, list):
            found[name] = weight
            continue
        (experts, k, n), count = shape, len(parts)
        stored = (
            (*(() if weight.stack is None else (weight.stack,)), *weight.shape)
            if isinstance(weight, Matrix)
            else weight.shape
        )
        right = isinstance(weight, Matrix) or weight.kind in FLOATS
        if not right or stored != (experts, count * n, k):
            raise ValueError(
                f"{weight.where} is {weight.kind} of shape {stored}, but config.json asks for "
                f"floats, or a quantized stack, of {(experts, count * n, k)}; {AGAIN}."
            )
        if both := [part for part in parts if part != name and part in weights]:
            raise ValueError(f"{weight.where}: {both[0]!r} is also in other tensors; {AGAIN}.")
        for i, part in enumerate(parts):
            starts = ((expert * count + i) * n for expert in range(experts))
            found[part] = [_range(weight, start, n) for start in starts]
    return found


def _range(stack: Tensor | Matrix, start: int, rows: int) -> Tensor | Matrix:
    """Some rows, counted through the stack, as a matrix."""
    if isinstance(stack, Matrix):
        part = stack.part(start, start + rows)
        return dataclasses.replace(part, stack=None, share=part.share / (stack.stack or 1))
    k = stack.shape[-1]
    return stack._replace(shape=(rows, k), offset=stack.offset + start * k * stack.dtype.itemsize)


def _fits(weight: Tensor | Matrix, shape: tuple[int, ...], parts: int) -> bool:
    """Whether a tensor has the shape of some fused weights, which is (experts, in, out)."""
    *lead, n = shape
    if isinstance(weight, Tensor):
        return weight.kind in FLOATS and weight.shape == (*lead, parts * n)
    return (weight.stack, *weight.shape) == (lead[0], parts * n, lead[-1])


def _rows(stack: Matrix, expert: int, first: int, step: int) -> Matrix:
    """Every `step`-th row of a matrix of a stack."""
    n, k = stack.shape

    def spread(function: Callable[[int, int], Any] | None, pick: Callable[[Any], Any]) -> Any:
        def some(start: int, stop: int) -> Any:
            assert function is not None
            lowest, highest = (expert * n + step * row + first for row in (start, stop - 1))
            return pick(function(lowest, highest + 1))

        return function and some

    def unpacked(found: Any) -> Any:
        arrays = (None if array is None else array[::step] for array in found)
        return type(found)(*arrays)

    return dataclasses.replace(
        stack,
        shape=(n // step, k),
        stack=None,
        unpack=spread(stack.unpack, unpacked),
        floats=spread(stack.floats, lambda found: found[::step]),
        share=stack.share / (step * (stack.stack or 1)),
    )


def _columns(stack: Tensor, expert: int, first: int, step: int) -> View:
    """Every `step`-th column of a matrix (in, out) of a stack, as a matrix (out, in)."""
    _, k, n = stack.shape
    return View(stack, (n // step, k), lambda array: array[expert].T[first::step])


def _bias(bias: Tensor, first: int, step: int) -> View:
    """Every `step`-th bias of all experts."""
    experts, n = bias.shape
    return View(bias, (experts, n // step), lambda array: array[:, first::step])
