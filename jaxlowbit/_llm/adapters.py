"""LoRA adapters: new ones, and folders in PEFT's format.

Source: PEFT 0.21, `tuners/lora`. A weight W (in, out) with an adapter is W + scaling * A B, with A
(in, r), B (r, out), and scaling = alpha / r, or alpha / sqrt(r) with `use_rslora`. Files have the
transposes of A and B.
"""

import dataclasses
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core import checks
from ..checkpoint._fields import Fields
from ..checkpoint._files import AGAIN, FLOATS, Tensor, read_file, read_json
from ..checkpoint._saved import write_file
from . import rope
from .architectures import (
    ARCHITECTURES,
    FUSED,
    IMAGE_MODELS,
    HuggingFace,
    fused,
    weight_name,
)
from .config import Config
from .huggingface import TEXT
from .low_rank import LowRank
from .sampling import SEED_RULE

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclasses.dataclass(frozen=True)
class LoRA:
    """A new adapter, to train: A is random and B is 0, so results do not change at first.

    **Arguments:**

    - `rank`: r, the number of columns of A.
    - `alpha`: the product A B is multiplied by `alpha / rank`.
    - `targets`: a regular expression that is searched (`re.search`) in the names of matrices
      (`Config.shapes`), such as `layers.0.q`.
    - `use_rslora`: whether it is multiplied by `alpha / sqrt(rank)` instead.
    - `seed`: seed of A, an integer of 64 bits.

    **Raises:** `TypeError` and `ValueError` for other arguments.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: str = r"\.(q|k|v|o|(dense_)?(gate|up|down))$"
    use_rslora: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        checks.integer("LoRA", "rank", self.rank, "a number of columns from 1 on")
        checks.positive("LoRA", "alpha", self.alpha)
        checks.boolean("LoRA", "use_rslora", self.use_rslora)
        checks.integer("LoRA", "seed", self.seed, SEED_RULE, least=-(2**63), most=2**63 - 1)
        if not isinstance(self.targets, str):
            raise TypeError(
                f"LoRA: targets is {checks.brief(self.targets)}, but it must be a regular "
                "expression on the names of matrices."
            )


class Part(NamedTuple):
    """The adapter of one matrix: a (k, rank), b (rank, n)."""

    a: Any
    b: Any
    scaling: float


def adapted(caller: str, adapter: Any, config: Config) -> dict[str, Part]:
    """The adapter of each weight of a model, new or from a folder.

    **Raises:** as `adapt` does.
    """
    return _new(adapter, config) if isinstance(adapter, LoRA) else _read(caller, adapter, config)


def with_adapter(weights: Mapping[str, Any], parts: Mapping[str, Part]) -> dict[str, Any]:
    """The weights of a model with an adapter."""
    found = dict(weights)
    for name, part in parts.items():
        a, b = jnp.asarray(part.a, jnp.float32), jnp.asarray(part.b, jnp.float32)
        found[name] = LowRank(weights[name], a, b, part.scaling)
    return found


def _new(adapter: LoRA, config: Config) -> dict[str, Part]:
    try:
        targets = re.compile(adapter.targets)
    except re.error as error:
        raise ValueError(
            f"LoRA: targets is {adapter.targets!r}, which is no regular expression: {error}."
        ) from None
    shapes = {name: x for name, x in _matrices(config).items() if targets.search(name)}
    if not shapes:
        raise ValueError(
            f"LoRA: targets is {adapter.targets!r}, which finds no matrix; names are head and "
            "layers.N.q, k, v, o, gate, up and down."
        )
    keys = jax.random.split(jax.random.key(adapter.seed % 2**32), len(shapes))
    scaling = _scaling(adapter.alpha, adapter.rank, adapter.use_rslora)
    return {
        # Kaiming's uniform distribution with a = sqrt(5), as in PEFT.
        name: Part(
            jax.random.uniform(key, (k, adapter.rank), jnp.float32, -(k**-0.5), k**-0.5),
            jnp.zeros((adapter.rank, n), jnp.float32),
            scaling,
        )
        for key, (name, (k, n)) in zip(keys, shapes.items(), strict=True)
    }


def _matrices(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of the matrices that take an adapter: no embedding, router or experts."""
    shapes = config.matrices().items()
    return {name: shape for name, shape in shapes if len(shape) == 2 and name != "embedding"}


def _scaling(alpha: float, rank: int, use_rslora: bool) -> float:
    return float(alpha) / (math.sqrt(rank) if use_rslora else rank)


# --- PEFT's files ---------------------------------------------------------------------------------

# Entries for training, and for finding modules, which the tensors of the file name already.
_HARMLESS = (
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "inference_mode"),
    *("peft_version", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "megatron_core", "qalora_group_size", "runtime_config", "eva_config"),
    *("ensure_weight_tying", "corda_config", "lora_ga_config"),
)
# Values of `init_lora_weights` that leave the weights of the model as they are.
_INITIAL = (True, False, "gaussian", "eva", "orthogonal", "mica")
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"^base_model\.model\.(.+)\.lora_([AB])\.weight$")
# Copies of weights of the model, which PEFT adds for an adapted head.
_COPY = re.compile(r"\.base_layer\.weight$")


