"""Wrong calls of the public functions, generated from a seed, and what makes an error ours.

python tests/wrong_calls.py --calls 5000
"""

import argparse
import random
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import FlaxError
from right_calls import (
    CALLS,
    MODULE,
    K,
    Model,
    N,
    arrays,
    config,
    constant,
    floats,
    given,
    language_model,
    variables,
)

import jaxlowbit as jl

PACKAGE = str(Path(jl.__file__).parent)

# Arguments whose wrong values JAX, Flax or the caller's own function meets first.
OTHERS = {("linen.quantize_model", "x"), ("QuantizedModel", "x")}
OTHERS |= {(name, "rngs") for name in CALLS}

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
    # What language models do not take.
    *map(constant, ([3, "a"], [[3, 1], []], [[3], "a"], [-1], [64], [3] * 40, [2.5], [[[3]]])),
    *map(constant, ([{"role": "user"}], [{"content": 4}], [None], "/nowhere/model.gguf", "/tmp")),
    *map(constant, ("bd,df->bf", "bd,fd->", "x", "4096x", "0x16", [(0, 4)], [(4096,)], ["typo"])),
    *map(constant, (Path("/dev/null"), Path(__file__), jax.random.key(0), range(3))),
    config,
    floats,
    language_model,
    lambda: language_model().decoder,
    lambda: {**floats(), "embedding": jnp.ones((2, 2))},
    lambda: {**floats(), "final_norm": None},
    lambda: {name: 1.0 for name in floats()},
    lambda: jnp.array([[3, 64]]),
    lambda: jnp.ones((1, 3, 2), jnp.int32),
    lambda: jax.make_mesh((1, 1), ("a", "b"), devices=jax.devices("cpu")[:1]),
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

    The error is ours if it is a TypeError or ValueError, or of a path that does not exist, was
    raised by a line of this package, ends as a sentence, and begins with a name of the public
    function (or class) that was called and a colon or a dot. An array whose words were cast may say
    so itself, and a program that is compiled for another platform than its backend. A model of
    Linen raises the errors of Flax that the float model raises.
    """
    name, changed = sample(seed)
    functions = ("f", "kernel_init", "bias_init", "embedding_init", "promote_dtype")
    if any(callable(changed.get(argument)) for argument in functions):  # with errors of its own
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
            isinstance(error, TypeError | ValueError | FileNotFoundError)
            and raised.startswith(PACKAGE)
            and re.match(rf"({names})[:.]|jaxlowbit: backend='", text)
            and re.search(r"[.!)]$", text.splitlines()[-1] or ".")
        )
        if name == "QuantizedModel" and isinstance(error, FlaxError):
            return None
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
