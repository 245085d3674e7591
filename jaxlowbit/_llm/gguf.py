"""GGUF files: header, metadata and where tensors lie, every size checked against the file's length.

The format is that of ggml's `docs/gguf.md`, versions 2 and 3, little-endian. The reader of the
`gguf` package trusts counts and lengths, takes seconds for a vocabulary, and maps no page lazily
away again; what is read from that package is its table of types.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from . import blocks
from .config import Config, RopeScaling

FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""The float types that weights may have, as NumPy reads their bytes."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q"}
_SCALARS |= {12: "<d", 7: "<?"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_AGAIN = "the file is damaged or cut off; fetch it again"


class Tensor(NamedTuple):
    """A tensor: its type, its shape with the outermost axis first, and its bytes in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class File:
    """A memory-mapped GGUF file.

    **Arguments:** `path`: the file.

    **Raises:** `ValueError` with the place, the value and the rule for anything in the header that
    is not as the format says, or that points beyond the end of the file; `OSError` if it cannot be
    read.

    ```python
    file = File("model.gguf")
    file.metadata["general.architecture"], file.tensors["token_embd.weight"].shape
    ```
    """

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        with open(self.path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size < 24:
                raise ValueError(
                    f"{self.path}: the file has {self.size} bytes, but the header of a GGUF file "
                    f"alone has 24; {_AGAIN}."
                )
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = _Header(self.path, self._map)
        self.metadata = header.metadata()
        self.tensors = header.tensors(self.metadata.get("general.alignment", 32))

    def rows(self, tensor: Tensor) -> np.ndarray:
        """The stored rows of a tensor, read from the file as they are used.

        **Returns:** uint8 (rows, bytes of a row), or floats (rows, k); one row for a vector. BF16
        are uint16.
        """
        dtype = np.dtype(FLOATS.get(tensor.kind, "u1"))
        count = tensor.nbytes // dtype.itemsize
        flat = np.frombuffer(self._map, dtype, count, tensor.start)
        return flat.reshape(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1)

    def forget(self, tensor: Tensor) -> None:
        """Gives back the memory of a tensor's pages, which the system reads again if need be."""
        page = mmap.PAGESIZE
        start = -(-tensor.start // page) * page
        length = (tensor.start + tensor.nbytes) // page * page - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, length)


class _Header:
    """Reads values one after the other, none beyond the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0
        magic = data[:4]
        if magic != b"GGUF":
            raise ValueError(
                f"{path}: the file begins with {magic!r}, but a GGUF file with b'GGUF'; name a "
                ".gguf file, or the folder of a Hugging Face model."
            )
        self.at = 4
        version = self._number("<I", "the version")
        if version not in (2, 3):
            swapped = version & 0xFFFF == 0
            reason = "it is big-endian" if swapped else "only versions 2 and 3 are read"
            raise ValueError(
                f"{path}: GGUF version {version}, but {reason}; convert the model again with a "
                "recent llama.cpp."
            )
        self.num_tensors = self._count("<Q", "the number of tensors", 24)
        self.num_entries = self._count("<Q", "the number of metadata entries", 13)

    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for i in range(self.num_entries):
            key = self._string(f"the key of metadata entry {i}")
            if key in found:
                raise ValueError(f"{self.path}: the metadata has {key!r} twice; {_AGAIN}.")
            found[key] = self._value(key, self._number("<I", f"the type of {key!r}"))
        return found

    def tensors(self, alignment: Any) -> dict[str, Tensor]:
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(
                f"{self.path}: general.alignment is {alignment!r}, but it is a power of two; "
                f"{_AGAIN}."
            )
        found: dict[str, Tensor] = {}
        for i in range(self.num_tensors):
            name = self._string(f"the name of tensor {i}")
            if name in found:
                raise ValueError(f"{self.path}: tensor {name!r} is there twice; {_AGAIN}.")
            found[name] = self._tensor(name, alignment)
        start = -(-self.at // alignment) * alignment
        placed = {name: t._replace(start=t.start + start) for name, t in found.items()}
        self._check_places(placed)
        return placed

    def _tensor(self, name: str, alignment: int) -> Tensor:
        """A tensor of the list, its start counted from that of all data."""
        count = self._number("<I", f"the dimensions of {name!r}")
        if not 1 <= count <= _MOST_DIMENSIONS:
            raise ValueError(
                f"{self.path}: tensor {name!r} has {count} dimensions, but tensors have 1 to "
                f"{_MOST_DIMENSIONS}; {_AGAIN}."
            )
        sizes = [self._number("<Q", f"the shape of {name!r}") for _ in range(count)]
        number = self._number("<I", f"the type of {name!r}")
        offset = self._number("<Q", f"the offset of {name!r}")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(
                f"{self.path}: tensor {name!r} has type {number}, which ggml does not have; "
                f"{_AGAIN}, or install a newer gguf package."
            ) from None
        size, nbytes = GGML_QUANT_SIZES[kind]
        elements = 1
        for length in sizes:
            elements *= length
        if elements == 0 or sizes[0] % size or elements // size * nbytes > len(self.data):
            raise ValueError(
                f"{self.path}: tensor {name!r} has the shape {sizes} in {kind.name}, but rows are "
                f"whole blocks of {size} and the file has {len(self.data)} bytes; {_AGAIN}."
            )
        if offset % alignment:
            raise ValueError(
                f"{self.path}: tensor {name!r} begins at {offset}, but tensors begin at multiples "
                f"of {alignment}; {_AGAIN}."
            )
        return Tensor(name, kind.name, tuple(sizes[::-1]), offset, elements // size * nbytes)

    def _check_places(self, tensors: Mapping[str, Tensor]) -> None:
        end, before = self.at, "the header"
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if tensor.start < end:
                raise ValueError(
                    f"{self.path}: tensor {tensor.name!r} begins at byte {tensor.start}, inside "
                    f"{before}, which ends at {end}; {_AGAIN}."
                )
            end, before = tensor.start + tensor.nbytes, f"tensor {tensor.name!r}"
            if end > len(self.data):
                raise ValueError(
                    f"{self.path}: {before} ends at byte {end}, but the file at {len(self.data)}; "
                    f"{_AGAIN}."
                )

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], f"the value of {key!r}")
        if kind != _ARRAY:
            raise ValueError(
                f"{self.path}: {key!r} has a value of type {kind}, but types are 0 to 12; {_AGAIN}."
            )
        kind = self._number("<I", f"the type of {key!r}")
        if kind == _STRING:
            count = self._count("<Q", f"the length of {key!r}", 8)
            return [self._string(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(
                f"{self.path}: {key!r} is an array of type {kind}, but arrays hold numbers, truth "
                f"values or strings; {_AGAIN}."
            )
        dtype = np.dtype("?" if kind == 7 else _SCALARS[kind])
        count = self._count("<Q", f"the length of {key!r}", dtype.itemsize)
        values = np.frombuffer(self.data, dtype, count, self.at).tolist()
        self.at += count * dtype.itemsize
        return values

    def _number(self, code: str, what: str) -> Any:
        end = self.at + struct.calcsize(code)
        if end > len(self.data):
            raise ValueError(
                f"{self.path}: {what} lies beyond the end of the file, {len(self.data)} bytes; "
                f"{_AGAIN}."
            )
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at = end
        return value

    def _count(self, code: str, what: str, least: int) -> int:
        """A number of things that take at least so many bytes each, all before the file's end."""
        count = self._number(code, what)
        if count * least > len(self.data) - self.at:
            raise ValueError(
                f"{self.path}: {what} is {count}, which the remaining {len(self.data) - self.at} "
                f"bytes of the file do not hold; {_AGAIN}."
            )
        return count

    def _string(self, what: str) -> str:
        length = self._count("<Q", f"the length of {what}", 1)
        data = self.data[self.at : self.at + length]
        self.at += length
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {what} is no UTF-8 ({error}); {_AGAIN}.") from None


# --- what the metadata says of a decoder ----------------------------------------------------------

_KINDS: dict[str, tuple[type, ...]] = {
    "an integer": (int,),
    "a number": (int, float),
    "a string": (str,),
    "true or false": (bool,),
    "a list": (list,),
}


class Metadata:
    """Metadata with the kind of each value checked, and keys prefixed by an architecture."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = ""):
        self.path, self.values, self.prefix = path, values, prefix

    def get(self, key: str, kind: str, default: Any = None) -> Any:
        """The value of a key, of one of `_KINDS`, or the default.

        **Raises:** `ValueError` for a value of another kind.
        """
        value = self.values.get(self.prefix + key)
        if value is None:
            return default
        truth = isinstance(value, bool) and kind != "true or false"
        if truth or not isinstance(value, _KINDS[kind]):
            raise ValueError(
                f"{self.path}: {self.prefix + key!r} is {_short(value)}, but it is {kind}; "
                "convert the model again, or fetch the file again."
            )
        return value

    def need(self, key: str, kind: str) -> Any:
        """The value of a key that every model has."""
        value = self.get(key, kind)
        if value is None:
            raise ValueError(
                f"{self.path}: the metadata lacks {self.prefix + key!r}, {kind}; convert the model "
                "again with a recent llama.cpp."
            )
        return value

    def same(self, key: str, default: int | None = None) -> int:
        """An integer, which some files repeat for each layer.

        **Raises:** `ValueError` where layers differ.
        """
        value = self.values.get(self.prefix + key, default)
        if isinstance(value, list) and value and all(x == value[0] for x in value):
            value = value[0]
        if isinstance(value, list):
            raise ValueError(
                f"{self.path}: {self.prefix + key!r} is {_short(value)}, but the layers of the "
                "decoder here are alike; use a model whose layers are."
            )
        if value is None or type(value) is not int:
            return self.need(key, "an integer")
        return value


def config_of(file: File) -> Config:
    """The configuration of the decoder in a file, from its metadata and its embedding's shape.

    The rotation of `llama` files pairs neighbours, since llama.cpp's converter permutes the rows of
    their queries and keys; that of the others pairs halves. Norm scales of `gemma3` files include
    the 1 that the model adds to them.

    **Raises:** `ValueError` for an architecture, or a feature of one, that the decoder has not, and
    for values of the wrong kind or size, with their keys.
    """
    general = Metadata(file.path, file.metadata)
    architecture = general.need("general.architecture", "a string")
    if architecture not in TENSORS:
        raise ValueError(
            f"{file.path}: general.architecture is {architecture!r}, but the decoder here knows "
            f"{', '.join(TENSORS)}; use a model of one of those."
        )
    if general.get("split.count", "an integer", 1) > 1:
        raise ValueError(
            f"{file.path}: the model is split into {file.metadata['split.count']} files, but one "
            "is read; join them with llama.cpp's llama-gguf-split --merge."
        )
    known = Metadata(file.path, file.metadata, f"{architecture}.")
    if experts := known.get("expert_count", "an integer", 0):
        raise ValueError(
            f"{file.path}: '{architecture}.expert_count' is {experts}, but the decoder here has no "
            "experts; use a dense model."
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(
            f"{file.path}: there is no matrix 'token_embd.weight', the embedding; {_AGAIN}."
        )
    width = known.need("embedding_length", "an integer")
    heads = known.same("attention.head_count")
    head_size = known.get("attention.key_length", "an integer", width // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if known.get(key, "an integer", head_size) != head_size:
            raise ValueError(
                f"{file.path}: '{architecture}.{key}' is {known.need(key, 'an integer')} and heads "
                f"have {head_size} elements, but the decoder here rotates whole heads of one size; "
                "use another model."
            )
    fields: dict[str, Any] = {
        "architecture": architecture,
        "layers": known.need("block_count", "an integer"),
        "width": width,
        "heads": heads,
        "kv_heads": known.same("attention.head_count_kv", heads),
        "head_size": head_size,
        "hidden": known.same("feed_forward_length"),
        "vocabulary": embedding.shape[0],
        "context": known.need("context_length", "an integer"),
        "norm_epsilon": known.need("attention.layer_norm_rms_epsilon", "a number"),
        "rope_base": known.get("rope.freq_base", "a number", 10000.0),
        "rope_pairs": "neighbours" if architecture == "llama" else "halves",
        "rope_scaling": _scaling(file, known),
        "window": known.get("attention.sliding_window", "an integer") or None,
        "qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tied_head": "output.weight" not in file.tensors,
        "attention_scale": known.get("attention.scale", "a number"),
        "logit_softcap": known.get("final_logit_softcapping", "a number") or None,
        "bos": general.get("tokenizer.ggml.bos_token_id", "an integer"),
    }
    if architecture == "gemma3":
        fields |= _gemma3(known, fields)
    eos = general.get("tokenizer.ggml.eos_token_id", "an integer")
    try:
        return Config(**fields, eos=() if eos is None else (eos,))
    except ValueError as error:
        raise ValueError(
            f"{file.path}: the metadata gives a wrong configuration: {error}"
        ) from None


def _gemma3(known: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp sets for the architecture itself (`src/models/gemma3.cpp`)."""
    # The largest model, of 62 layers, divides scores by the width of a head's share of the model.
    scale = (fields["width"] / fields["heads"]) ** -0.5 if fields["layers"] == 62 else None
    pattern = known.get("attention.sliding_window_pattern", "an integer", 6)
    return {
        "activation": "gelu_tanh",
        "norm_placement": "pre_and_post",
        "embedding_scale": float(fields["width"]) ** 0.5,
        "attention_scale": fields["attention_scale"] or scale,
        "local_rope_base": known.get("rope.freq_base_swa", "a number", 10000.0),
        "window_pattern": pattern if fields["window"] else 0,
    }


def _scaling(file: File, known: Metadata) -> RopeScaling | None:
    kind = known.get("rope.scaling.type", "a string", "none")
    factor = float(known.get("rope.scaling.factor", "a number", 1.0))
    factors = file.tensors.get("rope_freqs.weight")
    try:
        if factors is not None and factors.kind == "F32":
            found = file.rows(factors).ravel().tolist()
            return RopeScaling("factors", factors=tuple(found))
        if kind == "none" or factor == 1:
            return None
        if kind == "linear":
            return RopeScaling("linear", factor)
        if kind == "yarn":
            own = known.get("rope.scaling.attn_factor", "a number", 1.0)
            yarn = RopeScaling(
                "yarn",
                factor,
                known.need("rope.scaling.original_context_length", "an integer"),
                beta_fast=known.get("rope.scaling.yarn_beta_fast", "a number", 32.0),
                beta_slow=known.get("rope.scaling.yarn_beta_slow", "a number", 1.0),
            )
            return RopeScaling(**vars(yarn) | {"attention_factor": own * yarn.amplitude})
    except ValueError as error:
        raise ValueError(f"{file.path}: the scaling of the rotation is wrong: {error}") from None
    raise ValueError(
        f"{file.path}: '{known.prefix}rope.scaling.type' is {kind!r}, but the decoder here scales "
        "by linear, yarn or the tensor rope_freqs; use another model."
    )


_DECODER = {
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
    "attn_norm.weight": "attention_norm",
    "ffn_norm.weight": "mlp_norm",
}
_BIASES = {"attn_q.bias": "q_bias", "attn_k.bias": "k_bias", "attn_v.bias": "v_bias"}
_HEAD_NORMS = {"attn_q_norm.weight": "q_norm", "attn_k_norm.weight": "k_norm"}
_POST_NORMS = {
    "post_attention_norm.weight": "post_attention_norm",
    "post_ffw_norm.weight": "post_mlp_norm",
}
TENSORS = {
    "llama": _DECODER | _BIASES,
    "qwen2": _DECODER | _BIASES,
    "qwen3": _DECODER | _HEAD_NORMS,
    "gemma3": _DECODER | _HEAD_NORMS | _POST_NORMS,
}
"""Names of a layer's tensors (llama.cpp's `llama-arch.cpp`) and ours, by architecture."""
_OUTSIDE = {
    "token_embd.weight": "embedding",
    "output_norm.weight": "final_norm",
    "output.weight": "head",
}
_IGNORED = ("rope_freqs.weight",)  # read by `config_of`


def weights_of(file: File, config: Config) -> dict[str, Tensor]:
    """The tensor of each weight that a configuration needs, checked.

    **Raises:** `ValueError` for tensors that are missing, unknown, of another shape, or of a type
    that no format holds, with the name of the first of them.
    """
    layer = TENSORS[config.architecture]
    found: dict[str, Tensor] = {}
    for name, tensor in file.tensors.items():
        prefix, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = tensor
        elif prefix == "blk" and number.isdecimal() and part in layer:
            found[f"layers.{int(number)}.{layer[part]}"] = tensor
        elif name not in _IGNORED and not _is_factor(file, name):
            raise ValueError(
                f"{file.path}: tensor {name!r} is no part of {config.architecture} as the decoder "
                "here knows it, and leaving it out would change the model; use another model."
            )
    expected = config.shapes()
    if missing := [name for name in expected if name not in found]:
        raise ValueError(
            f"{file.path}: {len(missing)} weights of {len(expected)} are missing, the first is "
            f"{missing[0]!r}; {_AGAIN}."
        )
    if extra := [name for name in found if name not in expected]:
        raise ValueError(
            f"{file.path}: tensor {found[extra[0]].name!r} is beyond what the metadata says, "
            f"{config.layers} layers; {_AGAIN}."
        )
    for name, shape in expected.items():
        _check(file, found[name], shape)
    return {name: found[name] for name in expected}


def tensor_scale(file: File, tensor: Tensor) -> float:
    """The factor of all weights of a matrix, which a tensor beside it may hold; else 1.

    **Raises:** `ValueError` for one that is no single finite float.
    """
    factor = file.tensors.get(f"{tensor.name.removesuffix('.weight')}.scale")
    if factor is None:
        return 1.0
    values = file.rows(factor) if factor.kind == "F32" else np.zeros(0)
    if values.size != 1 or not np.isfinite(values).all():
        raise ValueError(
            f"{file.path}: tensor {factor.name!r} is {factor.kind} of shape {factor.shape}, but "
            f"the scale of a tensor is one finite F32; {_AGAIN}."
        )
    return float(values.item())


def _is_factor(file: File, name: str) -> bool:
    """Whether a tensor is a factor of an NVFP4 matrix beside it, or one of its inputs, which are
    not quantized here."""
    stem, _, last = name.rpartition(".")
    matrix = file.tensors.get(f"{stem}.weight")
    return last in ("scale", "input_scale") and matrix is not None and matrix.kind == "NVFP4"


def _check(file: File, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape[::-1]:
        raise ValueError(
            f"{file.path}: tensor {tensor.name!r} has the shape {tensor.shape}, but the metadata "
            f"asks for {shape[::-1]}; {_AGAIN}."
        )
    if tensor.kind in FLOATS or (len(shape) == 2 and tensor.kind in blocks.TYPES):
        return
    if len(shape) == 1:
        raise ValueError(
            f"{file.path}: tensor {tensor.name!r} is {tensor.kind}, but norms and biases are "
            f"{', '.join(FLOATS)}; convert the model again."
        )
    raise ValueError(
        f"{file.path}: tensor {tensor.name!r} is {tensor.kind}, whose values no format here holds. "
        "Quantize the model to one of "
        f"{', '.join([*blocks.TYPES, *FLOATS])}, such as by llama.cpp's llama-quantize."
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
