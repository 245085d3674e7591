"""Products and language models over the devices of two processes (`jax.distributed`)."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from helpers import PLATFORM

for package in ("gguf", "jinja2", "safetensors", "tokenizers", "tqdm"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import model_files  # noqa: E402

from jaxlowbit import llm, quantize  # noqa: E402

pytestmark = pytest.mark.skipif(
    PLATFORM != "cpu", reason="both processes would take the memory of one GPU"
)

PROMPT = list(range(3, 20))
PROGRAM = f"""
import json, sys
rank, address, model = int(sys.argv[1]), sys.argv[2], sys.argv[3]
import jax
jax.distributed.initialize(address, num_processes=2, process_id=rank)
import numpy as np
import jaxlowbit as jl
from jaxlowbit import llm

mesh = jax.make_mesh((2,), ("model",))
put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
found = {{"devices": [len(jax.devices()), len(jax.local_devices())]}}

weight, x = np.load("weight.npy"), np.load("x.npy")
array = jl.quantize(put(weight, "model", None), "int4", shards=(2, 1))
product = jax.jit(lambda x, q: jl.quantized_matmul(x, q, out_sharding=jax.P()))
found["product"] = np.asarray(product(put(x, None, "model"), array)).tolist()

weight[-1, -1] = np.inf
try:
    jl.quantize(put(weight, "model", None), "int4", shards=(2, 1))
except ValueError as error:
    found["infinity"] = str(error)

loaded = llm.load(model, mesh=mesh)
found["tokens"] = llm.generate(loaded, {PROMPT}, max_new_tokens=8).tokens
found["drawn"] = llm.generate(loaded, {PROMPT}, max_new_tokens=8, temperature=1, seed=3).tokens
try:
    llm.save(loaded, f"saved{{rank}}")
except ValueError as error:
    found["save"] = str(error)
print(json.dumps(found))
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_files.write_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in ((256, 128), (3, 256)))


@pytest.fixture(scope="module")
def found(model, operands, tmp_path_factory):
    """The results that each process printed."""
    folder, address = tmp_path_factory.mktemp("processes"), f"localhost:{free_port()}"
    for name, values in zip(("weight", "x"), operands, strict=True):
        np.save(folder / f"{name}.npy", values)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    run = [sys.executable, "-c", PROGRAM]
    processes = [
        subprocess.Popen(
            [*run, str(rank), address, model],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, printed, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in printed]


def test_each_process_has_a_device_and_the_same_results(found):
    assert found[0]["devices"] == [2, 1]
    assert found[0] == found[1]


def test_products(found, operands):
    weight, x = operands
    want = x @ quantize(weight, "int4", shards=(2, 1)).dequantize()
    np.testing.assert_allclose(found[0]["product"], want, atol=1e-4)


@pytest.mark.parametrize(("name", "options"), [("tokens", {}), ("drawn", {"temperature": 1})])
def test_tokens_of_one_process(found, model, name, options):
    one = llm.generate(llm.load(model), PROMPT, max_new_tokens=8, seed=3, **options)
    assert found[0][name] == one.tokens


def test_errors_are_sentences(found):
    assert found[0]["infinity"].startswith(
        "quantize: weight has 1 values that are NaN or infinite;"
    )
    assert found[0]["save"].startswith("save: embedding has parts on devices of other processes;")
