"""The documentation: its code runs, every public name has a place in it, and no link is broken."""

import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import AXIS, mesh_of, mesh_step, vmap_step

import jaxcomp as jc
from jaxcomp.exchange import measure
from jaxcomp.exchange.routes import route
from jaxcomp.payloads import registry as payloads_registry

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DEVELOPMENT = DOCS / "development"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
TUTORIALS = sorted(
    page for room in ("tutorials", "guides") for page in (DOCS / room).glob("*.md") if "```python" in page.read_text()
)
QUICK = ("federated",)
NEEDS = {"equinox": "equinox", "haiku": "haiku"}  # pages that run where these are installed
PUBLIC_MODULES = ("allocate", "collectives", "contrib", "methods", "payloads", "prox", "replicas")
PUBLIC_MODULES += ("smoothness", "state", "testing", "theory", "wire", "federated", "federated.flower", "transports")


def code_of(page):
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


# ------------------------------------------------------------------------------------------------
# Code


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page.stem in QUICK else pytest.mark.slow) for page in TUTORIALS],
    ids=lambda page: page.stem,
)
def test_a_tutorial_runs(page):
    """As a script of its own: all blocks of the page, one after the other."""
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    code = code_of(page)
    command = [sys.executable, "-W", "error", "-c", code]
    environment = {**os.environ, "JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    falls = [tuple(map(float, pair)) for pair in re.findall(r"from ([\d.e+-]+) to ([\d.e+-]+)", result.stdout)]
    assert len(falls) >= len(re.findall(r"^ *for \w+ in range\(.*\):$", code, re.MULTILINE)), "a loop prints no loss"
    assert all(last < first for first, last in falls), falls


@pytest.mark.parametrize("name", ["road", "backends"])
def test_excerpts_are_what_the_file_holds(name):
    """Each is a run of lines, but for blank ones, of the file that is named before it."""
    written = lambda text: [line for line in text.splitlines() if line.strip()]
    text = (DOCS / "explanations" / f"{name}.md").read_text()
    before, *blocks = text.split("```py\n")
    assert blocks
    for block in blocks:
        file, excerpt = re.findall(r"`(jaxcomp/[\w/]+\.py)`", before)[-1], block.split("```")[0]
        before += block
        lines, wanted = written((ROOT / file).read_text()), written(excerpt)
        runs = ("\n".join(lines[i : i + len(wanted)]) for i in range(len(lines)))
        assert "\n".join(wanted) in map(textwrap.dedent, runs), f"{file}:\n{excerpt}"


@pytest.mark.usefixtures("standard_promotion")
def test_the_algorithm_of_the_page_runs_and_remembers(seed):
    names = {}
    exec(compile(code_of(DEVELOPMENT / "algorithm.md"), "algorithm.md", "exec"), names)
    rng = np.random.default_rng(seed)
    params = {"a": jnp.zeros((40, 30)), "b": jnp.zeros((40, 30)), "bias": jnp.zeros(5)}
    grads = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal((4, *p.shape)), jnp.float32), params)
    tx = jc.compressed_mean(names["low_rank"](2), AXIS)
    state, step = vmap_step(tx, params)
    total = jax.tree.map(jnp.zeros_like, params)
    for _ in range(3):
        direction, state = step(state, grads)
        assert np.linalg.matrix_rank(direction["a"]) == 2
        np.testing.assert_allclose(direction["bias"], grads["bias"].mean(0), rtol=1e-5, atol=1e-6)
        total = jax.tree.map(jnp.add, total, direction)
    memory = jc.state.by_leaf(state, state.local.algorithm.memory)
    for name in ("a", "b"):  # what was not delivered in three rounds is remembered
        left = np.asarray(memory[name]).reshape(4, 40, 30).mean(0)
        np.testing.assert_allclose(total[name] + left, 3 * grads[name].mean(0), rtol=1e-4, atol=1e-4)
    fewer, _ = jc.init_state(tx, params, 2, AXIS)
    assert jc.redistribute(state, fewer).local.algorithm.memory[-1].shape[0] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_the_compressor_of_the_page_is_unbiased_and_is_exchanged(seed):
    names = {}
    exec(compile(code_of(DEVELOPMENT / "compressor.md"), "compressor.md", "exec"), names)
    compressor = names["every_nth"](5)
    x = jax.random.normal(jax.random.key(seed), (23,))
    keys = jax.random.split(jax.random.key(seed + 1), 4000)
    draws = jax.jit(jax.vmap(lambda key: jc.roundtrip(compressor, x, key=key)[0]))(keys)
    # The mean of N draws has a standard deviation of at most |x_j| sqrt(4 / N); six of them.
    assert np.all(np.abs(draws.mean(0) - x) <= 6 * np.abs(x) * np.sqrt(4 / 4000))
    error = jnp.sum((draws - x) ** 2, axis=1).mean() / jnp.sum(x**2)
    np.testing.assert_allclose(error, compressor.spec.omega(x.size), rtol=0.1)
    tx = jc.compressed_mean(jc.direct(compressor), AXIS)
    grads = jax.random.normal(jax.random.key(seed + 2), (4, 3000))
    state, step = vmap_step(tx, grads[0])
    first, state = step(state, grads)
    second, state = step(state, grads)
    for direction in (first, second):
        kept = np.asarray(direction) != 0
        np.testing.assert_allclose(direction[kept], 5 * grads.mean(0)[kept], rtol=1e-5, atol=1e-6)
    assert jc.info(state).chosen == "sum"


