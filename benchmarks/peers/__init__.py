"""Adapters of other packages' products.

An adapter converts the same random codes to its package's weight, and calls the package's product.
Packages are imported on first use. `written_for` is the package version that an adapter was
written for.
"""

import functools
import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any, Literal, NamedTuple

from jaxlowbit import Format


class Peer(NamedTuple):
    """See `contenders.Contender`; torch weights are made from torch tensors."""

    package: str
    module: str
    written_for: str
    make: Callable[[Any, Format], Any]
    call: Callable[[Any, Any], Any]
    unsupported: Callable[[Format, str], str | None]
    framework: Literal["jax", "torch"] = "torch"
    dense: bool = False
    only_integers: bool = True  # with 16-bit or 32-bit float scales
    reference: Callable[[Any], Any] | None = None


def missing(peer: Peer) -> str | None:
    """Returns the reason why a package cannot be used here, or None."""
    modules = ("torch", peer.module) if peer.framework == "torch" else (peer.module,)
    for module in modules:
        if reason := _import_error(module):
            return reason
    if peer.framework == "torch" and not importlib.import_module("torch").cuda.is_available():
        return "torch sees no CUDA device"
    return None


@functools.cache
def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a package built for another torch may raise anything
        return f"import {module} fails: {error}"
    return None


def unsupported(peer: Peer, format: Format, dtype: str) -> str | None:
    """Returns the reason why a package cannot multiply by this format here, or None."""
    if reason := missing(peer):
        return reason
    others = format.codebook is not None or format.scale is not None
    if others and peer.only_integers and not peer.dense:
        return "the adapter has integers with scales of 16 or 32 bits"
    return peer.unsupported(format, dtype)


def version(peer: Peer) -> str | None:
    """Returns the installed version, or None."""
    try:
        return metadata.version(peer.package)
    except metadata.PackageNotFoundError:
        return None


def _table() -> dict[str, Peer]:
    from . import bitsandbytes, fbgemm, gemlite, humming, qwix, tokamax, torch, vllm

    return {
        "cublas": torch.CUBLAS,
        "tinygemm": torch.TINYGEMM,
        "gemlite": gemlite.PEER,
        "bitsandbytes": bitsandbytes.PEER,
        "humming": humming.PEER,
        "humming-tuned": humming.TUNED,
        "fbgemm": fbgemm.PEER,
        "marlin": vllm.MARLIN,
        "machete": vllm.MACHETE,
        "qwix": qwix.PEER,
        "tokamax": tokamax.PEER,
    }


PEERS = _table()
