"""The installed package: import time, side effects of importing, and errors."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import jaxlowbit
from jaxlowbit._backends import extension
from jaxlowbit._requirements import require

PACKAGE = Path(jaxlowbit.__file__).parent


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


# Imports JAX and then runs each line, a program, in a fork.
RUNNER = """
import json, os, sys, tempfile, traceback, warnings
import jax, jax.numpy

warnings.filterwarnings("ignore", "os.fork")  # no thread of JAX runs before it is used
warnings.filterwarnings("ignore", "This process")

def run(code):
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    try:
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if not (child := os.fork()):
            warnings.resetwarnings()
            status = run(json.loads(line))
            sys.stdout.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = [status, *(os.pread(f.fileno(), 1 << 20, 0).decode() for f in (out, err))]
    print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[str], Result]]:
    """Runs a program in a process with JAX imported and the installed package on its path."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(PACKAGE.parent)}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", RUNNER]
    with subprocess.Popen(command, text=True, env=environment, **pipes) as runner:

        def one(code: str) -> Result:
            print(json.dumps(textwrap.dedent(code)), file=runner.stdin, flush=True)
            assert runner.stdout is not None
            return Result(*json.loads(runner.stdout.readline()))

        yield one


@pytest.fixture(scope="module")
def output(run: Callable[[str], Result]) -> Callable[[str], str]:
    """The output of a program, which must succeed."""

    def one(code: str) -> str:
        result = run(code)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return one


def test_import_is_quick(output):
    """Importing adds less than 0.3 s to `import jax`."""
    code = """
        import time
        start = time.perf_counter()
        import jaxlowbit
        print(time.perf_counter() - start)
    """
    seconds = [float(output(code)) for _ in range(5)]
    assert statistics.median(seconds) < 0.3, seconds


def test_import_initialises_no_backend_and_imports_no_flax(output):
    code = """
        import sys, warnings
        warnings.simplefilter("error")
        import jaxlowbit
        from jax._src import xla_bridge
        print(xla_bridge.backends_are_initialized(), "flax" in sys.modules)
    """
    assert output(code).split() == ["False", "False"]


def test_public_names(output):
    code = """
        import jaxlowbit
        print(*sorted(name for name in vars(jaxlowbit) if not name.startswith("_")))
    """
    names = (
        "DISABLED_EXPORT_CHECKS FP8 Format INT4 INT8 MXFP4 MXFP8 NF4 NVFP4 QuantizedActivations "
        "QuantizedArray UINT4 UINT8 check_layout_version explain integer_matmul quantize "
        "quantize_activations quantized_block quantized_glu "
        "quantized_matmul quantized_matmuls quantized_mlp quantized_moe quantized_ragged_dot "
        "quantizers scan supported_backends tune"
    )
    assert output(code).split() == names.split()


def test_version_matches_the_distribution():
    assert jaxlowbit.__version__ == metadata.version("jaxlowbit")


def test_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_info_reports_the_build_and_the_devices():
    report = subprocess.run(
        [sys.executable, "-m", "jaxlowbit", "info"], capture_output=True, text=True, timeout=300
    )
    assert report.returncode == 0, report.stderr
    assert re.search(r"jaxlowbit +\d+\.\d+\.\d+, Python 3", report.stdout)
    assert re.search(r"jax +\d+\.\d+\.\d+.*, jaxlib \d+", report.stdout)
    assert re.search(r"custom-call API +built for 0\.3; .* has 0\.\d+", report.stdout)
    assert re.search(r"CPU kernels +\w+", report.stdout)
    assert re.search(r"CUDA kernels +\w+", report.stdout)
    assert re.search(r"device 0 .*(cpu|sm_\d)", report.stdout)


def test_custom_calls_of_the_cpu_are_there():
    assert extension.UNAVAILABLE["cpu"] is None


# --- errors ---------------------------------------------------------------------------------------

OTHER_RUNTIME = """
    import pathlib, sys, tempfile, warnings
    import jax, jax.numpy as jnp

    include = pathlib.Path(tempfile.mkdtemp())
    header = include / "xla/ffi/api/c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR {major}\\n#define XLA_FFI_API_MINOR {minor}\\n")
    jax.ffi.include_dir = lambda: str(include)
    registered = []
    jax.ffi.register_ffi_target = lambda *args, **kwargs: registered.append(args)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import jaxlowbit
    print("warnings:", *(f"{{w.category.__name__}}: {{w.message}}" for w in caught))
    print("registered:", len(registered))
    rhs = jaxlowbit.quantize(jnp.eye(64), jaxlowbit.INT8)
    print("product:", float((jnp.ones((3, 64)) @ rhs).sum()))
    try:
        jaxlowbit.quantized_matmul(jnp.ones((3, 64)), rhs, backend="cpu")
    except ValueError as error:
        print("error:", error)