@pytest.mark.usefixtures("standard_promotion")
def test_the_route_of_the_page_is_given_as_it_is(capsys, monkeypatch):
    """One file, no line: `via=` takes the value, under vmap and on a mesh, as the ledger counts it."""
    known = [*measure.NAMES]
    for module in (route, measure):
        monkeypatch.setattr(module, "NAMES", known)
    names = {}
    exec(compile(code_of(DEVELOPMENT / "route.md"), "route.md", "exec"), names)
    assert capsys.readouterr().out == "doubling 4800.0\ngather 4800.0\n"
    tx = jc.compressed_mean(names["algorithm"], AXIS, via=names["DOUBLING"])
    state, step = mesh_step(tx, names["grads"][0], mesh_of())
    direction, after = step(state, names["grads"])
    np.testing.assert_array_equal(direction, names["directions"][0])
    assert jc.info(after).chosen == "doubling"
    assert jc.info(after).sent_bytes == jc.ledger(step, state, names["grads"]).total_bytes


@pytest.mark.usefixtures("standard_promotion")
def test_the_payload_of_the_page_is_measured_and_crosses(monkeypatch):
    """One file, no line: its own type by every route, in error feedback, and as bytes."""
    for registry in ("_families", "_readers"):
        monkeypatch.setattr(f"jaxcomp.payloads.registry.{registry}", dict(getattr(payloads_registry, registry)))
    names = {}
    exec(compile(code_of(DEVELOPMENT / "payload.md"), "payload.md", "exec"), names)
    payload, message, x_hat = names["payload"], names["message"], names["x_hat"]
    assert jc.lane_bytes(payload) == 2 * 1000 + 4
    assert jc.code_bits(payload) == 8 * jc.lane_bytes(payload)
    assert len(message) < jc.lane_bytes(payload) + 40
    np.testing.assert_allclose(x_hat, np.linspace(5, 6, 1000), atol=3e-4)
    with pytest.raises(TypeError, match=r"wire.encode: Shifted\.shift ndim must be 0; got 1"):
        jc.wire.encode(names["Shifted"](payload.values, payload.shift[None]))
    x = jax.random.normal(jax.random.key(0), (4, 3000))
    known = names["shifted"]._replace(spec=names["shifted"].spec._replace(alpha=lambda d: 0.9))
    for via in ("gather", "ladder"):
        tx = jc.compressed_mean(jc.error_feedback(known), AXIS, via=via)
        state, step = vmap_step(tx, x[0])
        np.testing.assert_allclose(step(state, x)[0], x.mean(0), atol=2e-3)


@pytest.mark.parametrize("page", sorted(DEVELOPMENT.glob("*.md")), ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page):
    named = set(re.findall(r"`((?:jaxcomp|tests|experiments|docs)/[a-z_/]+(?:\.py)?/?)`", page.read_text()))
    assert not [name for name in named if not (ROOT / name).exists()]


# ------------------------------------------------------------------------------------------------
# Names


def documented():
    """Dotted names that the reference pages describe."""
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    return set(re.findall(r"\.\. auto(?:function|class|data|exception):: (jaxcomp\.\S+)", text))


