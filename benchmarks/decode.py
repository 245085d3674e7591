"""Times a decode step of a model without its attention, in 4 bits and in bfloat16.

    python benchmarks/decode.py --m 1 16 --out decode.json

The model is Llama 3 8B (`shapes.py`) or one of its proportions: 32 layers of RMSNorm, projections
to queries, keys and values, a cheap stand-in for attention, the output projection, RMSNorm, gate
and up projections, silu, and the down projection, with residuals. The step is one jitted program
with donated buffers, and layers share no weights. The quantized step is timed only after its result
agreed with the dense step, which uses the dequantized weights.

Wall clock is measured on programs of one step, both enqueued without waiting and waited for one by
one. Device time is the additional time of a second step; it excludes fixed costs of a program.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import contenders
import jax
import jax.numpy as jnp
import results
import shapes
import timing
import weights

import jaxlowbit as jl

MODEL = shapes.MODELS["llama3-8b"]
# Projections of a layer that share a weight, and so a call. With "one-call", several weights share
# a call: q, k and v, and gate, up and down. With "block", one call computes everything from the
# output projection of a layer to q, k and v of the next; "int8" and "float8" also quantize its
# activations.
_SEPARATE = (("q",), ("k",), ("v",), ("o",), ("gate",), ("up",), ("down",))
_BLOCK = (("q", "k", "v"), ("o",), ("gate",), ("up",), ("down",))
VARIANTS = {
    "separate": _SEPARATE,
    "concatenated": (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)),
    "one-call": _SEPARATE,
    "block": _BLOCK,
    "int8": _BLOCK,
    "float8": _BLOCK,
}
BLOCKS_OF = {"block": None, "int8": jnp.int8, "float8": jnp.float8_e4m3fn}  # lhs_qtype
BLOCKS = 11
PROGRAMS = 10  # in a block
LIMIT = 0.05  # relative to the norm of the update of a step, for bfloat16 residuals over 32 layers
LIMITS = {"int8": 0.1, "float8": 0.3}  # with quantized activations


class Sizes(NamedTuple):
    """(k, n) of every projection; `width` replaces the 4096 of Llama 3 8B."""

    projections: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, width: int) -> "Sizes":
        kv = width * MODEL.kv_heads // MODEL.heads
        mlp = width * MODEL.mlp // MODEL.hidden
        features = {"q": width, "k": kv, "v": kv, "o": width, "gate": mlp, "up": mlp}
        found = {name: (width, n) for name, n in features.items()}
        return cls(found | {"down": (mlp, width)})


def step(x: jax.Array, layers: list[dict[str, Any]], sizes: Sizes, variant: str) -> jax.Array:
    """Applies all layers to x (m, width)."""
    if variant in BLOCKS_OF and isinstance(layers[0]["o"], jl.QuantizedArray):
        return _step_of_blocks(x, layers, sizes, BLOCKS_OF[variant])
    for layer in layers:
        attended = _attend(
            sizes, *_queries_keys_values(layer, sizes, variant, _normalize(x, layer["norm-qkv"]))
        )
        x = x + attended @ layer["o"]
        x = x + _mlp(layer, variant, _normalize(x, layer["norm-mlp"]))
    return x


def _step_of_blocks(
    x: jax.Array, layers: list[dict[str, Any]], sizes: Sizes, lhs_qtype: Any
) -> jax.Array:
    options = {"lhs_qtype": lhs_qtype}
    first = _normalize(x, layers[0]["norm-qkv"])
    products = jl.quantized_matmul(first, layers[0]["q-k-v"], **options)
    for i, layer in enumerate(layers):
        attended = _attend(sizes, *_split(products, sizes))
        names = {"out": "o", "norm": "norm-mlp", "gate_up": "gate-up", "down": "down"}
        given = options | {argument: layer[name] for argument, name in names.items()}
        if i + 1 == len(layers):
            return jl.quantized_block(attended, x, **given)
        following = layers[i + 1]["norm-qkv"], [layers[i + 1]["q-k-v"]]
        x, (products,) = jl.quantized_block(attended, x, following=following, **given)
    return x


def _attend(sizes: Sizes, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Placeholder for attention that reads q, k and v."""
    kv = jnp.concatenate([k, v], axis=-1)
    return (q + jnp.tile(kv, q.shape[-1] // kv.shape[-1])) / 2


def _split(products: jax.Array, sizes: Sizes) -> Sequence[jax.Array]:
    q, kv = (sizes.projections[name][1] for name in ("q", "k"))
    return jnp.split(products, [q, q + kv], axis=-1)


def _queries_keys_values(
    layer: dict[str, Any], sizes: Sizes, variant: str, x: jax.Array
) -> Sequence[jax.Array]:
    if "q-k-v" in layer:
        return _split(x @ layer["q-k-v"], sizes)
    several = [layer[name] for name in ("q", "k", "v")]
    if variant == "one-call" and isinstance(several[0], jl.QuantizedArray):
        return jl.quantized_matmuls(x, several)
    return [x @ weight for weight in several]


def _mlp(layer: dict[str, Any], variant: str, x: jax.Array) -> jax.Array:
    if variant not in ("separate", "concatenated"):
        gate_up = layer["gate-up"]
        if isinstance(gate_up, jl.QuantizedArray):
            return jl.quantized_mlp(x, gate_up=gate_up, down=layer["down"])
        gate, up = x @ gate_up[0], x @ gate_up[1]
    elif "gate-up" in layer:
        gate, up = jnp.split(x @ layer["gate-up"], 2, axis=-1)
    else:
        gate, up = x @ layer["gate"], x @ layer["up"]
    return (jax.nn.silu(gate) * up) @ layer["down"]


def _normalize(x: jax.Array, scales: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    factor = jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    return (wide * factor * scales[None].astype(wide.dtype)).astype(x.dtype)


def make_layers(options: argparse.Namespace, sizes: Sizes, variant: str) -> list[dict[str, Any]]:
    """Random quantized weights of every layer, by the names of their projections."""
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
        if variant not in ("separate", "concatenated"):
            pair = layer.pop("gate"), layer.pop("up")
            layer["gate-up"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *pair)
        for name in ("norm-qkv", "norm-mlp"):
            layer[name] = jnp.ones(options.width, options.dtype)
        layers.append(layer)
    return layers


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row per variant, number of tokens and kind of weights."""
    sizes = Sizes.of(options.width)
    for variant in options.variant:
        program = _program(sizes, variant)
        layers = make_layers(options, sizes, variant)
        dense = jax.tree.map(_dequantize, layers, is_leaf=lambda leaf: hasattr(leaf, "dequantize"))
        for m in options.m:
            x = jax.random.normal(jax.random.key(m), (m, options.width), jnp.dtype(options.dtype))
            error = _difference(program, x, layers, dense)
            limit = LIMITS.get(variant, LIMIT)
            if not error <= limit:
                raise results.InputError(
                    f"{variant}, m={m}: the quantized step is off by {error:.3g} of what the dense "
                    f"step adds, more than {limit}; a wrong result is not timed."
                )
            for name, kind in ((options.format, layers), ("dense", dense)):
                if kind is dense and variant not in ("separate", "concatenated"):
                    continue  # the dense step of "separate" or "concatenated"
                spent = _time(program, x, kind)
                yield {
                    "variant": variant,
                    "weights": name,
                    "dtype": options.dtype,
                    "m": m,
                    "layers": options.layers,
                    "width": options.width,
                    "us": spent.ahead.median,
                    "quartiles_us": list(spent.ahead.quartiles),
                    "blocking_us": spent.blocking.median,
                    "blocking_quartiles_us": list(spent.blocking.quartiles),
                    "device_us": spent.device.median,
                    "device_quartiles_us": list(spent.device.quartiles),
                    "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(kind)),
                    "relative_error": error,
                }


def _program(sizes: Sizes, variant: str) -> Any:
    """One step or several in one program."""

    def steps(x: jax.Array, layers: list[dict[str, Any]], count: int) -> jax.Array:
        for _ in range(count):
            x = step(x, layers, sizes, variant)
        return x

    return jax.jit(steps, donate_argnums=0, static_argnames="count")


@jax.jit
def _dequantize(leaf: Any) -> jax.Array:
    return leaf.dequantize() if isinstance(leaf, jl.QuantizedArray) else leaf


def _difference(program: Any, x: jax.Array, layers: Any, dense: Any) -> float:
    """Norm of the difference of the two steps, relative to the update of the dense step."""
    got, exact = program(x + 0, layers, 1), program(x + 0, dense, 1)
    wide = [y.astype(jnp.float32) for y in (x, got, exact)]
    norm = jnp.linalg.norm
    return float(norm(wide[1] - wide[2]) / norm(wide[2] - wide[0]))


class Time(NamedTuple):
    """Times of a step."""

    ahead: timing.Microseconds  # wall clock, programs enqueued without waiting
    blocking: timing.Microseconds  # wall clock, each waited for
    device: timing.Microseconds


def _time(program: Any, x: jax.Array, layers: Any) -> Time:
    def seconds(count: int = 1, wait: bool = False) -> float:
        """Times a program of `count` steps."""
        nonlocal x
        start = time.perf_counter()
        for _ in range(PROGRAMS):
            x = program(x, layers, count)
            if wait:
                x.block_until_ready()
        x.block_until_ready()
        return (time.perf_counter() - start) / PROGRAMS

    x = x + 0
    for count in (1, 2):
        seconds(count, wait=True)  # compiles and captures
    samples = [(seconds(), seconds(wait=True), seconds(count=2) - seconds()) for _ in range(BLOCKS)]
    return Time(*(timing.summary(list(of_one)) for of_one in zip(*samples, strict=True)))


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
        parser.error(f"--width is {options.width}, but it must be a multiple of {MODEL.heads}.")
    rows = []
    try:
        environment = results.environment()
        print(results.describe(environment))
        for row in measure(options):
            rows.append(row)
            print(
                f"{row['variant']:13s} {row['weights']:16s} m={row['m']:<5d}"
                f"{row['us']:10.1f} us a step, {row['blocking_us']:10.1f} waiting for each,"
                f"{row['device_us']:10.1f} on the device  ({row['bytes'] / 1e6:.0f} MB)",
                flush=True,
            )
    except (results.InputError, ValueError) as error:
        sys.exit(f"decode: {error}")
    if options.out:
        results.write(options.out, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
