"""The benchmark commands, end to end with small shapes."""

import functools
import json
import re
import sys
import types

import benchmark
import compare
import contenders
import decode
import experts
import jax
import jax.numpy as jnp
import numpy as np
import peers
import pytest
import results
import rounded
import shapes
import sweep
import timing
import violations

from jaxlowbit import quantized_ragged_dot as jl_ragged_dot

SMALL = ["--cold-mb", "0", "--calls", "1"]


@pytest.fixture
def quick(monkeypatch):
    """Takes fewer samples."""
    monkeypatch.setattr(timing, "BLOCKS", 3)
    monkeypatch.setattr(timing, "BLOCK_SECONDS", 0.0)
    monkeypatch.setattr(decode, "BLOCKS", 2)


def run(command, *arguments):
    """The exit status of a command."""
    with pytest.raises(SystemExit) as exit:
        command.main([str(argument) for argument in arguments])
    return exit.value.code


def forged(us=10.0, **changes):
    """A row as the command writes them."""
    row = {
        "shape": "256x128", "n": 256, "k": 128, "format": "int4-g128", "dtype": "bfloat16",
        "backend": "jaxlowbit", "m": 1, "method": "jit", "us": us, "quartiles_us": [us, us],
        "bytes": 16896, "copies": 1, "calls": 2, "error_over_bound": 0.25,
    }  # fmt: skip
    return row | changes


def save(path, *rows):
    results.write(path, {"environment": results.environment(), "rows": list(rows)})
    return path


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_command_to_page(quick, tmp_path, capsys):
    out, page = tmp_path / "results.json", tmp_path / "page.md"
    page.write_text(
        "# Page\n\n<!-- results -->\nold\n<!-- end of results -->\n\nThe method.\n", "utf-8"
    )
    arguments = ["--shapes", "1024x1024", "512x1024", "--m", 3, *SMALL, "--out", out]
    backends = ["--backends", "jaxlowbit", "xla", "read"]
    assert run(benchmark, *arguments, *backends, "--markdown", page) == 0
    found = json.loads(out.read_text())
    assert found.keys() == {"environment", "rows", "skipped", "wrong"}
    assert found["wrong"] == []
    assert found["environment"]["jax"] == jax.__version__
    # On a busy machine a small product may be below the noise; it is then skipped.
    assert all("noise" in skipped["reason"] for skipped in found["skipped"])
    assert len(found["rows"]) + len(found["skipped"]) == 6 > len(found["skipped"])
    for row in found["rows"]:
        assert row.keys() == forged().keys()
        assert row["quartiles_us"][0] <= row["us"] <= row["quartiles_us"][1]
        n = int(row["shape"].split("x")[0])
        packed = n * 1024 // 2 + 2 * n * 1024 // 128
        assert row["bytes"] >= {"xla": 2 * n * 1024}.get(row["backend"], packed)
        assert row["m"] is None if row["backend"] == "read" else 0 < row["error_over_bound"] <= 1
    text = page.read_text()
    assert text.startswith("# Page\n\n<!-- results -->\n\n") and text.endswith("The method.\n")
    assert "old" not in text and "**int4-g128, bfloat16**" in text
    assert text.split("<!-- results -->\n\n")[1].split("\n<!-- end")[0] in capsys.readouterr().out


def test_an_interrupted_run_preserves_its_rows(quick, tmp_path, monkeypatch):
    right = contenders.table()["jaxlowbit"]
    broken = right._replace(make=lambda codes, format: 1 / 0)
    monkeypatch.setattr(contenders, "table", lambda: {"jaxlowbit": right, "xla": broken})
    out = tmp_path / "results.json"
    arguments = ["--shapes", "1024x1024", "--m", 3, *SMALL, "--out", out]
    with pytest.raises(ZeroDivisionError):
        benchmark.main([*map(str, arguments), "--backends", "jaxlowbit", "xla"])
    found = json.loads(out.read_text())
    assert len(found["rows"]) + len(found["skipped"]) == 1


