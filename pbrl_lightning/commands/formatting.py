"""How the help of commands looks: short usage, plain words for types, the same at any width of the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import re
from argparse import SUPPRESS, Action
from typing import Any

from jsonargparse import ActionConfigFile, DefaultHelpFormatter
from typing_extensions import override

from pbrl_lightning.commands.option_types import OURS, classes_in, metavar, subclasses_of

_WIDTH = 100
_FIRST_SENTENCE_ONLY = ("trainer.", "ckpt_path", "weights_only", "verbose")
"""Options of Lightning, whose documentation is pages."""
_OWN_WORDS = {
    "help": "Print this help and exit.",
    "version": "Print the version and exit.",
    "config": "YAML file of options; options after it replace its values.",
    "print_config": "Print all options with their values as YAML, and exit.",
}


class HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Help of all commands; the lines of the epilog stay as they are."""

    def __init__(self, prog: str, **_: Any) -> None:
        super().__init__(prog, max_help_position=30, width=_WIDTH)

    @override
    def add_argument(self, action: Action) -> None:
        if not _hidden(action):
            super().add_argument(action)

    @override
    def start_section(self, heading: str | None) -> None:
        super().start_section(_plain(heading) if heading else heading)

    @override
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrapped = argparse.HelpFormatter._fill_text(self, text, width, indent)
        return super()._fill_text(text, width, indent) if "\n" in text else wrapped

    @override
    def _format_action_invocation(self, action: Action) -> str:
        names = [name for name in action.option_strings if not name.endswith("+")]
        if not names:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else f" {_value_name(action)}"
        return ", ".join(names) + value

    @override
    def _get_help_string(self, action: Action) -> str:
        text = _OWN_WORDS.get(action.dest) or _plain(action.help or "")
        if action.dest.startswith(_FIRST_SENTENCE_ONLY):
            sentences = text.split(". ")
            text = next((one for one in sentences if not one.startswith("Default")), text).removesuffix(".") + "."
        if isinstance(action, argparse._HelpAction | ActionConfigFile) or not action.option_strings:
            return text
        notes = ["required"] if action.required else []
        names = _class_names(action)
        if names:
            described = f"{action.option_strings[0]}.help"
            several = f"one of {', '.join(names)}; options of one: {described} NAME"
            notes.append(several if len(names) > 1 or _is_extensible(action) else f"options: {described}")
        if isinstance(action.default, str | int | float) and action.default not in (SUPPRESS, "default"):
            shown = str(action.default).lower() if isinstance(action.default, bool) else str(action.default)
            notes.append(f"default: {shown}")
        return f"{text} ({'; '.join(notes)})" if notes else text

    @override
    def _expand_help(self, action: Action) -> str:
        return self._get_help_string(action)


def _is_extensible(action: Action) -> bool:
    """True if the option takes subclasses, and not just the options of one dataclass."""
    return not any(map(dataclasses.is_dataclass, classes_in(getattr(action, "_typehint", None))))


def _hidden(action: Action) -> bool:
    """Help of classes is named beside the option that takes them."""
    names = action.option_strings
    return action.help is SUPPRESS or (bool(names) and names[0].endswith(".help"))


def _value_name(action: Action) -> str:
    if isinstance(action, ActionConfigFile):
        return "FILE"
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    hint = getattr(action, "_typehint", None)
    if hint is None:
        return "[=FLAGS]" if action.option_strings[0] == "--print_config" else "FILE"
    name = metavar(hint)
    return name if len(name) <= 45 else "TEXT"


def _class_names(action: Action) -> list[str]:
    """Classes of this library that the option takes; a model may be any, and is named otherwise."""
    if action.dest.endswith("models"):
        return []
    known = subclasses_of(classes_in(getattr(action, "_typehint", None)))
    return sorted(name for name, kind in known.items() if kind.__module__.startswith(OURS))


def _plain(text: str) -> str:
    """Markup of docstrings as plain text.

    Example:
        >>> _plain("one of ``a``, see :class:`pbrl_lightning.agents.roles.TagAdapter`")
        'one of `a`, see TagAdapter'
    """
    text = re.sub(r":\w+:`~?([^`]*)`", lambda match: match[1].rpartition(".")[2], text)
    return " ".join(text.replace("``", "`").split())
