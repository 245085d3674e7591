"""Our attention kernel on the CPU, compared with XLA; for GPUs see `test_attend_gpu.py`."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import LLAMA
from flax import nnx

from jaxlowbit import INT8
from jaxlowbit._backends import call, cpu_attend, extension
from jaxlowbit._llm import attention
from jaxlowbit._llm.cache import make_cache
from jaxlowbit.llm import init


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


class Case(NamedTuple):
    batch: int = 2
    queries: int = 1
    heads: int = 6
    kv_heads: int = 2
    size: int = 64
    slots: int = 200
    used: int = 150
    reach: int = 180
    window: int | None = None
    dtype: str = "float32"


CASES = {
    "one query": Case(),
    "several parts": Case(slots=2000, used=1900, reach=1990),
    "a window": Case(window=7),
    "a prompt": Case(queries=120, window=33),
    "a tile and a row": Case(queries=7, heads=7, kv_heads=1),
    "odd heads": Case(queries=3, size=20, heads=3, kv_heads=3),
    "large heads": Case(queries=2, size=256),
    "one slot": Case(slots=1, used=1, reach=1, batch=1),
    "bfloat16": Case(dtype="bfloat16", queries=2),
    "float16": Case(dtype="float16", size=80),
}


def operands(case: Case) -> tuple[Any, ...]:
    """Query, key, value, positions and cache contents; the second prompt is shorter."""
    rng = np.random.default_rng(0)

    def normal(length, heads):
        values = rng.normal(size=(case.batch, length, heads, case.size))
        return jnp.asarray(values, case.dtype)

    held = np.full((case.batch, case.slots), -1, np.int32)
    for i in range(case.batch):
        held[i, i * 5 : case.used] = np.arange(case.used - i * 5)
    query, key, value = (
        normal(length, heads)
        for length, heads in (
            (case.queries, case.heads),
            (case.slots, case.kv_heads),
            (case.slots, case.kv_heads),
        )
    )
    positions = held[:, case.used - case.queries : case.used]
    return query, key, value, jnp.asarray(positions), jnp.asarray(held)


def attend(case: Case, implementation: Literal["xla", "cpu"], *arrays: Any) -> np.ndarray:
    program = functools.partial(
        attention.attend,
        window=case.window,
        scale=case.size**-0.5,
        implementation=implementation,
        reach=case.reach,
    )
    out = jax.jit(program)(*arrays)
    assert out.dtype == case.dtype
    return np.asarray(out).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_attention_matches_xla_for_any_content_of_invisible_slots(name):
    case = CASES[name]
    query, key, value, positions, held = operands(case)
    expected = attend(case, "xla", query, key, value, positions, held)
    unseen = (held < 0)[..., None, None]
    key, value = (jnp.where(unseen, jnp.nan, x) for x in (key, value))
    found = attend(case, "cpu", query, key, value, positions, held)
    assert found.shape == expected.shape
    bound = 1e-5 if case.dtype == "float32" else 2 * float(jnp.finfo(case.dtype).eps)
    assert np.abs(found - expected).max() < bound * max(1, np.abs(expected).max())


def test_a_visible_nan_reaches_the_result():
    case = CASES["one query"]
    query, key, value, positions, held = operands(case)
    found = attend(case, "cpu", query, key.at[0, 9, 1].set(jnp.nan), value, positions, held)
    assert np.isnan(found[0, 0, 3 * case.size :]).all()  # all heads that share these keys
    assert np.isfinite(found[0, 0, : 3 * case.size]).all() and np.isfinite(found[1]).all()


def test_padding_gets_zeros_and_an_empty_batch_is_one():
    case = CASES["one query"]
    query, key, value, positions, held = operands(case)
    padding = positions.at[0].set(-1)
    found = attend(case, "cpu", query, key, value, padding, held)
    assert not found[0].any() and found[1].any()
    empty = [x[:0] for x in (query, key, value, positions, held)]
    assert attend(case, "cpu", *empty).shape == (0, 1, case.heads * case.size)


@pytest.mark.parametrize("name", ["several parts", "a prompt"])
def test_bits_do_not_depend_on_threads(name):
    arrays = operands(CASES[name])
    one = attend(CASES[name], "cpu", *arrays).tobytes()
    assert all(attend(CASES[name], "cpu", *arrays).tobytes() == one for _ in range(20))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": ((1, 1, 5, 16), "float32")}, "query has 5 heads and key has 2 but the first"),
        ({"key": ((1, 8, 2, 16), "bfloat16")}, "key is bf16 but must be the type of query"),
        ({"value": ((1, 9, 2, 16), "float32")}, r"value has shape \[1, 9, 2, 16\] but must be"),
        ({"position": ((1, 1), "float32")}, "position is f32 but must be s32"),
        ({"positions": ((1, 7), "int32")}, r"positions has shape \[1, 7\] but must be \[batch, s"),
        ({"reach": 9}, "reach is 9 but must be from 0 to the 8 slots of key"),
        ({"window": -1}, "window is -1 but must be positive, or 0 for all"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(map(str, value)),
)
def test_invalid_statistics_raise(changes, message):
    specs = {
        "query": ((1, 1, 4, 16), "float32"),
        "key": ((1, 8, 2, 16), "float32"),
        "value": ((1, 8, 2, 16), "float32"),
        "position": ((1, 1), "int32"),
        "positions": ((1, 8), "int32"),
    }
    sizes = {name: np.int64(changes.pop(name, 0)) for name in ("reach", "window")}
    arrays = [jnp.zeros(shape, dtype) for shape, dtype in {**specs, **changes}.values()]
    result = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"attend: {message}.*\."):
        out = jax.ffi.ffi_call(call.ATTEND_TARGET, result)(
            *arrays, caller="attend", **call.VERSIONS, **sizes, scale=np.float32(1)
        )
        jax.block_until_ready(out)


def test_unsupported_heads_have_a_reason(monkeypatch):
    assert cpu_attend.unsupported(jnp.dtype("float32"), head_size=256) is None
    assert "up to 256" in (cpu_attend.unsupported(jnp.dtype("float32"), head_size=257) or "")
    assert "float32" in (cpu_attend.unsupported(jnp.dtype("float64"), head_size=64) or "")
    monkeypatch.setattr(extension, "UNAVAILABLE", {name: f"no {name}" for name in ("cpu", "cuda")})
    assert cpu_attend.unsupported(jnp.dtype("float32"), head_size=64) == "no cpu"


def test_a_decoder_reads_its_cache_in_place_and_has_derivatives_without(monkeypatch):
    graph, state = nnx.split(init(LLAMA, INT8, dtype=jnp.float32).decoder)
    tokens = jnp.zeros((2, 4), jnp.int32)
    cache = jax.eval_shape(lambda: make_cache(LLAMA, 2, 64, jnp.float32))

    def forward(state, tokens, cache, reach):
        return nnx.merge(graph, state).forward(tokens, tokens, cache, reach=reach)

    def attends(tokens, reach, platform="cpu"):
        trace = jax.jit(forward, static_argnums=3).trace(state, tokens, cache, reach)
        program = trace.lower(lowering_platforms=(platform,)).as_text()
        return program.count("@jaxlowbit_attend(")

    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert attends(tokens, 64) == attends(tokens[:, :1], None) == LLAMA.layers
    assert attends(tokens, None) == attends(tokens, 64, "tpu") == 0
