"""Random programs around products (`programs.py`), compared with the definition."""

import collections
import dataclasses
import functools
import os
import random
import sys
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import programs
import pytest
import run_programs
from hypothesis import strategies as st
from pairwise import pairwise
from programs import KINDS, Call, Loop, Program, View, check, sample

import jaxlowbit

# HYPOTHESIS_PROFILE=thorough runs 3,000.
COUNT = 20 if hypothesis.settings().derandomize else 3000


@hypothesis.given(st.builds(sample, st.randoms(use_true_random=False)))
@hypothesis.settings(
    max_examples=COUNT,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
        hypothesis.HealthCheck.large_base_example,
    ],
)
def test_programs_are_their_definitions(program):
    check(program)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("setting", run_programs.PLAIN)
def test_programs_on_a_gpu(setting):
    """Under different XLA settings; `tools/run_programs.py` runs more programs."""
    first = 10_000 * (1 + run_programs.PLAIN.index(setting))
    workers = os.cpu_count() or 1
    flags = run_programs.SETTINGS[setting]
    found = run_programs.run(setting, flags, first=first, count=500, workers=workers)
    print(found)
    assert found.programs == 500 and not found.failures, "\n".join([*found.failures, str(found)])
    if jax.__version_info__ >= (0, 11, 1):
        assert (found.fused > 0) == (setting != "slices copied"), found
    if found.replayed is not None and "graphs" in setting:
        assert (found.replayed > 0) == (setting != "no graphs"), found


# --- the checks detect errors ---------------------------------------------------------------------

IN_PLACE = Program(
    (Call("matmul", 9, View("grid", 1), View("grid", 1), residual=View("grid", 3)),), d=192
)
IN_A_LOOP = Program(
    (
        Loop("fori", 3, (Call("matmul", 4, View("flat", 3, 256), View("flat", 3, 256)),)),
        Call("wide", 5, View("grid"), None, residual=View("flat", 1)),
    ),
    d=64,
    e=136,
    bits=8,
)
# Row magnitudes diverge, and their errors too: the largest is hundreds of times the median.
GATES = Program(
    (
        Loop("fori", 2, (Call("matmul", 40, View("grid"), View("grid"), store="add"),)),
        Loop("fori", 4, (Call("mlp", 40, View("grid", 1), View("grid")),)),
    ),
    e=256,
)


def rows_moved(lhs, rhs, right, residual):
    """Computes the last row from a result that overwrote it."""
    return right(lhs.at[-1, : rhs.n].set(right(lhs)[0, : rhs.k]))


def residual_moved(lhs, rhs, right, residual):
    return (
        right(lhs)
        if residual is None
        else right(lhs) - residual + residual.at[1:].set(residual[:-1])
    )


def other_scale(lhs, rhs, right, residual):
    """Doubles the scale of one group in one column."""
    scale = rhs.scale.at[..., 0, 0, 0].multiply(2)
    return right(lhs, dataclasses.replace(rhs, scale=scale))


def element_missing(lhs, rhs, right, residual):
    return right(lhs).at[-1, -1].multiply(0)


def tile_missing(lhs, rhs, right, residual):
    return right(lhs).at[-8:, -8:].multiply(0)


def rows_shifted(lhs, rhs, right, residual):
    return right(jnp.roll(lhs, 1, axis=0))


@functools.cache
def check_once(program: Program) -> None:
    """Checks the unmodified product; all modifications below use the same programs."""
    check(program)


DTYPES = ("bfloat16", "float16", "float32")
WRONG = (rows_moved, residual_moved, other_scale, element_missing)