def test_wrong_product_is_not_timed(quick, tmp_path, monkeypatch, capsys):
    right = contenders.table()["jaxlowbit"]
    wrong = right._replace(call=lambda x, w: right.call(x, w).at[-1, -1].multiply(1.5))
    monkeypatch.setattr(contenders, "table", lambda: {"jaxlowbit": right, "xla": wrong})
    out = tmp_path / "results.json"
    arguments = ["--shapes", "128x128", "--m", 2, *SMALL, "--backends", "xla", "--out", out]
    assert run(benchmark, *arguments) == 1
    found = json.loads(out.read_text())
    assert found["rows"] == []
    assert [(w["backend"], w["m"]) for w in found["wrong"]] == [("xla", 2)]
    assert found["wrong"][0]["error_over_bound"] > 1
    assert "WRONG, so not timed: xla int4-g128 128x128 m=2" in capsys.readouterr().out


def test_missing_packages_are_skipped_with_the_reason(quick, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "qwix", None)
    peers._import_error.cache_clear()
    out = tmp_path / "results.json"
    names = ["cublas", "gemlite", "qwix"]
    arguments = ["--shapes", "128x128", "--m", 1, *SMALL, "--backends", *names, "--out", out]
    assert run(benchmark, *arguments) == 0
    peers._import_error.cache_clear()
    found = json.loads(out.read_text())
    assert [s["backend"] for s in found["skipped"]] == names
    assert "skipped gemlite int4-g128: import torch fails: " in capsys.readouterr().out


def test_rows_of_the_driver(tmp_path):
    driver = tmp_path / "driver"
    driver.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "assert sys.argv[1:] == ['time', '--m', '1,16', '--bits', '4', '--group', '64',\n"
        "    '--zero', '--n', '256', '--k', '128'], sys.argv\n"
        "for m in (1, 16):\n"
        "    print(f'm={m:<5d} n=256    k=128    w4 g64   bf16 scale bf16 zero out bf16  '\n"
        "        f'block_m 8  split_k 4       {m + 4.25:8.2f} us   2.24 TB/s     8.6 TFLOP/s')\n"
    )
    driver.chmod(0o755)
    out = tmp_path / "results.json"
    arguments = ["--shapes", "256x128", "--m", 1, 16, "--format", "int4-g64-integer"]
    arguments += ["--driver", driver, "--backends", "jaxlowbit", "--out", out]
    assert run(benchmark, *arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["m"], r["us"], r["method"]) for r in rows] == [
        (1, 5.25, "driver"),
        (16, 20.25, "driver"),
    ]
    assert all(row.keys() == forged().keys() for row in rows)


def test_the_driver_gets_the_codebook_entries(tmp_path, capsys):
    driver = tmp_path / "driver"
    driver.write_text('#!/bin/sh\necho "$@"\nexit 1\n')
    driver.chmod(0o755)
    arguments = ["--shapes", "256x128", "--m", 1, "--format", "mxfp4", "--driver", driver]
    assert run(benchmark, *arguments) == 2
    assert "--bits 4 --group 32 --codebook e2m1 --scale e8m0" in capsys.readouterr().err


def test_driver_that_finds_a_wrong_product(tmp_path, capsys):
    driver = tmp_path / "driver"
    driver.write_text("#!/bin/sh\necho 'WRONG  m=1: error over bound 3'\nexit 1\n")
    driver.chmod(0o755)
    assert run(benchmark, "--shapes", "64x64", "--m", 1, "--driver", driver) == 2
    assert "failed: WRONG  m=1: error over bound 3" in capsys.readouterr().err


