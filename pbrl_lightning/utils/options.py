"""The options of objects as plain data: for checkpoints, which build them again, and for people."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from os import PathLike, fspath
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import torch
from torch import nn

from pbrl_lightning.utils.errors import ConfigurationError
from pbrl_lightning.utils.secrets import MASKED, may_be_secret

LEFT_OUT: Final = "left_out"
"""Key of a value that cannot be plain data; it says what it was."""

_LONGEST: Final = 64
"""Entries of a list or mapping that is kept; task items are none of a run's options."""


def record_options(owner: object, arguments: Mapping[str, Any]) -> None:
    """Keeps what an object was given, for :func:`given_options`; the first line of its ``__init__``.

    Args:
        owner: ``self``.
        arguments: ``locals()``.
    """
    given = {name: value for name, value in arguments.items() if name not in ("self", "__class__")}
    vars(owner)["_given_options"] = vars(owner).get("_given_options", {}) | given


def given_options(owner: object) -> dict[str, Any]:
    """What an object was made with, by the names of its constructor's arguments, as far as it keeps them."""
    recorded = vars(owner).get("_given_options", {}) if hasattr(owner, "__dict__") else {}
    found = {}
    for name, parameter in inspect.signature(type(owner).__init__).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in recorded:
            found[name] = recorded[name]
            continue
        kept = next((known for known in (name, f"_{name}") if _has(owner, known)), None)
        if kept is not None:
            found[name] = getattr(owner, kept)
    return found


def _has(owner: object, name: str) -> bool:
    try:
        return hasattr(owner, name)
    except Exception:  # a property that cannot say yet
        return False


def encode(value: Any, name: str = "") -> Any:
    """A value as numbers, texts, lists and mappings.

    Objects become ``{"class_path": …, "init_args": {…}}`` and functions ``{"import_path": …}``; what neither is plain
    nor can be made again, and what may be a key, becomes ``{"left_out": …}``.

    Args:
        value: Anything.
        name: What the option is called.

    Example:
        >>> encode({"rate": 1e-3, "api_key": "abc", "of": len})
        {'rate': 0.001, 'api_key': {'left_out': '(not shown)'}, 'of': {'import_path': 'builtins:len'}}
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | PathLike):
        text = fspath(value)
        return _left_out(MASKED) if may_be_secret(name, str(text)) else str(text)
    if isinstance(value, list | tuple | set | frozenset):
        if len(value) > _LONGEST:
            return _left_out(f"{len(value)} entries")
        return [encode(entry, name) for entry in value]
    if isinstance(value, Mapping):
        if len(value) > _LONGEST or not all(isinstance(key, str) for key in value):
            return _left_out(f"{len(value)} entries")
        hidden = re.fullmatch(r"(.*_)?headers", name)
        return {
            key: _left_out(MASKED) if hidden and "${" not in str(entry) else encode(entry, key)
            for key, entry in value.items()
        }
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    return _encode_object(value)


def decode(spec: Any, classes: tuple[type, ...], name: str) -> Any:
    """The value that :func:`encode` made plain; runs no code but that of the given classes.

    Args:
        spec: From a checkpoint, which may come from elsewhere: functions and classes are looked up in modules that are
            imported already, and objects are only made of ``classes``.
        classes: The kinds of objects that it may hold.
        name: What the option is called in errors.

    Raises:
        ConfigurationError: If something was left out or is not to be had; says which argument to give.
    """
    if isinstance(spec, list):
        return [decode(entry, classes, name) for entry in spec]
    if not isinstance(spec, Mapping):
        return spec
    if LEFT_OUT in spec:
        raise ConfigurationError(f"the checkpoint does not hold `{name}` ({spec[LEFT_OUT]}): give `{name}=`")
    if "import_path" in spec:
        return imported_already(str(spec["import_path"]), name)
    if "class_path" in spec:
        kind = imported_already(str(spec["class_path"]), name)
        if not (isinstance(kind, type) and issubclass(kind, classes)):
            raise ConfigurationError(
                f"the checkpoint names {spec['class_path']!r} for `{name}`, which is none of the classes that belong "
                f"there: give `{name}=`"
            )
        return kind(**{key: decode(entry, classes, name) for key, entry in spec["init_args"].items()})
    return {key: decode(entry, classes, name) for key, entry in spec.items()}


def imported_already(path: str, name: str) -> Any:
    """The object of an import path, without importing a module of somebody else's.

    Raises:
        ConfigurationError: If its module is not imported yet, is one of Python's own, or has no such object.
    """
    module, _, attributes = path.partition(":") if ":" in path else path.rpartition(".")
    if module.startswith("pbrl_lightning."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    found: Any = sys.modules.get(module) if module.partition(".")[0] not in sys.stdlib_module_names else None
    for attribute in attributes.split("."):
        found = getattr(found, attribute, None)
    if found is None:
        raise ConfigurationError(
            f"the checkpoint names {path!r} for `{name}`: import its module before, or give `{name}=` (a checkpoint "
            "imports nothing by itself)"
        )
    return found


def readable(spec: Any) -> Any:
    """What :func:`encode` gave in the form that people compare: class names, import paths, values.

    Example:
        >>> readable({"class_path": "a.b:Lora", "init_args": {"r": 8}})
        {'class': 'Lora', 'r': 8}
        >>> readable([{"import_path": "my_rewards:score"}, {"left_out": "12 entries"}])
        ['my_rewards:score', '12 entries']
    """
    if isinstance(spec, list):
        return [readable(entry) for entry in spec]
    if not isinstance(spec, Mapping):
        return spec
    for key in (LEFT_OUT, "import_path"):
        if key in spec:
            return spec[key]
    if "class_path" in spec:
        name = re.split("[:.]", str(spec["class_path"]))[-1]
        return {"class": name} | {key: readable(value) for key, value in (spec.get("init_args") or {}).items()}
    return {key: readable(value) for key, value in spec.items()}


def flat(options: Mapping[str, Any], separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """Nested options under one name each.

    Example:
        >>> flat({"team": {"lora": {"class": "LoraOptions", "r": 8}}, "seed": 0})
        {'team.lora.class': 'LoraOptions', 'team.lora.r': 8, 'seed': 0}
    """
    found: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        nested = isinstance(value, Mapping) and value
        found |= flat(value, separator, f"{name}{separator}") if nested else {name: value}
    return found


def is_plain(value: Any) -> bool:
    """True if a value loads from a checkpoint without running code."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(isinstance(key, str) and is_plain(entry) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.Tensor)


