"""`Config`: the parts and sizes of a decoder, and the frequencies of its rotation."""

import dataclasses
import math
from typing import Any, Literal, get_args

import numpy as np

from .._core.checks import LARGEST, SMALLEST, brief
from .architectures import ARCHITECTURES, Activation, NormPlacement, QkNorm, RopePairs

RopeKind = Literal["linear", "llama3", "yarn", "factors", "longrope"]

# Larger sizes mean that a file is damaged.
MOST = {
    "layers": 10_000,
    "width": 2**20,
    "heads": 2**14,
    "kv_heads": 2**14,
    "head_size": 2**14,
    "hidden": 2**22,
    "dense_hidden": 2**22,
    "experts": 2**14,
    "vocabulary": 2**24,
    "context": 2**31 - 1,
}
_MATRICES = (
    *("q", "k", "v", "o", "gate", "up", "down", "dense_gate", "dense_up", "dense_down"),
    *("embedding", "head"),
)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The scaling of a rotation's frequencies, for contexts longer than in training.

    **Arguments:**

    - `kind`: `"linear"` divides every frequency by `factor`. `"llama3"` divides frequencies with
      wavelengths above `original_context / low`, keeps frequencies with wavelengths below
      `original_context / high`, and blends between the two. `"yarn"` (Peng et al., 2023) blends
      between the frequencies that turn `beta_fast` and `beta_slow` times within
      `original_context`. `"factors"` divides each frequency by its entry of `factors`, the numbers
      of llama.cpp's tensor `rope_freqs`. `"longrope"` (Ding et al., 2024) divides by `factors`, or
      by `long_factors` if the cache has more slots than `original_context`.
    - `factor`: the divisor of lowered frequencies, at least 1; for `"factors"`, of all frequencies;
      for longrope, the ratio of the context to `original_context`, which only `amplitude` uses.
    - `original_context`: the context in training; for llama3, yarn and longrope.
    - `low`, `high`: for llama3.
    - `beta_fast`, `beta_slow`: for yarn.
    - `attention_factor`: the factor of sines and cosines. The default is 1, except for yarn: `0.1
      ln(factor) + 1`, or with `mscale` and `mscale_all_dim` the ratio `(0.1 mscale ln(factor) + 1)
      / (0.1 mscale_all_dim ln(factor) + 1)`; and for longrope: `sqrt(1 + ln(factor) /
      ln(original_context))`.
    - `factors`, `long_factors`: for `"factors"` and longrope, one for each pair of elements that
      rotates; `long_factors` only for longrope.
    - `mscale`, `mscale_all_dim`: for yarn, both or neither.
    - `truncate`: for yarn, whether the first and the last blended pair are rounded to integers.

    **Raises:** `ValueError` with the field, its value and its range.

    ```python
    RopeScaling("llama3", factor=8.0, original_context=8192)
    ```
    """

    kind: RopeKind
    factor: float = 1.0
    original_context: int = 0
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _one_of("RopeScaling", "kind", self.kind, get_args(RopeKind))
        for name in ("factor", "low", "high", "beta_fast", "beta_slow"):
            _positive("RopeScaling", name, getattr(self, name))
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                _positive("RopeScaling", name, getattr(self, name))
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(
                f"RopeScaling: mscale={self.mscale!r} and mscale_all_dim={self.mscale_all_dim!r}, "
                "but the factor of sines and cosines is a ratio of both; give both or neither."
            )
        _one_of("RopeScaling", "truncate", self.truncate, (False, True))
        if self.factor < 1:
            raise ValueError(
                f"RopeScaling: factor={self.factor!r}, but frequencies are divided by 1 or more; "
                "write the inverse."
            )
        if self.kind in ("llama3", "yarn", "longrope"):
            _size("RopeScaling", "original_context", self.original_context, MOST["context"])
        if self.low >= self.high or self.beta_slow >= self.beta_fast:
            raise ValueError(
                f"RopeScaling: low={self.low!r}, high={self.high!r}, beta_slow={self.beta_slow!r} "
                f"and beta_fast={self.beta_fast!r}, but low is below high and beta_slow below "
                "beta_fast; exchange them."
            )
        self._check_factors()

    def _check_factors(self) -> None:
        lists = {"factors": ("factors", "longrope"), "long_factors": ("longrope",)}
        for name, kinds in lists.items():
            factors = getattr(self, name)
            if not isinstance(factors, tuple):
                raise ValueError(
                    f"RopeScaling: {name}={factors!r}, but it must be a tuple of numbers; correct "
                    "it."
                )
            if (self.kind in kinds) != bool(factors):
                raise ValueError(
                    f"RopeScaling: kind={self.kind!r} with {len(factors)} numbers in {name}, but "
                    f"only {' and '.join(map(repr, kinds))} have some; make the two agree."
                )
            for factor in factors:
                _positive("RopeScaling", name, factor)
        if self.long_factors and len(self.long_factors) != len(self.factors):
            raise ValueError(
                f"RopeScaling: {len(self.factors)} factors and {len(self.long_factors)} "
                "long_factors, but both have one number for each pair of elements; correct them."
            )

    @property
    def amplitude(self) -> float:
        """The factor of sines and cosines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))
        if self.kind != "yarn":
            return 1.0
        grown = 0.1 * math.log(self.factor)
        if self.mscale is None or self.mscale_all_dim is None:
            return grown + 1.0
        return (self.mscale * grown + 1.0) / (self.mscale_all_dim * grown + 1.0)

    def lowered(self, frequencies: np.ndarray, base: float, *, long: bool = False) -> np.ndarray:
        """The scaled frequencies, float64 (pairs,), of a rotation with this base.

        `long`: whether to use `long_factors`.
        """
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "longrope":
            return frequencies / np.asarray(self.long_factors if long else self.factors)
        if self.kind == "factors":
            return frequencies / (np.asarray(self.factors) * self.factor)
        if self.kind == "llama3":
            turns = self.original_context * frequencies / (2 * math.pi)
            kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        else:
            kept = 1 - self._yarn_ramp(len(frequencies), base)
        return kept * frequencies + (1 - kept) * frequencies / self.factor

    def _yarn_ramp(self, pairs: int, base: float) -> np.ndarray:
        """The blend of each pair: 0 for pairs that turn fast, 1 for pairs that turn slowly."""

        def pair(turns: float) -> float:
            wave = self.original_context / (2 * math.pi * turns)
            return pairs * math.log(wave) / math.log(base)

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        return np.clip((np.arange(pairs) - low) / (high - low or 0.001), 0, 1)


