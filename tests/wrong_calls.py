"""Wrong calls of the public functions, generated from a seed, and what makes an error ours.

python tests/wrong_calls.py --calls 5000
"""

import argparse
import dataclasses
import functools
import random
import re
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import jaxlowbit as jl
from jaxlowbit import linen as jl_linen
from jaxlowbit import nnx as jl_nnx

PACKAGE = str(Path(jl.__file__).parent)
K, N = 64, 128


@dataclasses.dataclass(frozen=True)
class Call:
    """A public function, and arguments with which it works; `names` may begin its errors."""

    function: Callable[..., Any]
    arguments: Mapping[str, Callable[[], Any]]
    names: tuple[str, ...]
    positional: tuple[str, ...] = ()

    def run(self, changed: Mapping[str, Any]) -> Any:
        given = {name: make() for name, make in self.arguments.items()} | dict(changed)
        first = [given.pop(name) for name in self.positional]
        return self.function(*first, **given)


@functools.cache
def arrays() -> dict[str, Any]:
    w = jax.random.normal(jax.random.key(0), (K, N))
    return {
        "x": jnp.ones((3, K)),
        "w": w,
        "q": jl.quantize(w, jl.INT4),
        "down": jl.quantize(w.T, jl.INT4),
        "square": jl.quantize(w[:, :K], jl.INT8),
        "pair": jl.quantize(jnp.stack([w, w]), jl.INT4),
        "integers": jnp.ones((K, N), jnp.int8),
        "scale": jnp.ones((1, N)),
        "mesh": jax.make_mesh((1,), ("model",), devices=jax.devices("cpu")[:1]),
    }


def given(name: str) -> Callable[[], Any]:
    return lambda: arrays()[name]


def constant(value: Any) -> Callable[[], Any]:
    return lambda: value


