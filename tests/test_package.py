"""The package as a whole: what it needs, what it imports, how it is laid out."""

import ast
import collections
import functools
import importlib
import importlib.metadata
import inspect
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import jaxcomp as jc
from jaxcomp.cli import main

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


@functools.cache
def nodes_of(path):
    """All nodes of the syntax tree of a file, of which the first is the module."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def imported(path):
    """Names of modules that a file imports, anywhere in it."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def breaking(rule):
    """For each file of the package that breaks a rule, what `rule` finds there."""
    return {name_of(path): found for path in MODULES if (found := rule(path))}


LEVELS = ["packing", "select", "codes", "payloads", "compressors", "algorithms", "exchange", "collectives", "state"]
LEVELS += ["replicas", "transforms"]


def test_imports_go_one_way():
    """packing/select -> payloads -> compressors -> algorithms -> exchange -> state -> transforms; no flax."""

    def wrong(path):
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        above = LEVELS[LEVELS.index(here) + 1 :] if here in LEVELS else []
        outside = ("experiments", "flax", "sklearn", "matplotlib", "rich")
        higher = tuple(f"jaxcomp.{level}" for level in above)
        return [name for name in imported(path) if name.split(".")[0] in outside or name.startswith(higher)]

    assert breaking(wrong) == {}


def test_only_federated_imports_federated():
    inside = lambda path: path.parent.name == "federated"
    assert not breaking(
        lambda path: [x for x in imported(path) if x.startswith("jaxcomp.federated") and not inside(path)]
    )


def test_the_front_door_names_federated_and_does_not_import_it():
    code = (
        "import sys, jaxcomp as jc\n"
        "assert not [name for name in sys.modules if name.startswith('jaxcomp.federated')]\n"
        "try: jc.members\n"
        "except AttributeError as error: print(error)\n"
        "from jaxcomp import federated\n"
        "assert federated.flower.FlowerRounds and jc.federated is federated"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "from jaxcomp import federated" in result.stdout, result.stderr


RIVALS_ASKED_FOR = ("dagc", "sidco", "skcompress")  # functions with an option that names one


def test_rivals_are_imported_by_the_front_door_and_where_an_option_asks_for_one():
    def wrong(path):
        outside = [x for x in nodes_of(path) if "jaxcomp.contrib" in (getattr(x, "module", None) or "")]
        asked = path.parent.name == "compressors" and path.stem in RIVALS_ASKED_FOR
        within = all(node.col_offset > 0 for node in outside)  # a function
        return path.parent.name != "contrib" and outside and not (asked and within)

    assert breaking(wrong) == {}


NO_THEORY = ("by_path", "power_sgd", "refresh", "set_amounts", "warm_up")  # neither omega nor alpha
COLLECTIVES = {"psum", "pmean", "pmax", "pmin", "all_gather", "all_to_all", "psum_scatter", "ppermute", "axis_index"}


def test_collectives_are_called_in_one_file():
    """Types of varying values need the number of a worker, links are measured with bare ones, and that is all."""
    allowed = {
        "exchange/collectives.py": COLLECTIVES,
        "exchange/axes.py": {"axis_index"},
        "plan/measure.py": COLLECTIVES,
    }

    def wrong(path):
        of_lax = [x for x in nodes_of(path) if isinstance(x, ast.Attribute) and getattr(x.value, "id", None) == "lax"]
        return {x.attr for x in of_lax} & COLLECTIVES - allowed.get(path.relative_to(PACKAGE).as_posix(), set())

    assert breaking(wrong) == {}


def test_functions_are_short():
    """At most 80 lines, without the docstring."""

    def length(node):
        doc = node.body[0] if ast.get_docstring(node) else None
        return node.end_lineno - node.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)

    functions = lambda path: [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]
    assert breaking(lambda path: [node.name for node in functions(path) if length(node) > 80]) == {}


def test_modules_are_documented_and_list_what_they_have():
    def wrong(path):
        named = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(named)
        missing = [name for name in module.__all__ if not hasattr(module, name)]
        twice = sorted(module.__all__) != sorted(set(module.__all__))
        return missing or twice or not ast.get_docstring(nodes_of(path)[0])

    assert breaking(wrong) == {}


