"""Problems with golden results, the tool that compares them, and a sample on the CPU."""

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import golden
import golden_problems
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import COMBINATIONS
from golden_calls import CALLS, Case
from golden_problems import EPILOGUES, KERNELS, SHAPES, Golden, problems
from golden_programs import Program, programs
from helpers import PLATFORM
from problems import PROBLEMS

from jaxlowbit import INT4
from jaxlowbit._backends import selection
from jaxlowbit._backends.extension import BUILD
from jaxlowbit._core.format_table import NAMED
from jaxlowbit._tuning.devices import GPUS

HOPPER = [GPUS[name].facts for name in ("H100", "H200")]


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def listed(request):
    return request.param, problems(request.param)


def test_the_list_covers_formats_epilogues_and_calls(listed):
    platform, found = listed
    assert len({problem.name for problem in found}) == len(found) >= 600
    formats = {*NAMED.values()}
    assert {problem.format for problem in found} >= formats
    assert {problem.epilogue for problem in found} == {*EPILOGUES}
    for call in CALLS:
        missing = formats - {problem.format for problem in found if problem.call == call}
        assert not missing or call in ("integers", "float32"), call
    pairs = {(problem.format, problem.epilogue) for problem in found}
    assert pairs >= {*itertools.product(formats, EPILOGUES)}
    kernels = {(problem.format, problem.kernel) for problem in found}
    if platform == "cuda":
        assert kernels >= {*itertools.product(formats, KERNELS)}
        assert {p.kernel for p in found if p.forced} == {*SHAPES}
        tiles = {p.forced[1].tile for p in found if p.forced}
        assert tiles == {*range(18)}


def test_there_are_whole_programs():
    names = [program.name for program in programs()]
    assert len({*names}) == len(names) >= 20
    kinds = {name.partition(":")[0].split()[0] for name in names}
    assert {"llm", "flax", "divided", "random", "definition", "quantize", "pallas"} <= kinds


# --- choices --------------------------------------------------------------------------------------


def chosen(m: int, k: int, n: int, dtype: Any, format: Any, scale: Any = None, **how: Any) -> Any:
    """The kernel that both H100 and H200 choose; None if no kernel supports the product."""
    scale = format.scale_dtype if format.scale else jnp.dtype(scale or dtype)
    operands = 1, m, k, n, jnp.dtype(dtype), scale, format
    one, other = (selection.choose(*operands, device=device, **how) for device in HOPPER)
    assert one == other, (m, k, n, str(format), how)
    return one.get("kernel")


def test_shapes_choose_their_kernels_on_every_hopper():
    for kernel, format in itertools.product(SHAPES, NAMED.values()):
        for dtype, gated in itertools.product(("bfloat16", "float16"), (False, True)):
            found = chosen(*SHAPES[kernel], dtype, format, gated=gated)
            assert found == kernel, (kernel, str(format), gated)


def test_other_products_choose_alike_on_every_hopper():
    for c in COMBINATIONS:
        if c.dtype != "float32":
            scale = "float32" if c.scales == "float32" else None
            chosen(c.rows, *c.shape, c.lhs, c.problem.format, scale, gated=c.gated)
            chosen(c.rows, *c.shape, c.dtype, c.problem.format, scale, gated=c.gated)
    for p in PROBLEMS:
        if p.dtype != "float32" and p.m > 0:
            chosen(p.m, p.k, p.n, p.dtype, p.format, p.scale_dtype)
    rows = {*golden_problems._ROWS, *golden_problems._ROWS_IN_8_BITS}
    for m, format in itertools.product(rows, NAMED.values()):
        for k, n, how in (
            (256, 192, {"gated": True, "early_start": True}),
            (192, 256, {"early_start": True}),
            (256, 256, {"early_start": True}),
            (192, 256, {"transposed": True}),
        ):
            chosen(m, k, n, "bfloat16", format, **how)


