"""`backend="pallas"`: lowering and options; `test_matmul.py` checks its results."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLATFORM, assert_within, dequantize, matmul, quantize
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh
from pairwise import pairwise
from problems import PROBLEMS, Problem, operands

import jaxlowbit
from jaxlowbit import Format
from jaxlowbit._backends import pallas, registry
from jaxlowbit._backends.problem import Operands
from jaxlowbit._backends.problem import Problem as Product
from jaxlowbit._backends.target import Target

K, N = 256, 192
interpreted = pytest.mark.skipif(PLATFORM != "cpu", reason="Pallas interprets on the CPU only")
deprecated = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
product = functools.partial(jaxlowbit.quantized_matmul, backend="pallas")


def weight(format: Format, *lead: int) -> jaxlowbit.QuantizedArray:
    values = np.random.default_rng(0).normal(size=(*lead, K, N)).astype(np.float32)
    return quantize(values, format)


def abstract(format: Format) -> jaxlowbit.QuantizedArray:
    """Like `weight`, for programs that are lowered and not run."""
    values = jax.ShapeDtypeStruct((K, N), jnp.float32)
    return jax.eval_shape(functools.partial(jaxlowbit.quantize, format=format), values)


def lowered(f, lhs, rhs, platform: str) -> str:
    with gpu_kind() if platform == "cuda" else contextlib.nullcontext():
        program = jax.jit(lambda lhs, rhs: f(lhs, rhs)).trace(lhs, rhs)
        return program.lower(lowering_platforms=(platform,)).as_text()


def gpu_kind():
    """Sets the GPU kind, which JAX's Triton lowering needs on machines without a GPU."""
    device = AbstractDevice("NVIDIA H200", None, "gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


BITS, ZEROS, GROUP_SIZES = (4, 8), ("none", "integer", "float"), (128, 48, -1)


@pytest.mark.parametrize(
    ("bits", "zero", "group_size", "dtype"),
    pairwise(BITS, ZEROS, GROUP_SIZES, ("float32", "bfloat16")),
)
def test_one_kernel_for_tpus(bits, zero, group_size, dtype):
    """Mosaic accepts it; this says nothing about running it."""
    lhs = jax.ShapeDtypeStruct((5, K), jnp.dtype(dtype))
    text = lowered(product, lhs, abstract(Format(bits, group_size, zero)), "tpu")
    assert text.count("custom_call @tpu_custom_call") == 1
    assert "stablehlo.dot_general" not in text  # outside of the kernel


@deprecated
@pytest.mark.parametrize(
    ("bits", "zero", "group_size", "dtype"),
    pairwise(BITS, ZEROS, GROUP_SIZES, ("float32", "bfloat16", "float16")),
)
def test_one_kernel_for_gpus(bits, zero, group_size, dtype):
    """JAX lowers it to Triton; this says nothing about compiling it."""
    lhs = jax.ShapeDtypeStruct((5, K), jnp.dtype(dtype))
    text = lowered(product, lhs, abstract(Format(bits, group_size, zero)), "cuda")
    assert len(re.findall(r'custom_call @"?__gpu\$xla.gpu.triton"?\(', text)) == 1
    assert "stablehlo.dot_general" not in text  # outside of the kernel


@deprecated
def test_two_level_scales_are_expanded(monkeypatch):
    """Also for products whose CUDA kernels read them."""
    monkeypatch.setattr(Target, "is_only", lambda *_: True)
    lhs = jax.ShapeDtypeStruct((5, K), jnp.bfloat16)
    text = lowered(product, lhs, abstract(Format(4, 32, scale="two_level")), "cuda")
    (call,) = re.findall(r'custom_call @"?__gpu\$xla.gpu.triton"?\(.*', text)
    assert "xf32>" in call and "xui8>" not in call


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_pallas_runs_only_on_request(platform):
    lhs = jax.ShapeDtypeStruct((5, K), jnp.bfloat16)
    unread = Format(6, codebook=tuple(range(64)))  # unsupported by GPU kernels
    text = lowered(lambda lhs, rhs: lhs @ rhs, lhs, abstract(unread), platform)
    assert "custom_call" not in text and "dot_general" in text


def test_other_platforms_raise():
    lhs = jax.ShapeDtypeStruct((5, K), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"backend='pallas', but .* compiled for another platform; use .*\.$"
    ):
        lowered(product, lhs, abstract(Format(4, 32)), "rocm")


def test_gpus_raise_if_jax_has_no_triton(monkeypatch):
    monkeypatch.setattr(pallas.triton, "MODULE", "jax.experimental.pallas.gone")
    lhs = jax.ShapeDtypeStruct((5, K), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"for cuda, but jax .* has no jax.*gone; use .*\.$"):
        lowered(product, lhs, abstract(Format(4, 32)), "cuda")


def test_symbolic_rows_raise():
    lhs = jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"rows, {K}"), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"with rows rows and .*kernels need numbers; use .*\.$"):
        lowered(product, lhs, abstract(Format(4, 32)), "tpu")


