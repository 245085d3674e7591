"""The commands for language models: `jaxlowbit chat`, `generate`, `perplexity` and `bench`."""

import argparse
import functools
import inspect
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from .._core import activations
from .._core.dtypes import FLOATS
from .._core.format import INT4, Format, parse_format
from .._requirements import require_extra
from ..checkpoint._replace import check_target
from ..quantizers import Calibration
from ..quantizers._registry import NAMES as QUANTIZERS
from ..quantizers._registry import check
from . import console
from .bench import SHAPES, bench, check_sizes
from .chat import Conversation, Encode, chat, message
from .evaluate import HEAD, evaluate, reads_statistics
from .generate import Generation, Request, generate, stream
from .language_model import LanguageModel, init, load, open_file
from .load import Header
from .perplexity import perplexity, windowed

_BENCH_HEAD = (
    "batch  prompt  new  prefill tokens/s  decode tokens/s  ms/step  positions  "
    "weights MB  cache MB"
)
_DRAWING = (
    ("--top-k", int, "K", "draw from the K most likely tokens"),
    ("--top-p", float, "P", "draw from the most likely tokens with a total probability of P"),
    ("--min-p", float, "P", "draw from tokens with at least P times the top probability"),
    (
        "--repetition-penalty",
        float,
        "X",
        "divide positive logits, and multiply negative ones, of tokens that occurred",
    ),
    ("--presence-penalty", float, "X", "subtract X from the logits of tokens in the reply"),
    ("--frequency-penalty", float, "X", "subtract X for each occurrence of a token in the reply"),
)
_SIZES = {
    name: inspect.signature(bench).parameters[name].default
    for name in ("prompt_tokens", "new_tokens", "repeats")
}
"""Arguments of `bench`, and their defaults."""
_SIZE_WORDS = {
    "prompt_tokens": "tokens of the prompt",
    "new_tokens": "tokens to generate",
    "repeats": "repetitions; the fastest counts",
}
Run = Callable[[argparse.Namespace], None]


def add_chat(parser: argparse.ArgumentParser) -> Run:
    _add_model(parser)
    _add_adapter(parser)
    session = "store the conversation and its cache in FILE, and continue it if FILE exists"
    parser.add_argument("--session", metavar="FILE", help=session)
    _add_drawing(parser, temperature=0.7, min_p=0.05, seed="seed of the draws; each turn adds 1")
    return as_command(_chat)


def add_generate(parser: argparse.ArgumentParser) -> Run:
    _add_model(parser)
    prompt = "the text to answer, or - for standard input"
    parser.add_argument("--prompt", required=True, metavar="TEXT", help=prompt)
    _add_adapter(parser)
    _add_drawing(parser, temperature=0.0, min_p=None, seed="seed of the draws")
    samples = "number of replies; several are printed at the end"
    parser.add_argument("--n", type=int, default=1, metavar="N", help=samples)
    logprobs = "print the log-probability of each token and of the N most likely tokens"
    parser.add_argument("--logprobs", type=int, metavar="N", help=logprobs)
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt without chat template"
    )
    schema = "a JSON schema that the reply follows"
    parser.add_argument("--schema", metavar="FILE", help=schema)
    _add_json(parser)
    return as_command(_generate)


def add_perplexity(parser: argparse.ArgumentParser) -> Run:
    _add_model(parser)
    _add_adapter(parser)
    text = "a text file in UTF-8, or - for standard input"
    parser.add_argument("--text", required=True, metavar="FILE", help=text)
    window = "tokens of a window (512, or the context of a model with a shorter one)"
    parser.add_argument("--context", type=int, metavar="N", help=window)
    _add_json(parser)
    return as_command(_perplexity)


