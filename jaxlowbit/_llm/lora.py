"""`adapt`, `merge_adapter` and `save_adapter`: LoRA adapters of language models."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._core import checks
from .._core.array import QuantizedArray
from .._core.format import Format, as_format
from ..checkpoint._replace import new_folder
from ..quantizers._quantize import quantize
from .adapters import adapted, with_adapter, write_adapter
from .config import Config
from .decoder import Decoder
from .language_model import LanguageModel, check_model
from .low_rank import LowRank
from .saved import weights_of


def adapt(model: LanguageModel, adapter: Any) -> LanguageModel:
    """Adds a LoRA adapter to the weights of a model, which stay packed.

    The variables of the adapter are `flax.nnx.LoRAParam`s of the decoder, for `nnx.grad`
    with `nnx.DiffState(0, nnx.LoRAParam)`.

    **Arguments:**

    - `model`: from `load` or `init`, which does not change; weights are shared.
    - `adapter`: a folder in PEFT's format, with `adapter_config.json` and
      `adapter_model.safetensors`; or a `LoRA`, for training.

    **Returns:** the model with the adapter.

    **Warns:** of entries of `adapter_config.json` that are not known.

    **Raises:** `TypeError` for other arguments; `FileNotFoundError` if there is no
    such folder; `ValueError` for a damaged folder, an adapter of another kind or another model,
    each with the name of the file and of the entry or tensor, and for a model with an adapter.

    ```python
    model = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8)
    adapted = adapt(model, LoRA(rank=4, targets=r"\\.(q|v)$"))
    ```
    """
    check_model("adapt", model)
    config, weights = weights_of(model.decoder)
    if any(isinstance(weight, LowRank) for weight in weights.values()):
        raise ValueError(
            "adapt: the model has an adapter already; pass the model without it, or merge_adapter "
            "of this one."
        )
    weights = with_adapter(weights, adapted("adapt", adapter, config))
    return _rebuilt(model, config, weights)


def _rebuilt(model: LanguageModel, config: Config, weights: dict[str, Any]) -> LanguageModel:
    """A model with other weights."""
    old = model.decoder
    options: dict[str, Any] = {"dtype": old.dtype, "lhs_qtype": old.lhs_qtype}
    options |= {"lhs_min_rows": old.lhs_min_rows}
    options |= {"cache_dtype": None if old.cache_dtype == old.dtype else old.cache_dtype}
    options |= {"mesh": None if old.division is None else old.division.mesh}
    decoder = Decoder(config, weights, **options, consume=True)
    return dataclasses.replace(model, decoder=decoder)


def merge_adapter(
    model: LanguageModel, *, format: Format | str | None = None, quantizer: Any = None
) -> LanguageModel:
    """Adds the adapter of a model to its weights, and rounds these again.

    **Arguments:**

    - `model`: from `load` with an adapter, or `adapt`; it does not change.
    - `format`: format of the sums; None for the format of each weight. Weights without an adapter
      stay as they are, and floats stay floats.
    - `quantizer`: the quantizer for the sums, as for `jaxlowbit.quantize`.

    **Returns:** a model without an adapter.

    **Raises:** `TypeError` for other arguments; `ValueError` for a model without
    an adapter; the errors of `jaxlowbit.quantize`.

    ```python
    model = init(Config("llama", 1, 64, 2, 1, 32, 128, 256, 128), INT8)
    merge_adapter(adapt(model, LoRA(rank=4)))
    ```
    """
    check_model("merge_adapter", model)
    format = None if format is None else as_format("merge_adapter", format)
    config, weights = weights_of(model.decoder)
    _adapters("merge_adapter", weights)
    for name, weight in weights.items():
        if not isinstance(weight, LowRank):
            continue
        base, dense = weight.base, weight.dense()
        if not isinstance(base, QuantizedArray):
            weights[name] = dense.astype(base.dtype)
            continue
        chosen = base.format if format is None else format
        options: dict[str, Any] = {} if chosen.scale else {"scale_dtype": base.scale.dtype}
        with checks.within("merge_adapter", weight=name):
            weights[name] = quantize(dense, chosen, quantizer=quantizer, **options)
    return _rebuilt(model, config, weights)


def _adapters(caller: str, weights: Mapping[str, Any]) -> dict[str, LowRank]:
    found = {name: x for name, x in weights.items() if isinstance(x, LowRank)}
    if not found:
        raise ValueError(f"{caller}: the model has no adapter; pass one from adapt.")
    return found


def save_adapter(model: LanguageModel, path: Any, *, overwrite: bool = False) -> None:
    """Writes the adapter of a model as a folder in PEFT's format.

    The folder gets its name when it is complete. `PeftModel.from_pretrained`, `load` and `adapt`
    read it. Matrices that transformers fuses, as in Phi 3, become one module: their adapters share
    A if it is equal, otherwise their ranks add up.

    **Arguments:**

    - `model`: from `load` with an adapter, or `adapt`.
    - `path`: the folder.
    - `overwrite`: whether to replace a folder that exists.

    **Raises:** `TypeError` for other arguments; `ValueError` for a model without
    an adapter, and for a `path` that exists.

    ```py
    save_adapter(adapt(load("Llama-3.1-8B-Instruct", format="int4-g64"), LoRA()), "adapter")
    ```
    """
    check_model("save_adapter", model)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"save_adapter: path is {checks.brief(path)}, but it must be the path of a folder."
        )
    checks.boolean("save_adapter", "overwrite", overwrite)
    config, weights = weights_of(model.decoder)
    adapters = _adapters("save_adapter", weights)
    source = getattr(model.tokenizer, "source", None)
    with checks.within("save_adapter"), new_folder("save_adapter", Path(path), overwrite) as folder:
        write_adapter(folder, adapters, config, source)
