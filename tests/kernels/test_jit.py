"""JIT compilation of kernels: the compiler and the cache of its binaries. Needs no GPU."""

import functools
import json
import os
import random
import re
import shutil
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax.numpy as jnp
import pytest
import wgmma_hazards

from jaxlowbit import NF4, Format
from jaxlowbit._backends import extension, instances, registry
from jaxlowbit._backends.extension import BUILD, ffi
from jaxlowbit._command import main
from jaxlowbit._tuning.info import report

try:
    PACKAGE = metadata.distribution("nvidia-cuda-nvrtc")
except metadata.PackageNotFoundError:
    PATHS = []
else:
    PATHS = [str(PACKAGE.locate_file("nvidia/cu13/lib/libnvrtc.so.13"))]
NONE = "jaxlowbit::ZeroKind::kNone"
HALF = "__half, __half"
STAGES = "jaxlowbit::sm90_stream::LhsPath::kStages"
INSTANCES = {
    "sm80": f"jaxlowbit::sm80::QmmSm80Kernel<jaxlowbit::sm80::Instance<{HALF}, 16, 4>>",
    "sm80_transposed": "jaxlowbit::sm80::QmmSm80TransposedKernel"
    f"<jaxlowbit::sm80::Instance<{HALF}, 16, 4>>",
    "sm90_stream": "jaxlowbit::sm90_stream::QmmSm90StreamKernel"
    f"<jaxlowbit::sm90_stream::Instance<{HALF}, {NONE}, 8, 4, 2, {STAGES}>>",
    "sm90": f"jaxlowbit::sm90::QmmSm90Kernel<jaxlowbit::sm90::Instance<{HALF}, {NONE}, 4, 2>>",
}
ROUNDS = (
    "jaxlowbit::sm90_stream::QmmSm90StreamKernel<jaxlowbit::sm90_stream::Instance"
    f"<__nv_bfloat16, float, {NONE}, 8, 4, 2, jaxlowbit::sm90_stream::LhsPath::kRounds>>"
)
SMALL = [("sm80_transposed", INSTANCES["sm80_transposed"])]  # compiles in the shortest time

pytestmark = pytest.mark.skipif(not BUILD["cuda"], reason="this build has no CUDA kernels")

# Runs in a separate process, because a process looks for the compiler and its cache only once.
# Imports the compiled module without JAX, in a twentieth of the time.
PROGRAM = f"""
import json, sys
sys.path.append({str(Path(ffi.__file__).parent)!r})
import _ffi as ffi
paths, instances, architecture = json.loads(sys.argv[1])
if paths:
    ffi.set_nvrtc_paths(paths)
results = ffi.compile([tuple(each) for each in instances], architecture)
for result in results:
    result["cubin"] = result["cubin"].hex()
print(json.dumps([ffi.toolchain(), results]))
"""


def start(cache, instances, *, architecture="90a", paths=PATHS, **env):
    given = json.dumps([paths, instances, architecture])
    env = os.environ | {"JAXLOWBIT_CACHE_DIR": str(cache)} | env
    command = [sys.executable, "-P", "-c", PROGRAM, given]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def outcome(process):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, process.returncode
    return json.loads(out)


def compiled(cache, instances=SMALL, **options):
    toolchain, results = outcome(start(cache, instances, **options))
    return toolchain, results


@pytest.fixture(scope="session")
def nvrtc(tmp_path_factory):
    toolchain, _ = compiled(tmp_path_factory.mktemp("cache"), [])
    if not PATHS and toolchain["error"]:
        pytest.skip(toolchain["error"])
    assert not toolchain["error"]
    return toolchain


def files(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*"))


@pytest.fixture(scope="module")
def filled(nvrtc, tmp_path_factory):
    """A read-only cache with one instance, and the instance."""
    cache = tmp_path_factory.mktemp("filled")
    _, (right,) = compiled(cache)
    return cache, right


@pytest.fixture(scope="module")
def every(nvrtc, tmp_path_factory):
    """A cache of an instance of each family, in the build if it has one, and of the way `kRounds`;
    the instances; the results."""
    cache = tmp_path_factory.mktemp("every")
    built = {
        family: instance
        for family in FAMILIES
        for _, instance in sample(instances_of(*WIDTHS, family=family, built=True), 1)
    }
    instances = [*(INSTANCES | built).items(), ("sm90_stream", ROUNDS)]
    return cache, instances, compiled(cache, instances)[1]


def test_every_kernel_compiles_and_is_found_again(every):
    tmp_path, instances, first = every
    assert [each["error"] for each in first] == [""] * len(first)
    assert all(bytes.fromhex(each["cubin"])[:4] == b"\x7fELF" for each in first)
    assert not any(each["cached"] for each in first)
    _, second = compiled(tmp_path, instances)
    assert all(each["cached"] for each in second)
    assert [each["cubin"] for each in second] == [each["cubin"] for each in first]
    assert len(files(tmp_path)) == len(instances)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files(tmp_path))


