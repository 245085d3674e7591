"""`QuantizedModel`: a Linen module that multiplies by quantized kernels."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from flax import core, traverse_util
from flax import linen as nn

from .._core.checks import brief
from .._core.format import Format
from .einsum_layers import EinsumLayer
from .equation import Equation
from .input_factors import FACTOR
from .linen_layers import kind_of
from .linen_tracing import find_layers
from .linen_variables import COLLECTION, held_factor, held_kernel, quantized, value_of
from .weight_program import run
from .weight_view import WeightView
from .weights import Packing, Path

_PACKING = "packing"  # a variable of each kernel during apply, never stored


@dataclasses.dataclass(frozen=True)
class QuantizedModel:
    """A Linen module with quantized kernels in some layers; see `quantize_model`.

    Immutable and hashable. `apply`, `init` and `bind` take the same arguments as the module's, with
    quantized variables; other methods of a module do not depend on its kernels.

    - `packings`: how each weight is packed, by its path.
    - `layers`: the descriptions of layers of other classes.
    """

    module: nn.Module
    packings: tuple[tuple[Path, Packing], ...]
    layers: tuple[EinsumLayer, ...] = ()

    @property
    def formats(self) -> tuple[tuple[Path, Format], ...]:
        """The format of each weight, with its path."""
        return tuple((path, packing.format) for path, packing in self.packings)

    @property
    def _raw(self) -> list[tuple[Path, Packing, Path, Equation]]:
        """Raw parameters, with their paths in `params` and equations."""
        return [(path, x, *x.raw) for path, x in self.packings if x.raw is not None]

    @property
    def _called(self) -> dict[Path, Packing]:
        """The packings of layers, whose calls are intercepted."""
        return {path: packing for path, packing in self.packings if packing.raw is None}

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """`module.apply`, with the same arguments, on the quantized variables.

        **Raises:** `ValueError` if the kernel of a quantized layer is missing in the variables, or
        has other sizes than the layer and its inputs. These errors are also the errors of
        `flax.errors` that the float layer raises.
        """
        held = self._with_packings(variables)

        def apply(floats: Mapping[Path, Any]) -> Any:
            with self._multiplying():
                return self.module.apply(_with_params(held, floats), *args, **kwargs)

        out = self._with_floats(apply, variables, kwargs) if self._raw else apply({})
        if kwargs.get("mutable", False) is False:
            return out
        result, changed = out
        return result, _without_packings(changed)

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Runs `module.init`, with the same arguments, and quantizes the kernels.

        Like the module, initializes only layers that these arguments run.
        """
        variables: Any = self.module.init(rngs, *args, **kwargs)
        params = traverse_util.flatten_dict(core.unfreeze(variables["params"]))
        stored: Any = traverse_util.flatten_dict(core.unfreeze(variables.get(COLLECTION, {})))
        keys = rngs if isinstance(rngs, Mapping) else {"params": rngs}
        applied = {"mutable": True, "rngs": keys, **kwargs}
        found, _ = find_layers(self.module, variables, args, applied, self.layers)
        for path, packing in self.packings:
            if packing.raw is not None:
                key, equation = packing.raw
            elif path in found:
                key = found[path].kind.key(path)
                equation = found[path].equation_of(value_of(params[key]))
            else:
                continue
            if key in params:
                kernel, arrays = quantized(params.pop(key), packing, equation)
                if packing.factor:
                    arrays[FACTOR] = jnp.ones(kernel.shape[:-1], jnp.float32)
                stored |= stored_arrays(path, arrays)
        return {
            **variables,
            "params": traverse_util.unflatten_dict(params),
            COLLECTION: traverse_util.unflatten_dict(stored),
        }

    def bind(
        self, variables: Any, *args: Any, rngs: Any = None, mutable: Any = False
    ) -> "BoundModel":
        """`module.bind`, with the same arguments, on the quantized variables.

        **Returns:** the bound module. It can be called, and has the module's methods and
        submodules, `variables`, and `unbind`.

        **Raises:** `ValueError` for a model with packed raw parameters, which only `apply`
        supports.
        """
        if raw := self._raw:
            path = ".".join(raw[0][2])
            raise ValueError(
                f"QuantizedModel.bind: {path} is packed, and only apply can run code that reads "
                "it; use apply, with method= for a method, or keep it in floats, with a rule "
                "of its path and None."
            )
        held = self._with_packings(variables)
        return BoundModel(self, self.module.bind(held, *args, rngs=rngs, mutable=mutable))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, which raises Flax's error: variables are passed to `apply` or
        `bind`."""
        return self.module(*args, **kwargs)

    def _with_floats(self, apply: Any, variables: Any, kwargs: Any) -> Any:
        """Runs `apply` as a function of float parameters, with packed ones in their place."""
        views, paths = {}, {}
        arrays: Any = traverse_util.flatten_dict(core.unfreeze(variables.get(COLLECTION, {})))
        for path, packing, key, equation in self._raw:
            held = {name[-1]: x for name, x in arrays.items() if name[:-1] == path}
            name = ".".join(key)
            paths[name] = key
            kernel = held_kernel(name, held, packing, equation)
            inputs = packing.lhs_qtype, held_factor(held) if packing.factor else None
            views[name] = WeightView.of(kernel, equation, *inputs)

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
        """Context manager: calls of the module's quantized layers multiply by packed words."""
        packings = self._called

        def multiply(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            layer, method = context.module, context.method_name
            kind = kind_of(layer, method, self.layers, args)
            compute = kind and kind.methods.get(method)
            if not kind or not compute:
                return next_fun(*args, **kwargs)
            # The path does not suffice: `nn.jit` runs one trace for layers of several paths.
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
        """Adds the packing of each kernel to its arrays in the variables."""
        if not isinstance(variables, Mapping):
            raise TypeError(
                f"QuantizedModel: variables is {brief(variables)}, but it must be the mapping of "
                "collections that quantize_model returned; pass that."
            )
        arrays = traverse_util.flatten_dict(core.unfreeze(variables.get(COLLECTION, {})))
        beside = {(*path, _PACKING): packing for path, packing in self._called.items()}
        return {**variables, COLLECTION: traverse_util.unflatten_dict({**arrays, **beside})}

    def _part(self, module: nn.Module, path: Path) -> "QuantizedModel":
        """The model of the submodule at `path`."""

        size = len(path)
        parts = ((key[size:], x) for key, x in self.packings if key[:size] == path)
        return dataclasses.replace(self, module=module, packings=tuple(parts))


class BoundModel:
    """A module, or a submodule, bound to its variables by `QuantizedModel.bind`."""

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


def stored_arrays(path: Path, arrays: Mapping[str, Any]) -> dict[Path, Any]:
    """The variables of one weight, by their paths in the collection."""
    return {(*path, name): array for name, array in arrays.items()}


def _with_params(variables: Mapping[str, Any], floats: Mapping[Path, Any]) -> Mapping[str, Any]:
    """Adds parameters to the variables."""
    if not floats:
        return variables
    params: Any = traverse_util.flatten_dict(core.unfreeze(variables.get("params", {})))
    return {**variables, "params": traverse_util.unflatten_dict({**params, **floats})}


def _without_packings(variables: Any) -> Any:
    """Removes the packings of kernels from the variables."""
    if COLLECTION not in variables:
        return variables
    arrays = traverse_util.flatten_dict(core.unfreeze(variables[COLLECTION]))
    kept = {path: array for path, array in arrays.items() if path[-1] != _PACKING}
    return {**variables, COLLECTION: traverse_util.unflatten_dict(kept)}
