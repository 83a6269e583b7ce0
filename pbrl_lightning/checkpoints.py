"""How checkpoints are written, read and found."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from pbrl_lightning.durable import write_atomically
from pbrl_lightning.utils.errors import MissingFileError, file_error


class DurableCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, never half-written, never lost in silence, and read without running code.

    Lightning's own are not synced, and one that may not be written is left out without a word (2.6.6).
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if "://" in str(path):  # a remote file system has its own promises
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(Path(path), lambda file: torch.save(checkpoint, file))
        except (OSError, RuntimeError) as error:
            # Torch's writer hides what the file system says of a full disk.
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            message = f"the checkpoint could not be written ({cause.strerror})"
            raise file_error(cause, cause.errno, message, str(path)) from error

    @override
    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return super().load_checkpoint(path, map_location, True if weights_only is None else weights_only)


def make_durable(trainer: L.Trainer) -> None:
    """Gives a trainer durable checkpoint files, unless its checkpoints are written in a way of their own."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = DurableCheckpointIO()


def checkpoint_directory(trainer: L.Trainer) -> Path | None:
    """Where the run's checkpoints go; None if it saves none."""
    directories = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    return next((Path(directory) for directory in directories if directory), None)


def newest_checkpoint(directory: str | Path) -> Path:
    """The newest whole checkpoint under a directory; newer ones that are not whole are named in a warning.

    Args:
        directory: Of a run, or of its checkpoints.

    Raises:
        MissingFileError: If there is none.
    """
    found = [path for path in Path(directory).rglob("*.ckpt") if path.exists()]  # a link may lead nowhere
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if path.is_dir() or _is_whole(path):
            return path
        rank_zero_warn(f"the checkpoint {path} is not whole and is passed over")
    raise MissingFileError(f"there is no whole checkpoint (*.ckpt) under {str(directory)!r}")


def dtype_of_checkpoint(path: str | Path) -> str | None:
    """The number type of a run's weights, as its checkpoint file says; None for anything else.

    Only the file's directory is read, not its weights. What is wrong with a file is left for the Trainer to report.
    """
    if not Path(path).is_file():
        return None
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception:
        return None
    return checkpoint.get("dtype")


def _is_whole(path: Path) -> bool:
    """True if the archive's directory, which is written last, is there, and what it names reads."""
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(archive.infolist())
    except (OSError, zipfile.BadZipFile):
        return False
