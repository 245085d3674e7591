"""Whole programs that must give equal bits with two builds (`tools/golden.py --against`).

Their bits depend on XLA and on the machine, so they are not stored. `programs()` lists steps of
language models, Flax models, programs on several devices, random programs, and for each named
format the definition, the quantizer and the Pallas kernels.
"""

import dataclasses
import functools
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import combinations
import decoders
import jax
import jax.numpy as jnp
import meshes
import numpy as np
from decoders import CONFIGS
from flax import linen as nn
from flax import nnx
from golden_calls import Maker, combination
from golden_problems import EPILOGUES, SHAPES, digest
from helpers import initial
from jax.sharding import AxisType
from model_files import write_tiny
from programs import function, sample
from programs import operands as program_operands

import jaxlowbit as jl
from jaxlowbit import Format, llm
from jaxlowbit import linen as jl_linen
from jaxlowbit import nnx as jl_nnx
from jaxlowbit._core.format_table import NAMED

RANDOM = 40  # number of random programs
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], list(range(20, 60))]
TOKENS = np.random.default_rng(1).integers(0, 160, (2, 24))
# On four devices, each shard of a weight has whole heads and whole atoms.
DIVIDED: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_size": 64, "hidden": 256}
MODEL_FORMATS = (
    "int8",
    "uint4",
    "int3",
    "nf4",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "int4-g32-float-two_level",
)


@dataclasses.dataclass(frozen=True)
class Program:
    name: str
    run: Callable[[], Any]

    def compute(self) -> str:
        """The hash of its results.

        **Raises:** `AssertionError` if a second run gives different bits.
        """
        first, second = (digest(self.run(), 12) for _ in range(2))
        assert first == second, f"two runs differ, {first} and {second}"
        return first


def programs() -> tuple[Program, ...]:
    groups = (_language_models, _divided_models, _flax, _divided_products, _random, _formats)
    found = [Program(name, run) for group in groups for name, run in group()]
    return tuple(found)


Runs = Iterator[tuple[str, Callable[[], Any]]]


# --- models ---------------------------------------------------------------------------------------


def _logits(decoder: llm.Decoder) -> Any:
    graph, state = nnx.split(decoder)
    return jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, TOKENS)


@functools.cache
def _weights(name: str, format: Format, divided: bool) -> Any:
    return decoders.random(CONFIGS[name].replace(**(DIVIDED if divided else {})), format)


def _decoder(name: str, format: Format = decoders.INT4_G32, devices: int = 0, **options: Any):
    config = CONFIGS[name].replace(**(DIVIDED if devices else {}))
    mesh = None
    if devices:
        kinds = (AxisType.Auto,)
        mesh = jax.make_mesh((devices,), ("model",), kinds, devices=jax.devices()[:devices])
    options = {"dtype": jnp.float32, "mesh": mesh} | options
    return llm.Decoder(config, _weights(name, format, bool(devices)), **options)


def _tokens(decoder: llm.Decoder, **options: Any) -> Any:
    model = llm.LanguageModel(decoder)
    found = llm.generate(model, PROMPTS, max_new_tokens=12, **options)
    return [np.asarray(x.tokens) for x in found]


def _perplexity(decoder: llm.Decoder) -> Any:
    text = np.random.default_rng(0).integers(0, 160, 50).tolist()
    return np.float64(llm.perplexity(llm.LanguageModel(decoder), text, context=32).perplexity)


def _loaded() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model = llm.load(write_tiny(Path(folder)))
    return _logits(model.decoder)


def _drawn(format: str) -> Any:
    """Weights drawn by `init`, and the logits of the model."""
    decoder = llm.init(CONFIGS["llama"], NAMED[format]).decoder
    return nnx.to_pure_dict(nnx.state(decoder)), _logits(decoder)


def _language_models() -> Runs:
    for name in CONFIGS:
        yield f"llm: logits of {name}", lambda name=name: _logits(_decoder(name))
        yield f"llm: tokens of {name}", lambda name=name: _tokens(_decoder(name))
    for format in MODEL_FORMATS:
        for dtype in ("bfloat16", "float32"):
            yield (
                f"llm: logits of llama by {format} in {dtype}",
                lambda format=format, dtype=dtype: _logits(
                    _decoder("llama", NAMED[format], dtype=jnp.dtype(dtype))
                ),
            )
    for name in ("llama", "qwen2", "gemma3"):
        for dtype in ("int8", "float8_e4m3fn"):
            yield (
                f"llm: tokens of {name}, rounded to {dtype}",
                lambda name=name, dtype=dtype: _tokens(_decoder(name, lhs_qtype=dtype)),
            )
    drawn: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "seed": 3}
    for dtype in ("bfloat16", "float16"):
        yield (
            f"llm: tokens of llama drawn in {dtype}",
            lambda dtype=dtype: _tokens(_decoder("llama", dtype=jnp.dtype(dtype)), **drawn),
        )
    yield "llm: perplexity of llama", lambda: _perplexity(_decoder("llama"))
    yield "llm: a model of a GGUF file", _loaded
    for format in ("int4", "int8", "mxfp4"):
        yield f"llm: init by {format}", lambda format=format: _drawn(format)


