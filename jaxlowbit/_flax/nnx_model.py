"""`quantize_model` for NNX: layers are replaced where they stand, one after the other."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from .._core.array import QuantizedArray
from .._core.format import Format
from . import defaults
from .defaults import Candidate, is_table
from .einsum_layers import EinsumLayer, matches
from .einsum_parameters import EinsumParameter, check_used, split
from .nnx_kinds import KNOWN_PARAMETERS, NAMES, Kind, kind_of, parameter_kind
from .nnx_parameters import QuantizedParameter, adopt
from .nnx_variables import QuantizedModule, QuantizedVariable
from .refusals import inner, not_a_model, refuse, refuse_nothing
from .report import LayerReport, QuantizationReport, Rest, nbytes_of
from .rules import (
    ActivationRules,
    Decision,
    Keep,
    Rules,
    ShardRules,
    choose,
    choose_activations,
    choose_shards,
)
from .weights import Shards, abstract, check_values, quantizing_by


def quantize_model(
    model: nnx.Module,
    rules: Rules,
    *,
    layers: Sequence[EinsumLayer | EinsumParameter] = (),
    keep: Keep = (),
    shards: ShardRules = (1, 1),
    activation_dtype: ActivationRules = None,
    quantizer: Any = None,
) -> QuantizationReport:
    """Replaces the linear layers of a model, in place, by layers with quantized kernels.

    Layers change one by one, and each float kernel is dropped before the next is read: beyond the
    model, one layer exists twice at most. A layer that stands in several places is replaced by
    one layer in all of them. An abstract model, made under `nnx.eval_shape`, becomes an abstract
    quantized one, ready for `nnx.update` with stored arrays.

    **Arguments:**

    - `model`: any tree of modules, lists and dicts. Layers of class `nnx.Linear`,
      `nnx.LinearGeneral` (with it attention), `nnx.Einsum` and, where a rule names it, `nnx.Embed`
      change; norms and convolutions stay.
    - `rules`: a `Format`, or its name, such as `"int4"`, for every such layer but embeddings,
      heads (names that match `HEADS`, and layers as wide as the vocabulary), routers and layers
      that would grow; or regular expressions with a `Format`, or None to keep the layer, as a
      mapping or pairs. Each is searched (`re.search`) in the dotted path of the layer, such as
      `blocks.0.mlp.up`; the first that matches decides, and a layer that none matches is kept.
    - `layers`: what is quantized too: other classes of layers, each an `EinsumLayer`, and raw
      parameters, each an `EinsumParameter`, which go by their own paths. Those of google-tunix,
      MaxText and mamba2-jax are known.
    - `keep`: a regular expression, or several, of layers that stay in floats beside those.
    - `shards`: the number of equal parts of k and n into which devices will cut each kernel, as for
      `jaxlowbit.quantize`, or a mapping of such regular expressions to them.
    - `activation_dtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, to which all quantized layers
      but embeddings quantize their inputs in each call, as `jaxlowbit.quantized_matmul` does; or a
      mapping of such regular expressions, on the paths of quantized layers, to one of these.
    - `quantizer`: what rounds the weights, a name or a function, as for `jaxlowbit.quantize`.

    **Returns:** a `QuantizationReport`, a table when printed: sizes, errors, what multiplies, and
    the parameters that are not covered.

    **Raises:** with the model untouched, `TypeError` for what is no model and for rules that are
    none; `ValueError` for a model without such layers, for rules that decide about no layer or
    keep them all, and for all chosen layers that cannot be replaced: because of their options,
    their weights, as `jaxlowbit.quantize` does, or since `nnx.WeightNorm` or `nnx.SpectralNorm`
    rewrites their weights in each call. **Warns** (`UserWarning`) where more than a tenth of the
    bytes is in parameters that no such layer holds.

    ```python
    model = nnx.Sequential(nnx.Linear(256, 512, rngs=rngs), nnx.Linear(512, 256, rngs=rngs))
    print(quantize_model(model, {r"layers\\.0": "int4", r"layers\\.1": "int8"}))
    ```
    """
    _check_model(model)
    others, parameters = split(layers)
    raw = _parameters(model, parameters)
    places = raw + _layers(model, others, {id(place.weight) for place in raw})
    order = {id(node): at for at, (*_, node) in enumerate(_walk((), None, None, model, set()))}
    places.sort(key=lambda place: order[id(place.weight)])
    if not places:
        raise ValueError(
            f"quantize_model: there is none of {NAMES} in the model, so there is nothing to "
            "quantize; pass a float model that has such layers, none of them quantized yet."
        )
    rest = _rest(model, places)
    paths = [place.paths for place in places]
    parts = choose_shards(shards, paths)
    candidates = [place.candidate for place in places]
    tables = [found.shape for found in rest.uncovered if is_table(found.path, found.shape)]
    decisions, kept = choose(
        rules,
        keep,
        paths,
        [found.path for found in rest.uncovered],
        functools.partial(defaults.kept, candidates, tables, parts),
    )
    refuse_nothing(
        [
            (place.paths[0], place.shape, None if decision.format else decision.reason)
            for place, decision in zip(places, decisions, strict=True)
        ]
    )
    named = [place.kind.named for place in places]
    dtypes = choose_activations(activation_dtype, paths, decisions, named)
    owners, rewritten = _owners(model), _rewritten(model)
    chosen = zip(places, decisions, parts, strict=True)
    reports = []
    with quantizing_by("quantize_model", quantizer):
        refuse(
            (place.paths[0], place.refusal(decision.format, shards, owners, rewritten))
            for place, decision, shards in chosen
            if decision.format is not None
        )
        while places:  # drops each place, and with it the float layer, before the next
            options = parts.pop(0), dtypes.pop(0)
            reports.append(_replace(places.pop(0), decisions.pop(0), *options))
    report = rest.report(reports, kept)
    report.warn(
        f"Only {NAMES} are, and what layers= describes: an EinsumLayer "
        "says it of a class, an EinsumParameter of a path."
    )
    return report


@dataclasses.dataclass
class _Place:
    """A layer, and every container and key under which a model holds it.

    A raw parameter is one whose `layer` is the module that holds it; `readers` are the modules
    around that whose code reads it too.
    """

    layer: Any
    kind: Kind
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
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.get_value().shape)

    @property
    def candidate(self) -> Candidate:
        weight, matrix = self.weight.get_value(), None
        with contextlib.suppress(ValueError):  # an equation that is no product is refused later
            matrix = self.kind.matrix(self.layer)
        count = math.prod(weight.shape) // math.prod(matrix) if matrix else 1
        itemsize = weight.dtype.itemsize
        # A raw parameter is named by the module that holds it too.
        paths = self.paths + [path.rpartition(".")[0] for path in self.paths if self.raw]
        return Candidate(paths, matrix, count, nbytes_of(weight), itemsize, self.kind.named)

    def refusal(
        self,
        format: Format,
        shards: Shards,
        owners: dict[int, list[str]],
        rewritten: dict[int, str],
    ) -> str | None:
        """Why the layer cannot be replaced."""
        name = self.paths[0] or "the model"
        try:
            self.kind.check(self.layer)
        except (TypeError, ValueError) as error:
            return f"in {name}: {inner(error)} Or keep the layer, with a rule of its path and None."
        if not all(isinstance(holder, nnx.Pytree | list | dict) for holder, _ in self.holders):
            return (
                f"{name} is the model itself or an element of a tuple, where nothing can be "
                "replaced; quantize the layer alone, as with QuantizedLinear.from_linear, or use "
                "an nnx.List instead of the tuple."
            )
        sharing = owners[id(self.weight)]
        if len(sharing) > 1:
            return (
                f"{' and '.join(sharing)} share one kernel variable, which one of them cannot "
                "quantize alone; share the layer itself, or keep it with a rule of its path and "
                "None."
            )
        if wrapper := rewritten.get(id(self.layer)):
            return (
                f"{name} is inside {wrapper}, which computes its {self.kind.weight} anew in each "
                "call and would leave a quantized one as it is; put the layer in place of the "
                "wrapper once its weight is computed, or keep it with a rule of its path and None."
            )
        graph, state = nnx.split(self.layer)
        try:
            like = nnx.merge(graph, jax.tree.map(abstract, state))
            layer = self.kind.quantize(like, format, shards, None)
            check_values(self.weight.get_value(), format, layer.matrix, shards)
        except ValueError as error:
            return f"in {name}: {inner(error)}"
        return None


def _replace(
    place: _Place, decision: Decision, shards: Shards, activation_dtype: Any
) -> LayerReport:
    path, weight = place.paths[0], place.weight.get_value()
    if decision.format is None:
        return LayerReport.kept(path, weight, decision.reason, decision.by_default)
    try:
        layer = place.kind.quantize(place.layer, decision.format, shards, activation_dtype)
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
    return LayerReport.quantized(path, weight, kernel, dtype, layer.matrix, activation_dtype)


def _check_model(model: Any) -> None:
    """Refuses what holds no NNX module."""
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
    """The parameters of a model but the weights of its layers."""
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


def _parameters(model: nnx.Module, described: Sequence[EinsumParameter]) -> list[_Place]:
    """Every raw parameter that can be quantized, by the modules that hold it."""
    places: list[_Place] = []
    used: list[EinsumParameter] = []
    paths: list[str] = []
    modules = list(nnx.iter_modules(model)) if isinstance(model, nnx.Pytree) else []
    for path, holder, key, node in _walk((), None, None, model, set()):
        if not isinstance(node, nnx.Param) or not isinstance(holder, nnx.Module):
            continue
        name = _dotted(path)
        paths.append(name)
        for other in (*described, *KNOWN_PARAMETERS):
            if other.matches(name, type(holder)):
                readers = [
                    module
                    for above, module in modules
                    if other.reader and above == path[: len(above)]
                    if matches(other.reader, type(module))
                ]
                if other.reader and not readers:
                    continue
                kind = parameter_kind(holder, key, other)
                places.append(_Place(holder, kind, [name], [(holder, key)], readers))
                used.append(other)
                break
    check_used(described, used, paths)
    return places


def _layers(model: nnx.Module, others: Sequence[EinsumLayer], taken: set[int]) -> list[_Place]:
    """Every layer that can be quantized, once, in the order of the model's attributes.

    Those whose weights, by their ids, are `taken` as raw parameters are none.
    """
    places: dict[int, _Place] = {}
    for path, holder, key, node in _walk((), None, None, model, set()):
        if kind := kind_of(node, others):
            if id(getattr(node, kind.weight)) in taken:
                continue
            place = places.setdefault(id(node), _Place(node, kind, [], []))
            place.paths.append(_dotted(path))
            place.holders.append((holder, key))
    return list(places.values())


def _owners(model: nnx.Module) -> dict[int, list[str]]:
    """The paths of the modules that hold each variable."""
    owners: dict[int, list[str]] = {}
    for path, module in nnx.iter_modules(model):
        for child in vars(module).values():
            if isinstance(child, nnx.Variable):
                owners.setdefault(id(child), []).append(_dotted(path))
    return owners


def _rewritten(model: nnx.Module) -> dict[int, str]:
    """The modules inside one that rewrites their parameters when it is called, and its class."""
    return {
        id(module): f"nnx.{type(wrapper).__name__}"
        for _, wrapper in nnx.iter_modules(model)
        if isinstance(wrapper, nnx.WeightNorm | nnx.SpectralNorm)
        for _, module in nnx.iter_modules(wrapper)
    }


def _walk(
    path: tuple[Any, ...], holder: Any, key: Any, node: Any, visited: set[int]
) -> Iterator[tuple[tuple[Any, ...], Any, Any, Any]]:
    """Path, holder, key and node of every edge of the model; goes below each node once."""
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