SEAMS = ("backend", "select")


def places_of(kind, wanted=lambda name: True):
    """Name -> the files that define it: classes anywhere, functions of modules."""
    found = collections.defaultdict(list)
    for path in MODULES:
        for node in nodes_of(path) if kind is ast.ClassDef else nodes_of(path)[0].body:
            if isinstance(node, kind) and wanted(node.name):
                found[node.name].append(path.relative_to(PACKAGE).as_posix())
    return found


def test_a_type_has_a_name_of_its_own():
    assert {name: files for name, files in places_of(ast.ClassDef).items() if len(files) > 1} == {}


def test_few_public_functions_share_a_name():
    """The forms of a backend, which have to, are not counted: all of them stand in backend*.py, or in select*.py."""
    public = places_of(ast.FunctionDef, lambda name: not name.startswith("_"))
    seam = lambda files: any(all(re.fullmatch(rf"{each}\w*\.py", file) for file in files) for each in SEAMS)
    twice = {name: files for name, files in public.items() if len(files) > 1 and not seam(files)}
    assert len(twice) <= 8, twice


def test_types_of_payloads_are_asked_for_only_in_payloads_and_compressors():
    def wrong(path):
        sources = [x for x in nodes_of(path) if isinstance(x, ast.ImportFrom) and x.module]
        types = {a.asname or a.name for x in sources if x.module.startswith("jaxcomp.payloads") for a in x.names}
        asked = [x.args[1] for x in nodes_of(path) if getattr(getattr(x, "func", None), "id", None) == "isinstance"]
        names = {getattr(x, "id", getattr(x, "attr", None)) for each in asked for x in ast.walk(each)}
        return path.relative_to(PACKAGE).parts[0] not in ("payloads", "compressors") and types & names

    assert breaking(wrong) == {}


FRAGMENTS = {"Of", "What", "Where", "Those", "That", "Who", "Which", "With", "By", "As", "Its", "From"}


def test_a_summary_line_is_no_fragment():
    """It is a sentence, or a noun phrase: "Shape of a slice", not "Of a slice"."""

    def wrong(path):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docs = [doc for node in nodes_of(path) if isinstance(node, kinds) and (doc := ast.get_docstring(node))]
        return [doc.splitlines()[0] for doc in docs if re.split(r"[\s,:]", doc)[0] in FRAGMENTS]

    assert breaking(wrong) == {}


GROUPS = (jc.methods, jc.contrib, jc.collectives, jc.replicas, jc.state)
PUBLIC = {name: getattr(module, name) for module in (*GROUPS, jc) for name in module.__all__}


def test_each_public_name_has_one_path():
    lists = [module.__all__ for module in (jc, *GROUPS)]
    assert len(PUBLIC) == sum(map(len, lists))
    for group in GROUPS:
        for name in group.__all__:
            place = f"jc{group.__name__.removeprefix('jaxcomp')}.{name}"
            with pytest.raises(AttributeError, match=f"did you mean {re.escape(place)}\\?"):
                getattr(jc, name)


def test_public_names_are_documented():
    """Factories of methods with an example, errors and theory."""

    def missing(name, thing):
        doc = inspect.getdoc(thing) or ""
        parts = ("jaxcomp.compressors", "jaxcomp.algorithms", "jaxcomp.contrib")
        method = getattr(thing, "__module__", "").startswith(parts) and callable(thing) and name != "roundtrip"
        if method and (">>>" not in doc or ("Raises:" not in doc and name not in ("identity", "natural"))):
            return "an example, or errors"
        if method and "omega" not in doc and "alpha" not in doc and name not in NO_THEORY:
            return "theory"
        return None if doc else "a docstring"

    assert {name: lacks for name, thing in PUBLIC.items() if (lacks := missing(name, thing))} == {}


def test_versions_agree():
    assert importlib.metadata.version("jaxcomp") == jc.__version__


ROOT = PACKAGE.parent


