"""Fits the constants of the kernels' cost models to measured times, and writes them.

    python tools/fit_costs.py            # to benchmarks/results/fit/*.jsonl.gz but `unseen` ones
    python tools/fit_costs.py --dry-run  # prints what would change, and writes nothing
    python tools/fit_costs.py --table    # writes the table of measured choices instead

The data are lines of `driver choices`, the models those of the installed package, and the
constants those of `cuda/kernels/*/costs.inc`, whose numbers are replaced in place. The table
(`jaxlowbit/_tuning/tables/`) lists products that a choice multiplies faster than what the installed
package would select, which must have been built with the constants that are written here.
"""

import argparse
import gzip
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from scipy.optimize import least_squares

from jaxlowbit import Format, __version__
from jaxlowbit._backends import selection
from jaxlowbit._backends.extension import ffi
from jaxlowbit._backends.selection import DeviceFacts, Product
from jaxlowbit._tuning import devices
from jaxlowbit._tuning import table as tables

ROOT = Path(__file__).parents[1]
_SUMMARY = "Fits the constants of the kernels' cost models to measured times, and writes them."
DATA = ROOT / "benchmarks/results/fit"
HELD_OUT = "unseen"  # in the names of files that are not fitted to

# The models of what these change are no kernels' own, or not here.
_UNMODELLED = {"transposed", "half_sums", "permuted", "bias", "residual", "activation"}
# A constant stays where it was as if it had been measured to this fraction: data decide about those
# that matter to them.
_PRIOR = 0.3
# Errors beyond this are outliers, of the model or of the measurement.
_USUAL_ERROR = 0.04
# Choices that take r times as long as the best count r to this power less.
_DISCOUNT = 2
_LEAST, _MOST = 0.2, 5.0  # factors by which a fit changes a constant
_LEAST_GAIN = 0.03  # of an entry of a table
_LEAST_TILE = 32  # rows of the smallest tile of many rows
_NUMBER = re.compile(r"(?<![\w.])-?\d+\.?\d*(?:e[+-]?\d+)?(?![\w.])")

# The numbers of cuda/select/choice.h, the first of them the kernel's.
Choice = tuple[int, int, int, int, int, int]


class Problem(NamedTuple):
    """A problem and the microseconds of its measured choices."""

    source: str
    fields: dict[str, Any]
    question: Any
    times: dict[Choice, float]

    @property
    def best(self) -> float:
        return min(self.times.values())

    @property
    def is_native(self) -> bool:
        """Whether the device ran its own kernels, not those of an older GPU."""
        capability = self.fields["compute_capability"]
        return not any(
            gpu.name == self.fields["device_name"] and gpu.capability != capability
            for gpu in devices.GPUS.values()
        )


def load(paths: Iterable[Path]) -> list[Problem]:
    """The problems of files, of those kinds that the models tell apart."""
    problems = []
    for path in paths:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for line in map(json.loads, lines):
                fields = line["device"] | line["problem"]
                if not _UNMODELLED & fields.keys():
                    times = {(*choice,): us for *choice, us in line["choices"]}
                    source = path.name.partition(".")[0]
                    problems.append(Problem(source, fields, ffi.question(**fields), times))
    return problems


class Kernel:
    """The cost model of one kernel over all its measured choices."""

    def __init__(self, number: int, problems: Sequence[Problem]):
        self.name = ffi.KERNELS[number]
        self.path = ROOT / "cuda/kernels" / self.name.removeprefix("qmm_") / "costs.inc"
        self.cases = [
            (problem, choice)
            for problem in problems
            for choice in problem.times
            if choice[0] == number
        ]
        self.model = ffi.CostModel(self.name, [(p.question, choice) for p, choice in self.cases])

    def costs(self, constants: np.ndarray) -> np.ndarray:
        return np.asarray(self.model.microseconds(constants.tolist()))

    def fit(self, start: np.ndarray) -> np.ndarray:
        """Constants that predict the logarithms of the times, and mostly those of good choices.

        Constants that are zero, and signs, are part of the model.
        """
        free = np.flatnonzero(start)
        if not self.cases:
            return start
        times = np.array([problem.times[choice] for problem, choice in self.cases])
        best = np.array([problem.best for problem, _ in self.cases])
        weights = (best / times) ** _DISCOUNT / _USUAL_ERROR

        def constants(logs: np.ndarray) -> np.ndarray:
            changed = start.copy()
            changed[free] *= np.exp(logs)
            return changed

        def residuals(logs: np.ndarray) -> np.ndarray:
            costs = np.maximum(self.costs(constants(logs)), 0.1)
            return np.concatenate([weights * np.log(costs / times), logs / _PRIOR])

        bounds = (math.log(_LEAST), math.log(_MOST))
        found = least_squares(
            residuals,
            np.zeros(len(free)),
            bounds=bounds,
            loss="soft_l1",
            diff_step=1e-4,
            max_nfev=100,
        )
        return constants(found.x)


