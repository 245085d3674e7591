"""Runs random programs (`tests/support/programs.py`) under different XLA settings for GPUs.

    python tools/run_programs.py                         # 600 under each setting of SETTINGS
    python tools/run_programs.py --count 3000 --settings "default"
    python tools/run_programs.py --count 500 --flags=--xla_gpu_enable_dynamic_slice_fusion=true
    python tools/run_programs.py --program "Program(...)"    # one, as printed by a failure

Prints the number of programs and failures of each setting, and each failing program; the exit
status is 1 if any failed. Programs are drawn from consecutive seeds, starting with `--first`. XLA
flags apply to a whole process, so workers run the programs; if a worker dies, its program is
printed and a new worker continues. Without a GPU the programs run on the CPU.
"""

import argparse
import importlib
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

_GRAPHS = "--xla_gpu_graph_min_graph_size=1"
SETTINGS = {
    "slices fused": "--xla_gpu_enable_dynamic_slice_fusion=true",
    "slices copied": "--xla_gpu_enable_dynamic_slice_fusion=false",
    "no graphs": "--xla_gpu_enable_command_buffer=",
    "small graphs": _GRAPHS,
    "loops in graphs": f"{_GRAPHS} --xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL",
    "default": "",
}
# Settings of a run without `--settings`; the default of XLA is between them.
PLAIN = [name for name in SETTINGS if name != "default"]
# Reduces compile time in all settings.
_CHEAP = "--xla_gpu_autotune_level=0"
_PATHS = [str(Path(__file__).parents[1] / "tests/support"), str(Path(__file__).parent)]
_WORKER = (sys.executable, __file__, "--worker")
# Runs per program: keeping the first results moves the buffers; the last two use the same ones.
_RUNS = 4
_SECONDS = 300  # per program, including the start of its worker


Line = dict[str, Any]  # printed by a worker


class Summary(NamedTuple):
    setting: str
    programs: int
    failures: list[str]
    fused: int  # how many had slices fused into a call
    # Programs replayed from a graph, among those with a single-product call; None if the module
    # that counts calls was not built.
    replayed: int | None
    worst: float  # maximum ratio of error to bound among passing programs
    worst_program: int
    seconds: float

    def __str__(self) -> str:
        graphs = "uncounted" if self.replayed is None else str(self.replayed)
        return (
            f"{self.setting}: {self.programs} programs, {len(self.failures)} fail, "
            f"{self.fused} with slices fused, {graphs} from graphs, "
            f"worst {self.worst:.2f} of the bound (program {self.worst_program}), "
            f"{self.seconds:.0f} s"
        )


def run(
    setting: str,
    flags: str,
    *,
    first: int,
    count: int,
    workers: int,
    command: Sequence[str] = _WORKER,
    report: Callable[[str], None] = lambda failure: None,
) -> Summary:
    """Runs programs from number `first`, in processes with these XLA flags.

    `report` receives each failure immediately.
    """
    begin = time.monotonic()

    def describe(line: Line) -> str:
        return f"program {line['number']}: {line['error']}"

    found = outcomes(
        range(first, first + count),
        command=command,
        flags=f"{_CHEAP} {flags}",
        workers=workers,
        report=lambda line: report(describe(line)),
    )
    right = [line for line in found if "error" not in line]
    counted = [line["replayed"] for line in right if line["replayed"] is not None]
    return Summary(
        setting,
        len(found),
        [describe(line) for line in found if "error" in line],
        sum(line["fused"] for line in right),
        sum(counted) if counted else None,
        *max(((line["worst"], line["number"]) for line in right), default=(0.0, first)),
        time.monotonic() - begin,
    )


