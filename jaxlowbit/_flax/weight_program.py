"""Runs code that multiplies by float weights with packed weights in their place.

The code is traced with the shapes of the float weights, and its program then runs operation by
operation. `WeightView` implements the operations on a weight: it remembers a cast, a transposition
or an index, `dot_general` and `ragged_dot_general` are quantized products, and `gather` is a
lookup.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal

from .weight_view import WeightUseError, WeightView, has_algorithm

Views = Mapping[str, WeightView]


def run(function: Callable[[dict[str, Any]], Any], weights: Views) -> Any:
    """Runs `function` of the float weights (by name) on packed ones.

    Results that are not arrays are returned unchanged.

    **Raises:** `ValueError` if the code uses a weight for anything but products with inputs, as in
    its equation, or lookups of its features.
    """
    leaves: list[Any] = []
    trees: list[Any] = []

    def traced(*floats: Any) -> list[Any]:
        leaves[:], tree = jax.tree.flatten(function(dict(zip(weights, floats, strict=True))))
        trees.append(tree)
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    program = jax.make_jaxpr(traced)(*(view.like() for view in weights.values()))
    held = [_Weight(name, view) for name, view in weights.items()]
    results = iter(_arrays(_run(program, held), "returns it"))
    leaves = [next(results) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    return jax.tree.unflatten(trees[-1], leaves)


class _Weight:
    """A named view, in the place of an array of the program."""

    def __init__(self, name: str, view: WeightView) -> None:
        self.name, self.view = name, view

    def refused(self, reason: Any) -> ValueError:
        return ValueError(
            f"The code of the model {reason}: {self.name} is a packed weight, which multiplies "
            "inputs as its equation says, with casts, transpositions and indices in between; keep "
            "it in floats, with keep= or a rule of its path and None."
        )


def _run(program: Any, operands: Sequence[Any]) -> list[Any]:
    """Runs a closed program; results may be weights."""
    jaxpr, consts = program.jaxpr, program.consts
    return _run_open(jaxpr, [*consts, *operands])


def _run_open(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], operands, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    last = {id(atom): at for at, equation in enumerate(jaxpr.eqns) for atom in equation.invars}
    last |= {id(atom): len(jaxpr.eqns) for atom in jaxpr.outvars}
    for at, equation in enumerate(jaxpr.eqns):
        found = [read(atom) for atom in equation.invars]
        if any(isinstance(x, _Weight) for x in found):
            results = _with_weights(equation, found)
        else:
            primitive = equation.primitive
            with equation.ctx.manager:
                results = primitive.bind(*found, **primitive.get_bind_params(equation.params))
            results = results if primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
        for atom in (*equation.invars, *equation.outvars):  # frees values after their last use
            if not isinstance(atom, Literal) and last.get(id(atom), at) <= at:
                values.pop(atom, None)
    return [read(atom) for atom in jaxpr.outvars]


def _with_weights(equation: Any, operands: list[Any]) -> list[Any]:
    """The results of an operation with weights among its operands."""
    name, params = equation.primitive.name, equation.params
    if name in _PROGRAMS:
        return _PROGRAMS[name](params, operands)
    first = next(x for x in operands if isinstance(x, _Weight))
    try:
        if sum(isinstance(x, _Weight) for x in operands) > 1 or name not in _OPERATIONS:
            raise WeightUseError(f"applies {name} to it")
        views = [x.view if isinstance(x, _Weight) else x for x in operands]
        result = _OPERATIONS[name](params, *views)
    except WeightUseError as error:
        raise first.refused(error) from None
    return [_Weight(first.name, result) if isinstance(result, WeightView) else result]


def _arrays(results: Sequence[Any], what: str) -> list[Any]:
    for result in results:
        if isinstance(result, _Weight):
            raise result.refused(what)
    return list(results)


# --- operations -----------------------------------------------------------------------------------


def _same(params: Any, view: WeightView) -> WeightView:
    del params
    return view


def _broadcast(params: Any, view: WeightView) -> WeightView:
    shape, places = params["shape"], params["broadcast_dimensions"]
    dims: list[Any] = [()] * len(shape)
    for dim, at in zip(view.dims, places, strict=True):
        dims[at] = dim
    found = view.with_dims(dims)
    if found.shape != tuple(shape):
        raise WeightUseError(f"broadcasts it from {view.shape} to {tuple(shape)}")
    return found


def _squeeze(params: Any, view: WeightView) -> WeightView:
    gone = [axis % len(view.dims) for axis in params["dimensions"]]
    return view.reshape([size for at, size in enumerate(view.shape) if at not in gone])


def _slice(params: Any, view: WeightView) -> WeightView:
    starts, ends, strides = (params[x] for x in ("start_indices", "limit_indices", "strides"))
    if strides is not None and any(stride != 1 for stride in strides):
        raise WeightUseError("takes a part of it in strides")
    return _part(view, starts, [end - start for start, end in zip(starts, ends, strict=True)])


def _dynamic_slice(params: Any, view: Any, *starts: Any) -> WeightView:
    if not isinstance(view, WeightView):
        raise WeightUseError("takes it as an index")
    return _part(view, starts, params["slice_sizes"])


def _part(view: WeightView, starts: Sequence[Any], sizes: Sequence[int]) -> WeightView:
    """Selects one index along one axis, and all of the others."""
    cut = [at for at, size in enumerate(sizes) if size != view.shape[at]]
    if not cut:
        return view
    if len(cut) > 1 or sizes[cut[0]] != 1:
        raise WeightUseError(f"takes a part {tuple(sizes)} of its shape {view.shape}")
    (at,) = cut
    return view.select(at, jnp.clip(starts[at], 0, view.shape[at] - 1))


def _gather(params: Any, view: Any, indices: Any) -> Any:
    numbers, sizes, mode = params["dimension_numbers"], params["slice_sizes"], params["mode"]
    if not isinstance(view, WeightView):
        raise WeightUseError("takes it as an index")
    refused = WeightUseError(f"gathers parts {tuple(sizes)} of its shape {view.shape}")
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        raise refused
    (dim,) = numbers.start_index_map
    others = [size for at, size in enumerate(view.shape) if at != dim]
    whole = [*sizes[:dim], *sizes[dim + 1 :]] == others and sizes[dim] == 1
    if not whole or numbers.collapsed_slice_dims != (dim,):
        raise refused
    index, size = indices[..., 0], view.shape[dim]
    lead = index.ndim
    # Axes of the indices that do not come first.
    moved = [at for at in range(lead + len(others)) if at not in numbers.offset_dims]
    order = [*moved, *numbers.offset_dims]
    back = [order.index(at) for at in range(len(order))]
    inside = jnp.clip(index, 0, size - 1)
    filled = mode == lax.GatherScatterMode.FILL_OR_DROP
    if view.dims[dim] and view.dims[dim][0] in view.batch:
        if filled:
            raise WeightUseError("fills what an index beyond its batch axis selects")
        return view.select(dim, inside).without(lead + dim).transpose(back)
    if filled and params["fill_value"] is not None and not math.isnan(params["fill_value"]):
        raise WeightUseError(f"fills what a lookup does not find with {params['fill_value']}")
    # A lookup counts negative tokens from the end; the program has already done that.
    beyond = jnp.where((index >= 0) & (index < size), index, size)
    return view.lookup(dim, beyond if filled else inside).transpose(back)


def _check_product(params: Any) -> None:
    """**Raises:** `WeightUseError` for options of a product that packed weights have not."""
    if has_algorithm(params["precision"]):
        raise WeightUseError(f"multiplies by it with precision={params['precision']}")
    for name in ("out_sharding", "group_offset"):
        if params.get(name) is not None:
            raise WeightUseError(f"multiplies by it with {name}={params[name]}")


def _ragged_dot(params: Any, lhs: Any, rhs: Any, sizes: Any) -> Array:
    _check_product(params)
    numbers = params["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    (row,), groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    plain = batch == ((), ()) and len(groups) == 1 and row not in contracted[0]
    if not plain or not isinstance(rhs, WeightView) or lhs.ndim != len(contracted[0]) + 1:
        raise WeightUseError("multiplies by it in a ragged product that is not one of rows")
    dtype = params["preferred_element_type"]
    return rhs.multiply_groups(lhs, contracted, groups[0], sizes, preferred_element_type=dtype)


def _dot_general(params: Any, lhs: Any, rhs: Any) -> Array:
    _check_product(params)
    contracted, batch = params["dimension_numbers"]
    dtype = params["preferred_element_type"]
    if isinstance(rhs, WeightView):
        return rhs.multiply(lhs, contracted, batch, preferred_element_type=dtype)
    return lhs.multiply(
        rhs, contracted[::-1], batch[::-1], inputs_first=False, preferred_element_type=dtype
    )


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "convert_element_type": lambda params, view: view.astype(params["new_dtype"]),
    "copy": _same,
    "copy_p": _same,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "name": _same,
    "ragged_dot_general": _ragged_dot,
    "reshape": lambda params, view: view.reshape(params["new_sizes"]),
    "sharding_constraint": _same,  # the packed words have their own sharding
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": lambda params, view: view.transpose(params["permutation"]),
}


# --- operations that run programs -----------------------------------------------------------------


def _jit(params: Any, operands: list[Any]) -> list[Any]:
    return _run(params["jaxpr"], operands)


def _checkpoint(params: Any, operands: list[Any]) -> list[Any]:
    arrays = [x for x in operands if not isinstance(x, _Weight)]

    def inner(arrays: list[Any]) -> list[Any]:
        given = iter(arrays)
        found = [x if isinstance(x, _Weight) else next(given) for x in operands]
        return _arrays(_run_open(params["jaxpr"], found), "returns it")

    options = {name: params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(inner, **options)(arrays)


def _cond(params: Any, operands: list[Any]) -> list[Any]:
    index, *given = operands

    def branch(program: Any) -> Callable[[], list[Any]]:
        return lambda: _arrays(_run(program, given), "returns it")

    return lax.switch(index, [branch(program) for program in params["branches"]])


def _scan(params: Any, operands: list[Any]) -> list[Any]:
    """Runs a scan, whose body selects its matrices from the stacks among the operands."""
    if "num_consts" in params:
        sizes = (params["num_consts"], params["num_carry"])
    else:  # JAX 0.11.3 and later
        sizes = tuple(len(part) for part in params["ft_in"].unpack()[:2])
    consts, rest = operands[: sizes[0]], operands[sizes[0] :]
    carry, stacks = _arrays(rest[: sizes[1]], "carries it through a loop"), rest[sizes[1] :]

    def body(carry: list[Any], step: Any) -> tuple[list[Any], list[Any]]:
        number, arrays = step
        given = iter(arrays)
        slices = [_step(x, number) if isinstance(x, _Weight) else next(given) for x in stacks]
        results = _run(params["jaxpr"], [*consts, *carry, *slices])
        results = _arrays(results, "returns it from a loop")
        return results[: len(carry)], results[len(carry) :]

    arrays = [x for x in stacks if not isinstance(x, _Weight)]
    steps = (jnp.arange(params["length"]), arrays)
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, results = lax.scan(body, carry, steps, **options)
    return [*carry, *results]


def _step(weight: _Weight, number: Array) -> _Weight:
    try:
        return _Weight(weight.name, weight.view.select(0, number).without(0))
    except WeightUseError as error:
        raise weight.refused(error) from None


_PROGRAMS: dict[str, Callable[[Any, list[Any]], list[Any]]] = {
    "checkpoint": _checkpoint,
    "closed_call": lambda params, operands: _run(params["call_jaxpr"], operands),
    "cond": _cond,
    "jit": _jit,
    "optimization_barrier": lambda params, operands: operands,
    "pjit": _jit,
    "remat2": _checkpoint,
    "scan": _scan,
}
