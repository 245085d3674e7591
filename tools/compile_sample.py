"""Compiles a sample of the kernels that the build lacks, as they are compiled where they run.

    python tools/compile_sample.py 100 build/sample

Writes cubins of instances of qmm_sm90 for sm_90a, the same ones each time. Needs NVRTC and no GPU.
"""

import argparse
import random
import sys
from pathlib import Path

from jaxlowbit._backends.extension import ffi

FAMILY = "sm90"


def main() -> None:
    description, *_ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("count", type=int, help="how many instances")
    parser.add_argument("folder", type=Path, help="where to write them")
    options = parser.parse_args()
    lacking = [
        (family, name)
        for bits in (*ffi.KERNEL_BITS, *ffi.COMPILED_BITS)
        for family, name, ahead_of_time, *_ in ffi.instances(bits)
        if family == FAMILY and not ahead_of_time
    ]
    some = random.Random(0).sample(lacking, min(options.count, len(lacking)))
    options.folder.mkdir(parents=True, exist_ok=True)
    for number, result in enumerate(ffi.compile(some, "90a")):
        if result["error"]:
            sys.exit(f"{some[number][1]}: {result['error']}")
        (options.folder / f"{number}.cubin").write_bytes(result["cubin"])
    print(f"compiled {len(some)} of {len(lacking)} instances of {FAMILY} that the build lacks")


if __name__ == "__main__":
    main()
