"""The command `python -m jaxlowbit.llm`."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from .._command import run_command
from .._core import activations
from .._core.format import INT4, parse_format
from .bench import SHAPES, bench
from .generate import Generation, stream
from .language_model import LanguageModel, init, load
from .perplexity import perplexity

_SUMMARY = "Runs a language model with low-bit weights: a GGUF file or a folder of safetensors."


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `python -m jaxlowbit.llm`."""
    run_command(_parser(), lambda options: options.run(options, _loaded(options)), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m jaxlowbit.llm", description=_SUMMARY)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Any, name: str, summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary)
        added.add_argument("model", metavar="MODEL", help="a GGUF file, or a folder of safetensors")
        added.add_argument("--format", help="such as int4-g128, to quantize float weights by")
        added.add_argument("--dtype", help="of the activations: float32, bfloat16 or float16")
        inputs = "to which blocks round the inputs of products with quantized weights"
        dtypes = [str(dtype) for dtype in activations.VALUES]
        added.add_argument("--activation-dtype", choices=dtypes, help=inputs)
        fewer = "tokens at a time from which they do; fewer are floats"
        added.add_argument("--activation-rows", type=int, metavar="N", help=fewer)
        devices = "how many devices to divide the model over"
        added.add_argument("--devices", type=int, default=1, metavar="N", help=devices)
        added.set_defaults(run=run)
        return added

    for name, run, summary in (
        ("chat", _chat, "Talks with the model, until an empty line."),
        ("generate", _generate, "Answers one prompt."),
    ):
        added = command(run, name, summary)
        added.add_argument("--max-new-tokens", type=int, default=512, metavar="N")
        temperature = 0.7 if name == "chat" else 0.0
        added.add_argument("--temperature", type=float, default=temperature, metavar="T")
        added.add_argument("--top-k", type=int, metavar="K")
        added.add_argument("--top-p", type=float, metavar="P")
        added.add_argument("--seed", type=int, default=0)
        added.add_argument("--stop", action="append", default=[], metavar="TEXT")
        added.add_argument("--system", metavar="TEXT", help="the message that a chat begins with")
    added.add_argument("--prompt", required=True, metavar="TEXT")
    added.add_argument("--raw", action="store_true", help="without the chat template")
    added.add_argument("--json", action="store_true", help="print results as a last line of JSON")

    added = command(_perplexity, "perplexity", "Measures how well the model predicts a text.")
    added.add_argument("--text", required=True, type=Path, metavar="FILE")
    added.add_argument("--context", type=int, default=512, metavar="N")
    added.add_argument("--json", action="store_true", help="print results as a last line of JSON")

    summary = "Measures tokens per second; MODEL may be a name, for random weights in the format, "
    summary += "or in floats with --format float: "
    added = command(_bench, "bench", summary + ", ".join(SHAPES))
    added.add_argument("--batch", type=int, nargs="+", default=[1], metavar="B")
    added.add_argument("--prompt-tokens", type=int, default=512, metavar="N")
    added.add_argument("--new-tokens", type=int, default=64, metavar="N")
    added.add_argument("--repeats", type=int, default=3, metavar="N")
    added.add_argument("--json", action="store_true", help="print results as a last line of JSON")
    return parser


def _loaded(options: argparse.Namespace) -> LanguageModel:
    named = options.run is _bench and options.model in SHAPES and not Path(options.model).exists()
    floats = named and options.format == "float"
    format = None if options.format is None or floats else parse_format(options.format)
    how: dict[str, Any] = {"dtype": options.dtype, "activation_dtype": options.activation_dtype}
    how |= {"activation_rows": options.activation_rows, "mesh": _mesh(options.devices)}
    if named:
        return init(SHAPES[options.model], None if floats else format or INT4, **how)
    return load(options.model, format=format, **how)


def _mesh(devices: int) -> jax.sharding.Mesh | None:
    """The first devices, or None for one."""
    found = jax.devices()
    if not 1 <= devices <= len(found):
        raise ValueError(
            f"--devices {devices}, but JAX sees {len(found)} here; name 1 to {len(found)}."
        )
    if devices == 1:
        return None
    return jax.make_mesh((devices,), ("model",), devices=found[:devices])


def _chat(options: argparse.Namespace, model: LanguageModel) -> None:
    history = [{"role": "system", "content": options.system}] if options.system else []
    while True:
        try:
            line = input("> ")
        except EOFError:
            line = ""
        if not line.strip():
            return
        history.append({"role": "user", "content": line})
        result = _shown(options, model, history)
        history.append({"role": "assistant", "content": result.text or ""})


def _generate(options: argparse.Namespace, model: LanguageModel) -> None:
    prompt: Any = options.prompt
    if not options.raw:
        prompt = [{"role": "user", "content": prompt}]
        if options.system:
            prompt.insert(0, {"role": "system", "content": options.system})
    result = _shown(options, model, prompt)
    if options.json:
        fields = ("text", "tokens", "prompt_tokens", "tokens_per_second", "finish")
        print(json.dumps({name: getattr(result, name) for name in fields}))


def _shown(options: argparse.Namespace, model: LanguageModel, prompt: Any) -> Generation:
    """Prints the text as it comes, and its numbers on the standard error."""
    pieces = stream(
        model,
        prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=options.stop,
    )
    result = _printed(pieces)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model.decoder)))
    print(
        f"[{result.prompt_tokens} + {len(result.tokens)} tokens, "
        f"{result.tokens_per_second:.1f} tokens/s, weights {weights / 1e6:,.0f} MB{_peak()}]",
        file=sys.stderr,
    )
    return result


def _printed(pieces: Iterator[str]) -> Generation:
    while True:
        try:
            print(next(pieces), end="", flush=True)
        except StopIteration as end:
            print(flush=True)
            return end.value


def _peak() -> str:
    """The most memory that the device had in use, where it tells."""
    statistics = jax.devices()[0].memory_stats() or {}
    peak = statistics.get("peak_bytes_in_use")
    return "" if peak is None else f", device at most {peak / 1e6:,.0f} MB"


def _perplexity(options: argparse.Namespace, model: LanguageModel) -> None:
    text = options.text.read_text(encoding="utf-8")
    found = perplexity(model, text, context=options.context, progress=sys.stderr.isatty())
    print(f"perplexity {found.perplexity:.4f} of {found.tokens} tokens, context {found.context}")
    if options.json:
        print(json.dumps(found._asdict()))


def _bench(options: argparse.Namespace, model: LanguageModel) -> None:
    rows = []
    print("batch  prompt  new  prefill tokens/s  decode tokens/s  ms/step  weights MB  cache MB")
    for batch in options.batch:
        found = bench(
            model,
            batch=batch,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            repeats=options.repeats,
        )
        print(
            f"{found.batch:5}  {found.prompt_tokens:6}  {found.new_tokens:3}  {found.prefill:16.1f}"
            f"  {found.decode:15.1f}  {found.milliseconds_per_step:7.2f}"
            f"  {found.weight_bytes / 1e6:10.1f}  {found.cache_bytes / 1e6:8.1f}",
            flush=True,
        )
        rows.append(found._asdict())
    if options.json:
        print(json.dumps(rows))
