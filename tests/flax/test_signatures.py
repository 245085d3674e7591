"""Quantized layers take the arguments of the Flax layers that they replace."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from flax import linen as nn
from flax import nnx

from jaxlowbit import linen as jl_linen
from jaxlowbit import nnx as jl_nnx

PAGE = (Path(__file__).parents[2] / "docs/flax.md").read_text()
DENSE = {"precision", "dot_general", "dot_general_cls"}
LAYERS: dict[tuple[Any, Any], set[str]] = {
    (nnx.Linear, jl_nnx.QuantizedLinear): {"precision", "dot_general"},
    (nnx.LinearGeneral, jl_nnx.QuantizedLinearGeneral): DENSE,
    (nnx.Einsum, jl_nnx.QuantizedEinsum): {"precision", "einsum_op"},
    (nnx.Embed, jl_nnx.QuantizedEmbed): set(),
    (nn.Dense, jl_linen.QuantizedDense): DENSE,
    (nn.DenseGeneral, jl_linen.QuantizedDenseGeneral): DENSE,
    (nn.Einsum, jl_linen.QuantizedEinsum): {"precision"},
    (nn.Embed, jl_linen.QuantizedEmbed): set(),
}
"""Layers of Flax and of this package, and Flax arguments without a quantized counterpart."""
ALL = [pytest.param(*pair, id=f"{pair[0].__module__}.{pair[0].__name__}") for pair in LAYERS]


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


@pytest.mark.parametrize(("theirs", "ours"), ALL)
def test_constructors_have_equal_arguments(theirs, ours):
    """Defaults are the same too, except that Linen's `Einsum` may get its equation per call."""
    wanted, found = parameters(theirs.__init__), parameters(ours.__init__)
    assert wanted.keys() - found.keys() == LAYERS[theirs, ours]
    assert found.keys() - wanted.keys() == {"format", "shards", "lhs_qtype"}
    for name in (wanted.keys() & found.keys()) - {"einsum_str"}:
        default, own = wanted[name].default, found[name].default
        initialiser = name.endswith("_init")  # each class creates a new function
        assert callable(own) if initialiser else own == default, name


@pytest.mark.parametrize(("theirs", "ours"), ALL)
def test_methods_have_equal_arguments(theirs, ours):
    for method in {"__call__", "attend"} & set(dir(theirs)):
        wanted, found = (list(parameters(getattr(layer, method))) for layer in (theirs, ours))
        if theirs is nn.Einsum:
            wanted.remove("einsum_str")
        assert found == wanted, method


def test_the_page_names_the_omitted_parts():
    section = PAGE.partition("\n## Layers\n")[2]
    for name in set().union(*LAYERS.values()):
        assert re.search(rf"`{name}`", section), name
