"""Compiles a sample of the kernels that the build lacks, as they are compiled where they run.

    python tools/compile_sample.py 100 build/sample

Writes cubins of instances of qmm_sm90 for sm_90a, the same ones each time: every tile shape and
every kind of weights at least once, most in small tiles. Needs NVRTC and no GPU.
"""

import argparse
import collections
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jaxlowbit._backends.extension import ffi

FAMILY = "sm90"
# Tile shapes, of kTiles in cuda/kernels/sm90/plan.h, that compile in half the time of the largest.
QUICK_TILES = (2, 4, 8, 10)
# What the template is given after the types: bits and tile, which a codebook may follow.
BITS_AND_TILE = re.compile(r", (?P<bits>\d+), (?P<tile>\d+)\b")


class Candidate(NamedTuple):
    name: str
    tile: int
    lhs: str
    kind: tuple[str, ...]  # of weights: bits, scales, zeros and, if listed, the codebook


def lacking() -> list[Candidate]:
    found = []
    for bits in (*ffi.KERNEL_BITS, *ffi.COMPILED_BITS):
        for family, name, ahead_of_time, lhs, scale, *rest in ffi.instances(bits):
            if family == FAMILY and not ahead_of_time:
                numbers = BITS_AND_TILE.search(name)
                assert numbers and int(numbers["bits"]) == bits, name
                kind = (f"{bits} bits", "that of lhs" if scale == lhs else scale, *rest)
                found.append(Candidate(name, int(numbers["tile"]), lhs, kind))
    return found


def choose(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    """First what has a new tile or a new kind of weights, in the tiles that compile quickly."""
    uses: collections.Counter[object] = collections.Counter()

    def last_resort(one: Candidate) -> tuple[int, ...]:
        seen = (uses[one.tile] > 0) + (uses[one.kind] > 0)
        slow = one.tile not in QUICK_TILES
        alike = sum(uses[part] for part in (one.lhs, *one.kind))
        return (seen, slow, uses[one.tile], uses[one.kind], alike)

    left, chosen = list(candidates), []
    while left and len(chosen) < count:
        best = min(left, key=last_resort)
        left.remove(best)
        chosen.append(best)
        uses.update((best.tile, best.kind, best.lhs, *best.kind))
    missed = {x for one in left for x in (one.tile, one.kind)} - uses.keys()
    if missed:
        sys.exit(f"{count} instances leave out {len(missed)} tile shapes and kinds of weights.")
    return chosen


def main() -> None:
    description, *_ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("count", type=int, help="how many instances")
    parser.add_argument("folder", type=Path, help="where to write them")
    options = parser.parse_args()
    candidates = lacking()
    some = choose(candidates, options.count)
    options.folder.mkdir(parents=True, exist_ok=True)
    for number, result in enumerate(ffi.compile([(FAMILY, one.name) for one in some], "90a")):
        if result["error"]:
            sys.exit(f"{some[number].name}: {result['error']}")
        (options.folder / f"{number}.cubin").write_bytes(result["cubin"])
    print(
        f"compiled {len(some)} of {len(candidates)} instances of {FAMILY} that the build lacks, "
        f"of {len({one.tile for one in some})} tile shapes "
        f"and {len({one.kind for one in some})} kinds of weights"
    )


if __name__ == "__main__":
    main()
