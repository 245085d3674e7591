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
# Imports JAX once, and then has a process for each instruction set. Processes may only be forked
# while there is one thread: before JAX has devices.
PROGRAM = f"""
import os, sys
import flax.linen, flax.nnx, jax, pytest, scipy.special
threads = os.listdir("/proc/self/task")
assert len(threads) == 1, threads
for isa in sys.argv[1:]:
    if os.fork():
        _, status = os.wait()
        print(isa, os.waitstatus_to_exitcode(status))
        continue
    os.environ["JAXLOWBIT_CPU_ISA"] = isa
    log = os.open(isa, os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from jaxlowbit._backends import extension
    assert extension.BUILD["cpu_isa"][0] == isa
    os.chdir({str(ROOT)!r})
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-k", {SOME!r}, *{FILES!r}])
    sys.stdout.flush()
    os._exit(status)
"""
OTHERS = extension.BUILD["cpu_isa"][1:]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The exit status and the output of each process."""
    folder = tmp_path_factory.mktemp("isa")
    # All instruction sets share compiled programs.
    environment = os.environ | program_cache(folder / "programs") | {"OPENBLAS_NUM_THREADS": "1"}
    run = [sys.executable, "-c", PROGRAM, *OTHERS]
    found = subprocess.run(run, env=environment, cwd=folder, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    statuses = dict(line.split() for line in found.stdout.splitlines())
    return {isa: (status, (folder / isa).read_text()) for isa, status in statuses.items()}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system tells no threads")
@pytest.mark.parametrize("isa", OTHERS)
def test_products_of_an_instruction_set(isa, finished):
    status, output = finished[isa]
    assert status == "0", output
    assert " passed" in output


def test_an_unknown_instruction_set_changes_nothing():
    code = "from jaxlowbit._backends import extension; print(extension.BUILD['cpu_isa'])"
    environment = os.environ | {"JAXLOWBIT_CPU_ISA": "sse9"}
    run = [sys.executable, "-c", code]
    found = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(extension.BUILD["cpu_isa"])