def test_forced_choices_run_on_every_hopper():
    found = problems("cuda")
    for device in HOPPER:
        device = device._replace(name=f"golden {device.name}")
        assert golden_problems.force(found, device) == {}
        forced = next(problem.forced for problem in found if problem.forced)
        product, choice = forced
        dtype = jnp.dtype(product.lhs)
        operands = 1, product.m, product.k, product.n, dtype, dtype, product.format
        got = selection.choose(*operands, device=device)
        assert got["tuned"] and got["kernel"] == choice.kernel and got["block_m"] == choice.block_m


# --- results --------------------------------------------------------------------------------------


def plain(found: tuple[Golden, ...]) -> list[Golden]:
    """A product with each named format whose bits do not depend on XLA's arithmetic."""
    kept = [
        next(p for p in found if p.format == format and p.kernel and p.epilogue == "none")
        for format in NAMED.values()
        if not format.has_tensor_scale
    ]
    assert len(kept) > 15
    return kept


@pytest.mark.skipif(PLATFORM != "cpu", reason="a GPU runs tools/golden.py")
def test_a_sample_has_golden_bits():
    """To see differences: python tools/golden.py"""
    found = plain(problems("cpu"))
    isa = BUILD["cpu_isa"]
    usable = [x for x in isa if golden.path_for({"platform": "cpu", "cpu_isa": x}).exists()]
    assert usable, f"there are no golden results of {isa}"
    path = golden.path_for({"platform": "cpu", "cpu_isa": usable[0]})
    _, want = golden.read(path)
    if usable[0] == isa[0]:
        got = {problem.name: problem.compute() for problem in found}
        assert not golden.differences({name: want[name] for name in got}, got)
        return
    only = "|".join(f"^{problem.name}$" for problem in found[:2])
    run = [sys.executable, golden.__file__, str(path), "--only", only, "--jobs", "1"]
    result = subprocess.run(run, env=dict(os.environ), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", sorted(golden.GOLDEN.glob("*.json")), ids=lambda x: x.stem)
def test_files_are_of_these_problems(path):
    """To update: python tools/golden.py --write FILE, with the build before the change."""
    about, hashes = golden.read(path)
    assert golden.path_for(about) == path
    platform = {"cpu": "cpu", "gpu": "cuda"}[about["platform"]]
    assert {problem.name for problem in problems(platform)} == {*hashes}
    assert not [name for name, value in hashes.items() if value.startswith(golden.ERROR)]


# --- the tool -------------------------------------------------------------------------------------


def test_differences_are_found():
    want = {
        "a": "12:34",
        "b": "12:34",
        "c": "12:34",
        "d": "!ValueError: old",
        "e": "!ValueError: x",
    }
    found = {"a": "12:34", "b": "12:35", "d": "!ValueError: new", "e": "12:34", "f": "12:34"}
    assert golden.differences(want, found) == [
        "b: 12:35, and it was 12:34",
        "c: there is no such problem any more",
        "e: 12:34, and it was !ValueError: x",
    ]
    assert golden.differences({"a": "12:34"}, {"a": "13:35"}) == [
        "a: 13:35, and it was 12:34 (the operands differ)"
    ]


def test_results_that_differ_twice_are_found():
    counter = itertools.count()
    with pytest.raises(AssertionError, match="two runs differ"):
        Program("a program", lambda: np.array(next(counter))).compute()
    one = Golden("one", "matmul", INT4, lambda: Case(lambda x: x + 1, (np.arange(3),)))
    assert one.compute() == one.compute()
    found = {"one": "12:34", "two": "!two runs differ, 1 and 2"}
    assert golden.unequal(found) == ["two: two runs differ, 1 and 2"]


def test_files_are_read_as_written(tmp_path):
    about, hashes = {"platform": "cpu", "cpu_isa": "avx2", "site": "here"}, {"a": "12:34"}
    golden.write(tmp_path / "x.json", about, hashes)
    assert golden.read(tmp_path / "x.json") == ({"platform": "cpu", "cpu_isa": "avx2"}, hashes)
    assert json.loads((tmp_path / "x.json").read_text())["hashes"] == hashes
