"""`_ffi.pyi` describes the compiled module."""

import ast
from pathlib import Path
from typing import Any

import jaxlowbit
from jaxlowbit._backends.extension import ffi

TEXT = Path(jaxlowbit.__file__).with_name("_ffi.pyi").read_text()
CUDA_ONLY = TEXT.partition("# With CUDA kernels only.")[2].partition("# With any build.")[0]


def of_stub(text: str) -> dict[str, ast.AST]:
    """The names declared in a stub; methods as `Class.method`."""
    names: dict[str, ast.AST] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = node
        if isinstance(node, ast.ClassDef):
            methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
            names |= {f"{node.name}.{method.name}": method for method in methods}
    return names


STUB = of_stub(TEXT)


def arguments(function: ast.FunctionDef) -> dict[str, tuple[str, bool, bool]]:
    """Type of each argument, whether it is keyword-only, and whether it has a default.

    `**asked: Unpack[Class]` counts as the arguments that the class lists.
    """
    found: dict[str, tuple[str, bool, bool]] = {}
    args = function.args
    least = len(args.args) - len(args.defaults)
    for i, arg in enumerate(args.args):
        found[arg.arg] = (unparsed(arg.annotation), False, i >= least)
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found[arg.arg] = (unparsed(arg.annotation), True, default is not None)
    if args.kwarg is not None and not unparsed(args.kwarg.annotation).startswith("Unpack["):
        found["**"] = ("", False, False)  # nanobind does not describe them
    elif args.kwarg is not None:
        listed = STUB[unparsed(args.kwarg.annotation).removeprefix("Unpack[").removesuffix("]")]
        assert isinstance(listed, ast.ClassDef)
        for node in listed.body:
            assert isinstance(node, ast.AnnAssign)
            type_ = unparsed(node.annotation)
            required = type_.startswith("Required[")
            type_ = type_.removeprefix("Required[").removesuffix("]") if required else type_
            found[unparsed(node.target)] = (type_, True, not required)
    found.pop("self", None)
    return found


def unparsed(node: ast.AST | None) -> str:
    return "" if node is None else ast.unparse(node)


def documented(function: Any) -> ast.FunctionDef:
    """The signature at the beginning of a docstring of nanobind."""
    line = function.__doc__.splitlines()[0]
    line = line.replace("collections.abc.", "").replace("jaxlowbit._ffi.", "")
    found = ast.parse(f"def {line}: ...").body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


def test_the_stub_has_every_name_of_the_module():
    found = {name for name in vars(ffi) if not name.startswith("__")}
    for name, value in list(vars(ffi).items()):
        if isinstance(value, type):
            public = {m for m in vars(value) if not m.startswith("_")}
            found |= {f"{name}.{method}" for method in public}
    declared = {name for name in STUB if not name.rpartition(".")[2].startswith("_")}
    assert found <= declared
    missing = declared - found
    assert missing == (set() if ffi.build_info()["cuda"] else set(of_stub(CUDA_ONLY)))


def test_functions_have_the_signatures_of_the_stub():
    checked = 0
    for name, node in STUB.items():
        owner, _, method = name.rpartition(".")
        value = getattr(getattr(ffi, owner) if owner else ffi, method, None)
        if isinstance(node, ast.FunctionDef) and callable(value):
            own = documented(value)
            assert arguments(node) == arguments(own), name
            result = unparsed(node.returns).partition("[")[0]
            assert result == unparsed(own.returns).partition("[")[0], name
            checked += 1
    assert checked >= 8