@pytest.mark.parametrize(
    ("wrong", "where", "dtype"), pairwise(WRONG, ("in place", "in a loop"), DTYPES)
)
def test_wrong_results_are_reported(monkeypatch, wrong, where, dtype):
    program = {"in place": IN_PLACE, "in a loop": IN_A_LOOP}[where]
    program = dataclasses.replace(program, dtype=dtype)
    check_once(program)
    matmul = jaxlowbit.quantized_matmul

    def wrong_matmul(lhs: Any, rhs: Any, *, backend: Any, residual: Any = None, **options: Any):
        def right(lhs: Any, rhs: Any = rhs) -> Any:
            return matmul(lhs, rhs, backend=backend, residual=residual, **options)

        return right(lhs) if backend == "xla" else wrong(lhs, rhs, right, residual)

    monkeypatch.setattr(jaxlowbit, "quantized_matmul", wrong_matmul)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ elements .* differ, .*\nProgram\(steps="):
        check(program)


# bfloat16 has the widest bound, so errors are hardest to detect.
@pytest.mark.parametrize(
    ("wrong", "dtype"),
    [
        (rows_shifted, "bfloat16"),
        (tile_missing, "bfloat16"),
        (element_missing, "bfloat16"),
        (element_missing, "float16"),
        (rows_shifted, "float32"),
    ],
)
def test_wrong_results_between_gates_are_reported(monkeypatch, wrong, dtype):
    program = dataclasses.replace(GATES, dtype=dtype)
    check_once(program)
    mlp = jaxlowbit.quantized_mlp

    def wrong_mlp(lhs: Any, *, gate_up: Any, down: Any, backend: Any) -> Any:
        def right(lhs: Any) -> Any:
            return mlp(lhs, gate_up=gate_up, down=down, backend=backend)

        return right(lhs) if backend == "xla" else wrong(lhs, gate_up, right, None)

    monkeypatch.setattr(jaxlowbit, "quantized_mlp", wrong_mlp)
    with pytest.raises(AssertionError, match=r"\d+ of \d+ elements .* differ"):
        check(program)


def test_a_repr_makes_the_program_again():
    for number in range(200):
        program = sample(random.Random(number), large=True)
        assert eval(repr(program), {**vars(programs)}) == program


def test_samples_contain_programs_that_xla_may_split():
    seen: collections.Counter[str] = collections.Counter()
    for number in range(500):
        program = sample(random.Random(number), large=True)
        seen.update([program.dtype, program.zero, f"gap {program.gap}", f"{program.bits} bits"])
        for step in program.steps:
            seen.update([step.kind] if isinstance(step, Loop) else [])
        for call, turns in program.calls():
            width = program.width(KINDS[call.kind].into)
            rows = width if call.lhs.buffer == "flat" else 1
            seen.update([f"call {call.kind}", call.pick, f"activation {call.activation}"])
            seen["no rows"] += call.m == 0
            seen["an odd element"] += call.lhs.buffer == "flat" and call.lhs.start % 2 == 1
            seen["result over lhs"] += call.out == call.lhs
            if call.out and call.out.buffer == call.lhs.buffer and width == program.d:
                seen["result overlaps lhs"] += 0 < call.out.start - call.lhs.start < call.m * rows
            seen["moves by less than its rows"] += turns > 1 and 0 < call.lhs.step < call.m * rows
            seen["updated and read"] += call.residual is not None and call.residual == call.out
    expected = [f"call {name}" for name in KINDS]
    expected += ["fori", "while", "cond", "scan", "layers", "select"]
    expected += ["bfloat16", "float16", "float32", "4 bits", "8 bits", "none", "integer", "float"]
    expected += ["gap None", "gap 1", "slice", "turn", "layer", "activation gelu", "no rows"]
    expected += ["an odd element", "result over lhs", "result overlaps lhs", "updated and read"]
    expected += ["moves by less than its rows"]
    rare = {name: seen[name] for name in expected if seen[name] < 20}
    assert not rare, f"of 500 programs, fewer than 20 have these: {rare}"


# --- the runner -----------------------------------------------------------------------------------


def test_workers_run_programs_and_count_them():
    found = run_programs.run("default", "", first=0, count=2, workers=1)
    assert (found.programs, found.failures, found.fused) == (2, [], 0)
    assert 0 <= found.worst <= 1 and str(found).startswith("default: 2 programs, 0 fail, 0 with")


def fake_worker(*lines: str) -> list[str]:
    """A worker that replaces its first program by these lines of Python."""
    begin = "number = int(sys.argv[1])"
    say = "say = lambda **line: print(json.dumps({'number': number, **line}), flush=True)"
    started = "say(program=f'Program {number}')"
    script = "\n".join(["import json, os, sys, time", begin, say, started, *lines])
    return [sys.executable, "-c", script]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("os.abort()", "exit status -6, no message in\nProgram {}"),
        ("time.sleep(60)", "more than 1 s in\nProgram {}"),
        ("say(error='wrong')", "wrong"),
    ],
    ids=["a fault", "a hang", "an error"],
)
def test_workers_that_die_are_replaced_and_their_programs_named(monkeypatch, line, message):
    monkeypatch.setattr(run_programs, "_SECONDS", 1)
    command = fake_worker(line)
    told: list[str] = []
    found = run_programs.run(
        "", "", first=5, count=3, workers=2, command=command, report=told.append
    )
    want = [f"program {number}: {message.format(number)}" for number in (5, 6, 7)]
    assert sorted(found.failures) == sorted(told) == want and found.programs == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [("raise SystemExit('no such flag')", "exit status 1, no such flag"), ("", "the worker ended")],
)
def test_workers_that_cannot_start_are_not_tried_again(line, message):
    command = [sys.executable, "-c", line]
    found = run_programs.run("", "", first=0, count=4, workers=2, command=command)
    assert sorted(found.failures) == [f"program {number}: {message}" for number in range(4)]


def test_the_script_reports_by_its_exit_status(monkeypatch, capsys):
    summary = run_programs.Summary("default", 1, [], 0, None, 0.5, 0, 1.0)
    for failures in ([], ["program 0: wrong"]):
        monkeypatch.setattr(
            run_programs,
            "run",
            lambda *_, failures=failures, **__: summary._replace(failures=failures),
        )
        monkeypatch.setattr(sys, "argv", ["run_programs.py", "--settings", "default"])
        assert run_programs.main() == len(failures)
        assert f"1 programs, {len(failures)} fail" in capsys.readouterr().out
