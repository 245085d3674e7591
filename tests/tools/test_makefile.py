"""The architectures that `make` builds for on a machine with GPUs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import gpu_architectures
import pytest

ROOT = Path(__file__).parents[2]
DEFINED = "-Ccmake.define.CMAKE_CUDA_ARCHITECTURES="


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Puts an nvidia-smi on PATH that prints these lines and exits with this status."""

    def put(*lines: str, status: int = 0):
        path = tmp_path / "nvidia-smi"
        text = "\n".join(lines)
        path.write_text(f"#!/bin/sh\ncat <<END\n{text}\nEND\nexit {status}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return put


def commands(target: str) -> str:
    """The commands that `make` would run."""
    make = ["make", "--dry-run", target, "SETUP=0", f"PYTHON={sys.executable}"]
    environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    found = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["9.0"], ["90a-real"]),
        (["8.0", "8.6", "8.9"], ["80-real"]),
        (["12.0", "9.0", "9.0"], ["90a-real", "120-real"]),
        (["10.0"], ["100-real"]),
        (["10.3", "12.1"], ["100-real", "120-real"]),
        (["7.5"], []),  # no kernels for it: CMake's default, all
        (["7.5", "8.9"], ["80-real"]),
        (["11.0"], []),
        (["[N/A]"], []),
        ([], []),
    ],
)
def test_architectures_match_the_gpus(gpus, lines, expected):
    gpus(*lines)
    assert gpu_architectures.architectures(gpu_architectures.capabilities()) == expected


def test_an_nvidia_smi_that_fails_names_no_gpu(gpus, monkeypatch):
    gpus("9.0", status=9)
    assert gpu_architectures.capabilities() == []
    monkeypatch.setenv("PATH", "")
    assert gpu_architectures.capabilities() == []


def test_every_architecture_of_cmake_has_a_gpu():
    names = ["80-real", "90a-real", "100-real", "120-real"]
    assert list(gpu_architectures.built().values()) == names


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_demo_and_test_build_for_the_gpus_of_the_machine(gpus):
    """Wheels are built for all. CMAKE_ARGS follows the options of pip and overrides them."""
    gpus("9.0", "12.0")
    for target in ("demo", "test"):
        assert f"{DEFINED}'90a-real;120-real'" in commands(target)
    assert DEFINED not in commands("wheel")
    assert "-n auto" not in commands("test")  # parallel processes would share GPU memory