"""


@pytest.mark.parametrize(("major", "minor"), [(0, 2), (1, 0), (1, 3)])
def test_another_runtime_is_not_modified(major, minor, output):
    """Registering would break XLA there, so the package does not; products still work."""
    found = output(OTHER_RUNTIME.format(major=major, minor=minor))
    assert re.search(
        rf"warnings: RuntimeWarning: jaxlowbit: the installed jaxlib speaks custom-call API "
        rf"{major}\.{minor} and this build needs 0\.3; install jax .*\. Until then products run "
        r"through the slower definition\.\n",
        found,
    )
    assert "registered: 0\n" in found
    assert "product: 192.0\n" in found
    assert re.search(r"error: .*backend 'cpu' cannot compute .* custom-call API", found)


@pytest.mark.parametrize("minor", [3, 9])
def test_newer_runtimes_are_served(minor, output):
    found = output(OTHER_RUNTIME.format(major=0, minor=minor).split("rhs =")[0])
    assert "warnings:\n" in found
    assert re.search(r"registered: (2|4)\n", found)


def test_importing_a_source_tree_raises(tmp_path, run):
    skip = shutil.ignore_patterns("_ffi*", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "jaxlowbit", ignore=skip)
    result = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import jaxlowbit")
    assert result.returncode != 0
    assert re.search(
        r"ImportError: jaxlowbit: the compiled module jaxlowbit\._ffi is missing, so this is a "
        r"source tree\. Install the package \(pip install \.\) and import it from another folder\.",
        result.stderr,
    )


AN_OLDER_PACKAGE = """
    import importlib.metadata
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "{found}" if name == "{package}" else version(name)
    import {module}
"""


@pytest.mark.parametrize(
    ("module", "package", "found", "oldest"),
    [
        ("jaxlowbit", "jax", "0.9.2", "0.10"),
        ("jaxlowbit.nnx", "flax", "0.11.2", "0.12"),
        ("jaxlowbit.linen", "flax", "0.11.2", "0.12"),
        ("jaxlowbit.llm", "flax", "0.11.2", "0.12"),
    ],
)
def test_packages_that_are_too_old_raise(module, package, found, oldest, run):
    result = run(AN_OLDER_PACKAGE.format(module=module, package=package, found=found))
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1] == (
        f"ImportError: jaxlowbit: {package} is {found}, but {oldest} or newer is needed; "
        f'pip install --upgrade "{package}>={oldest}".'
    )


@pytest.mark.parametrize("found", ["0.10.0", "0.10.0rc1", "0.12.0.1", "0.13.0.dev3+g1", "1.0"])
def test_newer_versions_are_taken(found, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: found)
    require("jax")


def test_a_package_that_is_missing_is_named(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    require("jax")  # importable, but built without metadata
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = r"flax is not installed, but 0\.12 or newer is needed; pip install"
    with pytest.raises(ModuleNotFoundError, match=message):
        require("flax")
