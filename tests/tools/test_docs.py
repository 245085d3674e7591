"""Every Python block of the pages and of the public docstrings runs, and the README's links exist.
`make docs` checks the links of docs/."""

import ast
import atexit
import functools
import inspect
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from pretrained import IDS, Pretrained

import jaxlowbit as jl
from jaxlowbit import checkpoint as jl_checkpoint
from jaxlowbit import linen as jl_linen
from jaxlowbit import llm as jl_llm
from jaxlowbit import nnx as jl_nnx
from jaxlowbit import quantizers as jl_quantizers
from jaxlowbit import qwix as jl_qwix

ROOT = Path(__file__).parents[2]
QUICKSTART = (ROOT / "examples/quickstart.py").read_text()  # test_examples.py runs it
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


WHOLE_PROGRAMS = ("first_product.md", "first_model.md")


def public(module):
    names = vars(module).items()
    return {k: v for k, v in names if not k.startswith("_") and not inspect.ismodule(v)}


MODULES = (jl, jl_nnx, jl_linen, jl_llm, jl_quantizers, jl_checkpoint, jl_qwix)
PUBLIC = [(m, name) for m in MODULES for name in public(m)]
NAMES = sorted(f"{module.__name__}.{name}" for module, name in PUBLIC)
API = (ROOT / "docs/api.md").read_text()


