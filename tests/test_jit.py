"""Kernels compiled where they run: the compiler, and the cache of what it made. Needs no GPU."""

import json
import os
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from jaxlowbit._backends.extension import build_info, ffi

try:
    PACKAGE = metadata.distribution("nvidia-cuda-nvrtc")
except metadata.PackageNotFoundError:
    PATHS = []
else:
    PATHS = [str(PACKAGE.locate_file("nvidia/cu13/lib/libnvrtc.so.13"))]
NONE = "jaxlowbit::ZeroKind::kNone"
HALF = "__half, __half"
INSTANCES = {
    "sm80": f"jaxlowbit::sm80::QmmSm80Kernel<jaxlowbit::sm80::Instance<{HALF}, 16, 4>>",
    "sm80_transposed": "jaxlowbit::sm80::QmmSm80TransposedKernel"
    f"<jaxlowbit::sm80::Instance<{HALF}, 16, 4>>",
    "sm90_stream": "jaxlowbit::sm90_stream::QmmSm90StreamKernel"
    f"<jaxlowbit::sm90_stream::Instance<{HALF}, {NONE}, 8, 4, 2, false>>",
    "sm90": f"jaxlowbit::sm90::QmmSm90Kernel<jaxlowbit::sm90::Instance<{HALF}, {NONE}, 4, 2>>",
}
SMALL = [("sm80", INSTANCES["sm80"])]

pytestmark = pytest.mark.skipif(not build_info()["cuda"], reason="this build has no CUDA kernels")

# What a process of its own does: the compiler and its cache are found once in a process.
PROGRAM = """
import json, sys
from jaxlowbit import _ffi as ffi
paths, instances, architecture = json.loads(sys.argv[1])
ffi.set_nvrtc_paths(paths)
results = ffi.compile([tuple(each) for each in instances], architecture)
for result in results:
    result["cubin"] = result["cubin"].hex()
print(json.dumps([ffi.toolchain(), results]))
"""


def start(cache, instances, *, architecture="90a", **env):
    given = json.dumps([PATHS, instances, architecture])
    env = os.environ | {"JAXLOWBIT_CACHE_DIR": str(cache)} | env
    command = [sys.executable, "-P", "-c", PROGRAM, given]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def outcome(process):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, process.returncode
    return json.loads(out)


def compiled(cache, instances=SMALL, **options):
    toolchain, results = outcome(start(cache, instances, **options))
    return toolchain, results


@pytest.fixture(scope="session")
def nvrtc(tmp_path_factory):
    toolchain, _ = compiled(tmp_path_factory.mktemp("cache"), [])
    if not PATHS and toolchain["error"]:
        pytest.skip(toolchain["error"])
    assert not toolchain["error"]
    return toolchain


def files(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*"))


def test_every_kernel_compiles_and_is_found_again(nvrtc, tmp_path):
    instances = list(INSTANCES.items())
    _, first = compiled(tmp_path, instances)
    assert [each["error"] for each in first] == [""] * len(first)
    assert all(bytes.fromhex(each["cubin"])[:4] == b"\x7fELF" for each in first)
    assert not any(each["cached"] for each in first)
    _, second = compiled(tmp_path, instances)
    assert all(each["cached"] for each in second)
    assert [each["cubin"] for each in second] == [each["cubin"] for each in first]
    assert len(files(tmp_path)) == len(instances)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files(tmp_path))


def test_an_architecture_is_part_of_the_key(nvrtc, tmp_path):
    _, (hopper,) = compiled(tmp_path)
    _, (ampere,) = compiled(tmp_path, architecture="80")
    assert not ampere["cached"] and ampere["cubin"] != hopper["cubin"]


@pytest.mark.parametrize("damage", ["cut short", "a bit flipped", "empty", "of another key"])
def test_a_damaged_file_is_not_taken(nvrtc, tmp_path, damage):
    _, (right,) = compiled(tmp_path)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 16
    path.write_bytes(
        {
            "cut short": whole[:-1000],
            "a bit flipped": bytes(flipped),
            "empty": b"",
            "of another key": whole.replace(b"sm_90a", b"sm_80a", 1),
        }[damage]
    )
    _, (again,) = compiled(tmp_path)
    assert not again["cached"] and again["cubin"] == right["cubin"]
    assert files(tmp_path) == [path] and path.read_bytes() == whole


def test_two_processes_on_an_empty_cache(nvrtc, tmp_path):
    both = [start(tmp_path / "new" / "folder", SMALL) for _ in range(2)]
    (_, (one,)), (_, (other,)) = [outcome(process) for process in both]
    assert one["error"] == other["error"] == "" and one["cubin"] == other["cubin"]
    assert len([path for path in files(tmp_path) if path.is_file()]) == 1


@pytest.mark.parametrize("folder", ["", "/proc/jaxlowbit"], ids=["none", "not writable"])
def test_without_a_folder_to_write_to(nvrtc, folder):
    _, (result,) = compiled(folder)
    assert result["error"] == "" and not result["cached"]


def test_compiling_can_be_turned_off(tmp_path):
    toolchain, (result,) = compiled(tmp_path, JAXLOWBIT_COMPILE="0")
    assert toolchain["error"] == result["error"] == "JAXLOWBIT_COMPILE=0 turns compiling off"
    assert files(tmp_path) == []


def test_an_instance_that_does_not_compile_says_why(nvrtc, tmp_path):
    wrong = "jaxlowbit::sm80::QmmSm80Kernel<int>"
    _, (result,) = compiled(tmp_path, [("sm80", wrong)])
    assert result["error"].startswith("NVRTC ") and "error" in result["error"].partition("\n")[2]
    assert files(tmp_path) == []


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="there is no kernel sm70"):
        ffi.compile([("sm70", "")], "90a")


def test_a_process_may_end_while_kernels_are_compiled(nvrtc, tmp_path):
    program = (
        "import json, sys, time\n"
        "from jaxlowbit import _ffi as ffi\n"
        "paths, instances, _ = json.loads(sys.argv[1])\n"
        "ffi.set_nvrtc_paths(paths)\n"
        "ffi.compile([tuple(each) for each in instances], '90a', wait=False)\n"
        "time.sleep(0.2)\n"
    )
    given = json.dumps([PATHS, list(INSTANCES.items()), ""])
    env = os.environ | {"JAXLOWBIT_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-P", "-c", program, given], env=env, timeout=120)
    assert ended.returncode == 0
