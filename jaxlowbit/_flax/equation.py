"""Einsum equations that multiply inputs by a matrix, or by a stack of them."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from jax import Array

from .._core.array import QuantizedArray
from .._core.checks import brief
from .kernel_axes import KernelAxes

_Labels = tuple[Any, ...]  # letters, and numbers for the axes of an ellipsis
_EQUATION = re.compile(r"({0}),([a-zA-Z]*)->({0})".format(r"[a-zA-Z]*(?:\.\.\.)?[a-zA-Z]*"))


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation whose kernel is a matrix (*batch, k, n); made by `parse`.

    Letters of the kernel are batch axes if the inputs and the result have them, contracted if only
    the inputs have them, and features if only the result has them.
    """

    inputs: _Labels
    kernel: _Labels
    out: _Labels
    kernel_shape: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, kernel_shape: Sequence[int]) -> "Equation":
        """Reads "inputs,kernel->out".

        **Raises:** `TypeError` for no string, `ValueError` for another form, and for an equation
        that is no such product.
        """
        parts = cls.check_form(text)
        inputs, kernel, out = (tuple(re.findall(r"\.{3}|.", part)) for part in parts)
        equation = cls(inputs, kernel, out, tuple(kernel_shape))
        if reason := equation._reason():
            raise ValueError(
                f"The equation {text!r} {reason}, so that it is no product of the inputs with a "
                "matrix or a stack of them; keep such a layer in floats."
            )
        return equation

    @staticmethod
    def check_form(text: str) -> tuple[str, ...]:
        """Returns the three parts of "inputs,kernel->out".

        **Raises:** `TypeError` for no string, `ValueError` for another form.
        """
        if not isinstance(text, str):
            raise TypeError(
                f"The equation is {brief(text)}, but it is a string, 'inputs,kernel->out'."
            )
        match = _EQUATION.fullmatch(text.replace(" ", ""))
        if match is None:
            raise ValueError(
                f"The equation {text!r} is not of the form 'inputs,kernel->out', in letters, with "
                "an ellipsis in the inputs and the result at most; write it so."
            )
        return match.groups()

    def _reason(self) -> str | None:
        """Why this is no product."""
        inputs, kernel, out = map(set, (self.inputs, self.kernel, self.out))
        for labels in (self.inputs, self.kernel, self.out):
            if len(set(labels)) < len(labels):
                return f"repeats a letter within {''.join(labels)!r}"
        if len(self.kernel) != len(self.kernel_shape):
            return f"has {len(self.kernel)} letters for a kernel of shape {self.kernel_shape}"
        if unknown := out - inputs - kernel:
            return f"has {_listed(unknown)} in the result alone"
        if alone := kernel - inputs - out:
            return f"sums the kernel alone over {_listed(alone)}"
        if alone := inputs - kernel - out:
            return f"sums the inputs alone over {_listed(alone)}"
        return None if (inputs & kernel) - out else "sums over no letter of both"

    @property
    def _batch(self) -> _Labels:
        return tuple(x for x in self.kernel if x in self.inputs and x in self.out)

    @property
    def _contracted(self) -> _Labels:
        return tuple(x for x in self.kernel if x not in self.out)

    @property
    def _features(self) -> _Labels:
        return tuple(x for x in self.kernel if x not in self.inputs)

    @property
    def axes(self) -> KernelAxes:
        groups = (self._batch, self._contracted, self._features)
        sizes = dict(zip(self.kernel, self.kernel_shape, strict=True))
        batch, contracted, features = (tuple(sizes[x] for x in group) for group in groups)
        order = tuple(self.kernel.index(x) for group in groups for x in group)
        return KernelAxes(batch, contracted, features, order)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """The sizes of the axes of the result that the kernel has, as Linen's biases have them."""
        sizes = dict(zip(self.kernel, self.kernel_shape, strict=True))
        return tuple(sizes[x] for x in self.out if x in sizes)

    def multiply(
        self,
        inputs: Array,
        kernel: QuantizedArray,
        preferred_element_type: Any = None,
        bias: Array | None = None,
        activation_dtype: Any = None,
    ) -> Array:
        """The result of the equation. A bias, of `bias_shape`, is added before it is rounded."""
        extra = inputs.ndim - sum(x != "..." for x in self.inputs)
        if extra < 0 or (extra and "..." not in self.inputs):
            raise ValueError(
                f"The inputs have shape {inputs.shape}, but the equation names their axes "
                f"{''.join(self.inputs)!r}; pass inputs with these axes."
            )
        labels = _expand(self.inputs, extra)
        batch = [labels.index(x) for x in self._batch]
        contracted = [labels.index(x) for x in self._contracted]
        if bias is not None:
            names = [x for x in self.out if x in self.kernel]
            order = [names.index(x) for x in (*self._batch, *self._features)]
            bias = bias.reshape(self.bias_shape).transpose(order)
        options = (preferred_element_type, bias, activation_dtype)
        out = self.axes.multiply(inputs, kernel, batch, contracted, *options)
        rows = tuple(x for x in labels if x not in self.kernel)
        found = (*self._batch, *rows, *self._features)
        return out.transpose([found.index(x) for x in _expand(self.out, extra)])


def _expand(labels: _Labels, extra: int) -> _Labels:
    """Numbers in the place of an ellipsis that stands for `extra` axes."""
    if "..." not in labels:
        return labels
    at = labels.index("...")
    return (*labels[:at], *range(extra), *labels[at + 1 :])


def _listed(labels: set[Any]) -> str:
    return " and ".join(map(repr, sorted(labels)))
