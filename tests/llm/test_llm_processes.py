"""Products and language models over the devices of two processes (`jax.distributed`)."""

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLATFORM

from jaxlowbit import checkpoint, llm, quantize

on_cpu = pytest.mark.skipif(PLATFORM != "cpu", reason="on CPUs; GPUs have a test of their own")

PROMPT = list(range(3, 20))
CONFIG: dict[str, Any] = {
    "layers": 2, "width": 256, "heads": 4, "kv_heads": 2, "head_size": 64, "hidden": 512,
    "vocabulary": 512, "context": 128,
}  # fmt: skip
START = """
import json, os, sys, traceback
rank, address, model = int(sys.argv[1]), sys.argv[2], sys.argv[3]

def fail(*error):  # a usual exit would wait for the other process
    traceback.print_exception(*error)
    os._exit(1)

sys.excepthook = fail
import jax
jax.distributed.initialize(address, num_processes=2, process_id=rank)
import numpy as np
import jaxlowbit as jl
from jaxlowbit import checkpoint, llm

mesh = jax.make_mesh((2,), ("model",))
put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
found = {"devices": [len(jax.devices()), len(jax.local_devices())]}

weight, x = np.load("weight.npy"), np.load("x.npy")
array = jl.quantize(put(weight, "model", None), "int4", shards=(2, 1))
product = jax.jit(lambda x, q: jl.quantized_matmul(x, q, out_sharding=jax.P()))
found["product"] = np.asarray(product(put(x, None, "model"), array), np.float32).tolist()
"""
ON_CPUS = f"""
weight[-1, -1] = np.inf
try:
    jl.quantize(put(weight, "model", None), "int4", shards=(2, 1))
except ValueError as error:
    found["infinity"] = str(error)

def parts(name, array):
    specs = array.partition_spec(mesh, k="model")
    return jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)

saved = checkpoint.load("saved", sharding=parts)["weight"]
found["saved"] = np.asarray(product(put(x, None, "model"), saved), np.float32).tolist()

loaded = llm.load(model, mesh=mesh)
found["tokens"] = llm.generate(loaded, {PROMPT}, max_new_tokens=8).tokens
found["drawn"] = llm.generate(loaded, {PROMPT}, max_new_tokens=8, temperature=1, seed=3).tokens
try:
    llm.save(loaded, f"model{{rank}}")
except ValueError as error:
    found["save"] = str(error)
"""
ON_GPUS = f"""
config = llm.Config("llama", **{CONFIG})
for dtype in ("float32", "bfloat16"):
    made = llm.init(config, "int4", dtype=dtype, mesh=mesh)
    found[dtype] = llm.generate(made, {PROMPT}, max_new_tokens=8).tokens
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import model_files

    return model_files.write_tiny(tmp_path_factory.mktemp("model"))


def make_operands(dtype):
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in ((256, 128), (3, 256)))


@pytest.fixture(scope="module")
def operands():
    return make_operands(np.float32)


def run(program, folder, model, operands, *environments):
    """The results that two processes printed, each with its environment."""
    address = f"localhost:{free_port()}"
    for name, values in zip(("weight", "x"), operands, strict=True):
        np.save(folder / f"{name}.npy", values)
    command = [sys.executable, "-c", START + program + "print(json.dumps(found))"]
    outputs = [(folder / f"out{rank}", folder / f"errors{rank}") for rank in range(2)]
    processes = []
    for rank, (environment, (out, errors)) in enumerate(zip(environments, outputs, strict=True)):
        with open(out, "w") as stdout, open(errors, "w") as stderr:
            process = subprocess.Popen(
                [*command, str(rank), address, model],
                env=os.environ | environment,
                cwd=folder,
                stdout=stdout,
                stderr=stderr,
            )
        processes.append(process)
    wait_for_all(processes)
    codes = [process.returncode for process in processes]
    assert codes == [0, 0], "\n\n".join(errors.read_text()[-3000:] for _, errors in outputs)
    return [json.loads(out.read_text().splitlines()[-1]) for out, _ in outputs]


def wait_for_all(processes, seconds=300):
    """Waits for the processes; if one fails, ends the others, which would wait for it."""
    end = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > end or any(process.returncode for process in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def found(model, operands, tmp_path_factory):
    cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    folder = tmp_path_factory.mktemp("processes")
    checkpoint.save(folder / "saved", {"weight": quantize(operands[0], "int4", shards=(2, 1))})
    return run(ON_CPUS, folder, model, operands, cpu, cpu)


@on_cpu
def test_each_process_has_a_device_and_the_same_results(found):
    assert found[0]["devices"] == [2, 1]
    assert found[0] == found[1]


@on_cpu
def test_products(found, operands):
    weight, x = operands
    want = x @ quantize(weight, "int4", shards=(2, 1)).dequantize()
    np.testing.assert_allclose(found[0]["product"], want, atol=1e-4)
    assert found[0]["saved"] == found[0]["product"]


@on_cpu
@pytest.mark.parametrize(("name", "options"), [("tokens", {}), ("drawn", {"temperature": 1})])
def test_tokens_of_one_process(found, model, name, options):
    one = llm.generate(llm.load(model), PROMPT, max_new_tokens=8, seed=3, **options)
    assert found[0][name] == one.tokens


@on_cpu
def test_errors_are_sentences(found):
    assert found[0]["infinity"].startswith(
        "quantize: weight has 1 values that are NaN or infinite;"
    )
    assert found[0]["save"].startswith("save: embedding has parts on devices of other processes;")


@pytest.mark.gpu
def test_gpus_of_two_processes(tmp_path):
    """float16 products run on our kernels. In float32, one process gives the same tokens."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    if len(devices) < 2 or len(jax.devices("cuda")) < 2:
        pytest.skip("needs two GPUs")
    operands = make_operands(np.float16)
    both = [
        {"CUDA_VISIBLE_DEVICES": device, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        for device in devices[:2]
    ]
    found = run(ON_GPUS, tmp_path, "", operands, *both)
    assert found[0] == found[1] and found[0]["devices"] == [2, 1]
    weight, x = operands
    dequantized = np.asarray(quantize(weight, "int4", shards=(2, 1)).dequantize(), np.float32)
    np.testing.assert_allclose(found[0]["product"], x.astype(np.float32) @ dequantized, atol=0.05)
    one = llm.init(llm.Config("llama", **CONFIG), "int4", dtype=jnp.float32)
    assert found[0]["float32"] == llm.generate(one, PROMPT, max_new_tokens=8).tokens
    assert len(found[0]["bfloat16"]) == 8