def _encode_object(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return _left_out(f"partial of {_shown(encode(value.func))}")
    if isinstance(value, FunctionType | BuiltinFunctionType | type):
        path = _import_path(value)
        return {"import_path": path} if path is not None else _left_out(f"the function {value.__qualname__}")
    kind = type(value)
    ours = kind.__module__.startswith("pbrl_lightning.") or "_given_options" in getattr(value, "__dict__", {})
    if isinstance(value, nn.Module) and not ours:
        given = getattr(getattr(value, "config", None), "name_or_path", None)
        return _left_out(f"a loaded {kind.__name__}" + (f" of {given}" if given else ""))
    path = _import_path(kind)
    if path is None or not (is_dataclass(value) or hasattr(value, "__dict__")) or _is_foreign(kind):
        return _left_out(f"a {kind.__name__}")
    return {"class_path": path, "init_args": {name: encode(v, name) for name, v in given_options(value).items()}}


def _is_foreign(kind: type) -> bool:
    """True for classes of other libraries, whose attributes need not be what they were made with."""
    return kind.__module__.partition(".")[0] in ("torch", "transformers", "tokenizers", "datasets", "builtins")


def _import_path(value: Callable[..., Any] | type) -> str | None:
    """The import path of a function or class; None if it has none that leads to it in another process."""
    module, name = getattr(value, "__module__", None), value.__qualname__
    package = sys.modules["pbrl_lightning"]
    if name in package.__all__ and getattr(package, name) is value:
        return f"pbrl_lightning:{name}"  # whatever file it moves to
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is value and module != "__main__" else None


def _shown(spec: Any) -> Any:
    return readable(spec) if isinstance(spec, Mapping | list) else spec


def _left_out(what: str) -> dict[str, str]:
    return {LEFT_OUT: what}


def differing(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of options that are not the same in all runs, in the order in which they come."""
    listed = list(runs)
    names = dict.fromkeys(name for run in listed for name in run)
    return [name for name in names if any(run.get(name) != listed[0].get(name) for run in listed)]
