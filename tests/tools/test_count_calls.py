"""tools/count_calls.py: the number of functions that run for one product."""

import json
import os
import subprocess
import sys
from pathlib import Path

import count_calls
import jax
import pytest

from jaxlowbit._backends.extension import ffi

MOST = 40
"""Functions that run while a product is traced and lowered: lower it, never raise it."""

MOST_COMPILED = {
    "cpu": {"C++, Execute": (23, 7)},
    "gpu": {"C++, Initialize": (8, 4), "C++, Execute": (18, 6)},
}
"""C++ functions, and their depth on the stack, in a warm stage of a handler."""

RECORDS = b"JAXLOWBIT_CALLS" in Path(ffi.__file__).read_bytes()


@pytest.mark.parametrize("rows", count_calls.ROWS)
def test_python_functions_of_a_product(rows):
    counted = count_calls.count_python(rows)
    names = [function.name for function in counted.functions]
    assert len(names) <= MOST, names
    assert [function for function in counted.functions if function.lines > 60] == []
    assert counted.depth < 10 and "QuantizedArray.__rmatmul__" in names


@pytest.mark.skipif(not RECORDS, reason="this build does not record calls: tools/count_calls.py")
def test_compiled_functions_of_a_product(tmp_path):
    """In a separate process, since the module reads JAXLOWBIT_CALLS once."""
    file = tmp_path / "counted.json"
    command = [sys.executable, count_calls.__file__, "--compiled", "--json", str(file)]
    subprocess.run(command, check=True, env=os.environ)
    limits = MOST_COMPILED[jax.default_backend()]
    found = [one for one in json.loads(file.read_text()) if one["call"] in limits]
    assert {one["call"] for one in found} == set(limits)
    for one in found:
        most, depth = limits[one["call"]]
        assert one["count"] <= most and one["depth"] <= depth, one
        assert [function for function in one["functions"] if function["lines"] > 60] == []


def test_counted_functions(tmp_path):
    """Counts lambdas and methods once, without comprehensions and functions of other packages."""
    source = tmp_path / "package" / "module.py"
    source.parent.mkdir()
    source.write_text(
        "class A:\n"
        "    def method(self):\n"
        "        '''A docstring\n\n        of three lines.'''\n"
        "        return sorted([1, 2], key=lambda x: -x)\n\n"
        "def run():\n"
        "    return [A().method() for _ in range(2)]\n"
    )
    scope = {}
    exec(compile(source.read_text(), str(source), "exec"), scope)
    found, depth = count_calls.python_calls(scope["run"], source.parent)
    functions = [count_calls._python_function(code, source.parent) for code in found]
    assert [(f.name, f.line, f.lines) for f in functions] == [
        ("run", 8, 2),
        ("A.method", 2, 2),
        ("A.method.<locals>.<lambda>", 6, 1),
    ]
    assert depth == 3 and functions[0].file == "package/module.py"
