"""`explain`: descriptions of kernel choices, also for absent devices."""

import re
import types

import jax
import jax.numpy as jnp
import pytest
from helpers import PLATFORM

import jaxlowbit
from jaxlowbit import FP8, INT4, Format, QuantizedActivations, explain
from jaxlowbit._backends import call, extension

K, N = 4096, 256
TABLE = Format(bits=6, codebook=tuple(range(64)))


def weight(format=INT4, *lead):
    return jax.eval_shape(
        lambda w: jaxlowbit.quantize(w, format), jax.ShapeDtypeStruct((*lead, K, N), jnp.bfloat16)
    )


def like(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def test_explain_matches_the_selection():
    for device, numbers in {
        "H200": (90, 132, 228 * 1024),
        "A100": (80, 108, 164 * 1024),
        "L4": (89, 58, 100 * 1024),
    }.items():
        capability, num_sms, shared = numbers
        for m in (1, 17, 200):
            product = call.record(INT4, "bfloat16", "bfloat16", m=m, n=N, k=K)
            chosen = extension.ffi.select(
                product,
                compute_capability=capability,
                num_sms=num_sms,
                shared_bytes_per_sm=shared,
                workspace_bytes=extension.ffi.partial_sums_bytes(product),
            )
            text = explain(like(m, K), weight(), device=device)
            assert f"block_m={chosen['block_m']}, split_k={chosen['split_k']}" in text
            assert f"{num_sms} multiprocessors of NVIDIA {device}" in text
            assert ("better than in one" in text) == (chosen["split_k"] > 1)


@pytest.mark.parametrize(
    ("lhs", "lead", "said"),
    [
        ((K,), (), "m=1, batch=1: tiles of"),
        ((2, 3, K), (), "m=6, batch=1: tiles of"),
        ((3, 5, K), (3,), "m=5, batch=3: tiles of"),
        ((2, 3, 5, K), (3,), "m=10, batch=3: tiles of"),
        ((5, K), (3,), "m=5, batch=3: tiles of"),
        ((K,), (3,), "m=1, batch=3: tiles of"),
    ],
)
def test_rows_match_the_call(lhs, lead, said):
    assert said in explain(like(*lhs), weight(INT4, *lead), device="H200")


@pytest.mark.parametrize("lead", [(), (3,)])
def test_an_empty_product_runs_nothing(lead):
    assert "the result is empty" in explain(like(0, K), weight(INT4, *lead), device="H200")


def test_this_machine():
    lhs = like(1, K)
    text = explain(lhs, weight())
    assert text == explain(lhs, weight(), device=jax.devices()[0])
    assert re.search(rf"^backend  {PLATFORM}: a custom call", text, re.MULTILINE)


@pytest.mark.parametrize(("cores", "said"), [({"core_count": 20}, 20), ({}, 132)])
def test_a_gpu_that_jax_sees(cuda, monkeypatch, cores, said):
    """A fake CUDA device of JAX; without a core count, `explain` assumes an H200."""
    device = types.SimpleNamespace(
        platform="gpu", device_kind="NVIDIA GPU", compute_capability="8.6", **cores
    )
    text = explain(like(1, K), weight(), device=device)
    assert f"the {said} multiprocessors of NVIDIA GPU" in text
    monkeypatch.setattr(extension, "UNAVAILABLE", {"cpu": None, "cuda": "no kernels were built"})
    assert "why      no kernels were built" in explain(like(1, K), weight(), device=device)
    assert "no kernels" not in explain(like(1, K), weight(), device="H200")


def test_a_platform_without_custom_calls():
    device = types.SimpleNamespace(platform="tpu", device_kind="TPU v5e")
    assert "there is no custom call for this platform" in explain(
        like(1, K), weight(), device=device
    )


def test_the_cpu():
    text = explain(like(1, K, dtype="float32"), weight(INT4.replace(zero="float")), device="cpu")
    assert f"qmm_cpu, compiled for {extension.BUILD['cpu_isa'][0]}" in text


@pytest.mark.parametrize(
    ("device", "format", "dtype", "said"),
    [
        ("H200", TABLE, "bfloat16", "look up numbers of codebooks of up to 5 bits"),
        (
            "H200",
            INT4.replace(zero="float"),
            "float32",
            "with float32 lhs the kernels take integers",
        ),
    ],
)
def test_the_definition_and_why(device, format, dtype, said):
    text = explain(like(1, K, dtype=dtype), weight(format), device=device)
    assert "xla: dequantizes, then multiplies" in text and said in text


def test_a_gpu_without_kernels():
    text = explain(like(1, K), weight(), device="T4")
    assert "xla: dequantizes, then multiplies" in text
    assert "the kernels need compute capability 8.0, this device has 7.5" in text


def quantized(m, dtype="int8"):
    return QuantizedActivations(like(m, K, dtype=dtype), like(m, 1, dtype="float32"))


@pytest.mark.parametrize(
    ("m", "dtype", "format", "device", "said"),
    [
        (512, "int8", INT4, "H200", "in 8 bits"),
        (512, "int8", Format(4, 128, "integer"), "H200", "in 8 bits"),
        (512, "float8_e4m3fn", FP8, "H100", "in 8 bits"),
        (32, "int8", Format(4), "H200", "in 8 bits"),
        (31, "int8", Format(4), "H200", "bfloat16, exactly: 31 rows, fewer than 32, are as fast"),
        (32, "int8", INT4, "H200", "bfloat16, exactly: 32 rows, fewer than 192, are as fast"),
        (512, "int8", Format(4, 32), "H200", "groups must be 64, a multiple of 128 or whole"),
        (512, "int8", Format(8, 128, "integer"), "H200", "also with int8 scales or integer zeros"),
        (512, "int8", INT4, "A100", "those of compute capability 9.0"),
    ],
)
def test_quantized_activations(m, dtype, format, device, said):
    given = explain(quantized(m, dtype), weight(format), device=device)
    assert f"bfloat16 in {dtype} ({m}, {K}) @" in given
    (values,) = re.findall(r"^values   (.*)$", given, re.MULTILINE)
    assert said in values
    assert ("qmm_sm90, " in given) >= (values == "in 8 bits")
    rounded = explain(like(m, K), weight(format), lhs_qtype=dtype, device=device)
    assert f"bfloat16, rounded to {dtype}, ({m}, {K}) @" in rounded
    assert rounded.splitlines()[1:] == given.splitlines()[1:]
    if values == "in 8 bits":
        product = call.record(format, dtype, "bfloat16", m=m, n=N, k=K)
        bytes = extension.ffi.partial_sums_bytes(product)
        chosen = extension.ffi.select(product, workspace_bytes=bytes)
        assert f"block_m={chosen['block_m']}, split_k={chosen['split_k']}" in given


def test_quantized_activations_on_the_cpu(monkeypatch):
    for isa, m, said in [
        ("vnni", 5, "in 8 bits"),
        ("amx", 1, "in 8 bits"),
        ("amx", 2, "AMX multiplies more rows faster"),
        ("avx2", 1, "no AVX-512 VNNI"),
    ]:
        info = extension.BUILD | {"cpu_isa": [isa]}
        monkeypatch.setattr(extension, "BUILD", info)
        text = explain(quantized(m), weight(), device="cpu")
        assert re.search(rf"^values .*{said}", text, re.MULTILINE)


def test_errors():
    with pytest.raises(ValueError, match="explain: lhs_qtype is int4"):
        explain(like(1, K), weight(), lhs_qtype="int4")
    with pytest.raises(ValueError, match="lhs is quantized already; leave lhs_qtype out"):
        explain(quantized(5), weight(), lhs_qtype="int8")
    with pytest.raises(ValueError, match=r"device='H300' is unknown; .* one of cpu, A100, .*\.$"):
        explain(like(1, K), weight(), device="H300")
    with pytest.raises(ValueError, match="the last axis of lhs must be k=4096"):
        explain(like(1, 7), weight())
