"""`quantize_model` for NNX: replaces layers in place, one after the other."""

import dataclasses
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from .._core.array import QuantizedArray
from .._core.checks import brief
from .._core.format import Format
from ..quantizers import Calibration
from .arguments import inner, not_a_model
from .calibration import Layers, calibrate, checked
from .einsum_layers import EinsumLayer, EinsumParameter, check_used, matches, split
from .equation import TABLE, Equation
from .nnx_layers import QuantizedEinsum, QuantizedEmbed, QuantizedLinear, QuantizedLinearGeneral
from .nnx_parameters import QuantizedParameter, adopt
from .nnx_variables import QuantizedModule, QuantizedVariable
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
from .weights import EXPECTED, Scaled, Shards, abstract, check_values, quantizing_by

_LAYERS = (QuantizedLinear, QuantizedLinearGeneral, QuantizedEinsum, QuantizedEmbed)
_NAMES = ", ".join(f"nnx.{layer.float_layer.__name__}" for layer in _LAYERS)


def _dense_equation(layer: Any) -> str:
    """The equation of MaxText's `DenseGeneral`: its kernel has the contracted axes first."""
    letters = string.ascii_letters[: len(layer.in_features_shape + layer.out_features_shape)]
    count = len(layer.in_features_shape)
    return f"...{letters[:count]},{letters}->...{letters[count:]}"


# Known layers and parameters of other packages, identified by class name.
_KNOWN_LAYERS = (
    EinsumLayer(r"tunix\.models\.\w+\.model\.Einsum", "w", lambda layer: layer.einsum_str),
)
_KNOWN_PARAMETERS = (
    EinsumParameter(
        r"(^|\.)input_embedding$",
        TABLE,
        module=r"tunix\.models\.\w+\.model\.Embedder",
        embedding=True,
    ),
    EinsumParameter(
        r"(^|\.)(gate|up|down)_proj$",
        "e...k,ekn->e...n",
        module=r"tunix\.models\.\w+\.model\.MoELayer",
    ),
    EinsumParameter(
        r"(^|\.)gating_einsum$",
        "e...d,eghd->e...gh",
        module=r"tunix\.models\.gemma4\.moe\.MoERagged",
    ),
    EinsumParameter(
        r"(^|\.)linear$", "e...k,ekn->e...n", module=r"tunix\.models\.gemma4\.moe\.MoERagged"
    ),
    EinsumParameter(
        r"(^|\.)kernel$", _dense_equation, module=r"maxtext\.layers\.linears\.DenseGeneral"
    ),
    EinsumParameter(
        r"(^|\.)embedding$", TABLE, module=r"maxtext\.layers\.embeddings\.Embed", embedding=True
    ),
    EinsumParameter(
        r"(^|\.)embedder\.embedding$",
        TABLE,
        embedding=True,
        reader=r"mamba2_jax\.modeling\.Mamba2ForCausalLM",
    ),
)


