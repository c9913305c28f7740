"""Which files a program is made of: those in which the names that it uses are defined, and what these use in turn.

Read from imports and from attributes of `import jaxcomp as jc`, without running anything: `jc.top_k` is the file that
defines it, not all that the front door imports. So a table depends on the methods that it compares, and not on others.
"""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["ROOT", "sources_of"]

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxcomp", "experiments")
ANY = "from_config"  # makes whatever its text names: who uses it depends on the whole library


def sources_of(paths: Iterable[Path]) -> set[Path]:
    """These files, and all that they are made of."""
    found, left = set(), list(paths)
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += _used_by(path)
    return found


@functools.cache
def _used_by(path: Path) -> tuple[Path, ...]:
    used = set()
    for module, names in _named_in(ast.parse(path.read_text())):
        if ANY in names:
            used |= set((ROOT / "jaxcomp").rglob("*.py")) - {ROOT / "jaxcomp" / "__init__.py"}
        elif (place := _place_of(module, names)) is not None:
            used.add(place)
    return tuple(used)


def _named_in(tree: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Modules of the packages, and what is taken of each: ("jaxcomp", ("contrib", "dgc"))."""
    modules, inner = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            yield from ((str(node.module), (alias.name,)) for alias in node.names)
        elif isinstance(node, ast.Import):
            modules |= {a.asname or a.name: a.name for a in node.names if a.name.split(".")[0] in PACKAGES}
        elif isinstance(node, ast.Attribute):
            inner.add(id(node.value))
    yield from ((name, ()) for name in modules.values())
    for node in ast.walk(tree):
        names = []
        if id(node) not in inner:
            while isinstance(node, ast.Attribute):
                names.insert(0, node.attr)
                node = node.value
        if names and isinstance(node, ast.Name) and node.id in modules:
            yield modules[node.id], tuple(names)


def _place_of(module: str, names: tuple[str, ...]) -> Path | None:
    """The file in which `module.a.b` is defined; None for the front door, which defines nothing."""
    path = _file_of(module)
    if path is None or not names:
        return None if module == "jaxcomp" else path
    if _file_of(f"{module}.{names[0]}") is not None:
        return _place_of(f"{module}.{names[0]}", names[1:])
    if path.name == "__init__.py" and names[0] in _taken_by(path):
        source, name = _taken_by(path)[names[0]]
        return _place_of(source, (name, *names[1:]))
    return None if module == "jaxcomp" else path


def _file_of(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@functools.cache
def _taken_by(path: Path) -> dict[str, tuple[str, str]]:
    """Names that a package takes from its modules."""
    taken = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {a.asname or a.name: (str(node.module), a.name) for node in taken for a in node.names}
