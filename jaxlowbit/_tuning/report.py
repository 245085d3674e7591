"""Reports of measurements: progress, and a final table."""

import math
import sys
import time
from collections.abc import Iterator

from .._backends.selection import Choice
from .._core.format import format_name
from .table import Entry, Table


def choice_name(choice: Choice) -> str:
    """The kernel and the fields of its choice that vary."""
    fields = {"block_m": choice.block_m, "split_k": choice.split_k}
    if choice.kernel == "qmm_sm90_stream":
        fields |= {"slices": choice.slices}
    if choice.kernel == "qmm_sm90":
        fields |= {"tile": choice.tile, "peers": choice.peers}
    return ", ".join([choice.kernel, *(f"{name}={value}" for name, value in fields.items())])


def lines(table: Table) -> Iterator[str]:
    """A line per entry, with tuned and default time, then a line with the mean of the ratios."""
    driver = f", driver {table.driver}" if table.driver else ""
    yield f"{table.device.name}{driver}, jaxlowbit {table.jaxlowbit}"
    yield ""
    header = ("n x k", "format", "lhs", "tokens", "default us", "tuned us", "ratio")
    yield "{:14} {:16} {:9} {:>6} {:>10} {:>10} {:>6}  choice".format(*header)
    ratios = []
    for product, choice, us, default, default_us, _ in table.entries:
        ratios.append(default_us / us)
        tuned = choice_name(choice) if choice != default else "as without tuning"
        yield (
            f"{f'{product.n}x{product.k}':14} {format_name(product.format):16} {product.lhs:9} "
            f"{product.m:6} {default_us:10.2f} {us:10.2f} {ratios[-1]:6.2f}  {tuned}"
        )
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        changed = sum(entry.choice != entry.default for entry in table.entries)
        yield ""
        yield f"{changed} of {len(ratios)} choices changed; geometric mean of the ratios {mean:.3f}"


def reported(entries: Iterator[Entry], total: int, device: str) -> Iterator[Entry]:
    """Passes entries on, with a progress bar of tqdm, or a line for each without it."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield from _in_lines(entries, total)
        return
    with tqdm(total=total, desc=device, unit="product") as bar:
        for entry in entries:
            product = entry.product
            bar.set_postfix_str(f"{product.n}x{product.k}, {product.m} tokens", refresh=False)
            bar.update()
            yield entry


def _in_lines(entries: Iterator[Entry], total: int) -> Iterator[Entry]:
    start = time.monotonic()
    for done, entry in enumerate(entries, 1):
        left = (time.monotonic() - start) / done * (total - done)
        product = entry.product
        where = f"{product.n}x{product.k}, {product.m} tokens"
        print(f"{done}/{total}  {where}: {entry.us:.2f} us, {left:.0f} s left", file=sys.stderr)
        yield entry
