"""Times humming's products of experts, as `benchmarks/experts.py` asks line by line.

    python -m peers.humming_worker

The first line printed says why the package cannot be used, or null. Each input line is JSON: a
model, a format of 4 bits, and numbers of tokens of some of its products. The worker prints a line
of JSON for each product and number of tokens, and errors of single candidates to stderr.

Candidates are the grouped contiguous and the indexed form, each with the schedules that the package
picks for half, equal and twice the rows. Outputs are padded to multiples of 128 and of 256, as its
tiles need. All are compiled first, in parallel. Sorting and aligning rows is not in the times: the
grouped form gets rows in order, and the indexed form gets sorted indices, padded to its blocks. For
gate and up it gathers the rows of tokens itself. Every element of a candidate's result is checked
before it is timed.
"""

import faulthandler
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, NamedTuple

import experts
import numpy as np
import timing

import peers
from jaxlowbit import Format
from jaxlowbit._core.format import parse_format

from . import humming

FORMS = "grouped_contiguous", "indexed"
PARTS = 1, 1 / 2, 2  # multiples of the rows whose schedules are tried
PADDINGS = 128, 256  # columns
MOST_CALLS = 512
HANGS_AFTER = 60  # seconds; the worker then ends
UNIT = 2.0**-8  # of rounding to bfloat16

Kernels = dict[tuple[str, str, str], Any]  # by `Candidate.key`


class Product(NamedTuple):
    part: str
    k: int
    n: int
    gather: int  # choices of experts that read the same row of `x`


class Weight(NamedTuple):
    """Stacks of experts in the package's layout, for each padded n, and the first one's codes."""

    stacks: dict[int, list[dict[str, Any]]]
    words: Any  # (experts, n, k / 8)
    scale: Any  # (experts, n, groups), as bits if these are 8


class Candidate(NamedTuple):
    config: Any  # of the layer
    form: str
    schedule: str  # JSON

    @property
    def key(self) -> tuple[str, str, str]:
        return self.config.to_str(), self.form, self.schedule

    def __str__(self) -> str:
        return f"{self.form}, n {self.config.shape_n}, {self.schedule}"


class Work(NamedTuple):
    """The operands of a number of tokens. Routings are choices (rows,) of experts."""

    x: Any
    grouped: Any  # rows of `x` in the order of the first routing's experts
    exact: Any  # the product of `grouped`
    bound: Any
    routings: list[np.ndarray]
    copies: int


class Measured(NamedTuple):
    us: float
    calls: int
    error: float
    candidate: Candidate
    time: Callable[[int, timing.Effort], timing.Microseconds]  # of a number of calls


# --- operands -------------------------------------------------------------------------------------


