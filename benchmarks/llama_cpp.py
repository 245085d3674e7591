"""Times a language model on the CPU against llama.cpp, alternating, from one GGUF file.

    python benchmarks/llama_cpp.py MODEL.gguf --peer PYTHON --threads 1 2

PYTHON is an interpreter with the package `llama-cpp-python`, for example in a separate virtual
environment; without --peer only ours is timed. The package compiles llama.cpp during installation:

    python -m venv peer
    CMAKE_ARGS="-DGGML_NATIVE=ON" peer/bin/pip install llama-cpp-python==0.3.36

If the machine disables instructions of its processor (such as AMX), name the available ones
instead: `-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX512=ON` and so on.

Both read random tokens. Our decoding is greedy; llama.cpp receives the tokens and does not sample.
`--clock process_time` measures CPU time, a fair figure on a shared machine if both are limited to
one core (`taskset -c 0`). Otherwise rounds alternate, so that other load affects both alike; the
table lists the best and the median round of each.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jaxlowbit import llm
from jaxlowbit._llm.programs import run
from jaxlowbit._llm.sampling import Sampling

SEED = 0
SHORT = 16  # tokens of the prompt before decoding
WORKER = Path(__file__).parent / "peers/llama_cpp_worker.py"

# (prompt tokens, new tokens) -> seconds for each.
Timed = Callable[[int, int], tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Times a language model on the CPU against llama.cpp."
    )
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--peer", help="a Python interpreter with llama-cpp-python")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of llama.cpp")
    parser.add_argument("--dtype", nargs="+", default=["float32"], help="of our activations")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=["perf_counter", "process_time"], default="perf_counter")
    arguments = parser.parse_args()
    contenders: dict[str, Timed] = {
        f"jaxlowbit, {dtype}": ours(arguments.model, dtype, arguments.clock)
        for dtype in arguments.dtype
    }
    if arguments.peer:
        for threads in arguments.threads:
            name = f"llama.cpp, {threads} thread{'s' if threads > 1 else ''}"
            contenders[name] = peer(arguments.peer, arguments.model, threads, arguments.clock)
    seconds = {name: ([], []) for name in contenders}
    for turn in range(arguments.rounds + 1):
        for name, timed in contenders.items():
            prefill, _ = timed(arguments.prompt, 1)
            _, decode = timed(SHORT, arguments.new)
            if turn > 0:  # the first one compiles
                seconds[name][0].append(prefill)
                seconds[name][1].append(decode)
    print(f"jax {jax.__version__}, {arguments.rounds} rounds; tokens/s, best (median)")
    print(f"{'':24s}{f'prompt of {arguments.prompt}':>18s}{'decode':>18s}")
    for name, (prefill, decode) in seconds.items():
        print(f"{name:24s}{rate(arguments.prompt, prefill):>18s}{rate(arguments.new, decode):>18s}")


def rate(tokens: int, seconds: list[float]) -> str:
    return f"{tokens / min(seconds):.0f} ({tokens / statistics.median(seconds):.0f})"


def ours(path: str, dtype: str, clock: str) -> Timed:
    seconds: Callable[[], float] = getattr(time, clock)
    model = llm.load(path, dtype=dtype)

    def timed(prompt: int, new: int) -> tuple[float, float]:
        tokens = np.random.default_rng(SEED).integers(0, model.config.vocabulary, prompt).tolist()
        start = seconds()
        groups = run(model, [tokens], new, Sampling(), SEED, endless=True)
        next(groups)  # the prompt is read
        middle = seconds()
        for _ in groups:
            pass
        return middle - start, seconds() - middle

    return timed


def peer(python: str, path: str, threads: int, clock: str) -> Timed:
    worker = subprocess.Popen(
        [python, str(WORKER), path, str(threads), str(SEED), clock],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def timed(prompt: int, new: int) -> tuple[float, float]:
        assert worker.stdin is not None and worker.stdout is not None
        print(prompt, new, file=worker.stdin, flush=True)
        answer = worker.stdout.readline().split()
        if len(answer) != 2:
            sys.exit(f"llama.cpp with {threads} threads ended; run {WORKER} by itself to see why.")
        return float(answer[0]), float(answer[1])

    return timed


if __name__ == "__main__":
    main()
