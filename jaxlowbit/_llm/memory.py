"""Checks that the arrays of a call fit in memory, before they are allocated."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._core.format import Format


def check(caller: str, needed: int, what: str) -> None:
    """Raises if the device has less than `needed` bytes left, if that is known."""
    left = available()
    if left is not None and needed > left:
        raise ValueError(
            f"{caller}: {what} needs {needed:,} bytes for its cache and logits, but {left:,} are "
            "left; use fewer prompts at a time, or generate fewer tokens."
        )


def check_weights(
    caller: str,
    shapes: Mapping[str, tuple[int, ...]],
    formats: Mapping[str, Format | None],
    dtype: Any,
    mesh: jax.sharding.Mesh | None,
) -> None:
    """Checks that weights fit in memory, without their scales; float weights are in `dtype`.

    **Raises:** `ValueError` if the device has less memory left.
    """
    wide, bits, left = 8 * jnp.dtype(dtype).itemsize, 0, available()
    for name, shape in shapes.items():
        format = formats.get(name)
        bits += math.prod(shape) * (wide if format is None else format.bits)
    needed = bits // 8 // (1 if mesh is None else mesh.size)
    if left is not None and needed > left:
        raise ValueError(
            f"{caller}: the weights need {needed:,} bytes, but {left:,} are left; use a format of "
            "fewer bits, or divide the model over more devices."
        )


def available() -> int | None:
    """The free memory of this process's first device in bytes; None if unknown."""
    device = jax.local_devices()[0]  # another process's has no statistics here
    if device.platform == "cpu":
        try:
            with open("/proc/meminfo", encoding="utf-8") as file:
                fields = dict(line.split(":") for line in file)
            return int(fields["MemAvailable"].split()[0]) * 1024
        except (OSError, KeyError, ValueError):
            return None
    statistics = device.memory_stats() or {}
    if "bytes_limit" not in statistics:
        return None
    return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)
