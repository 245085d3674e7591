"""Tensor parallelism: a decoder sharded over the devices of a mesh.

A device has some heads, an equal share of the hidden features of every MLP, and an equal share of
the vocabulary. The weights of queries, keys, values, gate and up are sharded along n. The output
and down projections are sharded along k, so their products are partial sums of the residual stream.
In a mixture of experts, a device has some experts instead, and sums the choices of those. Two
all-reduces per block add partial sums; in a decode step, kernels add them within the block's calls
if possible (`Division.exchanging`). Embedding and head are sharded along the vocabulary, the cache
along its heads, and everything else is replicated.
"""

import dataclasses
import functools
import math
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
from .._core.sharding import placed
from .._flax.nnx_variables import QuantizedVariable
from .config import Config
from .sampling import first_largest

# The last component of the name of a weight, or of a variable of the decoder.
_VOCABULARY = ("embedding", "head")
_ALONG_N = (
    *("q", "k", "v", "qkv", "gate", "up", "gate_up", "dense_gate", "dense_up", "dense_gate_up"),
    *_VOCABULARY,
)
_ALONG_K = ("o", "down", "dense_down")
_ADAPTER = ("base", "lora_a", "lora_b")  # variables of an adapted weight
_VECTORS = (
    *("q_bias", "k_bias", "v_bias", "biases", "gate_bias", "up_bias", "gate_up_bias"),
    *("q_all_norm", "k_all_norm", "sinks"),
)
# Weights of experts, which are sharded along the axis of experts.
_EXPERTS = (
    *("gate", "up", "gate_up", "down"),
    *("gate_bias", "up_bias", "gate_up_bias", "down_bias"),
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
    experts: bool = False  # whether the decoder has experts

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
        axis_types = (AxisType.Auto,)
        mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=axis_types)
        return cls(mesh, config.experts > 0)

    @property
    def axis(self) -> str:
        return self.mesh.axis_names[0]

    @property
    def parts(self) -> int:
        return self.mesh.size

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def place(self, name: str, weight: Any) -> Any:
        """A weight, by its name, on the devices; a vocabulary that needs padding as it is."""
        if self._padding(name, weight):
            return weight
        weight, entries = self.divisible(name, weight), self._entries(name)
        if isinstance(weight, QuantizedArray):
            specs: Any = _specs(weight, entries, self.mesh)
        else:
            specs = jax.P(*_padded(entries, weight.ndim)) if entries else jax.P()
        shardings = jax.tree.map(functools.partial(jax.NamedSharding, self.mesh), specs)
        return placed(weight, shardings)

    def divisible(self, name: str, weight: Any) -> Any:
        """A matrix whose rows are divided within super-blocks with a float32 scale for each group;
        others as they are."""
        two_levels = isinstance(weight, QuantizedArray) and weight.format.two_levels
        entries = self._entries(name)
        if not two_levels or len(entries) < 2 or entries[-2] is None:
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
        if _kind(name) not in _VOCABULARY or _part(name) == "lora_a":
            return 0
        return -weight.shape[-1] % (ATOM * self.parts)

    def _entries(self, name: str) -> tuple[Any, ...]:
        kind, part = _kind(name), _part(name)
        if self.experts and kind in _EXPERTS:
            return (self.axis, None) if kind.endswith("_bias") else (self.axis, None, None)
        if part in ("lora_a", "lora_b") and (part == "lora_a") != (kind in _ALONG_K):
            return ()
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
                entries = _padded(entries, weight.ndim)
                variable.set_metadata(out_sharding=entries, mesh=self.mesh)

    def on_each(
        self, function: Callable[..., Any], module: nnx.Module, *, in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """`function` of the module and arguments; every device sees only its part."""
        graph, state = nnx.split(module)

        def local(state: Any, *arguments: Any) -> Any:
            return function(nnx.merge(graph, state), *arguments)

        specs = nnx.get_partition_spec(state), *in_specs
        return functools.partial(self._mapped(local, specs, out_specs), state)

    def on_columns(self, function: Callable[[Array], Any], values: Array, out_specs: Any) -> Any:
        """`function` of values (..., columns); every device sees its columns."""
        columns = jax.P(*[None] * (values.ndim - 1), self.axis)
        return self._mapped(function, (columns,), out_specs)(values)

    def _mapped(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        # check_vma needs the varying axes of results, which kernels of other packages do not give.
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
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
        return jax.jit(mapped, inline=True)

    def forget_failure(self) -> None:
        """Makes the devices ready after a run that ended with an exception."""
        cuda_calls.exchange_failure()

    def check_devices(self, caller: str) -> None:
        """Checks that no device waited in vain for another one within a call.

        **Raises:** `RuntimeError` with the devices.
        """
        if failure := cuda_calls.exchange_failure():
            raise RuntimeError(f"{caller}: {failure}")

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

    def first(self, count: int) -> Array:
        """The number of the first of `count` experts that this device has, int32 ()."""
        return (lax.axis_index(self.axis) * count).astype(jnp.int32)

    def on_first(self, values: Array) -> Array:
        """The values on the first device, and zeros on others."""
        return jnp.where(lax.axis_index(self.axis) == 0, values, jnp.zeros((), values.dtype))

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

    def add_rows(self, values: Array, dtype: Any) -> Array:
        """The sum of the float32 values (..., columns) of all devices, rounded to `dtype`."""
        rows, columns = math.prod(values.shape[:-1]), values.shape[-1]
        devices = self.exchanging(rows) if dtype in (jnp.bfloat16, jnp.float16) else ()
        if not devices or cuda_calls.unsupported_norm(columns) is not None:
            return self.add(values).astype(dtype)
        added = cuda_calls.add_over_devices(values.reshape(rows, columns), dtype, devices)
        return added.reshape(values.shape)

    def join_columns(self, values: Array, columns: int) -> Array:
        """Values (..., columns) of all devices, without padding."""
        whole = lax.all_gather(values, self.axis, axis=values.ndim - 1, tiled=True)
        return whole[..., :columns]

    def argmax(self, values: Array, columns: int) -> tuple[Array, Array]:
        """The largest values (batch,) in the columns of all devices without padding, and the first
        columns that have them. NaN counts as the largest."""
        own = values.shape[-1]
        column = lax.axis_index(self.axis) * own + jnp.arange(own, dtype=jnp.int32)
        value, at = first_largest(jnp.where(column[None] < columns, values, -jnp.inf))
        found = self._gather(jnp.stack([lax.bitcast_convert_type(value, jnp.int32), column[at]]))
        value = lax.bitcast_convert_type(found[:, 0], jnp.float32)
        best = jnp.argmax(value, axis=0)[None]
        value = jnp.take_along_axis(value, best, axis=0)[0]
        return value, jnp.take_along_axis(found[:, 1], best, axis=0)[0]

    def _gather(self, values: Array) -> Array:
        """Two int32 values (2, batch) of every device, (parts, 2, batch)."""
        batch = values.shape[1]
        devices = self.exchanging(batch)
        if not devices:
            return lax.all_gather(values, self.axis)
        # Each device adds zeros to the bytes of the others; bfloat16 represents 0 to 255.
        shifts = jnp.arange(0, 32, 8, dtype=jnp.int32)[:, None, None]
        parts = jnp.arange(self.parts, dtype=jnp.int32)[:, None, None, None]
        own = ((values[None] >> shifts) & 255)[None]
        bytes = jnp.where(parts == lax.axis_index(self.axis), own, 0)
        rows = bytes.reshape(-1, batch).T.astype(jnp.float32)
        found = cuda_calls.add_over_devices(rows, jnp.bfloat16, devices).astype(jnp.int32)
        found = found.T.reshape(self.parts, 4, 2, batch)
        return (found << shifts[None]).sum(axis=1, dtype=jnp.int32)


def add_parts(division: Division | None, product: Callable[[Any], Array], dtype: Any) -> Array:
    """`product(dtype)`, whose partial sums on several devices are float32 and added first."""
    if division is None:
        return product(dtype)
    return division.add(product(jnp.float32)).astype(dtype)


def _undivided(config: Config, formats: Mapping[str, Format | None], parts: int) -> str | None:
    """Why a decoder is not divided into so many parts, or None."""
    whole = "experts" if config.experts else "hidden"
    for name in ("heads", "kv_heads", "global_kv_heads", whole, "dense_hidden"):
        if (size := getattr(config, name) or 0) % parts:
            return f"{name}={size} is no multiple of {parts} devices, each of which has its own"
    if parts == 1:
        return None
    features = []
    for local in sorted({config.is_local(i) for i in range(config.layers)}):
        kv_heads, head_size = config.head_sizes(local=local)
        features += [("heads", config.heads * head_size), ("kv_heads", kv_heads * head_size)]
    features += [("dense_hidden", config.dense_hidden)]
    features += [] if config.experts else [("hidden", config.hidden)]
    for name, size in features:
        if size // parts % ATOM:
            return (
                f"the {size} features of {name} are {size // parts} on each of {parts} devices, "
                f"but words are cut in multiples of {ATOM}"
            )
    shapes = config.shapes()
    divided = {name for name, x in shapes.items() if _kind(name) in _ALONG_K and len(x) == 2}
    for name, format in formats.items():
        if format is None or name not in divided:
            continue
        size = shapes[name][0]
        unit = format.expanded.shard_unit  # super-blocks may be expanded
        if size // parts % unit:
            return (
                f"the {size} rows of {name} are {size // parts} on each of {parts} devices, but "
                f"in groups of {format.group_size} they are cut in multiples of {unit}"
            )
    return None


def _specs(array: QuantizedArray, entries: Any, mesh: Any) -> QuantizedArray:
    """The specs of the leaves of a matrix that is divided as `entries`."""
    *lead, k, n = _padded(entries, array.ndim)
    return array.partition_spec(mesh, k=k, n=n, lead=tuple(lead))


def _padded(entries: Any, ndim: int) -> tuple[Any, ...]:
    """The entries of the last axes of an array, and None for the others."""
    return (*[None] * (ndim - len(entries)), *entries)


def _kind(name: str) -> str:
    """What decides how a weight is divided: the last word of its name that is no number, and no
    part of an adapted weight."""
    words = reversed(name.split("."))
    return next(word for word in words if not word.isdigit() and word not in _ADAPTER)


def _part(name: str) -> str:
    """The last word of a name."""
    return name.rpartition(".")[2]
