"""What decides a collection, as a short name: the same name means that the same would be collected."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from pbrl_lightning.agents.team import AgentTeam

_VALUES_PER_PARAMETER = 256


def fingerprint(*parts: Any) -> str:
    """A hex digest that is equal for equal options and equal code, in every process.

    Functions and classes count by their source file, code and captured values, so that a corrected reward is another
    reward (what it imports from other files is not looked at); objects by their class and attributes.
    """
    describe = _Describer()
    try:
        text = json.dumps([describe(part) for part in parts], sort_keys=True)
    except RecursionError:  # a long chain of objects: by their kinds alone
        text = json.dumps([[_name(type(part)), _source_digest(type(part))] for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def text_digest(texts: list[str]) -> str:
    """A short digest of a few texts."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def team_digest(team: AgentTeam) -> str:
    """A digest of what the team says: its models' names, and a sample of every trained weight.

    An update moves every weight that it trains (AdamW, weight decay), so that a sample tells two states apart.
    """
    parts = []
    for agent in range(team.num_agents):
        parts.append([team.source_name(agent), team.adapter(agent), weights_digest(team.agent_parameters(agent))])
    return fingerprint(parts)


def weights_digest(parameters: Mapping[str, torch.Tensor]) -> str:
    """A digest of names, shapes, dtypes and evenly spaced values."""
    digest = hashlib.sha256()
    for name, parameter in parameters.items():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // _VALUES_PER_PARAMETER)
        # A copy: memory that NumPy has seen can no longer be given back by a sharded strategy.
        digest.update(flat[::step].to("cpu", torch.float64, copy=True).numpy().tobytes())
    return digest.hexdigest()


class _Describer:
    """Plain data for any value. What was met before is told by its number: objects may refer to each other."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}
        self._kept: list[Any] = []  # an id stays taken while its object lives

    def __call__(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return [type(value).__name__, repr(value)]
        if id(value) in self._met:
            return ["met", self._met[id(value)]]
        self._met[id(value)] = len(self._met)
        self._kept.append(value)
        return self._describe(value)

    def _describe(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): self(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self(entry) for entry in value]
        if isinstance(value, set | frozenset):
            return sorted(json.dumps(self(entry), sort_keys=True) for entry in value)
        if isinstance(value, np.ndarray):
            return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        if isinstance(value, torch.Tensor):
            return weights_digest({"": value})
        if isinstance(value, Path | bytes):
            return repr(value)
        if isinstance(value, nn.Module):
            return [_name(type(value)), weights_digest(dict([*value.named_parameters(), *value.named_buffers()]))]
        if callable(value) or inspect.ismodule(value):
            described = self._describe_code(value)
            if described is not None:
                return described
        return [self(type(value)), self._options(value)]

    def _describe_code(self, value: Any) -> Any:
        if inspect.ismodule(value):
            return value.__name__
        if isinstance(value, functools.partial):
            return ["partial", self(value.func), self(value.args), self(value.keywords)]
        if isinstance(value, MethodType):
            return [self(value.__func__), self(value.__self__)]
        if isinstance(value, FunctionType):
            captured: list[Any] = [[self(_content(cell)) for cell in value.__closure__ or ()]]
            captured += [self(value.__defaults__), self(value.__kwdefaults__)]
            source = _source_digest(value)
            if not source:  # in a notebook, what it uses is beside it
                names = [name for name in value.__code__.co_names if name in value.__globals__]
                captured.append({name: self(value.__globals__[name]) for name in names})
            return [_name(value), source, _code(value.__code__), captured]
        if inspect.isclass(value):
            source = _source_digest(value)
            own = [] if source else [self(entry) for entry in vars(value).values() if isinstance(entry, FunctionType)]
            return [_name(value), source, own]
        return [_name(value), _source_digest(value)] if inspect.isroutine(value) else None

    def _options(self, value: Any) -> Any:
        if is_dataclass(value):
            return {field.name: self(getattr(value, field.name)) for field in fields(value)}
        if hasattr(value, "__dict__"):
            return {name: self(entry) for name, entry in vars(value).items() if name[:2] != "__"}
        shown = repr(value)  # a number of NumPy's, a date …
        return "" if " at 0x" in shown else shown


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _code(code: CodeType) -> list[Any]:
    return [hashlib.sha256(code.co_code).hexdigest(), _constant(code.co_consts), list(code.co_names)]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, tuple):
        return [_constant(entry) for entry in value]
    if isinstance(value, frozenset):  # its own order is another one in every process
        return sorted(json.dumps(_constant(entry)) for entry in value)
    return repr(value)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _source_digest(value: Any) -> str:
    """Of the file that defines a function or class; empty where there is none (a notebook, a built-in)."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(value))
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file is not None else ""
    except (OSError, TypeError, ValueError):
        return ""
