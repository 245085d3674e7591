"""`quantized_ragged_dot`: rows in groups, each group times its own matrix of a stack."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._backends import cuda_calls
from .._backends.cuda import OLDEST
from .._backends.target import Target
from .._core import checks, explicit, indexing
from .._core.activations import EXACT, QuantizedActivations, value_dtype
from .._core.array import QuantizedArray
from .._core.explicit import Sharding
from .._matmul import epilogue
from .._matmul.api import quantized_matmul
from .._matmul.call import Call, Rows, Weights, run
from .._matmul.epilogue import Activation, GatedActivation
from .._matmul.options import Backend, Options
from .._matmul.primitive import equally_varying
from .._matmul.quantized_lhs import check_float32_sums


def quantized_ragged_dot(
    lhs: Any,
    rhs: QuantizedArray,
    group_sizes: Any,
    *,
    group_offset: Any = None,
    bias: Any = None,
    activation: GatedActivation | None = None,
    lhs_qtype: Any = None,
    preferred_element_type: Any = None,
    precision: lax.DotAlgorithmPreset | None = None,
    out_sharding: Sharding | None = None,
    backend: Backend | None = None,
) -> Array:
    """Computes `jax.lax.ragged_dot(lhs, rhs.dequantize(), group_sizes)` from packed weights.

    The rows of lhs are sorted by group: the first `group_sizes[0]` rows are multiplied by the first
    matrix, the next `group_sizes[1]` rows by the second, and so on. Rows behind the last group are
    zero in the result. Sizes are read on the device: no shape depends on them, and no group is
    padded.

    Every group is a `quantized_matmul`, with its rounding and derivatives. The definition walks
    over blocks of rows of one group, so at most one matrix (or pair) exists in floats.

    **Arguments:**

    - `lhs`: float32, bfloat16 or float16 (m, k), or `QuantizedActivations`.
    - `rhs`: (experts, k, n), or pairs of gate and up (2, experts, k, n) as for `quantized_glu`, or
      a view of a longer stack (`QuantizedArray.select`) of these shapes.
    - `group_sizes`: integers (groups,). Group g has the rows from `start` to
      `min(start + max(group_sizes[g], 0), m)`, with `start` the end of the previous group: a
      negative size is 0, and sizes are cut at the last row.
    - `group_offset`: None if there is a matrix for every group. Otherwise an integer, () or (1,),
      perhaps traced: `rhs` contains the matrices of groups `group_offset` to `group_offset +
      experts - 1`, as on one of several devices. Rows of other groups are zero in the result.
    - `bias`: float32, bfloat16 or float16 (experts, n), or (2, experts, n) for pairs.
    - `activation`: as for `quantized_matmul`. For pairs, the result is `activation(gate) * up`, or
      for `"gpt_oss"` the clamped form `min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (clip(up, -7,
      7) + 1)` of [gpt-oss](https://github.com/openai/gpt-oss).
    - `lhs_qtype`: None, or `jnp.int8` or `jnp.float8_e4m3fn`, as for `quantized_matmul`.
    - `preferred_element_type`, `precision`, `out_sharding`, `backend`: as for `quantized_matmul`.

    **Returns:** (m, n).

    **Raises:** as `quantized_matmul`; `TypeError` if `rhs` is not quantized, `ValueError` if it is
    not a stack of matrices or pairs, and for other numbers of group sizes.

    ```python
    rhs = quantize(jnp.ones((4, 256, 512)), INT4)
    quantized_ragged_dot(jnp.ones((8, 256)), rhs, jnp.array([3, 0, 4, 1]))
    ```
    """
    caller = "quantized_ragged_dot"
    checks.quantized(caller, "rhs", rhs, QuantizedArray)
    pairs = rhs.ndim == 4
    if rhs.ndim not in (3, 4) or (pairs and rhs.shape[0] != 2):
        raise ValueError(
            f"{caller}: rhs has shape {rhs.shape}, but it must be a stack of matrices (experts, k, "
            "n) or of pairs (2, experts, k, n); use quantized_matmul for a single matrix."
        )
    check_activation(caller, activation, pairs=pairs)
    options = Options.checked(caller, preferred_element_type, precision, out_sharding, backend)
    if not isinstance(lhs, QuantizedActivations):
        lhs = checks.array(caller, "lhs", lhs, "activations (m, k)")
    if lhs.ndim != 2:
        raise ValueError(
            f"{caller}: lhs has shape {lhs.shape}, but it must be (m, k), with the rows of each "
            "group together; reshape it."
        )
    dtype = check_rows(caller, lhs, rhs, lhs_qtype, options)
    experts = rhs.shape[-3]
    sizes = _checked_sizes(group_sizes, experts, group_offset)
    offset = checked_offset(caller, group_offset)
    shape, rule = (*rhs.shape[:-2], rhs.n), "(2, experts, n)" if pairs else "(experts, n)"
    bias = epilogue.checked_addend(caller, "bias", bias, shape, rule)
    product = functools.partial(
        ragged_dot, activation=activation, dtype=dtype, options=options.replace(out_sharding=None)
    )
    with checks.within(caller):
        operands = (lhs, rhs, sizes, offset, bias)
        values = jax.tree.leaves(lhs)[0]
        return explicit.chain(product, operands, values, (matrix(rhs),), out_sharding)


def ragged_dot(
    lhs: Any,
    rhs: QuantizedArray,
    sizes: Array,
    offset: Array,
    bias: Array | None,
    *,
    activation: str | None,
    dtype: Any,
    options: Options,
) -> Array:
    """`quantized_ragged_dot` of checked operands; `dtype` is the 8-bit dtype of rounded rows."""
    rows, tree = jax.tree.flatten(lhs)
    options = options.replace(preferred_element_type=options.out_dtype(lhs))
    fields = {"lhs": tree, "activation": activation, "dtype": dtype}
    return run(_RaggedDot, rows, (rhs,), options, (sizes, offset, bias), **fields)[0]


@dataclasses.dataclass(frozen=True)
class RaggedCall(Call):
    """A call of products of rows in groups."""

    activation: str | None
    dtype: Any  # 8-bit dtype of rows before each product; None: not rounded

    def unsupported_product(
        self, lhs: Any, rhs: QuantizedArray, activation: str | None, target: Target
    ) -> str | None:
        """Returns None if the kernels of a target compute this product, else the reason."""
        if self.dtype is not None:
            return "activations have 8 bits"
        reason = Call.unsupported(self, (lhs,), (rhs,), target)
        for capability in sorted(target.capabilities) or [OLDEST]:
            reason = reason or cuda_calls.unsupported_ragged(lhs, rhs, activation, capability)
        return reason


@dataclasses.dataclass(frozen=True)
class _RaggedDot(RaggedCall):
    """Rows in groups times a stack; the rows of its operands are the leaves of lhs.

    Others are group sizes int32 (groups,), the group offset int32 () and the bias, if there is one.
    """

    lhs: Any  # the tree of lhs, which may be QuantizedActivations
    counted: bool = True  # whether the loop over blocks ends at the last block with rows

    @property
    def custom_calls(self) -> Mapping[str, Callable[..., tuple[Array, ...]]]:
        return {"cuda": self._cuda}

    def unsupported(self, rows: Rows, weights: Weights, target: Target) -> str | None:
        if len(rows) > 1:
            return "activations have 8 bits"
        return self.unsupported_product(rows[0], weights[0], self.activation, target)

    def _cuda(self, *operands: Array) -> tuple[Array, ...]:
        (lhs,), (rhs,), (sizes, offset, bias) = self.named(operands)
        out = cuda_calls.ragged(
            *(lhs, rhs, sizes, offset, bias),
            activation=self.activation,
            out_dtype=self.options.out_dtype(lhs),
            accumulate_float16=self.options.accumulate_float16,
        )
        return (out,)

    @property
    def differentiable(self) -> Call:
        return dataclasses.replace(self, counted=False)

    def folds(self, weights: Any) -> bool:
        return False  # each batch element has other groups

    def composition(self, *operands: Array) -> tuple[Array, ...]:
        rows, (rhs,), (sizes, offset, bias) = self.named(operands)
        lhs = jax.tree.unflatten(self.lhs, rows)
        m, experts, n = lhs.shape[0], rhs.shape[-3], rhs.n
        out_dtype = self.options.out_dtype(lhs)
        if m == 0 or experts == 0:
            return (jnp.zeros((m, n), out_dtype),)
        blocks = _blocks(sizes, offset, m, experts)

        def product(x: Any, expert: Array) -> Array:
            addend = None if bias is None else bias[..., expert, :]
            return self._multiply(x, _expert(rhs, expert), addend)

        xs = jax.tree.map(lambda leaf: _rows(leaf, blocks.rows), lhs)
        if not self.counted:
            out = lax.map(lambda block: product(*block), (xs, blocks.expert))
        else:
            zeros = jnp.zeros((*blocks.rows.shape, n), out_dtype)
            out, *_ = equally_varying(zeros, *jax.tree.leaves((xs, blocks)))

            def step(i: Array, out: Array) -> Array:
                x, expert = jax.tree.map(
                    lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False),
                    (xs, blocks.expert),
                )
                return lax.dynamic_update_index_in_dim(out, product(x, expert), i, 0)

            out = lax.fori_loop(jnp.int32(0), blocks.used, step, out)
        return (_rows(out.reshape(-1, n), blocks.place),)

    def _multiply(self, x: Any, weight: QuantizedArray, bias: Array | None) -> Array:
        """The product of a block with a matrix, or a pair, and its epilogue."""
        floats, pair = self.dtype is None and isinstance(x, Array), weight.ndim == 3
        if floats and pair:
            return epilogue.gated_product(x, weight, bias, self.activation, self.options)
        if floats:
            return epilogue.product(x, weight, bias, self.activation, None, self.options)
        options: dict[str, Any] = {"lhs_qtype": self.dtype, "backend": self.options.backend}
        if not pair:
            options |= {"bias": bias, "activation": self.activation}
            out_dtype = self.options.preferred_element_type
            return quantized_matmul(x, weight, preferred_element_type=out_dtype, **options)
        gate, up = (
            quantized_matmul(
                x,
                weight._with(index=jnp.asarray(weight.index)[i]),
                bias=None if bias is None else bias[i],
                preferred_element_type=jnp.float32,
                **options,
            )
            for i in range(2)
        )
        return epilogue.gated(gate, up, self.activation, self.options.preferred_element_type)


def _rows(array: Array, rows: Array) -> Array:
    """Rows of an array (r, n), zeros for rows from r on."""
    return jnp.take(array, rows, axis=0, mode="fill", fill_value=0)


class _Blocks(NamedTuple):
    """Blocks of rows, each of one expert; the first `used` have rows.

    - `rows`: (blocks, size), the row of lhs at each position of a block; m if there is none.
    - `expert`: (blocks,).
    - `place`: (m,), the position of each row of lhs in `rows`, flattened; the number of positions
      for a row without an expert.
    """

    rows: Array
    expert: Array
    used: Array
    place: Array


def _blocks(sizes: Array, offset: Array, m: int, experts: int) -> _Blocks:
    """Divides the rows of the experts into at most `count` blocks."""
    size, int32 = _block_size(m, experts), jnp.int32
    count = (m + (size - 1) * min(experts, m)) // size
    bounds = _bounds(sizes, offset, m, experts)
    starts, ends = bounds[:-1], bounds[1:]
    counts = (ends - starts + size - 1) // size
    lasts = jnp.cumsum(counts, dtype=int32)
    table = jnp.stack([starts, ends, lasts - counts])

    def owner(ends: Array, number: int) -> tuple[Array, Array]:
        """The numbers from 0 to `number` - 1, and for each the first expert with a larger end."""
        numbers = jnp.arange(number, dtype=int32)
        owners = jnp.sum(ends[None, :] <= numbers[:, None], axis=1, dtype=int32)
        return numbers, jnp.minimum(owners, experts - 1)

    block, expert = owner(lasts, count)
    start, end, first = jnp.take(table, expert, axis=1, mode="clip")
    rows = (start + (block - first) * size)[:, None] + jnp.arange(size, dtype=int32)[None, :]
    rows = jnp.where(rows < end[:, None], rows, m)  # also in blocks without rows
    row, own = owner(ends, m)
    start, end, first = jnp.take(table, own, axis=1, mode="clip")
    place = jnp.where((row >= start) & (row < end), first * size + row - start, count * size)
    return _Blocks(rows, expert, lasts[-1], place)


def ends_of_groups(sizes: Array, m: int) -> Array:
    """The end of the rows of each group, int32 (groups,), for any sizes."""
    sizes = jnp.clip(sizes, 0, m)
    # The sum of wrong sizes may leave int32, but rows are fewer than 2^30.
    beyond = jnp.cumsum(sizes.astype(jnp.float32)) > 2.0**30
    return jnp.where(beyond, m, jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), m))


def groups_of_rows(sizes: Array, m: int) -> Array:
    """The group of each row, int32 (m,); the last one for rows behind all groups."""
    rows = jnp.arange(m, dtype=jnp.int32)
    found = jnp.searchsorted(ends_of_groups(sizes, m), rows, side="right")
    return jnp.minimum(found, len(sizes) - 1).astype(jnp.int32)


def _bounds(sizes: Array, offset: Array, m: int, experts: int) -> Array:
    """The first row of each expert, and the end of the last one: int32 (experts + 1,)."""
    ends = ends_of_groups(sizes, m)
    # Groups before the first and behind the last one are empty.
    ends = jnp.pad(jnp.pad(ends, (experts + 1, 0)), (0, experts), mode="edge")
    start = jnp.clip(offset, -experts, sizes.shape[0]) + experts
    return lax.dynamic_slice(ends, (start,), (experts + 1,))


def _block_size(m: int, experts: int) -> int:
    """Rows of a block: a power of two near the mean group, or half of it, so there is little
    padding."""
    mean = -(-m // experts)
    return min(1 << ((mean if mean < 64 else mean // 2).bit_length() - 1), 256)


def _expert(rhs: QuantizedArray, expert: Array) -> QuantizedArray:
    """The matrix (k, n), or the pair (2, k, n), of an expert, as a view."""
    index = rhs.index
    if index is None:
        lead = rhs.shape[:-2]
        index = jnp.arange(math.prod(lead), dtype=jnp.int32).reshape(lead)
        rhs = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(lead) :]), rhs)
    return rhs._with(index=index[..., expert])


def check_activation(caller: str, activation: Any, *, pairs: bool, optional: bool = True) -> None:
    """Raises for an unknown activation, and for gpt-oss's unless matrices are pairs."""
    names = get_args(GatedActivation if pairs else Activation)
    if not pairs and isinstance(activation, str) and activation == "gpt_oss":
        raise ValueError(
            f"{caller}: activation is {activation!r}, which has a gate and an up, but rhs is one "
            "matrix per expert; stack both as pairs (2, experts, k, n)."
        )
    checks.choice(caller, "activation", activation, names, optional=optional)


def check_rows(caller: str, lhs: Any, rhs: QuantizedArray, lhs_qtype: Any, options: Options) -> Any:
    """Checks a row of lhs against every matrix; returns the 8-bit dtype of rounded rows or None.

    **Raises:** as `quantized_matmul`.
    """
    given = isinstance(lhs, QuantizedActivations)
    if given and lhs_qtype is not None:
        raise ValueError(
            f"{caller}: lhs_qtype is {checks.brief(lhs_qtype)}, but lhs is quantized already; "
            "leave lhs_qtype out."
        )
    floats = jax.ShapeDtypeStruct(lhs.shape[-1:], lhs.dtype)
    if not given and lhs_qtype is None:
        options.check_rows(caller, floats, rhs)
        return None
    dtype = None if given else value_dtype(caller, "lhs_qtype", lhs_qtype)
    check_float32_sums(caller, options)
    values = jax.ShapeDtypeStruct(floats.shape, EXACT)
    options.replace(backend=None).check_rows(caller, floats, rhs)
    options.replace(preferred_element_type=None).check_rows(caller, values, rhs)
    return dtype


def _checked_sizes(group_sizes: Any, experts: int, group_offset: Any) -> Array:
    caller = "quantized_ragged_dot"
    sizes = checks.integers(caller, "group_sizes", group_sizes, "integers (groups,)")
    if not jnp.issubdtype(sizes.dtype, jnp.integer) or sizes.ndim != 1:
        raise ValueError(
            f"{caller}: group_sizes is {checks.brief(sizes)}, but it must be integers (groups,), "
            "the number of rows of each group."
        )
    if sizes.shape[0] < experts or (group_offset is None and sizes.shape[0] > experts):
        raise ValueError(
            f"{caller}: there are {sizes.shape[0]} group_sizes and {experts} experts, but each "
            "expert needs one; if rhs has some of the experts, pass the sizes of all groups and "
            "group_offset, the group of the first expert."
        )
    return indexing.saturated(sizes)


def checked_offset(caller: str, group_offset: Any) -> Array:
    """A group offset as int32 (); 0 if it is None."""
    if group_offset is None:
        return jnp.int32(0)
    offset = checks.integers(caller, "group_offset", group_offset, "an integer or None")
    if not jnp.issubdtype(offset.dtype, jnp.integer) or offset.shape not in ((), (1,)):
        raise ValueError(
            f"{caller}: group_offset is {checks.brief(offset)}, but it must be an integer, () or "
            "(1,): the group of the first expert of this device."
        )
    return indexing.saturated(offset).reshape(())


def matrix(weight: QuantizedArray) -> QuantizedArray:
    """The first matrix of a stack, as a view, for the sharding of a result."""
    return weight._with(index=jnp.int32(0))
