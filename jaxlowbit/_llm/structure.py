"""The structure of a decoder, as a static argument of programs that take its weights as a list."""

import functools
from typing import Any

import jax
from flax import nnx
from jax import Array

from .decoder import Decoder


class Structure:
    """A decoder without its weights.

    `split` returns the same object for decoders of the same structure, and jit compares it by
    identity. With the result of `nnx.split`, jit compared metadata and flattened 650 arrays in each
    call of Llama 3 8B, which took 4 ms, half as long as its eight steps on four GPUs.
    """

    def __init__(self, graph: Any, tree: Any) -> None:
        self.graph, self.tree = graph, tree

    def merge(self, weights: list[Array]) -> Decoder:
        """The decoder with these weights."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, weights))


_known = functools.cache(Structure)


def split(decoder: Decoder) -> tuple[Structure, list[Array]]:
    """The structure of a decoder, and its weights."""
    graph, state = nnx.split(decoder)
    weights, tree = jax.tree.flatten(state)
    return _known(graph, tree), weights
