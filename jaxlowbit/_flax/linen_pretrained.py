"""`quantize_pretrained`: quantizes Flax models of transformers, which wrap a module and
parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from flax import core, traverse_util
from flax import linen as nn

from .._core.checks import brief
from .einsum_layers import EinsumLayer, EinsumParameter
from .linen_model import quantize_model
from .linen_quantized import QuantizedModel
from .linen_variables import COLLECTION
from .report import QuantizationReport
from .rules import ActivationRules, Keep, Rules, ShardRules


def quantize_pretrained(
    model: Any,
    rules: Rules,
    *args: Any,
    layers: Sequence[EinsumLayer | EinsumParameter] = (),
    keep: Keep = (),
    shards: ShardRules = (1, 1),
    lhs_qtype: ActivationRules = None,
    quantizer: Any = None,
    **kwargs: Any,
) -> QuantizationReport:
    """Quantizes a `FlaxPreTrainedModel` of transformers, in place.

    The model is then called as before, and `generate` works. Its `params` contains the float
    parameters and, under the key `"quantized"`, the packed arrays, so functions that take `params=`
    get both, also under `jax.jit`.

    **Arguments:**

    - `model`: the model, with its parameters.
    - `rules`, `layers`, `keep`, `shards`, `lhs_qtype`, `quantizer`: as for `quantize_model`.
      Paths begin in the wrapped module, such as `model.layers.0.mlp.up_proj`.
    - `args`, `kwargs`: arguments of a call of the model, which is traced to find the layers.

    **Returns:** a `QuantizationReport`, which prints as a table.

    **Raises:** `TypeError` for another type of model; `ValueError` for a quantized model, and if
    `quantize_model` does. The model is then unchanged.

    ```python
    report = quantize_pretrained(pretrained, INT8, input_ids)
    logits = pretrained(input_ids)
    ```
    """
    module = getattr(model, "module", None)
    if isinstance(module, _Module):
        raise ValueError(
            "quantize_pretrained: the model is quantized already; pass the float model, as "
            "from_pretrained returns it."
        )
    if not isinstance(module, nn.Module) or not isinstance(getattr(model, "params", None), Mapping):
        raise TypeError(
            f"quantize_pretrained: the model is {brief(model)}, but it must be a "
            "FlaxPreTrainedModel of transformers, with an nn.Module and its params; for a module "
            "itself, use quantize_model(module, variables, rules, inputs)."
        )
    variables, args, kwargs = _applied(model, module, args, kwargs)
    options: Any = {"layers": layers, "keep": keep, "shards": shards, "quantizer": quantizer}
    quantized, variables, report = quantize_model(
        module, variables, rules, *args, lhs_qtype=lhs_qtype, **options, **kwargs
    )
    params = {**variables["params"], COLLECTION: variables[COLLECTION]}
    model._module = _Module(quantized)
    model._required_params = set(traverse_util.flatten_dict(params))
    model.params = params
    return report


class _ReachedError(Exception):
    """Raised to end a call of a model when it applies its module."""


class _Recorder:
    """Stands in for a module, and records the arguments of `apply`."""

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        self.variables, self.args, self.kwargs = variables, args, kwargs
        raise _ReachedError


def _applied(model: Any, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The variables and arguments that a call of the model passes to its module."""
    recorder = _Recorder()
    model._module = recorder
    try:
        model(*args, **kwargs)
    except _ReachedError:
        return recorder.variables, recorder.args, recorder.kwargs
    finally:
        model._module = module
    raise ValueError(
        "quantize_pretrained: a call of the model with these arguments does not apply its module; "
        "pass inputs that it computes with."
    )


class _Module:
    """A module whose variables contain the quantized arrays among the parameters."""

    def __init__(self, model: QuantizedModel) -> None:
        self.model = model

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        params: Any = core.unfreeze(variables["params"])
        floats = {name: value for name, value in params.items() if name != COLLECTION}
        held = {**variables, "params": floats, COLLECTION: params.get(COLLECTION, {})}
        return self.model.apply(held, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model.module, name)