def test_other_widths_raise():
    with pytest.raises(ValueError, match=r"read 1, 2, 4 or 8 bits, the format has 3\. Use .*\.$"):
        product(jnp.ones((5, K)), weight(Format(3, 32)))


@interpreted
def test_transformations():
    rhs = weight(Format(4, 32, "integer"), 3)
    lhs = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, K)).astype(np.float32))

    def loss(multiply, lhs, rhs):
        return jnp.sum(jnp.sin(jax.vmap(multiply)(lhs, rhs)))

    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(loss, f)))(lhs, rhs)
        for f in (product, lambda lhs, rhs: lhs @ rhs.dequantize())
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-3, atol=1e-3)


@interpreted
def test_under_shard_map():
    """The interpreter does not track variance over mesh axes, hence `check_vma`."""
    rhs = weight(Format(4, 32))
    lhs = jnp.asarray(np.random.default_rng(1).normal(size=(4, K)).astype(np.float32))
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P("rows")
    options = {"mesh": mesh, "in_specs": (rows, jax.P()), "out_specs": rows}
    mapped = jax.shard_map(product, **options, check_vma=False)
    want = lhs @ rhs.dequantize()
    np.testing.assert_allclose(jax.jit(mapped)(lhs, rhs), want, rtol=1e-4, atol=1e-4)
    text = lowered(jax.shard_map(product, **options), lhs, rhs, "tpu")
    assert "custom_call @tpu_custom_call" in text


# --- the kernel for GPUs --------------------------------------------------------------------------


def named(*names: str) -> list[Problem]:
    found = [p for p in PROBLEMS if p.name in names]
    assert len(found) == len(names)
    return found


INTERPRETED = named(
    "one row: decoding",
    "65 rows: one past 64",
    "1 x 1 x 1: the smallest product",
    "k = 3001: long odd sums",
    "n = 129: one past two atoms",
    "group 16: one step",
    "group 96: straddles atoms",
    "group 128, 40 rows",
    "8 bits, integer zero, group 48",
    "8 bits, group -1",
    "float zero, group 48, many rows",
    "float16, float zero",
    "float32, 8 bits, many rows",
    "1 bit, integer zero",
    "2 bits, float zero",
    "a stack in two axes",
    "everything odd at once",
)


@interpreted
@pytest.mark.parametrize("problem", INTERPRETED, ids=[p.name for p in INTERPRETED])
def test_the_kernel_for_gpus_interpreted(problem, monkeypatch):
    """Checks its arithmetic without Triton."""

    def interpret(*args, compiler_params, **options):
        del compiler_params
        return compiled(*args, **options, interpret=True)

    compiled = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", interpret)
    lhs, rhs, oracle = operands(problem)
    given = Operands(jnp.asarray(lhs), rhs.packed, rhs.scale, rhs.zero, rhs.index, None).present()
    product = Product(
        format=rhs.format,
        columns=problem.n,
        transposed=False,
        indexed=rhs.index is not None,
        orders=0,
        out_dtype=problem.result_dtype,
        accumulate_float16=False,
        backend="pallas",
    )
    multiply = functools.partial(pallas.matmul, product, platform="cuda")
    got = jax.jit(multiply)(*given)
    assert_within(got, oracle.exact, oracle.bound(problem.result_dtype))


ON_GPUS = [
    problem
    for problem in PROBLEMS
    if problem.bits in (4, 8)
    and registry.unsupported("pallas", jnp.dtype("bfloat16"), problem.format) is None
]


@deprecated
@pytest.mark.gpu
@pytest.mark.parametrize("problem", ON_GPUS, ids=[p.name for p in ON_GPUS])
def test_the_kernel_for_gpus(problem):
    lhs, rhs, oracle = operands(problem)
    out_dtype = None if problem.out_dtype is None else jnp.dtype(problem.out_dtype)
    multiply = functools.partial(matmul, preferred_element_type=out_dtype, backend="pallas")
    got = np.asarray(multiply(jnp.asarray(lhs), rhs))
    assert_within(got, oracle.exact, oracle.bound(problem.result_dtype))
    assert np.asarray(multiply(jnp.asarray(lhs), rhs)).tobytes() == got.tobytes()


IDENTITY = named("group 48: straddles atoms", "8 bits, group -1", "float16, integer zero")


@deprecated
@pytest.mark.gpu
@pytest.mark.parametrize("problem", IDENTITY, ids=[p.name for p in IDENTITY])
def test_identity_gives_the_dequantized_weight_on_gpus(problem):
    rhs, dtype = operands(problem).rhs, jnp.dtype(problem.dtype)
    got = matmul(jnp.eye(problem.k, dtype=dtype), rhs, backend="pallas")
    want = dequantize(rhs).value.astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(got, want)
