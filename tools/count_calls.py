"""Counts the functions of this project that run for one bfloat16 by int4-g128 product.

    python tools/count_calls.py                # Python, while tracing and lowering for CUDA
    python tools/count_calls.py --compiled     # and C++, in one warm execution on this machine
    python tools/count_calls.py --json FILE    # the same numbers, with every function

Counts distinct functions that run at least once, including lambdas and methods, but no
comprehensions and no generated code. Instances of a template are one function; lengths exclude
docstrings. `--compiled` prints a row for each outermost call. It needs gcc and a build that records
calls:

    pip install . -C cmake.define.JAXLOWBIT_COUNT_CALLS=ON -C install.strip=false
"""

import argparse
import ast
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]
ROWS = (1, 512)
SIZE = 4096  # of both sides of the weight
_STAGES = ("Instantiate", "Initialize", "Execute")


class Function(NamedTuple):
    """A function by its name, file and first line, and its length in lines."""

    name: str
    file: str
    line: int
    lines: int


class Counted(NamedTuple):
    """The functions of one call in the order of their first calls. `depth`: maximum stack depth."""

    call: str
    rows: int
    depth: int
    functions: list[Function]

    def row(self) -> str:
        files = {function.file for function in self.functions}
        longest = max(self.functions, key=lambda function: function.lines)
        return (
            f"{self.call:28} {self.rows:5} {len(self.functions):10} {self.depth:6} "
            f"{len(files):6}  {longest.lines} ({longest.name})"
        )

    def as_json(self) -> dict[str, Any]:
        functions = [function._asdict() for function in self.functions]
        return self._asdict() | {"count": len(functions), "functions": functions}


# --- Python ---------------------------------------------------------------------------------------


def python_calls(run: Callable[[], Any], package: Path) -> tuple[list[CodeType], int]:
    """The functions of a package that a call runs, and the depth of its functions on the stack."""
    prefix, seen, depth, deepest = f"{package.resolve()}{os.sep}", {}, 0, 0

    @functools.cache
    def counts(code: CodeType) -> bool:
        generated = code.co_name.startswith("<") and code.co_name != "<lambda>"
        return not generated and os.path.realpath(code.co_filename).startswith(prefix)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth, deepest
        if event in ("call", "return") and counts(frame.f_code):
            if event == "call":
                seen[frame.f_code] = None
            depth += 1 if event == "call" else -1
            deepest = max(deepest, depth)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return list(seen), deepest


@functools.cache
def _python_lengths(file: str) -> dict[int, int]:
    """Maps the first line of each function of a file to its length."""
    found: dict[int, int] = {}
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            assert node.end_lineno is not None
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            length = node.end_lineno - node.lineno + 1
            if not isinstance(node, ast.Lambda) and ast.get_docstring(node) is not None:
                string = node.body[0]
                assert string.end_lineno is not None
                length -= string.end_lineno - string.lineno + 1
            found[first] = max(found.get(first, 0), length)
    return found


def _python_function(code: CodeType, package: Path) -> Function:
    file = Path(code.co_filename).resolve().relative_to(package.resolve().parent)
    lines = _python_lengths(code.co_filename).get(code.co_firstlineno, 1)
    return Function(code.co_qualname, str(file), code.co_firstlineno, lines)


def count_python(rows: int) -> Counted:
    """Traces and lowers the product for CUDA, with empty caches."""
    import jax
    import jax.numpy as jnp

    import jaxlowbit
    from jaxlowbit._backends import extension

    package = Path(jaxlowbit.__file__).resolve().parent
    lhs = jax.ShapeDtypeStruct((rows, SIZE), jnp.bfloat16)
    weight = jax.eval_shape(
        lambda: jaxlowbit.quantize(jnp.zeros((SIZE, SIZE), jnp.bfloat16), jaxlowbit.INT4)
    )

    def lower() -> None:
        jax.jit(lambda x, q: x @ q).trace(lhs, weight).lower(lowering_platforms=("cuda",))

    _forget()
    # A build without kernels lowers as one with them does.
    with mock.patch.dict(extension.UNAVAILABLE, cuda=None):
        found, depth = python_calls(lower, package)
    functions = [_python_function(code, package) for code in found]
    return Counted("Python, trace and lower", rows, depth, functions)


