"""Refusing layers: all of them in one error, before the first one changes."""

from collections.abc import Iterable

_LISTED = 8


def refuse(refusals: Iterable[str | None]) -> None:
    """Raises a `ValueError` that lists why layers cannot be quantized, None where one can."""
    found = [reason for reason in refusals if reason is not None]
    if len(found) == 1:
        raise ValueError(f"quantize_model: {found[0]}")
    if found:
        more = f"\n- and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        listed = "".join(f"\n- {reason}" for reason in found[:_LISTED])
        raise ValueError(
            f"quantize_model: {len(found)} layers cannot be quantized, and none was: correct them, "
            f"or keep them, with rules of their paths and None.{listed}{more}"
        )
