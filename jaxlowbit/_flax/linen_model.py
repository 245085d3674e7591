"""`quantize_model` for Linen: changes the variables, and the products that the module computes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import core, nnx, traverse_util
from flax import linen as nn

from .._core.checks import brief
from ..quantizers import Calibration
from .arguments import inner, not_a_model
from .calibration import Layers, calibrate, checked
from .einsum_layers import EinsumLayer, EinsumParameter, split
from .input_factors import FACTOR
from .linen_layers import NAMES
from .linen_quantized import QuantizedModel, stored_arrays
from .linen_tracing import Layer, find_layers
from .linen_variables import COLLECTION, held_factor, held_kernel, quantized, value_of
from .recording import RecordingView
from .report import LayerReport, QuantizationReport, Rest
from .rules import (
    ActivationRules,
    Candidate,
    Choice,
    Keep,
    Rules,
    ShardRules,
    check_replaceable,
    choose,
)
from .weight_program import run
from .weights import EXPECTED, Packing, Path, Scaled, abstract, check_values, quantizing_by


def quantize_model(
    module: nn.Module,
    variables: Mapping[str, Any],
    rules: Rules,
    *args: Any,
    layers: Sequence[EinsumLayer | EinsumParameter] = (),
    keep: Keep = (),
    shards: ShardRules = (1, 1),
    lhs_qtype: ActivationRules = None,
    quantizer: Any = None,
    calibration: Any = None,
    donate: bool = False,
    **kwargs: Any,
) -> tuple[QuantizedModel, dict[str, Any], QuantizationReport]:
    """Quantizes the kernels of a model's linear layers, without changes to the module's code.

    Kernels move from `params` to the collection `"quantized"`, one array per variable, so `params`
    contains only floats and can be differentiated and optimized as before. The quantized layers are
    `nn.Dense`, `nn.DenseGeneral` (and so attention), `nn.Einsum` and, if a rule names it,
    `nn.Embed`; other kinds do not change. They are found by tracing `module.apply` once, without
    computing. Abstract variables, as from `jax.eval_shape(module.init, ...)`, give abstract
    results. Within `nn.scan` and `nn.vmap` the new collection is lifted like `params`:
    `variable_axes={"params": 0, "quantized": 0}`.

    **Arguments:**

    - `module`, `variables`: the model, and the result of its `init` or a checkpoint.
    - `rules`: a `Format`, or its name, such as `"int4"`, for all of these layers except embeddings,
      heads (with a usual name, or as wide as the vocabulary), routers and layers that would grow;
      or regular expressions with a `Format`, or None to leave the layer in floats, as a mapping or
      pairs. Each is searched (`re.search`) in the dotted path of the layer, such as
      `block_0.mlp.up`. The first match decides; layers without a match stay in floats.
    - `args`, `kwargs`: inputs of `module.apply`; arrays or `jax.ShapeDtypeStruct` in `args`.
    - `layers`: further layers to quantize: other classes of layers, each an `EinsumLayer`, and raw
      parameters, each an `EinsumParameter`. Parameters of gemma, and of GPT-2 in
      transformers, are known. All are identified by the paths of their parameters.
    - `keep`: one or several regular expressions of further layers to leave in floats.
    - `shards`: the numbers of shards of k and n if devices share a kernel, as in
      `jaxlowbit.quantize`, or a mapping from such regular expressions to these pairs.
    - `lhs_qtype`: `jnp.int8` or `jnp.float8_e4m3fn` to quantize the inputs of all quantized
      layers except embeddings in each call, as in `jaxlowbit.quantized_matmul`, or None; or a
      mapping from such regular expressions, on the paths of quantized layers, to one of these.
    - `quantizer`: the name of the quantizer, or a function, as for `jaxlowbit.quantize`.
    - `calibration`: None, or inputs for quantizers that read statistics, such as `"gptq"`: batches
      of `model.apply(variables, batch)`, or a `jaxlowbit.quantizers.Calibration`.
    - `donate`: whether to delete each kernel of `variables` once it is quantized. `variables`
      cannot be used afterwards, and at most one layer exists twice.

    **Returns:** the model to `apply`, its variables, and a `QuantizationReport` with the sizes,
    errors and backends of the layers, and the parameters that are not covered. It prints as a
    table.

    **Raises:** before anything is quantized or deleted: `TypeError` for another type of module or
    rules; `ValueError` if the call runs no such layer, for rules that match no layer or leave all
    layers in floats, and for all chosen layers that cannot be replaced: because of their options or
    weights, as in `jaxlowbit.quantize`, or because the model computes their weights in each call,
    as in `nn.WeightNorm`, `nn.SpectralNorm` and `nn.map_variables`. **Warns** (`UserWarning`) if
    more than a tenth of the bytes is in parameters outside of such layers.

    ```python
    model, variables, report = quantize_model(module, variables, INT4, x)
    y = jax.jit(model.apply)(variables, x)
    ```
    """
    _check_model(module, variables)
    calibration = checked(quantizer, calibration)
    others, described = split(layers)
    found, classes = find_layers(module, variables, args, kwargs, others, described)
    if not found:
        raise ValueError(
            f"quantize_model: module.apply calls none of {NAMES} with these arguments, so there is "
            "nothing to quantize; pass arguments, such as method=, with which such layers run."
        )
    params = traverse_util.flatten_dict(core.unfreeze(variables["params"]))
    rest = _rest(params, variables, found, classes)
    candidates = [_candidate(path, layer, params) for path, layer in found.items()]
    options = keep, shards, lhs_qtype
    choices, by_rule = choose(candidates, rest.uncovered, rules, *options)
    decided = [(*item, choice) for item, choice in zip(found.items(), choices, strict=True)]
    chosen = [(path, layer, choice) for path, layer, choice in decided if choice.format]
    with quantizing_by("quantize_model", quantizer, calibration and EXPECTED):
        check_replaceable(
            (".".join(path), _reason(path, layer, choice, params)) for path, layer, choice in chosen
        )
    packings = {path: _packing(path, layer, choice) for path, layer, choice in chosen}
    stored: Any = traverse_util.flatten_dict(core.unfreeze(variables.get(COLLECTION, {})))
    reports = []
    calibrated: dict[Path, LayerReport] = {}
    if calibration is not None:
        model = _Calibrated(module, tuple(others), variables, params, stored, packings, donate)
        calibrated = model.calibrated({path: x for path, x, _ in chosen}, quantizer, calibration)
    for path, layer, choice in decided:
        key = layer.kind.key(path)
        if path in calibrated:
            reports.append(calibrated[path])
        elif path in packings:
            boxed = params.pop(key)
            with quantizing_by("quantize_model", quantizer):
                reports.append(_quantize(path, layer, boxed, packings, stored, donate))
        elif key in params:
            options = choice.reason, choice.by_default
            reports.append(LayerReport.kept(".".join(path), value_of(params[key]), *options))
    collections = {
        **variables,
        "params": traverse_util.unflatten_dict(params),
        COLLECTION: traverse_util.unflatten_dict(stored),
    }
    report = rest.report(reports, by_rule)
    report.warn(NAMES)
    return QuantizedModel(module, tuple(packings.items()), tuple(others)), collections, report


class _Calibrated(NamedTuple):
    """A model whose layers are quantized one after the other; updates `params`, `stored` and
    `packings`."""

    module: nn.Module
    layers: tuple[EinsumLayer, ...]
    variables: Mapping[str, Any]
    params: dict[Path, Any]
    stored: dict[Path, Any]
    packings: dict[Path, Packing]
    donate: bool

    def calibrated(
        self, chosen: Mapping[Path, Layer], quantizer: Any, calibration: Calibration
    ) -> dict[Path, LayerReport]:
        """Quantizes the layers with statistics of their inputs, and returns their reports."""
        paths = {".".join(path): path for path in chosen}
        reports: dict[Path, LayerReport] = {}

        def run_batch(names: Sequence[str], batch: Any, record: Any) -> None:
            views = {}
            for name in names:
                layer = chosen[paths[name]]
                weight = value_of(self.params[layer.kind.key(paths[name])])
                equation = layer.equation_of(weight)
                views[name] = RecordingView.recording(name, weight, equation, record)
            done = tuple((path, self.packings[path]) for path in reports)
            model = QuantizedModel(self.module, done, self.layers) if done else self.module

            def compute(floats: dict[str, Any]) -> tuple[()]:
                params = dict(self.params)
                for name, weight in floats.items():
                    key = chosen[paths[name]].kind.key(paths[name])
                    params[key] = jax.tree.unflatten(jax.tree.structure(params[key]), [weight])
                (calibration.apply or _apply)(model, self._collections(params), batch)
                return ()

            run(compute, views)

        def replace(name: str, quantizer: Any, statistics: Any) -> Scaled:
            path = paths[name]
            layer = chosen[path]
            boxed = self.params.pop(layer.kind.key(path))
            equation = layer.equation_of(value_of(boxed))
            with quantizing_by("quantize_model", quantizer, statistics):
                options = self.packings, self.stored, self.donate
                reports[path] = _quantize(path, layer, boxed, *options)
            held = {key[-1]: x for key, x in self.stored.items() if key[:-1] == path}
            return Scaled(held_kernel(name, held, self.packings[path], equation), held_factor(held))

        tables = frozenset(name for name, path in paths.items() if chosen[path].kind.table)
        formats = {name: self.packings[path].format for name, path in paths.items()}
        calibrate(Layers(formats, tables, run_batch, replace), quantizer, calibration)
        return reports

    def _collections(self, params: dict[Path, Any]) -> dict[str, Any]:
        return {
            **self.variables,
            "params": traverse_util.unflatten_dict(params),
            COLLECTION: traverse_util.unflatten_dict(self.stored),
        }


def _apply(model: Any, variables: Any, batch: Any) -> Any:
    return model.apply(variables, batch)


def _packing(path: Path, layer: Layer, choice: Choice) -> Packing:
    raw, equation = layer.raw, layer.kind.equation
    format: Any = choice.format
    return Packing(
        format,
        choice.shards,
        layer.sizes,
        None if raw is not None or equation is None else (equation, layer.shape),
        choice.lhs_qtype,
        None if raw is None else (layer.kind.key(path), raw),
    )


def _quantize(
    path: Path,
    layer: Layer,
    boxed: Any,
    packings: dict[Path, Packing],
    stored: dict[Path, Any],
    donate: bool,
) -> LayerReport:
    """Adds the quantized weight of a layer to the `stored` variables, and notes its factors in
    `packings`."""
    name, weight, packing = ".".join(path), value_of(boxed), packings[path]
    equation = layer.equation_of(weight)
    try:
        kernel, arrays = quantized(boxed, packing, equation)
    except ValueError as error:
        raise ValueError(f"quantize_model: in {name}: {inner(error)}") from None
    stored |= stored_arrays(path, arrays)
    packings[path] = dataclasses.replace(packing, factor=FACTOR in arrays)
    dtype = getattr(layer.module, "dtype", None) or kernel.dtype
    options = dtype, equation.matrix, packing.lhs_qtype, held_factor(arrays)
    report = LayerReport.quantized(name, weight, kernel, *options)
    if donate and isinstance(weight, jax.Array):
        weight.delete()
    return report


def _check_model(module: Any, variables: Any) -> None:
    """Raises for another type than a Linen module, and for variables without parameters."""
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
            f"quantize_model: variables is {brief(variables)}, but it must be what init returned, "
            f"a mapping with 'params': {call}."
        )
    if "params" not in variables:
        raise ValueError(
            f"quantize_model: variables has {sorted(map(str, variables))[:8]}, but no 'params'; "
            "pass all variables that init returned, or {'params': params} if these are the "
            "parameters."
        )


def _candidate(path: Path, layer: Layer, params: Mapping[Path, Any]) -> Candidate:
    boxed, table = params.get(layer.kind.key(path)), layer.kind.table
    names = [".".join(path)]
    holders = [] if layer.kind.equation is None else [".".join(path[:-1])]
    if boxed is None:
        return Candidate(names, holders, layer.shape, None, 1, 0, 1, table)
    weight = value_of(boxed)
    found = Candidate.of(
        names, weight, lambda: layer.equation_of(weight), table=table, holders=holders
    )
    return found._replace(shape=layer.shape)


def _rest(
    params: Mapping[Path, Any],
    variables: Mapping[str, Any],
    layers: Mapping[Path, Layer],
    classes: Mapping[Path, str],
) -> Rest:
    """The parameters except the weights of the layers that run."""
    rest = Rest()
    keys = {layer.kind.key(path): layer.kind.bias for path, layer in layers.items()}
    biases = {(*key[:-1], bias) for key, bias in keys.items() if bias}
    for key, boxed in params.items():
        if key in keys:
            continue
        module = classes.get(key[:-1], "a module that this call does not reach")
        for leaf in jax.tree.leaves(value_of(boxed)):
            rest.add(".".join(key), leaf, module, vector=key in biases, packed=False)
    for leaf in jax.tree.leaves(variables.get(COLLECTION, {})):
        rest.add("", leaf, "", vector=False, packed=True)
    return rest


def _reason(path: Path, layer: Layer, choice: Choice, params: Mapping[Path, Any]) -> str | None:
    """Returns the reason why a layer cannot be replaced, or None."""
    name, keep = ".".join(path), "with a rule of its path and None."
    if reason := _unsupported(path, layer, params):
        return f"the layer {name!r} {reason}. Keep it, {keep}"
    boxed = params[layer.kind.key(path)]
    weight = value_of(boxed)
    try:
        equation = layer.equation_of(weight)
    except ValueError as error:
        return f"in {name}: {inner(error)} Or keep the layer, {keep}"
    format: Any = choice.format
    try:
        quantized(jax.tree.map(abstract, boxed), Packing(format, choice.shards), equation)
        check_values(weight, format, equation.matrix, choice.shards)
    except ValueError as error:
        return f"in {name}: {inner(error)}"
    return None


def _unsupported(path: Path, layer: Layer, params: Mapping[Path, Any]) -> str | None:
    """Returns the reason in a layer's class, options or parameter why it cannot be replaced, or
    None."""
    kind, module = layer.kind, layer.module
    for option in kind.options:
        if getattr(module, option) is not None:
            return f"has {option}={getattr(module, option)!r}, but quantized layers lack it"
    if type(module) is not kind.layer:
        expected, found = kind.layer.__name__, type(module).__name__
        return f"is {found}, and a subclass of nn.{expected} may compute something else"
    if not path:
        return f"is the model itself; use Quantized{kind.layer.__name__} instead"
    if (*layer.path, kind.weight) not in params:
        return f"has no {kind.weight} of its own path in params, which it shares with another layer"
    if not layer.plain:
        return (
            f"computes its factor from {kind.weight} in each call, as nn.WeightNorm, "
            "nn.SpectralNorm and nn.map_variables do, or slices a stack along another axis than "
            f"the first, so quantizing {kind.weight} would change the model; store the computed "
            "factor as the parameter of a plain layer"
        )
    return None