def _forget() -> None:
    """Empties the caches of the package."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "jaxlowbit":
            for value in vars(module).values():
                if hasattr(value, "cache_clear") and value.__module__.startswith("jaxlowbit"):
                    value.cache_clear()


# --- C++ ------------------------------------------------------------------------------------------


def count_compiled(rows: int, record: Path) -> list[Counted]:
    """Runs the product until it is warm, then once more; `record` is JAXLOWBIT_CALLS.

    **Raises:** `RuntimeError` if the module records nothing.
    """
    import jax
    import jax.numpy as jnp

    import jaxlowbit
    from jaxlowbit._backends.extension import ffi

    weight = jaxlowbit.quantize(jnp.ones((SIZE, SIZE), jnp.bfloat16), jaxlowbit.INT4)
    product = jax.jit(lambda x, q: x @ q)
    for _ in range(4):
        record.write_bytes(b"")  # the module appends
        jax.block_until_ready(product(jnp.ones((rows, SIZE), jnp.bfloat16), weight))
    if not (lines := record.read_text(encoding="ascii").splitlines()):
        raise RuntimeError(
            "jaxlowbit._ffi recorded no call; build it by pip install . "
            "-C cmake.define.JAXLOWBIT_COUNT_CALLS=ON -C install.strip=false."
        )
    found = {}
    for line in lines:
        depth, *offsets = line.split()
        functions = _compiled_functions(ffi.__file__, offsets)
        if not functions:
            continue
        names = [name for function in functions for name in _STAGES if name in function.name]
        call = f"C++, {names[0] if names else functions[0].name}"
        found[call] = Counted(call, rows, int(depth), functions)
    return list(found.values())


def _compiled_functions(module: str, offsets: Sequence[str]) -> list[Function]:
    """The functions at offsets of a shared library, each place of the source once."""
    command = ["addr2line", "-f", "-C", "-e", module, *offsets]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = printed.splitlines()
    found = {}
    for name, place in zip(names[::2], names[1::2], strict=True):
        path, _, number = place.partition(" ")[0].rpartition(":")
        if (file := _source(Path(path))) is None:
            continue  # made by a compiler
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()[int(number) - 1 :]
        if re.match(r"\s*(class|struct) ", lines[0]) or "}::~" in name:
            continue  # an implicit constructor or destructor
        short = re.split(r"[(<]", name.replace("(anonymous namespace)::", ""))[0].split()[-1]
        short += " (lambda)" if "{lambda" in name else ""
        key = str(file), int(number)
        found.setdefault(key, Function(short, *key, _compiled_length(lines)))
    return list(found.values())


def _source(path: Path) -> Path | None:
    """The file in this tree that was compiled at a path, maybe on another machine."""
    ends = (Path(*path.parts[i:]) for i in range(1, len(path.parts)))
    return next((end for end in ends if (ROOT / end).is_file()), None)


def _compiled_length(lines: Sequence[str]) -> int:
    """The lines of the function in C++ that begins at the first of these."""
    depth = 0
    for count, line in enumerate(lines, 1):
        code = re.sub(r'"(\\.|[^"\\])*"|\'(\\.|[^\'\\])\'|//.*', "", line)
        for brace in re.findall(r"[{}]", code):
            depth += 1 if brace == "{" else -1
            if depth == 0:
                return count
    return len(lines)


# --- the command ----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compiled", action="store_true", help="count C++ too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "calls"
        if options.compiled:
            os.environ["JAXLOWBIT_CALLS"] = str(record)  # the module reads it once
        found = [count_python(rows) for rows in ROWS]
        if options.compiled:
            found += [counted for rows in ROWS for counted in count_compiled(rows, record)]
    print("call                          rows  functions  depth  files  longest function")
    for counted in found:
        print(counted.row())
    if options.json:
        data = [counted.as_json() for counted in found]
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
