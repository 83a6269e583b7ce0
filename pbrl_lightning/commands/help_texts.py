"""Help that is printed without importing torch: texts that were generated from the live parser.

``python -m pbrl_lightning.commands.help_texts`` writes them again. They belong to certain versions of Lightning and
jsonargparse; with other versions the live help is printed.
"""

from __future__ import annotations

import contextlib
import difflib
import io
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pbrl_lightning.utils.errors import ConfigurationError

COMMANDS = ("fit", "validate", "collect", "sample", "migrate", "compare", "check", "completion")
INSTEAD = {
    "test": "`pbrl validate` evaluates a team on `data.eval_items`",
    "predict": "`pbrl sample` writes a team's responses",
}
"""What to use in the place of Lightning's other commands."""

_DIRECTORY = Path(__file__).parent / "texts"
_HELP = ("-h", "--help")


def answer(arguments: Sequence[str]) -> str | None:
    """What a command line that asks for help or for the version prints; None if it asks for something else.

    Args:
        arguments: What follows ``pbrl``.
    """
    match list(arguments):
        case ["--version"]:
            return f"pbrl {package_version()}\n"
        case [flag] if flag in _HELP:
            return stored("pbrl")
        case [command, flag] if command in COMMANDS and flag in _HELP:
            return stored(command)
    return None


def check_command(arguments: Sequence[str]) -> None:
    """Finds a wrong command before anything is imported.

    Args:
        arguments: What follows ``pbrl``.

    Raises:
        ConfigurationError: If there is no command, or none of this name.
    """
    if not arguments:
        raise ConfigurationError(f"a command must follow `pbrl`: {', '.join(COMMANDS)} (see `pbrl --help`)")
    name = arguments[0]
    if name.startswith("-") or name in COMMANDS:
        return
    if name in INSTEAD:
        raise ConfigurationError(f"there is no command `{name}`: {INSTEAD[name]}")
    near = difflib.get_close_matches(name, COMMANDS, 1)
    hint = f"did you mean `{near[0]}`?" if near else f"the commands are {', '.join(COMMANDS)}"
    raise ConfigurationError(f"there is no command `{name}`; {hint}")


def package_version() -> str:
    """The version of this package as it is installed."""
    try:
        return version("pbrl-lightning")
    except PackageNotFoundError:
        return "(not installed)"


def stored(command: str) -> str | None:
    """A command's help; None if it was generated with other versions of the libraries than the installed ones.

    Args:
        command: One of :data:`COMMANDS`, or ``pbrl`` for the help of all.
    """
    if (_DIRECTORY / "versions.txt").read_text(encoding="utf-8") != _versions():
        return None
    return (_DIRECTORY / f"{command}.txt").read_text(encoding="utf-8")


def live(command: str) -> str:
    """A command's help from its parser, which needs torch.

    Args:
        command: One of :data:`COMMANDS`, or ``pbrl`` for the help of all.
    """
    from pbrl_lightning.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(["--help"] if command == "pbrl" else [command, "--help"])
    return printed.getvalue()


def write() -> None:
    """Generates the texts."""
    for command in ("pbrl", *COMMANDS):
        (_DIRECTORY / f"{command}.txt").write_text(live(command), encoding="utf-8")
    (_DIRECTORY / "versions.txt").write_text(_versions(), encoding="utf-8")


def _versions() -> str:
    return "".join(f"{name} {version(name)}\n" for name in ("jsonargparse", "lightning"))


if __name__ == "__main__":
    write()