def test_driver_that_times_something_else(tmp_path, capsys):
    driver = tmp_path / "driver"
    driver.write_text("#!/bin/sh\necho 'm=1 n=64 k=64 w4 1.00 us '\n")
    driver.chmod(0o755)
    assert run(benchmark, "--shapes", "64x64", "64x128", "--m", 1, "--driver", driver) == 2
    assert "gave no time of m=1 and 64x128; it may be older" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--shapes llama9", "'llama9' names no shape; give N x K as 14336x4096"),
        ("--shapes llama3-70b/tp3", "names no shape"),
        ("--format q4", "'q4' names no format; write a name such as"),
        ("--format int9", "bits=9, but a code has 1 to 8 bits"),
        ("--format int1", "represents only -scale and 0"),
        ("--m 0", "'0' is no positive number"),
        ("--backends cutlass", "invalid choice: 'cutlass'"),
        ("--shapes 64x64 --backends xla", "more than 512; name a larger shape"),
        ("--out {}/missing/results.json", "missing does not exist; make it first"),
        ("--plot {}/missing", "missing does not exist; make it first"),
        ("--compare {}/missing.json", "missing.json cannot be read as results"),
        ("--read {}/empty.json", "empty.json contains no results"),
        ("--driver {}/missing --shapes 64x64", "missing cannot be run: No such file"),
        ("--driver {}/missing --dtype float32", "times bfloat16 and float16"),
        ("--format mxfp4 --dtype float16", "8-bit scales are timed with bfloat16 activations"),
        ("--read {}/one.json --compare {}/other.json", "have no cell in common"),
        ("--read {}/one.json --markdown {}/one.json", "has no lines <!-- results"),
        ("--read {}/one.json --shapes standard", "one.json has no results of standard"),
    ],
)
def test_bad_input_gets_a_sentence(tmp_path, arguments, message, capsys):
    (tmp_path / "empty.json").write_text("[]")
    save(tmp_path / "one.json", forged())
    save(tmp_path / "other.json", forged(m=2))
    assert run(benchmark, *arguments.replace("{}", str(tmp_path)).split()) == 2
    assert message in capsys.readouterr().err


# --- reports -------------------------------------------------------------------------------------


def test_table_and_plots(tmp_path, capsys):
    dense = {"format": "dense", "bytes": 65536}
    rows = [
        forged(10.0),
        forged(40.0, backend="xla", **dense),
        forged(30.0, backend="cublas", **dense),
        forged(8.0, backend="read", m=None),
        forged(15.0, m=16),
        forged(30.0, m=16, backend="cublas", **dense),
    ]
    path = save(tmp_path / "results.json", *rows)
    assert run(benchmark, "--read", path) == 0
    printed = capsys.readouterr().out
    assert "| 256x128 | 1 | 10.0 (3.00x) | 40.0 | 30.0 | 8.0 |" in printed
    assert "| 256x128 | 16 | 15.0 (2.00x) | - | 30.0 | 8.0 |" in printed
    assert "| geometric mean |  | 2.45x |  |  |  |" in printed
    assert run(benchmark, "--read", path, "--shapes", "256x128", "64x64") == 0
    assert "| 256x128 | 1 | 10.0 (3.00x)" in capsys.readouterr().out

    pytest.importorskip("matplotlib", reason="the extra `benchmark` has it")
    assert run(benchmark, "--read", path, "--plot", tmp_path) == 0
    written = sorted(tmp_path.glob("*.svg"))
    assert [p.name for p in written] == [
        "speed-up-int4-g128-bfloat16.svg",
        "time-int4-g128-bfloat16.svg",
    ]
    first = [p.read_text() for p in written]
    assert all(text.rstrip().endswith("</svg>") for text in first)
    for text in first:  # legible on phones, 371 pixels wide
        width = float(re.findall(r'viewBox="0 0 ([\d.]+)', text)[0])
        sizes = re.findall(r"font-size: ([\d.]+)px", text)
        assert sizes and min(map(float, sizes)) * 371 / width >= 12
    run(benchmark, "--read", path, "--plot", tmp_path)
    assert [p.read_text() for p in written] == first


def test_plots_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    path = save(tmp_path / "results.json", forged())
    assert run(benchmark, "--read", path, "--plot", tmp_path) == 2
    assert "plots need matplotlib: pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("new_us", "options", "code"),
    [(10.4, [], 0), (10.6, [], 1), (10.6, ["--threshold", 10], 0), (5.0, [], 0)],
)
def test_comparison(new_us, options, code, tmp_path, capsys):
    old = save(tmp_path / "old.json", forged(10.0), forged(5.0, backend="xla", format="dense"))
    new = save(tmp_path / "new.json", forged(new_us), forged(9.0, backend="xla", format="dense"))
    assert run(benchmark, "--read", new, "--compare", old, *options) == code
    printed = capsys.readouterr().out
    assert ("REGRESSED" in printed) == (code == 1)
    assert f"{new_us / 10:.3f}" in printed and "1.800" in printed


def test_methods_are_not_mixed_in_a_comparison():
    jit, driver = forged(), forged(method="driver")
    with pytest.raises(results.InputError, match="no cell in common"):
        compare.cells({"rows": [jit]}, {"rows": [driver]})


# --- a sweep -------------------------------------------------------------------------------------


