"""Which normalizations the products behind them merge, seen in the kernels that calls compile."""

from typing import Any

import jax.numpy as jnp
import pytest
import shapes
from fit_costs import asked

from jaxlowbit import INT4, Format, quantize
from jaxlowbit._backends.block import add_block, add_mlp
from jaxlowbit._backends.call import Call, stored_weight
from jaxlowbit._backends.extension import BUILD, ffi

needs_cuda = pytest.mark.skipif(not BUILD["cuda"], reason="this build has no CUDA kernels")

D = 1024


def weight(k, n, format=INT4, stack=()):
    return quantize(jnp.ones((*stack, k, n), jnp.bfloat16), format)


class Steps:
    """A product, then a normalization of its rows and steps behind it."""

    def __init__(self, m=1, d=D, dtype=jnp.bfloat16, parts=None):
        self.call, self.shape, self.dtype = Call("test"), (1, m, d), dtype
        x = self.call.operand(jnp.zeros((1, m, 256), dtype))
        self.residual = self.call.operand(jnp.zeros(self.shape, dtype))
        self.norm = self.call.operand(jnp.ones(d, jnp.float32))
        self.projected = self.call.result(self.shape, parts or dtype)
        self.normed, self.total = (self.call.result(self.shape, dtype) for _ in range(2))
        self.call.multiply(self.product(256, d, x, self.projected))

    def product(self, k, n, x, out, format=INT4, **fields):
        stored = stored_weight(weight(k, n, format), self.dtype)
        return self.call.add_product(stored, x, out, **fields)

    def normalize(self, **fields):
        buffers = {"x": self.residual, "addend": self.projected, "scales": self.norm}
        buffers |= {"total": self.total, "out": self.normed}
        self.call.step("normalize", **buffers | fields)

    def multiply(self, *widths, x=None, format=INT4, **fields):
        x, (_, m, d) = x or self.normed, self.shape
        outs = [self.call.result((1, m, n), self.dtype) for n in widths]
        products = [
            self.product(d, out_n, x, out, format, **fields)
            for out_n, out in zip(widths, outs, strict=True)
        ]
        self.call.multiply(*products)
        return outs

    def merged(self):
        return merged(self.call)


def merged(call: Call) -> list[bool]:
    """For each launch of products whether it normalizes its rows."""
    found = ffi.instances_of_call(call._products, call._steps)
    return ["kNormalizes" in expression for _, expression in found]


def steps(*widths, merge=(), **options):
    one = Steps(**options)
    one.normalize()
    one.multiply(*widths, **dict(merge))
    return one.merged()


@needs_cuda
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("m", [1, 2, 3, 16])
def test_up_to_two_rows_are_merged(m, dtype):
    assert steps(1024, m=m, dtype=dtype) == [False, m <= 2]


@needs_cuda
def test_products_of_one_launch_merge_together():
    assert steps(1024, 256, 200) == [False, True]
    assert steps(*5 * [256]) == [False, False, False]  # more than one launch


@needs_cuda
@pytest.mark.parametrize(
    ("options", "merges"),
    [
        ({"d": 72 * 8}, True),  # ends within a stage
        ({"d": 1000}, False),  # not a multiple of 64, which the small-M kernel needs
        ({"d": 16384}, True),  # divided among the CTAs of a cluster
        ({"parts": jnp.float32}, False),  # partial sums of a device
    ],
    ids=str,
)
def test_rows_that_are_merged(options, merges):
    assert steps(1024, **options) == [False, merges]


@needs_cuda
def test_rows_that_others_read_are_not_merged():
    one = Steps()
    one.normalize()
    one.multiply(1024)
    one.multiply(256, x=one.normed)
    assert one.merged() == [False, False, False]
    one = Steps()
    one.normalize()
    one.multiply(1024)
    one.call.step("normalize", x=one.normed, addend=one.projected, total=one.total)
    assert one.merged() == [False, False]
    one = Steps()
    one.normalize()
    one.call.step("round", first=0, to="int8", x=one.normed, out=one.total, out_scale=one.total)
    one.multiply(1024)
    assert one.merged() == [False, False]


