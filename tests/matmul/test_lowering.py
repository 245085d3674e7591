"""Lowering of programs. Needs no GPU: programs for CUDA are lowered and not run."""

import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import TARGET, described
from jax import export
from jax.interpreters import mlir

import jaxlowbit
from jaxlowbit import Format, QuantizedArray, quantized_matmul
from jaxlowbit._backends import call, extension
from jaxlowbit._backends.target import Target
from jaxlowbit._matmul import support

K, N, LAYERS = 128, 192, 4
FOUR = Format(4, 32)


def like(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@functools.cache
def quantized(weight, format):
    """Shapes and dtypes of a quantized weight; lowering needs no values."""
    return jax.eval_shape(lambda weight: jaxlowbit.quantize(weight, format), weight)


def stack(format=FOUR, *lead):
    return quantized(like(*lead, K, N, dtype="float32"), format)


def square_stack(*lead):
    return quantized(like(*lead, K, K, dtype="float32"), FOUR)


def lowered(f, *args, platform: str) -> str:
    # A new function bypasses the cache of JAX.
    program = jax.jit(lambda *args: f(*args)).trace(*args)
    return program.lower(lowering_platforms=(platform,)).as_text()


def compiled(f, *args) -> str:
    with jax.default_device(jax.devices("cpu")[0]):
        text = jax.jit(lambda *args: f(*args)).lower(*args).compile().as_text()
    assert text is not None
    return text


def calls(text: str) -> int:
    """Number of our custom calls in StableHLO or compiled HLO."""
    return len(described(text))


def operations_on_words(text: str) -> set[str]:
    """The HLO operations that produce packed words, except operations that move no bytes."""
    found = re.findall(r"= u32\[[\d,]+\]\S* ([\w-]+)\(", text)
    return set(found) - {"parameter", "get-tuple-element", "bitcast", "constant", "iota"}


def product(lhs, rhs):
    return lhs @ rhs


# --- backend selection ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("format", [FOUR, Format(8, zero="integer")], ids=["4 bits", "8 bits"])
def test_one_custom_call_for_cuda(cuda, dtype, format):
    text = lowered(product, like(5, K, dtype=dtype), stack(format), platform="cuda")
    assert calls(text) == 1
    assert "dot_general" not in text
    (found,) = described(text)[0].products
    assert (found["bits"], found["group_size"]) == (format.bits, format.group_size)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("bits", "zero"),
    [(1, "integer"), (1, "float")]  # quantize raises for 1 bit without a zero
    + [(bits, zero) for bits in range(2, 9) for zero in ("none", "integer", "float")],
)
def test_one_custom_call_for_the_cpu(dtype, bits, zero):
    format = FOUR.replace(zero=zero, bits=bits)
    text = lowered(product, like(5, K, dtype=dtype), stack(format), platform="cpu")
    assert calls(text) == 1
    assert "dot_general" not in text
    assert described(text)[0].products[0]["bits"] == bits


def test_workspace_of_cuda_only(cuda):
    assert re.search(r"tensor<\d{4,}xui8>", lowered(product, like(1, K), stack(), platform="cuda"))
    assert not re.search(
        r"-> .*tensor<\d{4,}xui8>", lowered(product, like(1, K), stack(), platform="cpu")
    )


def test_calls_carry_their_versions(cuda):
    for platform in ("cpu", "cuda"):
        text = lowered(product, like(5, K), stack(), platform=platform)
        assert f"schema = {extension.ffi.SCHEMA} : i64" in text
        assert f"layout_version = {extension.ffi.LAYOUT_VERSION} : i64" in text


def test_large_groups_are_an_attribute_of_64_bits(cuda):
    text = lowered(product, like(5, K), stack(Format(4, 2**70)), platform="cuda")
    assert described(text)[0].products[0]["group_size"] == 2**62


def test_the_workspace_has_room_for_the_results(cuda):
    """XLA may alias a result with an operand; it is then written to the workspace first."""
    for rows in (1, 5, 70, 300):
        text = lowered(product, like(rows, K), stack(), platform="cuda")
        (bytes,) = {int(x) for x in re.findall(r"tensor<(\d{2,})xui8>", text)}
        record = call.record(Format(4), "bfloat16", "bfloat16", m=rows, n=N, k=K)
        assert bytes >= extension.ffi.partial_sums_bytes(record) + 2 * rows * (N + K)