def add_evaluate(parser: argparse.ArgumentParser) -> Run:
    _add_model(parser)
    also = "formats to compare, such as int3-g64 or plan.json"
    parser.add_argument("--formats", nargs="+", default=[], metavar="FORMAT", help=also)
    also = "quantizers to compare, each for every format"
    parser.add_argument("--quantizers", nargs="+", default=[], metavar="NAME", help=also)
    keep = "leave matrices whose names match as stored, such as embedding; may be repeated"
    parser.add_argument("--keep", action="append", default=[], metavar="PATTERN", help=keep)
    text = "a text file in UTF-8, or - for standard input"
    parser.add_argument("--text", required=True, metavar="FILE", help=text)
    sizes = {
        "context": "tokens of a window (512, or the context of a model with a shorter one)",
        "stride": "tokens between the starts of windows (the tokens of a window)",
        "tokens": "maximum number of tokens of the text (all)",
    }
    sizes["limit"] = "maximum number of questions of each task (all)"
    for name, summary in sizes.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=summary)
    tasks = "tasks of lm-eval, such as arc_easy"
    parser.add_argument("--tasks", nargs="+", default=[], metavar="NAME", help=tasks)
    folder = "more tasks, YAML files of lm-eval"
    parser.add_argument("--task-folder", metavar="FOLDER", help=folder)
    _add_json(parser)
    return as_command(_evaluate)


def add_bench(parser: argparse.ArgumentParser) -> Run:
    _add_model(
        parser,
        "; or a name, for random weights in the format, or in floats with --format float: "
        + ", ".join(SHAPES),
    )
    batch = "number of sequences; several numbers are measured one after the other (1)"
    parser.add_argument("--batch", type=int, nargs="+", default=[1], metavar="B", help=batch)
    for name, default in _SIZES.items():
        flag = f"--{name.replace('_', '-')}"
        summary = f"{_SIZE_WORDS[name]} (%(default)s)"
        parser.add_argument(flag, type=int, default=default, metavar="N", help=summary)
    _add_json(parser)
    return as_command(_bench)


def _add_model(parser: argparse.ArgumentParser, also: str = "") -> None:
    parser.add_argument("model", metavar="MODEL", help=console.MODEL + also)
    formats = (
        "round all matrices to a format, such as int4-g128, or as in a JSON file from jaxlowbit "
        "plan; without it, weights stay as stored"
    )
    parser.add_argument("--format", help=formats)
    add_rounding(parser)
    parser.add_argument("--dtype", choices=list(map(str, FLOATS)), help="dtype of activations")
    inputs = "round the inputs of quantized products in blocks to 8 bits"
    dtypes = [str(dtype) for dtype in activations.VALUES]
    parser.add_argument("--lhs-qtype", choices=dtypes, help=inputs)
    fewer = "minimum number of tokens in a call for --lhs-qtype to apply"
    parser.add_argument("--lhs-min-rows", type=int, metavar="N", help=fewer)
    cached = "dtype of cached keys and values, with a scale per token and head (as --dtype)"
    parser.add_argument("--cache-dtype", choices=dtypes, help=cached)
    devices = "number of devices to divide the model over (%(default)s)"
    parser.add_argument("--devices", type=int, default=1, metavar="N", help=devices)


def _add_adapter(parser: argparse.ArgumentParser) -> None:
    folder = "a folder with a LoRA adapter in PEFT's format"
    parser.add_argument("--adapter", metavar="DIR", help=folder)


