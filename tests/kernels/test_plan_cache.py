"""xla_ffi/plan_cache.h: which calls share a plan. Compiled here, since Python sees no plans."""

import functools
import shutil
import subprocess
from pathlib import Path

import jaxlib
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("tests/support/check_plans.cc", "xla_ffi/plan_cache.cc", "cuda/ways.cc")


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_calls_share_plans_only_with_equal_calls(tmp_path):
    """10,000 random pairs that differ in one value; pointers; a full cache; threads."""
    program = tmp_path / "check_plans"
    headers = Path(jaxlib.__file__).parent / "include"
    compile = ["g++", "-std=c++17", "-O1", "-pthread", f"-I{ROOT}", f"-isystem{headers}"]
    run = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    compiled = run([*compile, *SOURCES, "-o", str(program)])
    assert compiled.returncode == 0, compiled.stderr
    assert run([str(program)]).stdout == "ok\n"
