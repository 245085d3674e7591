"""Times llama.cpp (the package `llama-cpp-python`), as `benchmarks/llama_cpp.py` asks line by line.

    python benchmarks/peers/llama_cpp_worker.py MODEL.gguf THREADS SEED CLOCK

Each input line, `PROMPT NEW`, contains the numbers of prompt tokens and of new tokens. Prints a
line with the seconds of both phases, by a clock of the module `time`.
"""

import sys
import time
from importlib import import_module

import numpy as np

path, threads, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
clock = getattr(time, sys.argv[4])
model = import_module("llama_cpp").Llama(
    path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False
)
for line in sys.stdin:
    prompt, new = map(int, line.split())
    tokens = np.random.default_rng(seed).integers(0, model.n_vocab(), prompt + new).tolist()
    model.reset()
    start = clock()
    model.eval(tokens[:prompt])
    middle = clock()
    for token in tokens[prompt:]:
        model.eval([token])
    print(middle - start, clock() - middle, flush=True)
