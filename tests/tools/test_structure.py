"""Import rules of the subpackages, and the stack from `quantized_matmul` to the FFI call."""

import ast
import functools
import graphlib
import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import count_calls
import jax
import jax.numpy as jnp
import pytest

import jaxlowbit
from jaxlowbit import INT4, _command, quantize, quantized_matmul
from jaxlowbit._matmul import call, primitive

PACKAGE = Path(jaxlowbit.__file__).parent
ROOT = Path(__file__).parents[2]

# Subpackages, lowest first: a module imports from its subpackage and from lower ones. Subpackages
# of one rank do not import each other.
RANKS = (
    ("_version",),
    ("_command", "_requirements"),
    ("_core",),
    ("_backends", "quantizers"),
    ("_matmul",),
    ("_composite",),
    ("_flax", "_tuning", "checkpoint"),
    ("_llm",),
    ("", "__main__", "linen", "llm", "nnx", "qwix", "_array", "_formats"),
)
# Modules of `_flax` with these prefixes do not import each other; the rest serves both.
FLAX = ("linen", "nnx")
# Optional dependencies, and the compiled module, by the modules that may import them.
ONLY = {
    "flax": r"_flax\.((linen|nnx)_\w+|serialization|qwix_provider)|"
    r"_llm\.(bench|block|cache_file|command|decoder|language_model|low_rank|sharding|structure)",
    "qwix": r"_core\.qarray|_flax\.qwix_provider",
    "gguf": r"_llm\.(exporting|ggml_grids|gguf_file|gguf_metadata)",
    "jinja2": r"_llm\.chat_template",
    "llguidance": r"_llm\.schema",
    "lm_eval": r"_llm\.harness",
    "safetensors": r"checkpoint\._files|_tuning\.weights",
    "tokenizers": r"_llm\.(gguf_metadata|tokenizer_(folder|gguf|parts))",
    "tqdm": r"_flax\.calibration|_llm\.(calibration|files_command|load|perplexity|sensitivity)|"
    r"_tuning\.report|checkpoint\._(load|saved)",
    "jax.experimental.pallas": r"_backends\.pallas\.(tpu|triton)",
    "jaxlowbit._ffi": r"_backends\.extension",
}


def name_of(path: Path) -> str:
    """The dotted name of a module inside the package, "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def nodes(name: str) -> list[ast.AST]:
    """All nodes of the syntax tree of a module."""
    return [*ast.walk(ast.parse(PATHS[name].read_text(encoding="utf-8")))]


def targets(name: str, node: ast.AST) -> Iterator[str]:
    """All modules that an import statement of a module names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        package = name if PATHS[name].name == "__init__.py" else name.rpartition(".")[0]
        base = ["jaxlowbit", *filter(None, package.split("."))] if node.level else []
        base = base[: len(base) + 1 - node.level] if node.level else base
        base += [node.module] if node.module else []
        for alias in node.names:
            inner = ".".join([*base, alias.name])
            known = inner.removeprefix("jaxlowbit.") in PATHS or alias.name in ("_ffi", "pallas")
            yield inner if known else ".".join(base)


def ours(target: str) -> str | None:
    """The name of a module of this package; None for other packages."""
    found = re.fullmatch(r"jaxlowbit(?:\.(.*))?", target)
    return (found[1] or "") if found and (found[1] or "") in PATHS else None


@functools.cache
def imports(name: str) -> set[str]:
    """Modules of this package that a module imports, anywhere in its code."""
    found = {ours(target) for node in nodes(name) for target in targets(name, node)}
    return {target for target in found if target is not None}


def room(name: str) -> str:
    return name.partition(".")[0]


def rank(name: str) -> int:
    return next(i for i, rooms in enumerate(RANKS) if room(name) in rooms)


def test_every_room_has_a_rank():
    assert {room(name) for name in PATHS} == {room for rooms in RANKS for room in rooms}
    assert len(PATHS) > 50


@pytest.mark.parametrize("name", PATHS)
def test_no_import_of_ours_is_deferred(name):
    """No such import is in a function or in a branch for type checkers."""
    for node in nodes(name):
        deferring = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        if deferring:
            found = [ours(x) for inner in ast.walk(node) for x in targets(name, inner)]
            assert not any(target is not None for target in found), ast.unparse(node)


def test_only_subcommands_and_quantizers_are_imported_by_name():
    """`_command` imports the module of the requested subcommand, since `_llm` needs an extra.
    A quantizer, and a kind of checkpoint, is one file, so registries import their folders."""
    importing = {name for name, path in PATHS.items() if "import_module(" in path.read_text()}
    assert importing == {"_command", "checkpoint._registry", "quantizers._registry"}
    assert {subcommand.module for subcommand in _command.SUBCOMMANDS.values()} <= PATHS.keys()


def test_there_are_no_import_cycles():
    order = graphlib.TopologicalSorter({name: imports(name) for name in PATHS})
    assert set(order.static_order()) == set(PATHS)  # a CycleError names the cycle


@pytest.mark.parametrize("name", PATHS)
def test_imports_go_down(name):
    for target in imports(name):
        assert room(target) == room(name) or rank(target) < rank(name), target


