"""Random shapes and formats: products are within the error bound."""

import dataclasses
import math

import hypothesis
import jax.numpy as jnp
import numpy as np
from helpers import assert_within, backends, matmul
from hypothesis import strategies as st
from problems import Problem, operands

# Draws sizes next to a change of code path more often.
SIZES = st.one_of(st.sampled_from([1, 7, 8, 16, 63, 64, 65, 128, 129, 192]), st.integers(1, 200))
ROWS = st.one_of(st.sampled_from([0, 1, 8, 9, 16, 17, 32, 33, 64, 65]), st.integers(1, 140))
WIDTHS = st.one_of(st.sampled_from([4, 8]), st.integers(1, 8))
GROUPS = st.one_of(st.sampled_from([-1, 32, 64, 128]), st.integers(1, 16).map(lambda i: 16 * i))
FLOATS = st.sampled_from(["float32", "bfloat16", "float16"])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    dtype = draw(st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"]))
    problem = Problem(
        name=f"seed {draw(st.integers(0, 2**32 - 1))}",
        m=draw(ROWS),
        k=draw(SIZES),
        n=draw(SIZES),
        bits=draw(WIDTHS),
        group_size=draw(GROUPS),
        zero=draw(st.sampled_from(["none", "integer", "float"])),
        dtype=dtype,
        scale_dtype=draw(FLOATS),
        out_dtype=draw(st.sampled_from([None, "float32"])),
        scale=2.0 ** draw(st.integers(-8, 0)),
        codes=draw(st.sampled_from(["random", "random", "random", "least", "most", "zero"])),
        permuted=draw(st.booleans()),
    )
    shards = [shards for shards in (2, 3, 4) if problem.k % shards == 0]
    if shards and draw(st.integers(0, 3)) == 0:
        problem = dataclasses.replace(problem, shards=draw(st.sampled_from(shards)))
    kind = draw(st.sampled_from(["matrix", "matrix", "rows", "stack", "broadcast", "view"]))
    if kind == "matrix":
        return problem
    lead = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple))
    problem = dataclasses.replace(problem, m=min(problem.m, 20), rows=lead)
    if kind == "stack":
        return dataclasses.replace(problem, stack=lead)
    if kind == "broadcast":
        axes = st.sampled_from(["equal", "of lhs", "of rhs"])
        drawn = [(size, draw(axes)) for size in lead]
        rows = tuple(1 if axis == "of rhs" else size for size, axis in drawn)
        stack = tuple(1 if axis == "of lhs" else size for size, axis in drawn)
        return dataclasses.replace(problem, rows=rows, stack=stack)
    if kind == "view":
        layers = draw(st.integers(1, 3))
        count = math.prod(lead)
        index = draw(st.lists(st.integers(-1, layers), min_size=count, max_size=count))
        index = np.asarray(index).reshape(lead).tolist()
        return dataclasses.replace(problem, stack=(layers,), index=_tuples(index))
    return problem


def _tuples(values):
    return tuple(map(_tuples, values)) if isinstance(values, list) else values


# HYPOTHESIS_PROFILE=thorough runs 5,000. Each example compiles a program.
COUNT = 80 if hypothesis.settings().derandomize else 5000


@hypothesis.given(problems())
@hypothesis.settings(max_examples=COUNT, suppress_health_check=[hypothesis.HealthCheck.too_slow])
def test_products_are_within_their_error_bound(problem):
    lhs, rhs, oracle = operands.__wrapped__(problem)
    # The first backend is the custom call if supported, else the definition.
    backend = backends(problem.dtype, problem.format)[0]
    dtype = problem.result_dtype
    got = matmul(jnp.asarray(lhs), rhs, backend=backend, preferred_element_type=dtype)
    assert got.dtype == dtype
    assert_within(got, oracle.exact, oracle.bound(dtype))
    assert np.asarray(got).shape == oracle.exact.shape