def layer_configs(model: experts.Model, product: Product, format: Format) -> list[Any]:
    """A layer for each padded number of outputs, the smallest first."""
    torch, prepare = import_module("torch"), import_module("humming.transform").prepare_layer_config
    names = humming.weight_config(format)
    schema = import_module("humming.schema").HummingWeightSchema(
        # The package stores symmetric integers as signs and magnitudes.
        b_dtype=names["dtype"] if format.codebook else "float4e0m3",
        bs_dtype=names.get("scale_dtype"),
        weight_scale_group_size=format.group_size,
    )
    widths = {-(-product.n // padding) * padding: padding for padding in PADDINGS[::-1]}
    return [
        prepare(
            shape_n=product.n,
            shape_k=product.k,
            weight_schema=schema,
            num_experts=model.experts,
            pad_n_to_multiple=widths[width],
            torch_dtype=torch.bfloat16,
        )
        for width in sorted(widths)
    ]


def make_weight(configs: list[Any], format: Format, count: int) -> Weight:
    """`count` stacks for each layer; layers differ only in their padding."""
    torch = import_module("torch")
    transform = import_module("humming.transform").transform_humming_tensors
    stacks = {config.shape_n: [] for config in configs}
    first = None
    for seed in range(count):
        raw = random_stack(configs[-1], format, seed)
        first = first or raw
        for config in configs:
            words, scale = (array[:, : config.shape_n].contiguous() for array in raw)
            if format.scale:
                scale = scale.view(torch.float8_e8m0fnu)
            tensors = {"weight": words, "weight_scale": scale}
            stack = transform(config, tensors, already_padded=True)
            stack["locks"] = torch.zeros(2048, dtype=torch.int32, device="cuda")
            stacks[config.shape_n].append(stack)
    assert first is not None
    return Weight(stacks, *first)


def random_stack(config: Any, format: Format, seed: int) -> tuple[Any, Any]:
    """Random codes with columns of norm near 1."""
    torch = import_module("torch")
    lead, k = (config.num_experts, config.shape_n), config.shape_k
    options = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(seed)}
    words = torch.randint(-(2**31), 2**31, (*lead, k // 8), dtype=torch.int32, **options)
    unit = 1 / math.sqrt(k * np.mean(np.square(numbers(format))))
    shape = (*lead, k // format.group_size)
    if format.scale:
        exponents = torch.randint(-1, 2, shape, **options) + round(math.log2(unit))
        return words, (exponents + 127).to(torch.uint8)
    return words, (unit * (0.5 + torch.rand(shape, **options))).to(torch.bfloat16)


def numbers(format: Format) -> np.ndarray:
    """The number of each code."""
    if format.codebook:
        return np.array(format.values)
    return np.concatenate([np.arange(8.0), -np.arange(8.0)])


def dequantized(weight: Weight, expert: int, n: int, format: Format) -> Any:
    """The matrix (n, k) of an expert in float32, without padding."""
    torch = import_module("torch")
    words, scale = weight.words[expert, :n], weight.scale[expert, :n].float()
    if format.scale:
        scale = torch.exp2(scale - 127)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    codes = (words[..., None] >> shifts) & 15
    table = torch.tensor(numbers(format), dtype=torch.float32, device=words.device)
    return table[codes].reshape(n, -1) * scale.repeat_interleave(format.group_size, 1)


def make_work(
    model: experts.Model, product: Product, format: Format, weight: Weight, tokens: int
) -> Work:
    torch = import_module("torch")
    read = experts.active(model, tokens) * experts.matrix_bytes(product.k, product.n, format)
    made = len(next(iter(weight.stacks.values())))
    count = min(made, experts.copies(read))
    routings = [experts.choices(model, tokens, seed).ravel() for seed in range(max(count, 4))]
    rows = tokens * model.top // product.gather
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn((rows, product.k), device="cuda", generator=generator).to(torch.bfloat16)
    order = np.argsort(routings[0], kind="stable")
    grouped = x[torch.from_numpy(order // product.gather).cuda()].contiguous()
    exact = torch.zeros((len(grouped), product.n), device="cuda")
    bound = torch.zeros_like(exact)
    start = 0
    for expert, size in enumerate(np.bincount(routings[0], minlength=model.experts)):
        end = start + int(size)
        if size:
            left, right = grouped[start:end].float(), dequantized(weight, expert, product.n, format)
            torch.matmul(left, right.t(), out=exact[start:end])
            torch.matmul(left.abs(), right.abs_().t(), out=bound[start:end])
        start = end
    bound *= UNIT + product.k * 2.0**-24
    bound += UNIT * exact.abs()
    return Work(x, grouped, exact, bound, routings, count)


def routing(candidate: Candidate, chosen: np.ndarray) -> dict[str, Any]:
    """The arguments that assign rows to experts."""
    torch = import_module("torch")
    count = candidate.config.num_experts
    sizes = np.bincount(chosen, minlength=count)
    if candidate.form == "grouped_contiguous":
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return {"expert_layout": torch.from_numpy(offsets).cuda()}
    block = json.loads(candidate.schedule)["block_shape"][0]
    blocks = -(-sizes // block)
    padded = np.full(block * blocks.sum(), len(chosen))  # no row
    shift = block * np.cumsum(blocks) - block * blocks - (np.cumsum(sizes) - sizes)
    order = np.argsort(chosen, kind="stable")
    padded[np.arange(len(chosen)) + shift[chosen[order]]] = order
    arrays = {
        "sorted_ids": padded,
        "expert_ids": np.repeat(np.arange(count), blocks),
        "num_tokens_padded": np.array(len(padded)),
    }
    return {name: torch.from_numpy(array.astype(np.int32)).cuda() for name, array in arrays.items()}


# --- candidates -----------------------------------------------------------------------------------


def candidates(configs: list[Any], rows: int) -> list[Candidate]:
    """The schedules that the package picks for similar numbers of rows, in both forms."""
    pick = import_module("humming.tune").get_heuristics_config
    found = []
    for config in configs:
        for form in FORMS:
            for part in PARTS:
                try:
                    picked = pick(config, shape_m=math.ceil(part * rows), gemm_type=form)
                except Exception as error:
                    complain(f"no schedule for {form}, {part} of {rows} rows", error)
                    continue
                found.append(Candidate(config, form, json.dumps(picked, sort_keys=True)))
    return list({candidate.key: candidate for candidate in found}.values())


def compile_all(wanted: list[Candidate]) -> Kernels:
    """Kernels by key. Candidates that fail to compile are left out."""
    torch = import_module("torch")
    prepare = import_module("humming.kernel.humming").HummingKernel.prepare_kernels

    def compiled(candidate: Candidate) -> Any:
        config, form, schedule = candidate.key
        try:
            with torch.cuda.device(0):
                return prepare(config, json.dumps({"gemm_type": form}), schedule)
        except Exception as error:
            complain(str(candidate), error)
            return None

    unique = list({candidate.key: candidate for candidate in wanted}.values())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = list(pool.map(compiled, unique))
    pairs = zip(unique, kernels, strict=True)
    return {candidate.key: kernel for candidate, kernel in pairs if kernel is not None}


def measured(
    candidate: Candidate, kernel: Any, weight: Weight, work: Work, gather: int
) -> Measured:
    """Checks and times a candidate. **Raises:** `experts.WrongResultError`."""
    torch, launch = import_module("torch"), import_module("humming.ops").launch_kernel
    indexed = candidate.form == "indexed"
    x, top = (work.x, gather) if indexed else (work.grouped, 1)
    out = torch.full(work.exact.shape, math.nan, dtype=torch.bfloat16, device="cuda")

    def call(x: Any, operands: tuple[dict[str, Any], dict[str, Any]]) -> None:
        stack, routed = operands
        launch(configs=kernel, inputs=x, outputs=out, top_k=top, **stack, **routed)

    stacks = weight.stacks[candidate.config.shape_n][: work.copies]
    rotated = [
        (stacks[i % len(stacks)], routing(candidate, chosen))
        for i, chosen in enumerate(work.routings)
    ]
    call(x, rotated[0])
    order = np.argsort(work.routings[0], kind="stable")
    got = out[torch.from_numpy(order).cuda()] if indexed else out
    error = float(((got.float() - work.exact).abs_() / work.bound).max())
    if not error <= 1:
        raise experts.WrongResultError(f"wrong by {error:.3g} bounds")
    del got

    def time(calls: int, effort: timing.Effort) -> timing.Microseconds:
        return timing.graph_microseconds_per_call(call, x, rotated, calls, effort)

    calls = len(rotated)
    us = time(calls, timing.QUICK).median
    rounds = min(round(experts.PROGRAM_US / us), MOST_CALLS) // len(rotated)
    if rounds > 1:
        calls *= rounds
        us = time(calls, timing.QUICK).median
    return Measured(us, calls, error, candidate, time)


def best(
    tried: list[Candidate], kernels: Kernels, weight: Weight, work: Work, product: Product
) -> dict[str, Any]:
    """The fields of the fastest candidate, or an error."""
    torch = import_module("torch")
    fastest, found, reason = None, [], "no schedule compiles"
    for candidate in tried:
        if candidate.key not in kernels:
            continue
        faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
        try:
            kernel = kernels[candidate.key]
            new = measured(candidate, kernel, weight, work, product.gather)
            torch.cuda.synchronize()
        except Exception as error:
            reason = complain(f"{product.part}, {candidate}", error)
            if not works():
                break
            continue
        found.append([candidate.form, candidate.config.shape_n, new.us])
        if fastest is None or new.us < fastest.us:
            fastest = new
    faulthandler.cancel_dump_traceback_later()
    if fastest is None:
        return {"us": None, "error": reason}
    fields = {
        "us": fastest.us,
        "copies": work.copies,
        "calls": fastest.calls,
        "error_over_bound": fastest.error,
        "form": fastest.candidate.form,
        "padded_n": fastest.candidate.config.shape_n,
        "schedule": json.loads(fastest.candidate.schedule),
        "candidates": found,
    }
    if not works():
        return fields
    again = fastest.time(fastest.calls, timing.THOROUGH)
    return fields | {"us": again.median, "quartiles_us": list(again.quartiles)}


def works() -> bool:
    """Whether a failed kernel has not made the device unusable for this process."""
    torch = import_module("torch")
    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device="cuda").item())
    except Exception:
        return False


def complain(subject: str, error: Exception) -> str:
    """Prints and returns the error of a candidate."""
    lines = str(error).splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0][:200]}"
    print(f"humming: {subject}: {text}", file=sys.stderr, flush=True)
    return text


# --- requests -------------------------------------------------------------------------------------


def answers(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each product and number of tokens; not usable: the device needs a new process."""
    model, format = experts.Model(*request["model"]), parse_format(request["format"])
    products, configs, tried = {}, {}, {}
    for part, k, n in experts.product_shapes(model):
        products[part] = Product(part, k, n, model.top if part == "gate_up" else 1)
        configs[part] = layer_configs(model, products[part], format)
        for tokens in request["tokens"].get(part, []):
            tried[part, tokens] = candidates(configs[part], tokens * model.top)
    kernels = compile_all([candidate for group in tried.values() for candidate in group])
    for part, product in products.items():
        import_module("torch").cuda.empty_cache()
        read = model.top * experts.matrix_bytes(product.k, product.n, format)
        weight = None
        for tokens in request["tokens"].get(part, []):
            row = {"part": part, "tokens": tokens}
            try:
                weight = weight or make_weight(configs[part], format, experts.copies(read))
                work = make_work(model, product, format, weight, tokens)
                row |= best(tried[part, tokens], kernels, weight, work, product)
                del work
            except Exception as error:
                reason = complain(f"{part}, {tokens} tokens", error)
                row |= {"us": None, "error": reason}
            yield row | {"usable": works()}
    weight = None
    import_module("torch").cuda.empty_cache()


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the package prints

    def say(answer: Any) -> None:
        print(json.dumps(answer), file=out, flush=True)

    os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")  # of the kernels in the wheel
    reason = peers.missing(humming.PEER)
    say(reason)
    if reason:
        return
    try:
        import_module("humming.utils.nvrtc").get_nvrtc_library_path()
    except RuntimeError:
        os.environ.setdefault("HUMMING_COMPILER", "nvcc")
    for line in sys.stdin:
        for row in answers(json.loads(line)):
            say(row)
            if not row["usable"]:
                return


if __name__ == "__main__":
    main()
