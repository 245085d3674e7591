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
from .linen_kinds import kind_of
from .linen_layers import Layer, Path, find_layers
from .linen_variables import COLLECTION, quantized, value_of
from .weights import Packing, Shards, Sizes

_PACKING = "packing"  # beside the arrays while a model is applied, never stored


@dataclasses.dataclass(frozen=True)
class QuantizedModel:
    """A Linen module some of whose layers have quantized kernels; see `quantize_model`.

    Immutable and hashable. `apply`, `init` and `bind` are those of the module, with quantized
    variables; nothing else of a module depends on its kernels. `sizes` are those of the contracted
    axes and of the features of each kernel, which inputs are held to.
    """

    module: nn.Module
    formats: tuple[tuple[Path, Format], ...]
    shards: tuple[tuple[Path, Shards], ...]
    sizes: tuple[tuple[Path, Sizes], ...] = ()
    equations: tuple[tuple[Path, tuple[str, tuple[int, ...]]], ...] = ()
    layers: tuple[EinsumLayer, ...] = ()

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """`module.apply`, with the same arguments, on the quantized variables.

        **Raises:** `ValueError` if the kernel of a quantized layer is not among the variables, or
        has other sizes than the layer and its inputs; these are errors of `flax.errors` too, those
        that the float layer raises.
        """
        with self._multiplying():
            out = self.module.apply(self._with_packings(variables), *args, **kwargs)
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
        for path, packing in self._packings.items():
            if path in found:
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
        """
        held = self._with_packings(variables)
        return BoundModel(self, self.module.bind(held, *args, rngs=rngs, mutable=mutable))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, which raises Flax's error: variables come by `apply` or `bind`."""
        return self.module(*args, **kwargs)

    @property
    def _packings(self) -> dict[Path, Packing]:
        shards, sizes, equations = dict(self.shards), dict(self.sizes), dict(self.equations)
        return {
            path: Packing(format, shards[path], sizes.get(path), equations.get(path))
            for path, format in self.formats
        }

    @contextlib.contextmanager
    def _multiplying(self) -> Iterator[None]:
        """A context in which quantized layers of the module multiply by their packed words."""
        packings = self._packings

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
        beside = {(*path, _PACKING): packing for path, packing in self._packings.items()}
        return {**variables, COLLECTION: traverse_util.unflatten_dict({**arrays, **beside})}

    def _part(self, module: nn.Module, path: Path) -> "QuantizedModel":
        """The model of a submodule, which was at `path`."""

        def below(entries: tuple[tuple[Path, Any], ...]) -> Any:
            size = len(path)
            return tuple((key[size:], x) for key, x in entries if key[:size] == path)

        names = ("formats", "shards", "sizes", "equations")
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
    return kernel, {(*path, name): array for name, array in arrays.items()}


def _without_packings(variables: Any) -> Any:
    """The variables without the packings of their kernels."""
    if COLLECTION not in variables:
        return variables
    arrays = traverse_util.flatten_dict(core.unfreeze(variables[COLLECTION]))
    kept = {path: array for path, array in arrays.items() if path[-1] != _PACKING}
    return {**variables, COLLECTION: traverse_util.unflatten_dict(kept)}