def quantize_model(
    model: nnx.Module,
    rules: Rules,
    *,
    layers: Sequence[EinsumLayer | EinsumParameter] = (),
    keep: Keep = (),
    shards: ShardRules = (1, 1),
    lhs_qtype: ActivationRules = None,
    quantizer: Any = None,
    calibration: Any = None,
) -> QuantizationReport:
    """Replaces the linear layers of a model, in place, with quantized layers.

    Layers are replaced one by one, and each float kernel is freed before the next is read, so at
    most one layer exists twice. A layer that occurs in several places is replaced by one layer in
    all of them. An abstract model, made under `nnx.eval_shape`, becomes an abstract quantized one,
    ready for `nnx.update` with stored arrays.

    **Arguments:**

    - `model`: any tree of modules, lists and dicts. Layers of class `nnx.Linear`,
      `nnx.LinearGeneral` (and so attention), `nnx.Einsum` and, if a rule names it, `nnx.Embed` are
      replaced; norms and convolutions are not.
    - `rules`: a `Format`, or its name, such as `"int4"`, for all of these layers except embeddings,
      heads (with a usual name, or as wide as the vocabulary), routers and layers that would grow;
      or regular expressions with a `Format`, or None to leave the layer in floats, as a mapping or
      pairs. Each is searched (`re.search`) in the dotted path of the layer, such as
      `blocks.0.mlp.up`. The first match decides; layers without a match stay in floats.
    - `layers`: further layers to quantize: other classes of layers, each an `EinsumLayer`, and raw
      parameters, each an `EinsumParameter`, identified by their paths. Parameters of
      google-tunix, MaxText and mamba2-jax are known.
    - `keep`: one or several regular expressions of further layers to leave in floats.
    - `shards`: the numbers of shards of k and n if devices share a kernel, as in
      `jaxlowbit.quantize`, or a mapping from such regular expressions to these pairs.
    - `lhs_qtype`: `jnp.int8` or `jnp.float8_e4m3fn` to quantize the inputs of all quantized
      layers except embeddings in each call, as in `jaxlowbit.quantized_matmul`, or None; or a
      mapping from such regular expressions, on the paths of quantized layers, to one of these.
    - `quantizer`: the name of the quantizer, or a function, as for `jaxlowbit.quantize`.
    - `calibration`: None, or inputs for quantizers that read statistics, such as `"gptq"`: batches
      of `model(batch)`, or a `jaxlowbit.quantizers.Calibration`. After an error during calibration,
      the layers processed before it stay quantized.

    **Returns:** a `QuantizationReport` with the sizes, errors and backends of the layers, and the
    parameters that are not covered. It prints as a table.

    **Raises:** with the model unchanged: `TypeError` for another type of model or rules;
    `ValueError` for a model without such layers, for rules that match no layer or leave all layers
    in floats, and for all chosen layers that cannot be replaced: because of their options or
    weights, as in `jaxlowbit.quantize`, or because `nnx.WeightNorm` or `nnx.SpectralNorm` rewrites
    their weights in each call. **Warns** (`UserWarning`) if more than a tenth of the bytes is in
    parameters outside of such layers.

    ```python
    model = nnx.Sequential(nnx.Linear(256, 512, rngs=rngs), nnx.Linear(512, 256, rngs=rngs))
    print(quantize_model(model, {r"layers\\.0": "int4", r"layers\\.1": "int8"}))
    ```
    """
    _check_model(model)
    calibration = checked(quantizer, calibration)
    places = _places(model, layers)
    if not places:
        raise ValueError(
            f"quantize_model: there is none of {_NAMES} in the model, so there is nothing to "
            "quantize; pass a float model that has such layers, none of them quantized yet."
        )
    rest = _rest(model, places)
    candidates = [place.candidate for place in places]
    choices, kept = choose(candidates, rest.uncovered, rules, keep, shards, lhs_qtype)
    owners, rewritten = _owners(model), _rewritten(model)
    reports = []
    with quantizing_by("quantize_model", quantizer, calibration and EXPECTED):
        check_replaceable(
            (place.paths[0], _reason(place, choice, owners, rewritten))
            for place, choice in zip(places, choices, strict=True)
            if choice.format is not None
        )
    if calibration is not None:
        reports = _calibrated(model, layers, places, choices, quantizer, calibration)
        places = []
    with quantizing_by("quantize_model", quantizer):
        while places:  # drops each place, and with it the float layer, before the next
            reports.append(_replace(places.pop(0), choices.pop(0)))
    report = rest.report(reports, kept)
    report.warn(_NAMES)
    return report


class _Kind(NamedTuple):
    """How to quantize a kind of layer, or the module of a raw parameter.

    - `weight`: the name of the attribute with its weight.
    - `equation`: returns the equation of the weight; raises `ValueError` if it is not a product.
    - `check`: raises `TypeError` or `ValueError` for a layer that cannot be replaced.
    - `quantize`: makes the quantized layer, given the format, shards and activation dtype.
    - `table`: whether it is an embedding.
    """

    weight: str
    equation: Callable[[Any], Equation]
    check: Callable[[Any], Any]
    quantize: Callable[[Any, Format, Shards, Any], QuantizedModule]
    table: bool = False


def _kind_of(node: Any, described: Sequence[EinsumLayer]) -> _Kind | None:
    """Returns the kind of a layer of Flax, of another package, or one that the caller describes."""
    for other in (*described, *_KNOWN_LAYERS):
        if other.matches(node):
            return _kind_of_other(node, other)
    for cls in _LAYERS:
        if isinstance(node, cls.float_layer):
            table = cls is QuantizedEmbed
            return _Kind(cls.weight_name, cls.equation_of, cls.check_layer, cls.from_layer, table)
    return None