def value_of(dotted):
    """What a dotted name stands for; the module `jaxcomp.ledger` is hidden by the function."""
    parts = dotted.split(".")[1:]
    value = jc
    for i, part in enumerate(parts):
        if i + 1 < len(parts) and f"jaxcomp.{part}" in sys.modules:
            value = sys.modules[f"jaxcomp.{part}"]
        else:
            value = getattr(value, part)
    return value


def test_every_public_name_is_on_a_reference_page():
    import jaxcomp.federated  # noqa: F401

    values = [(name, value_of(name)) for name in documented()]
    missing = []
    for prefix in ("", *PUBLIC_MODULES):
        module = sys.modules[f"jaxcomp.{prefix}".rstrip(".")]
        for name in module.__all__:
            value = getattr(module, name)
            is_module = type(value) is type(sys)
            same = any(value is other and dotted.endswith(f".{name}") for dotted, other in values)
            if not (is_module or same or isinstance(value, str)):
                missing.append(f"{prefix}.{name}".lstrip("."))
    assert not missing
    submodules = {name for name in jc.__all__ if type(getattr(jc, name)) is type(sys)}
    assert submodules <= set(PUBLIC_MODULES)


def test_every_parameter_is_named_in_its_docstring():
    import jaxcomp.federated  # noqa: F401

    functions = {name: value for name in documented() if inspect.isfunction(value := value_of(name))}
    given = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = {}
    for name, function in functions.items():
        named = [x.name for x in inspect.signature(function).parameters.values() if x.kind not in given]
        lacking = [each for each in named if not re.search(rf"\b{each}\b", inspect.getdoc(function) or "")]
        missing |= {name: lacking} if lacking else {}
    assert len(functions) > 100
    assert missing == {}


# ------------------------------------------------------------------------------------------------
# Links


FENCE = re.compile(r"^```([^\n]*)\n.*?^```$", flags=re.DOTALL | re.MULTILINE)
LISTS = re.compile(r"^```\{toctree\}\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Of the headings of a page, as GitHub and MyST make them."""
    text = FENCE.sub("", page.read_text())
    heads = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_no_relative_link_is_broken():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
    assert {page.name: broken for page in pages if (broken := broken_links(page))} == {}


def broken_links(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))
    links += re.findall(r"^```\{literalinclude\} (\S+)", text, re.MULTILINE)
    for block in LISTS.findall(text):
        entries = [line for line in block.splitlines() if line.strip() and not line.startswith(":")]
        links += [f"{entry}.ipynb" if "notebooks/" in entry else f"{entry}.md" for entry in entries]
    broken = []
    for link in links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target.parent == DOCS / "notebooks":  # copied there when the documentation is built
            target = ROOT / "notebooks" / target.name
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def test_names_of_the_library_can_be_imported_as_written():
    """`jc.a.b` and `jaxcomp.a.b` on every page; modules are imported. doubling.py is the file that a reader adds."""

    def is_there(parts):
        for end in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:end]))
            except ImportError:
                continue
            return all((found := getattr(found, name, None)) is not None for name in parts[end:])

    pages = [ROOT / "README.md", *PAGES]
    words = [re.findall(r"(?<![\w./])(?:jc|jaxcomp)((?:\.[A-Za-z_]\w*)+)", page.read_text()) for page in pages]
    names = {f"jaxcomp{name}" for each in words for name in each} - {"jaxcomp.exchange.routes.doubling"}
    assert len(names) > 100
    assert [name for name in sorted(names) if not is_there(name.split("."))] == []


def test_every_page_is_in_a_contents_list():
    listed = {DOCS / "index.md"}
    for page in PAGES:
        for block in LISTS.findall(page.read_text()):
            listed |= {(page.parent / f"{line.strip()}.md").resolve() for line in block.splitlines() if line.strip()}
    assert not [page for page in PAGES if page not in listed]


# ------------------------------------------------------------------------------------------------
# The pages as they are built


@pytest.mark.slow
def test_it_builds_without_a_warning(tmp_path):
    pytest.importorskip("myst_nb", reason='needs pip install ".[docs]"')
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(tmp_path / "doctrees")]
    command += ["-b", "html", str(DOCS), str(tmp_path / "html")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    page = (tmp_path / "html" / "reference" / "compressors_sparse.html").read_text()
    assert "jaxcomp.top_k" in page
    assert "system-message" not in page
