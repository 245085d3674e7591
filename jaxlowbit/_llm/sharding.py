"""Tensor parallelism: a decoder sharded over the devices of a mesh.

A device has some heads, an equal share of the hidden features of every MLP, and an equal share of
the vocabulary. The weights of queries, keys, values, gate and up are sharded along n. The output
and down projections are sharded along k, so their products are partial sums of the residual stream.
Two all-reduces per block add these; in a decode step, kernels add them within the block's calls if
possible (`Division.exchanging`). Embedding and head are sharded along the vocabulary, the cache
along its heads, and everything else is replicated.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import AxisType

from .._backends import cuda_calls
from .._core import super_blocks
from .._core.array import QuantizedArray
from .._core.dequantize import codes_of, of_codes
from .._core.format import SUPER_BLOCK, Format
from .._core.layout import ATOM
from .._flax.nnx_variables import QuantizedVariable
from .config import Config

# The last component of the name of a weight, or of a variable of the decoder.
_VOCABULARY = ("embedding", "head")
_ALONG_N = ("q", "k", "v", "qkv", "gate", "up", "gate_up", *_VOCABULARY)
_ALONG_K = ("o", "down")
_VECTORS = (
    *("q_bias", "k_bias", "v_bias", "biases", "gate_bias", "up_bias"),
    *("q_all_norm", "k_all_norm"),
)


class MatrixVariable(QuantizedVariable):
    """A whole `QuantizedArray`.

    Its metadata `out_sharding` are the entries of the matrix (..., k, n); `nnx.get_partition_spec`
    and `nnx.get_named_sharding` compute the entries of the packed arrays from them.
    """

    def replace(self, *value: Any, **updates: Any) -> Any:
        array = self.get_value()
        if value and isinstance(value[0], jax.P) and isinstance(array, QuantizedArray):
            value = (_specs(array, value[0], self.get_metadata("mesh", None)),)
        return super().replace(*value, **updates)


@dataclasses.dataclass(frozen=True)
class Division:
    """The mesh with one axis that a decoder is sharded over."""

    mesh: jax.sharding.Mesh

    @classmethod
    def of(
        cls, caller: str, config: Config, mesh: Any, formats: Mapping[str, Format | None]
    ) -> "Division":
        """The division of a decoder with matrices of these formats, None for floats.

        **Raises:** `TypeError` if `mesh` is not a mesh, and `ValueError` for a mesh of several axes
        and for sizes that its number of devices does not divide.
        """
        if not isinstance(mesh, jax.sharding.Mesh):
            raise TypeError(
                f"{caller}: mesh is {type(mesh).__name__}, but it must be a jax.sharding.Mesh, "
                "such as "
                'jax.make_mesh((2,), ("model",)).'
            )
        if len(mesh.axis_names) != 1:
            raise ValueError(
                f"{caller}: the mesh has the axes {mesh.axis_names}, but a model is divided over "
                'one; make one such as jax.make_mesh((2,), ("model",)).'
            )
        reason = _undivided(config, formats, mesh.size)
        if reason is not None:
            others = (n for n in range(1, config.kv_heads + 1) if n <= len(jax.devices()))
            possible = [str(n) for n in others if _undivided(config, formats, n) is None]
            raise ValueError(
                f"{caller}: {reason}; use a mesh of another number of devices: "
                f"{', '.join(possible)}."
            )
        # Arrays have no sharding in their types, so that the loop around the decoder is as ever.
        return cls(jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,)))

    @property
    def axis(self) -> str:
        return self.mesh.axis_names[0]

    @property
    def parts(self) -> int:
        return self.mesh.size

    def place(self, name: str, weight: Any) -> Any:
        """A weight, by its name, on the devices; a vocabulary that needs padding as it is."""
        if self._padding(name, weight):
            return weight
        weight = self.divisible(name, weight)
        if isinstance(weight, QuantizedArray):
            specs: Any = _specs(weight, self._entries(name), self.mesh)
        else:
            specs = jax.P(*self._entries(name))
        shardings = jax.tree.map(functools.partial(jax.NamedSharding, self.mesh), specs)
        return jax.device_put(weight, shardings)

    def divisible(self, name: str, weight: Any) -> Any:
        """A matrix whose rows are divided within super-blocks with a float32 scale for each group;
        others as they are."""
        two_levels = isinstance(weight, QuantizedArray) and weight.format.scale == "two_level"
        if not two_levels or _kind(name) not in _ALONG_K:
            return weight
        if weight.k // self.parts % SUPER_BLOCK == 0:
            return weight
        scale, zero, format = super_blocks.expanded(
            weight.scale, weight.zero, weight.format, weight.packed.shape[-2] * ATOM
        )
        return weight._with(scale=scale, zero=zero, format=format)

    def check(self, name: str, weight: Any) -> None:
        """Checks that the parts of a quantized weight are matrices.

        **Raises:** `ValueError` with the name and the reason.
        """
        if not isinstance(weight, QuantizedArray):
            return

        def part(leaf: Any, spec: jax.P) -> jax.ShapeDtypeStruct:
            shape = jax.NamedSharding(self.mesh, spec).shard_shape(leaf.shape)
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        try:
            specs = _specs(weight, self._entries(name), self.mesh)
            jax.tree.map(part, weight, specs).check_words()
        except ValueError as error:
            raise ValueError(
                f"shard: {name} cannot be divided over {self.parts} devices: {error}"
            ) from None

    def padded(self, name: str, weight: Any) -> Any:
        """An embedding or a head with columns for whole atoms on every device; others as they
        are."""
        missing = self._padding(name, weight)
        if not missing:
            return weight
        if not isinstance(weight, QuantizedArray):
            return jnp.pad(weight, [(0, 0), (0, missing)])
        found = weight.n + missing
        pad = [(0, found // ATOM - weight.packed.shape[0]), (0, 0), (0, 0)]
        zero = None if weight.zero is None else jnp.pad(weight.zero, pad)
        scale = of_codes(jnp.pad(codes_of(weight.scale), pad), weight.format)
        return dataclasses.replace(
            weight, packed=jnp.pad(weight.packed, pad), scale=scale, zero=zero, n=found, whole=None
        )

    def _padding(self, name: str, weight: Any) -> int:
        return -weight.shape[-1] % (ATOM * self.parts) if _kind(name) in _VOCABULARY else 0

    def _entries(self, name: str) -> tuple[Any, ...]:
        kind = _kind(name)
        if kind in _ALONG_K:
            return (self.axis, None)
        if kind in _ALONG_N:
            return (None, self.axis)
        return (self.axis,) if kind in _VECTORS else ()

    def place_variables(self, module: nnx.Module) -> None:
        """Puts the variables of a decoder on the devices, with their sharding as metadata.

        **Raises:** what `check` raises, before one is moved.
        """
        variables = [
            (".".join(map(str, path)), variable)
            for path, variable in nnx.iter_graph(module)
            if isinstance(variable, nnx.Variable)
        ]
        weights = {
            name: self.divisible(name, self.padded(name, variable.get_value()))
            for name, variable in variables
        }
        for name, weight in weights.items():
            self.check(name, weight)
        for name, variable in variables:
            weight = weights.pop(name)
            variable.set_value(self.place(name, weight))
            if entries := self._entries(name):
                entries = (*[None] * (weight.ndim - len(entries)), *entries)
                variable.set_metadata(out_sharding=entries, mesh=self.mesh)

    def on_each(
        self, function: Callable[..., Any], module: nnx.Module, *, in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """`function` of the module and arguments; every device sees only its part."""
        graph, state = nnx.split(module)

        def local(state: Any, *arguments: Any) -> Any:
            return function(nnx.merge(graph, state), *arguments)

        # check_vma needs the varying axes of results, which kernels of other packages do not give.
        mapped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(nnx.get_partition_spec(state), *in_specs),
            out_specs=out_specs,
            check_vma=False,
        )
        context, own = jax.sharding.get_abstract_mesh(), self.mesh.abstract_mesh
        if not context.empty and any(
            getattr(context, name) != getattr(own, name) for name in ("shape", "axis_types")
        ):
            raise ValueError(
                f"Decoder: its mesh is {dict(own.shape)} with Auto axes, but jax.set_mesh was "
                f"called with {dict(context.shape)} of {context.axis_types[0].name} axes; call "
                "the decoder outside of it, or make both alike, with "
                "axis_types=(jax.sharding.AxisType.Auto,)."
            )
        # Outside jax.jit, jax.shard_map would compile every operation separately.
        return functools.partial(jax.jit(mapped, inline=True), state)

    # Inside `on_each`:

    def own_columns(self, tokens: Array, vocabulary: int, columns: int) -> tuple[Array, Array]:
        """The columns that tokens have on this device, of so many, and which tokens have one.

        Tokens that the vocabulary has not have one everywhere, which does not exist: a lookup gives
        NaN, as it does on one device. Negative ones count from the end.
        """
        tokens = jnp.where(tokens < 0, tokens + vocabulary, tokens)
        known = (tokens >= 0) & (tokens < vocabulary)
        own = jnp.where(known, tokens - lax.axis_index(self.axis) * columns, columns)
        there = (own >= 0) & (own < columns)
        return jnp.where(there | ~known, own, 0), there | ~known

    def exchanging(self, rows: int) -> tuple[int, ...]:
        """CUDA's numbers of the devices, if a decode step of so many rows adds parts within its
        calls; else none."""
        return cuda_calls.exchanging(self.mesh.devices.ravel().tolist(), rows)

    def add(self, values: Array) -> Array:
        """The sum of the values of all devices."""
        return lax.psum(values, self.axis)

    def largest(self, values: Array) -> Array:
        """The largest values of all devices; infinity if one of them is not finite."""
        return lax.pmax(jnp.where(jnp.isfinite(values), values, jnp.inf), self.axis)

    def join_columns(self, values: Array, columns: int) -> Array:
        """Values (..., columns) of all devices, without padding."""
        whole = lax.all_gather(values, self.axis, axis=values.ndim - 1, tiled=True)
        return whole[..., :columns]


def add_parts(division: Division | None, product: Callable[[Any], Array], dtype: Any) -> Array:
    """`product(dtype)`, whose partial sums on several devices are float32 and added first."""
    if division is None:
        return product(dtype)
    return division.add(product(jnp.float32)).astype(dtype)


def _undivided(config: Config, formats: Mapping[str, Format | None], parts: int) -> str | None:
    """Why a decoder is not divided into so many parts, or None."""
    for name in ("heads", "kv_heads", "hidden"):
        if (size := getattr(config, name)) % parts:
            return f"{name}={size} is no multiple of {parts} devices, each of which has its own"
    if parts == 1:
        return None
    attended = config.heads * config.head_size
    features = {
        "heads": attended,
        "kv_heads": config.kv_heads * config.head_size,
        "hidden": config.hidden,
    }
    for name, size in features.items():
        if size // parts % ATOM:
            return (
                f"the {size} features of {name} are {size // parts} on each of {parts} devices, "
                f"but words are cut in multiples of {ATOM}"
            )
    for name, format in formats.items():
        size = {"o": attended, "down": config.hidden}.get(_kind(name))
        if size is None or format is None:
            continue
        unit = format.expanded.shard_unit  # super-blocks may be expanded
        if size // parts % unit:
            return (
                f"the {size} rows of {name} are {size // parts} on each of {parts} devices, but "
                f"in groups of {format.group_size} they are cut in multiples of {unit}"
            )
    return None


def _specs(array: QuantizedArray, entries: Any, mesh: Any) -> QuantizedArray:
    """The specs of the leaves of a matrix that is divided as `entries`."""
    *_, k, n = (None, None, *entries)
    return array.partition_spec(mesh, k=k, n=n)


def _kind(name: str) -> str:
    """What decides how a weight is divided: the last word of its name that is no number."""
    return next(word for word in reversed(name.split(".")) if not word.isdigit())
