"""CPU kernels of each instruction set of this machine except the best, which other tests run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import program_cache

from jaxlowbit._backends import extension

ROOT = Path(__file__).parents[2]
FILES = [
    str(ROOT / "tests" / file)
    for file in (
        "core/test_codebooks.py",
        "core/test_microscaling.py",
        "kernels/test_cpu_activations.py",
        "matmul/test_matmul.py",
    )
]
SOME = "(identity or nan_and_infinity or overflow or codes_of) and cpu"
PROGRAM = f"""
import sys
import pytest
from jaxlowbit._backends import extension
assert extension.BUILD["cpu_isa"][0] == sys.argv[1]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", {SOME!r}, *{FILES!r}]))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """All instruction sets share compiled programs."""
    return program_cache(tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize("isa", extension.BUILD["cpu_isa"][1:])
def test_products_of_an_instruction_set(isa, programs):
    environment = os.environ | programs | {"JAXLOWBIT_CPU_ISA": isa}
    run = [sys.executable, "-c", PROGRAM, isa]
    found = subprocess.run(run, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert " passed" in found.stdout


def test_an_unknown_instruction_set_changes_nothing():
    code = "from jaxlowbit._backends import extension; print(extension.BUILD['cpu_isa'])"
    environment = os.environ | {"JAXLOWBIT_CPU_ISA": "sse9"}
    run = [sys.executable, "-c", code]
    found = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(extension.BUILD["cpu_isa"])
