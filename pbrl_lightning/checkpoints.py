"""How checkpoints are written, read and found."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from pbrl_lightning.durable import write_atomically
from pbrl_lightning.integrity import verify_archive, with_checksums
from pbrl_lightning.utils.errors import ConfigurationError, MissingFileError, file_error


class DurableCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, never half-written, never lost in silence, checked and read without running code.

    Lightning's own are not synced, and one that may not be written is left out without a word (2.6.6).
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if "://" in str(path):  # a remote file system has its own promises
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with with_checksums():
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
        if "://" not in str(path):
            if not Path(path).exists():
                raise MissingFileError(f"the checkpoint {str(path)!r} does not exist")
            verify_archive(path)
        try:
            return super().load_checkpoint(path, map_location, True if weights_only is None else weights_only)
        except _UNREADABLE as error:
            raise _not_whole(path, error) from error


_UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError)
"""What torch raises for a file that is no checkpoint, or is cut short."""


def _not_whole(path: str | Path, error: Exception) -> ConfigurationError:
    if isinstance(error, pickle.UnpicklingError):  # torch's own words advise to run whatever the file holds
        return ConfigurationError(
            f"{path} is damaged, or holds objects besides tensors and plain containers: such a file could run code and "
            "is not loaded"
        )
    reason = str(error).partition("\n")[0]
    return ConfigurationError(f"{path} is not a whole checkpoint ({type(error).__name__}: {reason})")


def check_whole(path: str | Path) -> None:
    """Finds a file that is no checkpoint or was cut short, without reading its weights.

    Raises:
        ConfigurationError: If it is one.
    """
    if not _is_whole(Path(path)):
        raise ConfigurationError(f"{path} is not a whole checkpoint: it is not an archive as torch.save writes it")


def make_durable(trainer: L.Trainer) -> None:
    """Gives a trainer durable checkpoint files, unless its checkpoints are written in a way of their own."""
    outer = trainer.strategy.checkpoint_io
    if type(outer) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = DurableCheckpointIO()
    elif isinstance(outer, AsyncCheckpointIO) and type(outer.checkpoint_io) is TorchCheckpointIO:
        outer.checkpoint_io = DurableCheckpointIO()


@contextmanager
def saved_at_once(trainer: L.Trainer) -> Iterator[None]:
    """Checkpoints saved inside are on disk when they are saved, also under an ``AsyncCheckpointIO``."""
    outer = trainer.strategy.checkpoint_io
    if isinstance(outer, AsyncCheckpointIO) and outer.checkpoint_io is not None:
        trainer.strategy.checkpoint_io = outer.checkpoint_io
    try:
        yield
    finally:
        trainer.strategy.checkpoint_io = outer


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


def read_checkpoint(path: str | Path, map_location: Any = None) -> tuple[Path, dict[str, Any]]:
    """A checkpoint file and what it holds, read without running code.

    Args:
        path: The file, or a run's directory for its newest checkpoint.
        map_location: As in ``torch.load``.

    Raises:
        MissingFileError: If it does not exist.
        ConfigurationError: If it is no checkpoint file, or does not match its checksums.
    """
    file = Path(path)
    if file.is_dir() and not (file / ".metadata").exists():
        file = newest_checkpoint(file)
    if not file.exists():
        raise MissingFileError(f"the checkpoint {str(path)!r} does not exist")
    if file.is_dir():
        raise ConfigurationError(
            f"{file} is a sharded checkpoint: make one file of it by `python -m "
            f"lightning.pytorch.utilities.consolidate_checkpoint {file}`"
        )
    verify_archive(file)
    if map_location is None and not torch.cuda.is_available():
        map_location = "cpu"
    try:
        checkpoint = torch.load(file, map_location=map_location, weights_only=True)
    except _UNREADABLE as error:
        raise _not_whole(file, error) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ConfigurationError(f"{file} is no checkpoint of a run: it has no `state_dict`")
    return file, checkpoint


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