def add_rounding(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `calibration_of`, and `--quantizer`."""
    rounds = f"method of rounding: {', '.join(QUANTIZERS)}, or two such as awq+gptq (absmax)"
    parser.add_argument("--quantizer", "--method", metavar="NAME", help=rounds)
    calibration = "a text file with inputs for gptq, awq, smoothquant and distill"
    parser.add_argument("--calibration", metavar="FILE", help=calibration)
    samples = "number of windows of 512 tokens of that text (%(default)s)"
    parser.add_argument("--samples", type=int, default=128, metavar="N", help=samples)


def _add_drawing(
    parser: argparse.ArgumentParser, temperature: float, min_p: float | None, seed: str
) -> None:
    longest = "maximum number of tokens of a reply (%(default)s)"
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help=longest)
    likely = "randomness; 0 takes the most likely token (%(default)s)"
    parser.add_argument("--temperature", type=float, default=temperature, metavar="T", help=likely)
    for option, kind, metavar, summary in _DRAWING:
        if option == "--min-p" and min_p is not None:
            summary += f" ({min_p})"
        parser.add_argument(option, type=kind, metavar=metavar, help=summary)
    parser.set_defaults(min_p=min_p)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=seed)
    stop = "a text that ends a reply; may be repeated"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    variable = (
        "a variable of the chat template with a value in JSON, such as enable_thinking=false; may "
        "be repeated"
    )
    parser.add_argument(
        "--template-option", action="append", default=[], metavar="NAME=VALUE", help=variable
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print results as a last line of JSON")


def as_command(command: Run) -> Run:
    """Wraps a command: prepares the process, and rewrites errors for the command line."""

    def run(options: argparse.Namespace) -> None:
        keep_programs()
        for file in (sys.stdout, sys.stderr):
            if isinstance(file, io.TextIOWrapper):
                file.reconfigure(errors="replace")  # of characters that the terminal lacks
        try:
            command(options)
        except jax.errors.JaxRuntimeError as error:  # such as memory that is exhausted
            raise ValueError(str(error).partition("\n")[0]) from error
        except ValueError as error:
            raise ValueError(_with_options(str(error), options)) from error

    return run


def keep_programs() -> None:
    """Keeps compiled programs for the next start, unless JAX already has a folder for them."""
    if jax.config.jax_compilation_cache_dir is None:
        folder = Path("~/.cache/jaxlowbit/compiled").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _with_options(message: str, options: argparse.Namespace) -> str:
    """A message about a Python argument, such as top_k, as one about the option of that name."""
    found = re.match(r"(?:\w+: )?(\w+) is ", message)
    if found is None or found[1] not in vars(options):
        return message
    return f"--{found[1].replace('_', '-')}{message[found.end(1) :]}"


def _loaded(options: argparse.Namespace, path: Any) -> LanguageModel:
    """The model of a file, or of its header."""
    progress = sys.stderr.isatty()
    rounding = {**formats_of(options.format), "quantizer": options.quantizer}
    rounding["calibration"] = calibration_of(options, progress)
    rounding["adapter"] = getattr(options, "adapter", None)
    return load(path, **rounding, progress=progress, **_decoding(options))


def calibration_of(options: argparse.Namespace, progress: bool) -> Calibration | None:
    """The inputs for quantizers that read statistics, if the command line names any."""
    if options.calibration is None:
        return None
    text = console.text_of("--calibration", options.calibration)
    return Calibration(text, samples=options.samples, progress=progress)


def formats_of(name: str | None, first: Sequence[tuple[str, Any]] = ()) -> dict[str, Any]:
    """The arguments `format` and `rules` of `load`, for a name of a format or of a file of rules.

    `first`: rules that come first.

    **Raises:** `ValueError` for an unknown name, and for a file that is no JSON object of strings.
    """
    if name is None or not name.endswith(".json"):
        format = None if name is None else parse_format(name)
        return {"format": format, "rules": list(first) or None}
    text = console.text_of("--format", name)
    try:
        rules = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"--format {name}: {error}; write a JSON object.") from None
    if not isinstance(rules, dict) or not all(isinstance(x, str) for x in rules.values()):
        raise ValueError(
            f"--format {name} is no JSON object with names of formats by regular expressions, such "
            'as {"down$": "int4-g128"}.'
        )
    return {"format": None, "rules": [*first, *rules.items()]}


def _decoding(options: argparse.Namespace) -> dict[str, Any]:
    if options.lhs_min_rows is not None and options.lhs_qtype is None:
        raise ValueError(
            f"--lhs-min-rows {options.lhs_min_rows} changes nothing without --lhs-qtype; set both."
        )
    return {
        "dtype": options.dtype,
        "lhs_qtype": options.lhs_qtype,
        "lhs_min_rows": options.lhs_min_rows,
        "cache_dtype": options.cache_dtype,
        "mesh": _mesh(options.devices),
    }


def _mesh(devices: int) -> jax.sharding.Mesh | None:
    """The first devices, or None for one."""
    try:
        found = jax.devices()
    except (AssertionError, RuntimeError) as error:  # of JAX, by its version
        raise ValueError(
            f"JAX cannot start a backend ({str(error) or 'without a reason'}); check JAX_PLATFORMS "
            "and the packages of jax."
        ) from error
    if not 1 <= devices <= len(found):
        raise ValueError(
            f"--devices {devices}, but JAX sees {len(found)} here; name 1 to {len(found)}."
        )
    if devices == 1:
        return None
    return jax.make_mesh((devices,), ("model",), devices=found[:devices])


def _chat(options: argparse.Namespace) -> None:
    path = None if options.session is None else Path(options.session)
    if path is not None:
        check_target("chat", path, overwrite=True)
    header = open_file(options.model)
    drawing = _drawing(options)
    Request.of("chat", header, logprobs=None, template_options=None, **drawing)
    encode, context = _template(options, header), header.config.context
    conversation = Conversation(encode, context, options.system, options.max_new_tokens)
    conversation.ask("hello")  # raises if the template takes no system message
    conversation.answer(None)
    model = _loaded(options, header)
    chat(model, conversation, drawing, _summary(options, model), path)


def _generate(options: argparse.Namespace) -> None:
    text = options.prompt
    if text == "-":
        text = console.text_of("--prompt", text).removesuffix("\n")
    console.check_unicode("--prompt", text)
    if not text:
        raise ValueError("--prompt is empty; there must be a text to answer.")
    if options.raw and (options.system or options.template_option):
        raise ValueError(
            "--system and --template-option are for the chat template, but --raw leaves it out; "
            "drop one of them."
        )
    header = open_file(options.model)
    drawing = _drawing(options) | {"logprobs": options.logprobs, "schema": _schema(options.schema)}
    request = Request.of("generate", header, n=options.n, template_options=None, **drawing)
    prompt: Any = text
    if not options.raw:
        system = [message("system", options.system)] if options.system else []
        prompt = _template(options, header)([*system, message("user", text)])
    (tokens,) = request.encoded([prompt])
    model = _loaded(options, header)
    if options.n == 1:
        results = [console.show(stream(model, tokens, **drawing), [])]
    else:
        results = generate(model, tokens, n=options.n, **drawing)
    summary = _summary(options, model)
    for i, result in enumerate(results, 1):
        if options.n > 1:
            print(result.text, flush=True)
        number = f"{i} of {options.n}: " if options.n > 1 else ""
        console.say(number + summary(result))
        if options.logprobs is not None:
            print("\n".join(console.logprobs(model.tokenizer, result)), flush=True)
    if options.json:
        found = [_as_json(result) for result in results]
        console.print_json(found if options.n > 1 else found[0])


def _schema(path: str | None) -> Any:
    """The JSON schema in a file.

    **Raises:** `ValueError` for a file that is no object in JSON.
    """
    if path is None:
        return None
    try:
        found = json.loads(console.text_of("--schema", path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"--schema {path} is no JSON: {error}; correct it.") from None
    if not isinstance(found, dict):
        raise ValueError(f"--schema {path} is no object in JSON, but a JSON schema is one.")
    return found


def _as_json(result: Generation) -> dict[str, Any]:
    fields = ("text", "tokens", "prompt_tokens", "tokens_per_second", "finish")
    found = {name: getattr(result, name) for name in fields}
    return found if result.logprobs is None else found | {"logprobs": result.logprobs._asdict()}


def _template(options: argparse.Namespace, header: Header) -> Encode:
    """Turns messages to tokens by the chat template of a model.

    **Raises:** `ValueError` without a tokenizer or a template.
    """
    if header.tokenizer is None:
        raise ValueError(
            f"{options.model} has no tokenizer; add tokenizer.json to the folder, or run the model "
            "with tokens in Python."
        )
    if not header.tokenizer.has_chat:
        raise ValueError(
            f"{options.model} has no chat template, because it continues texts; use the command "
            "generate with --raw."
        )
    console.check_unicode("--system", options.system or "")
    variables = dict(map(_variable, options.template_option))
    return functools.partial(header.tokenizer.chat, template_options=variables)


def _variable(option: str) -> tuple[str, Any]:
    name, equals, value = option.partition("=")
    try:
        if name and equals:
            return name, json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        pass
    raise ValueError(
        f"--template-option {option} is not NAME=VALUE with a value in JSON, such as "
        "enable_thinking=false or date='\"26 July\"'."
    )


def _drawing(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `stream` that both commands have."""
    names = [option.removeprefix("--").replace("-", "_") for option, *_ in _DRAWING]
    names += ["max_new_tokens", "temperature", "seed", "stop"]
    return {name: getattr(options, name) for name in names}


def _summary(options: argparse.Namespace, model: LanguageModel) -> Callable[[Generation], str]:
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model.decoder)))
    return lambda result: console.statistics(result, options.max_new_tokens, nbytes)


