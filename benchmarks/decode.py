"""Times a decode step of a model without its attention, in 4 bits and in bfloat16.

    python benchmarks/decode.py --m 1 16 --out decode.json

The model is Llama 3 8B (`shapes.py`) or one of its proportions: 32 layers of RMSNorm, projections
to queries, keys and values, a cheap stand-in for attention, the output projection, RMSNorm, gate
and up projections, silu, and the down projection, with residuals. The step is one jitted program
with donated buffers, and every layer has weights of its own. The quantized step is timed only after
its result agreed with that of the dense one, whose weights are its dequantized ones.
"""

import argparse
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import contenders
import jax
import jax.numpy as jnp
import results
import shapes
import timing
import weights

MODEL = shapes.MODELS["llama3-8b"]
# Which projections of a layer share a weight, and so a call.
VARIANTS = {
    "separate": (("q",), ("k",), ("v",), ("o",), ("gate",), ("up",), ("down",)),
    "concatenated": (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)),
}
BLOCKS = 11
STEPS = 10
LIMIT = 0.05  # of the norm of what a step adds, for bfloat16 residuals over 32 layers


class Sizes(NamedTuple):
    """(k, n) of every projection, for a width that takes Llama 3 8B's 4096."""

    projections: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, width: int) -> "Sizes":
        kv = width * MODEL.kv_heads // MODEL.heads
        mlp = width * MODEL.mlp // MODEL.hidden
        features = {"q": width, "k": kv, "v": kv, "o": width, "gate": mlp, "up": mlp}
        found = {name: (width, n) for name, n in features.items()}
        return cls(found | {"down": (mlp, width)})


def step(x: jax.Array, layers: list[dict[str, Any]], sizes: Sizes, variant: str) -> jax.Array:
    """x (m, width) after all layers."""
    for layer in layers:
        project = functools.partial(_project, layer, sizes, variant)
        q, k, v = project(_normalize(x), ("q", "k", "v"))
        kv = jnp.concatenate([k, v], axis=-1)
        attended = q + jnp.tile(kv, q.shape[-1] // kv.shape[-1])  # reads all of the three
        x = x + project(_normalize(attended), ("o",))[0]
        gate, up = project(_normalize(x), ("gate", "up"))
        x = x + project(jax.nn.silu(gate) * up, ("down",))[0]
    return x


def _project(
    layer: dict[str, Any], sizes: Sizes, variant: str, x: jax.Array, names: tuple[str, ...]
) -> list[jax.Array]:
    """x times each of the projections, in the calls of the variant."""
    parts = []
    for together in VARIANTS[variant]:
        if together[0] in names:
            y = x @ layer["-".join(together)]
            ends, end = [], 0
            for name in together[:-1]:
                end += sizes.projections[name][1]
                ends.append(end)
            parts += jnp.split(y, ends, axis=-1)
    return parts


def _normalize(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def make_layers(options: argparse.Namespace, sizes: Sizes, variant: str) -> list[dict[str, Any]]:
    """Quantized weights of every layer, random, by the names of the projections they hold."""
    format = weights.parse_format(options.format)
    layers = []
    for i in range(options.layers):
        layer = {}
        for j, together in enumerate(VARIANTS[variant]):
            k, n = sizes.projections[together[0]]
            n = sum(sizes.projections[name][1] for name in together)
            key = jax.random.fold_in(jax.random.key(i), j)
            codes = weights.random_codes(key, n, k, format, options.dtype)
            layer["-".join(together)] = contenders.quantized(codes, format)
        layers.append(layer)
    return layers


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row per variant, number of tokens and kind of weights."""
    sizes = Sizes.of(options.width)
    for variant in options.variant:
        run = functools.partial(step, sizes=sizes, variant=variant)
        program = jax.jit(run, donate_argnums=0)
        layers = make_layers(options, sizes, variant)
        dense = jax.tree.map(_dequantize, layers, is_leaf=lambda leaf: hasattr(leaf, "dequantize"))
        for m in options.m:
            x = jax.random.normal(jax.random.key(m), (m, options.width), jnp.dtype(options.dtype))
            error = _difference(program, x, layers, dense)
            if not error <= LIMIT:
                raise results.InputError(
                    f"{variant}, m={m}: the quantized step is off by {error:.3g} of what the dense "
                    f"step adds, more than {LIMIT}; a wrong result is not timed."
                )
            for name, kind in ((options.format, layers), ("dense", dense)):
                ahead, blocking = _time(program, x, kind)
                yield {
                    "variant": variant,
                    "weights": name,
                    "dtype": options.dtype,
                    "m": m,
                    "layers": options.layers,
                    "width": options.width,
                    "us": ahead.median,
                    "quartiles_us": list(ahead.quartiles),
                    "blocking_us": blocking.median,
                    "blocking_quartiles_us": list(blocking.quartiles),
                    "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(kind)),
                    "relative_error": error,
                }


@jax.jit
def _dequantize(weight: Any) -> jax.Array:
    return weight.dequantize()


def _difference(program: Any, x: jax.Array, layers: Any, dense: Any) -> float:
    """Norm of the difference of the two steps, over that of what the dense one adds to x."""
    got, exact = program(x + 0, layers), program(x + 0, dense)
    wide = [y.astype(jnp.float32) for y in (x, got, exact)]
    norm = jnp.linalg.norm
    return float(norm(wide[1] - wide[2]) / norm(wide[2] - wide[0]))


def _time(
    program: Any, x: jax.Array, layers: Any
) -> tuple[timing.Microseconds, timing.Microseconds]:
    """Wall clock of a step: enqueued without waiting, and each waited for."""

    def seconds(wait: bool) -> float:
        nonlocal x
        start = time.perf_counter()
        for _ in range(STEPS):
            x = program(x, layers)
            if wait:
                x.block_until_ready()
        x.block_until_ready()
        return (time.perf_counter() - start) / STEPS

    x = x + 0
    seconds(wait=True)  # compiles and captures
    ahead = timing.summary([seconds(wait=False) for _ in range(BLOCKS)])
    return ahead, timing.summary([seconds(wait=True) for _ in range(BLOCKS)])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times a decode step without attention.")
    add = parser.add_argument
    add("--m", type=int, nargs="+", default=[1, 16], help="tokens, one per sequence")
    add("--layers", type=int, default=32)
    add("--width", type=int, default=MODEL.hidden, help="a multiple of 32")
    add("--format", default="int4-g128", help="as for benchmark.py")
    add("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    add("--variant", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    add("--out", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    if options.width % MODEL.heads:
        parser.error(f"--width is {options.width}, but it is a multiple of {MODEL.heads}.")
    rows = []
    try:
        environment = results.environment()
        print(results.describe(environment))
        for row in measure(options):
            rows.append(row)
            print(
                f"{row['variant']:13s} {row['weights']:16s} m={row['m']:<5d}"
                f"{row['us']:10.1f} us a step, {row['blocking_us']:10.1f} waiting for each"
                f"  ({row['bytes'] / 1e6:.0f} MB)",
                flush=True,
            )
    except (results.InputError, ValueError) as error:
        sys.exit(f"decode: {error}")
    if options.out:
        results.write(options.out, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
