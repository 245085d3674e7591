"""Packed raw parameters of NNX modules, and the products of code that reads them."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from .._core.format import Format
from .equation import Equation
from .nnx_variables import QuantizedModule
from .weight_program import run
from .weight_view import WeightView
from .weights import Shards, stand_in


class QuantizedParameter(QuantizedModule):
    """Replaces a raw parameter; `quantize_model` creates it.

    `shape` and `dtype` describe the float parameter. `kernel` is the `QuantizedArray`, whose
    arrays are variables as in `QuantizedLinear`. Inside the methods of its module, code sees a
    float parameter, whose products are quantized.
    """

    def __init__(
        self,
        weight: nnx.Variable,
        equation: Equation,
        format: Format,
        shards: Shards,
        lhs_qtype: Any = None,
    ) -> None:
        self.equation = equation
        self._store(weight, format, shards)
        self.dtype = stand_in(self.kernel, weight.get_value().dtype).dtype
        self.lhs_qtype = lhs_qtype

    @staticmethod
    def equation_of(layer: Any) -> Equation:
        return layer.equation

    @property
    def view(self) -> WeightView:
        inputs = self.lhs_qtype, self.factor
        view = WeightView.of(self.kernel, self.equation, *inputs)
        return view.astype(stand_in(self.kernel, self.dtype).dtype)

    @property
    def value(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the float parameter, for code that reads only these."""
        return self.view.like()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)


def adopt(module: nnx.Module) -> None:
    """Makes the methods of a module see floats instead of its packed parameters."""
    if not hasattr(module, "_reads_packed"):
        object.__setattr__(module, "__class__", _reading(type(module)))


@functools.cache
def _reading(kind: type) -> type:
    """A subclass of the same name, whose methods multiply by packed parameters."""
    methods: dict[str, Any] = {
        name: _reads(method)
        for base in reversed(kind.__mro__)
        if base not in nnx.Module.__mro__
        for name, method in vars(base).items()
        if _is_method(method) and (name == "__call__" or not re.fullmatch("__.*__", name))
    }
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**methods, **names, "_reads_packed": True})


def _is_method(value: Any) -> bool:
    """Whether a class attribute is called with the instance: a function, or `nnx.jit` of one."""
    if isinstance(value, type | staticmethod | classmethod):
        return False
    return callable(value) and hasattr(type(value), "__get__")


def _reads(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        packed = {
            path: module
            for path, module in nnx.iter_modules(self)
            if isinstance(module, QuantizedParameter)
        }
        if not packed:  # the copy below, or an outer module has put floats there
            return method(self, *args, **kwargs)
        graph, state = _split(self)
        before, tree = jax.tree.flatten(state)

        def compute(floats: dict[str, Any]) -> Any:
            copy = nnx.merge(graph, state)
            for path in packed:
                _put(copy, path, nnx.Param(floats[_name(self, path)]))
            result = method(copy, *args, **kwargs)
            for path, module in packed.items():
                _put(copy, path, module)
            graph_after, state_after = _split(copy)
            after, tree_after = jax.tree.flatten(state_after)
            if graph_after != graph or tree_after != tree:
                raise ValueError(
                    f"{type(self).__name__}.{method.__name__} adds or removes variables of its "
                    "module, but a module with packed parameters may only change their values; "
                    "create them beforehand, or keep the parameters in floats."
                )
            changed = zip(range(len(before)), before, after, strict=True)
            return result, {str(i): new for i, old, new in changed if new is not old}

        views = {_name(self, path): module.view for path, module in packed.items()}
        result, changed = run(compute, views)
        if changed:
            leaves = [changed.get(str(i), leaf) for i, leaf in enumerate(before)]
            nnx.update(self, jax.tree.unflatten(tree, leaves))
        return result

    return call


def _split(module: nnx.Module) -> tuple[Any, Any]:
    """The graph and the arrays, for `nnx.merge` into a module with new variables."""
    graph, state = nnx.split(module)
    return graph, nnx.as_pure(state)


def _name(module: Any, path: tuple[Any, ...]) -> str:
    return ".".join((type(module).__name__, *map(str, path)))


def _put(module: Any, path: tuple[Any, ...], value: Any) -> None:
    """Sets the attribute of a module, or of one below it."""
    *above, name = path
    for key in above:
        indexed = isinstance(module, nnx.List | list | tuple | dict)
        module = module[key] if indexed else getattr(module, key)
    setattr(module, name, value)
