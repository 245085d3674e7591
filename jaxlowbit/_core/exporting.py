"""`jax.export`: storage of quantized arguments, and a remedy in its error about custom calls."""

import functools
import json
from typing import Any

from jax import export

from . import layout
from .array import QuantizedArray
from .format import Format

NAME = "jaxlowbit.QuantizedArray"
FORM = 1
"""Version of the stored form: JSON with the names of `_stored`, and no array."""
CODEBOOK_FORM = 2
"""Version with a codebook, which older libraries reject."""
SCALE_FORM = 3
"""Version with 8-bit scales, which older libraries reject."""

SUPER_FORM = 4
"""Version with two-level scales, which older libraries reject."""

_FORMS = (FORM, CODEBOOK_FORM, SCALE_FORM, SUPER_FORM)

REMEDY = "Export by jax.export.export(..., disabled_checks=jaxlowbit.DISABLED_EXPORT_CHECKS)"
"""The name of a scope around custom calls: JAX raises for calls that are not allowed by name, and
quotes their scopes."""
_AGAIN = "export the program again with this library, or load it with the one that exported it."


@functools.cache  # JAX raises for a second registration
def register() -> None:
    """Registers the static part of a quantized array with `jax.export`."""
    export.register_pytree_node_serialization(
        QuantizedArray,
        serialized_name=NAME,
        serialize_auxdata=_stored,
        deserialize_auxdata=_restored,
    )


def _stored(static: tuple[Any, ...]) -> bytes:
    format, k, n, shards = static
    form = FORM if format.codebook is None else CODEBOOK_FORM
    if format.scale is not None:
        form = SUPER_FORM if format.two_levels else SCALE_FORM
    fields = {
        "form": form,
        "layout": layout.VERSION,  # a program without custom calls unpacks words itself
        "bits": format.bits,
        "group_size": format.group_size,
        "zero": format.zero,
        "codebook": format.codebook,
        "scale": format.scale,
        "k": k,
        "n": n,
        "shards": shards,
    }
    return json.dumps(fields).encode()


def _restored(stored: bytes) -> tuple[Any, ...]:
    fields = json.loads(stored)
    for name, own in (("form", _FORMS), ("layout", (layout.VERSION,))):
        if fields.get(name) not in own:
            raise ValueError(
                f"QuantizedArray: this program stores it with {name} version {fields.get(name)}, "
                f"but this library reads version {max(own)}; {_AGAIN}"
            )
    codebook = fields.get("codebook")
    codebook = tuple(codebook) if isinstance(codebook, list) else codebook
    meaning = (fields["zero"], codebook, fields.get("scale"))
    format = Format(fields["bits"], fields["group_size"], *meaning)
    return format, fields["k"], fields["n"], tuple(fields["shards"])
