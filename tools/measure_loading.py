"""Measures memory and time of quantizing, loading and starting a language model; prints JSON.

    python tools/measure_loading.py FOLDER [--layers 16] [--format int4-g128] [--model llama3-8b]

FOLDER gets about 8 GB of random bfloat16 weights in safetensors (half of the layers of Llama 3 8B),
and packed weights of the whole model. Steps, each in a separate process:

1. `write`: the float weights, without a tokenizer in JAX.
2. `quantize`: `llm.load` of the floats with a data-free format, then `llm.save`. Samples the
   anonymous memory of the host (RssAnon) and reads the peak of the device. The bound is the packed
   weights plus 1.5 times the largest layer.
3. `pack`: a whole model of random packed weights, written by `llm.save`.
4. `first`, `second`: reads its files and loads it, each with a cold and a warm page cache, and
   measures the time from the cold load to the first token; in the second process, its programs
   are compiled. The bounds are 1.3 times the time of reading, and 3 seconds.

A table of the values and their bounds follows the JSON.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np


class HostMemory:
    """The peak of anonymous memory of this process, in bytes, sampled every 2 ms."""

    def __enter__(self) -> "HostMemory":
        self.start = self.peak = _anonymous()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._end.wait(0.002):
            self.peak = max(self.peak, _anonymous())

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        self.peak = max(self.peak, _anonymous())


def _anonymous() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def _config(options: argparse.Namespace, layers: int | None = None) -> Any:
    from jaxlowbit._llm.bench import SHAPES

    config = SHAPES[options.model]
    return config if layers is None else config.replace(layers=min(layers, config.layers))


def _names(config: Any) -> dict[str, str]:
    """Names of transformers by ours."""
    from jaxlowbit._llm.architectures import ARCHITECTURES

    names = ARCHITECTURES[config.architecture].huggingface
    assert names is not None
    theirs = {ours: name for name, ours in reversed([*names.tensors.items()])}
    found = {}
    for ours in config.shapes():
        *_, own = ours.split(".")
        layer = ours.split(".")[1] if ours.startswith("layers.") else ""
        name = theirs[f"layers.N.{own}" if layer else own].replace(".N.", f".{layer}.")
        found[ours] = name if ours == "head" else f"model.{name}"
    return found


def write(options: argparse.Namespace) -> dict[str, Any]:
    """Writes a folder of random bfloat16 weights, a shard for each layer."""
    import ml_dtypes
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from jaxlowbit.checkpoint._saved import write as write_shards

    folder, config = Path(options.folder) / "floats", _config(options, options.layers)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shapes = config.shapes()
    # One block of random numbers for all matrices: making 8 GB of them would take minutes.
    pool = np.random.default_rng(0).normal(0, 0.02, 2**24).astype(ml_dtypes.bfloat16)
    tensors = {}
    for ours, name in _names(config).items():
        shape = shapes[ours][::-1]
        size = int(np.prod(shape))
        tensors[name] = np.resize(pool, size).reshape(shape) if len(shape) > 1 else None
        if tensors[name] is None:
            tensors[name] = np.ones(shape, ml_dtypes.bfloat16)
    began = time.perf_counter()
    write_shards(folder, tensors, own=False)
    values = {
        "model_type": config.architecture,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_base,
        "tie_word_embeddings": config.tied_head,
        "hidden_act": "silu",
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    nbytes = sum(array.nbytes for array in tensors.values())
    return {"bytes": nbytes, "seconds": time.perf_counter() - began}


def quantize(options: argparse.Namespace) -> dict[str, Any]:
    import jax

    from jaxlowbit import llm

    source, target = (Path(options.folder) / name for name in ("floats", "quantized"))
    jax.block_until_ready(jax.numpy.ones(8) + 1)  # starts the backend
    began = time.perf_counter()
    with HostMemory() as host:
        model = llm.load(source, format=options.format, dtype="bfloat16", progress=False)
        loaded = time.perf_counter()
        llm.save(model, target, overwrite=True)
    ended = time.perf_counter()
    packed = model.report.nbytes
    sizes: dict[str, int] = {}
    for tensor in model.report.tensors:
        layer = ".".join(tensor.name.split(".")[:2])
        sizes[layer] = sizes.get(layer, 0) + tensor.nbytes_stored
    largest = max(sizes.values())
    bound = packed + 1.5 * largest
    device = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    grown = host.peak - host.start
    return {
        "device": jax.devices()[0].device_kind,
        "packed_bytes": packed,
        "largest_layer_bytes": largest,
        "bound_bytes": bound,
        "host_peak_bytes": grown,
        "host_of_bound": grown / bound,
        "device_peak_bytes": device,
        "device_of_bound": None if device is None else device / bound,
        "load_seconds": loaded - began,
        "save_seconds": ended - loaded,
    }


def pack(options: argparse.Namespace) -> dict[str, Any]:
    from jaxlowbit import llm

    target = Path(options.folder) / "packed"
    model = llm.init(_config(options), options.format)
    began = time.perf_counter()
    llm.save(model, target, overwrite=True)
    return {"seconds": time.perf_counter() - began}


def start(options: argparse.Namespace) -> dict[str, Any]:
    import jax

    from jaxlowbit import llm
    from jaxlowbit._llm.command import keep_programs

    keep_programs()
    path = Path(options.folder) / "packed"
    jax.block_until_ready(jax.numpy.ones(8) + 1)

    def loaded() -> tuple[float, Any]:
        began = time.perf_counter()
        model = llm.load(path, progress=False)
        jax.block_until_ready([x.get_value() for x in _variables(model)])
        return time.perf_counter() - began, model

    _drop_pages(path)
    cold_read = _read(path)
    _drop_pages(path)
    cold_load, model = loaded()
    began = time.perf_counter()
    next(iter(llm.stream(model, list(range(1, 65)), max_new_tokens=1)))
    first = time.perf_counter() - began
    del model
    warm_read, warm_load = min(_read(path) for _ in range(3)), min(loaded()[0] for _ in range(2))
    return {
        "file_bytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
        "cold_read_seconds": cold_read,
        "cold_load_seconds": cold_load,
        "cold_load_of_read": cold_load / cold_read,
        "warm_read_seconds": warm_read,
        "warm_load_seconds": warm_load,
        "warm_load_of_read": warm_load / warm_read,
        "first_token_seconds": first,
    }


def _variables(model: Any) -> Any:
    from flax import nnx

    nodes = (node for _, node in nnx.iter_graph(model.decoder))
    return [node for node in nodes if isinstance(node, nnx.Variable)]


def _drop_pages(path: Path) -> None:
    """Removes the files of a folder from the page cache."""
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path) -> float:
    """The seconds of reading the files of a folder, which are in the page cache afterwards."""
    buffer, began = memoryview(bytearray(2**24)), time.perf_counter()
    for file in path.glob("*.safetensors"):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - began


STEPS = {"write": write, "quantize": quantize, "pack": pack, "first": start, "second": start}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, default=16, help="of the float model (%(default)s)")
    parser.add_argument("--format", default="int4-g128")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(STEPS[options.step](options)))
        return
    environment = dict(os.environ)
    programs = tempfile.mkdtemp()
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", programs)
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    found = {}
    for step in STEPS:
        command = [sys.executable, __file__, *sys.argv[1:], "--step", step]
        began = time.perf_counter()
        output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        found[step] = json.loads(output.stdout.splitlines()[-1])
        found[step]["process_seconds"] = time.perf_counter() - began
        print(step, json.dumps(found[step]), file=sys.stderr, flush=True)
        if step == "quantize":
            shutil.rmtree(Path(options.folder) / "floats")
    print(json.dumps(found, indent=1))
    print("\n".join(_table(found)))


def _table(found: dict[str, Any]) -> list[str]:
    """The measured values with their bounds."""
    memory, last = found["quantize"], found["second"]
    bound = f"at most {memory['bound_bytes'] / 1e9:.2f}: packed + 1.5 x largest layer"
    device = memory["device_peak_bytes"]
    rows = [
        ("packed weights, GB", memory["packed_bytes"] / 1e9, ""),
        ("largest layer, GB", memory["largest_layer_bytes"] / 1e9, ""),
        ("peak anonymous host memory, GB", memory["host_peak_bytes"] / 1e9, bound),
        ("peak device memory, GB", None if device is None else device / 1e9, bound),
        ("packed model, GB", last["file_bytes"] / 1e9, ""),
        ("reading it, cold, s", last["cold_read_seconds"], ""),
        ("loading it, cold, s", last["cold_load_seconds"], ""),
        ("loading / reading, cold", last["cold_load_of_read"], "at most 1.3"),
        ("loading / reading, warm", last["warm_load_of_read"], ""),
        ("first token after loading, s", last["first_token_seconds"], "at most 3"),
    ]
    return [
        f"{name:32} {'unknown' if value is None else f'{value:.3f}':>8}  {limit}".rstrip()
        for name, value, limit in rows
    ]


if __name__ == "__main__":
    main()
