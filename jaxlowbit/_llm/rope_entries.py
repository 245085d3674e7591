"""Reads the rotation from a config.json of any version of transformers.

Version 4 writes `rope_theta`, `rope_scaling` and, for Gemma 3, `rope_local_base_freq`. Version 5
writes `rope_parameters`, flat or for each kind of layer, and reads both. As in transformers,
`rope_scaling` takes precedence over `rope_parameters`, and an entry of these objects over the same
entry of the file, except `original_max_position_embeddings`.
"""

from typing import Any, NamedTuple

import numpy as np

from ..checkpoint._fields import Fields
from .architectures import Architecture, HuggingFace
from .config import RopeScaling
from .entries import listed

_KINDS = ("full_attention", "sliding_attention")
_ORIGINAL = "original_max_position_embeddings"
_BASE = 10_000.0
_PROPORTIONAL = "proportional"
_STILL = float(np.float32(1e30))


class _Rotation(NamedTuple):
    base: float
    scaling: RopeScaling | None
    part: float
    temperature: tuple[float, int] | None


def rotation_of(
    known: Fields, entry: Architecture, names: HuggingFace, head_size: int, local: bool
) -> tuple[dict[str, Any], list[str]]:
    """Fields of a `Config`, and sentences on entries that are not used.

    **Arguments:** `local`: whether any layer has a window.

    **Raises:** `ValueError` for a rotation that the decoder lacks, with the entry and its value.
    """
    base = known.get("rope_theta", "a number", _BASE)
    local_base = base if entry.local_rope_base == "global" else entry.local_rope_base
    parameters = known.get("rope_parameters", "an object") or {}
    scaling = known.get("rope_scaling", "an object") or {}
    # The layers with a window have a separate rotation.
    apart = local_base is not None and entry.window_layers != "none"
    if apart:
        if parameters and not _nested(parameters):
            raise ValueError(
                f"'rope_parameters' has no entry {' or '.join(_KINDS)}, but the two kinds of "
                "layers of this architecture have different rotations; correct config.json."
            )
        full = (parameters.get(_KINDS[0]) or {}) | scaling
        sliding = parameters.get(_KINDS[1]) or {}
        sliding_base = local_base or base
        if entry.local_rope_base != "global":
            sliding_base = known.get("rope_local_base_freq", "a number", local_base)
    else:
        parameters = scaling or parameters
        full = sliding = parameters
        if _nested(parameters):
            inner = Fields(known.path, parameters)
            full = inner.get(_KINDS[0], "an object", {})
            sliding = inner.need(_KINDS[1], "an object") if local else {}
        sliding_base = base
    if unknown := [kind for kind in parameters if _nested(parameters) and kind not in _KINDS]:
        raise ValueError(
            f"'rope_parameters' has the entry {unknown[0]!r}, which must be one of "
            f"{' and '.join(_KINDS)}; correct config.json."
        )
    found, sentences = _rotation(known, names, full, base, head_size)
    fields: dict[str, Any] = {
        "rope_base": found.base,
        "rope_scaling": found.scaling,
        "attention_temperature": found.temperature,
    }
    if found.part != 1:
        fields["rope_size"] = int(head_size * found.part)
    if local and (sliding is not full or apart):
        other, more = _rotation(known, names, sliding, sliding_base, head_size)
        sentences += more
        if other != found and other.scaling is not None:
            raise ValueError(
                "the rotations of layers with and without a window are scaled differently, but "
                "the decoder here scales only global layers; use another model."
            )
        if other != found:
            fields["local_rope_base"] = other.base
    return fields, sentences


