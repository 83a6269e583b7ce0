"""Directories that a run writes to, tried before anything is loaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn

from pbrl_lightning.utils.errors import ConfigurationError


def write_problems(trainer: Any, *, collects: bool) -> list[str]:
    """What is wrong with the directories that a run was given, one sentence each.

    Args:
        trainer: With its loggers and callbacks.
        collects: The run keeps a journal, which lies in ``default_root_dir``.
    """
    if trainer.fast_dev_run:
        return []
    return [
        f"{name} must be a directory that can be written to, got {str(path)!r}: {refusal}"
        for path, name in dict(_places(trainer, collects)).items()
        if (refusal := _refusal(path)) is not None
    ]


def check_output(path: str | Path, name: str = "output") -> None:
    """Finds out whether a file can be written before the work that it is to hold.

    Args:
        path: The file; its directory is made later.
        name: The option that named it.

    Raises:
        ConfigurationError: If it is a directory, or cannot be written to.
    """
    file = Path(path)
    if file.is_dir():
        raise ConfigurationError(f"`{name}` must be a file, got the directory {str(path)!r}")
    if (refusal := _refusal(file.parent)) is not None:
        raise ConfigurationError(f"`{name}` must be a file that can be written, got {str(path)!r}: {refusal}")


def _places(trainer: Any, collects: bool) -> Iterator[tuple[Path, str]]:
    """Local directories and the options that named them; the first option of each counts."""
    root, fits = Path(trainer.default_root_dir), trainer.state.fn == TrainerFn.FITTING
    given: list[tuple[Any, str]] = [
        (logger.save_dir, f"`save_dir` of the {type(logger).__name__}")
        for logger in trainer.loggers
        if getattr(logger, "save_dir", None) is not None
    ]
    uses_root = collects or (fits and not given)
    if fits:
        given += [
            (callback.dirpath, f"`dirpath` of the {type(callback).__name__}")
            for callback in trainer.callbacks
            if isinstance(getattr(callback, "dirpath", None), str | os.PathLike)
        ]
    for path, name in given:
        uses_root |= Path(path) == root
        if str(path) and "://" not in str(path) and Path(path) != root:
            yield Path(path), name
    if uses_root and "://" not in str(root):
        yield root, "`default_root_dir`"


def _refusal(path: Path) -> str | None:
    """Why a directory cannot be made or written to, in the system's words; None if it can."""
    existing = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))
    try:
        with tempfile.TemporaryDirectory(prefix=".pbrl_", dir=existing):
            return None
    except OSError as error:
        return f"{existing}: {error.strerror}" if existing != path.absolute() else error.strerror