@pytest.mark.parametrize("call", ["matmul", "glu", "matmuls", "mlp", "block"])
@pytest.mark.ways("call")
def test_activations_and_results_have_separate_buffers(cuda, call):
    """A barrier keeps XLA from fusing producers into the call; weights have no barrier."""
    function, activations, results = {
        "matmul": (lambda x, q, _: quantized_matmul(x, q, residual=x), 2, 1),
        "glu": (lambda x, _, pair: jaxlowbit.quantized_glu(x, pair), 1, 1),
        "matmuls": (lambda x, q, _: jaxlowbit.quantized_matmuls(x, (q, q)), 1, 2),
        "mlp": (lambda x, q, pair: jaxlowbit.quantized_mlp(x, gate_up=pair, down=q), 1, 1),
        "block": (
            lambda x, q, pair: jaxlowbit.quantized_block(
                x, x, out=q, norm=jnp.ones(K), gate_up=pair, down=q
            ),
            *(2, 1),
        ),
    }[call]
    text = lowered(function, like(5, K), square_stack(), square_stack(2), platform="cuda")
    (line,) = [line for line in text.splitlines() if "custom_call @jaxlowbit" in line]
    assert text.count("optimization_barrier") == activations + results
    operands = re.findall(r"%\w+", line.partition("@")[2])
    barriers = re.findall(r"(%\w+) = stablehlo.optimization_barrier", text)
    assert len(set(operands) & set(barriers)) == activations


def test_sizes_beyond_the_kernels_are_the_definition(cuda):
    fields: dict[str, Any] = dict(
        packed=like(2**24 + 1, 1, 512, dtype="uint32"),
        scale=like(2**24 + 1, 2, 64, dtype="float32"),
        zero=None,
        index=None,
        version=like(dtype="uint32"),
        format=FOUR,
        k=64,
        n=2**30 + 64,
    )
    rhs = QuantizedArray(**fields)
    reason = jaxlowbit.supported_backends(like(1, 64), rhs)["cuda"]
    assert reason and "up to 2^30, this matrix has k=64 and n=1073741888" in reason
    assert calls(lowered(product, like(1, 64), rhs, platform="cuda")) == 0


@pytest.mark.parametrize(
    ("platform", "dtype", "format"),
    [
        ("cuda", "float32", FOUR.replace(zero="float")),
        ("cuda", "bfloat16", Format(6, codebook=tuple(range(64)))),
        ("tpu", "bfloat16", FOUR),
        ("rocm", "bfloat16", FOUR),
    ],
)
@pytest.mark.ways("platform")
def test_unsupported_problems_are_the_definition(cuda, platform, dtype, format):
    text = lowered(product, like(5, K, dtype=dtype), stack(format), platform=platform)
    assert calls(text) == 0
    assert "dot_general" in text


def test_the_cotangent_of_lhs_is_a_call(cuda):
    """It reads the packed words; no float array has the size of the weight."""
    cotangent, rhs = like(5, N), stack(FOUR)
    text = lowered(
        lambda ct, rhs: jax.linear_transpose(lambda x: x @ rhs, like(5, K))(ct),
        cotangent,
        rhs,
        platform="cuda",
    )
    assert calls(text) == 1
    assert described(text)[0].products[0]["transposed"] == 1
    assert f"tensor<{K}x{N}x" not in text


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x, q: f(x, q),
        lambda f, x, q: jax.vmap(f, (0, None))(x, q),
        lambda f, x, q: jax.jvp(lambda x: f(x, q), (x,), (x,))[1],
        lambda f, x, q: jax.checkpoint(f)(x, q),
        lambda f, x, q: jax.lax.scan(lambda c, x: (c, f(x, q)), 0, x)[1],
    ],
    ids=["alone", "vmap", "jvp", "checkpoint", "scan"],
)
@pytest.mark.ways("transform")
def test_float16_sums_are_an_attribute(cuda, transform, platform):
    for precision in (None, jax.lax.DotAlgorithmPreset.F16_F16_F16):
        f = functools.partial(quantized_matmul, precision=precision)
        x = like(5, K, dtype="float16")
        text = lowered(functools.partial(transform, f), x, stack(), platform=platform)
        values = [call.products[0]["accumulate_float16"] for call in described(text)]
        assert set(values) == {int(precision is not None)}


