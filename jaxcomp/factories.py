"""Factories say what they made: a compressor or an algorithm knows the factory and the options that made it.

Compressors and algorithms are functions that close over their options, so the options are written down where they are
given: `factory` decorates every function that makes one. From that follow descriptions, by which processes find out
that they were built differently (`jaxcomp.exchange.agreement`), the header of a message (`jaxcomp.wire`), and
`from_config`, which makes the same thing from plain data.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxcomp.base import Algorithm, Compressor

__all__ = ["Made", "described", "factory", "from_config", "options_in"]

P = ParamSpec("P")
T = TypeVar("T")
FEW = 16  # numbers that a description shows one by one
ROUNDS = (0, 1, 10, 100, 1000, 10_000)  # at which a schedule is described

_factories: dict[str, Callable[..., Any]] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """name: of a factory. options: name -> value of each argument that was given and is not the default."""

    name: str
    options: Mapping[str, Any]

    @functools.cached_property
    def text(self) -> str:
        return f"{self.name}({', '.join(f'{key}={described(x)}' for key, x in self.options.items())})"


def factory(make: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that returns a compressor or an algorithm: what it returns says how it was made.

    A compressor or an algorithm of your own that is decorated so is known to `jc.from_config` by the name of the
    function, and processes in which its options differ are refused.

    Args:
        make: the function; its parameters are the options.

    Raises:
        ValueError: another module has a factory of this name, which `jc.from_config` would no longer find.

    >>> import jaxcomp as jc
    >>> @factory
    ... def tenth(compressor):
    ...     return jc.compose(jc.top_k(0.1), compressor)
    >>> print(described(tenth(jc.dithering(7))))
    tenth(compressor=dithering(levels=7))
    """
    signature, name = inspect.signature(make), make.__name__
    before = getattr(_factories.get(name), "__module__", make.__module__)
    if before != make.__module__:
        raise ValueError(f"factory: there is a factory {name!r} in {before} already; give yours another name")

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        result = make(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        default = {key: parameter.default for key, parameter in signature.parameters.items()}
        how = Made(name, {key: x for key, x in bound.arguments.items() if not _is_same(x, default[key])})
        if isinstance(result, Compressor):
            return result._replace(spec=result.spec._replace(made=how))
        return result._replace(made=how) if isinstance(result, Algorithm) else result

    _factories[name] = made
    return made


def _is_same(value: Any, default: Any) -> bool:
    plain = isinstance(value, str | int | float) and isinstance(value, bool) == isinstance(default, bool)
    return value is default or (plain and value == default)


def _made_of(value: Any) -> Made | None:
    if isinstance(value, Compressor):
        return value.spec.made or Made(value.spec.name, {})
    if isinstance(value, Algorithm):
        return value.made or Made("an algorithm that no factory made", {})
    return None


# ------------------------------------------------------------------------------------------------
# Descriptions


def described(value: Any) -> str:
    """One line of text for a compressor, an algorithm or an option: equal texts for what was made by equal options.

    Arrays of more than a few numbers are described by a checksum, schedules by their values at some rounds.

    >>> import jaxcomp as jc
    >>> described(jc.error_feedback(jc.top_k(0.01), decay=0.9))
    'error_feedback(compressor=top_k(ratio=0.01), decay=0.9)'
    """
    made = _made_of(value)
    if made is not None:
        return made.text
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, int | float | np.number):
        return repr(value.item() if isinstance(value, np.generic) else value).removesuffix(".0")
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{described(key)}: {described(x)}' for key, x in value.items())}}}"
    if isinstance(value, jax.Array | np.ndarray):
        return _array(value)
    if type(value) in (tuple, list):
        numbers = len(value) > FEW and all(isinstance(x, int | float) for x in value)
        return _array(np.asarray(value)) if numbers else f"[{', '.join(map(described, value))}]"
    return _of_another_type(value)


def _array(value: Any) -> str:
    kind = f"{value.dtype}{list(value.shape)}"
    if isinstance(value, Tracer):
        return f"traced {kind}"
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    value = np.asarray(value)
    if value.size <= FEW:
        return str(value.tolist())
    return f"{kind} with checksum {zlib.crc32(np.ascontiguousarray(value).tobytes()):08x}"


def _of_another_type(value: Any) -> str:
    if callable(value) and getattr(value, "__name__", None) in _factories:
        return value.__name__
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return repr(np.dtype(value).name)
    if hasattr(value, "dtype") and callable(value):  # jnp.bfloat16 and the like
        return repr(np.dtype(value.dtype).name)
    leaves = jax.tree.leaves(value)
    if not (len(leaves) == 1 and leaves[0] is value):
        return f"{type(value).__name__}({', '.join(map(described, leaves))})"
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}({', '.join(described(x) for x in vars(value).values())})"
    return _schedule(value) if callable(value) else type(value).__name__