@needs_cuda
def test_rows_written_anew_may_be_read():
    one = Steps()
    one.normalize()
    one.multiply(1024)
    one.normalize()
    one.multiply(512)
    assert one.merged() == [False, True, True]


@needs_cuda
def test_products_that_read_the_sum_do_not_merge():
    one = Steps()
    one.normalize()
    one.multiply(D, addends={"residual": one.total})
    assert one.merged() == [False, False]
    one = Steps()
    one.normalize()
    one.multiply(D, addends={"residual": one.residual})
    assert one.merged() == [False, True]


@needs_cuda
def test_sums_in_place_of_a_row_are_not_merged():
    one = Steps()
    one.normalize(total=one.projected)
    one.multiply(1024)
    assert one.merged() == [False, False]


@needs_cuda
def test_the_first_step_of_a_call_is_a_kernel_of_its_own():
    call = Call("test")
    x, y = (call.operand(jnp.zeros((1, 1, D), jnp.bfloat16)) for _ in range(2))
    norm = call.operand(jnp.ones(D, jnp.float32))
    total, normed, out = (call.result((1, 1, D), jnp.bfloat16) for _ in range(3))
    call.step("normalize", x=x, addend=y, scales=norm, total=total, out=normed)
    add_mlp(call, normed, weight(D, 512, stack=(2,)), weight(512, D), out, "silu", jnp.bfloat16)
    assert merged(call) == [False, False]


@needs_cuda
@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("mixture", [False, True])
def test_blocks(m, mixture):
    """Behind a mixture of experts, whose router reads the rows, only the second one is merged."""
    call = Call("test")
    weights = [
        weight(D, D),
        weight(D, 1536, stack=(2,)),
        weight(1536, D),
        weight(D, D),
        weight(D, 200),
    ]
    norm = jnp.ones(D, jnp.float32)

    def experts(x, out):
        shape = (m, 2)
        expert, scales = (call.result(shape, dtype) for dtype in (jnp.int32, jnp.float32))
        router = call.operand(jnp.zeros((D, 8), jnp.float32))
        call.step("route", x=x, scales=router, expert=expert, out=scales)
        add_mlp(call, x, weights[1], weights[2], out, "silu", jnp.bfloat16)

    residual = jnp.zeros((1, m, D), jnp.bfloat16)
    add_block(
        *(call, call.operand(residual), residual, norm, norm, weights),
        read=lambda weight: stored_weight(weight, jnp.dtype(jnp.bfloat16)),
        activation="silu",
        mlp=experts if mixture else None,
    )
    few = m <= 2
    assert merged(call) == [False, few and not mixture, False, few]


@needs_cuda
@pytest.mark.parametrize(
    "format", [Format(8), Format(2, 64, "integer"), Format(3, 128), Format(4, 64, "float")], ids=str
)
def test_formats_are_merged(format):
    assert steps(1024, merge={"format": format}.items()) == [False, True]


def test_the_selection_names_the_kernel():
    """For layers of real models, behind another kernel of the call."""
    h200: dict[str, Any] = {
        "compute_capability": 90,
        "num_sms": 132,
        "bits": 4,
        "early_start": True,
    }

    def normalizes(**fields):
        return "normalizing" in ffi.select(**asked(h200 | fields))

    assert not normalizes(m=1, n=28672, k=16384)  # a row does not fit shared memory
    for shape in shapes.SHAPES.values():
        sizes = {"n": shape.n, "k": shape.k}
        assert normalizes(m=1, **sizes) or shape.k > 12288 or shape.k % 64 != 0, shape
        assert not normalizes(m=3, **sizes)
        assert not normalizes(m=1, **sizes, early_start=False)
        assert not normalizes(m=1, **sizes, compiles=False)
        assert not normalizes(m=1, **sizes, compute_capability=80)
