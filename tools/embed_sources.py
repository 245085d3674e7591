"""Writes a C++ file with the kernel headers, and stand-ins for headers that NVRTC lacks.

    python tools/embed_sources.py OUT.cc

Starts from `cuda/kernels/*/kernel.cuh` and follows their includes; the stand-ins are in
`cuda/jit/shim/`. Comment lines are omitted.
"""

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHIM = ROOT / "cuda/jit/shim"
MOST_CHARACTERS = 16_000  # of a string literal: some compilers take no more than 64 KiB
OUTPUT = """\
// Written by tools/embed_sources.py.
#include "cuda/jit/sources.h"

namespace jaxlowbit::jit {{

const Source kSources[] = {{
{sources}
}};
const size_t kNumSources = {count};
const char kSourcesDigest[] = "{digest}";

}}  // namespace jaxlowbit::jit
"""


def headers() -> dict[str, str]:
    """The texts of all headers that kernels include, by the names that include them."""
    found: dict[str, str] = {}
    waiting = [str(path.relative_to(ROOT)) for path in ROOT.glob("cuda/kernels/*/kernel.cuh")]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = (ROOT / name).read_text(encoding="utf-8")
            waiting += re.findall(r'^#include "(cuda/.*)"', found[name], re.MULTILINE)
    stand_ins = {path.name: path.read_text(encoding="utf-8") for path in SHIM.iterdir()}
    return {name: code_of(text) for name, text in sorted((found | stand_ins).items())}


def code_of(text: str) -> str:
    """Returns a source without its comment lines."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("//"))
    return "\n".join(lines) + "\n"


def literal(text: str) -> str:
    parts = [text[i : i + MOST_CHARACTERS] for i in range(0, len(text), MOST_CHARACTERS)]
    return "\n".join(f'R"~~~({part})~~~"' for part in parts)


def main(out: str) -> None:
    texts = headers()
    digest = hashlib.sha256("\0".join(f"{n}\0{t}" for n, t in texts.items()).encode()).hexdigest()
    sources = ",\n".join(f'{{"{name}", {literal(text)}}}' for name, text in texts.items())
    Path(out).write_text(
        OUTPUT.format(sources=sources, count=len(texts), digest=digest), encoding="utf-8"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
