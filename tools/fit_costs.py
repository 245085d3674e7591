"""Fits the constants of the kernels' cost models to measured times, and writes them.

    python tools/fit_costs.py            # to benchmarks/results/fit/*.jsonl.gz except `unseen` ones
    python tools/fit_costs.py --dry-run  # prints what would change, and writes nothing
    python tools/fit_costs.py --table    # writes the table of measured choices instead

Reads lines of `driver choices`, evaluates the models of the installed package, and replaces the
constants in `cuda/kernels/*/costs.inc` in place. The table (`jaxlowbit/_tuning/tables/`) lists
products with a measured choice faster than the selection of the installed package; build
the package with the new constants first.
"""

import argparse
import gzip
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from jaxlowbit import Format, __version__
from jaxlowbit._backends import selection
from jaxlowbit._backends.extension import ffi
from jaxlowbit._backends.selection import DeviceFacts, Product
from jaxlowbit._core.activations import VALUES
from jaxlowbit._core.format import SCALES
from jaxlowbit._tuning import devices
from jaxlowbit._tuning import table as tables

ROOT = Path(__file__).parents[1]
_SUMMARY = "Fits the constants of the kernels' cost models to measured times, and writes them."
DATA = ROOT / "benchmarks/results/fit"
HELD_OUT = "unseen"  # in the names of files excluded from the fit

# Options whose costs are not modelled by a kernel, or not fitted here.
_UNMODELLED = {"transposed", "accumulate_float16", "permuted", "bias", "residual", "activation"}
# The loss is the mean regret under a soft minimum: choices whose costs differ by this fraction
# share the weight. Large regrets count more than proportionally.
_SOFT = 0.02
_LARGE = 8.0
# Further loss terms: the regret of the choice within each kernel, which matters for other GPUs and
# other M; errors of predicted times, mainly of good choices; squared logarithms of changes.
_OWN, _ERROR, _CHANGE = 0.15, 0.1, 2e-4
_USUAL_ERROR = 0.05  # errors of predicted times count quadratically up to here
_MOST_CHANGE = 5.0  # a factor, of one fit
_STEPS = 0.1, 0.002, 0.5  # changes of constants: first, minimum and maximum
_MOST_ROUNDS = 60
_LEAST_GAIN = 0.03  # of an entry of a table
# Longer products hit the power limit, so their times depend on earlier work.
_MOST_MICROSECONDS = 500  # of an entry
_LEAST_TILE = 16  # rows between tiles at large M
_NUMBER = re.compile(r"(?<![\w.])-?\d+\.?\d*(?:e[+-]?\d+)?(?![\w.])")

# Fields that are not of the product (cuda/product.def).
_LAUNCH = {"early_start", "aligned", "clusters", "compiles", "workspace_bytes", "device_name"}
_LAUNCH |= set(DeviceFacts._fields)
_SCALES = {name: str(dtype) for name, dtype in SCALES.items()} | {"super": "two_level"}

# The fields of cuda/select/choice.h; the first is the kernel.
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
        """Whether the device ran kernels for its architecture, not for an older GPU."""
        capability = self.fields["compute_capability"]
        return not any(
            gpu.name == self.fields["device_name"] and gpu.capability != capability
            for gpu in devices.GPUS.values()
        )