# --- constants in files ---------------------------------------------------------------------------


def read_constants(path: Path) -> np.ndarray:
    """The numbers of a costs.inc, in their order."""
    code = re.sub(r"//.*", "", path.read_text())
    return np.array([float(number) for number in _NUMBER.findall(code)])


def with_constants(text: str, constants: Iterable[float], sources: Sequence[str]) -> str:
    """The text of a costs.inc with other numbers, and with where they are from."""
    values = iter(constants)
    head, mark, body = text.partition("// clang-format off\n")
    lines = []
    for line in body.splitlines(keepends=True):
        code, slashes, comment = line.partition("//")
        code = _NUMBER.sub(lambda _: f"{next(values):.4g}", code)
        lines.append(code + slashes + comment)
    names = ", ".join(sources)
    head = (
        "// SPDX-License-Identifier: Apache-2.0\n//\n"
        f"// Generated by tools/fit_costs.py from benchmarks/results/fit: {names}.\n"
        "// In the order of Costs (costs.h).\n"
    )
    return head + mark + "".join(lines)


# --- regret ---------------------------------------------------------------------------------------


class Regret(NamedTuple):
    """By how much the chosen choices take longer than the best, as fractions of the best."""

    mean: float
    worst: float
    problems: int
    where: dict[str, Any] | None  # the problem of the worst

    def __str__(self) -> str:
        where = self.where and " ".join(f"{name}={self.where[name]}" for name in ("m", "n", "k"))
        return f"mean {self.mean:6.2%}, worst {self.worst:6.1%} ({where}), of {self.problems}"


def regret(chosen: Iterable[tuple[Problem, float, float]]) -> Regret:
    """The regret of choices, given as problems, microseconds and those of the best."""
    found = [(us / best - 1, problem) for problem, us, best in chosen]
    if not found:
        return Regret(0, 0, 0, None)
    worst, problem = max(found, key=lambda pair: pair[0])
    return Regret(float(np.mean([each for each, _ in found])), worst, len(found), problem.fields)


def predicted(
    problems: Sequence[Problem], costs: dict[int, dict[int, dict[Choice, float]]]
) -> Iterator[tuple[Problem, float, float]]:
    """What the models choose of the measured choices of some kernels.

    **Arguments:**

    - `costs`: by the number of a kernel, then by the number of a problem, the costs of its choices.
    """
    for number, problem in enumerate(problems):
        of_choices = {c: us for kernel in costs.values() for c, us in kernel[number].items()}
        if of_choices:
            chosen = min(of_choices, key=of_choices.__getitem__)
            yield problem, problem.times[chosen], min(problem.times[c] for c in of_choices)


def selected(problems: Iterable[Problem]) -> Iterator[tuple[Problem, Choice]]:
    """What the installed package selects without measured choices."""
    for problem in problems:
        kernel, *others = ffi.candidates(**problem.fields)[0]
        yield problem, cast(Choice, (ffi.KERNELS.index(kernel), *others))


def selected_regret(problems: Iterable[Problem]) -> Regret:
    """The regret of the installed package, over the problems whose selected choice is measured."""
    return regret(
        (problem, problem.times[choice], problem.best)
        for problem, choice in selected(problems)
        if choice in problem.times
    )


def report(problems: Sequence[Problem], kernels: dict[int, Kernel], constants: dict) -> None:
    """Prints the regret of each kernel on its own, of all together, and of each source."""
    costs: dict[int, dict[int, dict[Choice, float]]] = {}
    numbers = {id(problem): number for number, problem in enumerate(problems)}
    for kernel, model in kernels.items():
        costs[kernel] = {number: {} for number in range(len(problems))}
        for (problem, choice), us in zip(model.cases, model.costs(constants[kernel]), strict=True):
            costs[kernel][numbers[id(problem)]][choice] = us
        print(f"  {model.name:16} {regret(predicted(problems, {kernel: costs[kernel]}))}")
    chosen = list(predicted(problems, costs))
    for source in sorted({problem.source for problem in problems}):
        print(f"  {source:16} {regret(each for each in chosen if each[0].source == source)}")
    print(f"  {'all':16} {regret(chosen)}")


