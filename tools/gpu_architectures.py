"""Prints the CMAKE_CUDA_ARCHITECTURES of this machine's GPUs, such as `90a-real`, or nothing.

If `nvidia-smi` finds no GPU with kernels, it prints nothing, and CMake compiles for all.
"""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def built() -> dict[int, str]:
    """The architectures that CMakeLists.txt lists, by the major number of compute capabilities."""
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    found = re.findall(r"set\(CMAKE_CUDA_ARCHITECTURES (.*)\)", text)
    names = found[0].split()
    return {int(re.sub(r"\D", "", name)) // 10: name for name in names}


def capabilities() -> list[str]:
    """The compute capability of each GPU, such as "8.6"."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^\d+\.\d+$", found.stdout, re.MULTILINE) if found.returncode == 0 else []


def architectures(capabilities: Iterable[str]) -> list[str]:
    """Architectures for GPUs: machine code also runs on later minor versions of its major
    version."""
    names, majors = built(), {int(found.partition(".")[0]) for found in capabilities}
    return [names[major] for major in names if major in majors]


if __name__ == "__main__":
    print(";".join(architectures(capabilities())))