def test_sweep(tmp_path, monkeypatch, capsys):
    """The fake driver is slower for 2 tokens than for 4; dense times are from a fake PyTorch."""
    driver = tmp_path / "driver"
    driver.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "options = dict(zip(sys.argv[2::2], sys.argv[3::2]))\n"
        "sizes = zip(options['--n'].split(','), options['--k'].split(','), strict=True)\n"
        "sizes = list(sizes)\n"
        "for m, us in ((1, 5.0), (2, 8.0), (4, 7.5)):\n"
        "    for n, k in sizes:\n"
        "        print(f'm={m:<5d} n={n:6s} k={k:6s} w4 g128 stream {us:8.2f} us   2.24 TB/s')\n"
    )
    driver.chmod(0o755)

    def clock(call, x, weights, calls, effort):
        assert effort == timing.THOROUGH
        assert x.shape[1] == weights[0].shape[1] and calls >= 16 and calls % len(weights) == 0
        assert sum(weight.nbytes for weight in weights) > 3 * 60e6  # three times an H200's L2
        return timing.Microseconds(7.4, (7.3, 7.5))

    torch = types.SimpleNamespace(
        bfloat16=np.float16,  # a dtype of the same width
        randn=lambda count, dtype, device: np.zeros(count, dtype),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(peers, "missing", lambda peer: None)
    monkeypatch.setattr(timing, "graph_microseconds_per_call", clock)
    monkeypatch.setattr(sweep, "SHAPES_AT_A_TIME", 2)
    out = tmp_path / "sweep.json"
    sizes = ["8192x4096", "1024x4096", "mixtral-8x7b/down/tp2", "4096x1024"]
    sizes.append("4096x7168")
    arguments = ["--driver", driver, "--shapes", *sizes, "--m", 1, 2, 4, "--out", out]
    assert run(sweep, *arguments) == 1
    printed = capsys.readouterr().out
    # 7.5 does not count as slower than 7.4, nor 8 for a small weight. Each size is measured once.
    assert f"{'8192x4096':24s}  1.48   0.93!  0.99 \n" in printed
    assert f"{'1024x4096':24s}  1.48   0.93   0.99 \n" in printed
    assert f"{'4096x7168':24s}" in printed
    assert "mixtral" not in printed
    assert "2 of 12 cells are slower than dense by more than 4%" in printed
    assert "m=2          8.00 us, dense      7.40: 1.08 times as long" in printed
    assert "4 of 12 cells are faster than with up to 8 more tokens by more than 15%" in printed
    assert "4 of 12 cells are slower than with more tokens by more than 3%" in printed
    assert "geometric mean: 1.11 times as fast as dense" in printed
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 24 and all(row.keys() == forged().keys() for row in rows)
    assert run(sweep, "--read", out, "--plot", tmp_path / "map.svg") == 1
    assert capsys.readouterr().out == printed
    assert "times as fast as dense" in (tmp_path / "map.svg").read_text()


def beside(us, dense_us, **changes):
    """Rows of one cell."""
    dense = {"backend": "cublas", "format": "dense", "method": "cuda graph"}
    return [forged(us, **changes), forged(dense_us, **(changes | dense))]


@pytest.mark.parametrize(
    ("n", "us", "slower"),
    [(8192, 10.3, False), (8192, 10.5, True), (1024, 10.9, False), (1024, 11.1, True)],
)
def test_slower_than_dense(n, us, slower):
    [cell] = violations.cells(beside(us, 10.0, n=n, k=4096))
    assert cell.slower == slower


def test_the_faster_of_dense_products_counts():
    [cell] = violations.cells([*beside(10.0, 12.0), forged(9.0, backend="xla", format="dense")])
    assert cell.dense_us == 9.0


def test_time_must_not_fall_with_more_tokens():
    times = {"a": {1: 10.0, 2: 9.8, 16: 12.0, 4: 9.6}, "b": {1: 20.0, 2: 30.0, 4: 25.0, 8: 24.0}}
    rows = [
        row
        for shape, of_shape in times.items()
        for m, us in of_shape.items()
        for row in beside(us, 1.0, shape=shape, m=m)
    ]
    found = [
        (fall.few.shape, fall.few.m, fall.many.m)
        for fall in violations.falls(violations.cells(rows))
    ]
    assert found == [("a", 1, 4), ("b", 2, 8), ("b", 4, 8)]


def test_time_must_not_jump_within_eight_tokens():
    times = {120: 10.0, 128: 11.0, 136: 13.0, 160: 30.0}
    rows = [row for m, us in times.items() for row in beside(us, 1.0, m=m)]
    found = [(jump.few.m, jump.many.m) for jump in violations.jumps(violations.cells(rows))]
    assert found == [(128, 136)]


def test_random_shapes_are_the_same_in_every_run():
    drawn = shapes.find("random-40")
    assert drawn == shapes.find("random-40") and drawn[:7] == shapes.find("random-7")
    assert len({shape.name for shape in drawn}) == 40
    for shape in drawn:
        assert all(1024 <= size <= 28672 and size % 64 == 0 for size in shape[1:])


def test_tokens_of_a_sweep():
    assert sweep._tokens("12") == [12]
    assert sweep._tokens("8-32/8") == [8, 16, 24, 32]
    drawn = sweep._tokens("random-30")
    assert drawn == sweep._tokens("random-30") and len(set(drawn)) == 30
    assert all(1 <= m <= 4096 for m in drawn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--driver driver --m 16-8/8", "16-8/8 is empty; a range begins with its minimum"),
        ("--driver driver --m 1-", "1-"),
        ("", "one of the arguments --driver --read is required"),
        ("--driver driver", "dense products are PyTorch's, and import torch fails"),
        ("--driver driver --shapes 64x64", "more than 512; name a larger shape"),
        ("--driver driver --shapes unsean", "a set (standard, decode, unseen, or random-40"),
        ("--driver driver --out {}/missing/sweep.json", "missing does not exist; make it first"),
        ("--read {}/ours.json", "have no product of jaxlowbit together with a dense one"),
        ("--read {}/both.json", "the rows have several formats, dtypes or methods"),
    ],
)
def test_bad_sweep_gets_a_sentence(tmp_path, monkeypatch, arguments, message, capsys):
    monkeypatch.setattr(peers, "missing", lambda peer: "import torch fails: none")
    save(tmp_path / "ours.json", forged())
    save(tmp_path / "both.json", *beside(1.0, 1.0), forged(format="int8"))
    assert run(sweep, *arguments.replace("{}", str(tmp_path)).split()) == 2
    assert message in capsys.readouterr().err


