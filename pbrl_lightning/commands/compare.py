"""``pbrl compare``: runs beside each other, in the terminal and as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import ArgumentParser

from pbrl_lightning.commands.parsing import ClearErrors
from pbrl_lightning.durable import write_atomically
from pbrl_lightning.reporting.comparison import GENERATOR, as_text, missing_lines, option_rows, page, table
from pbrl_lightning.reporting.runs import find_runs, read_run
from pbrl_lightning.utils.errors import ConfigurationError
from pbrl_lightning.writable import check_output

HELP = "Compare runs: a table, the options that differ, and a page with their curves."


def parser() -> ArgumentParser:
    """The command's options."""
    made = ClearErrors(
        prog="pbrl compare",
        description=f"{HELP} A run is its directory or name=directory; a folder stands for all runs in it.",
        epilog="pbrl compare runs/madpo short=runs/marlhf/lightning_logs/version_0 --output comparison.html",
    )
    made.add_argument("runs", type=str, nargs="+", help="Directories of runs, or name=directory.")
    made.add_argument("--output", type=str, default="comparison.html", help="The page.")
    return made


def main(args: list[str]) -> None:
    """Runs the command.

    Args:
        args: What follows ``pbrl compare``.

    Raises:
        MissingFileError: If a run does not exist.
        ConfigurationError: If one is named twice, or `output` is another kind of file.
    """
    options = parser().parse_args(args)
    target = Path(options.output)
    check_output(target)
    if target.exists() and not _is_comparison(target):
        raise ConfigurationError(f"`output` must be a new file or an earlier comparison, got {target}")
    runs = [read_run(path, name) for name, path in find_runs(options.runs)]
    sys.stdout.write(as_text(table(runs)) + "\n")
    if rows := option_rows(runs):
        sys.stdout.write("\n" + as_text(rows) + "\n")
    for line in missing_lines(runs):
        sys.stdout.write(f"{line}\n")
    text = page(runs)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, lambda file: file.write(text.encode(errors="replace")))
    sys.stderr.write(f"curves: {target}\n")


def _is_comparison(path: Path) -> bool:
    with path.open("rb") as file:
        return f'content="{GENERATOR}"'.encode() in file.read(400)
