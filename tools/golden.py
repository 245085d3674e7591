"""Compares result bits with golden hashes, or with another build.

    python tools/golden.py                        # with the file of this machine in GOLDEN
    python tools/golden.py FILE                   # with this file, by its CPU instruction set
    python tools/golden.py --write FILE --jobs 8
    python tools/golden.py --against SITE         # whole programs, by this build and by another
    python tools/golden.py --against SITE --problems --only "^block"

`tests/support/golden_problems.py` lists the problems. A file has two short hashes for each,
`operands:results`, and the versions that made them. `tests/support/golden_programs.py` lists the
whole programs. Their bits also depend on XLA, so both builds run them here. SITE is a folder with
the other `jaxlowbit`; `--tool` names its `tools/golden.py` if public names differ.

Every problem runs twice; one whose results differ is an error. The result of a problem that raises
is the first line of the error. Processes that die are replaced. Prints each difference, and the
exit status is 1 if there is one. XLA's autotuning and tables of measured choices are off.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests/data/golden"
ERROR = "!"  # first character of the result of a problem that raised
_PATHS = [str(ROOT / "tests/support"), str(ROOT / "tools")]
sys.path[:0] = _PATHS
run_programs = importlib.import_module("run_programs")

# No autotuning on GPUs; on CPUs, code of XLA that every x86 machine with AVX2 can run.
_FLAGS = "--xla_gpu_autotune_level=0"
if platform.machine() == "x86_64":
    _FLAGS += " --xla_cpu_max_isa=AVX2"
_ISA = "JAXLOWBIT_CPU_ISA"

Hashes = dict[str, str]


# --- workers --------------------------------------------------------------------------------------


def listed(programs: bool) -> tuple[Any, ...]:
    """The problems for this machine, or the whole programs."""
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_num_cpu_devices", 8)
    if jax.default_backend() == "cpu":
        jax.config.update("jax_disable_most_optimizations", True)  # compiles faster
    if programs:
        return importlib.import_module("golden_programs").programs()
    backend = {"cpu": "cpu", "gpu": "cuda"}[jax.default_backend()]
    return importlib.import_module("golden_problems").problems(backend)


def about() -> dict[str, Any]:
    """Versions and hardware that may change bits, and the folder of this build."""
    import jax

    import jaxlowbit
    from jaxlowbit._backends.extension import BUILD, ffi

    device, build = jax.devices()[0], BUILD
    found = {
        "platform": device.platform,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "numpy": importlib.metadata.version("numpy"),
        "site": str(Path(str(jaxlowbit.__file__)).parents[1]),
    }
    if device.platform == "cpu":
        return found | {"cpu_isa": build["cpu_isa"][0]}
    family = f"sm_{device.compute_capability.replace('.', '')}"
    return found | {
        "card": device.device_kind,
        "family": family,
        "nvcc": build["cuda_compiler"],
        "nvrtc": ffi.toolchain()["compiler"] if build["cuda"] else "",
    }


def _work(numbers: Sequence[int], programs: bool) -> None:
    chosen = listed(programs)
    refused = {} if programs else _forced(chosen)

    def run(number: int) -> dict[str, Any]:
        problem = chosen[number]
        if problem.name in refused:
            return {"hash": f"{ERROR}cannot run: {refused[problem.name]}"}
        try:
            return {"hash": problem.compute()}
        except AssertionError:
            raise
        except Exception as error:
            if "CUDA_ERROR" in str(error):
                raise  # CUDA does not recover; another process computes the rest
            line = next(iter(str(error).splitlines()), "")
            return {"hash": f"{ERROR}{type(error).__name__}: {line[:200]}"}

    run_programs.work(numbers, lambda number: chosen[number].name, run)


def _forced(chosen: Any) -> dict[str, str]:
    import jax

    from jaxlowbit._tuning import devices

    if jax.default_backend() != "gpu":
        return {}
    return importlib.import_module("golden_problems").force(chosen, devices.first().facts)


# --- runs -----------------------------------------------------------------------------------------


class Build:
    """A build of the package: its worker, environment and list of problems."""

    def __init__(self, tool: Path, site: str | None, programs: bool) -> None:
        self.command = [sys.executable, str(tool), *(["--programs"] if programs else [])]
        self.site = site
        found = json.loads(self._ask("--list"))
        self.about: dict[str, Any] = found["about"]
        self.names: list[str] = found["names"]

    def _ask(self, question: str) -> str:
        env = dict(os.environ) | {"JAXLOWBIT_TUNED": ""}
        paths = [*_PATHS, self.site or os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        run = subprocess.run([*self.command, question], env=env, stdout=subprocess.PIPE, text=True)
        if run.returncode != 0:
            raise SystemExit(f"the problems of {self.site or 'this build'} cannot be listed")
        return run.stdout.splitlines()[-1]

    def hashes(self, names: Sequence[str], jobs: int) -> Hashes:
        """Results by name, with progress on stderr."""
        numbers = [i for i, name in enumerate(self.names) if name in set(names)]
        lines_done: list[Any] = []

        def done(line: Any) -> None:
            lines_done.append(line)
            if len(lines_done) % 50 == 0:
                print(f"{len(lines_done)} of {len(numbers)}", file=sys.stderr, flush=True)

        outer = os.environ.get("PYTHONPATH")
        if self.site:
            os.environ["PYTHONPATH"] = self.site
        try:
            lines = run_programs.outcomes(
                numbers,
                command=[*self.command, "--worker"],
                flags=_FLAGS,
                workers=jobs,
                report=lambda line: print(_error(line), file=sys.stderr, flush=True),
                done=done,
            )
        finally:
            if outer is not None:
                os.environ["PYTHONPATH"] = outer
        found = {self.names[x["number"]]: x.get("hash") or ERROR + _error(x) for x in lines}
        return dict(sorted(found.items()))


def _error(line: Mapping[str, Any]) -> str:
    return (str(line["error"]).splitlines() or [""])[0][:200]


def differences(want: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """A line for each result that differs. Errors of one type count as equal: their wording may
    change."""
    lines = []
    for name, old in want.items():
        new = found.get(name)
        if new is None:
            lines.append(f"{name}: there is no such problem any more")
        elif _bits(old) != _bits(new):
            operands = [x.partition(":")[0] for x in (old, new)]
            same = operands[0] == operands[1] or any(x.startswith(ERROR) for x in (old, new))
            why = "" if same else " (the operands differ)"
            lines.append(f"{name}: {new}, and it was {old}{why}")
    return lines


def _bits(result: str) -> str:
    return result.partition(":")[0] if result.startswith(ERROR) else result


def unequal(found: Mapping[str, str]) -> list[str]:
    """Problems with different results in two runs of one build."""
    return [f"{name}: {x[1:]}" for name, x in found.items() if x.startswith(f"{ERROR}two runs")]


# --- files ----------------------------------------------------------------------------------------


def path_for(about: Mapping[str, Any]) -> Path:
    """The file of a machine such as this one."""
    kind = f"cpu-{about['cpu_isa']}" if about["platform"] == "cpu" else f"cuda-{about['family']}"
    return GOLDEN / f"{kind}.json"


def read(path: Path) -> tuple[dict[str, Any], Hashes]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["about"], found["hashes"]


def write(path: Path, about: Mapping[str, Any], hashes: Hashes) -> None:
    kept = {name: value for name, value in about.items() if name != "site"}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"about": kept, "hashes": hashes}, indent=0)
    path.write_text(text + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="golden results to compare with")
    parser.add_argument(
        "--write", type=Path, help="write results to this file; with --only, replace these in it"
    )
    parser.add_argument("--against", metavar="SITE", help="a folder with another jaxlowbit")
    parser.add_argument(
        "--tool", type=Path, default=Path(__file__), help="tools/golden.py of the other build"
    )
    parser.add_argument("--problems", action="store_true", help="with --against: not the programs")
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--isa", help="an instruction set of the CPU kernels")
    parser.add_argument("--programs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs="*", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list or options.worker is not None:
        if options.worker is not None:
            _work(options.worker, options.programs)
        else:
            names = [problem.name for problem in listed(options.programs)]
            print(json.dumps({"about": about(), "names": names}))
        return 0
    isa = options.isa
    if options.file is not None:
        isa = isa or read(options.file)[0].get("cpu_isa")
    if isa is not None:
        os.environ[_ISA] = isa
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if options.against is not None:
        return _against(options)
    build = Build(Path(__file__), None, False)
    if isa is not None and build.about.get("cpu_isa") != isa:
        print(f"this CPU does not run {isa}", file=sys.stderr)
        return 2
    chosen = [name for name in build.names if re.search(options.only, name)]
    if options.write is not None:
        found = build.hashes(chosen, options.jobs)
        kept = read(options.write)[1] if options.only and options.write.exists() else {}
        kept = {name: value for name, value in kept.items() if name in build.names}
        write(options.write, build.about, dict(sorted((kept | found).items())))
        errors = [f"{name}: {x}" for name, x in found.items() if x.startswith(ERROR)]
        print(*errors, f"{len(found)} results, {len(errors)} of them errors", sep="\n")
        return int(bool(unequal(found)))
    made, want = read(options.file or path_for(build.about))
    want = {name: value for name, value in want.items() if re.search(options.only, name)}
    found = build.hashes([name for name in chosen if name in want], options.jobs)
    for key, value in made.items():
        if build.about.get(key) != value:
            print(f"{key} is {build.about.get(key)}, and was {value}", file=sys.stderr)
    return _report(differences(want, found), len(want), unequal(found))


def _against(options: argparse.Namespace) -> int:
    programs = not options.problems
    ours = Build(Path(__file__), None, programs)
    other = Build(options.tool, str(Path(options.against).resolve()), programs)
    if ours.about["site"] == other.about["site"]:
        print(f"both builds are that of {ours.about['site']}", file=sys.stderr)
        return 2
    results = []
    for build in (other, ours):
        chosen = [name for name in build.names if re.search(options.only, name)]
        results.append(build.hashes(chosen, options.jobs))
    want, found = results
    errors = [f"{name}: {x}" for name, x in found.items() if x.startswith(ERROR)]
    if errors:
        print(*errors, sep="\n", file=sys.stderr)
    return _report(differences(want, found), len(want), unequal(found) + unequal(want))


def _report(different: list[str], count: int, unequal: list[str]) -> int:
    for line in different + unequal:
        print(line)
    print(f"{count} results, {len(different)} differ, {len(unequal)} are not the same twice")
    return int(bool(different or unequal or not count))


if __name__ == "__main__":
    sys.exit(main())