def _nested(parameters: dict[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in parameters.values())


def _rotation(
    known: Fields, names: HuggingFace, parameters: dict[str, Any], base: float, head_size: int
) -> tuple[_Rotation, list[str]]:
    entries = Fields(known.path, parameters)
    kind = entries.get("type", "a string", "default")
    kind = entries.get("rope_type", "a string", kind)
    part = known.get("partial_rotary_factor", "a number", 1)
    part = entries.get("partial_rotary_factor", "a number", part)
    sections = entries.get("mrope_section", "a list")
    proportional = _proportional(entries, head_size, part) if kind == _PROPORTIONAL else None
    if kind == _PROPORTIONAL:
        part = 1
    if (part != 1 and "partial_rotary_factor" not in names.reads) or sections:
        name, value = ("mrope_section", sections) if sections else ("partial_rotary_factor", part)
        raise ValueError(
            f"{name!r} is {value!r}, but this architecture rotates every pair of a head by its "
            "position; use another model."
        )
    base = entries.get("rope_theta", "a number", base)
    scaling = proportional
    if kind != _PROPORTIONAL:
        scaling = _scaling(names.rope_types.get(kind, kind), entries, known)
    temperature = None
    if "llama_4_scaling_beta" in names.reads:
        beta = entries.get("llama_4_scaling_beta", "a number")
        entries.read.add("max_position_embeddings")  # a copy of the file's entry
        temperature = (beta, entries.need(_ORIGINAL, "an integer")) if beta else None
    rotation = _Rotation(base, scaling, part, temperature)
    unread = {
        name: value
        for name, value in parameters.items()
        if name not in entries.read and value not in (None, False, 0)
    }
    if not unread:
        return rotation, []
    sentence = (
        f"{known.path} has entries of the rotation that its type, {kind!r}, does not read: "
        f"{listed(unread)}; they are left out, as in transformers."
    )
    return rotation, [sentence]


def _proportional(entries: Fields, head_size: int, part: float) -> RopeScaling | None:
    """The scaling of a rotation that turns only the first `part` of the pairs of a head.

    It divides the frequencies of the other pairs by 1e30, as llama.cpp's tensor `rope_freqs` does:
    their cosines are 1 in float32.
    """
    pairs, turning = head_size // 2, int(part * head_size // 2)
    if not 0 <= turning <= pairs:
        raise ValueError(
            f"'partial_rotary_factor' is {part!r}, but it is a part of a head, from 0 to 1; "
            "correct config.json."
        )
    factor = float(entries.get("factor", "a number", 1.0))
    if turning == pairs and factor == 1:
        return None
    factors = (1.0,) * turning + (_STILL,) * (pairs - turning)
    return RopeScaling("factors", factor, factors=factors)


def _scaling(kind: str, entries: Fields, known: Fields) -> RopeScaling | None:
    if kind == "default":
        known.read.add(_ORIGINAL)
        return None
    context = known.need("max_position_embeddings", "an integer")
    if kind == "dynamic":  # no effect up to that context, the maximum here
        entries.need("factor", "a number")
        return None
    if kind == "linear":
        return RopeScaling("linear", entries.need("factor", "a number"))
    original = entries.get(_ORIGINAL, "an integer", context)
    original = known.get(_ORIGINAL, "an integer", original)
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            entries.need("factor", "a number"),
            original,
            low=entries.need("low_freq_factor", "a number"),
            high=entries.need("high_freq_factor", "a number"),
        )
    if kind == "yarn":
        mscale = entries.get("mscale", "a number")
        all_dim = entries.get("mscale_all_dim", "a number")
        ratio = bool(mscale and all_dim)
        if not ratio:  # transformers ignores one without the other
            entries.read.difference_update({"mscale", "mscale_all_dim"})
        return RopeScaling(
            "yarn",
            entries.get("factor", "a number", context / original if original else 0),
            original,
            beta_fast=entries.get("beta_fast", "a number") or 32.0,
            beta_slow=entries.get("beta_slow", "a number") or 1.0,
            attention_factor=entries.get("attention_factor", "a number"),
            mscale=mscale if ratio else None,
            mscale_all_dim=all_dim if ratio else None,
            truncate=entries.get("truncate", "true or false", True),
        )
    if kind == "longrope":
        factor = entries.get("factor", "a number", context / original if original else 0)
        return RopeScaling(
            "longrope",
            max(factor, 1.0),  # smaller ones turn off the factor of sines and cosines
            original,
            attention_factor=entries.get("attention_factor", "a number"),
            factors=tuple(entries.need("short_factor", "a list")),
            long_factors=tuple(entries.need("long_factor", "a list")),
        )
    raise ValueError(
        f"the rotation's scaling is {kind!r}, but the decoder here has default, linear, dynamic, "
        "llama3, yarn, longrope and proportional; use another model."
    )
