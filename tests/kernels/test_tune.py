"""Measured choices: candidates, storage and selection."""

import functools
import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jaxlowbit
from jaxlowbit import INT4, INT8, MXFP8, UINT4, Format, explain, quantize, tune
from jaxlowbit._backends import selection
from jaxlowbit._backends import times as timing
from jaxlowbit._backends.selection import Choice, Product
from jaxlowbit._command import main
from jaxlowbit._tuning import devices, report
from jaxlowbit._tuning import measure as measuring
from jaxlowbit._tuning import table as tables
from jaxlowbit._tuning.table import Entry, Table
from jaxlowbit._tuning.weights import Weight, find
from jaxlowbit.nnx import quantize_model

H200 = devices.GPUS["H200"].facts
PRODUCT = Product(16, 4096, 4096, INT4, "bfloat16", "bfloat16")
OTHER = Choice("qmm_sm90_stream", 16, 1, 8, 0, 1)  # differs from the cost model


def table(*entries, driver: str | None = "580.1", **changes):
    entries = entries or (entry(),)
    return Table(H200, driver, jaxlowbit.__version__, entries)._replace(**changes)


def entry(choice=OTHER, **changes):
    product = PRODUCT._replace(**changes)
    return Entry(product, choice, 5.0, selection.candidates(product, H200)[0], 6.0)


def abstract(shape, format, scale_dtype=jnp.bfloat16):
    weight = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return jax.eval_shape(lambda weight: quantize(weight, format, scale_dtype=scale_dtype), weight)


def explained(m, n=4096, k=4096, format=INT4, scale_dtype=jnp.bfloat16):
    rhs = abstract((k, n), format, scale_dtype)
    return explain(jax.ShapeDtypeStruct((m, k), jnp.bfloat16), rhs, device="H200")


DRIVER, SHIPPED = tables._DRIVER, tables._SHIPPED


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A separate cache, no driver and no packaged table; no tuned choices before or after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(tables.VARIABLE, raising=False)
    monkeypatch.setattr(tables, "_DRIVER", tmp_path / "driver")
    monkeypatch.setattr(tables, "_SHIPPED", tmp_path / "shipped")
    selection.set_tuned(H200, [])
    yield tmp_path / "jaxlowbit"
    selection.set_tuned(H200, [])


# --- the choices ----------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 32, 100, 4096])
@pytest.mark.parametrize(
    "changes", [{}, {"format": UINT4, "scale": "float32"}, {"n": 72, "k": 200}]
)
def test_candidates_run_and_begin_with_the_default(m, changes):
    product = PRODUCT._replace(m=m, **changes)
    for name in ("H200", "A100", "L4"):
        facts = devices.GPUS[name].facts
        found = selection.candidates(product, facts)
        chosen = selection.choose(
            *(1, m, product.k, product.n, jnp.dtype("bfloat16"), jnp.dtype(product.scale)),
            product.format,
            device=facts,
        )
        default = found[0]
        assert default.kernel == chosen["kernel"]
        assert (default.block_m, default.split_k) == (chosen["block_m"], chosen["split_k"])
        assert len(found) > 1 and len(set(found)) == len(found)
        assert selection.set_tuned(facts, [(product, choice) for choice in found]) == [""] * len(
            found
        )
        selection.set_tuned(facts, [])


def test_there_are_no_candidates_without_a_kernel():
    assert selection.candidates(PRODUCT._replace(k=2**31), H200) == []


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (OTHER._replace(kernel="qmm"), "there is no kernel qmm"),
        (OTHER._replace(split_k=3), "its clusters have 1, 2 or 4 CTAs"),
        (OTHER._replace(slices=4096), "slices is beyond those of a cluster"),
        (Choice("qmm_sm80", 12, 1, 0, 0, 1), "block_m is none of its tiles"),
        (Choice("qmm_sm80", 16, 17, 0, 0, 1), "split_k is beyond its stages"),
        (Choice("qmm_sm90", 64, 1, 0, 99, 1), "tile is none of its tiles"),
        (Choice("qmm_sm90", 64, 1, 0, 2, 4), "its clusters have 1 or 2 CTAs"),
        (Choice("qmm_sm90", 64, 2, 0, 2, 2), "peers share whole tiles"),
    ],
)
def test_choices_that_cannot_run_are_left_out(choice, reason):
    assert selection.set_tuned(H200, [(PRODUCT, choice), (PRODUCT, OTHER)]) == [reason, ""]