class _Settings(NamedTuple):
    """The entries of adapter_config.json that are read."""

    path: Path
    rank: int
    alpha: float
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    use_rslora: bool

    def of(self, module: str) -> tuple[int, float]:
        """Rank and scaling of a module."""
        rank = _matched(self.ranks, module, self.rank)
        alpha = _matched(self.alphas, module, self.alpha)
        good = isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float)
        if not good or isinstance(alpha, bool):
            raise ValueError(
                f"{self.path}: r is {checks.brief(rank)} and lora_alpha {checks.brief(alpha)} for "
                f"{module!r}, but they must be a rank from 1 on and a number; {AGAIN}."
            )
        return rank, _scaling(alpha, rank, self.use_rslora)


def _matched(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that is the end of the name of a module, as in PEFT."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _read(caller: str, path: Any, config: Config) -> dict[str, Part]:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"{caller}: adapter is {checks.brief(path)}, but it must be a folder in PEFT's format, "
            "or a LoRA."
        )
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{caller}: the adapter {path} does not exist; name its folder.")
    if not (path / CONFIG).is_file():
        raise ValueError(f"{caller}: {path} has no {CONFIG}; name the folder of a PEFT adapter.")
    if not (path / WEIGHTS).is_file():
        old = " It has its weights in adapter_model.bin; save it again with a newer PEFT."
        old = old if (path / "adapter_model.bin").is_file() else ""
        raise ValueError(f"{caller}: {path} has no {WEIGHTS}.{old}")
    try:
        settings = _settings(path / CONFIG)
        return _parts(path / WEIGHTS, settings, config)
    except ValueError as error:
        raise ValueError(f"{caller}: {error}") from None


def _settings(path: Path) -> _Settings:
    found = Fields(path, read_json(path))
    found.expect("peft_type", "LORA", "LORA")
    found.expect("bias", "none", "none")
    found.expect("init_lora_weights", True, *_INITIAL)
    for name in ("fan_in_fan_out", "use_dora", "use_qalora", "lora_bias"):
        found.expect(name, False, False)
    settings = _Settings(
        path,
        found.get("r", "an integer", 8),
        found.get("lora_alpha", "a number", 8),
        found.get("rank_pattern", "an object", {}),
        found.get("alpha_pattern", "an object", {}),
        found.get("use_rslora", "true or false", False),
    )
    for key in (*settings.ranks, *settings.alphas):
        found.pattern("rank_pattern or alpha_pattern", key)
    unknown = {
        name: value
        for name, value in found.values.items()
        if name not in found.read and name not in _HARMLESS and value
    }
    for name, value in unknown.items():
        raise ValueError(
            f"{path}: {name!r} is {checks.brief(value)}, but an adapter may only add a "
            "product of two matrices to weights; merge it into its model with peft's "
            "merge_and_unload(), and load that."
        )
    return settings


def _parts(path: Path, settings: _Settings, config: Config) -> dict[str, Part]:
    names, expected = _names(config), _matrices(config)
    modules: dict[str, dict[str, Tensor]] = {}
    for tensor in read_file(path)[0]:
        match = _TENSOR.match(tensor.name)
        if match is None and _COPY.search(tensor.name):
            continue
        if match is None:
            raise ValueError(
                f"{tensor.where} is no lora_A or lora_B of a matrix; merge the adapter into its "
                "model with peft's merge_and_unload(), and load that."
            )
        modules.setdefault(match[1], {})[match[2]] = tensor
    if not modules:
        raise ValueError(f"{path} has no tensors of an adapter; {AGAIN}.")
    found: dict[str, Part] = {}
    for module, pair in modules.items():
        ours = weight_name(TEXT.sub("", module) + ".weight", names.tensors)
        targets = () if ours is None else fused(ours) or (ours,)
        if not targets or not all(name in expected for name in targets):
            raise ValueError(
                f"{path}: {module!r} is no matrix of {config.architecture} with {config.layers} "
                f"layers{' and a tied head' if config.tied_head else ''} that can have an adapter; "
                "use the adapter of this model."
            )
        rows = [expected[name][1] for name in targets]
        rank, scaling = settings.of(module)
        a, b = _pair(path, module, pair, rank, expected[targets[0]][0], sum(rows))
        for name, part in zip(targets, np.split(b, np.cumsum(rows)[:-1]), strict=True):
            found[name] = Part(a.T, _permuted(part, name, config, names).T, scaling)
    return found