def _kind_of_other(node: Any, other: EinsumLayer) -> _Kind:
    weight = other.weight_of(node)
    if not isinstance(found := getattr(node, weight, None), nnx.Variable):
        raise ValueError(
            f"quantize_model: {type(node).__name__} has {weight}={brief(found)}, but the weight of "
            "an EinsumLayer is an nnx.Variable; name the attribute that holds it."
        )

    def equation(layer: Any) -> Equation:
        return Equation.parse(other.equation_of(layer), getattr(layer, weight).get_value().shape)

    def quantize(layer: Any, format: Format, shards: Shards, lhs_qtype: Any) -> QuantizedModule:
        variable = getattr(layer, weight)
        value = variable.get_value()
        new = QuantizedEinsum(
            other.equation_of(layer),
            value.shape,
            format=format,
            shards=shards,
            lhs_qtype=lhs_qtype,
            dtype=getattr(layer, "dtype", None),
            param_dtype=value.dtype,
            kernel_init=lambda *_: variable,
            rngs=nnx.Rngs(0),
        )
        bias = None if other.bias is None else getattr(layer, other.bias)
        if bias is not None:
            new.bias, new.bias_shape = bias, bias.get_value().shape
        # Code outside the layer may read its other attributes, such as its shape.
        for name, told in vars(layer).items():
            if not hasattr(new, name) and not isinstance(told, nnx.Variable | nnx.Module):
                setattr(new, name, told)
        return new

    return _Kind(weight, equation, other.equation_of, quantize)


def _kind_of_parameter(name: str, other: EinsumParameter) -> _Kind:
    def equation(holder: Any) -> Equation:
        return other.parsed(holder, tuple(getattr(holder, name).get_value().shape))

    def quantize(holder: Any, format: Format, shards: Shards, lhs_qtype: Any) -> QuantizedModule:
        weight = getattr(holder, name)
        return QuantizedParameter(weight, equation(holder), format, shards, lhs_qtype)

    return _Kind(name, equation, equation, quantize, other.embedding)


@dataclasses.dataclass
class _Place:
    """A layer, with every container and key that refers to it in the model.

    For a raw parameter, `layer` is its module, and `readers` are the outer modules whose code reads
    it too.
    """

    layer: Any
    kind: _Kind
    paths: list[str]
    holders: list[tuple[Any, Any]]
    readers: Sequence[Any] = ()

    @property
    def raw(self) -> bool:
        return any(holder is self.layer for holder, _ in self.holders)

    @property
    def weight(self) -> nnx.Variable:
        return getattr(self.layer, self.kind.weight)

    @property
    def candidate(self) -> Candidate:
        return Candidate.of(
            self.paths,
            self.weight.get_value(),
            lambda: self.kind.equation(self.layer),
            table=self.kind.table,
            holders=[path.rpartition(".")[0] for path in self.paths if self.raw],
        )


def _places(
    model: nnx.Module, layers: Sequence[EinsumLayer | EinsumParameter], *, partly: bool = False
) -> list[_Place]:
    """All layers and raw parameters that can be quantized, once each, in the order of attributes.

    `partly`: whether some of them are quantized already.
    """
    others, parameters = split(layers)
    raw = _parameters(model, parameters, partly)
    taken = {id(place.weight) for place in raw}
    found: dict[int, _Place] = {}
    order: dict[int, int] = {}
    for at, (path, holder, key, node) in enumerate(_walk((), None, None, model, set())):
        order[id(node)] = at
        kind = _kind_of(node, others)
        if kind and id(getattr(node, kind.weight)) not in taken:
            place = found.setdefault(id(node), _Place(node, kind, [], []))
            place.paths.append(_dotted(path))
            place.holders.append((holder, key))
    return sorted([*raw, *found.values()], key=lambda place: order[id(place.weight)])