def _schedule(function: Callable[..., Any]) -> str:
    try:
        values = [float(function(count)) for count in ROUNDS]
    except Exception:  # a function of something else, which has nothing that could be compared
        return "a function"
    return f"a schedule with {[float(f'{value:.6g}') for value in values]} at rounds {list(ROUNDS)}"


def options_in(name: str, value: Any) -> dict[str, str]:
    """Every option of a compressor or algorithm and of those inside, under a name with dots.

    >>> import jaxcomp as jc
    >>> options_in("algorithm", jc.direct(jc.dithering(7)))
    {'algorithm': 'direct', 'algorithm.compressor': 'dithering', 'algorithm.compressor.levels': '7'}
    """
    made = _made_of(value)
    if made is not None:
        inside = [options_in(f"{name}.{key}", x) for key, x in made.options.items()]
        return {name: made.name} | {key: text for each in inside for key, text in each.items()}
    if isinstance(value, Mapping):
        inside = [options_in(f"{name}[{described(key)}]", x) for key, x in value.items()]
        return {name: described(list(value))} | {key: text for each in inside for key, text in each.items()}
    return {name: described(value)}


# ------------------------------------------------------------------------------------------------
# From plain data


def from_config(config: Mapping[str, Any] | str) -> Any:
    """Makes an algorithm or a compressor from plain data, as configuration files have it.

    Args:
        config: a mapping with "name", the name of a factory of `jc` (or of one that is decorated by
            `jaxcomp.factories.factory`), and its options by their names; or a string, "top_k(0.01)", written as the
            call would be. Options that are compressors or algorithms are given in either way, and so are those in
            mappings and lists (the parts of `by_path`). Compressors and algorithms themselves are taken as they are.

    Returns:
        `Algorithm` or `Compressor`.

    Raises:
        TypeError, ValueError: naming the key whose name or option is unknown, missing or out of range.

    >>> import jaxcomp as jc
    >>> jc.from_config({"name": "error_feedback", "compressor": {"name": "top_k", "ratio": 0.01}})
    <algorithm error_feedback of top_k(0.01)>
    >>> jc.from_config("diana(dithering(levels=7))")
    <algorithm diana of dithering(levels=7)>
    """
    if not isinstance(config, str | Mapping) or (isinstance(config, Mapping) and "name" not in config):
        raise TypeError(
            f'from_config: config must be a mapping with "name", or a string like "top_k(0.01)"; got {config!r}'
        )
    made = _built(config, "config", text=True)
    if not isinstance(made, Compressor | Algorithm):
        raise TypeError(f"from_config: config must describe a compressor or an algorithm; got {config!r}")
    return made


def _built(config: Any, key: str, text: bool = False) -> Any:
    if isinstance(config, str) and (text or "(" in config):
        try:
            return _parsed(ast.parse(config.strip(), mode="eval").body, key)
        except SyntaxError:
            if not text:
                return config
            raise ValueError(f"from_config: {key} must be a call like top_k(0.01); got {config!r}") from None
    if isinstance(config, Mapping):
        parts = {name: _built(value, f"{key}[{name!r}]") for name, value in config.items() if name != "name"}
        return _called(config["name"], (), parts, key) if "name" in config else parts
    if isinstance(config, list | tuple):
        return [_built(value, f"{key}[{i}]") for i, value in enumerate(config)]
    return config


def _parsed(node: ast.expr, key: str) -> Any:
    """The value of a call, a name or a literal; nothing else is evaluated."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jc":
        node = ast.Name(node.attr)
    if isinstance(node, ast.Name):
        return _called(node.id, (), {}, key)
    if isinstance(node, ast.Dict):
        pairs = [(ast.literal_eval(name), value) for name, value in zip(node.keys, node.values, strict=True) if name]
        return {name: _parsed(value, f"{key}[{name!r}]") for name, value in pairs}
    if isinstance(node, ast.List | ast.Tuple):
        return [_parsed(value, f"{key}[{i}]") for i, value in enumerate(node.elts)]
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        named = {each.arg: _parsed(each.value, f"{key}[{each.arg!r}]") for each in node.keywords if each.arg}
        return _called(name, [_parsed(each, f"{key}[{i}]") for i, each in enumerate(node.args)], named, key)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"from_config: {key} must be a number, a string or a call; got {ast.unparse(node)}") from None


def _called(name: Any, args: Any, options: Mapping[str, Any], key: str) -> Any:
    make = _factories.get(name) if isinstance(name, str) else None
    if make is None:
        raise ValueError(f"from_config: {key} has the unknown name {name!r}{_meant(name, _factories)}")
    known = inspect.signature(make).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        takes = f"{name} takes {', '.join(known) or 'none'}"
        raise ValueError(
            f"from_config: {key} has the unknown option {unknown[0]!r}{_meant(unknown[0], known)}; {takes}"
        )
    try:
        return make(*args, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"from_config: {key}: {error}") from error


def _meant(name: Any, known: Any) -> str:
    near = difflib.get_close_matches(str(name), list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""
