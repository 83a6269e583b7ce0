"""Parsers that refuse a wrong command line in one sentence, with the nearest name or what is allowed.

jsonargparse reports errors as nested lists of all branches of a type, with the values; classes are parsed by parsers of
their own, whose errors are wrapped. Here each parser turns its error into an :class:`OptionError`, and the parsers
around it put the option's path before it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from pbrl_lightning.commands import templates
from pbrl_lightning.commands.formatting import HelpFormatter
from pbrl_lightning.commands.option_types import OURS, classes_in, in_words, subclasses_of
from pbrl_lightning.utils.errors import ConfigurationError, UserError
from pbrl_lightning.utils.nearest import hint, nearest
from pbrl_lightning.utils.secrets import looks_secret, names_secret

_MAY_HOLD_KEYS = ("url", "headers", "extra_body", "key_env", "endpoint")
"""Options whose value is never shown."""
_NO_PATH = "Expected a dot import path string: "
"""How jsonargparse says that it found no class of a name."""


class OptionError(ConfigurationError, argparse.ArgumentError):
    """An option that the parser refuses.

    Args:
        option: Its path, such as ``model.init_args.learning_rate``; empty if the message names none.
        problem: The sentence after the option's name.
        near: Paths of options that may have been meant.
        owner: The class whose option it is; None at the top.
    """

    def __init__(self, option: str, problem: str, near: tuple[str, ...] = (), owner: type | None = None) -> None:
        Exception.__init__(self, option, problem, near, owner)
        self.option, self.problem, self.near, self.owner = option, problem, near, owner
        self.typed: str | None = None

    def __str__(self) -> str:
        name = f"`{self.typed or self.option}` " if self.option else ""
        return name + self.problem + hint(f"--{near}" if self.typed else near for near in self.near)

    def inside(self, key: str, owner: type | None) -> OptionError:
        """The same error, named by the parser around it.

        Args:
            key: The option there whose value's option this is.
            owner: The class whose parser that is.
        """
        between = "." if dataclasses.is_dataclass(self.owner) else ".init_args."
        near = tuple(f"{key}{between}{name}" for name in self.near)
        return OptionError(f"{key}{between}{self.option}", self.problem, near, owner)


_refused: deque[OptionError] = deque(maxlen=20)
"""The last errors of parsers."""


class ClearErrors(ArgumentParser):
    """A parser whose errors are one sentence each, and which takes no abbreviated option."""

    described: type | None = None
    """The class whose options it holds; None for a command's parser."""

    args: list[str]
    """The arguments that are parsed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", HelpFormatter)
        kwargs.setdefault("parser_mode", templates.MODE)
        super().__init__(*args, **kwargs)

    @override
    def add_class_arguments(self, theclass: Any, nested_key: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if nested_key is None:
            self.described = theclass
        return super().add_class_arguments(theclass, nested_key, *args, **kwargs)

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        key = _quoted(message, '"') if message.startswith('Parser key "') else None
        found = first_user_error(ex)
        if isinstance(found, OptionError):
            found = found.inside(key, self.described) if key is not None else found
        elif found is None:
            # Of a type with several branches, jsonargparse passes on the first branch's error and the others' words.
            words = " ".join(message.split())
            inner = next((one for one in reversed(_refused) if key and " ".join(str(one).split()) in words), None)
            found = inner.inside(str(key), self.described) if inner else self._explained(message, ex, key)
        if isinstance(found, OptionError):
            _refused.append(found)
        if isinstance(found, OptionError) and self.exit_on_error:
            found.typed = self._typed(found.option)
        # Without what jsonargparse says of it, which shows all values.
        raise found from found.__cause__

    def _explained(self, message: str, error: Exception | None, key: str | None) -> OptionError:
        """What is wrong, from jsonargparse's or argparse's words."""
        if key == "config" or message.startswith(("Problems parsing config", "Unexpected config")):
            return OptionError("", self._wrong_config())
        if key is not None:
            return OptionError(key, self._wrong_value(key, message, _innermost(error)), owner=self.described)
        if message.startswith("unrecognized arguments: "):
            return self._unknown(message.removeprefix("unrecognized arguments: ").split()[0])
        if "not accept" in message:
            return self._unknown(_quoted(message, "'", last=True))
        if message.startswith("the following arguments are required: "):
            names = message.removeprefix("the following arguments are required: ").split(", ")
            of = "" if self.described is None else f" to {self.described.__name__}"
            first, *others = [name.removeprefix(f"{self._command_of(name)}.") for name in names]
            more = f" (and {', '.join(others)})" if others else ""
            positional = any(action.dest == first and not action.option_strings for action in self._actions)
            how = "" if of or positional else f": as `--{first}`, or in a file that `--config` names"
            return OptionError(first, f"must be given{of}{more}{how}", owner=self.described)
        if message.startswith("argument "):
            name, _, what = message.removeprefix("argument ").partition(": ")
            return OptionError(name.split("/")[-1].removeprefix("--"), _without_values(what))
        return OptionError("", _without_values(message))

    def _command_of(self, name: str) -> str:
        first = name.partition(".")[0]
        return first if first in self._commands() else ""

    def _commands(self) -> dict[str, ClearErrors]:
        action = getattr(self, "_subcommands_action", None)
        return {} if action is None else dict(action.choices)

    def _action(self, key: str) -> argparse.Action | None:
        """The action that holds an option, of this parser or of the command that is parsed."""
        parsers = [self, *(parser for name, parser in self._commands().items() if name in getattr(self, "args", []))]
        return next((action for parser in parsers for action in parser._actions if action.dest == key), None)

    def _wrong_value(self, key: str, message: str, innermost: BaseException | None) -> str:
        allowed = getattr(self._action(key), "_typehint", None)
        leaf = str(innermost) if innermost is not None else ""
        value = leaf.partition("Got value: ")[2] or message.rpartition("Given value: ")[2]
        if allowed is None:
            return "must be a dict of its options, or the path of a file that holds them"
        known = subclasses_of(classes_in(allowed))
        name = leaf.removeprefix(_NO_PATH) if leaf.startswith(_NO_PATH) else ""
        if name and value != name and not nearest(name, known):
            return f"has a class `{name}`, which must be given by its import path here, such as `pbrl_lightning.{name}`"
        if value.startswith("NestedArg("):
            option = _quoted(value, "'")
            return f"must name a class before `{option}` can be set: {_some(known)}"
        value = name or value
        last = key.rpartition(".")[2]
        hidden = last in _MAY_HOLD_KEYS or names_secret(last) or looks_secret(str(value))
        got = "" if hidden else f", got {_shown(value)}"
        listed = f" ({_some(known)})" if known else ""
        near = nearest(value.rpartition(".")[2], known) if known and value.isprintable() else []
        return f"must be {in_words(allowed)}{listed}{got}{hint(near)}"

    def _unknown(self, name: str) -> OptionError:
        """An option that does not exist, by the names that do."""
        option = name.partition("=")[0].removeprefix("--").removesuffix("+")
        if not name.startswith("--") and self.described is None and "." not in name and name in self.args:
            return OptionError("", f"`{name}` is not expected: options begin with `--`")
        near = nearest(option, self._option_paths())
        of = "" if self.described is None else f" of {self.described.__name__}"
        if near or self.described is None:
            see = "" if near else f" (see `{self._help_command()}`)"
            return OptionError(option, f"is not an option{of}{see}", tuple(near), self.described)
        options = [action.dest for action in self._actions if _is_option(action)]
        return OptionError(option, f"is not an option{of}, which has {_some(options)}", (), self.described)

    def _option_paths(self) -> list[str]:
        """The paths of all options, those of the classes that they take too."""
        commands = [parser for name, parser in self._commands().items() if name in getattr(self, "args", [])]
        paths: dict[str, None] = {}
        for action in (action for parser in (self, *commands) for action in parser._actions):
            if _is_option(action):
                inner = _paths_of_classes(action.dest, getattr(action, "_typehint", None))
                paths.update(dict.fromkeys([action.dest, *inner]))
        return list(paths)

    def _help_command(self) -> str:
        command = next((name for name in self._commands() if name in self.args), "")
        return " ".join([*self.prog.replace("[options] ", "").split(), *command.split(), "--help"])

    def _typed(self, option: str) -> str | None:
        """An option as it was typed; None if it comes from a file."""
        names = [argument.partition("=")[0] for argument in getattr(self, "args", []) if argument.startswith("--")]
        short = option.replace(".init_args", "")
        return next((name for name in names if name.strip("-+").replace(".init_args", "") == short), None)

    def _wrong_config(self) -> str:
        """Which configuration file cannot be read, and where."""
        for name in _config_files(self.args):
            path = Path(name)
            if not path.is_file():
                beside = [str(other) for other in sorted(path.parent.glob("*.y*ml"))]
                near = difflib.get_close_matches(name, beside, 1, 0.7)
                return f"`--config` must be a file, and {name!r} does not exist{hint(near)}"
            try:
                content = yaml.safe_load(path.read_text(encoding="utf-8"))
            except yaml.MarkedYAMLError as error:
                mark = error.problem_mark
                where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
                return f"{name}{where}: the file is not YAML: {error.problem or error.context}"
            except (OSError, ValueError, yaml.YAMLError) as error:
                return f"{name}: the file cannot be read: {type(error).__name__}"
            if not isinstance(content, dict):
                return f"{name}: the file must hold options (`name: value`), got a {type(content).__name__}"
        return "`--config` must be a YAML file of options"


class CommandParser(ClearErrors, LightningArgumentParser):
    """Lightning's parser, which takes further commands beside those of the Trainer."""

    commands: Any = None
    """Its commands, once there are any."""

    @override
    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        self.commands = super().add_subcommands(*args, **kwargs)
        return self.commands