def _parameters(
    model: nnx.Module, described: Sequence[EinsumParameter], partly: bool
) -> list[_Place]:
    """All raw parameters that can be quantized, by their modules."""
    places: list[_Place] = []
    used: list[EinsumParameter] = []
    paths: list[str] = []
    modules = list(nnx.iter_modules(model)) if isinstance(model, nnx.Pytree) else []
    for path, holder, key, node in _walk((), None, None, model, set()):
        if not isinstance(node, nnx.Param) or not isinstance(holder, nnx.Module):
            continue
        name = _dotted(path)
        paths.append(name)
        for other in (*described, *_KNOWN_PARAMETERS):
            if other.matches(name, type(holder)):
                readers = [
                    module
                    for above, module in modules
                    if other.reader and above == path[: len(above)]
                    if matches(other.reader, type(module))
                ]
                if other.reader and not readers:
                    continue
                kind = _kind_of_parameter(key, other)
                places.append(_Place(holder, kind, [name], [(holder, key)], readers))
                used.append(other)
                break
    if not partly:
        check_used(described, used, paths)
    return places


def _reason(
    place: _Place, choice: Choice, owners: dict[int, list[str]], rewritten: dict[int, str]
) -> str | None:
    """Returns the reason why a layer cannot be replaced, or None."""
    name, kind = place.paths[0] or "the model", place.kind
    try:
        kind.check(place.layer)
    except (TypeError, ValueError) as error:
        return f"in {name}: {inner(error)} Or keep the layer, with a rule of its path and None."
    if not all(isinstance(holder, nnx.Pytree | list | dict) for holder, _ in place.holders):
        return (
            f"{name} is the model itself or an element of a tuple, where nothing can be "
            "replaced; quantize the layer itself, as with QuantizedLinear.from_linear, or use "
            "an nnx.List instead of the tuple."
        )
    sharing = owners[id(place.weight)]
    if len(sharing) > 1:
        return (
            f"{' and '.join(sharing)} share one kernel variable, which must be quantized "
            "for all or none; share the layer itself, or keep it with a rule of its path and "
            "None."
        )
    if wrapper := rewritten.get(id(place.layer)):
        return (
            f"{name} is inside {wrapper}, which computes its {kind.weight} anew in each "
            "call and would leave a quantized one as it is; put the layer in place of the "
            "wrapper once its weight is computed, or keep it with a rule of its path and None."
        )
    graph, state = nnx.split(place.layer)
    format: Any = choice.format
    try:
        like = nnx.merge(graph, jax.tree.map(abstract, state))
        layer = kind.quantize(like, format, choice.shards, None)
        check_values(place.weight.get_value(), format, layer.matrix, choice.shards)
    except ValueError as error:
        return f"in {name}: {inner(error)}"
    return None


def _replace(place: _Place, choice: Choice) -> LayerReport:
    path, weight = place.paths[0], place.weight.get_value()
    if choice.format is None:
        return LayerReport.kept(path, weight, choice.reason, choice.by_default)
    options = choice.format, choice.shards, choice.lhs_qtype
    try:
        layer = place.kind.quantize(place.layer, *options)
    except ValueError as error:
        raise ValueError(f"quantize_model: in {path}: {inner(error)}") from None
    for holder, key in place.holders:
        if isinstance(holder, nnx.List | list | dict):
            holder[key] = layer
        else:
            setattr(holder, key, layer)
        if isinstance(layer, QuantizedParameter):
            for module in (place.layer, *place.readers):
                adopt(module)
    kernel = layer.kernel
    dtype = layer.dtype or kernel.dtype
    inputs = options[-1], layer.factor
    return LayerReport.quantized(path, weight, kernel, dtype, layer.matrix, *inputs)


