"""``pbrl migrate``: converts a CoMLRL configuration to ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from pbrl_lightning.commands.parsing import ClearErrors
from pbrl_lightning.migration.convert import REQUIRED, Migration, MigrationError, migrate
from pbrl_lightning.migration.names import names_table
from pbrl_lightning.migration.reading import Left
from pbrl_lightning.utils.errors import ConfigurationError, ExistingFileError, MissingFileError
from pbrl_lightning.utils.secrets import may_be_secret
from pbrl_lightning.writable import check_output

HELP = "Convert a CoMLRL configuration."


def parser() -> ArgumentParser:
    """The command's options."""
    made = ClearErrors(
        prog="pbrl migrate",
        description=f"{HELP} Options without a counterpart are listed. All problems are reported at once.",
        epilog="pbrl migrate their_config.yaml --items items.jsonl --reward_func my_rewards:score --output mine.yaml",
    )
    made.add_argument("source", type=str | None, nargs="?", help="CoMLRL's YAML file.")
    made.add_argument("--output", type=str | None, help="New file to write; default: standard output.")
    made.add_argument("--items", type=str | None, help="Task items: a file, an import path or datasets:NAME.")
    made.add_argument("--eval_items", type=str | None, help="Held-out task items.")
    made.add_argument("--reward_func", type=str | None, help="Import path of the reward, such as my_rewards:score.")
    made.add_argument("--formatters", type=str, nargs="*", help="Templates or import paths, one for all or one each.")
    made.add_argument("--names", action="store_true", help="Print the table of names and exit.")
    return made


def main(args: list[str]) -> None:
    """Runs the command.

    Args:
        args: What follows ``pbrl migrate``.

    Raises:
        ConfigurationError: If the file is not valid YAML, or not a configuration that can be converted.
        OSError: If a file cannot be read or exists already.
    """
    options = parser().parse_args(args)
    if options.names:
        sys.stdout.write(names_table() + "\n")
        return
    if options.source is None:
        raise ConfigurationError("`source` must name a CoMLRL configuration (or give `--names`)")
    if options.output is not None and Path(options.output).exists():
        raise ExistingFileError(f"`output` must not exist already, got {options.output}")
    if options.output is not None:
        check_output(options.output)
    formatters = options.formatters
    if formatters is not None and len(formatters) == 1:
        formatters = formatters[0]
    done = migrate_file(
        Path(options.source),
        items=options["items"],
        eval_items=options.eval_items,
        reward_func=options.reward_func,
        formatters=formatters,
    )
    text = as_yaml(done, Path(options.source).name, options.output or "FILE")
    if options.output is None:
        sys.stdout.write(text)
    else:
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        Path(options.output).write_text(text, encoding="utf-8")
        sys.stderr.write("\n".join(_report(done)) + "\n")


def migrate_file(path: Path, **in_code: Any) -> Migration:
    """Converts a file; see :func:`pbrl_lightning.migration.convert.migrate`.

    Args:
        path: CoMLRL's YAML file.
        **in_code: What CoMLRL defines in code: ``items``, ``eval_items``, ``reward_func``, ``formatters``.

    Raises:
        ConfigurationError: If it is not YAML, or cannot be converted; names the file and all problems.
        MissingFileError: If it does not exist.
    """
    if not path.is_file():
        raise MissingFileError(f"the configuration {str(path)!r} does not exist")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not valid YAML: {error}") from error
    try:
        return migrate(document, **in_code)
    except MigrationError as error:
        listed = "".join(f"\n  - {problem}" for problem in error.problems)
        raise ConfigurationError(f"{path} cannot be converted:{listed}") from None


def as_yaml(done: Migration, source: str, target: str) -> str:
    """The configuration as YAML; comments at its head say what is missing or differs.

    Args:
        done: The conversion.
        source: The name of the file that was converted.
        target: The name of the file that this becomes.
    """
    head = [f"The run `{done.run}` of {source}.", f"  pbrl fit --config {target}", *_report(done)]
    comments = "\n".join(f"# {line}" for entry in head for line in entry.splitlines())
    return f"{comments}\n{yaml.safe_dump(done.config, sort_keys=False, allow_unicode=True)}"


def _report(done: Migration) -> list[str]:
    required = [place for place in done.to_do if place in REQUIRED]
    optional = [place for place in done.to_do if place not in REQUIRED]
    lines = []
    for title, places in (("Must be supplied: CoMLRL defines it in code.", required), ("May be supplied:", optional)):
        lines += [title] if places else []
        lines += [f"  {place}: {done.to_do[place]}" for place in places]
    lines += ["Converted with a difference:"] if done.remarks else []
    lines += [f"  {remark}" for remark in done.remarks]
    lines += ["Without a counterpart:"] if done.left else []
    lines += [f"  {left.name} = {_shown(left)}: {left.why}" for left in done.left]
    return lines or ["Everything was converted."]


def _shown(left: Left) -> str:
    """A value for a comment: never a key, and only the option names of a section."""
    if may_be_secret(left.name.rpartition(".")[2], str(left.value)):
        return "…"
    if isinstance(left.value, dict):
        return "{" + ", ".join(map(str, left.value)) + "}"
    return " ".join(str(left.value).split())[:80]