def _perplexity(options: argparse.Namespace) -> None:
    text = console.text_of("--text", options.text)
    header = open_file(options.model)
    windowed(header, text, options.context)
    model = _loaded(options, header)
    found = perplexity(model, text, context=options.context, progress=sys.stderr.isatty())
    size = f"{found.tokens} tokens, context {found.context}"
    print(f"perplexity {found.perplexity:.4f} (loss {found.loss:.4f}) of {size}")
    if options.json:
        console.print_json(found._asdict())


def _evaluate(options: argparse.Namespace) -> None:
    text = console.text_of("--text", options.text)
    if options.tasks:
        require_extra("llm-eval", "lm_eval")
    header = open_file(options.model)
    windowed(header, text, options.context)
    names = [*([options.format] if options.format else []), *options.formats]
    keep = [(pattern, None) for pattern in options.keep]
    formats = {name: formats_of(name, keep) for name in names}
    quantizers = [*([options.quantizer] if options.quantizer else []), *options.quantizers]
    for quantizer in quantizers:
        check("evaluate", quantizer)
        if reads_statistics(quantizer) and quantizer != "mse" and options.calibration is None:
            raise ValueError(f"--quantizer {quantizer} needs inputs; pass --calibration FILE too.")
    progress = sys.stderr.isatty()
    found = []
    print(HEAD, flush=True)
    sizes = ("context", "stride", "tokens", "tasks", "task_folder", "limit")
    for result in evaluate(
        header,
        text,
        formats=formats,
        quantizers=quantizers or [None],
        calibration=calibration_of(options, progress),
        progress=progress,
        **{name: getattr(options, name) for name in sizes},
        **_decoding(options),
    ):
        print(result.line, flush=True)
        scores = [score._asdict() for score in result.scores]
        found.append(result._asdict() | {"scores": scores})
    if options.json:
        console.print_json(found)