def test_a_table_affects_only_its_products():
    few = OTHER._replace(block_m=8, split_k=4)
    selection.set_tuned(H200, [(PRODUCT, OTHER), (PRODUCT._replace(m=4), few)])
    measured = "measured to be the fastest on NVIDIA H200"
    assert "block_m=8, split_k=4" in (text := explained(3)) and measured in text
    # The next larger M, in the smallest tile that fits.
    assert "block_m=8, split_k=1" in (text := explained(5)) and measured in text
    assert "block_m=16, split_k=1" in (text := explained(16)) and measured in text
    # Padded to the same atoms.
    assert measured in explained(16, n=4090)
    for text in (
        explained(17),
        explained(16, n=4096 + 64),
        explained(16, format=INT8),
        explained(16, format=UINT4),
        explained(16, scale_dtype=jnp.float32),
        explained(16, k=4095),  # unsupported by the measured kernel
    ):
        assert measured not in text
    assert measured not in explain(
        jax.ShapeDtypeStruct((3, 16, 4096), jnp.bfloat16),
        abstract((3, 4096, 4096), INT4),
        device="H200",
    )


def test_an_entry_may_cover_a_short_range_of_m():
    entries = [(PRODUCT, OTHER, 12), (PRODUCT._replace(m=4), OTHER._replace(block_m=8))]
    assert selection.set_tuned(H200, entries) == ["", ""]
    for m in (*range(1, 5), *range(12, 17)):
        assert "measured" in explained(m), m
    for m in (*range(5, 12), 17):
        assert "measured" not in explained(m), m


# --- the file -------------------------------------------------------------------------------------


def test_written_entries_are_read(home):
    written = table(entry(), entry(format=UINT4, scale="float32"))
    tables.write(home / "file.json", written)
    assert tables.read(home / "file.json") == written
    assert [path.name for path in home.iterdir()] == ["file.json"]