def test_an_architecture_is_part_of_the_key(filled, tmp_path):
    cache, hopper = filled
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    _, (ampere,) = compiled(tmp_path, architecture="80")
    assert not ampere["cached"] and ampere["cubin"] != hopper["cubin"]


@pytest.mark.parametrize("damage", ["cut short", "a bit flipped", "empty", "of another key"])
def test_a_damaged_file_is_not_taken(filled, tmp_path, damage):
    cache, right = filled
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 16
    path.write_bytes(
        {
            "cut short": whole[:-1000],
            "a bit flipped": bytes(flipped),
            "empty": b"",
            "of another key": whole.replace(b"sm_90a", b"sm_80a", 1),
        }[damage]
    )
    _, (again,) = compiled(tmp_path)
    assert not again["cached"] and again["cubin"] == right["cubin"]
    assert files(tmp_path) == [path] and path.read_bytes() == whole


def test_two_processes_on_an_empty_cache(nvrtc, tmp_path):
    both = [start(tmp_path / "new" / "folder", SMALL) for _ in range(2)]
    (_, (one,)), (_, (other,)) = [outcome(process) for process in both]
    assert one["error"] == other["error"] == "" and one["cubin"] == other["cubin"]
    assert len([path for path in files(tmp_path) if path.is_file()]) == 1


@pytest.mark.parametrize("folder", ["", "/proc/jaxlowbit"], ids=["none", "not writable"])
def test_without_a_folder_to_write_to(nvrtc, folder):
    _, (result,) = compiled(folder)
    assert result["error"] == "" and not result["cached"]


def test_compiling_can_be_turned_off(tmp_path):
    toolchain, (result,) = compiled(tmp_path, JAXLOWBIT_COMPILE="0")
    assert toolchain["error"] == result["error"] == "JAXLOWBIT_COMPILE=0 turns compiling off"
    assert files(tmp_path) == []


def test_an_instance_that_does_not_compile_reports_the_reason(nvrtc, tmp_path):
    wrong = "jaxlowbit::sm80::QmmSm80Kernel<int>"
    _, (result,) = compiled(tmp_path, [("sm80", wrong)])
    assert result["error"].startswith("NVRTC ") and "error" in result["error"].partition("\n")[2]
    assert files(tmp_path) == []


# Fake NVRTC of any version; compiles nothing.
FAKE = """
int nvrtcVersion(int *major, int *minor) { *major = MAJOR; *minor = MINOR; return 0; }
const char *nvrtcGetErrorString(int status) { (void)status; return "fake"; }
int nvrtcCreateProgram(void) { return 1; }
int nvrtcDestroyProgram(void) { return 0; }
int nvrtcAddNameExpression(void) { return 1; }
int nvrtcCompileProgram(void) { return 1; }
int nvrtcGetProgramLogSize(void) { return 1; }
int nvrtcGetProgramLog(void) { return 1; }
int nvrtcGetCUBINSize(void) { return 1; }
int nvrtcGetCUBIN(void) { return 1; }
"""


