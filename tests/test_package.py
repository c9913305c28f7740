"""The package as a whole: what it needs, what it imports, how it is laid out."""

import ast
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxcomp as jc

PACKAGE = Path(jc.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
name_of = lambda path: str(path.relative_to(PACKAGE.parent))


def requirements_of(name, seen):
    """Names of a distribution and of all that it requires, without extras."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in seen:
        return
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return  # only needed on other platforms
    seen[key] = distribution
    for requirement in distribution.requires or []:
        if "extra ==" not in requirement:
            requirements_of(re.match(r"[\w.\-]+", requirement)[0], seen)


def test_imports_in_an_environment_without_flax(tmp_path):
    """A bare interpreter that sees only jaxcomp and what its run-time dependencies require."""
    found = {}
    requirements_of("jaxcomp", found)
    assert {"jax", "optax", "chex", "numpy"} <= set(found)
    assert not {"flax", "matplotlib", "scikit-learn", "rich", "orbax-checkpoint"} & set(found)
    for key, distribution in found.items():
        if key == "jaxcomp":
            continue
        for top in {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}:
            source = Path(distribution.locate_file(top))
            if source.exists() and not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(source)
    (tmp_path / "jaxcomp").symlink_to(PACKAGE)
    modules = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in MODULES]
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "import importlib, jax\n"
        f"for name in {modules!r}: importlib.import_module(name.removesuffix('.__init__'))\n"
        "import jaxcomp as jc\n"
        "x = jc.roundtrip(jc.top_k(k=1), jax.numpy.ones(3), key=jax.random.key(0))[0]\n"
        "assert 'flax' not in sys.modules and 'sklearn' not in sys.modules\n"
        "try: import flax\n"
        "except ImportError: print('no flax, and it works', float(x.sum()))"
    )
    result = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout == "no flax, and it works 1.0\n", result.stderr


def imported(path):
    """Names of modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


LEVELS = ["packing", "select", "codes", "payloads", "compressors", "algorithms", "exchange", "transforms"]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path):
    """packing/select -> payloads -> compressors -> algorithms -> exchange -> transforms; no experiments, no flax."""
    names = list(imported(path))
    assert not [
        name for name in names if name.split(".")[0] in ("experiments", "flax", "sklearn", "matplotlib", "rich")
    ]
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if here in LEVELS:
        above = LEVELS[LEVELS.index(here) + 1 :]
        assert not [name for name in names if name.startswith(tuple(f"jaxcomp.{level}" for level in above))]


NO_THEORY = ("by_path", "power_sgd", "refresh", "set_amounts", "warm_up")  # neither omega nor alpha
COLLECTIVES = {"psum", "pmean", "pmax", "pmin", "all_gather", "all_to_all", "psum_scatter", "ppermute", "axis_index"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_collectives_are_called_in_one_file(path):
    """Types of varying values need the number of a worker, and nothing else does."""
    used = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lax"
    }
    allowed = {"collectives.py": COLLECTIVES, "varying.py": {"axis_index"}}
    assert not used & COLLECTIVES - allowed.get(path.name, set())


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_are_documented_and_short(path):
    """Lines of a function are counted without its docstring."""

    def length(node):
        doc = node.body[0] if ast.get_docstring(node) else None
        return node.end_lineno - node.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)

    text = path.read_text()
    assert ast.get_docstring(ast.parse(text))
    assert "__all__" in text
    assert text.count("\n") <= 400
    assert not [
        node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and length(node) > 80
    ]
    module = importlib.import_module(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    )
    assert sorted(module.__all__) == sorted(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)


GROUPS = (jc.methods, jc.contrib, jc.collectives, jc.replicas, jc.state)
PUBLIC = sorted({*jc.__all__, *(name for group in GROUPS for name in group.__all__)})


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    thing = getattr(jc, name)
    assert inspect.getdoc(thing)
    factory = getattr(thing, "__module__", "").startswith(("jaxcomp.compressors", "jaxcomp.algorithms"))
    if factory and callable(thing) and name != "roundtrip":  # which takes one
        doc = inspect.getdoc(thing)
        assert ">>>" in doc, "one doctest"
        assert "Raises:" in doc or name in ("identity", "natural"), "errors"
        assert "omega" in doc or "alpha" in doc or name in NO_THEORY, "theory"


def test_versions_agree():
    assert importlib.metadata.version("jaxcomp") == jc.__version__