def first_user_error(error: BaseException | None) -> UserError | None:
    """The error that others were raised from, if one of them is addressed to the user."""
    return next((link for link in _chain(error) if isinstance(link, UserError)), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _innermost(error: BaseException | None) -> BaseException | None:
    last = None
    for last in _chain(error):  # noqa: B007
        pass
    return last


def _paths_of_classes(dest: str, allowed: Any, depth: int = 2) -> Iterator[str]:
    """Options of this library's classes that an option takes, and of the classes that those take."""
    kinds = [kind for kind in subclasses_of(classes_in(allowed)).values() if kind.__module__.startswith(OURS)]
    if dest.endswith("models"):
        return
    for kind in kinds:
        between = "." if dataclasses.is_dataclass(kind) else ".init_args."
        for name, inner in get_type_hints(kind.__init__).items():  # type: ignore[misc]
            if name != "return":
                yield f"{dest}{between}{name}"
                if depth > 1:
                    yield from _paths_of_classes(f"{dest}{between}{name}", inner, depth - 1)


def _is_option(action: argparse.Action) -> bool:
    """True if an action is more than help."""
    return action.help is not argparse.SUPPRESS and not action.dest.endswith(("help", "print_shtab", "print_config"))


def _config_files(args: list[str]) -> list[str]:
    """What follows ``--config`` and ``-c``."""
    names = [argument.partition("=")[2] for argument in args if argument.startswith(("--config=", "-c="))]
    return names + [name for flag, name in pairwise(args) if flag in ("--config", "-c")]


def _quoted(text: str, mark: str, last: bool = False) -> str:
    parts = text.split(mark)[1::2]
    return (parts[-1] if last else parts[0]) if parts else ""


def _some(names: Any) -> str:
    """Names in a row, the first of them if there are many."""
    listed = sorted(names)
    return ", ".join(listed[:12]) + (" …" if len(listed) > 12 else "")


def _shown(value: str) -> str:
    """A value that was given: short texts and numbers only; others may hold a key."""
    if value.startswith(("{", "Namespace(")):
        return "a dict"
    if value.startswith("["):
        return "a list"
    return repr(value) if len(value) <= 60 else "a long text"


def _without_values(message: str) -> str:
    """The first line of a message, without what was given."""
    for mark in (". Got value", "Given value", "; got"):
        message = message.partition(mark)[0]
    return " ".join(message.split())[:300]