# --- the table ------------------------------------------------------------------------------------


def write_table(problems: Sequence[Problem]) -> Path:
    """Writes the choices that are faster than the selected ones, for the devices' own problems."""
    names = {problem.fields["device_name"] for problem in problems}
    if len(names) != 1:
        raise SystemExit(f"fit_costs: a table is of one device, the data are of {sorted(names)}.")
    plain, early = {}, {}
    for problem, choice in selected(problems):
        fields = dict(problem.fields)
        if choice in problem.times and not fields.keys() & {"gated", "scale_sums", "batch"}:
            is_early = fields.pop("early_start")
            (early if is_early else plain)[_key(fields)] = problem, choice
    entries = []
    for key, (problem, default) in plain.items():
        times = problem.times
        if key in early:  # a table does not tell them apart
            other, other_default = early[key]
            limit = other.times[other_default]
            times = {c: us for c, us in times.items() if other.times.get(c, math.inf) <= limit}
        best = min(times, key=times.__getitem__, default=default)
        if times.get(best, math.inf) < (1 - _LEAST_GAIN) * problem.times[default]:
            entries.append(_entry(problem, best, default, [p for p, _ in plain.values()]))
    first = problems[0].fields
    device = DeviceFacts(*(first[name] for name in ("device_name", *DeviceFacts._fields[1:])))
    path = ROOT / "jaxlowbit/_tuning/tables" / tables.path_for(device.name).name
    tables.write(path, tables.Table(device, None, __version__, tuple(entries)))
    print(f"{path}: {len(entries)} of {len(plain)} products")
    return path


def _key(fields: dict[str, Any]) -> tuple:
    return tuple(sorted((name, str(value)) for name, value in fields.items()))


def _entry(problem: Problem, best: Choice, default: Choice, others: list[Problem]) -> tables.Entry:
    """The entry of a product. It stands for the numbers of rows that take as many tiles."""

    def product(fields: dict[str, Any]) -> Product:
        format = Format(fields["bits"], fields["group_size"], fields["zero"])
        scale = "float32" if fields["float32_scale"] else fields["lhs"]
        return Product(fields["m"], fields["n"], fields["k"], format, fields["lhs"], scale)

    def choice(numbers: Choice) -> selection.Choice:
        return selection.Choice(ffi.KERNELS[numbers[0]], *numbers[1:])

    own = product(problem.fields)
    fewer = [
        other.m
        for other in map(product, (each.fields for each in others))
        if other._replace(m=own.m) == own and other.m < own.m
    ]
    return tables.Entry(
        own,
        choice(best),
        problem.times[best],
        choice(default),
        problem.times[default],
        max([0, *fewer, own.m - _LEAST_TILE]) + 1,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=_SUMMARY)
    parser.add_argument("data", nargs="*", type=Path, help="files of `driver choices`")
    parser.add_argument("--kernels", nargs="+", default=ffi.KERNELS, choices=ffi.KERNELS)
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--table", action="store_true", help="write measured choices instead")
    options = parser.parse_args(arguments)
    paths = options.data or sorted(DATA.glob("*.jsonl.gz"))
    problems = load(paths)
    if options.table:
        write_table([problem for problem in problems if problem.is_native])
        return
    fitted = [problem for problem in problems if HELD_OUT not in problem.source]
    sources = sorted({problem.source for problem in fitted})
    all_kernels = {number: Kernel(number, problems) for number in range(len(ffi.KERNELS))}
    before = {number: read_constants(kernel.path) for number, kernel in all_kernels.items()}
    print(f"before, {len(problems)} problems:")
    report(problems, all_kernels, before)
    after = dict(before)
    for number, kernel in all_kernels.items():
        if kernel.name in options.kernels:
            text = kernel.path.read_text()
            text = with_constants(text, Kernel(number, fitted).fit(before[number]), sources)
            if not options.dry_run:
                kernel.path.write_text(text)
            code = re.sub(r"//.*", "", text)
            after[number] = np.array([float(value) for value in _NUMBER.findall(code)])
    print("after:")
    report(problems, all_kernels, after)


if __name__ == "__main__":
    main()
