"""Build options and the maximum size of wheels."""

import re
import tomllib
import zipfile
from pathlib import Path

import requirements
import wheel_size

from jaxlowbit._requirements import OLDEST

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())


def test_a_wheel_that_is_too_large_fails(tmp_path, capsys, monkeypatch):
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a.so", bytes(1_500_000))
    assert wheel_size.main([str(wheel)]) == 0
    assert "- a-1-py3-none-any.whl: 1.5 MB of 10, 1.5 MB installed" in capsys.readouterr().out
    monkeypatch.setattr(wheel_size, "MOST_MEGABYTES", 1)
    assert wheel_size.main([str(wheel)]) == 1
    assert "a wheel is larger than 1 MB" in capsys.readouterr().err
    assert wheel_size.main([]) == 1


def test_requirements_match_the_project():
    found = requirements.requirements(["nvcc", "tune"])
    extras = PROJECT["project"]["optional-dependencies"]
    assert found[-len(extras["nvcc"]) - 2 :] == [*extras["nvcc"], "safetensors", "tqdm"]
    assert set(PROJECT["build-system"]["requires"]) < set(found)


def test_wheels_have_the_kernels_of_the_makefile():
    """The workflow builds wheels with the same CMake options as `make wheel`."""
    settings = PROJECT["tool"]["cibuildwheel"]["config-settings"]
    assert settings == {"cmake.define.JAXLOWBIT_CUDA": "ON"}
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "-Ccmake.define.JAXLOWBIT_CUDA=$(CUDA)" in makefile


def test_versions_required_on_import_match_the_project():
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    listed = {*project["dependencies"], *(r for extra in extras for r in extra)}
    asked = {f"{package}>={oldest}" for package, oldest in OLDEST.items()}
    assert {r for r in listed if r.startswith(("flax", "jax"))} == asked


def test_nothing_is_compiled_in_a_folder_that_scikit_build_core_clears():
    """It removes `build/<tag>/CMakeFiles` when pip creates a new build environment, so objects are
    in separate folders, and compile lines contain no path of that environment."""
    root = Path(__file__).parents[2]
    commands = r"^\s*(add_library|add_executable|nanobind_add_module)\("
    assert not re.search(commands, (root / "CMakeLists.txt").read_text(), re.MULTILINE)
    own = (root / "xla_ffi/CMakeLists.txt").read_text()
    assert re.search(commands, own, re.MULTILINE)
    for package in ("jaxlib", "nanobind"):
        assert f"${{CMAKE_CURRENT_BINARY_DIR}}/{package}/" in own
