"""JIT-compiles a sample of the kernels that are not prebuilt.

    python tools/compile_sample.py build/sample

Writes cubins of a fixed set of qmm_sm90 instances for sm_90a. Together with the prebuilt instances
they have every tile shape, and every compatible pair of types, widths, zeros and codebooks, mostly
in small tiles. Needs NVRTC and no GPU.
"""

import argparse
import collections
import itertools
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jaxlowbit._backends.extension import ffi

FAMILY = "sm90"
# Tile shapes, of kTiles in cuda/kernels/sm90/plan.h, that compile in half the time of the largest.
QUICK_TILES = (2, 4, 8, 10)
# Template arguments after the types: bits and tile; a codebook may follow.
BITS_AND_TILE = re.compile(r", (?P<bits>\d+), (?P<tile>\d+)\b")


class Candidate(NamedTuple):
    name: str
    tile: int
    kind: tuple[str, ...]  # lhs, bits, scales, zeros and, if listed, the codebook

    @property
    def parts(self) -> frozenset[object]:
        """Parts for the sample to cover: the tile shape, and every pair of values of the kind."""
        return frozenset({self.tile, *itertools.combinations(enumerate(self.kind), 2)})


def instances() -> tuple[list[Candidate], list[Candidate]]:
    """Instances of the build, and all others."""
    found: tuple[list[Candidate], list[Candidate]] = [], []
    for bits in (*ffi.KERNEL_BITS, *ffi.COMPILED_BITS):
        for family, name, ahead_of_time, lhs, scale, *rest in ffi.instances(bits):
            if family == FAMILY:
                numbers = BITS_AND_TILE.search(name)
                assert numbers and int(numbers["bits"]) == bits, name
                kind = (lhs, f"{bits} bits", "that of lhs" if scale == lhs else scale, *rest)
                found[not ahead_of_time].append(Candidate(name, int(numbers["tile"]), kind))
    return found


def choose(built: Iterable[Candidate], candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates for the parts that no built instance has.

    Greedy set cover; ties prefer quick tiles, then the tiles chosen less often.
    """
    left = {one: one.parts for one in candidates}
    missing = set[object]().union(*left.values()).difference(*(one.parts for one in built))
    uses: collections.Counter[int] = collections.Counter()
    chosen = []

    def gain(one: Candidate) -> tuple[int, ...]:
        return len(left[one] & missing), one.tile in QUICK_TILES, -uses[one.tile]

    while missing:
        best = max(left, key=gain)
        missing -= left[best]
        uses[best.tile] += 1
        chosen.append(best)
    return chosen


def main() -> None:
    description, *_ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="where to write them")
    options = parser.parse_args()
    built, candidates = instances()
    some = choose(built, candidates)
    options.folder.mkdir(parents=True, exist_ok=True)
    for number, result in enumerate(ffi.compile([(FAMILY, one.name) for one in some], "90a")):
        if result["error"]:
            sys.exit(f"{some[number].name}: {result['error']}")
        (options.folder / f"{number}.cubin").write_bytes(result["cubin"])
    print(
        f"compiled {len(some)} of {len(candidates)} instances of {FAMILY} that the build lacks, "
        f"of {len({one.tile for one in some})} tile shapes"
    )


if __name__ == "__main__":
    main()
