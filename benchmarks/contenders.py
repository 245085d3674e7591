"""The table of backends to time: this package, XLA and other packages."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import peers
import weights
from weights import Codes

import jaxlowbit as jl
from jaxlowbit import Format

OURS = ("jaxlowbit", "definition", "pallas")
DENSE = ("xla", "cublas")
READ = "read"  # only reads the weight


class Contender(NamedTuple):
    """Makes and multiplies by a weight.

    `make` takes `Codes` and their `Format`. `call` takes activations (m, k) and a weight.
    `unsupported` takes the format and the dtype and returns a reason or None. `reference`, for
    backends that quantize differently, returns their weight as floats (k, n).
    """

    make: Callable[[Any, Format], Any]
    call: Callable[[Any, Any], Any]
    unsupported: Callable[[Format, str], str | None] = lambda format, dtype: None
    framework: Literal["jax", "torch"] = "jax"
    dense: bool = False
    # Whether XLA would share work on the weight among calls; then each call has a separate weight.
    shares: bool = False
    reference: Callable[[Any], Any] | None = None


@functools.partial(jax.jit, static_argnames="format")
def quantized(codes: Codes, format: Format) -> jl.QuantizedArray:
    """The codes in this package's layout."""
    values = codes.qvalue
    if format.zero == "none" and format.codebook is None:
        values = values.astype(jnp.int16) - format.offset
    return jl.QuantizedArray.from_integers(
        values, codes.scale, codes.zero, format=format, tensor_scale=codes.tensor_scale
    )


def _ours(backend: Any = None) -> Contender:
    def unsupported(format: Format, dtype: str) -> str | None:
        if backend is None:
            return None
        random = functools.partial(weights.random_codes, n=1, k=1, format=format, dtype=dtype)
        make = functools.partial(quantized, format=format)
        weight = jax.eval_shape(make, jax.eval_shape(random, jax.random.key(0)))
        lhs = jax.ShapeDtypeStruct((1, 1), jnp.dtype(dtype))
        return jl.supported_backends(lhs, weight)[backend]

    call = functools.partial(jl.quantized_matmul, backend=backend)
    return Contender(quantized, call, unsupported, shares=backend == "xla")


@functools.partial(jax.jit, static_argnames="format")
def _dense(codes: Codes, format: Format) -> jax.Array:
    return weights.dequantize(codes, format).astype(weights.float_dtype(codes))


def _dense_matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    # A GPU would otherwise round float32 to TF32.
    return jnp.matmul(x, weight, precision="highest" if x.dtype == jnp.float32 else None)


@functools.partial(jax.jit, static_argnames="format")
def _int4(codes: Codes, format: Format) -> tuple[jax.Array, jax.Array]:
    return (codes.qvalue.astype(jnp.int8) - format.offset).astype(jnp.int4), codes.scale


def _only_int4_groups(format: Format, dtype: str) -> str | None:
    fits = format.bits == 4 and format.zero == "none" and format.group_size > 0
    fits &= format.codebook is None and format.scale is None
    return None if fits else "it is written for 4 bits in groups without a zero"


def _int4_matmul(x: jax.Array, weight: tuple[jax.Array, jax.Array]) -> jax.Array:
    """XLA's own int4, written plainly: dequantize, then multiply."""
    qvalue, scale = weight
    groups, n = scale.shape
    floats = qvalue.astype(x.dtype).reshape(groups, -1, n) * scale[:, None]
    return x @ floats.reshape(-1, n)


def _int4_matmul_by_group(x: jax.Array, weight: tuple[jax.Array, jax.Array]) -> jax.Array:
    """XLA's own int4, one product per group, scaled afterwards."""
    qvalue, scale = weight
    groups, n = scale.shape
    x = x.reshape(x.shape[0], groups, -1)
    qvalue = qvalue.astype(x.dtype).reshape(groups, -1, n)
    products = jnp.einsum("mgk,gkn->gmn", x, qvalue, preferred_element_type=jnp.float32)
    return (products * scale[:, None].astype(jnp.float32)).sum(0).astype(x.dtype)


def row_sums(x: jax.Array, words: jax.Array) -> jax.Array:
    """Reads `words` (rows, columns) and little else; depends on `x` (rows,)."""
    return jnp.sum(words ^ x[:, None], axis=1)


def table() -> dict[str, Contender]:
    """Name to contender, other packages too, whether or not they are installed."""
    return {
        "jaxlowbit": _ours(),
        "definition": _ours("xla"),
        "pallas": _ours("pallas"),
        "xla": Contender(_dense, _dense_matmul, dense=True),
        "xla-int4": Contender(_int4, _int4_matmul, _only_int4_groups, shares=True),
        "xla-int4-grouped": Contender(_int4, _int4_matmul_by_group, _only_int4_groups, shares=True),
        **{name: _peer(peer) for name, peer in peers.PEERS.items()},
    }


def _peer(peer: peers.Peer) -> Contender:
    return Contender(
        make=peer.make,
        call=peer.call,
        unsupported=functools.partial(peers.unsupported, peer),
        framework=peer.framework,
        dense=peer.dense,
        shares=peer.framework == "jax",
        reference=peer.reference,
    )
