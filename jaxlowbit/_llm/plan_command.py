"""The command `jaxlowbit plan`: rules for mixed widths as a JSON file."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from ..checkpoint._replace import new_file
from ..quantizers import Calibration
from . import console
from .command import as_command
from .files_command import check_output
from .language_model import open_file
from .plan import FORMATS, plan

Run = Callable[[argparse.Namespace], None]


def add_plan(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("model", metavar="MODEL", help=console.MODEL)
    bits = "bits per weight of the matrices of blocks, with scales, such as 3.5"
    parser.add_argument("--bits", type=float, required=True, metavar="N", help=bits)
    parser.add_argument(
        "--calibration", required=True, metavar="FILE", help="a text file with inputs"
    )
    samples = "number of windows of 512 tokens of that text (%(default)s)"
    parser.add_argument("--samples", type=int, default=8, metavar="N", help=samples)
    choices = f"formats to choose from ({' '.join(FORMATS)})"
    parser.add_argument("--formats", nargs="+", default=FORMATS, metavar="FORMAT", help=choices)
    rounds = "method of rounding, to measure errors (%(default)s)"
    parser.add_argument("--quantizer", default="mse", metavar="NAME", help=rounds)
    output = "the JSON file to write, for --format of other commands"
    parser.add_argument("--output", metavar="FILE", help=output)
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    return as_command(_plan)


def _plan(options: argparse.Namespace) -> None:
    target = None if options.output is None else Path(options.output)
    if target is not None and target.suffix != ".json":
        raise ValueError(f"--output {target} does not end in .json; name a JSON file.")
    if target is not None:
        check_output(target, options.overwrite)
    text = console.text_of("--calibration", options.calibration)
    found = plan(
        open_file(options.model),
        options.bits,
        calibration=Calibration(text, samples=options.samples),
        formats=options.formats,
        quantizer=options.quantizer,
        progress=sys.stderr.isatty(),
    )
    print(found)
    if target is not None:
        with new_file("plan", target, options.overwrite) as file:
            file.write_text(json.dumps(found.rules, indent=1) + "\n", encoding="utf-8")
