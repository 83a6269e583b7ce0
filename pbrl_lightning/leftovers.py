"""What a killed run left half-written, removed at the next start in its directory."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from pbrl_lightning.durable import held

PARTS = ("checkpoints", "replay", "history", "export")
"""What is searched below a run's directory, besides the directory itself."""

_FILE = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
_DIRECTORY = re.compile(r"\.(agent_\d+|reward_model)\.[a-z0-9_]{8}")
_DAY = 24 * 3600.0
_LOCKED_BY_NOW = 2.0
"""Seconds after which a writer has locked what it made."""
_DEPTH = 2
"""Folders below a part that are searched: of a round's policies, of a metric with slashes in a checkpoint's name."""


def remove_leftovers(directory: Path, others: Iterable[Path] = ()) -> list[Path]:
    """Removes the temporary files and directories of writers that are gone.

    Only names that this library gives are removed, and none that a live process holds. Where the file system has no
    locks, those of the last day may be in use and stay. A directory that was being replaced when its writer was killed
    is put back.

    Args:
        directory: Of the run.
        others: Directories of the run's that lie elsewhere.

    Returns:
        What was removed.
    """
    removed = []
    for found in _candidates(directory, others):
        with contextlib.suppress(OSError), held(found) as state:
            age = time.time() - found.lstat().st_mtime
            if state == "busy" or age < (_DAY if state == "unknown" else _LOCKED_BY_NOW):
                continue
            if found.is_dir():
                _put_back(found)
                shutil.rmtree(found)
            else:
                found.unlink()
            removed.append(found)
    return removed


def _candidates(directory: Path, others: Iterable[Path]) -> Iterator[Path]:
    depths = {directory: 0} | dict.fromkeys([*(directory / part for part in PARTS), *others], _DEPTH)
    for place, depth in depths.items():
        for top, folders, files in os.walk(place):
            here = Path(top)
            ours = [name for name in folders if _DIRECTORY.fullmatch(name) and _is_half_written(here / name)]
            yield from (here / name for name in (*ours, *filter(_FILE.fullmatch, files)))
            below = len(here.relative_to(place).parts)
            folders[:] = [name for name in folders if below < depth and not name.startswith(".")]


def _is_half_written(directory: Path) -> bool:
    """True for a directory as :func:`pbrl_lightning.agents.loading.write_directory` makes it."""
    return not directory.is_symlink() and {path.name for path in directory.iterdir()} <= {"new", "old"}


def _put_back(temporary: Path) -> None:
    """Ends a replacement that was cut short between its two renames: what is new was whole by then."""
    target = temporary.with_name(temporary.name[1:].rpartition(".")[0])
    if (temporary / "old").exists() and not target.exists():
        (temporary / ("new" if (temporary / "new").exists() else "old")).rename(target)
