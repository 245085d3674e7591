"""CUDA kernel selection compared with measured times, and the fit of its constants."""

import gzip
import json
import re
import shutil
from typing import Any

import fit_costs
import numpy as np
import pytest

from jaxlowbit._backends.extension import ffi
from jaxlowbit._tuning import table as tables

PATHS = sorted(fit_costs.DATA.glob("*.jsonl.gz"))
CODEBOOK_PATHS = sorted((fit_costs.DATA.parent / "fit_codebooks").glob("*.jsonl.gz"))
EIGHT_BIT_PATHS = sorted((fit_costs.DATA.parent / "fit_8_bit").glob("*.jsonl.gz"))
DEVICE: dict[str, Any] = {
    "device_name": "NVIDIA H200",
    "compute_capability": 90,
    "num_sms": 132,
    "shared_bytes_per_sm": 228 * 1024,
    "clock_mhz": 0,
    "memory_gb_per_s": 0,
    "clusters": [[132, 66, 30], [264, 132, 61]],
}


@pytest.mark.parametrize("kernel", ffi.KERNELS)
def test_constants_match_the_file(kernel):
    number = ffi.KERNELS.index(kernel)
    path = fit_costs.Kernel(number, []).path
    assert ffi.CostModel(kernel, []).constants == pytest.approx(fit_costs.read_constants(path))


def test_the_selection_is_near_the_best_that_was_measured():
    """Without the packaged table of measured choices."""
    problems = fit_costs.load(PATHS)
    found = fit_costs.selected_regret(problems)
    assert len(problems) > 500 and found.problems > 0.97 * len(problems)
    assert found.mean < 0.007 and found.worst < 0.1, str(found)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name.partition(".")[0])
def test_no_data_file_is_unused(path):
    found = fit_costs.selected_regret(fit_costs.load([path]))
    assert found.mean < 0.01, str(found)


@pytest.mark.parametrize("path", CODEBOOK_PATHS, ids=lambda path: path.name.partition(".")[0])
def test_the_selection_of_codebooks_is_near_the_best(path):
    problems = fit_costs.load([path])
    found = fit_costs.selected_regret(problems)
    assert found.problems == len(problems) > 50
    assert found.mean < 0.02 and found.worst < 0.15, str(found)


# Mean regrets with 8-bit activations. The selected choice was measured for every problem.
MEAN_REGRETS = {
    "h100-e4m3-channel": 0.018,
    "h100-int8-w4-channel": 0.015,
    "h100-int8-w4-int8": 0.025,
    "h100-int8-w8-channel": 0.018,
    "h200-e4m3-channel": 0.015,
    "h200-int8-w4-channel": 0.015,
    "h200-int8-w4-int8": 0.018,
    "h200-int8-w8-channel": 0.015,
}
WORST_REGRETS = {"h100": 0.2, "h200": 0.17}


@pytest.mark.parametrize("path", EIGHT_BIT_PATHS, ids=lambda path: path.name.partition(".")[0])
def test_the_selection_with_8_bit_activations_is_close_to_the_best(path):
    problems = fit_costs.load([path])
    found = fit_costs.selected_regret(problems)
    assert found.problems == len(problems) > 15
    name = path.name.partition(".")[0]
    assert found.mean < MEAN_REGRETS[name], str(found)
    assert found.worst < WORST_REGRETS[name.partition("-")[0]], str(found)


# --- the fit --------------------------------------------------------------------------------------


def problem(m, n, k, bits=4, early_start=False):
    group_size = 128 if bits == 4 else -1
    fields = {"m": m, "n": n, "k": k, "bits": bits, "group_size": group_size}
    return fields | {
        "lhs": "bfloat16",
        "float32_scale": False,
        "zero": "none",
        "early_start": early_start,
    }