def _divided_models() -> Runs:
    for name, devices in (("llama", 4), ("qwen2", 2), ("qwen3", 4), ("gemma3", 2)):
        if devices <= len(jax.devices()):
            title = f"{name} on {devices} devices"
            make = functools.partial(_decoder, name, devices=devices)
            yield f"llm: logits of {title}", lambda make=make: _logits(make())
            yield f"llm: tokens of {title}", lambda make=make: _tokens(make())
            yield (
                f"llm: logits of {title}, rounded to int8",
                lambda make=make: _logits(make(lhs_qtype="int8")),
            )


class Layers(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(64, 96, kernel_init=initial, rngs=rngs)
        self.heads = nnx.LinearGeneral(96, (4, 16), kernel_init=initial, rngs=rngs)
        self.table = nnx.Embed(64, 64, embedding_init=initial, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        hidden = self.heads(nnx.gelu(self.up(x)))
        return self.table.attend(hidden.reshape(*x.shape[:-1], 64))


MODULE = nn.Sequential([nn.Dense(96, kernel_init=initial), nn.Dense(64, kernel_init=initial)])


def _flax() -> Runs:
    x = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)

    def of_nnx(format: Format) -> Any:
        model = Layers()
        jl_nnx.quantize_model(model, {"": format})
        graph, state = nnx.split(model)
        run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        loss = jax.grad(lambda x: jnp.sum(jnp.sin(run(state, x))))
        return run(state, x), loss(jnp.asarray(x))

    def of_linen(format: Format) -> Any:
        floats = MODULE.init(jax.random.key(0), x)
        model, variables, _ = jl_linen.quantize_model(MODULE, floats, {"": format}, x)
        return variables, jax.jit(model.apply)(variables, x)

    for name in ("int4", "uint8", "nf4", "mxfp4"):
        yield f"flax: a model of NNX by {name}", lambda name=name: of_nnx(NAMED[name])
        yield f"flax: a model of Linen by {name}", lambda name=name: of_linen(NAMED[name])


# --- products -------------------------------------------------------------------------------------


def _divided_products() -> Runs:
    """Products on two by four devices, sharded along n and along k, with derivatives."""
    if len(jax.devices()) < 8:
        return

    def run(format: Format, kind: AxisType, axis: str) -> Any:
        maker = Maker("divided", jax.default_backend(), format, 8, "float32", k=1024, n=512)
        mesh = jax.make_mesh((2, 4), ("a", "b"), (kind,) * 2, devices=jax.devices()[:8])
        lhs, weight = maker.lhs(), maker.weight()
        specs = weight.partition_spec(mesh, **{axis: "b"})
        x = meshes.put(lhs, mesh, jax.P("a", "b" if axis == "k" else None))
        placed = jax.device_put(weight, jax.tree.map(lambda s: jax.NamedSharding(mesh, s), specs))
        out = jax.P("a") if kind is AxisType.Explicit and axis == "k" else None
        with jax.set_mesh(mesh):
            product = functools.partial(jl.quantized_matmul, out_sharding=out)
            return jax.jit(product)(x, placed)

    for name in ("int4", "uint8", "mxfp4", "nf4"):
        for kind in (AxisType.Auto, AxisType.Explicit):
            for axis in ("n", "k"):
                yield (
                    f"divided: {name} along {axis}, {kind.name}",
                    lambda name=name, kind=kind, axis=axis: run(NAMED[name], kind, axis),
                )


def _random() -> Runs:
    def run(number: int) -> Any:
        program = sample(random.Random(number))
        state, arrays, origin, places = program_operands(program)
        return jax.jit(function(program, None, places))(*jax.device_put((state, arrays, origin)))

    for number in range(RANDOM):
        yield f"random program {number}", functools.partial(run, number)


def _formats() -> Runs:
    """The definition, the quantizer and the Pallas kernels for each named format."""

    def defined(format: Format) -> Any:
        lhs, rhs, epilogue, *_ = combinations.operands(
            combination(format, SHAPES["qmm_sm80"], "all")
        )
        options: dict[str, Any] = {"backend": "xla"}
        dequantized = jax.jit(jl.QuantizedArray.dequantize)(rhs)
        static = ("activation", "backend")
        product = jax.jit(jl.quantized_matmul, static_argnames=static)
        return dequantized, product(lhs, rhs, **epilogue, **options)

    def quantized(format: Format) -> Any:
        weight = np.random.default_rng(0).normal(size=(259, 130)).astype(np.float32)
        lead = jax.jit(lambda weight: jl.quantize(weight, format))(weight)
        return lead, jl.quantize_activations(jnp.asarray(weight))

    def by_pallas(format: Format, epilogue: str) -> Any:
        chosen = combination(format, (5, 256, 192), epilogue)
        lhs, rhs, arguments, *_ = combinations.operands(chosen)
        product = jl.quantized_glu if chosen.gated else jl.quantized_matmul
        jitted = combinations._jitted(cast(Any, product), "pallas")
        return jitted(lhs, rhs, **arguments, preferred_element_type=None)

    for name, format in NAMED.items():
        yield f"definition: {name}", functools.partial(defined, format)
        yield f"quantize: {name}", functools.partial(quantized, format)
    for name, epilogue in zip(("int4", "uint8", "nf4", "int3"), EPILOGUES[-4:], strict=True):
        yield (
            f"pallas: {name}, {epilogue}",
            functools.partial(by_pallas, NAMED[name], epilogue),
        )