# --- a decode step -------------------------------------------------------------------------------

TINY = ["--layers", 1, "--width", 64, "--m", 2, "--format", "int4-g32"]
TINY += ["--variant", "concatenated", "one-call", "block", "int8"]


@pytest.mark.slow
def test_decode(quick, tmp_path, capsys):
    out = tmp_path / "decode.json"
    decode.main([str(argument) for argument in [*TINY, "--out", out]])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["variant"], row["weights"]) for row in rows] == [
        ("concatenated", "int4-g32"),
        ("concatenated", "dense"),
        ("one-call", "int4-g32"),
        ("block", "int4-g32"),
        ("int8", "int4-g32"),
    ]
    features = 64 * (64 + 2 * 16 + 64 + 2 * 224) + 224 * 64
    for row in rows:
        assert row["us"] > 0 and row["blocking_us"] > 0
        limit = decode.LIMITS.get(row["variant"], decode.LIMIT)
        assert 0 <= row["relative_error"] < limit
        if row["weights"] == "dense":
            assert row["bytes"] == 2 * (features + 2 * 64)  # plus scales of two normalizations
    assert "concatenated  dense            m=2" in capsys.readouterr().out


@pytest.mark.slow
def test_decode_variants_agree():
    sizes = decode.Sizes.of(64)
    x = jax.random.normal(jax.random.key(0), (3, 64))
    keys = iter(jax.random.split(jax.random.key(1), 7))
    separate = {
        name: jax.random.normal(next(keys), shape) / 8 for name, shape in sizes.projections.items()
    }
    together = {"q-k-v": ("q", "k", "v"), "o": "o", "gate-up": ("gate", "up"), "down": ("down",)}
    concatenated = {
        name: jnp.concatenate([separate[part] for part in parts], axis=1)
        for name, parts in together.items()
    }
    norms = {"norm-qkv": jnp.full(64, 0.5), "norm-mlp": jnp.full(64, 2.0)}
    separate, concatenated = separate | norms, concatenated | norms
    step = jax.jit(functools.partial(decode.step, sizes=sizes), static_argnames="variant")
    want = step(x, [separate], variant="separate")
    stacked = separate | {"gate-up": jnp.stack([separate["gate"], separate["up"]])}
    for variant, layer in (("concatenated", concatenated), ("one-call", stacked)):
        got = step(x, [layer], variant=variant)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert float(jnp.abs(want - x).max()) > 0.1