class Model(nnx.Module):
    def __init__(self) -> None:
        self.up = nnx.Linear(K, N, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(N, K, rngs=nnx.Rngs(0))


MODULE = nn.Sequential([nn.Dense(N), nn.Dense(K)])


@functools.cache
def variables() -> Any:
    return MODULE.init(jax.random.key(0), jnp.ones((3, K)))


def initialised(layer: Any, inputs: Any) -> Callable[..., Any]:
    """A Linen layer, made and initialised."""
    return lambda **fields: layer(**fields).init(jax.random.key(0), inputs())


def call(function: Any, *names: str, positional: Any = (), **arguments: Any) -> Call:
    return Call(function, arguments, names or (function.__name__,), tuple(positional))


INT4, NONE = constant(jl.INT4), constant(None)
PRODUCT = {
    "preferred_element_type": NONE,
    "precision": NONE,
    "out_sharding": NONE,
    "backend": NONE,
}
LAYER = {"format": INT4, "shards": constant((1, 1)), "rngs": lambda: nnx.Rngs(0)}
TOKENS = constant(jnp.array([3, 1]))
CALLS = {
    "quantize": call(
        jl.quantize,
        weight=given("w"),
        format=INT4,
        method=NONE,
        scale_dtype=NONE,
        shards=constant((1, 1)),
        permutation=NONE,
    ),
    "dequantize": call(jl.dequantize, array=given("q"), dtype=NONE),
    "matmul": call(
        jl.quantized_matmul,
        lhs=given("x"),
        rhs=given("q"),
        bias=NONE,
        activation=NONE,
        residual=NONE,
        **PRODUCT,
    ),
    "glu": call(
        jl.quantized_glu,
        lhs=given("x"),
        gate_up=given("pair"),
        bias=NONE,
        activation=constant("relu"),
        **PRODUCT,
    ),
    "matmuls": call(
        jl.quantized_matmuls, lhs=given("x"), rhss=lambda: [arrays()["q"]] * 2, **PRODUCT
    ),
    "mlp": call(
        jl.quantized_mlp,
        lhs=given("x"),
        gate_up=given("pair"),
        down=given("down"),
        activation=constant("silu"),
        **PRODUCT,
    ),
    "block": call(
        jl.quantized_block,
        attended=given("x"),
        residual=given("x"),
        out=given("square"),
        norm=lambda: jnp.ones(K),
        gate_up=given("pair"),
        down=given("down"),
        following=lambda: (jnp.ones(K), [arrays()["q"]]),
        activation=constant("silu"),
        epsilon=constant(1e-5),
        backend=NONE,
    ),
    "partition_spec": call(
        jl.partition_spec,
        array=given("pair"),
        mesh=given("mesh"),
        k=NONE,
        n=constant("model"),
        lead=constant(()),
    ),
    "supported_backends": call(jl.supported_backends, lhs=given("x"), rhs=given("q")),
    "explain": call(jl.explain, lhs=given("x"), rhs=given("q"), device=constant("cpu")),
    "scan": call(
        jl.scan,
        f=constant(lambda carry, _: (carry, None)),
        init=given("x"),
        xs=given("pair"),
        length=NONE,
    ),
    "group_permutation": call(
        jl.group_permutation, group_index=lambda: jnp.arange(K) % 4, group_size=constant(16)
    ),
    "Format": call(jl.Format, bits=constant(4), group_size=constant(128), zero=constant("integer")),
    "from_integers": call(
        jl.QuantizedArray.from_integers,
        "from_integers",
        values=given("integers"),
        scale=given("scale"),
        zero=NONE,
        format=INT4,
        shards=constant((1, 1)),
        permutation=NONE,
    ),
    "from_qarray": call(jl.QuantizedArray.from_qarray, array=given("integers")),
    "select": call(
        lambda index: arrays()["pair"].select(index), "QuantizedArray", index=constant(1)
    ),
    "getitem": call(lambda key: arrays()["pair"][key], "QuantizedArray", key=constant(1)),
    "array.dequantize": call(
        lambda dtype: arrays()["q"].dequantize(dtype), "QuantizedArray", dtype=NONE
    ),
    "nnx.quantize_model": call(
        jl_nnx.quantize_model, model=Model, rules=INT4, keep=constant(()), shards=constant((1, 1))
    ),
    "nnx.check_layout_version": call(jl_nnx.check_layout_version, model=Model),
    "QuantizedLinear": call(
        jl_nnx.QuantizedLinear, in_features=constant(K), out_features=constant(N), **LAYER
    ),
    "QuantizedEmbed": call(
        jl_nnx.QuantizedEmbed, num_embeddings=constant(N), features=constant(K), **LAYER
    ),
    "from_linear": call(
        jl_nnx.QuantizedLinear.from_linear,
        "QuantizedLinear",
        linear=lambda: Model().up,
        format=INT4,
        shards=constant((1, 1)),
    ),
    "linen.quantize_model": call(
        jl_linen.quantize_model,
        positional=("module", "variables", "rules", "x"),
        module=constant(MODULE),
        variables=variables,
        rules=INT4,
        x=given("x"),
        keep=constant(()),
        shards=constant((1, 1)),
    ),
    "linen.check_layout_version": call(jl_linen.check_layout_version, variables=variables),
    "variables_of": call(jl_linen.variables_of, array=given("q")),
    "QuantizedDense": call(
        initialised(jl_linen.QuantizedDense, given("x")),
        "QuantizedDense",
        features=constant(N),
        format=INT4,
        shards=constant((1, 1)),
    ),
    "linen.QuantizedEmbed": call(
        initialised(jl_linen.QuantizedEmbed, TOKENS),
        "QuantizedEmbed",
        num_embeddings=constant(N),
        features=constant(K),
        format=INT4,
        shards=constant((1, 1)),
    ),
}
# Arguments whose wrong values JAX, Flax or the caller's own function meets first.
OTHERS = {("QuantizedLinear", "rngs"), ("QuantizedEmbed", "rngs"), ("linen.quantize_model", "x")}
OTHERS |= {("QuantizedDense", "features"), ("linen.QuantizedEmbed", "features")}
OTHERS |= {("linen.QuantizedEmbed", "num_embeddings")}

WRONG: list[Callable[[], Any]] = [
    *map(constant, (None, 0, 1, 2, 4, -1, -2, 2**40, 0.5, 4.0, True, 1j, float("nan"))),
    *map(constant, (float("inf"), "", "typo", "int4", "int9", "bfloat16", "gpu", "relu", "cuda")),
    *map(constant, ((), (2,), (1, 1), (2, 2), (0, 1), (7, 1), (1, 2, 3), ("a", "b"), (1.5, 2))),
    *map(constant, ([], {}, {1}, {"a": 1}, {"up": "int4"}, {"up": 4}, [("up", None)], [1, 2])),
    *map(constant, (object(), int, float, "model", ("model",), jl.INT8, jl.Format(1), b"x")),
    *map(constant, (jnp.float32, jnp.int8, np.float64, "int4-g128", slice(None), Ellipsis)),
    *map(constant, (jax.nn.relu, lambda: None, jax.P("model"), jax.lax.Precision.HIGHEST)),
    *map(given, ("x", "w", "q", "down", "pair", "integers", "scale", "mesh", "square")),
    lambda: np.ones((3, K)),
    lambda: np.ones((K, N), np.int64),
    lambda: np.array(["a", "b"]),
    lambda: np.array([None, 1]),
    lambda: jnp.ones(()),
    lambda: jnp.ones((0, K)),
    lambda: jnp.ones((K,)),
    lambda: jnp.ones((2, 3, N)),
    lambda: jnp.full((K, N), jnp.nan),
    lambda: jnp.arange(K),
    lambda: arrays()["pair"].select(0),
    lambda: [arrays()["q"], arrays()["w"]],
    lambda: [arrays()["q"], arrays()["down"]],
    lambda: (jnp.ones(K), arrays()["q"]),
    lambda: (jnp.ones(K), [arrays()["down"]]),
    lambda: ("a", []),
    lambda: jax.ShapeDtypeStruct((3, K), jnp.float32),
    lambda: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), arrays()["q"]),
    Model,
    lambda: nnx.state(Model()),
    lambda: Model().up,
    lambda: Model,
    constant(MODULE),
    variables,
    lambda: variables()["params"],
]