def test_functions_have_at_most_60_lines():
    """Without docstrings."""
    found = {
        (name, node.name): lines[min([node.lineno, *(d.lineno for d in node.decorator_list)])]
        for name, path in PATHS.items()
        for lines in [count_calls._python_lengths(str(path))]
        for node in nodes(name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(found) > 1000 and {key for key, lines in found.items() if lines > 60} == set()


def unencoded(path: Path) -> Iterator[int]:
    """Lines of a file that read or write text in the encoding of the locale."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            method = isinstance(node.func, ast.Attribute)
            name = ast.unparse(node.func).rpartition(".")[2]
            modes = [*node.args[0 if method else 1 :], *(x.value for x in node.keywords)]
            binary = any(isinstance(x, ast.Constant) and "b" in str(x.value) for x in modes)
            text = name in ("read_text", "write_text") or (name == "open" and not binary)
            if text and "encoding" not in {keyword.arg for keyword in node.keywords}:
                yield node.lineno


def test_text_files_are_utf8_whatever_the_locale():
    rooms = (ROOT / name for name in ("tools", "examples", "benchmarks"))
    places = [*PACKAGE.rglob("*.py"), *(path for room in rooms for path in room.glob("*.py"))]
    found = {str(path): [*unencoded(path)] for path in places}
    assert not {path: lines for path, lines in found.items() if lines}


def test_tests_are_in_folders_and_their_names_are_unique():
    """conftest.py names test files without their folders."""
    files = [*(ROOT / "tests").rglob("*.py")]
    assert {path for path in files if path.parent.parent != ROOT / "tests"} == {
        ROOT / "tests/conftest.py"
    }
    assert len({path.name for path in files}) == len(files)
    # A package tests/flax would hide Flax.
    assert "__init__.py" not in {path.name for path in files}


def test_shared_modules_import_neither_flax_api():
    def api(name: str) -> str | None:
        found = re.match(r"_flax\.(\w+?)_", name)
        return found[1] if found and found[1] in FLAX else None

    for name in PATHS:
        for target in imports(name) if room(name) == "_flax" else ():
            assert api(target) in (None, api(name)), (name, target)


@pytest.mark.parametrize("dependency", ONLY)
def test_optional_dependencies_are_imported_by_their_users_only(dependency):
    users = {
        name
        for name in PATHS
        for node in nodes(name)
        if any(f"{target}.".startswith(f"{dependency}.") for target in targets(name, node))
    }
    assert users and all(re.fullmatch(ONLY[dependency], name) for name in users), users


def test_pickles_of_version_0_1_0_find_their_classes():
    """Old pickles name modules of that version; new ones name the package."""
    for name in ("_array\nQuantizedArray", "_formats\nFormat"):
        found = pickle.loads(f"cjaxlowbit.{name}\n.".encode())
        assert found is getattr(jaxlowbit, name.partition("\n")[2])
    array = quantize(jnp.ones((64, 64)), INT4)
    names = set(re.findall(rb"jaxlowbit[\w.]*", pickle.dumps(array)))
    assert names == {b"jaxlowbit"}


# --- the stack to the FFI call --------------------------------------------------------------------


def frames() -> list[str]:
    """Our functions on the stack, outermost first, as docs/design.md names them."""
    codes = [frame.frame.f_code for frame in reversed(inspect.stack(0))]
    return [
        f"`{Path(code.co_filename).relative_to(PACKAGE)}` `{code.co_name}`"
        for code in codes
        if code.co_filename.startswith(str(PACKAGE))
    ]


def documented(way: str) -> list[str]:
    """A column of the table in docs/design.md."""
    section = (ROOT / "docs/design.md").read_text().partition("\n## One product\n")[2]
    rows = re.findall(r"^\|(.*)\|$", section.partition("\n## ")[0], re.M)
    head, _, *hops = [[cell.strip() for cell in row.split("|")] for row in rows]
    return [hop[head.index(way)] for hop in hops if hop[head.index(way)]]


@pytest.mark.parametrize("way", ["CPU", "CUDA", "CUDA, with an epilogue"])
def test_from_quantized_matmul_to_the_ffi_call(way, cuda, monkeypatch):
    """At most six of our functions are on the stacks of binding and of lowering."""
    activation = "relu" if "epilogue" in way else None
    bound = call._call_p if activation else primitive.quantized_matmul_p
    binding, calling = [], []

    def recorded(function, stacks):
        def record(*args, **params):
            stacks.append(frames())
            return function(*args, **params)

        return record

    monkeypatch.setattr(bound, "bind", recorded(bound.bind, binding))
    monkeypatch.setattr(jax.ffi, "ffi_call", recorded(jax.ffi.ffi_call, calling))
    rhs, lhs = quantize(jnp.ones((64, 64)), INT4), jnp.ones((1, 64), jnp.bfloat16)
    program = jax.jit(lambda lhs, rhs: quantized_matmul(lhs, rhs, activation=activation))
    platform = way.partition(",")[0].lower()
    program.trace(lhs, rhs).lower(lowering_platforms=(platform,))
    (before,), (after,) = binding, calling
    assert len(before + after) <= 6, before + after
    assert before + after == documented(way)


def test_an_eager_product_takes_the_same_path(monkeypatch):
    """It has a single stack, with JAX between binding and lowering."""
    stacks = []

    def record(target, *args, **options):
        stacks.append(frames())
        return ffi_call(target, *args, **options)

    ffi_call = jax.ffi.ffi_call
    monkeypatch.setattr(jax.ffi, "ffi_call", record)
    rhs = quantize(jnp.ones((64, 64)), INT4)
    with jax.default_device(jax.devices("cpu")[0]):
        jax.block_until_ready(quantized_matmul(jnp.ones((37, 64), jnp.bfloat16), rhs))
    assert stacks == [documented("CPU")]
