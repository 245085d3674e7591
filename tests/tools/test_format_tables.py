"""Tables of formats in the pages and in the report agree with the code."""

import re
import subprocess
import sys
from typing import Any

import format_tables
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dequantized, unpack, unpack_groups

import jaxlowbit as jl
from jaxlowbit._core import super_blocks
from jaxlowbit._core.codebooks import CODEBOOKS
from jaxlowbit._core.format import format_name, parse_format
from jaxlowbit._core.format_table import NAMED, bits_per_weight, formula, number_range

PAGES = [page for page in format_tables.pages() if "<!-- format-table" in page.read_text()]
EVERY = pytest.mark.parametrize("name", NAMED)
MATRIX = np.random.default_rng(0).standard_normal((256, 64), np.float32)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_the_tables(page):
    """To update the pages: python tools/format_tables.py"""
    text = page.read_text()
    assert format_tables.filled(text) == text


def test_pages_and_tables():
    assert {"formats.md", "microscaling.md"} <= {page.name for page in PAGES}
    page = "a\n<!-- format-table: 8-bit scales -->\nold\n<!-- /format-table -->\nb\n"
    filled = format_tables.filled(page)
    assert filled.startswith("a\n<!--") and filled.endswith("<!-- /format-table -->\nb\n")
    names = ["int4-int8", "int4-g32-float-two_level", "mxfp4", "mxfp8", "nvfp4"]
    assert re.findall(r"^\| `([\w-]+)`", filled, re.M) == names
    assert "old" not in filled and format_tables.filled(filled) == filled
    with pytest.raises(ValueError, match="no table of 'zeros'; name 8-bit scales, or nothing"):
        format_tables.filled("<!-- format-table: zeros -->\n<!-- /format-table -->")


def test_presets_have_a_row():
    presets = {found for found in vars(jl).values() if isinstance(found, jl.Format)}
    assert presets <= set(NAMED.values()) and len(set(NAMED.values())) == len(NAMED)


@EVERY
def test_a_row_matches_quantize(name):
    """The row's formula on the quantized values gives the weights; leaves have the row's bits."""
    format = NAMED[name]
    scale_dtype = None if format.scale is not None else "bfloat16"
    quantize = jax.jit(jl.quantize, static_argnames=("format", "quantizer", "scale_dtype"))
    array = quantize(MATRIX, name, quantizer="absmax", scale_dtype=scale_dtype)
    assert array.format == format and parse_format(format_name(format)) == format
    leaves: list[Any] = [x for x in (array.packed, array.scale, array.zero) if x is not None]
    unit = None if array.tensor_scale is None else np.asarray(array.tensor_scale)
    if format.scales_channels:
        leaves.append(unit)
    bits = 8 * sum(leaf.nbytes for leaf in leaves) / MATRIX.size
    assert bits == bits_per_weight(format, k=MATRIX.shape[0])

    def spread(groups):
        return np.repeat(groups, MATRIX.shape[0] // groups.shape[0], axis=0)

    def per_row(groups):
        return spread(unpack_groups(np.asarray(groups)).astype(np.float32))

    def levels(values):  # integers of groups times floats of super-blocks
        found = super_blocks.unpacked(jnp.asarray(unpack_groups(np.asarray(values))), format)
        return [spread(np.asarray(level).astype(np.float32)) for level in found]

    q = unpack(np.asarray(array.packed), format.bits).astype(np.int32)
    names = {"q": q, "t": unit}
    if format.scale == "two_level":
        names |= zip("sd", levels(array.scale), strict=True)
        names |= zip("be", levels(array.zero), strict=True)
    else:
        names["s"] = per_row(array.scale)
        names |= {x: per_row(array.zero) for x in "zb" if array.zero is not None}
    names |= {x: np.array(book.values, np.float32) for x, book in CODEBOOKS.items()}
    weights = eval(re.sub(r" (?=[stde]\b)", " * ", formula(format)), names)
    np.testing.assert_allclose(dequantized(array, jnp.float32), weights, rtol=1e-5, atol=1e-6)
    numbers = np.array(format.values or np.arange(2**format.bits) + number_range(format)[0])
    numbers = numbers[np.isfinite(numbers)]
    assert number_range(format) == (numbers.min(), numbers.max())


@EVERY
def test_kernels_match_supported_backends(name):
    rhs = jax.eval_shape(lambda: jl.quantize(MATRIX, name))
    reasons = jl.supported_backends(jax.ShapeDtypeStruct((1, 256), jnp.bfloat16), rhs)
    listed = set(format_tables.kernels(NAMED[name]))
    # "cuda" may be unsupported independently of the format, by this build or this GPU.
    assert {backend for backend, reason in reasons.items() if reason is None} <= {*listed, "xla"}
    assert ({"cpu", "pallas"} & listed) == {x for x in ("cpu", "pallas") if reasons[x] is None}


def test_the_report_lists_the_formats():
    report = subprocess.run(
        [sys.executable, "-m", "jaxlowbit", "info"], capture_output=True, text=True, timeout=300
    )
    assert report.returncode == 0, report.stderr
    for name, format in NAMED.items():
        assert re.search(rf"^{name} +{bits_per_weight(format):.4g} ", report.stdout, re.M), name