@dataclasses.dataclass(frozen=True)
class Config:
    """The parts and sizes of a decoder.

    **Arguments:**

    - `architecture`: a name in `ARCHITECTURES`, such as `"llama"`: the names in files and errors;
      the other fields describe all differences.
    - `layers`, `width`, `heads`, `kv_heads`, `head_size`, `hidden`, `vocabulary`: sizes.
      `kv_heads` divides `heads`; `hidden` is the width of the gated MLP.
    - `context`: maximum number of positions.
    - `global_head_size`, `global_kv_heads`: of the layers without a window, if they differ from the
      other layers; else None.
    - `keys_as_values`: whether the layers without a window have no value projection: their values
      are the products with the key weights, before norm and rotation.
    - `value_norm`: whether each head of values has an RMS norm without factors.
    - `norm_epsilon`: added to mean squares.
    - `rope_base`, `rope_pairs`: the base of the rotation's frequencies, and the elements of a head
      that rotate together: 2i and 2i + 1 (`"neighbours"`) or i and i + rope_size / 2 (`"halves"`).
    - `rope_size`: the number of elements of a head, from the first on, that rotate; None for all.
    - `rope_scaling`: None, or a `RopeScaling` for global layers.
    - `rope_layers`: for each layer, whether its queries and keys rotate; () if all do.
    - `local_rope_base`: the base in layers with a window, unscaled; None if they rotate like the
      other layers.
    - `window`: None, or the number of positions that local layers attend to, including their own.
    - `window_layers`: with a window, for each layer whether it is local; () if all are.
    - `qk_norm`: None, or RMS norms of queries and keys before the rotation: of each `"head"`, or of
      `"all"` heads together.
    - `attention_bias`, `output_bias`, `mlp_bias`: biases of the query, key and value projections,
      of the output projection, and of the three projections of the MLP.
    - `tied_head`: whether the embedding table is also the head.
    - `activation`: activation of the gate, `"silu"` or `"gelu_tanh"`, or, of experts,
      `"gpt_oss"`, gpt-oss's (`jaxlowbit.quantized_moe`).
    - `experts`, `experts_per_token`: in models whose MLPs are mixtures of experts, the number of
      experts and the number that each token takes; `hidden` is the width of one. 0 for one MLP.
    - `normalized_experts`: whether the weights of the experts of a token are divided by their sum.
      A weight is the softmax of the router's logits, in float32.
    - `router_bias`: whether the router has a bias.
    - `router_norm`: whether the router reads the residual stream with a separate norm, whose
      factors are `router_norm * width ** -0.5`, and multiplies the weights of the selected experts
      by their `expert_scale`.
    - `dense_hidden`: in models with experts, the width of a dense MLP, which all tokens take too; 0
      for none. Inputs and results of both have separate norms: `mlp_norm` and `post_dense_norm` of
      the MLP, `expert_norm` and `post_expert_norm` of the experts, `post_mlp_norm` of the sum.
    - `layer_scale`: whether each layer multiplies the residual stream after it by a number.
    - `sinks`: whether each head has a logit, `sinks`, in the denominator of its softmax.
    - `norm_placement`: norms of the inputs of attention and MLP (`"pre"`), of their results
      (`"post"`), or of both (`"pre_and_post"`).
    - `norm_offset`: added to the scales of all norms.
    - `embedding_scale`, `residual_scale`, `logit_scale`: factors of embeddings, of the results of
      attention and MLP before they are added, and of logits.
    - `attention_scale`: factor of scores; None for `head_size ** -0.5`.
    - `attention_softcap`, `logit_softcap`: None, or the bound c in `c tanh(x / c)` of scores x and
      of logits x.
    - `attention_temperature`: None, or (b, n): queries at position p are multiplied by
      `1 + b ln(1 + floor(p / n))`.
    - `bos`, `eos`: the token that begins texts, or None, and the tokens that end them.

    **Raises:** `ValueError` with the field, its value and its range.

    ```python
    Config("llama", layers=2, width=64, heads=4, kv_heads=2, head_size=16, hidden=128,
           vocabulary=256, context=512)
    ```
    """

    architecture: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    vocabulary: int
    context: int
    global_head_size: int | None = None
    global_kv_heads: int | None = None
    keys_as_values: bool = False
    value_norm: bool = False
    norm_epsilon: float = 1e-5
    rope_base: float = 10000.0
    rope_pairs: RopePairs = "halves"
    rope_size: int | None = None
    rope_scaling: RopeScaling | None = None
    rope_layers: tuple[bool, ...] = ()
    local_rope_base: float | None = None
    window: int | None = None
    window_layers: tuple[bool, ...] = ()
    qk_norm: QkNorm | None = None
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False
    activation: Activation = "silu"
    experts: int = 0
    experts_per_token: int = 0
    normalized_experts: bool = True
    router_bias: bool = False
    router_norm: bool = False
    dense_hidden: int = 0
    layer_scale: bool = False
    sinks: bool = False
    norm_placement: NormPlacement = "pre"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_temperature: tuple[float, int] | None = None
    logit_softcap: float | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _one_of("Config", "architecture", self.architecture, tuple(ARCHITECTURES))
        for name, most in MOST.items():
            if name not in ("experts", "dense_hidden") or getattr(self, name) != 0:
                _size("Config", name, getattr(self, name), most)
        for name in ("head_size", "kv_heads"):
            if (size := getattr(self, f"global_{name}")) is not None:
                _size("Config", f"global_{name}", size, MOST[name])
        for name in ("kv_heads", "global_kv_heads"):
            if (size := getattr(self, name)) is not None and self.heads % size:
                raise ValueError(
                    f"Config: heads={self.heads} and {name}={size}, but heads of queries share "
                    f"those of keys equally; {name} divides heads."
                )
        self._check_experts()
        _one_of("Config", "qk_norm", self.qk_norm, (None, *get_args(QkNorm)))
        _one_of("Config", "activation", self.activation, get_args(Activation))
        _one_of("Config", "norm_placement", self.norm_placement, get_args(NormPlacement))
        for name in ("norm_epsilon", "embedding_scale", "residual_scale", "logit_scale"):
            _positive("Config", name, getattr(self, name))
        for name in ("attention_scale", "attention_softcap", "logit_softcap"):
            if getattr(self, name) is not None:
                _positive("Config", name, getattr(self, name))
        _number("Config", "norm_offset", self.norm_offset)
        for name in (
            *("attention_bias", "output_bias", "mlp_bias", "tied_head"),
            *("normalized_experts", "router_bias", "router_norm", "sinks"),
            *("keys_as_values", "value_norm", "layer_scale"),
        ):
            _one_of("Config", name, getattr(self, name), (False, True))
        if self.window is not None:
            _size("Config", "window", self.window, MOST["context"])
        self._check_layers()
        self._check_temperature()
        self._check_rotation()
        for name, tokens in (("bos", () if self.bos is None else (self.bos,)), ("eos", self.eos)):
            for token in tokens if isinstance(tokens, tuple) else (tokens,):
                if type(token) is not int or not 0 <= token < self.vocabulary:
                    raise ValueError(
                        f"Config: {name} has the token {token!r}, but tokens are integers from 0 "
                        f"to {self.vocabulary - 1}; name one of the vocabulary."
                    )

    def _check_experts(self) -> None:
        if self.experts:
            _size("Config", "experts_per_token", self.experts_per_token, self.experts)
            self._check_dense()
            return
        off = {"experts_per_token": 0, "router_bias": False, "router_norm": False}
        off |= {"dense_hidden": 0}
        for name, value in off.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"Config: {name}={getattr(self, name)!r} without experts; set experts, or "
                    f"leave {name} out."
                )
        if self.activation == "gpt_oss":
            raise ValueError(
                "Config: activation='gpt_oss' without experts, whose activation it is; set "
                "experts, or use 'silu'."
            )

    def _check_dense(self) -> None:
        if not self.dense_hidden:
            return
        if self.mlp_bias or self.norm_placement != "pre_and_post" or self.residual_scale != 1:
            raise ValueError(
                f"Config: dense_hidden={self.dense_hidden} with mlp_bias={self.mlp_bias}, "
                f"norm_placement={self.norm_placement!r} and residual_scale="
                f"{self.residual_scale!r}, but a dense MLP in addition to experts has no biases, "
                "and norms of inputs and results, 'pre_and_post', without a scale; correct one."
            )

    def _check_layers(self) -> None:
        for name in ("window_layers", "rope_layers"):
            layers = getattr(self, name)
            booleans = isinstance(layers, tuple) and all(type(layer) is bool for layer in layers)
            if not booleans or len(layers) not in (0, self.layers):
                raise ValueError(
                    f"Config: {name}={brief(layers)}, but it must be a tuple of True or False for "
                    f"each of the {self.layers} layers, or (); correct it."
                )

    def _check_temperature(self) -> None:
        found = self.attention_temperature
        if found is None:
            return
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(
                f"Config: attention_temperature={found!r}, but it must be None or a factor and a "
                "number of positions; correct it."
            )
        _positive("Config", "attention_temperature[0]", found[0])
        _size("Config", "attention_temperature[1]", found[1], MOST["context"])
        if self.qk_norm == "head":
            raise ValueError(
                f"Config: attention_temperature={found!r} with qk_norm='head', whose norms would "
                "cancel it; set one of the two to None."
            )

    def _check_rotation(self) -> None:
        _one_of("Config", "rope_pairs", self.rope_pairs, get_args(RopePairs))
        _positive("Config", "rope_base", self.rope_base)
        if self.local_rope_base is not None:
            _positive("Config", "local_rope_base", self.local_rope_base)
        if self.rope_size is not None:
            smallest = min(self.head_size, self.global_head_size or self.head_size)
            _size("Config", "rope_size", self.rope_size, smallest)
        for local, name in ((True, "head_size"), (False, "global_head_size")):
            if (size := self.rotated_size(local=local)) % 2:
                name = "rope_size" if self.rope_size else name
                raise ValueError(
                    f"Config: {name}={size}, but elements rotate in pairs; it is even."
                )
        scaling = self.rope_scaling
        if scaling is None:
            return
        if not isinstance(scaling, RopeScaling):
            raise ValueError(
                f"Config: rope_scaling={scaling!r}, but it must be None or a RopeScaling; make one."
            )
        if scaling.kind == "yarn" and self.rope_base <= 1:
            raise ValueError(
                f"Config: rope_base={self.rope_base!r} with yarn, whose range of blended pairs is "
                "that of a base above 1; correct one of the two."
            )
        scaled = {self.is_local(i) for i in range(self.layers)} & {
            False,
            self.local_rope_base is None,
        }
        for local in sorted(scaled):
            size = self.rotated_size(local=local)
            if scaling.factors and len(scaling.factors) != size // 2:
                raise ValueError(
                    f"Config: rope_scaling has {len(scaling.factors)} factors, but heads of "
                    f"{size} have {size // 2} pairs of elements that rotate; "
                    "give one for each."
                )

    def replace(self, **changes: Any) -> "Config":
        """Returns this configuration with some fields changed, checked like a new one."""
        return dataclasses.replace(self, **changes)

    def head_sizes(self, *, local: bool) -> tuple[int, int]:
        """The number of heads of keys, and the size of a head, in layers with a window (`local`)
        or without one."""
        if local:
            return self.kv_heads, self.head_size
        return self.global_kv_heads or self.kv_heads, self.global_head_size or self.head_size

    def rotated_size(self, *, local: bool) -> int:
        """The number of elements of a head that rotate, in layers with a window or without one."""
        return self.head_sizes(local=local)[1] if self.rope_size is None else self.rope_size

    def projections(self, layer: int) -> tuple[str, ...]:
        """The names of the weights of queries, keys and values of a layer, counted from 0."""
        return ("q", "k") if self.keys_as_values and not self.is_local(layer) else ("q", "k", "v")

    def is_local(self, layer: int) -> bool:
        """Whether a layer, counted from 0, attends only to its window."""
        return self.window is not None and (not self.window_layers or self.window_layers[layer])

    def rotates(self, layer: int) -> bool:
        """Whether queries and keys of a layer, counted from 0, rotate."""
        return not self.rope_layers or self.rope_layers[layer]

    def takes_long_factors(self, slots: int) -> bool:
        """Whether keys in a cache with this number of slots rotate by longrope's long factors."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "longrope":
            return False
        return slots > scaling.original_context

    def rope_frequencies(self, *, local: bool = False, long: bool = False) -> np.ndarray:
        """Angles in radians between consecutive positions, for each pair of elements.

        **Arguments:**

        - `local`: whether for layers with a window, which may have another base.
        - `long`: whether by the long factors of longrope.

        **Returns:** float32 (rotated_size / 2,), with `rope_scaling`, but without its `amplitude`,
        the factor of sines and cosines.

        ```python
        config.rope_frequencies()[0]  # 1, unless scaled
        ```
        """
        apart = local and self.local_rope_base is not None
        base = self.local_rope_base if apart and self.local_rope_base else self.rope_base
        size = self.rotated_size(local=local)
        frequencies = base ** (-np.arange(0, size, 2, dtype=np.float64) / size)
        if self.rope_scaling is not None and not apart:
            frequencies = self.rope_scaling.lowered(frequencies, base, long=long)
        return frequencies.astype(np.float32)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight, by name; matrices are (in, out).

        The embedding is (width, vocabulary), and so is the head, which a tied model does not have.
        Weights of experts have a leading axis, as in (experts, width, hidden).

        ```python
        config.shapes()["layers.0.q"]
        ```
        """
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.width, self.vocabulary)}
        for i in range(self.layers):
            layer = self._layer_shapes(i)
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes["final_norm"] = (self.width,)
        if not self.tied_head:
            shapes["head"] = (self.width, self.vocabulary)
        return shapes

    def _layer_shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        kv_heads, size = self.head_sizes(local=self.is_local(index))
        queries, keys = self.heads * size, kv_heads * size
        width, hidden = self.width, self.hidden
        features = {"q": queries, "k": keys, "v": keys}
        names = self.projections(index)
        lead = (self.experts,) if self.experts else ()
        layer: dict[str, tuple[int, ...]] = {name: (width, features[name]) for name in names}
        layer |= {
            "o": (queries, width),
            "gate": (*lead, width, hidden),
            "up": (*lead, width, hidden),
            "down": (*lead, hidden, width),
        }
        if self.experts:
            layer |= {"router": (width, self.experts)}
        if self.router_bias:
            layer |= {"router_bias": (self.experts,)}
        if self.router_norm:
            layer |= {"router_norm": (width,), "expert_scale": (self.experts,)}
        if self.dense_hidden:
            layer |= dict.fromkeys(("dense_gate", "dense_up"), (width, self.dense_hidden))
            layer |= {"dense_down": (self.dense_hidden, width)}
            layer |= dict.fromkeys(("expert_norm", "post_dense_norm", "post_expert_norm"), (width,))
        if self.sinks:
            layer |= {"sinks": (self.heads,)}
        if self.norm_placement != "post":
            layer |= {"attention_norm": (width,), "mlp_norm": (width,)}
        if self.norm_placement != "pre":
            layer |= {"post_attention_norm": (width,), "post_mlp_norm": (width,)}
        if self.attention_bias:
            layer |= {f"{name}_bias": (features[name],) for name in names}
        if self.output_bias:
            layer |= {"o_bias": (width,)}
        if self.mlp_bias:
            layer |= {"gate_bias": (*lead, hidden), "up_bias": (*lead, hidden)}
            layer |= {"down_bias": (*lead, width)}
        if self.qk_norm == "head":
            layer |= {"q_norm": (size,), "k_norm": (size,)}
        if self.qk_norm == "all":
            layer |= {"q_all_norm": (queries,), "k_all_norm": (keys,)}
        if self.layer_scale:
            layer |= {"layer_scale": (1,)}
        return layer

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights that formats quantize: matrices, and stacks of them.

        A router stays float32.

        ```python
        config.matrices()["layers.0.q"]
        ```
        """
        return {name: shape for name, shape in self.shapes().items() if is_matrix(name)}


def is_matrix(name: str) -> bool:
    """Whether a weight of this name is a matrix or a stack of matrices, and no router."""
    last = name.rpartition(".")[2]
    return last in _MATRICES


def check_config(caller: str, config: object) -> None:
    """Raises unless `config` is a `Config`.

    **Raises:** `TypeError`.
    """
    if not isinstance(config, Config):
        raise TypeError(
            f"{caller}: config is {brief(config)}, but it must be a Config, such as that of a "
            "model, model.config."
        )


def _size(owner: str, name: str, value: object, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(
            f"{owner}: {name}={value!r}, but it must be an integer from 1 to {most}; correct it."
        )


def _number(owner: str, name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST:
        return value
    raise ValueError(
        f"{owner}: {name}={value!r}, but it must be a finite number, also in float32; correct it."
    )


def _positive(owner: str, name: str, value: object) -> None:
    if (number := _number(owner, name, value)) <= 0:
        raise ValueError(f"{owner}: {name}={value!r}, but it must be above 0; correct it.")
    if number < SMALLEST:
        raise ValueError(
            f"{owner}: {name}={value!r}, which float32 rounds to 0; it is {SMALLEST:.3g} or more."
        )


def _one_of(owner: str, name: str, value: object, choices: tuple[Any, ...]) -> None:
    if not any(
        value is choice or (isinstance(value, str) and value == choice) for choice in choices
    ):
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{owner}: {name}={value!r}, but it must be one of {listed}; correct it.")
