"""Calibration of the layers of Flax models, shared by NNX and Linen."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.array import LEAVES, QuantizedArray
from .._core.checks import brief
from .._core.format import Format
from ..quantizers import _registry
from ..quantizers._calibration import (
    Calibration,
    Results,
    check_statistics,
    unreached,
    warn_of_few_rows,
    warn_of_unreached,
    with_identity,
)
from .input_factors import FACTOR
from .recording import Record
from .weights import Scaled

_CALLER = "quantize_model"


class Layers(NamedTuple):
    """The layers of a model that are to be quantized.

    - `formats`: by layer name.
    - `tables`: names of embeddings, which the model may never multiply by.
    - `run(names, batch, record)`: runs a batch and records the inputs of the named layers.
    - `replace(name, quantizer, statistics)`: quantizes a layer.
    """

    formats: Mapping[str, Format]
    tables: frozenset[str]
    run: Callable[[Sequence[str], Any, Any], None]
    replace: Callable[[str, Any, Any], Scaled]


def checked(quantizer: Any, calibration: Any) -> Calibration | None:
    """The calibration of a quantizer, or None.

    **Raises:** `TypeError` and `ValueError` for a calibration or a quantizer that does not fit.
    """
    _registry.check(_CALLER, quantizer)
    _registry.check_calibration(_CALLER, quantizer, calibration is not None)
    return None if calibration is None else Calibration.of(_CALLER, calibration)


def calibrate(layers: Layers, quantizer: Any, calibration: Calibration) -> None:
    """Quantizes layers in the order of their calls, each with the statistics of its inputs.

    **Raises:** `ValueError` for layers that the first batch does not reach, before any is changed,
    and for inputs that are not finite.
    """
    given: Any = calibration.batches
    batches = list(given) if iter(given) is given else given
    first = next(iter(batches), None)
    if first is None:
        raise ValueError(f"{_CALLER}: the calibration has no batch; pass one or more.")
    order = _order(layers, first)
    results = Results(_CALLER, calibration.folder, _key(layers, quantizer, first))
    missing = [name for name in layers.formats if name not in order and name not in layers.tables]
    if missing:
        check_statistics(_CALLER, ", ".join(missing), None)
    left = [name for name in order if not _restore(layers, results, name)]
    full = _registry.statistics_of(quantizer) == "full"
    few = False
    with _bar(calibration.progress, len(left)) as advance:
        for start in range(0, len(left), calibration.at_once):
            names = left[start : start + calibration.at_once]
            record = Record(full)
            for batch in batches:
                layers.run(names, batch, record)
                jax.effects_barrier()
                record.forget()
            for name in names:
                found = check_statistics(_CALLER, name, record.statistics.get(name))
                warn_of_unreached(_CALLER, name, unreached(found))
                found = with_identity(found)
                rows = np.asarray(found.rows)
                rows, features = int(np.min(rows[rows > 0])), found.absmax.shape[-1]
                if full and not few:
                    few = warn_of_few_rows(_CALLER, name, rows, features)
                _save(results, name, layers.replace(name, quantizer, found))
            advance(len(names))
    for name in layers.formats:
        if name not in order:
            layers.replace(name, "mse", None)


class _Order:
    """A record of the order of products, without statistics."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def add(self, name: str, *_: Any) -> None:
        self.names.setdefault(name)


def _order(layers: Layers, batch: Any) -> list[str]:
    record = _Order()

    def trace() -> tuple[()]:
        layers.run(list(layers.formats), batch, record)
        return ()

    jax.eval_shape(trace)
    return list(record.names)


def _key(layers: Layers, quantizer: Any, batch: Any) -> dict[str, Any]:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(batch):
        digest.update(
            np.asarray(leaf).tobytes() if hasattr(leaf, "dtype") else brief(leaf).encode()
        )
    formats = {name: str(format) for name, format in layers.formats.items()}
    return {"layers": formats, "quantizer": brief(quantizer), "batch": digest.hexdigest()}


def _save(results: Results, name: str, found: Scaled) -> None:
    if results.folder is not None:
        kernel, factor = found
        leaves = {leaf: getattr(kernel, leaf) for leaf in LEAVES} | {FACTOR: factor}
        arrays = {leaf: x for leaf, x in leaves.items() if x is not None}
        results.save(name, arrays | {"sizes": np.array([kernel.k, kernel.n, *kernel.shards])})


def _restore(layers: Layers, results: Results, name: str) -> bool:
    """Whether an earlier run has quantized a layer, which then gets the same words."""
    arrays = results.load(name)
    if arrays is None:
        return False
    k, n, *shards = map(int, arrays.pop("sizes"))
    factor = arrays.pop(FACTOR, None)
    leaves: Any = {leaf: None for leaf in LEAVES} | {x: jnp.asarray(y) for x, y in arrays.items()}
    format = layers.formats[name]
    kernel = QuantizedArray(**leaves, format=format, k=k, n=n, shards=(shards[0], shards[1]))
    factor = None if factor is None else jnp.asarray(factor)
    layers.replace(name, Scaled(kernel, factor), None)
    return True


@contextlib.contextmanager
def _bar(progress: bool, total: int) -> Iterator[Callable[[int], Any]]:
    if not progress:
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc="calibrating", unit="layer") as bar:
        yield bar.update
