"""Times dense products by cuBLAS for many shapes quickly."""

import functools
import itertools
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import measure
import peers
import timing
import weights
from results import InputError
from shapes import Shape


class Cublas:
    """Times PyTorch's products of weights and activations that are views of two random buffers.

    Results are not checked.

    **Raises:** `InputError` without PyTorch or a GPU, and for weights too small to be kept cold.
    """

    def __init__(self, plan: measure.Plan) -> None:
        self._product = peers.PEERS["cublas"]
        elements = max(_copies(plan, shape)[1] * shape.n * shape.k for shape in plan.shapes)
        if reason := peers.missing(self._product):
            raise InputError(
                f"dense products are PyTorch's, and {reason}; use an environment that has it, on a "
                "machine with a GPU."
            )
        torch = import_module("torch")
        dtype = getattr(torch, plan.dtype)
        random = functools.partial(torch.randn, dtype=dtype, device="cuda")
        self._weights = random(elements)
        self._lhs = random(max(plan.tokens) * max(shape.k for shape in plan.shapes))

    def measure(self, plan: measure.Plan) -> Iterator[dict[str, Any]]:
        """Yields a row per shape and number of tokens. `plan`: part of the constructor's plan."""
        # Small M first, like the driver.
        for m, (name, n, k) in itertools.product(plan.tokens, plan.shapes):
            size, copies, calls = _copies(plan, Shape(name, n, k))
            rotating = list(self._weights[: copies * n * k].reshape(copies, n, k))
            x = self._lhs[: m * k].reshape(m, k)
            time = timing.graph_microseconds_per_call(
                self._product.call, x, rotating, calls, plan.effort
            )
            row = {"shape": name, "n": n, "k": k, "format": "dense", "dtype": plan.dtype}
            row |= {"backend": "cublas", "m": m}
            yield row | measure.timed(time, "cuda graph", size, copies, calls, None)


def _copies(plan: measure.Plan, shape: Shape) -> tuple[int, int, int]:
    """Returns bytes of a weight, number of weights, number of calls."""
    size = weights.num_bytes(shape.n, shape.k, None, plan.dtype)
    return size, *measure.copies(plan, size)