def asked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `ffi.select` for the fields of a measurement, as the driver writes them."""
    own = {name: value for name, value in fields.items() if name not in _LAUNCH}
    lhs = own.setdefault("lhs", "bfloat16")
    floats = "bfloat16" if lhs in VALUES else lhs
    wide = "float32" if own.pop("float32_scale", False) else floats
    own["scale"] = _SCALES.get(own.pop("narrow_scale", ""), wide)
    own = {"group_size": 128, "out": floats} | own
    launch = {name: fields[name] for name in _LAUNCH & fields.keys()}
    return {"product": ffi.product(**own)} | launch


def load(paths: Iterable[Path]) -> list[Problem]:
    """Loads the problems of files, without options that are not modelled."""
    problems = []
    for path in paths:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as lines
        ):
            for line in map(json.loads, lines):
                fields = line["device"] | line["problem"]
                if not _UNMODELLED & fields.keys():
                    times = {(*choice,): us for *choice, us in line["choices"]}
                    source = path.name.partition(".")[0]
                    problems.append(Problem(source, fields, ffi.question(**asked(fields)), times))
    return problems


class Kernel:
    """The cost model of one kernel over all its measured choices."""

    def __init__(self, number: int, problems: Sequence[Problem]):
        self.name = ffi.KERNELS[number]
        self.path = ROOT / "cuda/kernels" / self.name.removeprefix("qmm_") / "costs.inc"
        cases = [
            (row, problem, choice)
            for row, problem in enumerate(problems)
            for choice in problem.times
            if choice[0] == number
        ]
        self.model = ffi.CostModel(self.name, [(p.question, choice) for _, p, choice in cases])
        # Costs and times are tables with a row per problem, padded with infinity.
        self.choices = [[c for c in p.times if c[0] == number] for p in problems]
        self.rows = np.array([row for row, *_ in cases], int)
        self.columns = np.array([self.choices[row].index(c) for row, _, c in cases], int)
        self.width = max(map(len, self.choices), default=0)
        self.times = self._table(np.array([p.times[choice] for _, p, choice in cases]))

    def costs(self, constants: np.ndarray) -> np.ndarray:
        return self._table(np.array(self.model.microseconds(constants.tolist())))

    def _table(self, values: np.ndarray) -> np.ndarray:
        table = np.full((len(self.choices), self.width), np.inf)
        table[self.rows, self.columns] = values
        return table


class Fit:
    """Fits the constants of all kernels by coordinate descent.

    Zeros and signs of constants are part of the model and do not change.
    """

    def __init__(self, kernels: Sequence[Kernel], start: Sequence[np.ndarray]):
        self.kernels, self.start = kernels, start
        self.best = np.hstack([kernel.times for kernel in kernels]).min(axis=1, keepdims=True)
        self.regrets = [_over(kernel.times, self.best) for kernel in kernels]
        self.own = [
            _over(kernel.times, kernel.times.min(axis=1, keepdims=True, initial=np.inf))
            for kernel in kernels
        ]
        self.constants = [constants.copy() for constants in start]
        self.parts = [self._part(number, start[number]) for number in range(len(kernels))]

    def run(self, names: Sequence[str]) -> list[np.ndarray]:
        """Fits the constants of some kernels."""
        first, least, most = _STEPS
        steps = [np.full(len(constants), first) for constants in self.start]
        loss = self._loss()
        for _ in range(_MOST_ROUNDS):
            before = loss
            for number, kernel in enumerate(self.kernels):
                if kernel.name not in names:
                    continue
                for i in np.flatnonzero(self.start[number]):
                    step = steps[number][i]
                    found = min(self._moved(number, i, by) for by in (1 + step, 1 / (1 + step)))
                    better = found[0] < loss - 1e-7
                    if better:
                        loss, moved = found
                        self._set(number, i, moved)
                    steps[number][i] = min(max(step * (1.5 if better else 0.5), least), most)
            if before - loss < 1e-5:
                break
        return self.constants

    def _moved(self, number: int, i: np.intp, factor: float) -> tuple[float, float]:
        """The loss with one constant changed, and the constant."""
        old, part = self.constants[number][i], self.parts[number]
        new = old * factor
        if not 1 / _MOST_CHANGE < new / self.start[number][i] < _MOST_CHANGE:
            return math.inf, new
        self._set(number, i, new)
        loss = self._loss()
        self.constants[number][i], self.parts[number] = old, part
        return loss, new

    def _set(self, number: int, i: np.intp, constant: float) -> None:
        self.constants[number][i] = constant
        self.parts[number] = self._part(number, self.constants[number])

    def _part(self, number: int, constants: np.ndarray) -> tuple[np.ndarray, float]:
        """Logarithms of the costs of a kernel, and its separate part of the loss."""
        kernel, start = self.kernels[number], self.start[number]
        logs = np.log(np.maximum(kernel.costs(constants), 0.1))
        changed = np.log(constants[start != 0] / start[start != 0])
        loss = _CHANGE * float(np.square(changed).sum())
        if kernel.width:
            there = kernel.rows, kernel.columns
            errors = np.abs(logs[there] - np.log(kernel.times[there]))
            bent = np.where(
                errors < _USUAL_ERROR,
                np.square(errors) / (2 * _USUAL_ERROR),
                errors - _USUAL_ERROR / 2,
            )
            weights = (1 + self.regrets[number][there]) ** -2
            loss += _ERROR * float(np.average(bent, weights=weights))
            loss += _OWN * _soft_regret(logs, self.own[number])
        return logs, loss

    def _loss(self) -> float:
        logs = np.hstack([logs for logs, _ in self.parts])
        return _soft_regret(logs, np.hstack(self.regrets)) + sum(loss for _, loss in self.parts)


def _over(times: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Relative excess of times over the best; 0 for missing times."""
    there = np.isfinite(times)
    return np.where(there, np.where(there, times, 0) / np.where(np.isfinite(best), best, 1) - 1, 0)


def _soft_regret(logs: np.ndarray, regrets: np.ndarray) -> float:
    least = logs.min(axis=1, keepdims=True)
    some = np.isfinite(least[:, 0])
    weights = np.exp((least[some] - logs[some]) / _SOFT)
    each = (weights * regrets[some]).sum(axis=1) / weights.sum(axis=1)
    return float(np.mean(each + _LARGE * np.square(each))) if some.any() else 0.0


# --- constants in files ---------------------------------------------------------------------------