def _random_format(name: str | None) -> Format:
    return INT4 if name is None else parse_format(name)


def _bench(options: argparse.Namespace) -> None:
    sizes = {name: getattr(options, name) for name in _SIZES}
    named = options.model in SHAPES and not Path(options.model).exists()
    try:
        header = None if named else open_file(options.model)
    except FileNotFoundError as error:
        raise ValueError(f"{error} Known models are {', '.join(SHAPES)}.") from None
    config = SHAPES[options.model] if header is None else header.config
    for batch in options.batch:
        check_sizes(config, batch, **sizes)
    if header is None:
        for name in ("quantizer", "calibration"):
            if (value := getattr(options, name)) is not None:
                raise ValueError(
                    f"--{name} {value}, but the weights of {options.model} are random, not "
                    "rounded; leave it out, or name a file."
                )
        format = None if options.format == "float" else _random_format(options.format)
        model = init(config, format, **_decoding(options))
    else:
        model = _loaded(options, header)
    rows = []
    for batch in options.batch:
        found = bench(model, batch=batch, **sizes)
        if not rows:
            print(_BENCH_HEAD)
        print(
            f"{found.batch:5}  {found.prompt_tokens:6}  {found.new_tokens:3}  {found.prefill:16.1f}"
            f"  {found.decode:15.1f}  {found.milliseconds_per_step:7.2f}  {found.positions:9}"
            f"  {found.weight_bytes / 1e6:10.1f}  {found.cache_bytes / 1e6:8.1f}",
            flush=True,
        )
        rows.append(found._asdict())
    if options.json:
        console.print_json(rows)