def sample(seed: int) -> tuple[str, dict[str, Any]]:
    """The name of a call, and one or two of its arguments with other values."""
    rng = random.Random(seed)
    name = rng.choice(list(CALLS))
    possible = [argument for argument in CALLS[name].arguments if (name, argument) not in OTHERS]
    chosen = rng.sample(possible, min(len(possible), 1 + (rng.random() < 0.3)))
    return name, {argument: rng.choice(WRONG)() for argument in chosen}


def complaint(seed: int) -> str | None:
    """What is wrong with the error of a call, or None: it works, or is refused by a sentence.

    The error is ours if it is a TypeError or ValueError, was raised by a line of this package, ends
    as a sentence, and begins with a name of the public function (or class) that was called and a
    colon or a dot; an array whose words were cast may say so itself.
    """
    name, changed = sample(seed)
    if callable(changed.get("f")):  # a function of the caller's, with errors of its own
        return None
    if isinstance(changed.get("length"), int) and changed["length"] > 100:  # a very long scan
        return None
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")  # all frames count
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CALLS[name].run(changed)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        raised = frames[-1].filename if frames else ""
        leaves = jax.tree.leaves([*changed.values()], is_leaf=lambda x: hasattr(x, "dequantize"))
        broken = ("QuantizedArray",) * any(isinstance(x, jl.QuantizedArray) for x in leaves)
        names = "|".join(map(re.escape, (*CALLS[name].names, *broken)))
        text = str(error)
        ours = (
            isinstance(error, TypeError | ValueError)
            and raised.startswith(PACKAGE)
            and re.match(rf"({names})[:.]", text)
            and re.search(r"[.!)]$", text.splitlines()[-1] or ".")
        )
        if ours or re.match(rf".*({names})\(\) (missing|got an unexpected)", text):
            return None
        words = {argument: str(value)[:60] for argument, value in changed.items()}
        return f"{seed}: {name}({words}): {type(error).__name__}: {text[:200]} ({raised})"
    finally:
        jax.config.update("jax_traceback_filtering", filtering)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    found = []
    for seed in range(options.first, options.first + options.calls):
        if reason := complaint(seed):
            found.append(reason)
            print(reason, flush=True)
    print(f"{options.calls} calls, {len(found)} that end in no sentence of ours")


if __name__ == "__main__":
    main()
