"""Checks that the arrays of a call fit in memory, before they are made."""

import jax


def check(caller: str, needed: int, what: str) -> None:
    """Raises if `needed` bytes are more than the device has left, if that is known."""
    left = available()
    if left is not None and needed > left:
        raise ValueError(
            f"{caller}: {what} needs {needed:,} bytes for its cache and logits, but {left:,} are "
            "left; use fewer prompts at a time, or generate fewer tokens."
        )


def available() -> int | None:
    """The bytes that the first device has left; None if unknown."""
    device = jax.devices()[0]
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