def fake_nvrtc(folder: Path, version: str) -> dict:
    """Options of `start` for processes that find only this version."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("cc was not found")
    folder.mkdir()
    library = folder / "libnvrtc.so.13"
    major, minor = version.split(".")
    defined = [f"-DMAJOR={major}", f"-DMINOR={minor}", "-Wl,-soname,libnvrtc.so.13"]
    command = [compiler, "-shared", "-fPIC", *defined, "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=FAKE, text=True, check=True)
    (folder / "libnvrtc.so").symlink_to(library)
    return {"paths": [str(library)], "LD_LIBRARY_PATH": str(folder)}


@pytest.mark.parametrize("version", ["12.8", "12.9", "13.0", "13.2"])
def test_versions_that_are_too_old_raise(tmp_path, version):
    fake = fake_nvrtc(tmp_path / "lib", version)
    toolchain, (result,) = compiled(tmp_path / "cache", **fake)
    said = f"NVRTC is of version {version} but must be of 13.3 or newer; pip install 'jaxlowbit"
    assert toolchain["error"].startswith(said) and result["error"] == toolchain["error"]
    assert toolchain["compiler"] == "" and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("version", ["13.3", "13.10", "14.0"])
def test_newer_versions_are_taken(tmp_path, version):
    fake = fake_nvrtc(tmp_path / "lib", version)
    toolchain, (result,) = compiled(tmp_path / "cache", **fake)
    assert toolchain["error"] == "" and toolchain["compiler"].startswith(f"nvrtc {version} of ")
    assert result["error"].startswith(f"NVRTC {version}: fake")


def test_a_newer_version_is_found_behind_one_that_is_too_old(tmp_path):
    old, new = (fake_nvrtc(tmp_path / version, version)["paths"] for version in ("12.8", "13.3"))
    toolchain, _ = compiled(tmp_path / "cache", [], paths=[*old, *new])
    assert toolchain["error"] == "" and [toolchain["path"]] == new


def test_an_unknown_kernel_raises():
    with pytest.raises(ValueError, match="there is no kernel sm70"):
        ffi.compile([("sm70", "")], "90a")


def test_a_process_may_end_while_kernels_are_compiled(nvrtc, tmp_path):
    program = (
        "import json, sys, time\n"
        "from jaxlowbit import _ffi as ffi\n"
        "paths, instances, _ = json.loads(sys.argv[1])\n"
        "if paths:\n    ffi.set_nvrtc_paths(paths)\n"
        "ffi.compile([tuple(each) for each in instances], '90a', wait=False)\n"
        "time.sleep(0.2)\n"
    )
    given = json.dumps([PATHS, list(INSTANCES.items()), ""])
    env = os.environ | {"JAXLOWBIT_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-P", "-c", program, given], env=env, timeout=120)
    assert ended.returncode == 0


# --- instances ------------------------------------------------------------------------------------

FAMILIES = ("sm80", "sm80_transposed", "sm90_stream", "sm90")


WIDTHS = (*ffi.KERNEL_BITS, *ffi.COMPILED_BITS)


def instances_of(
    *widths: int, family: str | None = None, built: bool | None = None
) -> list[tuple[str, str]]:
    """Instances of some widths, filtered by family and by whether they are prebuilt."""
    found = [instance for bits in widths for instance in ffi.instances(bits)]
    return [
        (name, expression)
        for name, expression, ahead_of_time, *_ in found
        if family in (None, name) and built in (None, ahead_of_time)
    ]


def sample(found: list, count: int) -> list:
    return random.Random(0).sample(found, min(count, len(found)))


def kernel_names(binary: bytes) -> set[bytes]:
    """The mangled names of our kernels, which are null-terminated strings."""
    return set(re.findall(rb"(_ZN9jaxlowbit\d+sm[\w]+Qmm\w+Kernel\w+)\0", binary))


def test_every_instance_has_one_name():
    names = [name for _, name in instances_of(*WIDTHS)]
    assert len(names) == len(set(names)) > 500
    for bits in WIDTHS:
        for family, expression, ahead_of_time, *types, zero, codebook in ffi.instances(bits):
            assert family in FAMILIES
            rare = zero == "float" or (zero == "integer" and bits == 8)
            hopper = not ("float32" in types or rare)
            usual = {"sm80": "PartialSums::kNone" in expression, "sm80_transposed": False}.get(
                family, hopper
            )
            # Tiles of qmm_sm90 after the seventh are prebuilt only for the commonest types.
            tile = re.search(r"ZeroKind::\w+, \d, (\d+)", expression) if family == "sm90" else None
            between = tile is not None and int(tile[1]) >= 7
            plain = bits == 4 and types[0] == "bfloat16" and zero == "none"
            narrow = "8" in types[1] or types[1] == "two_level"
            integers = codebook == "none" and not narrow
            floats = types[0] in ("bfloat16", "float16")
            held = floats and integers and bits in ffi.KERNEL_BITS
            held = held and usual and (plain or not between) and "kRounds" not in expression
            assert ahead_of_time == held, expression


def test_names_match_the_kernels_in_the_build(every):
    built = kernel_names(Path(ffi.__file__).read_bytes())
    ahead_of_time = instances_of(*WIDTHS, built=True)
    assert len(built) == len(ahead_of_time)
    _, instances, results = every
    matching = 0
    for instance, result in zip(instances, results, strict=True):
        assert not result["error"], result["error"]
        found = re.findall(rb"\.text\.(_ZN\w+)\0", bytes.fromhex(result["cubin"]))
        assert len(set(found)) == 1
        assert (found[0] in built) == (instance in ahead_of_time), instance
        matching += found[0] in built
    assert matching == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_instances_missing_from_the_build_compile(nvrtc, tmp_path, family):
    """On Hopper without `wgmma` register hazards; also on other GPUs."""
    if family == "sm90" and wgmma_hazards.find_tool("nvdisasm") is None:
        pytest.skip("nvdisasm was not found")
    architecture = "90a" if "sm90" in family else "86"
    # CI compiles 50 instances of sm90, the slowest to compile (tools/compile_sample.py). Each width
    # is compiled for two of the other three families.
    place = FAMILIES.index(family)
    widths = [bits for i, bits in enumerate(WIDTHS) if (i + place) % 3]
    widths = WIDTHS[:1] if family == "sm90" else widths
    some = [
        instance
        for bits in widths
        for instance in sample(instances_of(bits, family=family, built=False), 1)
    ]
    _, results = compiled(tmp_path / "cache", some, architecture=architecture)
    for (_, name), result in zip(some, results, strict=True):
        assert not result["error"], (name, result["error"])
        if family != "sm90":
            continue
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(bytes.fromhex(result["cubin"]))
        ((_, sass),) = wgmma_hazards.kernels(cubin)
        kernel = wgmma_hazards.Kernel(sass)
        assert kernel.products and not kernel.hazards(), name


def test_divided_instances_compile(nvrtc, tmp_path):
    """Several devices compute such products; `_ffi.instances` lists only the prebuilt instances."""
    divided = "jaxlowbit::sm90_stream::DividedInstance<"
    prebuilt = [name for _, name in instances_of(4, family="sm90_stream") if divided in name]
    assert len(prebuilt) == 3
    begin = "jaxlowbit::sm90_stream::QmmSm90StreamKernel<"
    (family, name), *_ = sample(instances_of(8, family="sm90_stream", built=False), 1)
    wrapped = name.replace(begin, begin + divided).removesuffix(">") + ">>"
    _, results = compiled(tmp_path / "cache", [(family, wrapped)], architecture="90a")
    assert not results[0]["error"], (wrapped, results[0]["error"])


def test_the_compiler_of_nvidias_wheel_is_found(nvrtc, tmp_path):
    """In site-packages, which the system loader does not search."""
    folder = tmp_path / "nvidia/cu13/lib"
    folder.mkdir(parents=True)
    for path in Path(nvrtc["path"]).parent.glob("libnvrtc*"):
        (folder / path.name).symlink_to(path)
    program = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "import jaxlowbit\n"
        "from jaxlowbit import _ffi\n"
        "print(_ffi.toolchain()['path'])\n"
    )
    command = [sys.executable, "-P", "-c", program, str(tmp_path)]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    assert Path(found).resolve() == Path(nvrtc["path"]).resolve() and "cu13" in found


# --- the reason, the report and the command -------------------------------------------------------


@pytest.fixture
def toolchain(monkeypatch, tmp_path):
    """A fake `ffi.toolchain`."""
    said = {"error": "", "compiler": "nvrtc 13.9", "path": "/lib/nvrtc", "cache": str(tmp_path)}
    monkeypatch.setattr(extension.ffi, "toolchain", lambda: said)
    return said


def test_widths_without_a_compiler_have_a_reason(toolchain):
    toolchain["error"] = "there is none"
    missing = functools.partial(registry.unsupported, "cuda", jnp.dtype("bfloat16"))
    whats = {Format(bits): f"{bits} bits" for bits in ffi.COMPILED_BITS}
    whats |= {NF4: "codebooks", Format(8, 32, scale="e8m0"): "8-bit scales"}
    for format, what in whats.items():
        reason = missing(format)
        assert reason == f"its kernels for {what} are compiled where they run, and there is none"
    for format in map(Format, ffi.KERNEL_BITS):
        assert missing(format) is None
        transposed = missing(format, transposed=True)
        assert transposed is not None and "kernels for transposed products" in transposed
        float32 = registry.unsupported("cuda", jnp.dtype("float32"), format)
        assert float32 is not None and "kernels for float32 lhs" in float32


def test_the_report_names_compiler_and_cache(toolchain, tmp_path):
    (tmp_path / "a.cubin").write_bytes(bytes(1500000))
    lines = dict(report())
    assert lines["compiler"].endswith("nvrtc 13.9, /lib/nvrtc")
    assert lines["compiled kernels"] == f"{tmp_path}: 1, 1.5 MB"
    assert "of the build" in lines["loaded kernels"]
    toolchain["error"], toolchain["cache"] = "there is none", ""
    lines = dict(report())
    assert lines["compiler"].endswith("there is none")
    assert lines["compiled kernels"] == "kept nowhere"


@pytest.fixture
def compiler(monkeypatch, toolchain):
    """Records compile requests without compiling."""
    asked = []

    def compile_all(wanted, capability):
        asked.append((capability, list(wanted)))
        return (instances.Compiled(instance, "", i == 0, 0.5) for i, instance in enumerate(wanted))

    monkeypatch.setattr(instances, "compile_all", compile_all)
    return asked


@pytest.mark.parametrize(("device", "capability", "count"), [("H200", 90, 28), ("A100", 80, 4)])
def test_all_kernels_of_a_format_are_compiled(compiler, capsys, device, capability, count):
    main(["compile", "--format", "int2-g128-integer", "--device", device])
    ((asked, wanted),) = compiler
    assert asked == capability and len(wanted) == len(set(wanted)) == count
    out = capsys.readouterr().out.splitlines()
    assert len(out) == count + 2 and out[0].startswith(f"1/{count}  cached")
    assert f"{count - 1} compiled, 1 were there" in out[-1]


def test_gradients_use_separate_kernels(compiler):
    main(["compile", "--format", "int2-g128", "--device", "A100", "--transposed"])
    ((_, wanted),) = compiler
    assert len(wanted) == 8


def test_compiled_kernels_of_shapes_match_the_selection(compiler):
    shapes = ["--shapes", "4096x4096", "--tokens", "1", "256", "--device", "H200"]
    main(["compile", *shapes, "--format", "int2-g128"])
    main(["compile", "--format", "int2-g128", "--device", "H200"])
    (_, chosen), (_, every) = compiler
    assert 0 < len(chosen) < len(every) and set(chosen) < set(every)
    families = [instance.family for instance in chosen]
    assert set(families) == {"sm80", "sm90_stream", "sm90"}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_kernels_for_other_activations(compiler, dtype):
    main(["compile", "--format", "int2-g128", "--device", "H200", "--dtype", dtype])
    ((_, wanted),) = compiler
    text = " ".join(instance.expression for instance in wanted)
    assert ("__half, __half" in text) == (dtype == "float16")
    assert ("kGroups" in text) == (dtype == "float32")


@pytest.mark.parametrize(
    ("dtype", "format", "name"),
    [
        ("int8", "uint4", "int8_t, __nv_bfloat16, jaxlowbit::ZeroKind::kInteger, 4"),
        ("int8", "int4-int8", "int8_t, int8_t, jaxlowbit::ZeroKind::kNone, 4"),
        ("float8_e4m3fn", "e4m3", "jaxlowbit::E4m3, __nv_bfloat16, jaxlowbit::ZeroKind::kNone, 8"),
    ],
)
def test_kernels_for_quantized_activations(compiler, dtype, format, name):
    """Rows multiplied in bfloat16 need bfloat16 kernels."""
    main(["compile", "--format", format, "--device", "H200", "--dtype", dtype])
    shapes = ["--shapes", "4096x4096", "--format", format, "--device", "H200", "--dtype", dtype]
    main(["compile", *shapes, "--tokens", "256"])
    (_, every), (_, chosen) = compiler
    assert 0 < len(chosen) < len(every) and set(chosen) < set(every)
    rounding = [one for one in every if "kRounds" in one.expression]
    assert len(rounding) == 1 and "<__nv_bfloat16, " in rounding[0].expression
    assert all(name in one.expression for one in every if one not in rounding)
    compiler.clear()
    main(["compile", *shapes, "--tokens", "8"])
    assert all("int8_t, __nv" not in one.expression for _, wanted in compiler for one in wanted)


def test_kernels_of_the_build_are_not_compiled(compiler, capsys):
    main(["compile", "--format", "int4-g128", "--device", "H200"])
    assert "the build contains all of these kernels" in capsys.readouterr().out and not compiler


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a checkpoint, --shapes with --format, or only --format"),
        (["--format", "int2", "--dtype", "int4"], "--dtype int4: name one of"),
        (["--format", "int2", "--dtype", "int8"], "--format int2-g128: the kernels multiply int8"),
        (
            ["--format", "int8", "--dtype", "int8", "--device", "A100"],
            "--dtype int8: NVIDIA A100 multiplies quantized activations in bfloat16; name that",
        ),
        (["--format", "two"], "'two' names no format"),
        (
            ["--format", "mxfp8", "--dtype", "float32"],
            "--format mxfp8: with float32 lhs the kernels",
        ),
    ],
)
def test_arguments_that_mean_nothing(toolchain, capsys, arguments, said):
    with pytest.raises(SystemExit):
        main(["compile", "--device", "H200", *arguments])
    assert said in capsys.readouterr().err


def test_the_command_reports_a_missing_compiler(toolchain, capsys):
    toolchain["error"] = "there is none"
    with pytest.raises(SystemExit):
        main(["compile", "--format", "int2", "--device", "H200"])
    assert "there is none." in capsys.readouterr().err
