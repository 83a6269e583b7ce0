"""Objects by import path, with errors that say which part of the path is wrong."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from pbrl_lightning.utils.errors import ConfigurationError, MissingFileError, OptionTypeError


def import_object(path: str) -> Any:
    """The object that ``package.module:name`` or ``package.module.name`` stands for.

    What the module's own code raises passes through.

    Raises:
        ConfigurationError: If the path is malformed, or there is no such module or attribute; near matches are named.

    Example:
        >>> import_object("math:floor")(2.5)
        2
    """
    module_name, colon, attributes = path.partition(":")
    parts = [*module_name.split("."), *(attributes.split(".") if colon else [])]
    if len(parts) < 2 or not all(part.isidentifier() for part in parts) or (colon and not attributes):
        raise ConfigurationError(f"an import path must look like `my_pkg.rewards:score`, got {path!r}")
    if colon:
        module, names = _import_or_none(module_name), attributes.split(".")
    else:
        module, names = _longest_module(parts)
    if module is None:
        missing = module_name if colon else ".".join(parts[:-1])
        raise ConfigurationError(f"{path!r}: there is no module `{missing}`{_hint(*_near_modules(missing))}")
    found: Any = module
    for name in names:
        if not hasattr(found, name):
            owner = getattr(found, "__name__", type(found).__name__)
            hint = _hint(name, [*dir(found), *_submodules(found)])
            raise ConfigurationError(f"{path!r}: `{owner}` has no attribute `{name}`{hint}")
        found = getattr(found, name)
    return found


def resolve_callable(spec: str | Callable[..., Any]) -> Callable[..., Any]:
    """The callable that an import path names; a callable is given back as it is.

    Raises:
        ConfigurationError: If there is no such module or attribute, or what is there cannot be called.
        OptionTypeError: If ``spec`` is neither text nor callable.
    """
    found = import_object(spec) if isinstance(spec, str) else spec
    if not callable(found):
        if isinstance(spec, str):
            raise ConfigurationError(f"{spec!r} must name a callable, got {found!r}")
        raise OptionTypeError(f"an import path or a callable is needed, got {spec!r}")
    return found


def _import_or_none(name: str) -> ModuleType | None:
    """Import a module; None if it does not exist. What its own code raises passes through."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return None
        raise


def _longest_module(parts: list[str]) -> tuple[ModuleType | None, list[str]]:
    """Split a dotted path after its longest importable module, leaving at least one attribute."""
    for cut in range(len(parts) - 1, 0, -1):
        module = _import_or_none(".".join(parts[:cut]))
        if module is not None:
            return module, parts[cut:]
    return None, parts


def _near_modules(name: str) -> tuple[str, list[str]]:
    """The first part of a module path that does not exist, and what stands beside it."""
    *parents, last = name.split(".")
    for depth, part in enumerate(parents):
        if _import_or_none(".".join(parents[: depth + 1])) is None:
            last, parents = part, parents[:depth]
            break
    package = importlib.import_module(".".join(parents)) if parents else None
    return last, [info.name for info in pkgutil.iter_modules()] if package is None else _submodules(package)


def _submodules(owner: object) -> list[str]:
    return [info.name for info in pkgutil.iter_modules(getattr(owner, "__path__", []))]


def _hint(wanted: str, available: Iterable[str]) -> str:
    near = difflib.get_close_matches(wanted, list(available))
    return f"; did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else ""


def package_file(name: str) -> Path:
    """The file that ``package:NAME/FILE`` stands for.

    Raises:
        MissingFileError: If the package is not installed or has no such file.
    """
    package, _, file = name.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingFileError(f"the package {package!r} is not installed ({name!r})")
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.exists():
        raise MissingFileError(f"the package {package!r} holds no file {file!r}")
    return path
