"""`LanguageModel`: a decoder with its tokenizer, from files or with random weights."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._core import checks
from .._core.format import INT4, Format, as_format
from .._flax import arguments
from . import exporting, huggingface, saved
from .adapters import adapted, with_adapter
from .config import Config, check_config
from .decoder import Decoder, check_rows
from .load import Header, LoadReport, read, read_header
from .random_weights import random_weights
from .sampling import SEED_RULE


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A decoder with its tokenizer and the report of loading.

    The argument of `generate`, `stream` and `perplexity`. Without a tokenizer, prompts are tokens.

    **Arguments:**

    - `decoder`: a `Decoder`.
    - `tokenizer`: None, or an object with the methods `encode`, `decode` and `decode_stream` of the
      tokenizers of `load`, and `chat` for prompts that are messages.
    - `report`: None, or the report of `load`.

    **Raises:** `TypeError` for arguments of other types.
    """

    decoder: Decoder
    tokenizer: Any = None
    report: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.decoder, Decoder):
            raise TypeError(
                f"LanguageModel: decoder is {checks.brief(self.decoder)}, but it must be a Decoder."
            )
        methods = ("encode", "decode", "decode_stream")
        lacking = [name for name in methods if not callable(getattr(self.tokenizer, name, None))]
        if self.tokenizer is not None and (lacking or isinstance(self.tokenizer, type)):
            raise TypeError(
                f"LanguageModel: tokenizer is {checks.brief(self.tokenizer)}, but it must be None "
                f"or an object with the methods {', '.join(methods)}; pass that of a loaded model, "
                "model.tokenizer."
            )
        if not isinstance(self.report, LoadReport | None):
            raise TypeError(
                f"LanguageModel: report is {checks.brief(self.report)}, but it must be None or the "
                "report of a loaded model, model.report."
            )

    @property
    def config(self) -> Config:
        return self.decoder.config


def check_model(caller: str, model: Any) -> None:
    """Raises unless `model` is a `LanguageModel`.

    **Raises:** `TypeError`.
    """
    if not isinstance(model, LanguageModel):
        raise TypeError(
            f"{caller}: model is {checks.brief(model)}, but it must be a LanguageModel; make one "
            "with jaxlowbit.llm.load, init, or LanguageModel(decoder)."
        )


def open_file(path: Any) -> Header:
    """Reads the header of a model file, which `load` also accepts instead of a path.

    A program can thus check its arguments before the weights are read.
    """
    with named_load():
        return read_header(path)


