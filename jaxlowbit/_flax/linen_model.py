"""`quantize_model` for Linen: the variables change, and the module's products with them."""

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import core, nnx, traverse_util
from flax import linen as nn

from .._core.checks import brief
from . import defaults
from .defaults import Candidate, is_table
from .einsum_layers import EinsumLayer
from .einsum_parameters import EinsumParameter, split
from .linen_kinds import NAMES
from .linen_layers import Layer, Path, find_layers
from .linen_quantized import QuantizedModel, quantized_of
from .linen_variables import COLLECTION, quantized, value_of
from .refusals import inner, not_a_model, refuse, refuse_nothing
from .report import LayerReport, QuantizationReport, Rest, nbytes_of
from .rules import (
    ActivationRules,
    Keep,
    Rules,
    ShardRules,
    choose,
    choose_activations,
    choose_shards,
)
from .weights import Packing, abstract, check_values, quantizing_by


def quantize_model(
    module: nn.Module,
    variables: Mapping[str, Any],
    rules: Rules,
    *args: Any,
    layers: Sequence[EinsumLayer | EinsumParameter] = (),
    keep: Keep = (),
    shards: ShardRules = (1, 1),
    activation_dtype: ActivationRules = None,
    quantizer: Any = None,
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
    - `rules`: a `Format`, or its name, such as `"int4"`, for every such layer but embeddings,
      heads (names that match `HEADS`, and layers as wide as the vocabulary), routers and layers
      that would grow; or regular expressions with a `Format`, or None to keep the layer, as a
      mapping or pairs. Each is searched (`re.search`) in the dotted path of the layer, such as
      `block_0.mlp.up`; the first that matches decides, and a layer that none matches is kept.
    - `args`, `kwargs`: inputs of `module.apply`; arrays or `jax.ShapeDtypeStruct` in `args`.
    - `layers`: what is quantized too: other classes of layers, each an `EinsumLayer`, and raw
      parameters, each an `EinsumParameter`. Those of gemma, and of GPT-2 in transformers, are
      known. All go by the paths of their parameters.
    - `keep`: a regular expression, or several, of layers that stay in floats beside those.
    - `shards`: the number of equal parts of k and n into which devices will cut each kernel, as for
      `jaxlowbit.quantize`, or a mapping of such regular expressions to them.
    - `activation_dtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, to which all quantized layers
      but embeddings quantize their inputs in each call, as `jaxlowbit.quantized_matmul` does; or a
      mapping of such regular expressions, on the paths of quantized layers, to one of these.
    - `quantizer`: what rounds the weights, a name or a function, as for `jaxlowbit.quantize`.
    - `donate`: whether to delete each kernel of `variables` once it is quantized, so that beyond
      the given variables one layer exists twice at most. They are of no use after that.

    **Returns:** the model to `apply`, its variables, and a `QuantizationReport`, a table when
    printed: sizes, errors, what multiplies, and the parameters that are not covered.

    **Raises:** before anything is quantized or deleted, `TypeError` for what is no module and for
    rules that are none; `ValueError` if the call reaches no such layer, for rules that decide about
    none or keep them all, and for all chosen layers that cannot be replaced: because of their
    options, their weights, as `jaxlowbit.quantize` does, or since the model computes their weights
    in each call, as in `nn.WeightNorm`, `nn.SpectralNorm` and `nn.map_variables`. **Warns**
    (`UserWarning`) where more than a tenth of the bytes is in parameters that no such layer holds.

    ```python
    model, variables, report = quantize_model(module, variables, INT4, x)
    y = jax.jit(model.apply)(variables, x)
    ```
    """
    _check_model(module, variables)
    others, described = split(layers)
    found, classes = find_layers(module, variables, args, kwargs, others, described)
    if not found:
        raise ValueError(
            f"quantize_model: module.apply calls none of {NAMES} with these arguments, so there is "
            "nothing to quantize; pass arguments, such as method=, with which such layers run."
        )
    params = traverse_util.flatten_dict(core.unfreeze(variables["params"]))
    rest = _rest(params, variables, found, classes)
    paths = [[".".join(path)] for path in found]
    parts = choose_shards(shards, paths)
    candidates = [_candidate(path, layer, params) for path, layer in found.items()]
    tables = [x.shape for x in rest.uncovered if is_table(x.path, x.shape)]
    decisions, by_rule = choose(
        rules,
        keep,
        paths,
        [parameter.path for parameter in rest.uncovered],
        functools.partial(defaults.kept, candidates, tables, parts),
    )
    refuse_nothing(
        [
            (path[0], layer.shape, None if decision.format else decision.reason)
            for path, layer, decision in zip(paths, found.values(), decisions, strict=True)
        ]
    )
    named = [layer.kind.named for layer in found.values()]
    dtypes = choose_activations(activation_dtype, paths, decisions, named)
    decided = dict(zip(found, decisions, strict=True))
    chosen = {
        path: Packing(decision.format, part, activation_dtype=dtype)
        for (path, decision), part, dtype in zip(decided.items(), parts, dtypes, strict=True)
        if decision.format
    }
    with quantizing_by("quantize_model", quantizer):
        refuse(
            (".".join(path), _refusal(path, found[path], packing, params))
            for path, packing in chosen.items()
        )
    stored: Any = traverse_util.flatten_dict(core.unfreeze(variables.get(COLLECTION, {})))
    reports = []
    for path, layer in found.items():
        name, key = ".".join(path), layer.kind.key(path)
        if path not in chosen:
            if key in params:
                _, reason, by_default = decided[path]
                reports.append(LayerReport.kept(name, value_of(params[key]), reason, by_default))
            continue
        boxed = params.pop(key)
        weight = value_of(boxed)
        try:
            with quantizing_by("quantize_model", quantizer):
                kernel, arrays = quantized_of(boxed, path, layer, chosen[path])
        except ValueError as error:
            raise ValueError(f"quantize_model: in {name}: {inner(error)}") from None
        stored |= arrays
        dtype = getattr(layer.module, "dtype", None) or kernel.dtype
        matrix = layer.kind.axes(layer.module, weight.shape).matrix
        options = dtype, matrix, chosen[path].activation_dtype
        reports.append(LayerReport.quantized(name, weight, kernel, *options))
        if donate and isinstance(weight, jax.Array):
            weight.delete()
    collections = {
        **variables,
        "params": traverse_util.unflatten_dict(params),
        COLLECTION: traverse_util.unflatten_dict(stored),
    }
    model = QuantizedModel(
        module,
        tuple((path, packing.format) for path, packing in chosen.items()),
        tuple((path, packing.shards) for path, packing in chosen.items()),
        tuple((path, found[path].sizes) for path in chosen),
        tuple(
            (path, (equation, found[path].shape))
            for path in chosen
            if found[path].raw is None and (equation := found[path].kind.equation) is not None
        ),
        tuple(others),
        tuple(
            (path, (found[path].kind.key(path), raw))
            for path in chosen
            if (raw := found[path].raw) is not None
        ),
        tuple(
            (path, packing.activation_dtype)
            for path, packing in chosen.items()
            if packing.activation_dtype is not None
        ),
    )
    report = rest.report(reports, by_rule)
    report.warn(
        f"Only {NAMES} are, and what layers= describes: an EinsumLayer "
        "says it of a class, an EinsumParameter of a path."
    )
    return model, collections, report


def _check_model(module: Any, variables: Any) -> None:
    """Refuses what is no Linen module, and variables without parameters."""
    call = "jaxlowbit.linen.quantize_model(module, variables, rules, inputs)"
    inner, params = (getattr(module, name, None) for name in ("module", "params"))
    if not isinstance(module, nn.Module):
        wanted = f"pass the nn.Module and what its init returned: {call}."
        if isinstance(inner, nn.Module) and params is not None:
            wanted = (
                "pass what it wraps: model.module and {'params': model.params}; or use "
                "jaxlowbit.linen.quantize_pretrained(model, rules, inputs)."
            )
        if isinstance(module, nnx.Module):
            wanted = "use jaxlowbit.nnx.quantize_model(model, rules)."
        raise not_a_model(module, wanted)
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"quantize_model: variables is {brief(variables)}, but it is what init returned, a "
            f"mapping with 'params': {call}."
        )
    if "params" not in variables:
        raise ValueError(
            f"quantize_model: variables has {sorted(map(str, variables))[:8]}, but no 'params'; "
            "pass all variables that init returned, or {'params': params} if these are the "
            "parameters."
        )


def _candidate(path: Path, layer: Layer, params: Mapping[Path, Any]) -> Candidate:
    boxed = params.get(layer.kind.key(path))
    name, named, matrix = [".".join(path)], layer.kind.named, None
    if layer.kind.equation is not None:  # a parameter is named by the module that holds it too
        name.append(".".join(path[:-1]))
    if boxed is None:
        return Candidate(name, None, 1, 0, 1, named)
    weight = value_of(boxed)
    with contextlib.suppress(ValueError):  # an equation that is no product is refused later
        matrix = layer.kind.axes(layer.module, weight.shape).matrix_shape
    count = math.prod(weight.shape) // math.prod(matrix) if matrix else 1
    return Candidate(name, matrix, count, nbytes_of(weight), weight.dtype.itemsize, named)


def _keys(layers: Mapping[Path, Layer]) -> list[tuple[Path, Path]]:
    return [(path, layer.kind.key(path)) for path, layer in layers.items()]


def _rest(
    params: Mapping[Path, Any],
    variables: Mapping[str, Any],
    layers: Mapping[Path, Layer],
    classes: Mapping[Path, str],
) -> Rest:
    """The parameters but the weights of the layers that run."""
    rest = Rest()
    weights = {layer.kind.key(path) for path, layer in layers.items()}
    biases = {(*key[:-1], bias) for path, key in _keys(layers) if (bias := layers[path].kind.bias)}
    for key, boxed in params.items():
        if key in weights:
            continue
        module = classes.get(key[:-1], "a module that this call does not reach")
        for leaf in jax.tree.leaves(value_of(boxed)):
            rest.add(".".join(key), leaf, module, vector=key in biases, packed=False)
    for leaf in jax.tree.leaves(variables.get(COLLECTION, {})):
        rest.add("", leaf, "", vector=False, packed=True)
    return rest


def _refusal(path: Path, layer: Layer, packing: Packing, params: Mapping[Path, Any]) -> str | None:
    """Why a layer cannot be replaced."""
    kind, module, reason = layer.kind, layer.module, None
    keep = "with a rule of its path and None."
    if type(module) is not kind.layer:
        expected, found = kind.layer.__name__, type(module).__name__
        reason = f"is {found}, and a subclass of nn.{expected} may compute something else"
    elif not path:
        reason = f"is the model itself; use Quantized{kind.layer.__name__} instead"
    elif (*layer.path, kind.weight) not in params:
        reason = (
            f"has no {kind.weight} of its own path in params, which it shares with another layer"
        )
    elif not layer.plain:
        reason = (
            f"multiplies by what is computed from its {kind.weight} in each call, as in "
            "nn.WeightNorm, nn.SpectralNorm and nn.map_variables, or by a part of a stack along "
            f"another axis than the first, so that quantizing the {kind.weight} would change the "
            "model; store what is computed as the parameter of a plain layer"
        )
    for option in kind.options:
        if getattr(module, option) is not None:
            reason = f"has {option}={getattr(module, option)!r}, which a quantized product has not"
    name = ".".join(path)
    if reason is not None:
        return f"the layer {name!r} {reason}. Keep it, {keep}"
    boxed = params[kind.key(path)]
    try:
        kind.check(module)
        axes = kind.axes(module, value_of(boxed).shape)
    except ValueError as error:
        return f"in {name}: {inner(error)} Or keep the layer, {keep}"
    try:
        quantized(jax.tree.map(abstract, boxed), packing, axes)
        check_values(value_of(boxed), packing.format, axes.matrix, packing.shards)
    except ValueError as error:
        return f"in {name}: {inner(error)}"
    return None
