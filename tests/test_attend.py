"""Attention by our own kernel, as programs show it without a GPU; `test_attend_gpu.py` runs it."""

import re

import jax
import jax.numpy as jnp
import pytest
from decoders import LLAMA
from flax import nnx

from jaxlowbit import INT8
from jaxlowbit._backends import cuda_attend, extension
from jaxlowbit._llm import attention
from jaxlowbit._llm.cache import make_cache
from jaxlowbit.llm import init

BATCH, SLOTS, REACH = 2, 320, 256


def like(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def lowered(batch=BATCH, heads=32, kv_heads=8, size=128, reach: int | None = REACH, window=None):
    cache = like(batch, SLOTS, kv_heads, size)

    def attend(q, k, v, positions, held):
        return attention.attend(
            *(q, k, v, positions, held),
            window=window,
            scale=0.5,
            implementation="native",
            reach=reach,
        )

    positions = like(batch, 1, dtype="int32"), like(batch, SLOTS, dtype="int32")
    program = jax.jit(attend).trace(like(batch, 1, heads, size), cache, cache, *positions)
    assert program.out_info.shape == (batch, 1, heads * size)
    return program.lower(lowering_platforms=("cuda",)).as_text()


def test_one_custom_call_reads_the_whole_cache(cuda):
    text = lowered()
    assert re.findall(r"custom_call @(\w+)", text) == ["jaxlowbit_attend"]
    assert f"reach = {REACH} : i64" in text and "window = 0 : i64" in text
    assert "scale = 5.000000e-01 : f32" in text
    assert f"version = {extension.ffi.CALL_VERSION} : i64" in text
    assert "slice" not in text and f"tensor<{BATCH}x{REACH}x" not in text
    assert text.count("optimization_barrier") == 2  # of the query and of the result


def test_a_window_and_all_slots_are_attributes(cuda):
    text = lowered(reach=None, window=100)
    assert f"reach = {SLOTS} : i64" in text and "window = 100 : i64" in text


@pytest.mark.parametrize(("batch", "splits"), [(1, 8), (8, 8), (16, 4), (64, 4)])
def test_the_workspace_has_room_for_the_splits(cuda, batch, splits):
    """For as many as fill a GPU, where there are slots for them."""
    (found,) = re.findall(r"tensor<(\d+)xui8>", lowered(batch=batch).partition("custom_call")[2])[
        :1
    ]
    assert int(found) == 4 * batch * 32 * splits * (128 + 2)


@pytest.mark.parametrize(
    ("dtype", "heads", "size", "reason"),
    [
        ("float32", 32, 128, "bfloat16 or float16"),
        ("bfloat16", 32, 100, "multiple of 8 up to 256"),
        ("bfloat16", 32, 264, "multiple of 8 up to 256"),
        ("bfloat16", 136, 128, "up to 16 heads"),
    ],
)
def test_what_the_kernel_does_not_take_has_a_reason(cuda, dtype, heads, size, reason):
    sizes = {"heads": heads, "kv_heads": 8, "head_size": size}
    assert reason in (cuda_attend.unsupported(jnp.dtype(dtype), **sizes) or "")


def test_a_build_without_kernels_has_a_reason(monkeypatch):
    monkeypatch.setattr(extension, "unavailable", lambda platform: f"no {platform}")
    sizes = {"heads": 32, "kv_heads": 8, "head_size": 128}
    assert cuda_attend.unsupported(jnp.dtype("bfloat16"), **sizes) == "no cuda"
    assert not attention.native(jnp.dtype("bfloat16"), **sizes)


def test_a_decoder_attends_in_place(cuda, monkeypatch):
    monkeypatch.setattr(attention, "choose", lambda *args, **sizes: "native")
    graph, state = nnx.split(init(LLAMA, INT8, dtype=jnp.bfloat16).decoder)
    cache = jax.eval_shape(lambda: make_cache(LLAMA, BATCH, SLOTS, jnp.bfloat16))

    def forward(state, tokens, cache):
        return nnx.merge(graph, state).forward(tokens, tokens, cache, reach=REACH)

    program = jax.jit(forward).trace(state, like(BATCH, 1, dtype="int32"), cache)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @jaxlowbit_attend") == LLAMA.layers
    assert f"tensor<{BATCH}x{REACH}x" not in text


@pytest.mark.parametrize("window", [None, 5])
def test_xla_reads_the_first_slots_alone(window):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, length, heads, 16))
        for key, length, heads in zip(keys, (1, 12, 12), (4, 2, 2), strict=True)
    )
    held = jnp.broadcast_to(jnp.arange(12), (2, 12))
    positions = jnp.array([[7], [3]])

    def attend(k, v, held, reach=None):
        return attention.attend(
            *(q, k, v, positions, held),
            window=window,
            scale=0.25,
            implementation="xla",
            reach=reach,
        )

    expected = attend(k[:, :8], v[:, :8], held[:, :8])
    assert jnp.array_equal(attend(k.at[:, 8:].set(jnp.nan), v, held, reach=8), expected)
