"""Products of Flax layers as einsum equations, and the matrices (*batch, k, n) of their kernels."""

import dataclasses
import functools
import itertools
import math
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax import Array

from .._core import explicit
from .._core.array import QuantizedArray
from .._core.checks import brief
from .input_factors import multiply

_Labels = tuple[Any, ...]  # letters, and numbers for rows
_EQUATION = re.compile(r"({0}),([a-zA-Z]*)->({0})".format(r"[a-zA-Z]*(?:\.\.\.)?[a-zA-Z]*"))

TABLE = "...d,vd->...v"
"""The equation of a table of embeddings (vocabulary, features), and of a transposed matrix."""


@dataclasses.dataclass(frozen=True)
class Equation:
    """The product of inputs with a kernel that is packed as one matrix (*batch, k, n).

    An axis of the kernel is a batch axis if the inputs and the result have its label, contracted if
    only the inputs have it, and a feature if only the result has it. k is the product of the
    contracted sizes, n the product of the features. `parse` and `general` make equations.

    - `inputs`, `kernel`, `out`: labels of the axes; "..." represents any number of axes of rows.
    - `kernel_shape`: sizes of the axes of the float kernel.
    """

    inputs: _Labels
    kernel: _Labels
    out: _Labels
    kernel_shape: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, kernel_shape: Sequence[int]) -> "Equation":
        """Reads "inputs,kernel->out".

        **Raises:** `TypeError` unless `text` is a string, `ValueError` for another form, and for an
        equation that is not a product of the inputs with a matrix or a stack of matrices.
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

    @classmethod
    def of_last(cls, text: str, shape: Sequence[int]) -> "Equation":
        """Reads an equation of the last axes of a kernel; the axes before them are a stack.

        **Raises:** as `parse` does.
        """
        letters = len(text.partition(",")[2].partition("->")[0].strip())
        return cls.parse(text, shape[max(len(shape) - letters, 0) :])

    @classmethod
    def general(
        cls,
        contracted: Sequence[int],
        features: Sequence[int],
        batch: Sequence[int] = (),
        positions: Sequence[int] | None = None,
        ndim: int = 0,
    ) -> "Equation":
        """The product of a kernel (*batch, *contracted, *features) with inputs (*batch, ...).

        The result is (*batch, ..., *features).

        `positions` are the contracted axes of inputs that have `ndim` axes; None for the last axes.

        **Raises:** `ValueError` for positions that are batch axes.
        """
        letters = iter(string.ascii_letters)
        named = [tuple(itertools.islice(letters, len(x))) for x in (batch, contracted, features)]
        kernel, sizes = sum(named, ()), (*batch, *contracted, *features)
        if positions is None:
            inputs = (*named[0], "...", *named[1])
            return cls(inputs, kernel, (*named[0], "...", *named[2]), sizes)
        if min(positions, default=ndim) < len(batch):
            raise ValueError(
                f"The layer contracts the axes {tuple(positions)} of inputs with {ndim} axes, but "
                f"the first {len(batch)} are batch axes; contract others."
            )
        places = dict(zip((*range(len(batch)), *positions), named[0] + named[1], strict=True))
        inputs = tuple(places.get(axis, axis) for axis in range(ndim))
        rows = (axis for axis in range(ndim) if axis not in places)
        return cls(inputs, kernel, (*named[0], *rows, *named[2]), sizes)

    @staticmethod
    def check_form(text: str) -> tuple[str, ...]:
        """Splits "inputs,kernel->out" into its three parts.

        **Raises:** `TypeError` unless `text` is a string, `ValueError` for another form.
        """
        if not isinstance(text, str):
            raise TypeError(
                f"The equation is {brief(text)}, but it must be a string, 'inputs,kernel->out'."
            )
        match = _EQUATION.fullmatch(text.replace(" ", ""))
        if match is None:
            raise ValueError(
                f"The equation {text!r} is not of the form 'inputs,kernel->out', in letters, with "
                "an ellipsis in the inputs and the result at most; write it so."
            )
        return match.groups()

    def _reason(self) -> str | None:
        """Returns the reason why this is not a product, or None."""
        inputs, kernel, out = map(set, (self.inputs, self.kernel, self.out))
        for labels in (self.inputs, self.kernel, self.out):
            if len(set(labels)) < len(labels):
                return f"repeats a letter within {''.join(labels)!r}"
        if len(self.kernel) != len(self.kernel_shape):
            return f"has {len(self.kernel)} letters for a kernel of shape {self.kernel_shape}"
        if unknown := out - inputs - kernel:
            return f"has {_listed(unknown)} only in the result"
        if alone := kernel - inputs - out:
            return f"sums {_listed(alone)} of the kernel, which the inputs lack"
        if alone := inputs - kernel - out:
            return f"sums {_listed(alone)} of the inputs, which the kernel lacks"
        return None if (inputs & kernel) - out else "sums over no letter of both"

    # --- the matrix of the kernel -----------------------------------------------------------------

    @functools.cached_property
    def _parts(self) -> tuple[_Labels, _Labels, _Labels]:
        """Labels of the batch axes, the contracted axes and the features."""
        return (
            tuple(x for x in self.kernel if x in self.inputs and x in self.out),
            tuple(x for x in self.kernel if x not in self.out),
            tuple(x for x in self.kernel if x not in self.inputs),
        )

    def _sizes(self, labels: _Labels) -> tuple[int, ...]:
        return tuple(self.kernel_shape[self.kernel.index(x)] for x in labels)

    @property
    def batch(self) -> tuple[int, ...]:
        return self._sizes(self._parts[0])

    @property
    def contracted(self) -> tuple[int, ...]:
        return self._sizes(self._parts[1])

    @property
    def features(self) -> tuple[int, ...]:
        return self._sizes(self._parts[2])

    @property
    def order(self) -> tuple[int, ...]:
        """Positions of the batch axes, the contracted axes and the features in the kernel."""
        return tuple(self.kernel.index(x) for part in self._parts for x in part)

    @property
    def layout(self) -> tuple[Any, ...]:
        """The order of the packed words; equations with equal layouts share a kernel."""
        return self.batch, self.contracted, self.features, self.order

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """k and n."""
        return math.prod(self.contracted), math.prod(self.features)

    @property
    def matrix_ndim(self) -> int:
        """The number of axes of the matrix (*batch, k, n)."""
        return len(self.batch) + 2

    @property
    def flat_shape(self) -> tuple[int, int]:
        """The shape that Flax passes to the initialiser of a kernel with several axes."""
        k, n = self.matrix_shape
        return math.prod(self.batch) * k, n

    def matrix(self, weight: Array) -> Array:
        """The matrix (..., *batch, k, n) of a kernel, which may be a stack or of `flat_shape`."""
        lead = max(weight.ndim - len(self.kernel), 0)
        if self.order != tuple(range(len(self.kernel))):
            weight = weight.transpose(*range(lead), *(lead + axis for axis in self.order))
        return weight.reshape(*weight.shape[:lead], *self.batch, *self.matrix_shape)

    def matrix_entries(self, entries: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the sharding of that matrix, given the sharding of the kernel.

        An axis merged from several is sharded like the first of them, since its parts are
        contiguous.
        """
        lead = len(entries) - len(self.kernel)
        own = [entries[lead + axis] for axis in self.order]
        batch, k = len(self.batch), len(self.batch) + len(self.contracted)
        return (*entries[:lead], *own[:batch], own[batch], own[k])

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """Sizes of the axes that result and kernel share, the shape of Linen's biases."""
        return self._sizes(tuple(x for x in self.out if x in self.kernel))

    # --- the product ------------------------------------------------------------------------------

    def multiply(
        self,
        inputs: Array,
        kernel: QuantizedArray,
        bias: Array | None = None,
        *,
        lhs_factor: Array | None = None,
        lhs_qtype: Any = None,
        preferred_element_type: Any = None,
    ) -> Array:
        """Computes the equation. A bias of `bias_shape` is added before the result is rounded.

        `lhs_factor`: factors (*batch, k) that divide the inputs, or None.

        **Raises:** `ValueError` for inputs whose axes differ from the kernel's.
        """
        batch, contracted, features = self._parts
        labels, out_labels = self._expanded(inputs)
        sizes = self._held_sizes(kernel)
        for kind, part in (("batch", batch), ("contracted", contracted)):
            self._check(inputs, kind, [labels.index(x) for x in part], [sizes[x] for x in part])
        rows = [x for x in labels if x not in self.kernel]
        row_sizes = [inputs.shape[labels.index(x)] for x in rows]
        lhs = inputs.transpose([labels.index(x) for x in (*batch, *rows, *contracted)])
        # Leading axes of lhs broadcast against the stack, so rows are one axis.
        lead = self.batch
        lhs = lhs.reshape(*lead, *([math.prod(row_sizes)] if lead else row_sizes), kernel.k)
        if bias is not None:
            names = [x for x in self.out if x in self.kernel]
            bias = bias.reshape([sizes[x] for x in names])
            bias = bias.transpose([names.index(x) for x in (*batch, *features)])
            bias = bias.reshape(*lead, -1)
        out = multiply(
            lhs,
            kernel,
            lhs_factor,
            bias=bias,
            lhs_qtype=lhs_qtype,
            preferred_element_type=preferred_element_type,
        )
        out = out.reshape(*lead, *row_sizes, *(sizes[x] for x in features))
        found = (*batch, *rows, *features)
        return out.transpose([found.index(x) for x in out_labels])

    def _expanded(self, inputs: Array) -> tuple[_Labels, _Labels]:
        """Labels of the inputs and the result; axes of an ellipsis are numbered."""
        extra = inputs.ndim - sum(x != "..." for x in self.inputs)
        if extra < 0 or (extra and "..." not in self.inputs):
            raise ValueError(
                f"The inputs have shape {inputs.shape}, but the equation names their axes "
                f"{''.join(map(str, self.inputs))!r}; pass inputs with these axes."
            )

        def expand(labels: _Labels) -> _Labels:
            if "..." not in labels:
                return labels
            at = labels.index("...")
            return (*labels[:at], *range(extra), *labels[at + 1 :])

        return expand(self.inputs), expand(self.out)

    def _held_sizes(self, kernel: QuantizedArray) -> Mapping[Any, int]:
        """Sizes by label. Inside `jax.shard_map`, a device has a shard of a single k or n axis."""
        sizes = dict(zip(self.kernel, self.kernel_shape, strict=True))
        for part, held in zip(self._parts[1:], (kernel.k, kernel.n), strict=True):
            if len(part) == 1:
                sizes[part[0]] = held
        return sizes

    def _check(self, inputs: Array, kind: str, axes: Sequence[int], sizes: Sequence[int]) -> None:
        found = tuple(inputs.shape[axis] for axis in axes)
        if found != tuple(sizes):
            raise ValueError(
                f"The inputs have shape {inputs.shape}, which is {found} along the {kind} axes "
                f"{tuple(axes)}, but the kernel has {tuple(sizes)} there; pass inputs that agree."
            )


