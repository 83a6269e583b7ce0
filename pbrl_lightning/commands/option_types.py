"""Types of options in words: for help and for errors."""

from __future__ import annotations

import collections.abc
import inspect
import types
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a dict",
    type(None): "null",
}
OURS = ("pbrl_lightning.", "callbacks.")
"""How the names of this library's modules begin."""
_METAVARS: dict[Any, str] = {
    **{int: "INT", float: "NUMBER", bool: "{true,false}", str: "TEXT", dict: "DICT"},
    **{Any: "VALUE", object: "VALUE", Path: "PATH", timedelta: "TEXT"},
}


def branches(hint: Any) -> list[Any]:
    """The types that a union allows; the type itself if it is none.

    Example:
        >>> branches(int | None)
        [<class 'int'>, <class 'NoneType'>]
    """
    if get_origin(hint) is Annotated:
        return branches(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [branch for part in get_args(hint) for branch in branches(part)]
    return [hint]


def in_words(hint: Any) -> str:
    """What a type allows.

    Example:
        >>> in_words(int | None)
        'an integer or null'
        >>> in_words(Literal["task", "reward_model"])
        'one of task, reward_model'
        >>> in_words(list[str] | bool)
        'a list (text each) or true or false'
    """
    return " or ".join(dict.fromkeys(map(_branch_in_words, branches(hint))))


def _branch_in_words(hint: Any) -> str:
    origin = get_origin(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}" if len(get_args(hint)) > 1 else str(get_args(hint)[0])
    if inspect.isclass(origin) and issubclass(origin, collections.abc.Mapping):
        return "a dict"
    if origin is collections.abc.Callable:
        return "the import path of a callable"
    if inspect.isclass(origin) and issubclass(origin, collections.abc.Iterable):
        inner = [part for part in get_args(hint) if part is not Ellipsis]
        return f"a list ({in_words(inner[0])} each)" if inner else "a list"
    if inspect.isclass(hint):
        return f"{'an' if hint.__name__[0] in 'AEIOU' else 'a'} {hint.__name__}"
    return "another value"


def metavar(hint: Any) -> str:
    """A type as the place holder of an option's value.

    Example:
        >>> metavar(int | None), metavar(Literal["a", "b"]), metavar(list[str] | str)
        ('INT', '{a,b}', 'LIST')
    """
    kinds = [_branch_metavar(branch) for branch in branches(hint) if branch is not type(None)]
    if set(kinds) == {"INT", "NUMBER"}:
        return "NUMBER"
    if {"CLASS", "TEXT"} <= set(kinds):
        return "NAME"
    preferred = [kind for kind in ("PATH", "CLASS", "LIST", "TEXT") if kind in kinds]
    return next(iter(preferred or kinds), "VALUE")


def _branch_metavar(hint: Any) -> str:
    origin = get_origin(hint)
    if hint in _METAVARS:
        return _METAVARS[hint]
    if origin is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if origin is collections.abc.Callable:
        return "PATH"
    if inspect.isclass(origin):
        return "DICT" if issubclass(origin, collections.abc.Mapping) else "LIST"
    return "CLASS" if inspect.isclass(hint) else "VALUE"


def classes_in(hint: Any) -> list[type]:
    """The classes whose subclasses a type takes, those inside lists too.

    Example:
        >>> classes_in(list[slice] | int | None)
        [<class 'slice'>]
    """
    found: list[type] = []
    for branch in branches(hint):
        origin = get_origin(branch)
        if origin is collections.abc.Callable:  # of a class that is made later, such as a schedule
            found += classes_in(get_args(branch)[-1]) if get_args(branch) else []
        elif origin is not None and origin is not Literal:
            found += [inner for part in get_args(branch) for inner in classes_in(part)]
        elif inspect.isclass(branch) and branch not in _METAVARS and branch is not type(None):
            found.append(branch)
    return found


def subclasses_of(classes: list[type]) -> dict[str, type]:
    """Every class that may be named for these by name; abstract ones and what is internal are left out."""
    found: dict[str, type] = {}
    seen: set[type] = set()
    stack = list(classes)
    while stack:
        kind = stack.pop()
        if kind in seen:
            continue
        seen.add(kind)
        stack += type.__subclasses__(kind)
        if not _is_abstract(kind) and not _is_internal(kind):
            found.setdefault(kind.__name__, kind)
    return found


def _is_abstract(kind: type) -> bool:
    """True too for a class with abstract methods whose metaclass does not know of them, such as a module of torch."""
    return any(getattr(getattr(kind, name, None), "__isabstractmethod__", False) for name in dir(kind))


def _is_internal(kind: type) -> bool:
    """True for a class of this library that is not among its public names."""
    import pbrl_lightning.callbacks

    public = {*pbrl_lightning.__all__, *pbrl_lightning.callbacks.__all__}
    ours = kind.__module__.startswith(OURS)
    return kind.__name__.startswith("_") or (ours and kind.__name__ not in public)
