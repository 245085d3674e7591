"""Valid calls of the public functions and classes; `wrong_calls` modifies them."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
from call_arguments import (
    MODULE,
    SIZES,
    K,
    Model,
    N,
    adapted_model,
    applied,
    arrays,
    config,
    constant,
    floats,
    given,
    initialised,
    language_model,
    layers,
    model_file,
    quantized,
    variables,
)
from flax import linen as nn
from flax import nnx
from pretrained import IDS, Pretrained

import jaxlowbit as jl
from jaxlowbit import linen as jl_linen
from jaxlowbit import llm
from jaxlowbit import nnx as jl_nnx


@dataclasses.dataclass(frozen=True)
class Call:
    """A public function with valid arguments; its errors begin with one of `names`."""

    function: Callable[..., Any]
    arguments: Mapping[str, Callable[[], Any]]
    names: tuple[str, ...]
    positional: tuple[str, ...] = ()

    def run(self, changed: Mapping[str, Any]) -> Any:
        given = {name: make() for name, make in self.arguments.items()} | dict(changed)
        first = [given.pop(name) for name in self.positional]
        return self.function(*first, **given)


def call(function: Any, *names: str, positional: Any = (), **arguments: Any) -> Call:
    return Call(function, arguments, names or (function.__name__,), tuple(positional))


INT4, NONE = constant(jl.INT4), constant(None)
PRODUCT = {
    "preferred_element_type": NONE,
    "precision": NONE,
    "out_sharding": NONE,
    "backend": NONE,
}
GROUPED = PRODUCT | {"group_offset": NONE, "lhs_qtype": NONE}
PACKED = {"format": INT4, "shards": constant((1, 1)), "lhs_qtype": NONE}
DTYPES = {"dtype": NONE, "param_dtype": constant(jnp.float32)}
ZEROS = constant(nn.initializers.zeros_init())
NORMAL = constant(nn.initializers.normal())
BIASED = {"use_bias": constant(True), "kernel_init": NORMAL, "bias_init": ZEROS}
RNGS = {"rngs": lambda: nnx.Rngs(0)}
LAYER = PACKED | DTYPES | RNGS
LINEN = PACKED | DTYPES | {"embedding_init": NORMAL}
LINEN_BIASED = PACKED | DTYPES | BIASED
TOKENS = constant(jnp.array([3, 1]))
PROMPTED = {
    "model": lambda: language_model(),
    "prompt": constant([3, 1, 4]),
    "max_new_tokens": constant(2),
    "temperature": constant(0.0),
    "top_p": NONE,
    "top_k": NONE,
    "seed": constant(0),
    "stop": constant(()),
}
CALLS = {
    "quantize": call(
        jl.quantize,
        weight=given("w"),
        format=INT4,
        quantizer=NONE,
        statistics=NONE,
        scale_dtype=NONE,
        shards=constant((1, 1)),
        permutation=NONE,
    ),
    "quantize_activations": call(
        jl.quantize_activations, activations=given("x"), dtype=constant(jnp.int8), factor=NONE
    ),
    "smoothing_factor": call(
        jl.quantizers.smoothing_factor,
        absmax=lambda: jnp.ones(K),
        weight=given("w"),
        alpha=constant(0.5),
    ),
    "statistics": call(
        jl.quantizers.Statistics.of,
        "Statistics.of",
        inputs=given("x"),
        full=constant(True),
    ),
    "calibration": call(
        jl.quantizers.Calibration,
        batches=constant([1, 2]),
        at_once=constant(1),
        samples=constant(4),
        progress=constant(False),
    ),
    "QuantizedActivations": call(
        jl.QuantizedActivations,
        values=lambda: jnp.ones((2, K), jnp.int8),
        scale=lambda: jnp.ones((2, 1)),
        dtype=constant(jnp.float32),
    ),
    "matmul": call(
        jl.quantized_matmul,
        lhs=given("x"),
        rhs=given("q"),
        bias=NONE,
        activation=NONE,
        residual=NONE,
        lhs_qtype=NONE,
        **PRODUCT,
    ),
    "integer_matmul": call(
        jl.integer_matmul,
        lhs=lambda: jnp.ones((2, K), jnp.int8),
        rhs=lambda: jl.quantize(arrays()["w"], "int8"),
        out_sharding=NONE,
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
    "ragged_dot": call(
        jl.quantized_ragged_dot,
        lhs=given("x"),
        rhs=given("experts"),
        group_sizes=lambda: jnp.array([1, 0, 2]),
        bias=NONE,
        activation=NONE,
        **GROUPED,
    ),
    "moe": call(
        jl.quantized_moe,
        x=given("x"),
        expert=lambda: jnp.array([[0, 2], [1, 1], [3, 0]]),
        weight=lambda: jnp.ones((3, 2)),
        gate_up=given("gate_up"),
        down=given("downs"),
        activation=constant("silu"),
        gate_up_bias=NONE,
        down_bias=NONE,
        num_experts=constant(8),
        **GROUPED,
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
        lambda **arguments: arrays()["pair"].partition_spec(**arguments),
        "partition_spec",
        "QuantizedArray",
        mesh=given("mesh"),
        k=NONE,
        n=constant("model"),
        lead=constant(()),
    ),
    "check_layout_version": call(jl.check_layout_version, tree=given("q")),
    "supported_backends": call(jl.supported_backends, lhs=given("x"), rhs=given("q")),
    "explain": call(jl.explain, lhs=given("x"), rhs=given("q"), device=constant("cpu")),
    "scan": call(
        jl.scan,
        f=constant(lambda carry, _: (carry, None)),
        init=given("x"),
        xs=given("pair"),
        length=NONE,
    ),
    "from_integers of groups": call(
        jl.QuantizedArray.from_integers,
        "from_integers",
        values=given("integers"),
        scale=lambda: jnp.ones((4, N)),
        format=constant("int4-g16"),
        g_idx=lambda: jnp.arange(K) % 4,
    ),
    "Format": call(
        jl.Format,
        bits=constant(4),
        group_size=constant(128),
        zero=constant("integer"),
        scale=NONE,
    ),
    "from_integers": call(
        jl.QuantizedArray.from_integers,
        "from_integers",
        values=given("integers"),
        scale=given("scale"),
        zero=NONE,
        format=INT4,
        shards=constant((1, 1)),
        permutation=NONE,
        tensor_scale=NONE,
        super_scale=NONE,
    ),
    "from_blocks": call(
        jl.QuantizedArray.from_blocks,
        "from_blocks",
        values=lambda: jnp.ones((K, N), jnp.float8_e4m3fn),
        scale=lambda: jnp.ones((1, 1)),
        block_size=constant((128, 128)),
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
        jl_nnx.quantize_model,
        model=Model,
        rules=INT4,
        keep=constant(()),
        shards=constant((1, 1)),
        lhs_qtype=NONE,
    ),
    "QuantizedLinear": call(
        jl_nnx.QuantizedLinear,
        in_features=constant(K),
        out_features=constant(N),
        preferred_element_type=NONE,
        **LAYER,
        **BIASED,
    ),
    "QuantizedLinear()": call(
        lambda **arguments: layers()["linear"](**arguments),
        "QuantizedLinear",
        inputs=given("x"),
        out_sharding=NONE,
    ),
    "QuantizedEmbed": call(
        jl_nnx.QuantizedEmbed,
        num_embeddings=constant(N),
        features=constant(K),
        embedding_init=NORMAL,
        **LAYER,
    ),
    "QuantizedEmbed()": call(
        lambda **arguments: layers()["embed"](**arguments),
        "QuantizedEmbed",
        inputs=TOKENS,
        out_sharding=NONE,
    ),
    "QuantizedEmbed.attend": call(
        lambda **arguments: layers()["embed"].attend(**arguments),
        "QuantizedEmbed",
        query=given("x"),
        out_sharding=NONE,
    ),
    "QuantizedLinearGeneral": call(
        jl_nnx.QuantizedLinearGeneral,
        in_features=constant((4, 16)),
        out_features=constant(N),
        axis=constant((-2, -1)),
        batch_axis=constant({}),
        preferred_element_type=NONE,
        **LAYER,
        **BIASED,
    ),
    "QuantizedLinearGeneral()": call(
        lambda **arguments: layers()["general"](**arguments),
        "QuantizedLinearGeneral",
        inputs=lambda: jnp.ones((3, 4, 16)),
        out_sharding=NONE,
    ),
    "QuantizedEinsum": call(
        jl_nnx.QuantizedEinsum,
        einsum_str=constant("bd,dnh->bnh"),
        kernel_shape=constant((K, 4, 32)),
        bias_shape=constant((4, 32)),
        kernel_init=NORMAL,
        bias_init=ZEROS,
        preferred_element_type=NONE,
        **LAYER,
    ),
    "QuantizedEinsum()": call(
        lambda **arguments: layers()["einsum"](**arguments),
        "QuantizedEinsum",
        inputs=given("x"),
        einsum_str=NONE,
        out_sharding=NONE,
    ),
    "from_embed": call(
        jl_nnx.QuantizedEmbed.from_embed,
        "QuantizedEmbed",
        embed=lambda: nnx.Embed(N, K, rngs=nnx.Rngs(0)),
        **PACKED,
    ),
    "from_linear_general": call(
        jl_nnx.QuantizedLinearGeneral.from_linear_general,
        "QuantizedLinearGeneral",
        linear=lambda: nnx.LinearGeneral(K, (4, 32), rngs=nnx.Rngs(0)),
        **PACKED,
    ),
    "from_einsum": call(
        jl_nnx.QuantizedEinsum.from_einsum,
        "QuantizedEinsum",
        einsum=lambda: nnx.Einsum("bd,df->bf", (K, N), rngs=nnx.Rngs(0)),
        **PACKED,
    ),
    "from_linear": call(
        jl_nnx.QuantizedLinear.from_linear,
        "QuantizedLinear",
        linear=lambda: Model().up,
        **PACKED,
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
        lhs_qtype=NONE,
    ),
    "quantize_pretrained": call(
        lambda rules, **options: jl_linen.quantize_pretrained(Pretrained(), rules, IDS, **options),
        "quantize_pretrained",
        "quantize_model",
        positional=("rules",),
        rules=constant({"": jl.INT8}),
        keep=constant(()),
        shards=constant((1, 1)),
        lhs_qtype=NONE,
    ),
    "EinsumParameter": call(
        jl_linen.EinsumParameter,
        path=constant("w$"),
        equation=constant("bd,df->bf"),
        module=NONE,
        embedding=constant(False),
        reader=NONE,
    ),
    "QuantizedDense": call(
        initialised(jl_linen.QuantizedDense, given("x")),
        "QuantizedDense",
        features=constant(N),
        **LINEN_BIASED,
    ),
    "QuantizedDense()": call(
        lambda inputs: applied("QuantizedDense")(inputs), "QuantizedDense", inputs=given("x")
    ),
    "linen.QuantizedEmbed": call(
        initialised(jl_linen.QuantizedEmbed, TOKENS),
        "QuantizedEmbed",
        num_embeddings=constant(N),
        features=constant(K),
        **LINEN,
    ),
    "linen.QuantizedEmbed()": call(
        lambda inputs: applied("QuantizedEmbed")(inputs), "QuantizedEmbed", inputs=TOKENS
    ),
    "linen.QuantizedEmbed.attend": call(
        lambda query: applied("QuantizedEmbed")(query, method="attend"),
        "QuantizedEmbed",
        query=given("x"),
    ),
    "QuantizedDenseGeneral": call(
        initialised(jl_linen.QuantizedDenseGeneral, given("x")),
        "QuantizedDenseGeneral",
        features=constant((4, 32)),
        axis=constant(-1),
        batch_dims=constant(()),
        **LINEN_BIASED,
    ),
    "QuantizedDenseGeneral()": call(
        lambda inputs: applied("QuantizedDenseGeneral")(inputs),
        "QuantizedDenseGeneral",
        inputs=given("x"),
    ),
    "linen.QuantizedEinsum": call(
        initialised(jl_linen.QuantizedEinsum, given("x")),
        "QuantizedEinsum",
        shape=constant((K, 4, 32)),
        einsum_str=constant("bd,dnh->bnh"),
        preferred_element_type=NONE,
        **LINEN_BIASED,
    ),
    "linen.QuantizedEinsum()": call(
        lambda inputs: applied("QuantizedEinsum")(inputs), "QuantizedEinsum", inputs=given("x")
    ),
    "linen.EinsumLayer": call(
        jl_linen.EinsumLayer,
        module=constant("mine.Einsum"),
        weight=constant("w"),
        equation=constant("bd,df->bf"),
        inputs=constant(0),
        bias=NONE,
    ),
    "QuantizedModel": call(
        lambda variables, x: quantized()[0].apply(variables, x),
        "quantize_model",
        "QuantizedModel",
        variables=lambda: quantized()[1],
        x=given("x"),
    ),
    "Config": call(llm.Config, **{name: constant(value) for name, value in SIZES.items()}),
    "RopeScaling": call(
        llm.RopeScaling,
        kind=constant("llama3"),
        factor=constant(8.0),
        original_context=constant(8192),
        low=constant(1.0),
        high=constant(4.0),
        beta_fast=constant(32.0),
        beta_slow=constant(1.0),
        attention_factor=NONE,
        factors=constant(()),
        mscale=NONE,
        mscale_all_dim=NONE,
        truncate=constant(True),
    ),
    "load": call(
        llm.load,
        path=lambda: model_file(),
        format=NONE,
        rules=NONE,
        quantizer=NONE,
        dtype=NONE,
        scale_dtype=NONE,
        mesh=NONE,
        progress=constant(False),
    ),
    "init": call(
        llm.init,
        config=lambda: config(),
        format=constant("int8"),
        seed=constant(0),
        dtype=NONE,
        mesh=NONE,
    ),
    "shard": call(llm.shard, model=lambda: language_model(), mesh=given("mesh")),
    "LoRA": call(
        llm.LoRA,
        rank=constant(2),
        alpha=constant(4.0),
        targets=constant(r"\.q$"),
        use_rslora=constant(False),
        seed=constant(0),
    ),
    "adapt": call(llm.adapt, model=lambda: language_model(), adapter=lambda: llm.LoRA(2)),
    "merge_adapter": call(
        llm.merge_adapter, model=lambda: adapted_model(), format=NONE, quantizer=NONE
    ),
    "mixed": call(
        jl.quantizers.mixed,
        errors=constant({"a": {"int3": 0.5, "int4": 0.1}, "b": {"int3": 0.1, "int4": 0.03}}),
        sizes=constant({"a": 1000, "b": 1000}),
        bits=constant(3.7),
    ),
    "Decoder": call(
        lambda **arguments: llm.Decoder(**arguments),
        "Decoder",
        config=lambda: config(),
        weights=lambda: floats(),
        dtype=constant(jnp.float32),
        mesh=NONE,
        consume=constant(False),
    ),
    "Decoder()": call(
        lambda tokens: language_model().decoder(tokens),
        "Decoder",
        tokens=constant(jnp.array([[3, 1, 4]])),
    ),
    "LanguageModel": call(
        llm.LanguageModel, decoder=lambda: language_model().decoder, tokenizer=NONE, report=NONE
    ),
    "generate": call(llm.generate, **PROMPTED),
    "Session": call(llm.Session, model=lambda: language_model()),
    "stream": call(lambda **arguments: list(llm.stream(**arguments)), "stream", **PROMPTED),
    "perplexity": call(
        llm.perplexity,
        model=lambda: language_model(),
        text=constant([3, 1, 4, 1, 5, 9]),
        context=constant(4),
        progress=constant(False),
    ),
    "bench": call(
        llm.bench,
        model=lambda: language_model(),
        batch=constant(1),
        prompt_tokens=constant(4),
        new_tokens=constant(2),
        repeats=constant(1),
    ),
    "tune": call(
        jl.tune,
        weights=constant(["4096x4096", (14336, 4096)]),
        tokens=constant([1, 16]),
        format=INT4,
        dtype=constant("bfloat16"),
        out=constant("/dev/null/tuned.json"),
        progress=constant(False),
    ),
}

ELSEWHERE = (*[*CALLS][[*CALLS].index("Config") :], "from_qarray", "quantize_pretrained")
"""Calls of `llm`, and calls that need qwix, a model, or a downloaded model."""
RESULTS = ("Generation", "Logprobs", "Perplexity", "Speed")
RESULTS += ("QuantizationReport", "QuantizedVariable", "Groups", "Statistics", "Plan")
"""Classes that only the package instantiates."""
WRITERS = ("save", "export", "save_adapter", "plan")
"""Functions that write to any path they get, or read a model for seconds. Other tests call them
wrongly: tests/checkpoint/test_checkpoint_saved.py, tests/llm/test_llm_lora.py and test_llm_plan.py.
"""


def uncalled(*modules: Any, but: Collection[str] = ()) -> list[str]:
    """The public functions and classes of modules without a call in `CALLS`."""
    called = {getattr(call.function, "__func__", call.function) for call in CALLS.values()}
    named = {name for call in CALLS.values() for name in call.names}
    return [
        f"{module.__name__}.{name}"
        for module in modules
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_")
        if value not in called and name not in named and name not in but
    ]
