"""`Calibration`: inputs of a model for quantizers, and how to run them."""

import dataclasses
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core import checks
from ._statistics import Statistics, not_finite


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Inputs of a model for quantizers that read statistics, such as `"gptq"`.

    Layers are calibrated and quantized one after the other, in the order of their calls, so each
    sees inputs that the quantized layers before it computed. Memory contains the model, the
    statistics of `at_once` layers ((k, k) floats each) and, for a language model, the inputs of one
    block. Results are bitwise repeatable.

    **Arguments:**

    - `batches`: for a Flax model, a list of batches, or another iterable that starts anew each time
      (an iterator is stored as a list): each layer reads all of them. For a language model, a text,
      a list of texts, or tokens (sequences, length).
    - `apply`: how a batch runs. For NNX a function `(model, batch)`, None for `model(batch)`; for
      Linen a function `(model, variables, batch)`, None for `model.apply(variables, batch)`.
    - `at_once`: for Flax models, how many layers each pass over the batches calibrates. More take
      fewer passes and more memory, and see inputs of float layers before them.
    - `samples`, `context`: for a language model, the number and length in tokens of the windows
      that are taken from a text, evenly spaced.
    - `folder`: None, or a folder for the results of each layer. A run that was interrupted resumes
      there if model, formats, quantizer and first batch are the same.
    - `progress`: whether to show a bar with the time left, which needs tqdm; for language models
      with the relative error of products.

    **Raises:** `TypeError` and `ValueError` for arguments of other types and ranges.

    ```python
    x = jnp.ones((8, 256))
    calibration = Calibration([x, 2 * x])
    ```
    """

    batches: Any
    apply: Callable[..., Any] | None = None
    at_once: int = 1
    samples: int = 128
    context: int = 512
    folder: str | os.PathLike[str] | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        for name, rule in (
            ("at_once", "a number of layers, from 1 on"),
            ("samples", "a number of windows, from 1 on"),
            ("context", "a number of tokens, from 2 on"),
        ):
            least = 2 if name == "context" else 1
            value = checks.integer("Calibration", name, getattr(self, name), rule, least)
            object.__setattr__(self, name, value)
        checks.boolean("Calibration", "progress", self.progress)
        if self.apply is not None and not callable(self.apply):
            raise TypeError(
                f"Calibration: apply is {checks.brief(self.apply)}, but it must be a function that "
                "runs the model on a batch, or None."
            )
        if not isinstance(self.folder, str | os.PathLike | None):
            raise TypeError(
                f"Calibration: folder is {checks.brief(self.folder)}, but it must be a path, or "
                "None."
            )

    @classmethod
    def of(cls, caller: str, value: Any, *, progress: bool = False) -> "Calibration":
        """Returns a `Calibration`, made of batches unless it is one.

        **Raises:** `TypeError` for a value that is no iterable.
        """
        if isinstance(value, Calibration):
            return value
        if not hasattr(value, "__iter__") or isinstance(value, Mapping):
            raise TypeError(
                f"{caller}: calibration is {checks.brief(value)}, but it must be an iterable of "
                "batches, a text for a language model, or a jaxlowbit.quantizers.Calibration."
            )
        return cls(value, progress=progress)


class Results:
    """Stores the arrays of each layer in a folder, to resume from; without a folder, stores
    nothing.

    A file is written to a temporary name and renamed. `key` identifies everything that the results
    depend on.
    """

    def __init__(self, caller: str, folder: Any, key: Mapping[str, Any]) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is None:
            return
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "calibration.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["digest"] != digest:
                changed = [name for name in key if found["key"].get(name) != str(key[name])]
                raise ValueError(
                    f"{caller}: the folder {self.folder} has results of another calibration "
                    f"({', '.join(changed) or 'other arguments'} differ); name another folder, or "
                    "remove that one."
                )
        text = json.dumps({"digest": digest, "key": {k: str(v) for k, v in key.items()}})
        _replace(path, lambda file: file.write(text.encode()))

    def load(self, name: str) -> dict[str, np.ndarray] | None:
        """The arrays that were saved under a name, or None."""
        path = None if self.folder is None else self.folder / f"{name}.npz"
        if path is None or not path.exists():
            return None
        with np.load(path) as file:
            kinds = json.loads(str(file["kinds"]))
            return {key: _typed(file[key], *kinds[key]) for key in kinds}

    def save(self, name: str, arrays: Mapping[str, Any]) -> None:
        """Saves arrays; dtypes of JAX, such as bfloat16, are kept."""
        if self.folder is None:
            return
        found = {key: np.asarray(value) for key, value in arrays.items()}
        kinds = {key: (str(x.dtype), x.shape) for key, x in found.items()}
        raw = {key: np.frombuffer(x.tobytes(), np.uint8) for key, x in found.items()}
        _replace(
            self.folder / f"{name}.npz",
            lambda file: np.savez(file, allow_pickle=False, kinds=json.dumps(kinds), **raw),
        )


def _typed(raw: np.ndarray, dtype: str, shape: list[int]) -> np.ndarray:
    return np.frombuffer(raw.tobytes(), jnp.dtype(dtype)).reshape(shape)


def _replace(path: Path, write: Callable[[Any], Any]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        write(file)
    temporary.replace(path)


def check_statistics(caller: str, name: str, statistics: Statistics | None) -> Statistics:
    """Raises for a layer without inputs, or with inputs that are not finite.

    **Raises:** `ValueError`.
    """
    if statistics is None or not np.any(np.asarray(statistics.rows)):
        raise ValueError(
            f"{caller}: no batch of calibration runs {name}, so there are no statistics of its "
            "inputs; pass batches that run it, or keep it in floats by a rule of its path and None."
        )
    if reason := not_finite(statistics):
        raise ValueError(f"{caller}: the inputs of {name} in the calibration {reason}.")
    return statistics


def unreached(statistics: Statistics) -> list[int]:
    """The numbers of the matrices of a stack that have no inputs, such as unused experts."""
    return np.flatnonzero(np.asarray(statistics.rows) == 0).tolist()


def warn_of_unreached(caller: str, name: str, numbers: list[int]) -> None:
    """Warns of matrices of a stack without inputs, if there are some."""
    if numbers:
        listed = ", ".join(map(str, numbers[:8]))
        listed += f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
        warnings.warn(
            f"{caller}: no input of the calibration reaches {listed} of the stack {name}; each "
            "feature counts the same there. Pass more batches.",
            stacklevel=4,
        )


def with_identity(statistics: Statistics) -> Statistics:
    """Gives the matrices of a stack without inputs second moments of 1, so that quantizers round
    them as without statistics."""
    moments = statistics.second_moments
    plain = jnp.eye(moments.shape[-1]) if statistics.full else jnp.ones(moments.shape[-1])
    none = jnp.expand_dims(statistics.rows == 0, range(statistics.rows.ndim, moments.ndim))
    return dataclasses.replace(statistics, second_moments=jnp.where(none, plain, moments))


def warn_of_few_rows(caller: str, name: str, rows: int, features: int) -> bool:
    """Warns, and returns True, if a layer has more input features than rows of inputs."""
    if rows < features:
        warnings.warn(
            f"{caller}: calibration has {rows:,} rows of inputs for {name}, fewer than its "
            f"{features:,} input features: full second moments are singular, and damping decides "
            "about the rest. Pass more batches.",
            stacklevel=4,
        )
    return rows < features


@jax.jit
def output_error(weight: Any, rounded: Any, statistics: Statistics) -> Any:
    """The norm of the change of products with the inputs, relative to the norm of the products."""
    weight = weight.astype(jnp.float32)
    change = rounded.astype(jnp.float32) - weight

    def norm(matrix: Any) -> Any:
        if statistics.full:
            product = jnp.matmul(statistics.second_moments, matrix)
            return jnp.sum(matrix * product)
        return jnp.sum(matrix * matrix * statistics.mean_squares[..., None])

    return jnp.sqrt(jnp.maximum(norm(change), 0) / jnp.maximum(norm(weight), 1e-30))
