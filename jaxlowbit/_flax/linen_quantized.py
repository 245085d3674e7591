"""`QuantizedModel`: a Linen module whose products are those of quantized kernels."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from flax import core, traverse_util
from flax import linen as nn

from .._core.array import QuantizedArray
from .._core.checks import brief
from .._core.format import Format
from .einsum_layers import EinsumLayer
from .equation import Equation
from .linen_kinds import kind_of
from .linen_layers import Layer, Path, find_layers
from .linen_variables import COLLECTION, held_kernel, quantized, value_of
from .weight_program import run
from .weight_view import WeightView
from .weights import Packing, Shards, Sizes

_PACKING = "packing"  # beside the arrays while a model is applied, never stored


@dataclasses.dataclass(frozen=True)
class QuantizedModel:
    """A Linen module some of whose layers have quantized kernels; see `quantize_model`.

    Immutable and hashable. `apply`, `init` and `bind` are those of the module, with quantized
    variables; nothing else of a module depends on its kernels. `sizes` are those of the contracted
    axes and of the features of each kernel, which inputs are held to. `parameters` are those that
    the code multiplies by wherever it reads them: their paths in `params`, and equations.
    """

    module: nn.Module
    formats: tuple[tuple[Path, Format], ...]
    shards: tuple[tuple[Path, Shards], ...]
    sizes: tuple[tuple[Path, Sizes], ...] = ()
    equations: tuple[tuple[Path, tuple[str, tuple[int, ...]]], ...] = ()
    layers: tuple[EinsumLayer, ...] = ()
    parameters: tuple[tuple[Path, tuple[Path, Equation]], ...] = ()
    activation_dtypes: tuple[tuple[Path, Any], ...] = ()

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """`module.apply`, with the same arguments, on the quantized variables.

        **Raises:** `ValueError` if the kernel of a quantized layer is not among the variables, or
        has other sizes than the layer and its inputs; these are errors of `flax.errors` too, those
        that the float layer raises.
        """
        held = self._with_packings(variables)

        def apply(floats: Mapping[Path, Any]) -> Any:
            with self._multiplying():
                return self.module.apply(_with_params(held, floats), *args, **kwargs)

        out = self._with_floats(apply, variables, kwargs) if self.parameters else apply({})
        if kwargs.get("mutable", False) is False:
            return out
        result, changed = out
        return result, _without_packings(changed)

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`module.init`, with the same arguments, whose kernels are then quantized.

        Layers that these arguments do not reach are not initialised, as in the module.
        """
        variables: Any = self.module.init(rngs, *args, **kwargs)
        params = traverse_util.flatten_dict(core.unfreeze(variables["params"]))
        stored: Any = traverse_util.flatten_dict(core.unfreeze(variables.get(COLLECTION, {})))
        keys = rngs if isinstance(rngs, Mapping) else {"params": rngs}
        applied = {"mutable": True, "rngs": keys, **kwargs}
        found, _ = find_layers(self.module, variables, args, applied, self.layers)
        raw = dict(self.parameters)
        for path, packing in self._packings.items():
            if path in raw:
                key, equation = raw[path]
                if key in params:
                    stored |= _stored(path, quantized(params.pop(key), packing, equation.axes)[1])
            elif path in found:
                boxed = params.pop(found[path].kind.key(path))
                stored |= quantized_of(boxed, path, found[path], packing)[1]
        return {
            **variables,
            "params": traverse_util.unflatten_dict(params),
            COLLECTION: traverse_util.unflatten_dict(stored),
        }

    def bind(
        self, variables: Any, *args: Any, rngs: Any = None, mutable: Any = False
    ) -> "BoundModel":
        """`module.bind`, with the same arguments, on the quantized variables.

        **Returns:** what stands for the bound module: it is called, has its methods and submodules,
        `variables`, and `unbind`.

        **Raises:** `ValueError` for a model with packed parameters that its code reads, which
        `apply` alone runs.
        """
        if self.parameters:
            path = ".".join(self.parameters[0][1][0])
            raise ValueError(
                f"QuantizedModel.bind: {path} is packed, and code that reads it is run by apply "
                "alone; use apply, with method= for a method, or keep it in floats, with a rule "
                "of its path and None."
            )
        held = self._with_packings(variables)
        return BoundModel(self, self.module.bind(held, *args, rngs=rngs, mutable=mutable))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, which raises Flax's error: variables come by `apply` or `bind`."""
        return self.module(*args, **kwargs)

    @property
    def _packings(self) -> dict[Path, Packing]:
        shards, sizes, equations = dict(self.shards), dict(self.sizes), dict(self.equations)
        dtypes = dict(self.activation_dtypes)
        return {
            path: Packing(
                format, shards[path], sizes.get(path), equations.get(path), dtypes.get(path)
            )
            for path, format in self.formats
        }

    def _with_floats(self, apply: Any, variables: Any, kwargs: Any) -> Any:
        """What `apply` makes of float parameters, with packed ones in their place."""
        views, paths = {}, {}
        packings = self._packings
        arrays: Any = traverse_util.flatten_dict(core.unfreeze(variables.get(COLLECTION, {})))
        for path, (key, equation) in self.parameters:
            held = {name[-1]: x for name, x in arrays.items() if name[:-1] == path}
            name = ".".join(key)
            paths[name] = key
            kernel = held_kernel(name, held, packings[path], equation.axes)
            views[name] = WeightView.of(kernel, equation, packings[path].activation_dtype)

        def compute(floats: Mapping[str, Any]) -> Any:
            out = apply({paths[name]: value for name, value in floats.items()})
            if kwargs.get("mutable", False) is False or "params" not in out[1]:
                return out
            params = traverse_util.flatten_dict(core.unfreeze(out[1]["params"]))
            kept = {key: x for key, x in params.items() if key not in paths.values()}
            return out[0], {**out[1], "params": traverse_util.unflatten_dict(kept)}

        return run(compute, views)

    @contextlib.contextmanager
    def _multiplying(self) -> Iterator[None]:
        """A context in which quantized layers of the module multiply by their packed words."""
        raw = dict(self.parameters)
        packings = {path: x for path, x in self._packings.items() if path not in raw}

        def multiply(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            layer, method = context.module, context.method_name
            kind = kind_of(layer, method, self.layers, args)
            compute = kind and kind.methods.get(method)
            if not kind or not compute:
                return next_fun(*args, **kwargs)
            # The path alone does not do: `nn.jit` runs one trace for layers of several paths.
            if kind.equation is None:
                packing = layer.get_variable(COLLECTION, _PACKING) or packings.get(layer.path)
            else:
                held = layer.get_variable(COLLECTION, kind.weight) or {}
                packing = held.get(_PACKING) or packings.get(kind.key((*layer.path, kind.weight)))
            if not packing:
                return next_fun(*args, **kwargs)
            return compute(layer, packing, *args, **kwargs)

        with nn.intercept_methods(multiply):
            yield

    def _with_packings(self, variables: Any) -> dict[str, Any]:
        """The variables with the packing of each kernel beside its arrays."""
        if not isinstance(variables, Mapping):
            raise TypeError(
                f"QuantizedModel: variables is {brief(variables)}, but it is the mapping of "
                "collections that quantize_model returned; pass that."
            )
        arrays = traverse_util.flatten_dict(core.unfreeze(variables.get(COLLECTION, {})))
        raw = dict(self.parameters)
        packings = {path: x for path, x in self._packings.items() if path not in raw}
        beside = {(*path, _PACKING): packing for path, packing in packings.items()}
        return {**variables, COLLECTION: traverse_util.unflatten_dict({**arrays, **beside})}

    def _part(self, module: nn.Module, path: Path) -> "QuantizedModel":
        """The model of a submodule, which was at `path`."""

        def below(entries: tuple[tuple[Path, Any], ...]) -> Any:
            size = len(path)
            return tuple((key[size:], x) for key, x in entries if key[:size] == path)

        names = ("formats", "shards", "sizes", "equations", "activation_dtypes")
        parts = {name: below(getattr(self, name)) for name in names}
        return dataclasses.replace(self, module=module, **parts)


class BoundModel:
    """A module, perhaps a submodule, that `QuantizedModel.bind` has bound to its variables."""

    def __init__(self, model: QuantizedModel, module: nn.Module) -> None:
        self._model, self._module = model, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        with self._model._multiplying():
            return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        with self._model._multiplying():  # the first one runs `setup`
            return self._bound(getattr(self._module, name))

    @property
    def variables(self) -> Mapping[str, Any]:
        """The variables of the module."""
        return _without_packings(self._module.variables)

    def unbind(self) -> tuple[QuantizedModel, Mapping[str, Any]]:
        """The unbound model of the module, and its variables."""
        module, variables = self._module.unbind()
        return self._model._part(module, self._module.path), _without_packings(variables)

    def _bound(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return BoundModel(self._model, value)
        if isinstance(value, tuple | list):
            return type(value)(map(self._bound, value))
        if isinstance(value, Mapping):
            return {key: self._bound(held) for key, held in value.items()}
        if getattr(value, "__self__", None) is not self._module:
            return value

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            with self._model._multiplying():
                return value(*args, **kwargs)

        return method


def quantized_of(
    boxed: Any, path: Path, layer: Layer, packing: Packing
) -> tuple[QuantizedArray, dict[Path, Any]]:
    """The quantized weight of a layer, perhaps boxed, and its variables by their paths."""
    axes = layer.kind.axes(layer.module, value_of(boxed).shape)
    kernel, arrays = quantized(boxed, packing, axes)
    return kernel, _stored(path, arrays)


def _stored(path: Path, arrays: Mapping[str, Any]) -> dict[Path, Any]:
    return {(*path, name): array for name, array in arrays.items()}


def _with_params(variables: Mapping[str, Any], floats: Mapping[Path, Any]) -> Mapping[str, Any]:
    """The variables with more parameters."""
    if not floats:
        return variables
    params: Any = traverse_util.flatten_dict(core.unfreeze(variables.get("params", {})))
    return {**variables, "params": traverse_util.unflatten_dict({**params, **floats})}


def _without_packings(variables: Any) -> Any:
    """The variables without the packings of their kernels."""
    if COLLECTION not in variables:
        return variables
    arrays = traverse_util.flatten_dict(core.unfreeze(variables[COLLECTION]))
    kept = {path: array for path, array in arrays.items() if path[-1] != _PACKING}
    return {**variables, COLLECTION: traverse_util.unflatten_dict(kept)}
