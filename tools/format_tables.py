"""Writes the tables of formats into the pages that have their markers.

    python tools/format_tables.py          # after adding or changing a format
    python tools/format_tables.py --check  # whether all pages have them; changes nothing

A table goes between `<!-- format-table -->` and `<!-- /format-table -->`; the opening marker
`<!-- format-table: 8-bit scales -->` limits it to formats with 8-bit scales. Formats come from
`jaxlowbit._core.format_table`, errors from the installed package.
"""

import argparse
import functools
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jaxlowbit as jl
from jaxlowbit._backends import registry
from jaxlowbit._core.format_table import NAMED, bits_per_weight, formula, number_range

ROOT = Path(__file__).parents[1]
SHAPE = (4096, 256)  # of the normal weights used for the errors in the table
_MARKED = re.compile(
    r"(<!-- format-table(?:: ([\w -]+?))? -->\n).*?(<!-- /format-table -->)", re.DOTALL
)
_HEAD = ("name", "weight", "numbers", "groups", "bits per weight", "error", "kernels")
_SELECTIONS: Mapping[str | None, Mapping[str, jl.Format]] = {
    None: NAMED,
    "8-bit scales": {name: found for name, found in NAMED.items() if found.scale is not None},
}


def pages(root: Path = ROOT) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])


def filled(text: str) -> str:
    """Fills the markers of a page with their tables.

    **Raises:** `ValueError` for a marker of an unknown table.
    """

    def table(match: re.Match[str]) -> str:
        if match[2] not in _SELECTIONS:
            known = ", ".join(filter(None, _SELECTIONS))
            raise ValueError(f"there is no table of {match[2]!r}; name {known}, or nothing.")
        return f"{match[1]}\n{markdown(_SELECTIONS[match[2]])}\n\n{match[3]}"

    return _MARKED.sub(table, text)


def markdown(formats: Mapping[str, jl.Format]) -> str:
    """A table of formats by name, without a trailing line feed."""
    rows = [_HEAD, ("---",) * len(_HEAD), *(_row(name) for name in formats)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str) -> tuple[str, ...]:
    found = NAMED[name]
    least, most = number_range(found)
    groups = "channel" if found.group_size == -1 else str(found.group_size)
    bits = f"{bits_per_weight(found):.4g}"
    numbers = f"{least:g} to {most:g}"
    return f"`{name}`", formula(found), numbers, groups, bits, error(name), _listed(kernels(found))


def kernels(format: jl.Format) -> Iterable[str]:
    """The backends with a kernel for these weights and bfloat16 activations."""
    lhs = jnp.dtype("bfloat16")
    return [
        name
        for name in ("cpu", "cuda", "pallas")
        if registry.unsupported(name, lhs, format, built=False) is None
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


@functools.cache
def error(name: str) -> str:
    """norm(w - dequantized) / norm(w) of normal weights, in three digits, equal on all machines."""
    weight = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    found = jl.quantize(weight, name, scale_dtype=_scale_dtype(name)).dequantize(jnp.float32)
    change = np.asarray(found, np.float64) - weight
    ratio = np.linalg.norm(change) / np.linalg.norm(weight.astype(np.float64))
    return f"{ratio:#.3g}"


def _scale_dtype(name: str) -> str | None:
    """The scale dtype assumed by bits per weight."""
    return "bfloat16" if NAMED[name].scale is None else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the tables of formats into the pages.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if it would")
    check, stale = parser.parse_args().check, []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(new, encoding="utf-8")
    print(f"{', '.join(stale) or 'no page'}: {'other tables' if check else 'written'}")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
