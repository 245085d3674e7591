"""`quantize_model` for Linen: the variables change, and the module's products with them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import core, traverse_util
from flax import linen as nn

from .._formats import Format
from .linen_kinds import Kind, kind_of
from .linen_variables import COLLECTION, quantized, value_of
from .report import LayerReport, QuantizationReport
from .rules import Rules, ShardRules, choose, choose_shards
from .weights import Packing, Shards

_Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class QuantizedModel:
    """A Linen module some of whose layers have quantized kernels; see `quantize_model`.

    Immutable and hashable, with `apply` alone: nothing else of a module depends on its kernels.
    """

    module: nn.Module
    formats: tuple[tuple[_Path, Format], ...]
    shards: tuple[tuple[_Path, Shards], ...]

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """`module.apply`, with the same arguments, on the quantized variables.

        **Raises:** `ValueError` if the kernel of a quantized layer is not among the variables.
        """
        shards = dict(self.shards)
        packings = {path: Packing(format, shards[path]) for path, format in self.formats}

        def multiply(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            kind = kind_of(context.module)
            compute = kind and kind.methods.get(context.method_name)
            packing = compute and packings.get(context.module.path)
            if not (compute and packing):
                return next_fun(*args, **kwargs)
            return compute(context.module, packing, *args, **kwargs)

        with nn.intercept_methods(multiply):
            return self.module.apply(variables, *args, **kwargs)


def quantize_model(
    module: nn.Module,
    variables: Mapping[str, Any],
    rules: Rules,
    *args: Any,
    shards: ShardRules = (1, 1),
    donate: bool = False,
    **kwargs: Any,
) -> tuple[QuantizedModel, dict[str, Any], QuantizationReport]:
    """Quantizes the kernels of a model's linear layers; the module's code stays as it is.

    Kernels move from `params` to the collection `"quantized"`, one array per variable, so `params`
    holds floats only and can be differentiated and optimized as before. The layers, `nn.Dense`,
    `nn.DenseGeneral` (with it attention), `nn.Einsum` and, where a rule names it, `nn.Embed`, are
    found by tracing `module.apply` once, without computing: no other kind of layer changes.
    Abstract variables, as from `jax.eval_shape(module.init, ...)`, give abstract ones. Within
    `nn.scan` and `nn.vmap` the new collection is lifted like `params`: `variable_axes={"params": 0,
    "quantized": 0}`.

    **Arguments:**

    - `module`, `variables`: the model, and what its `init` returned or a checkpoint holds.
    - `rules`: a `Format` for every such layer but embeddings and heads (names that match `HEADS`);
      or regular expressions with a `Format`, or None to keep the layer, as a mapping or pairs. Each
      is searched (`re.search`) in the dotted path of the layer, such as `block_0.mlp.up`; the first
      that matches decides, and a layer that none matches is kept.
    - `args`, `kwargs`: inputs of `module.apply`; arrays or `jax.ShapeDtypeStruct` in `args`.
    - `shards`: into how many equal parts of k and n devices will cut each kernel, as of
      `jaxlowbit.quantize`, or a mapping of such regular expressions to them.
    - `donate`: whether to delete each kernel of `variables` once it is quantized, so that beyond
      the given variables one layer exists twice at most. They are of no use after that.

    **Returns:** the model to `apply`, its variables, and a `QuantizationReport`, a table when
    printed: sizes, errors, and what multiplies.

    **Raises:** `TypeError` for rules that are none; `ValueError` for a rule that decides about no
    layer, for a chosen layer that cannot be replaced, and where `jaxlowbit.quantize` raises.

    ```python
    model, variables, report = quantize_model(module, variables, INT4, x)
    y = jax.jit(model.apply)(variables, x)
    ```
    """
    layers = _layers(module, variables, args, kwargs)
    params = traverse_util.flatten_dict(core.unfreeze(variables["params"]))
    named = [kind.named for kind, _ in layers.values()]
    paths = [[".".join(path)] for path in layers]
    chosen = dict(zip(layers, choose(rules, paths, named), strict=True))
    parts = dict(zip(layers, choose_shards(shards, paths), strict=True))
    for path, format in chosen.items():
        if format is not None:
            _check(path, *layers[path], params)
    stored, reports = {}, []
    for path, format in chosen.items():
        kind, layer = layers[path]
        name, key = ".".join(path), (*path, kind.weight)
        if format is None:
            if key in params:
                reports.append(LayerReport.kept(name, value_of(params[key])))
            continue
        boxed = params.pop(key)
        weight = value_of(boxed)
        axes = kind.axes(layer, weight.shape)
        try:
            kernel, arrays = quantized(boxed, Packing(format, parts[path]), axes)
        except ValueError as error:
            raise ValueError(f"quantize_model: in {name}: {error}") from None
        stored |= {(*path, name): array for name, array in arrays.items()}
        dtype = layer.dtype or kernel.dtype
        reports.append(LayerReport.quantized(name, weight, kernel, dtype, axes.matrix))
        if donate and isinstance(weight, jax.Array):
            weight.delete()
    collections = {
        **variables,
        "params": traverse_util.unflatten_dict(params),
        COLLECTION: traverse_util.unflatten_dict(stored),
    }
    replaced = tuple((path, format) for path, format in chosen.items() if format is not None)
    model = QuantizedModel(module, replaced, tuple((path, parts[path]) for path, _ in replaced))
    return model, collections, QuantizationReport(tuple(reports))


def _layers(
    module: nn.Module, variables: Any, args: Any, kwargs: Any
) -> dict[_Path, tuple[Kind, Any]]:
    """The layers that `module.apply` calls, by path, in the order of their calls."""
    found: dict[_Path, tuple[Kind, Any]] = {}

    def record(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer, kind = context.module, kind_of(context.module)
        if kind and context.method_name in kind.methods.keys() - {"setup"}:
            found.setdefault(layer.path, (kind, layer.clone(parent=None)))
        return next_fun(*args, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(lambda *args: module.apply(*args, **kwargs), variables, *args)
    return found


def _check(path: _Path, kind: Kind, layer: Any, params: Mapping[_Path, Any]) -> None:
    reason = None
    if type(layer) is not kind.layer:
        expected, found = kind.layer.__name__, type(layer).__name__
        reason = f"is {found}, and a subclass of nn.{expected} may compute something else"
    elif not path:
        reason = f"is the model itself; use Quantized{kind.layer.__name__} instead"
    elif (*path, kind.weight) not in params:
        reason = (
            f"has no {kind.weight} of its own path in params, which it shares with another layer"
        )
    for option in kind.options:
        if getattr(layer, option) is not None:
            reason = f"has {option}={getattr(layer, option)!r}, which a quantized product has not"
    try:
        kind.check(layer)
    except ValueError as error:
        raise ValueError(
            f"quantize_model: in {'.'.join(path)}: {error} Or keep the layer, with a rule of its "
            "path and None."
        ) from None
    if reason is not None:
        raise ValueError(
            f"quantize_model: the layer {'.'.join(path)!r} {reason}. Keep it, with a rule of its "
            "path and None."
        )
