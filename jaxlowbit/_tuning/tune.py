"""`tune`, and the command `jaxlowbit tune`."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from .._backends import extension, target
from .._backends.selection import DeviceFacts, Product
from .._core.checks import boolean, brief
from .._core.format import INT4, Format, as_format, parse_format
from .._core.layout import blocks
from .._version import __version__
from . import devices, report
from . import table as tables
from .measure import measure
from .table import Entry, Table
from .weights import add_arguments, check_tokens, find, untuned

TOKENS = tuple(2**i for i in range(13))


def tune(
    weights: Any,
    *,
    tokens: Sequence[int] = TOKENS,
    format: Format | str | Sequence[Format | str] = INT4,
    dtype: Literal["bfloat16", "float16"] = "bfloat16",
    out: Any = None,
    progress: bool = False,
) -> Path:
    """Measures the fastest kernels for some weights on the first GPU, and stores the choices.

    Programs started afterwards use them, for these weights and up to the largest M; `explain`
    shows the choice. Stored choices for other products are kept.

    **Arguments:**

    - `weights`: shapes of output channels and input features (n, k), as pairs or as
      `"14336x4096"`; the path of a safetensors file or of a folder of them, whose headers are read;
      or any pytree that contains quantized arrays, such as a Flax model.
    - `tokens`: numbers of rows of lhs to measure. A number between two of them uses the choice for
      the larger.
    - `format`: one or several formats, or their names, for weights that are not quantized yet.
    - `dtype`: the dtype of lhs, `"bfloat16"` or `"float16"`.
    - `out`: the file to write; None for the one that is read at startup, `$JAXLOWBIT_TUNED` or, by
      the name of the GPU, in `~/.cache/jaxlowbit`.
    - `progress`: whether to report progress.

    **Returns:** the path of the file.

    **Raises:** `ValueError` for other arguments, for weights that the CUDA kernels do not read, and
    without a GPU that runs them; `ImportError` for a checkpoint without safetensors.

    ```python
    if jax.default_backend() == "gpu":
        tune(["4096x4096", (14336, 4096)], tokens=[1, 16], out="/tmp/tuned.json")
    ```
    """
    listed = format if isinstance(format, list | tuple) else [format]
    formats = [as_format("tune", each) for each in listed]
    tokens = check_tokens(tokens)
    if not isinstance(dtype, str) or dtype not in tables.LHS:
        raise ValueError(
            f"tune: dtype is {brief(dtype)}, but there are choices for bfloat16 and float16 "
            "only; float32 is multiplied in bfloat16 parts, by one kernel."
        )
    boolean("tune", "progress", progress)
    if not isinstance(out, str | os.PathLike | None):
        raise TypeError(f"tune: out is {brief(out)}, but it must be the path of a file to write.")
    found = find(weights, formats, dtype, excluded=untuned)
    device = _gpu()
    path = Path(out) if out is not None else tables.path_for(device.name)
    table = Table(device, tables.driver_version(), __version__, ())
    entries = {_kind(entry.product): entry for entry in _kept(path, table)}
    measured = measure(found, tokens, dtype, device)
    if progress:
        measured = report.reported(measured, len(found) * len(tokens), device.name)
    for entry in measured:
        entries[_kind(entry.product)] = entry
        # An interrupted run keeps its measurements.
        tables.write(path, table._replace(entries=tuple(entries.values())))
    return path


def add_tune(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    add_arguments(parser, ["int4-g128"], TOKENS)
    parser.add_argument("--dtype", default="bfloat16", help="dtype of activations (%(default)s)")
    out = "the table to write (this user's table of this GPU), or to print with --show (all)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    parser.add_argument("--show", action="store_true", help="print the table, measure nothing")
    return _run


def _run(options: argparse.Namespace) -> None:
    sources = [source for source in (options.checkpoint, options.shapes) if source is not None]
    if len(sources) != (0 if options.show else 1):
        raise ValueError("name a checkpoint, --shapes, or only --show.")
    if options.show:
        paths = [options.out] if options.out else [*tables.files(), *tables.shipped()]
        if not paths:
            raise ValueError("nothing is stored; name --shapes or a checkpoint to measure.")
    else:
        formats = [parse_format(text) for text in options.format]
        tokens, dtype, out = options.tokens, options.dtype, options.out
        paths = [tune(*sources, tokens=tokens, format=formats, dtype=dtype, out=out, progress=True)]
    for path in paths:
        _print(path)


def _print(path: Path) -> None:
    table = tables.read(path)
    print(*report.lines(table), sep="\n")
    if reason := tables.misfit(table):
        use = f"not used: {reason}"
    elif path in tables.shipped():
        use = "comes with the package, and is used where you have measured nothing"
    elif path in tables.files():
        use = "used from the next start on"
    else:
        use = f"used where {tables.VARIABLE} names it"
    print(f"\n{path}: {use}.")


def _gpu() -> DeviceFacts:
    device = devices.first()
    reason = extension.UNAVAILABLE["cuda"] if device.platform == "cuda" else "JAX sees none"
    if reason := reason or target.unfit(device.capability):
        raise ValueError(f"tune: this needs an NVIDIA GPU whose kernels are here, and {reason}.")
    return device.facts


def _kept(path: Path, table: Table) -> tuple[Entry, ...]:
    """The entries that `path` has for the same device, driver and library."""
    try:
        found = tables.read(path)
    except (OSError, ValueError):
        return ()
    return found.entries if found._replace(entries=()) == table else ()


def _kind(product: Product) -> Product:
    """The key of an entry: sizes are in atoms."""
    n, k = blocks(product.n), blocks(product.k)
    return product._replace(n=n, k=k)