def test_float16_accumulation_applies_to_the_transpose(cuda):
    def cotangent(ct, rhs):
        f = functools.partial(quantized_matmul, precision=jax.lax.DotAlgorithmPreset.F16_F16_F16)
        return jax.linear_transpose(lambda x: f(x, rhs), like(5, K, dtype="float16"))(ct)

    text = lowered(cotangent, like(5, N, dtype="float16"), stack(), platform="cuda")
    ((product,),) = (call.products for call in described(text))
    assert product["accumulate_float16"] == product["transposed"] == 1


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.ways("platform")
def test_backend_xla_is_the_definition(cuda, platform):
    text = lowered(
        lambda x, q: quantized_matmul(x, q, backend="xla"), like(5, K), stack(), platform=platform
    )
    assert calls(text) == 0
    assert "dot_general" in text


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_forced_backend_is_its_custom_call(cuda, backend):
    text = lowered(
        lambda x, q: quantized_matmul(x, q, backend=backend), like(5, K), stack(), platform=backend
    )
    assert calls(text) == 1


def test_unavailable_custom_calls_are_the_definition(monkeypatch):
    monkeypatch.setattr(extension, "UNAVAILABLE", {"cpu": "it is too old", "cuda": "it is too old"})
    for platform in ("cpu", "cuda"):
        assert calls(lowered(product, like(5, K), stack(), platform=platform)) == 0
    reasons = jaxlowbit.supported_backends(like(5, K), stack())
    assert (reasons["cuda"], reasons["cpu"], reasons["xla"]) == (*["it is too old"] * 2, None)


@pytest.fixture
def gpus(monkeypatch):
    """Returns a function that sets the compute capabilities to lower for."""

    def lowered_for(*capabilities):
        devices = [
            types.SimpleNamespace(platform="gpu", compute_capability=c) for c in capabilities
        ]
        client = types.SimpleNamespace(local_devices=lambda: devices)
        backend = property(lambda self: client, lambda self, value: None)
        monkeypatch.setattr(mlir.ModuleContext, "backend", backend, raising=False)

    return lowered_for


@pytest.mark.parametrize(("m", "reads"), [(1, True), (16, True), (17, False)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_hopper_reads_two_level_scales(cuda, gpus, m, reads, activation):
    """The small-M kernel reads them, with or without an epilogue; otherwise XLA expands them."""
    gpus("9.0")
    array = quantized(
        like(256, 64, dtype="float32"), Format(4, 32, zero="float", scale="two_level")
    )
    multiply = functools.partial(quantized_matmul, activation=activation)
    text = lowered(multiply, like(m, 256), array, platform="cuda")
    (call,) = described(text)
    assert ("tensor<1x1x10x64xui8>" in call.operands) == reads
    assert ("tensor<1x1x8x64xf32>" in call.operands) != reads


@pytest.mark.parametrize(
    ("capabilities", "count"), [(["9.0"], 1), (["8.0"], 1), (["7.5"], 0), (["9.0", "7.5"], 0)]
)
def test_gpus_without_kernels_run_the_definition(cuda, gpus, capabilities, count):
    gpus(*capabilities)
    text = lowered(product, like(5, K), stack(), platform="cuda")
    assert calls(text) == count
    assert ("dot_general" in text) == (count == 0)


def test_gpus_without_kernels_raise_for_the_custom_call(cuda, gpus):
    gpus("7.5")
    forced = functools.partial(quantized_matmul, backend="cuda")
    with pytest.raises(ValueError, match=r"'cuda', but .* need .* 8\.0, .* has 7\.5; use .*\.$"):
        lowered(forced, like(5, K), stack(), platform="cuda")


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        ("80-real 90a-real 100-real 120-real", "8.0", True),
        ("80-real 90a-real 100-real 120-real", "8.9", True),
        ("80-real 90a-real 100-real 120-real", "9.0", True),
        ("80-real 90a-real 100-real 120-real", "10.3", True),
        ("80-real 90a-real 100-real 120-real", "12.1", True),
        ("80-real 90a-real 100-real 120-real", "11.0", False),
        ("90a-real", "8.0", False),
        ("90a-real", "10.0", False),
        ("80", "10.0", True),  # has PTX
        ("86-real", "8.0", False),
    ],
)
def test_gpus_of_other_architectures_run_the_definition(
    cuda, gpus, monkeypatch, built, capability, runs
):
    build = extension.BUILD | {"cuda_architectures": built}
    monkeypatch.setattr(extension, "BUILD", build)
    gpus(capability)
    assert calls(lowered(product, like(5, K), stack(), platform="cuda")) == runs
    seen = Target("cuda", frozenset({int(capability.replace(".", ""))}))
    monkeypatch.setattr(support, "local_gpus", lambda: seen)
    reason = jaxlowbit.supported_backends(like(5, K), stack())["cuda"]
    assert (reason is None) == runs
    if reason:
        assert f"kernels for {built}, of which none runs on" in reason and capability in reason


