"""``pbrl check``: whether what a run left on disk is whole."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from safetensors import safe_open

from pbrl_lightning.checkpoints import read_checkpoint
from pbrl_lightning.commands.parsing import ClearErrors
from pbrl_lightning.data_items import is_file_of_items
from pbrl_lightning.integrity import verify_archive
from pbrl_lightning.preferences.pair_sources import read_pairs
from pbrl_lightning.preferences.round_files import RoundStore, read_round_file
from pbrl_lightning.preferences.round_mirror import MIRROR, places_of_round
from pbrl_lightning.run_directory import CHECKPOINTS
from pbrl_lightning.utils.errors import ConfigurationError, MissingFileError, MissingPackageError, RunError

HELP = "Check that checkpoints, round files, pairs and saved models are whole."

_ROUND = re.compile(r"iteration_\d+(-(?P<sha256>[0-9a-f]{16}))?\.json")
_STORE_KEYS = {"store", "replay_dir", "progress"}


@dataclass(frozen=True)
class Finding:
    """What is known of one file.

    Attributes:
        path: The file, or the directory of a sharded checkpoint.
        content: What it holds; empty where it is damaged.
        problem: What is wrong; None if nothing is.
    """

    path: Path
    content: str = ""
    problem: str | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.content}" if self.problem is None else f"{self.path}: DAMAGED: {self.problem}"


def parser() -> ArgumentParser:
    """The command's options."""
    made = ClearErrors(
        prog="pbrl check",
        description=(
            f"{HELP} Checkpoints are compared with their checksums, round files with those in checkpoints and names."
        ),
        epilog="pbrl check runs/madpo/lightning_logs/version_0",
    )
    made.add_argument(
        "paths", type=str, nargs="+", help="Directories of runs, replay or models; checkpoints; files of pairs."
    )
    return made


def main(args: list[str]) -> None:
    """Runs the command.

    Args:
        args: What follows ``pbrl check``.

    Raises:
        MissingFileError: If a path does not exist.
        ConfigurationError: If there is nothing under a path that can be checked.
        RunError: If a file is damaged.
    """
    options = parser().parse_args(args)
    findings: list[Finding] = []
    for given in options.paths:
        for finding in check_path(given):
            sys.stdout.write(f"{finding}\n")
            findings.append(finding)
    damaged = [finding for finding in findings if finding.problem is not None]
    if damaged:
        raise RunError(f"{len(damaged)} of {len(findings)} are damaged: {', '.join(str(one.path) for one in damaged)}")
    sys.stdout.write(f"{len(findings)} checked, none is damaged\n")


def check_path(path: str | Path) -> Iterator[Finding]:
    """Checks a file, or all files of known kinds below a directory.

    Args:
        path: Of a run, a checkpoint, round files, pairs or models.

    Yields:
        One finding per file; a sharded checkpoint and the rounds that a checkpoint needs are one each.

    Raises:
        MissingFileError: If it does not exist.
        ConfigurationError: If there is nothing that can be checked.
    """
    given = Path(path)
    if not given.exists():
        raise MissingFileError(f"{str(path)!r} does not exist")
    kinds = [(file, check) for file in _files(given) if (check := _kind(file, given)) is not None]
    if not kinds:
        raise ConfigurationError(
            f"{str(path)!r} has no checkpoint (.ckpt), round file (iteration_….json), saved model (.safetensors) or, "
            "given by itself, file of pairs (.json, .jsonl)"
        )
    for file, check in kinds:
        try:
            yield Finding(file, check(file))
        except MissingPackageError:
            raise
        except Exception as error:  # a file from elsewhere may break a reader in any way
            said = " ".join(str(error).split()).removeprefix(f"{file} ").removeprefix(f"{file}: ")
            yield Finding(file, problem=said.removeprefix("is damaged: ") or type(error).__name__)


def _files(given: Path) -> Iterator[Path]:
    """The files below a path in order; a sharded checkpoint is one."""
    if given.is_file() or _is_sharded(given):
        yield given
        return
    for top, folders, files in os.walk(given):
        here = Path(top)
        sharded = [name for name in folders if _is_sharded(here / name)]
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in sharded)
        yield from (here / name for name in sorted([*files, *sharded]))