def _calibrated(
    model: nnx.Module,
    described: Sequence[EinsumLayer | EinsumParameter],
    places: list[_Place],
    choices: list[Choice],
    quantizer: Any,
    calibration: Calibration,
) -> list[LayerReport]:
    """Replaces layers one after the other, with statistics of their inputs."""
    named = {place.paths[0]: (place, choice) for place, choice in zip(places, choices, strict=True)}
    reports = {name: _replace(*pair) for name, pair in named.items() if pair[1].format is None}
    formats: Any = {name: x.format for name, (_, x) in named.items() if x.format is not None}

    def run_batch(names: Sequence[str], batch: Any, record: Any) -> None:
        graph, state = nnx.split(model)
        state = nnx.as_pure(state)

        def compute(floats: dict[str, Any]) -> tuple[()]:
            copy = nnx.merge(graph, state)
            for place in _places(copy, described, partly=True):
                if place.paths[0] in floats:
                    place.weight.set_value(floats[place.paths[0]])
            (calibration.apply or _call)(copy, batch)
            return ()

        views = {}
        for name in names:
            place = named[name][0]
            weight, equation = place.weight.get_value(), place.kind.equation(place.layer)
            views[name] = RecordingView.recording(name, weight, equation, record)
        run(compute, views)

    def replace(name: str, quantizer: Any, statistics: Any) -> Scaled:
        with quantizing_by("quantize_model", quantizer, statistics):
            reports[name] = _replace(*named[name])
        place, _ = named.pop(name)
        holder, key = place.holders[0]
        listed = isinstance(holder, nnx.List | list | dict)
        layer = holder[key] if listed else getattr(holder, key)
        return Scaled(layer.kernel, layer.factor)

    tables = frozenset(name for name, (place, _) in named.items() if place.kind.table)
    order = list(named)
    calibrate(Layers(formats, tables, run_batch, replace), quantizer, calibration)
    return [reports[name] for name in order]


def _call(model: Any, batch: Any) -> Any:
    return model(batch)


def _check_model(model: Any) -> None:
    """Raises `TypeError` for an object that contains no NNX module."""
    if isinstance(model, nnx.Pytree | list | tuple | dict) and any(
        isinstance(node, nnx.Module) for *_, node in _walk((), None, None, model, set())
    ):
        return
    wanted = (
        "pass the nnx.Module itself, with its weights in it, such as nnx.merge(graphdef, state)."
    )
    if isinstance(model, nn.Module):
        wanted = "use jaxlowbit.linen.quantize_model(module, variables, rules, inputs)."
    raise not_a_model(model, wanted)


def _rest(model: nnx.Module, places: list[_Place]) -> Rest:
    """The parameters of a model except the weights of its layers."""
    weights = {id(place.weight) for place in places}
    layers = {id(place.layer) for place in places if not place.raw}
    found, seen = Rest(), set(weights)
    for path, holder, _, node in _walk((), None, None, model, set()):
        if id(node) in seen or not isinstance(node, nnx.Param | QuantizedVariable | jax.Array):
            continue
        seen.add(id(node))
        value = node.get_value() if isinstance(node, nnx.Variable) else node
        packed = isinstance(node, QuantizedVariable) or isinstance(value, QuantizedArray)
        vector = id(holder) in layers or isinstance(holder, QuantizedModule)
        for leaf in jax.tree.leaves(value):
            if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.number):
                found.add(_dotted(path), leaf, type(holder).__name__, vector=vector, packed=packed)
    return found


def _owners(model: nnx.Module) -> dict[int, list[str]]:
    """The paths of the modules that have each variable as an attribute."""
    owners: dict[int, list[str]] = {}
    for path, module in nnx.iter_modules(model):
        for child in vars(module).values():
            if isinstance(child, nnx.Variable):
                owners.setdefault(id(child), []).append(_dotted(path))
    return owners


def _rewritten(model: nnx.Module) -> dict[int, str]:
    """Maps the modules inside of wrappers that rewrite parameters in each call to the wrapper's
    class."""
    return {
        id(module): f"nnx.{type(wrapper).__name__}"
        for _, wrapper in nnx.iter_modules(model)
        if isinstance(wrapper, nnx.WeightNorm | nnx.SpectralNorm)
        for _, module in nnx.iter_modules(wrapper)
    }


def _walk(
    path: tuple[Any, ...], holder: Any, key: Any, node: Any, visited: set[int]
) -> Iterator[tuple[tuple[Any, ...], Any, Any, Any]]:
    """Path, container, key and node of every edge of the model; descends into each node once."""
    yield path, holder, key, node
    if id(node) in visited:
        return
    visited.add(id(node))
    for name, child in _children(node):
        yield from _walk((*path, name), node, name, child, visited)


def _children(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, nnx.List | list | tuple):
        return list(enumerate(node))
    if isinstance(node, dict):
        return list(node.items())
    if isinstance(node, nnx.Pytree):
        return [item for item in vars(node).items() if not item[0].startswith("_pytree__")]
    return []


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