def outcomes(
    numbers: Sequence[int],
    *,
    command: Sequence[str],
    flags: str = "",
    workers: int = 1,
    report: Callable[[Line], None] = lambda line: None,
    done: Callable[[Line], None] = lambda line: None,
) -> list[Line]:
    """Runs numbers in processes of a command that passes its arguments to `work`.

    Returns the lines of `work`, with an "error" for failures; `report` receives failures
    immediately, and `done` the line of each finished number.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    paths = filter(None, [*_PATHS, os.environ.get("PYTHONPATH")])
    env = os.environ | {
        "JAX_PLATFORMS": f"{platforms},cpu" if platforms else "",  # for the reference
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAXLOWBIT_TUNED": "",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    workers = max(min(workers, len(numbers)), 1)
    found: list[Line] = []

    def run_share(mine: list[int]) -> None:
        """Runs numbers sequentially, starting a new worker whenever one dies."""
        while mine:
            lines, died = _run_worker([*command, *map(str, mine)], env, report, done)
            begun = {line["number"]: line["program"] for line in lines if "program" in line}
            ended = [line for line in lines if "program" not in line]
            left = [i for i in mine if i not in {line["number"] for line in ended}]
            # The number that had started; if none had, all, since a new worker would fail too.
            lost = [i for i in left if i in begun] or ([] if begun else left)
            why = died or "the worker ended"
            names = {i: f"{why} in\n{begun[i]}" if i in begun else why for i in lost}
            failures: list[Line] = [{"number": i, "error": names[i]} for i in lost]
            for line in failures:
                report(line)
            found.extend(ended + failures)
            mine = [i for i in left if i not in lost]

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run_share, [list(numbers[i::workers]) for i in range(workers)]))
    return found


def _run_worker(
    command: list[str],
    env: Any,
    report: Callable[[Line], None],
    done: Callable[[Line], None],
) -> tuple[list[Line], str]:
    """The lines printed by a worker, and the cause of its death, if any."""
    lines: list[Line] = []
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        stderr: list[str] = []
        reader = threading.Thread(target=lambda: stderr.extend(process.stderr or ()))
        reader.start()
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        watch = threading.Timer(_SECONDS, end)
        watch.start()
        for text in process.stdout:
            if text.startswith("{"):
                lines.append(json.loads(text))
                if "error" in lines[-1]:
                    report(lines[-1])
                if "program" not in lines[-1]:
                    done(lines[-1])
                watch.cancel()
                watch = threading.Timer(_SECONDS, end)
                watch.start()
        status = process.wait()
        watch.cancel()
        reader.join()
    if late.is_set():
        return lines, f"more than {_SECONDS} s"
    if status == 0:
        return lines, ""
    return lines, f"exit status {status}, {''.join(stderr)[-1500:].strip() or 'no message'}"


# --- the worker -----------------------------------------------------------------------------------


def work(
    numbers: Sequence[int], describe: Callable[[int], str], run: Callable[[int], dict[str, Any]]
) -> None:
    """Worker: runs numbers, and reports starts and results on stdout.

    Exits after any error other than wrong results, because CUDA may not recover.
    """

    def say(**line: Any) -> None:
        print(json.dumps(line), flush=True)

    for number in numbers:
        say(number=number, program=describe(number))
        try:
            say(number=number, **run(number))
        except AssertionError as error:
            say(number=number, error=str(error))
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:1500]} in\n{describe(number)}"
            say(number=number, error=text)
            return


def has_fused_call(text: str) -> bool:
    """Whether XLA fused slices or updates into one of our calls, by the text of its program."""
    computations = dict(
        re.findall(r"^%?([\w.-]+) \(.*?\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    )
    fused = re.findall(r"kind=kCustom, calls=%?([\w.-]+)", text)
    return any('custom_call_target="jaxlowbit' in computations.get(name, "") for name in fused)


def _work(numbers: Sequence[int]) -> None:
    programs, counter = _programs()

    def program(number: int) -> Any:
        return programs.sample(random.Random(number), large=True)

    def run(number: int) -> dict[str, Any]:
        report = programs.check(program(number), runs=_RUNS, executions=counter)
        fused = has_fused_call(report.text)
        return {"worst": report.worst, "fused": fused, "replayed": report.replayed}

    work(numbers, lambda number: repr(program(number)), run)


def _programs() -> tuple[Any, Any]:
    """The module `programs`, and the counter of executed CUDA calls; None in a CPU build."""
    sys.path[:0] = _PATHS
    import jax

    from jaxlowbit._backends.extension import ffi

    jax.config.update("jax_default_matmul_precision", "highest")
    return importlib.import_module("programs"), getattr(ffi, "execute_count", None)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=600, help="programs of each setting")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--settings", nargs="+", default=PLAIN, choices=SETTINGS, metavar="NAME")
    parser.add_argument("--flags", help="XLA flags to run under, instead of settings")
    parser.add_argument("--program", help="the repr of one program, to run it here")
    parser.add_argument("--worker", nargs="+", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options.worker)
        return 0
    if options.program:
        programs, _ = _programs()
        print(programs.check(eval(options.program, vars(programs)), runs=_RUNS).worst)
        return 0
    chosen = {name: SETTINGS[name] for name in options.settings}
    if options.flags is not None:
        chosen = {options.flags: options.flags}
    failed = False
    for i, (name, flags) in enumerate(chosen.items()):
        # Different programs for each setting.
        first = options.first + i * options.count
        found = run(
            name,
            flags,
            first=first,
            count=options.count,
            workers=options.workers,
            report=lambda failure: print(failure, flush=True),
        )
        print(found, flush=True)
        failed |= bool(found.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