def test_the_command_says_its_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"jaxcomp {jc.__version__}, JAX ")


def test_what_the_package_says_of_itself():
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert about["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {jc.__version__}\n" in citation
    assert all(author["name"] in citation for author in about["authors"])
    assert "Typing :: Typed" in about["classifiers"]
    assert (PACKAGE / "py.typed").exists()
    pages = re.findall(r"\]\(([\w./]+)\)", (ROOT / "CONTRIBUTING.md").read_text())
    assert pages
    assert all((ROOT / page).exists() for page in pages)


def copy_of_the_sources(folder):
    """What a build reads: it writes nothing into the repository, nor takes what lies about there."""
    names = ("jaxcomp", "docs", "experiments", "notebooks", "tests")
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in names:
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / name for name in ("LICENSE", "CITATION.cff", "pyproject.toml", "Makefile")),
    ):
        shutil.copy(path, folder)
    return folder


def built(source, target):
    """Names in a distribution that the build backend makes."""
    pytest.importorskip("hatchling.build")
    call = f"import hatchling.build as b; b.build_{target}('dist')"
    subprocess.run([sys.executable, "-c", call], cwd=source, check=True, capture_output=True, timeout=120)
    (path,) = (source / "dist").glob("*.whl" if target == "wheel" else "*.tar.gz")
    if target == "wheel":
        with zipfile.ZipFile(path) as archive:
            return path, archive.namelist()
    with tarfile.open(path) as archive:
        return path, archive.getnames()


def test_what_wheel_and_sdist_hold(tmp_path):
    source = copy_of_the_sources(tmp_path)
    _, names = built(source, "wheel")
    about = f"jaxcomp-{jc.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"jaxcomp", about}
    assert {"jaxcomp/py.typed", f"{about}/licenses/LICENSE", f"{about}/entry_points.txt"} <= set(names)
    assert {str(path.relative_to(PACKAGE.parent)) for path in MODULES} <= set(names)
    _, names = built(source, "sdist")
    top = f"jaxcomp-{jc.__version__}"
    wanted = ("LICENSE", "README.md", "CITATION.cff", "pyproject.toml", "jaxcomp/py.typed", "tests/laws.py", "Makefile")
    assert {f"{top}/{name}" for name in wanted} <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_it_installs_into_an_empty_environment(tmp_path, target):
    """With its dependencies, from a package index."""
    path, _ = built(copy_of_the_sources(tmp_path), target)
    python = tmp_path / "empty" / "bin" / "python"
    run = lambda *command: subprocess.run(command, cwd=tmp_path / "empty", check=True, capture_output=True, text=True)
    (tmp_path / "empty").mkdir()
    run(sys.executable, "-m", "venv", ".")
    run(python, "-m", "pip", "install", "--quiet", path)
    code = (
        "import jax, jaxcomp as jc\n"
        "x = jc.roundtrip(jc.top_k(k=1), jax.numpy.ones(3), key=jax.random.key(0))[0]\n"
        "print(jc.__file__, float(x.sum()))"
    )
    where, total = run(python, "-c", code).stdout.split()
    assert Path(where).is_relative_to(tmp_path / "empty")
    assert float(total) == 1.0
    assert run(python.with_name("jaxcomp"), "--version").stdout.startswith(f"jaxcomp {jc.__version__}, ")


@pytest.mark.slow
def test_a_type_checker_knows_the_public_names(tmp_path):
    """From outside: a client whose mistakes are marked is right, and without the marks each is found."""
    checker = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    if checker is None:
        pytest.skip("needs basedpyright")
    client = (ROOT / "tests" / "typed_client.py").read_text()
    (tmp_path / "right.py").write_text(client)
    (tmp_path / "wrong.py").write_text(re.sub(r"  # pyright: ignore.*", "", client))
    result = subprocess.run(
        [checker, "--level", "error", "--outputjson", "--pythonpath", sys.executable, "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    found = [Path(each["file"]).name for each in json.loads(result.stdout)["generalDiagnostics"]]
    assert found == ["wrong.py"] * client.count("# pyright: ignore[")
