"""Random programs (tests/programs.py) under each of the ways in which XLA may run them on a GPU.

    python tools/run_programs.py                         # 600 under each setting of SETTINGS
    python tools/run_programs.py --count 3000 --settings "default"
    python tools/run_programs.py --count 500 --flags=--xla_gpu_enable_dynamic_slice_fusion=true
    python tools/run_programs.py --program "Program(...)"    # one, by what a failure printed

A line for each setting says how many programs ran and how many fail; each that does is printed, and
the exit status is 1. Programs are drawn from their number, `--first` and on. Flags hold for a
process, so workers run them; a worker that dies is replaced, and what it ran is printed. Without a
GPU they run on the CPU.
"""

import argparse
import importlib
import importlib.util
import json
import os
import random
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
# Those that a plain run goes through; the default of XLA is between them.
PLAIN = [name for name in SETTINGS if name != "default"]
# What makes compiling cheap, for all of them.
_CHEAP = "--xla_gpu_autotune_level=0"
_PATHS = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parent)]
_WORKER = (sys.executable, __file__, "--worker")
# Runs of each program: the first results are kept, so that buffers move; the last two are alike.
_RUNS = 4
_SECONDS = 300  # for one program, with the start of its worker


class Summary(NamedTuple):
    setting: str
    programs: int
    failures: list[str]
    fused: int  # how many had slices fused into a call
    # How many ran from a graph, of those with a call of one product alone; None where the module
    # that counts these calls was not built.
    replayed: int | None
    worst: float
    seconds: float

    def __str__(self) -> str:
        graphs = "uncounted" if self.replayed is None else str(self.replayed)
        return (
            f"{self.setting}: {self.programs} programs, {len(self.failures)} fail, "
            f"{self.fused} with slices fused, {graphs} from graphs, "
            f"worst {self.worst:.2f} of the bound, {self.seconds:.0f} s"
        )


def run(
    setting: str,
    flags: str,
    *,
    first: int,
    count: int,
    workers: int,
    command: Sequence[str] = _WORKER,
) -> Summary:
    """Runs programs number `first` and on, in processes with these XLA flags."""
    begin = time.monotonic()
    flags = f"{_CHEAP} {flags}"
    found = outcomes(range(first, first + count), flags=flags, workers=workers, command=command)
    right = [line for line in found if "error" not in line]
    counted = [line["replayed"] for line in right if line["replayed"] is not None]
    return Summary(
        setting,
        len(found),
        [f"program {x['number']}: {x['error']}" for x in found if "error" in x],
        sum(line["fused"] for line in right),
        sum(counted) if counted else None,
        max((line["worst"] for line in right), default=0.0),
        time.monotonic() - begin,
    )


def outcomes(
    numbers: Sequence[int], *, command: Sequence[str], flags: str = "", workers: int = 1
) -> list[dict[str, Any]]:
    """How each of these went, in processes of a command that calls `work` with its arguments.

    Lines of `work` with an "error" where it failed.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    env = os.environ | {
        "JAX_PLATFORMS": f"{platforms},cpu" if platforms else "",  # the definition runs there
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAXLOWBIT_TUNED": "",
        "PYTHONPATH": os.pathsep.join([*_PATHS, os.environ.get("PYTHONPATH", "")]),
    }
    workers = max(min(workers, len(numbers)), 1)
    shares = [list(numbers[i::workers]) for i in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        return [
            x
            for found in pool.map(lambda mine: _run_share(command, mine, env), shares)
            for x in found
        ]


def _run_share(command: Sequence[str], numbers: list[int], env: Any) -> list[dict[str, Any]]:
    """Runs these programs, one after the other, in as many workers as it takes."""
    found: list[dict[str, Any]] = []
    while numbers:
        lines, died = _run_worker([*command, *map(str, numbers)], env)
        begun = {line["number"]: line["program"] for line in lines if "program" in line}
        ended = [line for line in lines if "program" not in line]
        found += ended
        done = {line["number"] for line in ended}
        lost = [number for number in begun if number not in done]
        if died and not lost and not ended:
            # Not of one program: no other worker would fare better.
            return [*found, *({"number": number, "error": died} for number in numbers)]
        found += [
            {"number": number, "error": f"{died or 'it was not ended'} in\n{begun[number]}"}
            for number in lost
        ]
        numbers = [number for number in numbers if number not in done and number not in lost]
    return found


def _run_worker(command: list[str], env: Any) -> tuple[list[dict[str, Any]], str]:
    """What a worker printed, and how it died, if it did."""
    lines: list[dict[str, Any]] = []
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


def _counter() -> Any:
    """Counts the CUDA calls that were executed; None where the package was built without it.

    `_ffi_counting` is `_ffi` with a counter; it takes its place before the package is imported.
    """
    package = importlib.util.find_spec("jaxlowbit")
    assert package is not None and package.origin is not None
    modules = list(Path(package.origin).parent.glob("_ffi_counting*.so"))
    if not modules:
        return None
    spec = importlib.util.spec_from_file_location("jaxlowbit._ffi_counting", modules[0])
    assert spec is not None and spec.loader is not None
    counting = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(counting)
    if (counter := getattr(counting, "execute_count", None)) is not None:
        sys.modules["jaxlowbit._ffi"] = counting
    return counter


def work(
    numbers: Sequence[int], describe: Callable[[int], str], run: Callable[[int], dict[str, Any]]
) -> None:
    """In a worker: runs each of these, and says on stdout what it runs and how it went.

    Ends after an error that is more than a wrong number: CUDA may not recover from it.
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


def _work(numbers: Sequence[int]) -> None:
    programs, counter = _programs()

    def program(number: int) -> Any:
        return programs.sample(random.Random(number), large=True)

    def run(number: int) -> dict[str, Any]:
        report = programs.check(program(number), runs=_RUNS, executions=counter)
        fused = "dynamic_slice_fusion" in report.text or "dynamic-slice-fusion" in report.text
        return {"worst": report.worst, "fused": fused, "replayed": report.replayed}

    work(numbers, lambda number: repr(program(number)), run)


def _programs() -> tuple[Any, Any]:
    """The module `programs`, and the counter."""
    sys.path[:0] = _PATHS
    counter = _counter()
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
    return importlib.import_module("programs"), counter


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
        # Other programs under each setting.
        first = options.first + i * options.count
        found = run(name, flags, first=first, count=options.count, workers=options.workers)
        print(*found.failures, found, sep="\n", flush=True)
        failed |= bool(found.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