class Model(nnx.Module):
    """A model with every layer that the pages name."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 64, rngs=rngs)
        self.blocks = nnx.List([nnx.Dict(up=nnx.Linear(64, 64, rngs=rngs)) for _ in range(2)])
        self.query = nnx.Einsum("td,dnh->tnh", (64, 2, 32), rngs=rngs)
        self.head = nnx.Linear(64, 64, rngs=rngs)


@functools.cache
def arrays():
    x, w = jnp.ones((8, 512), jnp.bfloat16), jnp.ones((512, 512), jnp.bfloat16)
    q, pair = jl.quantize(w, jl.INT4), jl.quantize(jnp.stack([w, w]), jl.INT4)
    matrices = ("rhs", "q", "q_proj", "k_proj", "v_proj", "w_q", "w_k", "w_v", "w_o", "down")
    given = {"x": x, "w": w, "stacked_layers": pair, "gate_up": pair, "bias": x[0], "residual": x}
    given |= {"attended": x, "mlp_norm": x[0], "next_norm": x[0]}
    return given | dict.fromkeys(matrices, q)


MODULE = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64)])
SIZES: dict[str, Any] = {
    "layers": 1,
    "width": 64,
    "heads": 2,
    "kv_heads": 1,
    "head_size": 32,
    "hidden": 128,
}
MODELS = {
    "model_file": lambda: model_file(),
    "gptq_folder": lambda: ROOT / "tests/data/checkpoints/llama_gptq",
    "config": lambda: jl_llm.Config("llama", **SIZES, vocabulary=256, context=128),
    "rngs": lambda: nnx.Rngs(0),
    "mesh": lambda: jax.make_mesh((8,), ("model",), (AxisType.Auto,), devices=jax.devices("cpu")),
    "model": lambda: Model(nnx.Rngs(0)),
    "attention": lambda: nnx.MultiHeadAttention(2, 64, decode=False, rngs=nnx.Rngs(0)),
    "module": lambda: MODULE,
    "pretrained": Pretrained,
    "input_ids": lambda: IDS,
    "variables": lambda: MODULE.init(jax.random.key(0), arrays()["x"]),
}


@functools.cache
def model_file():
    """A small GGUF file; reading it needs optional packages."""
    for package in ("gguf", "jinja2", "tokenizers"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    from model_files import write_tiny

    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return write_tiny(Path(folder.name))


def given(block):
    """Names that a block may use without defining them: imports, operands and models."""
    imports = {"jax": jax, "jnp": jnp, "jl": jl, "nnx": nnx}
    if "qwix" in block:
        imports["qwix"] = pytest.importorskip("qwix", reason="qwix is not installed")
    nodes = ast.walk(ast.parse(block))
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    return imports | arrays() | {name: make() for name, make in MODELS.items() if name in named}


@pytest.fixture(autouse=True)
def as_readers_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run(block, label, names):
    exec(compile(block, str(label), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_of_pages(page):
    defined = {}  # by previous blocks
    for block in blocks(page.read_text()):
        if block == QUICKSTART:
            continue
        fresh = {} if page.name in WHOLE_PROGRAMS else given(block)
        names = fresh | defined
        run(block, page, names)
        defined = {name: value for name, value in names.items() if value is not fresh.get(name)}


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_blocks_of_docstrings(module, name):
    value = getattr(module, name)
    members = inspect.getmembers(value) if inspect.isclass(value) else []
    for documented in (value, *(member for name, member in members if not name.startswith("_"))):
        for block in blocks(inspect.getdoc(documented) or ""):
            run(block, name, given(block) | public(jl) | public(module))


def test_api_pages_are_complete():
    pages = ROOT.glob("docs/api/*.md")
    listed = [name for page in pages for name in re.findall("^::: (.*)", page.read_text(), re.M)]
    assert sorted(listed) == NAMES


def test_api_table_justifies_every_name():
    rows = re.findall(r"^\| \[`[^|]*#([\w.]+)\) \| [^|]+ \| [^|]+ \|$", API, re.MULTILINE)
    assert sorted(rows) == NAMES
    assert len(rows) <= 80


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = ROOT / (path or page)
        assert target.exists(), path
        headings = re.findall("^#+ (.*)", target.read_text(), re.M) if anchor else [""]
        slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert anchor in slugs, f"{path}#{anchor}"


def test_environment_variables_are_documented():
    sources = [
        path
        for folder in ("jaxlowbit", "cuda", "cpu", "xla_ffi")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".h", ".cc")
    ]
    read = r"""getenv\("(JAXLOWBIT_\w+)"|VARIABLE = "(JAXLOWBIT_\w+)"|environ\W+(JAXLOWBIT_\w+)"""
    found = {"".join(names) for path in sources for names in re.findall(read, path.read_text())}
    page = (ROOT / "docs/environment_variables.md").read_text()
    assert found == set(re.findall(r"^\| `(JAXLOWBIT_\w+)`", page, re.MULTILINE))


@functools.cache
def sources():
    """Files of the repository, and all identifiers in their code."""
    folders = ("jaxlowbit", "cuda", "cpu", "xla_ffi", "tests", "tools", "benchmarks", "cmake")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    code = {".py", ".pyi", ".cc", ".h", ".cu", ".cuh", ".inc", ".def", ".txt", ".cmake"}
    words = {
        w for path in files if path.suffix in code for w in re.findall(r"\w+", path.read_text())
    }
    return {path.relative_to(ROOT).as_posix() for path in files}, words


INTERNALS = [*ROOT.glob("docs/kernels/*.md"), *ROOT.glob("docs/adding_*.md")]
INTERNALS += [
    ROOT / f"docs/{name}.md" for name in ("design", "decisions", "layout", "custom_calls")
]
INTERNALS += [ROOT / f"docs/{name}.md" for name in ("selection", "compiling")]
OTHERS = {"mosaic_gpu.kernel"}  # names of other packages


@pytest.mark.parametrize("page", sorted(INTERNALS), ids=lambda page: page.stem)
def test_internals_pages_name_existing_files(page):
    files, words = sources()
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for name in set(re.findall(r"`([\w./:]+)`", text)) - OTHERS:
        if re.search(r"\.(py|cuh?|h|cc|inc|def)$", name):
            assert any(f"/{file}".endswith(f"/{name}") for file in files), name
        elif "_" in name or re.search("[a-z][A-Z]", name):
            assert set(re.findall(r"\w+", name)) <= words or any(name in f for f in files), name
    assert len(page.read_text().splitlines()) <= 150


def test_every_question_has_an_anchor():
    """Anchors make answers linkable without a heading for each question."""
    text = (ROOT / "docs/faq.md").read_text()
    questions = re.findall(r"^.*?\*\*[^*]*\?\*\*", text, re.MULTILINE)
    anchors = [re.match(r'<a id="([a-z0-9-]+)"></a>\*\*', question) for question in questions]
    names = [anchor[1] for anchor in anchors if anchor]
    assert len(names) == len(questions) == len(set(names)) > 30


def test_a_row_in_two_comparisons_is_equal_in_both():
    rows: dict[str, str] = {}
    for line in (ROOT / "docs/comparison.md").read_text().splitlines():
        if match := re.match(r"\| ([^|]+) \| ([^|]+) \|", line):
            assert rows.setdefault(match[1], match[2]) == match[2], match[1]
    assert "8-bit activations" in rows
