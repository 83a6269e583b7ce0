"""What decides a collection, as a short name: the same name means that the same would be collected."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pbrl_lightning.agents.team import AgentTeam

_VALUES_PER_PARAMETER = 256
_DEPTH = 8  # objects may refer to themselves


def fingerprint(*parts: Any) -> str:
    """A hex digest of plain data, options and functions; see :func:`describe`."""
    text = json.dumps([describe(part) for part in parts], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def describe(value: Any, depth: int = 0) -> Any:
    """Plain data that is equal for equal options and equal code, in every process.

    Functions and classes are described by their source file, so that a corrected reward is another reward; objects by
    their class and public attributes.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth > _DEPTH:
        return _name(type(value))
    if isinstance(value, Mapping):
        return {str(key): describe(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        described = [describe(entry, depth + 1) for entry in value]
        return sorted(described, key=repr) if isinstance(value, set | frozenset) else described
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, functools.partial):
        return ["partial", describe(value.func), describe(value.args), describe(value.keywords)]
    if isinstance(value, nn.Module):
        return [_name(type(value)), weights_digest(dict(value.named_parameters()))]
    if isinstance(value, torch.Tensor):
        return weights_digest({"": value})
    if inspect.isroutine(value) or inspect.isclass(value):
        return [_name(value), _source_digest(value), describe(getattr(value, "__self__", None))]
    if is_dataclass(value):
        options = {field.name: getattr(value, field.name) for field in fields(value)}
    elif hasattr(value, "__dict__"):
        options = {name: entry for name, entry in vars(value).items() if name[0] != "_"}
    else:  # a number of NumPy's, a date …
        shown = repr(value)
        options = {} if " at 0x" in shown else {"repr": shown}
    return [_name(type(value)), _source_digest(type(value)), describe(options, depth + 1)]


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
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local  # a sharded weight: this process's part
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        flat = local.reshape(-1)
        step = max(1, flat.numel() // _VALUES_PER_PARAMETER)
        digest.update(flat[::step].to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _source_digest(value: Any) -> str:
    """Of the file that defines a function or class; of its code where there is none (a notebook, a built-in)."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(value))
        data = Path(file).read_bytes() if file is not None else b""
    except (OSError, TypeError, ValueError):
        try:
            data = inspect.getsource(value).encode()
        except (OSError, TypeError):
            code = getattr(value, "__code__", None)
            data = code.co_code + repr(code.co_consts).encode() if code is not None else b""
    return hashlib.sha256(data).hexdigest()