def test_the_table_is_read_at_startup(home, monkeypatch):
    """With one of two cached tables damaged, a line reports it and the other is used."""
    monkeypatch.setattr(tables, "_DRIVER", DRIVER)  # the other process finds it, too
    here = tables.driver_version() or "580.1"
    tables.write(tables.path_for(H200.name), table(driver=here))
    (home / "other.json").write_text("{")
    program = """
        import jax, jax.numpy as jnp, jaxlowbit
        weight = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
        rhs = jax.eval_shape(lambda w: jaxlowbit.quantize(w, jaxlowbit.INT4), weight)
        print(jaxlowbit.explain(jnp.ones((16, 4096), jnp.bfloat16), rhs, device="H200"))
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert "measured to be the fastest on NVIDIA H200" in done.stdout, done.stderr
    assert done.stderr.count("RuntimeWarning: jaxlowbit: the choices in") == 1
    assert "other.json are not used: it is damaged" in done.stderr


def driver(tmp_path, model):
    (tmp_path / "driver/gpus/0").mkdir(parents=True)
    (tmp_path / "driver/gpus/0/information").write_text(f"Model: \t\t {model}\nIRQ: 1\n")
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1  Tue\nGCC version: 13.3.0\n"
    (tmp_path / "driver/version").write_text(version)


@pytest.mark.parametrize(
    ("changes", "model", "said"),
    [
        ({}, "NVIDIA L4", "it was measured on NVIDIA H200, and here is NVIDIA L4"),
        ({"jaxlowbit": "0.0.1"}, "NVIDIA H200", r"with jaxlowbit 0\.0\.1, and this is 0\."),
        ({"driver": "570.2"}, "NVIDIA H200", r"with driver 570\.2, and this is 580\.1"),
    ],
)
def test_a_table_of_another_machine_is_not_used(tmp_path, home, monkeypatch, changes, model, said):
    driver(tmp_path, model)
    tables.write(tables.path_for(H200.name), table(**changes))
    monkeypatch.setenv(tables.VARIABLE, str(tables.path_for(H200.name)))
    with pytest.warns(RuntimeWarning, match=rf"{said}.* Run jaxlowbit tune again") as all:
        tables.load()
    assert len(all) == 1 and "measured" not in explained(16)
    if model != H200.name:  # a cache that machines share
        monkeypatch.delenv(tables.VARIABLE)
        tables.load()
    monkeypatch.setenv(tables.VARIABLE, "")
    tables.load()


def test_measurements_of_the_user_override_the_tables_of_the_package(home, monkeypatch):
    few, eight = OTHER._replace(split_k=4), OTHER._replace(split_k=2)
    ours = table(entry(few), entry(few, n=8192), entry(eight, m=12), driver=None)
    tables.write(tables._SHIPPED / "NVIDIA-H200.json", ours)
    tables.load()
    assert "split_k=4" in explained(16) and "split_k=2" in explained(12)
    tables.write(tables.path_for(H200.name), table())
    tables.load()
    assert "split_k=1" in explained(16) and "split_k=1" in explained(12)
    assert "split_k=4" in explained(16, n=8192)
    selection.set_tuned(H200, [])
    monkeypatch.setenv(tables.VARIABLE, "")
    tables.load()
    assert "measured" not in explained(16, n=8192)


def test_the_tables_of_the_package_are_whole(monkeypatch):
    """Every choice is valid and more than 2 percent faster than the default."""
    for path in sorted(SHIPPED.glob("*.json")):
        found = tables.read(path)
        assert tables._set(found) == [] and found.driver is None
        selection.set_tuned(found.device, [])
        for each in found.entries:
            assert each.us < 0.98 * each.default_us and each.choice != each.default
            assert 1 <= each.min_m <= each.product.m


def test_a_table_of_this_machine_is_used(tmp_path, home):
    driver(tmp_path, "NVIDIA H200")
    tables.write(tables.path_for(H200.name), table())
    tables.load()
    assert "measured" in explained(16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found.pop("entries"), r"no table of choices \(KeyError: 'entries'\)"),
        (lambda found: found["entries"][0]["product"].update(m="16"), "TypeError: m is '16'"),
        (lambda found: found["entries"][0]["choice"].update(tile=1 << 40), "tile is 1099511627776"),
        (lambda found: found["entries"][0]["product"].update(format="nf5"), "names no format"),
        (lambda found: found["entries"][0]["product"].update(format="nf4"), "has a codebook"),
        (lambda found: found["entries"][0]["product"].update(format="mxfp4"), "has 8-bit scales"),
        (lambda found: found["entries"][0]["product"].update(lhs="int8"), "lhs int8 and scale"),
        (lambda found: found["entries"][0].update(us=0), "us is 0.0 and default_us 6.0"),
        (lambda found: found["device"].update(num_sms=0), "num_sms is 0"),
    ],
)
def test_a_damaged_file_is_not_used(tmp_path, monkeypatch, change, said):
    path = tmp_path / "tuned.json"
    monkeypatch.setenv(tables.VARIABLE, str(path))
    with pytest.warns(RuntimeWarning, match=r"tuned\.json are not used: No such file"):
        tables.load()
    tables.write(path, table())
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.warns(RuntimeWarning, match=said) as all:
        tables.load()
    assert len(all) == 1


def test_entries_that_cannot_run_are_counted(home):
    wrong = entry(OTHER._replace(split_k=3))
    tables.write(tables.path_for(H200.name), table(wrong, entry(), wrong))
    with pytest.warns(RuntimeWarning, match=r"2 choices of .* are not used, .* 1, 2 or 4 CTAs"):
        tables.load()
    assert "measured" in explained(16)


def test_show(home, capsys):
    with pytest.raises(SystemExit):
        main(["tune", "--show"])
    assert "nothing is stored; name --shapes" in capsys.readouterr().err
    tables.write(tables.path_for(H200.name), table(entry(), entry(OTHER._replace(split_k=4), m=8)))
    main(["tune", "--show"])
    shown = capsys.readouterr().out
    assert "NVIDIA H200, driver 580.1, jaxlowbit 0." in shown
    assert "int4-g128" in shown and "6.00       5.00   1.20  qmm_sm90_stream, block_m=16" in shown
    assert "2 of 2 choices changed; geometric mean of the ratios 1.200" in shown
    assert "used from the next start on" in shown
    tables.write(tables._SHIPPED / "NVIDIA-H200.json", table(driver=None))
    main(["tune", "--show"])
    assert "comes with the package, and is used where you" in capsys.readouterr().out
    tables.write(home / "elsewhere", table())
    main(["tune", "--show", "--out", str(home / "elsewhere")])
    assert "used where JAXLOWBIT_TUNED names it" in capsys.readouterr().out


def test_progress_without_tqdm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(report.reported(iter([entry()]), 2, "GPU")) == [entry()]
    assert "1/2  4096x4096, 16 tokens: 5.00 us" in capsys.readouterr().err


# --- measuring ------------------------------------------------------------------------------------


def test_the_best_choice_is_used_if_clearly_better(monkeypatch):
    """Lowers the call that times candidates, and returns fake times."""

    def times(*operands, product, calls, choices):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands if x is not None]
        call = functools.partial(timing.times, product=product, calls=calls, choices=choices)
        text = jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        assert "custom_call @jaxlowbit_times" in text
        assert f"calls = {calls} : i64" in text and f"tensor<{6 * len(choices)}xi64>" in text
        packed, scale, zero = operands[1:]
        assert packed.shape[0] >= calls > 1 and str(scale.dtype) == "float32"
        assert zero.shape == scale.shape and packed.shape[1:] == (2, 2, 512)
        second = 8 if product.m == 1 else 9.9
        return np.array([10, second, *[11] * (len(choices) - 2)], np.float32)

    monkeypatch.setattr(measuring, "_times", times)
    random_stack = measuring._random_stack
    monkeypatch.setattr(
        measuring,
        "_random_stack",
        lambda key, *args: jax.eval_shape(lambda: random_stack(key, *args)),
    )
    weight = Weight(128, 128, UINT4, "float32")
    found = list(measuring.measure([weight], [1, 64], "bfloat16", H200))
    for entry, m, us in zip(found, (1, 64), (8, 10), strict=True):
        default, second, *_ = selection.candidates(entry.product, H200)
        assert entry.product == Product(m, 128, 128, UINT4, "bfloat16", "float32")
        assert (entry.default, entry.default_us, entry.us) == (default, 10, us)
        assert entry.choice == (second if us < 10 else default)


def test_shapes():
    found = find(["4096x64", (64, 128), (64, 128)], [INT4, INT8], "float16")
    assert found == [
        Weight(n, k, f, "float16") for n, k in ((4096, 64), (64, 128)) for f in (INT4, INT8)
    ]


def test_weights_of_a_model():
    def make():
        return nnx.List([nnx.Linear(200, 128, rngs=nnx.Rngs(0)) for _ in range(2)])

    model = nnx.eval_shape(make)
    quantize_model(model, UINT4)
    expected = [Weight(128, 256, UINT4, "float32")]
    assert find(model, [INT4], "bfloat16") == expected
    assert find(nnx.state(model), [INT4], "bfloat16") == expected
    array = abstract((3, 96, 64), Format(4, 48))
    assert find({"a": array, "b": jnp.ones(3)}, [INT8], "bfloat16") == [
        Weight(64, 96, Format(4, 48), "bfloat16")
    ]


def test_weights_of_a_checkpoint(tmp_path):
    array = quantize(jnp.ones((192, 64)), Format(8, 96, "float"))
    tensors = {
        "model.embed_tokens.weight": np.ones((64, 32), np.float32),
        "model.layers.0.up.weight": np.ones((96, 32), np.float16),
        "model.layers.1.up.weight": np.ones((96, 32), np.float16),
        "model.layers.0.norm.weight": np.ones(32, np.float16),
        "lm_head.weight": np.ones((64, 32), np.float16),
        "other.kernel": np.ones((32, 96), np.float32),
    }
    for leaf in ("packed", "scale", "zero"):
        tensors[f"down.{leaf}"] = np.asarray(getattr(array, leaf))
    save_file(tensors, tmp_path / "model.safetensors")
    expected = {
        Weight(64, 192, array.format, "float32"),
        Weight(96, 32, INT4, "float16"),
        Weight(96, 32, INT4, "float32"),
    }
    for source in (tmp_path, str(tmp_path / "model.safetensors")):
        found = find(source, [INT4], "bfloat16")
        assert set(found) == expected and len(found) == 3


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (["4096"], {}, r"'4096' is no shape; name output channels .* as 14336x4096\."),
        ([(0, 64)], {}, r"\(0, 64\) is no shape"),
        ([], {}, "there are no shapes; name some"),
        ({"w": jnp.ones(3)}, {}, "has no quantized arrays; quantize it first"),
        ("nowhere", {}, "nowhere is no checkpoint; name a .safetensors file"),
        ([(64, 64)], {"tokens": [0]}, r"0 is no number of tokens; name some from 1"),
        ([(64, 64)], {"tokens": []}, "there are no numbers of tokens"),
        ([(64, 64)], {"dtype": "float32"}, "there are choices for bfloat16 and float16"),
        ([(64, 64)], {"format": MXFP8}, "tables are for integers with scales of 16 or 32"),
        (
            {"w": quantize(jnp.ones((64, 64)), MXFP8)},
            {},
            "for these weights: tables are for integers",
        ),
    ],
)
def test_errors(arguments, options, said):
    with pytest.raises(ValueError, match=f"^tune: .*{said}"):
        tune(arguments, **options)


def test_errors_of_the_command(capsys):
    for arguments, said in (
        ([], "name a checkpoint, --shapes, or only --show"),
        (["--shapes", "64", "--tokens", "1"], "jaxlowbit tune: '64' is no shape"),
        (["--shapes", "64x64", "--format", "nf5"], "'nf5' names no format"),
    ):
        with pytest.raises(SystemExit, match=r"^1$"):
            main(["tune", *arguments])
        assert said in capsys.readouterr().err


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_it_needs_a_gpu():
    with pytest.raises(ValueError, match=r"needs an NVIDIA GPU .*, and JAX sees none"):
        tune([(64, 64)])


@pytest.mark.gpu
def test_measured_choices_are_used(tmp_path, monkeypatch):
    """The file lists the measurements, keeps earlier entries, and is used by the next process."""
    path = tmp_path / "tuned.json"
    assert tune([(512, 1024)], tokens=[1, 64], out=path) == path
    assert tune([(512, 1024)], tokens=[16], format=INT8, out=path) == path
    found = tables.read(path)
    assert [(e.product.m, e.product.format) for e in found.entries] == [
        (1, INT4),
        (64, INT4),
        (16, INT8),
    ]
    assert all(0.5 < e.us <= e.default_us < 1000 for e in found.entries), found.entries
    assert tables.misfit(found) is None
    # The choice that the cost model ranks last.
    choice = selection.candidates(found.entries[0].product, found.device)[-1]
    tables.write(path, found._replace(entries=(found.entries[0]._replace(choice=choice),)))
    program = """
        import jax, jax.numpy as jnp, jaxlowbit
        lhs = jax.random.normal(jax.random.key(0), (1, 1024), jnp.bfloat16)
        weight = jax.random.normal(jax.random.key(1), (1024, 512), jnp.bfloat16) / 32
        rhs = jaxlowbit.quantize(weight, jaxlowbit.INT4)
        out = jax.jit(jnp.subtract)(lhs @ rhs, jaxlowbit.quantized_matmul(lhs, rhs, backend="xla"))
        print(jaxlowbit.explain(lhs, rhs), float(jnp.abs(out).max()) < 0.1)
    """
    monkeypatch.setenv(tables.VARIABLE, str(path))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
    )
    assert f"{choice.kernel}, block_m={choice.block_m}, split_k={choice.split_k}" in done.stdout
    assert "measured to be the fastest" in done.stdout and done.stdout.endswith("True\n"), done
    assert "RuntimeWarning: jaxlowbit" not in done.stderr
