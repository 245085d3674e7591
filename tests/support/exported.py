"""A program of this release with its arguments and results, for later releases to run.

`python tests/support/exported.py` writes `tests/data/exported-VERSION.npz`, once for each release,
with a build that has CUDA kernels and the oldest JAX that it supports: newer ones read that for at
least six months. `test_export.py` runs all of them.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export

import jaxlowbit as jl
from jaxlowbit import Format, QuantizedArray

FOLDER = Path(__file__).parents[1] / "data"
SIZE = 64


def program(
    x: Array, bias: Array, one: QuantizedArray, pair: QuantizedArray, down: QuantizedArray
) -> dict[str, Any]:
    """Calls of each kind; sums of small integers are exact in every order, but for `block`."""
    return {
        "product": x @ one,
        "layer": jl.quantized_matmul(x, pair.select(1)),
        "epilogue": jl.quantized_matmul(x, one, bias=bias, activation="relu", residual=x),
        "glu": jl.quantized_glu(x, pair, activation="relu"),
        "matmuls": jl.quantized_matmuls(x, [one, one]),
        "mlp": jl.quantized_mlp(x, pair, down, activation="relu"),
        "block": jl.quantized_block(x, x, one, jnp.ones(SIZE), pair, down, activation="relu"),
    }


def arguments() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)

    def matrix(format: Format, *lead: int) -> QuantizedArray:
        low, high = (0, 4) if format.zero == "integer" else (-1, 2)
        values = rng.integers(low, high, (*lead, SIZE, SIZE), np.int8)
        groups = 1 if format.group_size == -1 else SIZE // format.group_size
        scale = 2.0 ** rng.integers(-1, 1, (*lead, groups, SIZE))
        zero = np.full(scale.shape, 2, np.uint8) if format.zero == "integer" else None
        values = values.astype(np.uint8 if zero is not None else np.int8)
        return QuantizedArray.from_integers(values, scale.astype(np.float16), zero, format=format)

    return (
        rng.integers(-1, 2, (3, SIZE)).astype(np.float16),
        rng.integers(-9, 9, SIZE).astype(np.float16),
        matrix(Format(4, 32, "integer")),
        matrix(Format(4, 32), 2),
        matrix(Format(8)),
    )


def exported(args: tuple[Any, ...]) -> export.Exported:
    x = jax.ShapeDtypeStruct(export.symbolic_shape(f"rows, {SIZE}"), args[0].dtype)
    return export.export(
        jax.jit(program), platforms=["cpu", "cuda"], disabled_checks=jl.EXPORT_CHECKS
    )(x, *args[1:])


def main() -> None:
    # Locations would name files of the machine that exports.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*")
    args = arguments()
    arrays = {
        f"{kind}_{i}": leaf
        for kind, tree in (("argument", args), ("result", jax.jit(program)(*args)))
        for i, leaf in enumerate(jax.tree.leaves(tree))
    }
    stored = np.frombuffer(exported(args).serialize(), np.uint8)
    path = FOLDER / f"exported-{jl.__version__}.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, program=stored, **arrays)


if __name__ == "__main__":
    main()