def positions(axes: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Axes counted from the front and sorted; Flax pairs them with kernel axes in this order.

    **Raises:** `ValueError` for axes that inputs of `ndim` axes lack.
    """
    if not all(-ndim <= axis < ndim for axis in axes):
        raise ValueError(
            f"The inputs have {ndim} axes, but the layer contracts the axes {tuple(axes)}; pass "
            "inputs with all of them."
        )
    return tuple(sorted(axis % ndim for axis in axes))


def as_tuple(sizes: int | Iterable[int]) -> tuple[int, ...]:
    return tuple(sizes) if isinstance(sizes, Iterable) else (sizes,)


def check_batch(axes: Sequence[int]) -> None:
    """Raises `ValueError` unless batch axes are the first axes of the inputs."""
    if sorted(axes) != list(range(len(axes))):
        raise ValueError(
            f"The batch axes are {tuple(axes)}, but they must be the first axes of the inputs, 0, "
            "1 and so on; transpose the inputs."
        )


def place(product: Callable[..., Array], inputs: Array, operands: Any, out_sharding: Any) -> Array:
    """`product(inputs, operands)`, with `out_sharding` unless that is None."""
    if out_sharding is None:
        return product(inputs, operands)
    return explicit.multiply(product, inputs, operands, out_sharding)


def _listed(labels: set[Any]) -> str:
    return " and ".join(map(repr, sorted(labels)))
