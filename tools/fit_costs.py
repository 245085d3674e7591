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
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from jaxlowbit._backends.extension import ffi

ROOT = Path(__file__).parents[1]
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
_NUMBER = re.compile(r"(?<![\w.])-?\d+\.?\d*(?:e[+-]?\d+)?(?![\w.])")

Choice = tuple[int, ...]  # the numbers of cuda/select/choice.h, the first of them the kernel's


class Problem(NamedTuple):
    """A problem and the microseconds of its measured choices."""

    source: str
    fields: dict[str, Any]
    question: Any
    times: dict[Choice, float]

    @property
    def best(self) -> float:
        return min(self.times.values())


def load(paths: Iterable[Path]) -> list[Problem]:
    """The problems of files, of those kinds that the models tell apart."""
    problems = []
    for path in paths:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for line in map(json.loads, lines):
                fields = line["device"] | line["problem"]
                if not _UNMODELLED & fields.keys():
                    times = {tuple(choice[:-1]): choice[-1] for choice in line["choices"]}
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

    def costs(self, constants: Sequence[float]) -> np.ndarray:
        return np.asarray(self.model.microseconds(list(constants)))

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
    count: int
    where: dict[str, Any] | None  # the problem of the worst

    def __str__(self) -> str:
        where = self.where and " ".join(f"{name}={self.where[name]}" for name in ("m", "n", "k"))
        return f"mean {self.mean:6.2%}, worst {self.worst:6.1%} ({where}), of {self.count}"


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", nargs="*", type=Path, help="files of `driver choices`")
    parser.add_argument("--kernels", nargs="+", default=ffi.KERNELS, choices=ffi.KERNELS)
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    paths = options.data or sorted(DATA.glob("*.jsonl.gz"))
    problems = load(paths)
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
