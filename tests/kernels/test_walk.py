"""Which layers of a decode step one launch computes between two attentions (`walk_select.cc`)."""

from typing import Any

import jax.numpy as jnp
import pytest

from jaxlowbit import INT4, INT8, UINT4, Format
from jaxlowbit._backends import call
from jaxlowbit._backends.extension import ffi

# Width, attended columns, columns of keys and of values, hidden features.
MODELS = {
    "llama3-8b": (4096, 4096, 1024, 14336),
    "llama3-70b": (8192, 8192, 1024, 28672),
    "qwen3-8b": (4096, 4096, 1024, 12288),
    "llama3.2-1b": (2048, 2048, 512, 8192),
    "llama3.2-3b": (3072, 3072, 1024, 8192),
    "tiny": (1024, 2048, 128, 1024),
}
UNFIT = {
    "llama2-7b": (4096, 4096, 4096, 11008),
    "qwen3-4b": (2560, 4096, 1024, 9728),
    "small": (256, 256, 64, 512),
}


def products(
    width: int,
    attended: int,
    key: int,
    hidden: int,
    *,
    rows: int = 1,
    format: Format = INT4,
    dtype: Any = jnp.bfloat16,
    scales: Any = None,
    activation: str = "silu",
    **fields: Any,
) -> list[list[int]]:
    shapes = [(attended, width), (width, hidden), (hidden, width), (width, attended)]
    shapes += [(width, key)] * 2
    gated = {"gated": True, "activation": activation}
    return [
        call.record(
            format,
            *(jnp.dtype(dtype), jnp.dtype(scales or dtype)),
            m=rows,
            k=k,
            n=n,
            **fields,
            **(gated if i == 1 else {}),
        )
        for i, (k, n) in enumerate(shapes)
    ]


@pytest.mark.parametrize("num_sms", [2, 114, 132])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_it_takes_models(name, rows, num_sms):
    assert ffi.unsupported_walk(products(*MODELS[name], rows=rows), num_sms=num_sms) == ""


@pytest.mark.parametrize("name", UNFIT)
def test_it_takes_k_in_whole_pages(name):
    assert "k of a multiple of 1024" in ffi.unsupported_walk(products(*UNFIT[name]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 3}, "one or two rows"),
        ({"format": INT8}, "out is not int4"),
        ({"format": UINT4}, "out is not int4"),
        ({"format": Format(4, codebook="nf4", group_size=128)}, "out is not int4"),
        ({"format": Format(4, group_size=64)}, "groups that are not 128"),
        ({"format": Format(4)}, "groups that are not 128"),
        ({"dtype": jnp.float16}, "not bfloat16"),
        ({"scales": "float32"}, "not bfloat16"),
        ({"out": "float32"}, "not bfloat16"),
        ({"activation": "gelu"}, "gate_up has another activation"),
        ({"batch": 2}, "another number of weights"),
        ({"permuted_parts": 1}, "not a plain product"),
        ({"transposed": True}, "not a plain product"),
    ],
)
def test_other_products_remain_separate(options, message):
    assert message in ffi.unsupported_walk(products(*MODELS["llama3-8b"], **options))


def test_other_devices_and_chains_remain_separate():
    own = products(*MODELS["llama3-8b"])
    assert "compute capability 9.0" in ffi.unsupported_walk(own, compute_capability=100)
    assert "multiprocessors" in ffi.unsupported_walk(own, num_sms=1)
    assert "six products" in ffi.unsupported_walk(own[:3])
    other = [*own[:2], products(*MODELS["llama3-70b"])[2], *own[3:]]
    assert "do not follow each other" in ffi.unsupported_walk(other)


def test_large_layers_prefer_it():
    preferred = {name: ffi.prefers_walk(products(*sizes)) for name, sizes in MODELS.items()}
    assert preferred["llama3-8b"] and preferred["llama3-70b"] and preferred["qwen3-8b"]
    assert not preferred["tiny"]


def test_modes():
    with pytest.raises(ValueError, match="no mode often"):
        ffi.set_walk("often")