def test_exported_programs_select_where_they_run(cuda, gpus):
    gpus("7.5")
    exported = export.export(
        jax.jit(product),
        platforms=["cuda"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call(TARGET)],
    )(like(5, K), stack())
    assert calls(exported.mlir_module()) == 1


def test_empty_products_have_no_custom_call():
    assert calls(lowered(product, like(0, K), stack(), platform="cpu")) == 0


def test_gradient_runs_the_definition_backwards():
    def loss(x, q):
        return jnp.sum((x @ q).astype(jnp.float32) ** 2)

    text = lowered(jax.grad(loss), like(5, K), stack(), platform="cpu")
    assert calls(text) == 1
    assert "dot_general" in text


# --- batches of lhs are rows ----------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_vmap_of_a_shared_weight_is_one_call(cuda, platform):
    mapped = jax.vmap(jax.vmap(product, (0, None)), (1, None))
    text = lowered(mapped, like(6, 7, 5, K), stack(), platform=platform)
    assert calls(text) == 1
    assert "stablehlo.while" not in text
    assert not re.search(r"broadcast_in_dim.*ui32", text)
    assert f"tensor<1x{6 * 7 * 5}x{K}xbf16>" in text


def test_vmap_of_a_shared_weight_compiles_to_one_call():
    text = compiled(jax.vmap(product, (0, None)), like(7, 5, K), stack())
    assert calls(text) == 1
    assert " while(" not in text
    assert operations_on_words(text) == set()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_stack_is_one_call(cuda, platform):
    text = lowered(jax.vmap(product), like(LAYERS, 5, K), stack(FOUR, LAYERS), platform=platform)
    assert calls(text) == 1
    assert "stablehlo.while" not in text


def test_selecting_copies_no_words():
    def select(x, q, i):
        return jax.vmap(lambda i: x @ q.select(i))(i)

    text = compiled(select, like(5, K), stack(FOUR, LAYERS), like(9, dtype="int32"))
    assert calls(text) == 1
    assert operations_on_words(text) == set()
    sliced = compiled(
        lambda x, q, i: x @ q[i], like(5, K), stack(FOUR, LAYERS), like(dtype="int32")
    )
    assert operations_on_words(sliced)  # the assertion above can fail


# --- stacked layers -------------------------------------------------------------------------------


def layers(scan):
    def run(x, q):
        return scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, q)[0]

    return run


@pytest.fixture
def square():
    return square_stack(LAYERS)


def test_scan_copies_no_words(square):
    text = compiled(layers(jaxlowbit.scan), like(5, K), square)
    assert calls(text) == 1 and text.count(" while(") == 1
    assert operations_on_words(text) == set()
    # The assertion above can fail: `jax.lax.scan` copies words.
    assert operations_on_words(compiled(layers(jax.lax.scan), like(5, K), square))


def test_scan_slices_no_words_for_cuda(cuda, square):
    def slices(scan):
        text = lowered(layers(scan), like(5, K), square, platform="cuda")
        assert calls(text) == 1
        return re.findall(r"dynamic_slice.*ui32>", text)

    assert slices(jaxlowbit.scan) == []
    assert slices(jax.lax.scan)


# --- export ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["b, 128", "b, s, 128"])
@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.ways("platform")
def test_export_with_symbolic_rows(cuda, platform, shape):
    exported = export.export(
        jax.jit(product),
        platforms=[platform],
        disabled_checks=[export.DisabledSafetyCheck.custom_call(TARGET)],
    )(jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.bfloat16), stack())
    assert exported.platforms == (platform,)
    assert calls(exported.mlir_module()) == 1
    assert calls(export.deserialize(exported.serialize()).mlir_module()) == 1