def _is_sharded(path: Path) -> bool:
    return path.is_dir() and ((path / ".metadata").exists() or path.suffix == ".ckpt")


def _kind(path: Path, given: Path) -> Any:
    """How a file is checked; None for other kinds."""
    if path.is_dir():
        return _check_shards
    if path.suffix == ".ckpt":
        return _check_checkpoint
    if path.suffix == ".safetensors":
        return _check_model
    if _ROUND.fullmatch(path.name):
        return _check_round
    if path.name == "run.json":
        return _check_owner
    if path == given:
        return _check_pairs if is_file_of_items(path) else _check_checkpoint
    return None


def _check_checkpoint(path: Path) -> str:
    if not zipfile.is_zipfile(path):
        raise ConfigurationError("is not a whole checkpoint: it is not an archive as torch.save writes it")
    count = verify_archive(path)
    _, checkpoint = read_checkpoint(path, map_location="cpu")
    name = (checkpoint.get("options") or {}).get("class", "a module")
    sums = f"{count} records match their checksums" if count else "it has no checksums"
    return f"checkpoint of {name}, step {checkpoint.get('global_step', 0)}, {sums}{_check_rounds(path, checkpoint)}"


def _check_rounds(path: Path, checkpoint: Mapping[str, Any]) -> str:
    """Finds the round files that a resumption from a checkpoint needs."""
    states = [value for value in checkpoint.values() if isinstance(value, dict) and value.keys() >= _STORE_KEYS]
    if not states or states[0]["store"] is None:
        return ""
    store = RoundStore(states[0]["replay_dir"] or path.parent)
    store.load_state_dict(states[0]["store"])
    for entry in store.entries:
        places = places_of_round(store.directory, entry, path.parent)
        if not any(place.is_file() and _sha256(place) == entry.sha256 for place in places):
            raise ConfigurationError(
                f"the file of round {entry.iteration} that it needs is in neither {places[0]} nor {places[1]}, or "
                "was changed"
            )
    return f", {_count(len(store.entries), 'round file')} in place"


def _check_round(path: Path) -> str:
    pairs = read_round_file(path)
    named = _ROUND.fullmatch(path.name)
    if named is not None and named["sha256"] and not _name_says(path, _sha256(path)):
        raise ConfigurationError("its bytes were changed: its sha256 is not the one in its name")
    kept = sorted((path.parent.parent / CHECKPOINTS / MIRROR).glob(f"{path.stem}-*.json"))
    if kept and not any(_name_says(other, _sha256(path)) for other in kept):
        raise ConfigurationError(
            f"its bytes were changed since it was stored; a resumed run restores it from {kept[-1]}"
        )
    return f"round file, {_count(len(pairs), 'pair')}"


def _check_owner(path: Path) -> str:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("run_id"), str):
        raise ConfigurationError("it must hold a `run_id`, and does not")
    return f"round files of run {content['run_id']}"


def _check_pairs(path: Path) -> str:
    pairs = read_pairs(path)
    return f"{_count(len(pairs), 'pair')} of {_count(len(pairs[0].prompts), 'agent')}"


def _check_model(path: Path) -> str:
    with safe_open(path, "pt") as file:  # compares the sizes in its header with the file's
        return f"{_count(len(file.keys()), 'tensor')}, as many bytes as it says (the format has no checksums)"


def _check_shards(path: Path) -> str:
    archives = [file for file in sorted(path.rglob("*")) if file.is_file() and zipfile.is_zipfile(file)]
    # A `.distcp` file is a row of archives, of which the standard library sees the last one alone.
    whole = [file for file in archives if file.suffix != ".distcp"]
    count = sum(verify_archive(file) for file in whole)
    other = sum(file.suffix == ".distcp" for file in path.rglob("*"))
    return f"sharded checkpoint, {count} records match their checksums, {_count(other, 'file')} without any"


def _name_says(path: Path, sha256: str) -> bool:
    """True if the name of a round file beside the checkpoints holds a digest."""
    return path.stem.rpartition("-")[2] == sha256[:16]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