def write(path, problems, times):
    """Writes a file in the driver's format, with times computed by a function of the choice."""
    with gzip.open(path, "wt") as file:
        for fields in problems:
            asked = fit_costs.asked(DEVICE | fields)
            question = ffi.question(**asked)
            found = [(ffi.KERNELS.index(c[0]), *c[1:]) for c in ffi.candidates(**asked)]
            choices = [[*choice, times(fields["m"], question, choice)] for choice in found]
            line = {"device": DEVICE, "problem": fields, "choices": choices}
            file.write(json.dumps(line) + "\n")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Copies of the files that the tool writes."""
    for path in fit_costs.ROOT.glob("cuda/kernels/*/costs.inc"):
        copy = tmp_path / path.relative_to(fit_costs.ROOT)
        copy.parent.mkdir(parents=True)
        shutil.copy(path, copy)
    monkeypatch.setattr(fit_costs, "ROOT", tmp_path)
    return tmp_path


PROBLEMS = [
    problem(m, n, k, bits)
    for m in (1, 8, 16, 32, 64, 256, 1024)
    for n, k in ((4096, 4096), (1536, 8960), (14336, 4096))
    for bits in (4, 8)
]


def test_a_fit_finds_a_device_of_other_costs(root, capsys):
    """On it, the first Hopper kernel is slower for small M and for 8-bit weights."""
    stream = ffi.KERNELS.index("qmm_sm90_stream")
    truth = {i: np.array(ffi.CostModel(name, []).constants) for i, name in enumerate(ffi.KERNELS)}
    truth[stream][[0, 1, 15, 16]] *= 0.4  # rates of up to 8 rows and of 8 bits

    def times(_, question, choice):
        model = ffi.CostModel(ffi.KERNELS[choice[0]], [(question, choice)])
        return model.microseconds(truth[choice[0]].tolist())[0]

    write(root / "world.jsonl.gz", PROBLEMS, times)
    problems = fit_costs.load([root / "world.jsonl.gz"])
    assert len(problems) == len(PROBLEMS)
    assert fit_costs.selected_regret(problems).worst > 0.05
    fit_costs.main([str(root / "world.jsonl.gz"), "--kernels", "qmm_sm90_stream"])
    before, after = capsys.readouterr().out.split("after:")
    assert before.startswith(f"before, {len(PROBLEMS)} problems:")
    path = root / "cuda/kernels/sm90_stream/costs.inc"
    assert "Generated by tools/fit_costs.py from benchmarks/results/fit: world." in path.read_text()
    found, expected = fit_costs.read_constants(path), truth[stream]
    np.testing.assert_allclose(found[[0, 1, 15, 16]], expected[[0, 1, 15, 16]], rtol=0.2)
    worst = max(map(float, re.findall(r"worst +([\d.]+)%", after.partition("world")[2])))
    assert worst < 2
    model = fit_costs.Kernel(stream, problems)
    there = np.isfinite(model.times)
    np.testing.assert_allclose(model.costs(found)[there], model.times[there], rtol=0.15)


def test_a_table_contains_only_clearly_faster_choices(root, monkeypatch):
    """For small M, choices must also be no slower under PDL."""

    def times(m, _, choice):
        return faster.get((m, choice), 10.0)

    def choices(fields):
        found = ffi.candidates(**fit_costs.asked(DEVICE | fields))
        return [(ffi.KERNELS.index(c[0]), *c[1:]) for c in found]

    fields = [problem(16, 4096, 4096), problem(64, 4096, 4096), problem(128, 4096, 4096)]
    fast = choices(fields[0])[3]
    faster = {(16, fast): 8.0, (64, choices(fields[1])[2]): 8.9}
    write(root / "a.jsonl.gz", fields, times)
    found = tables.read(fit_costs.write_table(fit_costs.load([root / "a.jsonl.gz"])))
    assert [(each.product.m, each.min_m, each.us) for each in found.entries] == [
        (16, 1, 8.0),
        (64, 49, 8.9),
    ]
    assert all(each.default_us == 10 for each in found.entries)
    assert tables._set(found) == []
    early = [problem(16, 4096, 4096, early_start=True)]
    for us, listed in ((9.0, [64]), (8.0, [16, 64])):
        write(root / "b.jsonl.gz", early, lambda *case, us=us: us if case[-1] == fast else 8.0)
        found = tables.read(fit_costs.write_table(fit_costs.load(sorted(root.glob("?.jsonl.gz")))))
        assert [each.product.m for each in found.entries] == listed


def test_the_table_of_the_package_matches_the_data(root):
    written = tables.read(fit_costs.write_table(fit_costs.load(PATHS)))
    shipped = tables.read(tables._SHIPPED / "NVIDIA-H200.json")
    assert written.entries == shipped.entries and written.device == shipped.device
    assert 0 < len(shipped.entries) < 100
