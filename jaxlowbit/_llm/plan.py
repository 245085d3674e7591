"""`plan`: a format for each matrix of a language model, for a target of bits per weight."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .._core.format import Format, as_format
from ..quantizers import _registry
from ..quantizers._calibration import Calibration
from ..quantizers._plan import Plan, mixed
from .calibration import tokens_of
from .language_model import named_load
from .load import Header, floats_of, read_header
from .sensitivity import sensitivities

FORMATS = ("int2-g64", "int3", "int3-g32", "int4", "int4-g32", "int6", "int8")
"""The formats of a plan by default."""


def plan(
    path: Any,
    bits: float,
    *,
    calibration: Any,
    formats: Sequence[Format | str] = FORMATS,
    quantizer: Any = "mse",
    scale_dtype: Any = jnp.bfloat16,
    progress: bool = False,
) -> Plan:
    """Chooses a format for each matrix of the blocks of a model, within a number of bits.

    The error of a matrix in a format is the expected increase of the Kullback-Leibler divergence
    from the float model (`docs/quantizers.md`). Matrices of one call share a format: queries, keys
    and values, and gate and up. Embedding and head are not in the plan.

    **Arguments:**

    - `path`: the file or the folder.
    - `bits`: bits per weight of the matrices in the plan, with scales and zeros.
    - `calibration`: as for `load`; 8 windows are enough.
    - `formats`: to choose from.
    - `quantizer`: rounds each matrix to each format, to measure the errors: `"mse"`, or the one for
      `load`, which takes longer.
    - `scale_dtype`: dtype of scales.
    - `progress`: whether to show a progress bar.

    **Returns:** a plan, as `jaxlowbit.quantizers.mixed` does. `load` takes its `rules`, which can
    be edited.

    **Raises:** the errors of `load` for a path and a calibration; `ValueError` for fewer bits
    than the smallest formats take, and for a model with mixtures of experts.

    ```py
    plan = llm.plan(path, 3.5, calibration=text)
    llm.load(path, rules=plan.rules, quantizer="gptq", calibration=text)
    ```
    """
    found = [as_format("plan", format) for format in formats]
    for format in found:
        _registry.find("plan", quantizer, format, {})
    calibration = Calibration.of("plan", calibration, progress=progress)
    with named_load():
        header = path if isinstance(path, Header) else read_header(path)
    if header.config.experts:
        raise ValueError(
            f"plan: the model has {header.config.experts} experts in each layer, whose inputs are "
            "not recorded; choose its formats yourself, as rules= of load."
        )
    with named_load():
        tokens = tokens_of(calibration, header.config, header.tokenizer)
    options = {"scale_dtype": jnp.dtype(scale_dtype)}
    given = floats_of(header), tokens, found, quantizer, options
    units = list(sensitivities(*given, progress=progress))[::-1]
    errors = {unit.rule: unit.divergence for unit in units}
    return mixed(errors, {unit.rule: unit.size for unit in units}, bits)
