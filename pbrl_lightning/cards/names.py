"""What things are called in a card: no paths of this machine, no addresses, no keys."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pbrl_lightning.agents.loading import TINY
from pbrl_lightning.agents.prompts import ChatTemplate, Formatter, PromptTemplate
from pbrl_lightning.remote import ApiEndpoint

LONGEST: Final = 300
"""Characters of a name or a template that are shown."""

_OWNED = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB = re.compile(rf"[A-Za-z0-9][\w.-]*|{_OWNED.pattern}")


@dataclass(frozen=True)
class ModelName:
    """Where a model comes from.

    Attributes:
        words: In Markdown.
        hub: Its id on the Hugging Face hub, None if it is not known to have one.
    """

    words: str
    hub: str | None = None


def model_name(name: str | None, *, in_memory: bool = False) -> ModelName:
    """What to call a model; a local one by the last part of its path.

    Args:
        name: As in :class:`pbrl_lightning.agents.team.AgentTeam`, or what a loaded model says of itself.
        in_memory: It was given as an object.
    """
    if in_memory or name is None:
        if name is not None and _OWNED.fullmatch(name) and not Path(name).exists():
            return ModelName(f"a model in memory that calls itself {code(name)}", name)
        return ModelName("a model that was given in memory")
    if name == TINY:
        return ModelName(f"the random model {code(name)}, which is for tests")
    if name.startswith("package:"):
        return ModelName(f"{code(name)}, a file of an installed package")
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return ModelName(f"the GGUF file {code(path.name)}")
    if (path / "adapter_config.json").is_file():
        config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        base = model_name(config["base_model_name_or_path"])
        return ModelName(f"an earlier adapter, {code(path.resolve().name)}, on {base.words}", base.hub)
    if path.is_dir() or not _HUB.fullmatch(name):
        return ModelName(f"the local directory {code(path.resolve().name)}")
    return ModelName(code(name), name)


def formatter_name(formatter: Formatter) -> str:
    """A formatter in Markdown: a template with its text, anything else by its name."""
    if isinstance(formatter, PromptTemplate):
        return code(f"PromptTemplate({formatter.text!r})")
    if isinstance(formatter, ChatTemplate):
        system = "" if formatter.system is None else f", system={formatter.system!r}"
        return code(f"ChatTemplate({formatter.user!r}{system})")
    return callable_name(formatter)


def callable_name(function: Callable[..., Any]) -> str:
    """A function, or the class of an object that is called, in Markdown; with the remote model that it asks, if any."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if getattr(function, "__qualname__", None) else type(function)
    module = getattr(named, "__module__", None)
    name = named.__qualname__ if module in (None, "__main__", "builtins") else f"{module}:{named.__qualname__}"
    return code(name) + remote_model(function)


def remote_model(asker: object) -> str:
    """Which remote model an object asks, not where; empty if it asks none."""
    endpoint = getattr(asker, "endpoint", None)
    if not isinstance(endpoint, ApiEndpoint):
        return ""
    model = f" {code(endpoint.model)}" if endpoint.model is not None else ""
    return f", which asks the remote model{model} ({endpoint.kind})"


def with_numbers(thing: object) -> str:
    """An object by its class and those of its options that are numbers, in Markdown."""
    known = getattr(thing, "__dict__", {}).items()
    numbers = {name: value for name, value in known if isinstance(value, int | float) and name[0] != "_"}
    return code(f"{type(thing).__name__}({options(numbers)})")


def options(values: dict[str, Any]) -> str:
    """Options as ``name=value``.

    Example:
        >>> options({"dpo_beta": 0.1, "r": 16})
        'dpo_beta=0.1, r=16'
    """
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def code(text: str) -> str:
    """A text in one line that Markdown leaves as it is.

    Example:
        >>> print(code("a `b` c"))
        ``a `b` c``
    """
    line = " ".join(text.split())
    line = line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{space}{line}{space}{fence}"