@pytest.mark.slow
def test_decode_raises_for_a_wrong_step(quick, monkeypatch):
    dequantize = decode._dequantize
    monkeypatch.setattr(decode, "_dequantize", lambda weight: 0.8 * dequantize(weight))
    assert "a wrong result is not timed" in str(run(decode, *TINY))


def test_rounded(quick, monkeypatch, capsys):
    monkeypatch.setattr(timing, "BUSY_WIDTH", 64)
    monkeypatch.setattr(rounded, "COPIES", 2)
    monkeypatch.setattr(rounded, "CALLS", 2)
    rounded.main(["--m", "1", "3", "--width", "256", "--format", "int4-g128", "e4m3"])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[:2] for line in lines] == [
        [name, m] for name in ("int4-g128", "e4m3") for m in ("1", "3")
    ]


def test_decode_raises_for_other_widths(capsys):
    assert run(decode, "--width", 100) == 2
    assert "--width is 100, but it must be a multiple of 32" in capsys.readouterr().err


# --- experts --------------------------------------------------------------------------------------


def test_experts(monkeypatch, tmp_path, capsys):
    """Results are checked, and written with a table; times are not measured here."""
    time = timing.Microseconds(10.0, (9.0, 11.0))
    monkeypatch.setattr(timing, "microseconds_per_call", lambda *_: time)
    monkeypatch.setattr(experts, "SMALL", {"small": experts.Model(4, 2, 64, 64)})
    out, page = tmp_path / "out.json", tmp_path / "page.md"
    ours = ["--backends", "jaxlowbit", "--tokens", "2"]
    experts.main(["--dry-run", *ours, "--out", str(out), "--markdown", str(page)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["part"] for row in rows] == ["gate_up", "down", "moe", "moe products"]
    assert all(row["us"] == 10 and 0 < row["error_over_bound"] <= 1 for row in rows)
    table = page.read_text()
    assert "| small moe | jaxlowbit, int4-g128 | 10.0 |" in table
    assert "| small not a product | jaxlowbit, int4-g128 | 0.0 |" in table
    monkeypatch.setattr(experts, "ours", lambda x, operands: 1.1 * jl_ragged_dot(x, *operands))
    experts.main(["--dry-run", "--products", *ours])
    assert "wrong by" in capsys.readouterr().out


WORKER = """
import json, sys
print(json.dumps(None), flush=True)
for line in sys.stdin:
    asked = json.loads(line)["tokens"]
    for part, tokens in [(part, tokens) for part in asked for tokens in asked[part]]:
        if tokens == 2:
            sys.exit("a crash")
        answer = {"part": part, "tokens": tokens, "us": 5.0, "usable": tokens != 3}
        print(json.dumps(answer), flush=True)
        if tokens == 3:
            sys.exit()
"""


def test_experts_of_a_process(monkeypatch, tmp_path, capsys):
    """A process that ends costs at most the row that it was asked for."""
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers/humming_worker.py").write_text(WORKER)
    monkeypatch.setattr(experts, "__file__", str(tmp_path / "experts.py"))
    monkeypatch.setattr(experts.importlib.util, "find_spec", lambda name: name)
    humming = experts.Humming()
    model = experts.Model(4, 2, 64, 64, "mxfp4")
    rows = list(humming.rows("small", model, [1, 2, 3, 4]))
    humming.close()
    found = [(row["format"], row["part"], row["tokens"], row["us"]) for row in rows]
    assert found == [
        (format, part, tokens, None if tokens == 2 else 5.0)
        for format in ("mxfp4", "int4-g32")
        for part in ("gate_up", "down")
        for tokens in (1, 2, 3, 4)
    ]
    monkeypatch.setattr(experts.importlib.util, "find_spec", lambda name: None)
    assert list(experts.Humming().rows("small", model, [1])) == []
    said = capsys.readouterr().out
    assert said == "humming is not timed: this Python has no package torch and no humming.\n"