def read_constants(path: Path) -> np.ndarray:
    """The numbers of a costs.inc, in order."""
    code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    return np.array([float(number) for number in _NUMBER.findall(code)])


def with_constants(text: str, constants: Iterable[float], sources: Sequence[str]) -> str:
    """Replaces the numbers in the text of a costs.inc and names their sources."""
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
    """Relative excess time of the chosen over the best choices."""

    mean: float
    worst: float
    problems: int
    where: dict[str, Any] | None  # the problem of the worst

    def __str__(self) -> str:
        where = self.where and " ".join(f"{name}={self.where[name]}" for name in ("m", "n", "k"))
        return f"mean {self.mean:6.2%}, worst {self.worst:6.1%} ({where}), of {self.problems}"


def regret(chosen: Iterable[tuple[Problem, float, float]]) -> Regret:
    """The regret of choices, given as (problem, microseconds, best microseconds)."""
    found = [(us / best - 1, problem) for problem, us, best in chosen]
    if not found:
        return Regret(0, 0, 0, None)
    worst, problem = max(found, key=lambda pair: pair[0])
    return Regret(float(np.mean([each for each, _ in found])), worst, len(found), problem.fields)


def selected(problems: Iterable[Problem]) -> Iterator[tuple[Problem, Choice]]:
    """The selection of the installed package without measured choices."""
    for problem in problems:
        kernel, *others = ffi.candidates(**asked(problem.fields))[0]
        yield problem, cast(Choice, (ffi.KERNELS.index(kernel), *others))


def selected_regret(problems: Iterable[Problem]) -> Regret:
    """The regret of the installed package, over the problems whose selected choice is measured."""
    return regret(
        (problem, problem.times[choice], problem.best)
        for problem, choice in selected(problems)
        if choice in problem.times
    )


def report(
    problems: Sequence[Problem], kernels: Sequence[Kernel], constants: Sequence[np.ndarray]
) -> None:
    """Prints the regret within each kernel, of each source, and of all."""

    def chosen(*some: int) -> Iterator[tuple[Problem, float, float]]:
        """The measured choices of some kernels that the models select."""
        costs = np.hstack([kernels[number].costs(constants[number]) for number in some])
        times = np.hstack([kernels[number].times for number in some])
        for row, problem in enumerate(problems):
            if np.isfinite(costs[row]).any():
                yield problem, times[row, costs[row].argmin()], times[row].min()

    for number, kernel in enumerate(kernels):
        print(f"  {kernel.name:16} {regret(chosen(number))}")
    found = list(chosen(*range(len(kernels))))
    for source in sorted({problem.source for problem in problems}):
        print(f"  {source:16} {regret(each for each in found if each[0].source == source)}")
    print(f"  {'all':16} {regret(found)}")


# --- the table ------------------------------------------------------------------------------------


def write_table(problems: Sequence[Problem]) -> Path:
    """Writes the choices that are faster than the selected ones, for native problems."""
    names = {problem.fields["device_name"] for problem in problems}
    if len(names) != 1:
        raise SystemExit(f"fit_costs: a table is of one device, the data are of {sorted(names)}.")
    plain, early = {}, {}
    for problem, choice in selected(problems):
        fields = dict(problem.fields)
        if choice in problem.times and not fields.keys() & {"gated", "scale_accumulators", "batch"}:
            is_early = fields.pop("early_start")
            (early if is_early else plain)[_key(fields)] = problem, choice
    entries = []
    for key, (problem, default) in plain.items():
        times = problem.times
        if key in early:  # equal keys in a table
            other, other_default = early[key]
            limit = other.times[other_default]
            times = {c: us for c, us in times.items() if other.times.get(c, math.inf) <= limit}
        best = min(times, key=times.__getitem__, default=default)
        most = min(_MOST_MICROSECONDS, (1 - _LEAST_GAIN) * problem.times[default])
        if times.get(best, math.inf) < most:
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
    """The entry of a product. It covers all M with the same number of tiles."""

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
    kernels = [Kernel(number, problems) for number in range(len(ffi.KERNELS))]
    before = [read_constants(kernel.path) for kernel in kernels]
    print(f"before, {len(problems)} problems:")
    report(problems, kernels, before)
    fit = Fit([Kernel(number, fitted) for number in range(len(ffi.KERNELS))], before)
    after = []
    for kernel, old, new in zip(kernels, before, fit.run(options.kernels), strict=True):
        # Evaluate constants as written, with four digits.
        after.append(np.array([float(f"{value:.4g}") for value in new]))
        if not options.dry_run and not np.array_equal(old, new):
            text = kernel.path.read_text(encoding="utf-8")
            kernel.path.write_text(with_constants(text, new, sources), encoding="utf-8")
    print("after:")
    report(problems, kernels, after)


if __name__ == "__main__":
    main()
