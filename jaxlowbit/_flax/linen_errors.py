"""What a quantized layer of Linen raises: the error of Flax that the float layer raises too."""

from typing import Any

from flax import errors


class _KernelError(ValueError):
    """A `ValueError` with the message as it is: errors of Flax take its parts, and add a link."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)


class KernelShapeError(_KernelError, errors.ScopeParamShapeError):
    """The kernel has other sizes than the inputs and the layer."""


class KernelNotFoundError(_KernelError, errors.ScopeParamNotFoundError):
    """The variables have no kernel for the layer."""


class QueryWidthError(_KernelError, TypeError):
    """A query has another number of features than the table, of which JAX makes a `TypeError`."""
