"""Finds the layers of a Linen model, and the parameters that they use, by tracing a call."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import core, traverse_util
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal, jaxprs_in_params

from .einsum_layers import EinsumLayer, EinsumParameter, check_used
from .equation import TABLE, Equation
from .linen_layers import KNOWN_PARAMETERS, Kind, kind_of, parameter_kind
from .linen_variables import value_of
from .weights import Path, Sizes

_MARK = "jaxlowbit layer "
# A new context makes `nn.jit` trace again, since calls in a cached trace are not intercepted.
_tracing = jax.make_user_context()


@dataclasses.dataclass
class Layer:
    """A layer that a model calls.

    - `path`: the path of the module. `nn.jit` may trace several modules once; they share one path.
    - `shape`: the shape of the weight in the call, without axes that lifted transforms map over;
      empty if the layer has no weight there.
    - `plain`: whether the weight is a parameter, or one of a stack along leading axes, and not
      computed.
    - `raw`: the equation of a raw parameter: one described by an `EinsumParameter`, or the table of
      an `nn.Embed` that other code reads too.
    """

    kind: Kind
    module: Any
    path: Path
    shape: tuple[int, ...]
    plain: bool = True
    raw: Equation | None = None

    def named_by(self, key: Path | None = None) -> Path:
        """The path of the layer in rules and variables, given the path of its parameter."""
        key = (*self.path, self.kind.weight) if key is None else key
        return key[:-1] if self.kind.equation is None else key

    def equation_of(self, weight: Any) -> Equation:
        """The equation of a weight, or of a stack of weights.

        **Raises:** `ValueError` if it is not a product.
        """
        return self.kind.equation_of(self.module, weight.shape)

    @property
    def sizes(self) -> Sizes:
        equation = self.kind.equation_of(self.module, self.shape)
        return equation.contracted, equation.features


def find_layers(
    module: nn.Module,
    variables: Any,
    args: Any,
    kwargs: Any,
    described: Sequence[EinsumLayer] = (),
    parameters: Sequence[EinsumParameter] = (),
) -> tuple[dict[Path, Layer], dict[Path, str]]:
    """Finds the layers that `module.apply` calls, in the order of their calls, without computing.

    Described raw parameters come last. The second result maps the path of every module that runs to
    its class.

    The weight of each call is marked in the traced program, and the mark is followed back to a
    parameter. This gives the path, also for layers that share a trace under `nn.jit`.
    """
    params = traverse_util.flatten_dict(core.unfreeze(variables.get("params", {})))
    recorder = _Recorder(module, described)
    program = _traced(module, params, variables, args, kwargs, recorder)
    keys = [key for key, boxed in params.items() for _ in jax.tree.leaves(boxed)]
    sources = dict(zip(program.invars, keys, strict=False))  # the other operands are not parameters
    found: dict[Path, Layer] = {}
    marks = collections.Counter()
    for name, key in _marks(program, sources):
        layer = recorder.calls[name]
        marks[key] += 1
        plain = key is not None and _holds(params[key], key, layer)
        path = layer.named_by(key) if key and plain else layer.named_by()
        found.setdefault(path, dataclasses.replace(layer)).plain &= plain
    for layer in recorder.calls.values():
        if not layer.shape:
            found.setdefault(layer.named_by(), layer)
    uses = _uses(program, sources)
    for path, layer in found.items():
        key = layer.kind.key(path)
        if layer.plain and layer.kind.table and uses[key] > marks[key]:
            layer.raw = Equation.parse(TABLE, layer.shape)
    raw = _raw_parameters(params, recorder.modules, parameters)
    found = {path: layer for path, layer in found.items() if layer.kind.key(path) not in raw}
    classes = {path: type(layer).__name__ for path, layer in recorder.modules.items()}
    return found | raw, classes


class _Recorder:
    """Intercepts the calls of a model, to record the layers and mark their weights."""

    def __init__(self, module: nn.Module, described: Sequence[EinsumLayer]) -> None:
        self.described = described
        self.calls: dict[str, Layer] = {}
        self.modules: dict[Path, nn.Module] = {}
        # Skips layers with an empty path: code applies them with `.apply` to computed variables.
        self.in_model = kind_of(module) is None

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer, method = context.module, context.method_name
        kind = kind_of(layer, method, self.described, args)
        self.modules.setdefault(layer.path, layer)
        if not layer.path and self.in_model:
            return next_fun(*args, **kwargs)
        if kind and method in kind.methods.keys() - {"setup"}:
            name = f"{_MARK}{(*layer.path, kind.weight)}"
            weight = value_of(layer.get_variable("params", kind.weight))
            shape = () if weight is None else weight.shape
            self.calls.setdefault(name, Layer(kind, layer.clone(parent=None), layer.path, shape))
            if weight is not None:
                checkpoint_name(weight, name)
        return next_fun(*args, **kwargs)


def _traced(
    module: nn.Module,
    params: Mapping[Path, Any],
    variables: Mapping[str, Any],
    args: Any,
    kwargs: Any,
    recorder: _Recorder,
) -> Any:
    """Traces `module.apply`; the first operands of the program are the parameters."""
    others = {name: held for name, held in variables.items() if name != "params"}
    leaves, tree = jax.tree.flatten(args)
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")}

    def apply(weights: list[Any], others: Any, arrays: dict[int, Any]) -> Any:
        held = traverse_util.unflatten_dict(dict(zip(params, weights, strict=True)))
        given = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        args = jax.tree.unflatten(tree, given)  # numbers and names are not operands
        return module.apply({**others, "params": held}, *args, **kwargs)

    with _tracing(object()), nn.intercept_methods(recorder):
        return jax.make_jaxpr(apply)(list(params.values()), others, arrays).jaxpr


def _raw_parameters(
    params: Mapping[Path, Any],
    modules: Mapping[Path, nn.Module],
    described: Sequence[EinsumParameter],
) -> dict[Path, Layer]:
    """The described parameters of modules that run, by their paths."""
    found: dict[Path, Layer] = {}
    used: list[EinsumParameter] = []
    for key, boxed in params.items():
        module = modules.get(key[:-1])
        if module is None:
            continue
        for other in (*described, *KNOWN_PARAMETERS):
            if other.matches(".".join(key), type(module)):
                found[key] = _raw_layer(key, value_of(boxed).shape, module, other)
                used.append(other)
                break
    check_used(described, used, [".".join(key) for key in params if key[:-1] in modules])
    return found


def _raw_layer(key: Path, shape: tuple[int, ...], module: Any, other: EinsumParameter) -> Layer:
    module = module.clone(parent=None)
    kind = parameter_kind(module, key[-1], other)
    try:
        equation = other.parsed(module, shape)
    except ValueError:  # raised later, if rules choose the parameter
        return Layer(kind, module, key[:-1], shape)
    letters = len(equation.kernel_shape)
    return Layer(kind, module, key[:-1], shape[len(shape) - letters :], raw=equation)


def _holds(boxed: Any, key: Path, layer: Layer) -> bool:
    """Whether a parameter is the weight of a layer, or a stack of such weights along leading
    axes."""
    shape = value_of(boxed).shape
    return key[-1] == layer.kind.weight and shape[len(shape) - len(layer.shape) :] == layer.shape


def _uses(program: Any, sources: Mapping[Any, Path]) -> collections.Counter[Path]:
    """Counts the operations of a program that use each parameter, without marks."""
    uses: collections.Counter[Path] = collections.Counter()
    for equation in program.eqns:
        operands = [None if isinstance(x, Literal) else sources.get(x) for x in equation.invars]
        programs = list(jaxprs_in_params(equation.params))
        for inner in programs:
            given = zip(reversed(inner.invars), reversed(operands), strict=False)
            uses += _uses(inner, {x: key for x, key in given if key is not None})
        if not programs and equation.primitive.name != "name":
            uses.update(key for key in operands if key is not None)
    return uses


def _marks(program: Any, sources: Mapping[Any, Path]) -> Iterator[tuple[str, Path | None]]:
    """The name of each mark, with the parameter that it marks, or None.

    The operands of an inner program (`jit`, `scan`, `checkpoint`) are the last of its equation.
    """
    for equation in program.eqns:
        operands = [None if isinstance(x, Literal) else sources.get(x) for x in equation.invars]
        if equation.primitive.name == "name" and equation.params["name"].startswith(_MARK):
            yield equation.params["name"], operands[0]
        for inner in jaxprs_in_params(equation.params):
            given = zip(reversed(inner.invars), reversed(operands), strict=False)
            yield from _marks(inner, {x: key for x, key in given if key is not None})
