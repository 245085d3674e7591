"""Prints the size of wheels and fails on one too large: `wheel_size.py dist/*.whl`."""

import sys
import zipfile
from pathlib import Path

MOST_MEGABYTES = 10


def report(wheel: Path) -> tuple[str, bool]:
    """A line about the wheel, and whether it is small enough."""
    with zipfile.ZipFile(wheel) as archive:
        installed = sum(file.file_size for file in archive.infolist()) / 1e6
    size = wheel.stat().st_size / 1e6
    line = f"- {wheel.name}: {size:.1f} MB of {MOST_MEGABYTES}, {installed:.1f} MB installed"
    return line, size <= MOST_MEGABYTES


def main(wheels: list[str]) -> int:
    reports = [report(Path(wheel)) for wheel in wheels]
    print(*(line for line, _ in reports), sep="\n")
    if not wheels:
        print("wheel_size: no wheel was named; pass the paths of some.", file=sys.stderr)
    elif not all(fits for _, fits in reports):
        print(
            f"wheel_size: a wheel is larger than {MOST_MEGABYTES} MB; build fewer instances of the "
            "kernels, or compress their code (nvcc --compress-mode=size).",
            file=sys.stderr,
        )
    return 0 if wheels and all(fits for _, fits in reports) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
