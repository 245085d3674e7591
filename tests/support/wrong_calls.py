"""Wrong calls of the public functions, generated from a seed, and the check of their errors.

python tests/support/wrong_calls.py --calls 5000
"""

import argparse
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
from call_arguments import (
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
from flax import nnx
from flax.errors import FlaxError
from right_calls import CALLS

import jaxlowbit as jl
from jaxlowbit import llm

PACKAGE = str(Path(jl.__file__).parent)

# JAX, Flax or the user's function raises first for these arguments.
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
    *map(given, ("experts", "gate_up", "downs")),
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
    # Invalid prompts of language models.
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
    """The name of a call, and one or two arguments with new values."""
    rng = random.Random(seed)
    name = rng.choice(list(CALLS))
    possible = [argument for argument in CALLS[name].arguments if (name, argument) not in OTHERS]
    chosen = rng.sample(possible, min(len(possible), 1 + (rng.random() < 0.3)))
    return name, {argument: rng.choice(WRONG)() for argument in chosen}


def of(*types: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def among(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(x) and value == x for x in values)


def shaped(*shapes: tuple[int | None, ...]) -> Callable[[Any], bool]:
    """Accepts numeric arrays with these last axes; None accepts any size."""

    def right(value: Any) -> bool:
        if not isinstance(value, list | tuple | range | int | jax.Array | np.ndarray):
            return False
        found = np.shape(value)
        lasts = ((shape, found[len(found) - len(shape) :]) for shape in shapes)
        return any(
            len(found) >= len(shape)
            and all(want in (None, have) for want, have in zip(shape, last, strict=True))
            for shape, last in lasts
        )

    return right


NOTHING, NUMBERS = among(None), shaped(())
DTYPE = of(str, type)  # the call checks the name itself
WEIGHTS = of(jl.QuantizedArray)
RIGHT: dict[str | tuple[str, str], Callable[[Any], bool]] = {
    "activation": among("silu", "gelu", "gelu_tanh", "relu"),
    "lhs_qtype": among(None, jnp.int8),
    "activations": shaped((None,)),
    "adapter": of(llm.LoRA),
    "alpha": among(0, 1, 0.5, 1.0),
    "array": WEIGHTS,
    "at_once": of(int),
    "attended": shaped((K,)),
    "axis": of(int, tuple),
    "backend": among(None, "cpu", "xla", "pallas"),
    "batch": of(int),
    "batches": lambda value: True,  # whose meaning the model knows
    "beta_fast": NUMBERS,
    "bias": NOTHING,
    "bias_shape": of(tuple),
    "bits": of(int),
    "block_size": of(tuple),
    "config": of(llm.Config),
    "consume": of(int),
    "context": of(int),
    "device": among(None, "cpu"),
    "dtype": lambda value: value is None or DTYPE(value),
    "embedding": of(bool),
    "epsilon": among(0, 1, 2, 4, 2**40, 0.5, 4.0),
    "factor": NOTHING,
    "features": of(int, tuple, list),
    "following": NOTHING,
    "format": of(str, jl.Format),
    "full": of(bool, int, np.bool_),
    "g_idx": NOTHING,
    "group_size": of(int),
    "in_features": of(int, tuple),
    "index": shaped(()),
    "init": of(object),  # any carry
    "inputs": NUMBERS,
    "keep": of(str, tuple, list),
    "key": of(int, tuple, list, slice, jax.Array),
    "layers": of(int),
    "length": among(None, 2),
    "lhs": lambda value: shaped((K,))(value) or isinstance(value, jax.ShapeDtypeStruct),
    "linear": of(nnx.Linear),
    "max_new_tokens": of(int),
    "mesh": lambda value: value is None or isinstance(value, jax.sharding.Mesh),
    "method": NOTHING,
    "model": of(nnx.Module, llm.LanguageModel),
    "module": of(str, type, type(None), type(MODULE)),
    "new_tokens": of(int),
    "num_embeddings": of(int),
    "out_features": of(int, tuple),
    "out_sharding": NOTHING,
    "param_dtype": DTYPE,
    "path": of(str, Path),
    "permutation": NOTHING,
    "precision": NOTHING,
    "preferred_element_type": lambda value: value is None or DTYPE(value),
    "progress": of(bool, int),
    "prompt": of(list, tuple, str, range, np.ndarray, jax.Array),
    "prompt_tokens": of(int),
    "quantizer": NOTHING,
    "query": shaped((K,)),
    "reader": of(str, type, type(None)),
    "repeats": of(int),
    "residual": lambda value: value is None or shaped((K,))(value),
    "rhs": WEIGHTS,
    "rhss": of(list, tuple),
    "rules": lambda value: isinstance(value, jl.Format | str) or value == {"up": "int4"},
    "scale": NOTHING,
    "scale_dtype": NOTHING,
    "samples": of(int),
    "seed": of(int),
    "shards": among((1, 1), (2, 2), {}),
    "statistics": NOTHING,
    "stop": of(str, tuple, list),
    "temperature": of(int, float),
    "tensor_scale": NOTHING,
    "text": of(list, tuple, range, np.ndarray, jax.Array),
    "tokens": shaped((None, None)),
    "top_k": of(int, type(None)),
    "top_p": of(float, int, type(None)),
    "use_bias": of(bool, int),
    "values": shaped((None, None)),
    "weight": shaped((None, None)),
    "x": shaped((K,)),
    "xs": shaped((None,)),
    "zero": NOTHING,
    "down_bias": NOTHING,
    "gate_up_bias": lambda value: value is None or np.shape(value) == (2, 3, N),
    "group_offset": lambda value: value is None or np.size(value) == 1,
    "group_sizes": among((1, 2, 3)),
    # The equation, and possible names of parameters.
    ("linen.EinsumLayer", "bias"): of(str, type(None)),
    ("linen.EinsumLayer", "weight"): lambda value: isinstance(value, str) or callable(value),
    # The equation, or a function that returns it.
    ("linen.EinsumLayer", "equation"): lambda value: value == "bd,df->bf" or callable(value),
    ("EinsumParameter", "equation"): lambda value: value == "bd,df->bf" or callable(value),
    ("Config", "bos"): of(int, type(None)),
    ("Config", "hidden"): of(int),
    ("LoRA", "alpha"): of(float, int),
    ("LoRA", "rank"): of(int),
    ("LoRA", "targets"): of(str),
    ("LoRA", "use_rslora"): of(bool),
    ("mixed", "bits"): of(float, int),
    ("ragged_dot", "activation"): among(None, "silu", "gelu", "gelu_tanh", "relu"),
    ("RopeScaling", "beta_slow"): of(float, int),
    ("RopeScaling", "factor"): of(float, int),
    ("supported_backends", "lhs"): lambda value: hasattr(value, "dtype"),
    ("LanguageModel", "decoder"): of(llm.Decoder),
    ("LanguageModel", "report"): NOTHING,
    ("LanguageModel", "tokenizer"): NOTHING,
    ("Decoder", "weights"): lambda value: jax.tree.map(np.shape, value) == config().shapes(),
    ("check_layout_version", "tree"): lambda value: any(
        isinstance(x, jl.QuantizedArray) for x in jax.tree.leaves(value, is_leaf=WEIGHTS)
    ),
    ("perplexity", "context"): of(int, type(None)),
}
"""Predicates for valid values of arguments; calls may succeed with these."""


def is_right(name: str, argument: str, value: Any) -> bool:
    right = RIGHT.get((name, argument)) or RIGHT.get(argument)
    return right is not None and right(value)


def is_sentence(error: Exception, name: str, changed: Mapping[str, Any]) -> bool:
    """Whether an error of a call is a sentence of this package.

    It must be a TypeError, a ValueError or an error about a missing path, be raised by this
    package, end as a sentence, and begin with the name of the called function or class and a colon
    or a dot. Exceptions are errors about cast words, errors about programs compiled for a platform
    without their backend, and errors of Flax that the float Linen model raises too.
    """
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
    flax = name == "QuantizedModel" and isinstance(error, FlaxError)
    return bool(ours or flax or re.match(rf".*({names})\(\) (missing|got an unexpected)", text))


def complaint(seed: int) -> str | None:
    """The fault of a call, or None if it works with valid values or raises a sentence."""
    name, changed = sample(seed)
    functions = ("f", "kernel_init", "bias_init", "embedding_init", "promote_dtype")
    if any(callable(changed.get(argument)) for argument in functions):  # raises its own errors
        return None
    if isinstance(changed.get("length"), int) and changed["length"] > 100:  # a very long scan
        return None
    words = {argument: str(value)[:60] for argument, value in changed.items()}
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")  # all frames count
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CALLS[name].run(changed)
    except Exception as error:
        if is_sentence(error, name, changed):
            return None
        raised = traceback.extract_tb(error.__traceback__)[-1].filename
        kind, text = type(error).__name__, str(error)[:200]
        return f"{seed}: {name}({words}): {kind}: {text} ({raised})"
    finally:
        jax.config.update("jax_traceback_filtering", filtering)
    wrong = [argument for argument, value in changed.items() if not is_right(name, argument, value)]
    return f"{seed}: {name}({words}) works, with a wrong {' and '.join(wrong)}" if wrong else None


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
    print(f"{options.calls} calls, {len(found)} that end in no sentence of ours or work")


if __name__ == "__main__":
    main()