def test_export_for_several_platforms(cuda):
    """Each platform gets the backend of a single-platform export."""
    exported = export.export(
        jax.jit(lambda x, q: x @ q),
        platforms=["cpu", "cuda", "tpu"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call(TARGET)],
    )(like(5, K), stack())
    assert calls(exported.mlir_module()) == 2
    assert "dot_general" in exported.mlir_module()


def test_custom_calls_of_export_must_be_allowed(cuda):
    with pytest.raises(ValueError, match=TARGET):
        export.export(jax.jit(product), platforms=["cuda"])(like(5, K), stack())


# --- JIT-compiled kernels -------------------------------------------------------------------------

TWO = Format(2, 32, "integer")


def products(text: str) -> list[dict[str, int]]:
    """Fields of the products in a program that differ from `PLAIN`."""
    plain = record(5)
    found = [product for call in described(text) for product in call.products]
    return [
        {name: product[name] for name in FIELDS if product[name] != plain[name]}
        for product in found
    ]


FIELDS = [name for name in extension.ffi.PRODUCT_FIELDS if not name.endswith("_at")]


def record(m: int, **fields: Any) -> dict[str, int]:
    """The record of a product of m rows by a weight of `two`, with some fields replaced."""
    scale = fields.setdefault("scale", "bfloat16")
    shape: dict[str, Any] = {"m": m, "n": N, "k": K, "bits": 2, "group_size": 32}
    shape |= {"zero": "integer", "scale": scale}
    return dict(
        zip(extension.ffi.PRODUCT_FIELDS, extension.ffi.product(**shape | fields), strict=True)
    )


def expected(m: int, **fields: Any) -> dict[str, int]:
    plain, other = record(5), record(m, **fields)
    return {name: other[name] for name in FIELDS if other[name] != plain[name]}


def pair():
    return quantized(like(2, K, N), TWO)


def two(k=K, n=N):
    return quantized(like(k, n), TWO)


@pytest.mark.parametrize(
    ("f", "operands", "said"),
    [
        (product, (like(5, K), two()), [expected(5)]),
        (
            product,
            (like(5, K, dtype="float16"), two()),
            [expected(5, lhs="float16", scale="float32", out="float16")],
        ),
        (
            product,
            (like(5, K, dtype="float32"), two()),
            [expected(15, scale="float32", out="float32", scale_accumulators=True)],
        ),
        (
            lambda y, q: jax.vjp(lambda x: x @ q, jnp.ones((5, K), jnp.bfloat16))[1](y),
            (like(5, N), two()),
            [expected(5, transposed=True)],
        ),
        (
            lambda x, q: quantized_matmul(x, q, activation="relu"),
            (like(5, K), two()),
            [expected(5, activation="relu")],
        ),
        (
            lambda x, q: jaxlowbit.quantized_glu(x, q, activation="silu"),
            (like(5, K), pair()),
            [expected(5, num_weights=2, activation="silu", gated=True)],
        ),
        (
            lambda x, *q: jaxlowbit.quantized_matmuls(x, q),
            (like(5, K), two(), two(n=64)),
            [expected(5), expected(5, n=64)],
        ),
        (
            lambda x, pair, down: jaxlowbit.quantized_mlp(x, gate_up=pair, down=down),
            (like(5, K), pair(), two(N, K)),
            [
                expected(5, num_weights=2, activation="silu", gated=True),
                expected(5, n=K, k=N),
            ],
        ),
        (
            lambda x, q: x @ jaxlowbit.QuantizedArray.select(q, 1),
            (like(5, K), pair()),
            [expected(5, num_weights=2)],
        ),
    ],
    ids=["bf16", "f16", "f32", "transposed", "fused", "glu", "matmuls", "mlp", "stack"],
)
def test_calls_describe_their_products(cuda, f, operands, said):
    assert products(lowered(f, *operands, platform="cuda")) == said


def test_symbolic_sizes_are_read_from_the_buffers(cuda):
    exported = export.export(
        jax.jit(product),
        platforms=["cuda"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call(TARGET)],
    )(jax.ShapeDtypeStruct(export.symbolic_shape("b, 128"), jnp.bfloat16), two())
    (call,) = described(exported.mlir_module())
    assert (call.products[0]["batch"], call.products[0]["m"]) == (1, -1)