def _pair(
    path: Path, module: str, pair: Mapping[str, Tensor], rank: int, k: int, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a module in float32, as in the file."""
    if len(pair) < 2:
        raise ValueError(f"{path}: {module!r} has no lora_{'AB'['A' in pair]}; {AGAIN}.")
    found = []
    for letter, shape in (("A", (rank, k)), ("B", (n, rank))):
        values = pair[letter].check(FLOATS, shape).array().astype(np.float32)
        if not np.isfinite(values).all():
            raise ValueError(f"{pair[letter].where} has values that are NaN or infinite; {AGAIN}.")
        found.append(values)
    return found[0], found[1]


def _names(config: Config) -> HuggingFace:
    names = ARCHITECTURES[config.architecture].huggingface
    if names is None:
        raise ValueError(f"transformers lacks {config.architecture}; no adapter of it exists.")
    return names


def _permuted(
    b: np.ndarray, name: str, config: Config, names: HuggingFace, *, back: bool = False
) -> np.ndarray:
    """B (n, rank) with its rows in the order of the model.

    llama.cpp's converter permutes the rows of queries and keys of some architectures.
    """
    if name.rpartition(".")[2] not in ("q", "k") or config.rope_pairs == names.rope_pairs:
        return b
    order = rope.order(len(b), config.head_size)
    return b[np.argsort(order) if back else order]


def write_adapter(
    folder: Path, adapted: Mapping[str, LowRank], config: Config, source: Path | None
) -> None:
    """Writes the files of an adapter of the model in the file `source`."""
    names = _names(config)
    shapes, theirs = config.shapes(), {ours: x for x, ours in reversed([*names.tensors.items()])}
    tensors: dict[str, np.ndarray] = {}
    ranks, alphas = {}, {}
    prefix = _decoder_prefix(source)
    for module, parts in dict(_module(ours, theirs) for ours in adapted).items():
        found = {ours: adapted[ours] for ours in parts if ours in adapted}
        b = {
            ours: _permuted(np.asarray(weight.b).T, ours, config, names, back=True)
            for ours, weight in found.items()
        }
        a, b, scaling = _joined(found, b, {ours: shapes[ours][1] for ours in parts})
        module = module if module == "lm_head" else prefix + module
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = a
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = b
        ranks[module], alphas[module] = len(a), scaling * len(a)
    write_file(folder / WEIGHTS, tensors, {"format": "pt"})
    text = json.dumps(_config(ranks, alphas, source), indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def _module(ours: str, theirs: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """The module of a weight in transformers, without its prefix, and the weights in it."""
    if ours == "head":
        return "lm_head", (ours,)
    _, number, own = ours.split(".")
    stems = [own, *(stem for stem, parts in FUSED.items() if own in parts)]
    stem = next(stem for stem in stems if f"layers.N.{stem}" in theirs)
    module = theirs[f"layers.N.{stem}"].replace(".N.", f".{number}.").removesuffix(".weight")
    return module, fused(f"layers.{number}.{stem}") or (ours,)


def _decoder_prefix(source: Path | None) -> str:
    """The prefix of the modules of the decoder in transformers, for a model from `source`."""
    config = None if source is None else source / "config.json"
    values = read_json(config) if config is not None and config.is_file() else {}
    return "model.language_model." if values.get("model_type") in IMAGE_MODELS else "model."


def _joined(
    found: Mapping[str, LowRank], b: Mapping[str, np.ndarray], rows: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray, float]:
    """A (rank, k), B (n, rank) and the scaling of a module with the weights in `rows`.

    Weights with one A share it. Otherwise the ranks add up, and B is block-diagonal.
    """
    scaling = next(iter(found.values())).scaling
    parts = {ours: np.asarray(weight.a).T for ours, weight in found.items()}
    first = next(iter(parts.values()))
    shared = all(
        np.array_equal(parts[ours], first) and weight.scaling == scaling
        for ours, weight in found.items()
    )
    a = first if shared else np.concatenate([*parts.values()])
    joined = np.zeros((sum(rows.values()), len(a)), np.float32)
    row = column = 0
    for ours, count in rows.items():
        if ours in found:
            rank = len(parts[ours])
            factor = np.float32(found[ours].scaling / scaling)
            joined[row : row + count, column : column + rank] = b[ours] * factor
            column += 0 if shared else rank
        row += count
    return np.ascontiguousarray(a), joined, scaling


def _config(
    ranks: Mapping[str, int], alphas: Mapping[str, float], source: Path | None
) -> dict[str, Any]:
    """The entries of adapter_config.json. `r` and `lora_alpha` have the most common values; the
    patterns list the other layers."""
    r, alpha = (Counter(x.values()).most_common(1)[0][0] for x in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if source is None else str(source),
        "inference_mode": True,
        "r": r,
        "lora_alpha": alpha,
        "rank_pattern": {re.escape(x): y for x, y in ranks.items() if y != r},
        "alpha_pattern": {re.escape(x): y for x, y in alphas.items() if y != alpha},
        "target_modules": sorted(ranks),
        "lora_dropout": 0.0,
        "bias": "none",
    }
