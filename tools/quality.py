"""Measures quality against bits per weight of a language model, by format and quantizer.

    python tools/quality.py MODEL --calibration emma.txt
    python tools/quality.py MODEL --calibration emma.txt --points int4/gptq 3.5/awq+gptq

A point is FORMAT/QUANTIZER, or BITS/QUANTIZER for a mixed plan, with @ and a dtype if activations
are rounded. Matrices of the blocks are rounded, with float16 scales; the embedding stays as stored.
Each result is written to `benchmarks/results/quantizers.json` as soon as it is there, and points
that the file has are not measured again. `tools/measurements.py` and `tools/pictures.py` turn the
file into tables and a plot.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import jax

from jaxlowbit import llm
from jaxlowbit._llm.language_model import open_file
from jaxlowbit.quantizers import Calibration
from jaxlowbit.quantizers._registry import statistics_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/quantizers.json"
TEXT = ROOT / "examples/data/northanger_abbey.txt"
QUANTIZERS = ("absmax", "mse", "hqq", "awq", "gptq", "awq+gptq", "distill", "awq+distill")
POINTS = (
    "stored",
    *(f"{format}/{quantizer}" for format in ("int4", "int3") for quantizer in QUANTIZERS),
    *(
        f"int4-g32-integer/{quantizer}"
        for quantizer in ("absmax", "gptq", "awq+gptq", "awq+distill")
    ),
    *(f"{bits}/{quantizer}" for quantizer in ("gptq", "awq+gptq") for bits in ("3.5", "3")),
    *(f"int3-g32/{quantizer}" for quantizer in ("absmax", "gptq", "awq+gptq")),
    *("int2/absmax", "int2/awq+gptq", "int2-g32-float/awq+gptq", "int2-g32-float/awq+distill"),
    *("int1-float/absmax", "int1-float/gptq", "int1-g32-float/gptq"),
    *("int8/smoothquant", "int8/smoothquant@int8", "int8/smoothquant@float8_e4m3fn"),
    *("int8/absmax", "int8/absmax@int8"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures quality by bits per weight.")
    parser.add_argument("model", help="a GGUF file, or a folder of safetensors")
    parser.add_argument("--calibration", type=Path, required=True, help="another text")
    parser.add_argument("--text", type=Path, default=TEXT, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=4095, help="of the text (%(default)s)")
    parser.add_argument("--samples", type=int, default=32, help="windows of 512 (%(default)s)")
    parser.add_argument("--points", nargs="+", default=POINTS, help="such as int4/gptq, 3.5/gptq")
    parser.add_argument("--results", type=Path, default=RESULTS, help="(%(default)s)")
    options = parser.parse_args()
    measure(options)


def measure(options: argparse.Namespace) -> None:
    """Measures all points that are missing in the results."""
    known = (
        json.loads(options.results.read_text(encoding="utf-8")) if options.results.exists() else {}
    )
    conditions = {
        "model": Path(options.model).name,
        "text": options.text.name,
        "tokens": options.tokens,
        "context": 512,
        "calibration": options.calibration.name,
        "calibration_tokens": 512 * options.samples,
        "scales": "float16",
        "activations": f"float32, {jax.default_backend()}",
    }
    if known.get("conditions", conditions) != conditions:
        raise SystemExit(f"{options.results} has results of other conditions; name another file.")
    known = {
        "conditions": conditions,
        "plans": known.get("plans", {}),
        "points": known.get("points", {}),
    }
    header: Any = open_file(options.model)
    tokens = header.tokenizer.encode(options.text.read_text(encoding="utf-8"))
    tokens = tokens[: options.tokens + 1]
    reference = llm.load(header, progress=False, dtype="float32")
    calibration = Calibration(
        options.calibration.read_text(encoding="utf-8"), samples=options.samples
    )
    for point in options.points:
        if point in known["points"]:
            continue
        start = time.perf_counter()
        model = loaded(header, point, calibration, reference, known["plans"])
        seconds = time.perf_counter() - start
        found = llm.perplexity(model, tokens, context=512, reference=reference)
        known["points"][point] = {
            "bits": round(bits_of(model), 3),
            "megabytes": round(model.report.nbytes / 1e6, 1),
            "perplexity": round(found.perplexity, 3),
            "loss": round(found.loss, 5),
            "divergence": round(found.divergence or 0, 5),
            "seconds": round(seconds, 1),
        }
        print(point, known["points"][point], flush=True)
        temporary = options.results.with_suffix(".tmp")
        temporary.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        temporary.replace(options.results)


def loaded(
    header: Any,
    point: str,
    calibration: Calibration,
    reference: llm.LanguageModel,
    plans: dict[str, dict[str, str]],
) -> llm.LanguageModel:
    """The model of a point. Adds the rules of a plan to `plans`."""
    if point == "stored":
        return reference
    name, _, quantizer = point.partition("/")
    quantizer, _, lhs_qtype = quantizer.partition("@")
    options: dict[str, Any] = {"quantizer": quantizer, "dtype": "float32", "progress": False}
    options |= {"scale_dtype": "float16", "lhs_qtype": lhs_qtype or None}
    if statistics_of(quantizer) and quantizer != "mse":
        options["calibration"] = calibration
    if name.startswith("int"):
        return llm.load(header, format=name, rules={"embedding": None}, **options)
    if name not in plans:
        few = Calibration(calibration.batches, samples=8)
        plans[name] = llm.plan(header, float(name), calibration=few, quantizer="absmax").rules
    return llm.load(header, rules=plans[name], **options)


def bits_of(model: llm.LanguageModel) -> float:
    """Bits per weight of the matrices of the blocks."""
    matrices = [x for x in model.report.tensors if len(x.shape) > 1 and x.name.startswith("layers")]
    return 8 * sum(x.nbytes for x in matrices) / sum(math.prod(x.shape) for x in matrices)


if __name__ == "__main__":
    main()