@contextlib.contextmanager
def named_load() -> Iterator[None]:
    """Errors about a file begin with the name of the public function."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError or str(error).startswith("load: "):
            raise
        raise ValueError(f"load: {error}") from None


def load(
    path: Any,
    *,
    format: Format | str | None = None,
    rules: Any = None,
    quantizer: Any = None,
    calibration: Any = None,
    dtype: Any = None,
    lhs_qtype: Any = None,
    lhs_min_rows: int | None = None,
    cache_dtype: Any = None,
    scale_dtype: Any = None,
    adapter: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    progress: bool = True,
) -> LanguageModel:
    """Loads a language model from a GGUF file, a Hugging Face folder, or a folder written by
    `save`.

    **Arguments:**

    - `path`: the file or the folder.
    - `format`: a `Format` or its name, for every matrix; None for the quantized weights of the file
      without rounding, and floats as floats.
    - `rules`: formats for some matrices, by regular expressions that are searched (`re.search`) in
      their names (`Config.shapes`). The first match decides; None leaves a matrix as in the file.
    - `quantizer`: the name of the quantizer, or a function, as for `jaxlowbit.quantize`. It may
      also be a pair such as `"awq+gptq"`: the first computes factors, the second rounds.
    - `calibration`: None, or inputs for quantizers that read statistics: a text, a list of texts,
      tokens (sequences, length), or a `jaxlowbit.quantizers.Calibration` of one of these.
    - `dtype`: dtype of activations, of the cache and of float matrices; None for bfloat16 on a GPU
      and float32 on the CPU.
    - `lhs_qtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`: the inputs of products with quantized
      matrices of blocks are rounded to it, with a scale per token; embedding and head always have
      float inputs. `"file"` for the dtype of the checkpoint, such as int8 for W8A8 and W4A8.
    - `lhs_min_rows`: minimum number of tokens, over all sequences, for such rounding. None for 1
      on a CPU, and for 32 or 192 on a GPU, where products are faster from then on.
    - `cache_dtype`: `jnp.int8` or `jnp.float8_e4m3fn`: keys and values are cached in 8 bits, with a
      scale per token and head; None for `dtype`.
    - `scale_dtype`: dtype of scales and float zeros. None preserves the values of the file exactly.
      So does `"two_level"`, which also stores the scales of ggml's K types in two levels, as
      compactly as in the file.
    - `adapter`: None, or a LoRA adapter: a folder in PEFT's format, or a `LoRA`, as for `adapt`.
      Weights stay as `format` and `rules` make them.
    - `mesh`: the devices to shard the model over, as in `shard`; each weight is placed when it is
      read. None for one device.
    - `progress`: whether to show a progress bar.

    **Returns:** a `LanguageModel`.

    **Raises:** before a weight is read: `TypeError` for arguments of other types,
    `FileNotFoundError` if the path does not exist, `ValueError` for a damaged file, an unknown
    architecture, type or tokenizer, and missing or misshapen tensors, with their names, for rules
    that match no matrix, for a quantizer that is unknown, does not support a format or has nothing
    to round, and for weights that exceed the memory; the errors of `adapt` and `shard`.
    """
    dtype = default_dtype() if dtype is None else dtype
    if isinstance(lhs_qtype, str) and lhs_qtype == "file":
        with named_load():
            path = path if isinstance(path, Header) else read_header(path)
            lhs_qtype = huggingface.lhs_qtype_of(path.path)
    lhs_qtype = arguments.lhs_qtype("load", lhs_qtype)
    check_rows("load", lhs_min_rows)
    arguments.cache_dtype("load", cache_dtype, dtype)
    decoding = {"dtype": dtype, "lhs_qtype": lhs_qtype, "mesh": mesh}
    options = {"quantizer": quantizer, "calibration": calibration}
    options |= {"scale_dtype": scale_dtype, "progress": progress}
    with named_load():
        parts = None
        if adapter is not None:
            path = path if isinstance(path, Header) else read_header(path)
            parts = adapted("load", adapter, path.config)
        checkpoint = read(path, format=format, rules=rules, **decoding, **options)
    decoding |= {"lhs_min_rows": lhs_min_rows, "cache_dtype": cache_dtype}
    weights: dict[str, Any] = checkpoint.weights
    weights = weights if parts is None else with_adapter(weights, parts)
    decoder = Decoder(checkpoint.config, weights, **decoding, consume=True)
    return LanguageModel(decoder, checkpoint.tokenizer, checkpoint.report)


def save(
    model: LanguageModel, path: Any, *, overwrite: bool = False, progress: bool = False
) -> None:
    """Saves a model to a folder that `load` reads without packing.

    The folder gets its name when it is complete: a process that is killed leaves the old folder or
    the complete new one.

    **Arguments:**

    - `model`: from `load`, `init` or `shard`.
    - `path`: the folder.
    - `overwrite`: whether to replace a folder that exists.
    - `progress`: whether to show a progress bar.

    **Raises:** `TypeError` for arguments of other types; `ValueError` for an existing `path`, and
    for a tokenizer that was not loaded from a file; `FileNotFoundError` if that file no longer
    exists; the errors of `checkpoint.save`.

    ```py
    save(load("model-Q8_0.gguf", format="int4-g64"), "model-int4")
    load("model-int4")
    ```
    """
    check_model("save", model)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"save: path is {checks.brief(path)}, but it must be the path of a folder.")
    options = {"overwrite": overwrite, "progress": progress}
    for name, value in options.items():
        checks.boolean("save", name, value)
    saved.write_model(Path(path), model.decoder, model.tokenizer, **options)


def export(
    model: LanguageModel,
    path: Any,
    kind: str,
    *,
    overwrite: bool = False,
    progress: bool = False,
) -> None:
    """Writes a model for other engines, without rounding its weights.

    **Arguments:**

    - `model`: from `load`; its file supplies metadata and tokenizer. For `"compressed-tensors"`
      this must be a Hugging Face folder.
    - `path`: the file or folder, which gets its name when it is complete.
    - `kind`: `"gguf"`, a GGUF file for llama.cpp; or `"compressed-tensors"`, a folder in the format
      `pack-quantized` for transformers and vLLM. It has no quantized embedding: that becomes
      float32.
    - `overwrite`: whether to replace an existing target.
    - `progress`: whether to show a progress bar.

    **Raises:** `TypeError` for arguments of other types; `ValueError` for a weight whose format the
    kind does not represent exactly, with its name, for a configuration or a tokenizer that GGUF
    cannot store, for a model from a file of another kind, and for an existing `path`.

    ```py
    export(load("model-Q8_0.gguf", format="int4-g32", scale_dtype="float16"), "q4.gguf", "gguf")
    ```
    """
    check_model("export", model)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"export: path is {checks.brief(path)}, but it must be the path of a target."
        )
    checks.choice("export", "kind", kind, exporting.KINDS)
    options = {"overwrite": overwrite, "progress": progress}
    for name, value in options.items():
        checks.boolean("export", name, value)
    exporting.write_export(Path(path), kind, model.decoder, model.tokenizer, **options)


def init(
    config: Config,
    format: Format | str | None = INT4,
    *,
    seed: int = 0,
    dtype: Any = None,
    lhs_qtype: Any = None,
    lhs_min_rows: int | None = None,
    cache_dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
) -> LanguageModel:
    """Makes a model of random packed weights, of any size: floats are never made.

    - `config`: sizes and kinds.
    - `format`: a `Format` or its name, for every matrix; None for floats in `dtype`.
    - `seed`: a 64-bit integer.
    - `dtype`: dtype of scales, activations and the cache; None for bfloat16 on a GPU and float32 on
      the CPU.
    - `lhs_qtype`, `lhs_min_rows`, `cache_dtype`: as for `load`.
    - `mesh`: the devices to shard the model over, as in `shard`; None for one device. The weights
      do not depend on it.

    **Returns:** a `LanguageModel` without a tokenizer.

    **Raises:** `TypeError` and `ValueError` for invalid arguments, `ValueError` for weights that
    exceed the memory, and the errors of `shard`.

    ```python
    model = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8)
    generate(model, [3, 1, 4], max_new_tokens=4).tokens
    ```
    """
    check_config("init", config)
    format = None if format is None else as_format("init", format)
    seed = checks.integer("init", "seed", seed, SEED_RULE, least=-(2**63), most=2**63 - 1)
    dtype = default_dtype() if dtype is None else checks.compute_dtype("init", "dtype", dtype)
    lhs_qtype = arguments.lhs_qtype("init", lhs_qtype)
    check_rows("init", lhs_min_rows)
    arguments.cache_dtype("init", cache_dtype, dtype)
    weights = random_weights(config, format, seed=seed, dtype=dtype, mesh=mesh)
    decoding = {"dtype": dtype, "lhs_qtype": lhs_qtype, "mesh": mesh}
    decoding |= {"lhs_min_rows": lhs_min_rows, "cache_dtype": cache_dtype}
    return LanguageModel(Decoder(config, weights, **decoding, consume=True))


def shard(model: LanguageModel, mesh: jax.sharding.Mesh) -> LanguageModel:
    """Shards a model over the devices of a mesh: tensor parallelism.

    Every device stores some heads with their cache, some of the hidden features and a part of the
    vocabulary, and multiplies by its shards of the packed words. Two all-reduces per block add
    partial sums.

    **Arguments:**

    - `model`: from `load` or `init`; it is not modified.
    - `mesh`: with one axis.

    **Returns:** the sharded model, for `generate` and the other functions.

    **Raises:** before anything is moved: `TypeError` for an object that is not a mesh; `ValueError`
    for a mesh with several axes, or if the number of devices does not divide the heads, the heads
    of keys and values, or the rows of a matrix into whole atoms and groups.

    ```python
    model = init(Config("llama", 1, 64, 4, 2, 64, 256, 256, 128), INT8)
    sharded = shard(model, jax.make_mesh((1,), ("model",)))
    generate(sharded, [3, 1, 4], max_new_tokens=4).tokens
    ```
    """
    check_model("shard", model)
    decoder = nnx.clone(model.decoder)
    decoder.divide(mesh)
    return dataclasses.replace(model, decoder=decoder)


def default_dtype() -> Any:
    """The fastest dtype of activations on this machine."""
    return jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
