"""`flax.serialization` of quantized arrays: `to_bytes`, `from_bytes` and state dicts."""

from typing import Any

from flax import serialization

from .._core.array import LEAVES, QuantizedArray


def register() -> None:
    """Registers quantized arrays with Flax: their leaves are stored by name."""
    serialization.register_serialization_state(QuantizedArray, _stored, _restored, override=True)


def _stored(array: QuantizedArray) -> dict[str, Any]:
    leaves = {name: getattr(array, name) for name in LEAVES}
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}


def _restored(target: QuantizedArray, state: Any) -> QuantizedArray:
    """Restores the leaves into an array like `target`, which must have the same format and
    sizes."""
    expected = set(_stored(target))
    if set(state) != expected:
        raise ValueError(
            f"from_state_dict: {target!r} is to be restored from {sorted(state)}, but it has "
            f"{sorted(expected)}; pass a target of the format that was stored."
        )
    array = target._with(**state)
    array.__post_init__()
    return array
