"""The directory of a run: one for everything that it writes, whatever loggers it has."""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from pbrl_lightning.utils.errors import file_error

DEFAULT_NAME = "lightning_logs"
"""The folder of runs without a name, as in Lightning."""

CHECKPOINTS = "checkpoints"
_KEPT_ROWS = "metrics_earlier.csv"
"""Where a run's directory holds its checkpoints."""


@dataclass
class _Place:
    """The directory of a trainer's current run.

    Attributes:
        directory: Where it is.
        own: True if it was made for this run, since no logger gives one.
        pinned: True if it was chosen from outside: it stays for later fits of the trainer, too.
        begun: True once a fit has begun in it.
        placed: Checkpoint callbacks that save there because of us.
    """

    directory: Path
    own: bool = False
    pinned: bool = False
    begun: bool = False
    placed: list[ModelCheckpoint] = field(default_factory=list)


_PLACES: WeakKeyDictionary[L.Trainer, _Place] = WeakKeyDictionary()


def run_directory(trainer: L.Trainer) -> Path:
    """The directory of the trainer's run; must be called by every process the first time.

    The log directory of the first logger that has one (TensorBoard's and the CSV logger's). Without one, the directory
    in which Lightning puts the run's checkpoints if the first logger numbers its runs:
    ``<save_dir>/<project>/<run id>`` for Weights & Biases. Otherwise, also without a logger, a new
    ``<default_root_dir>/lightning_logs/version_N``. A trial run (``fast_dev_run``) has none; the root directory stands
    in for it.
    """
    place = _PLACES.get(trainer)
    if place is None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return Path(trainer.default_root_dir)
        decided = _decide(trainer) if trainer.is_global_zero else None
        place = _PLACES[trainer] = _Place(*trainer.strategy.broadcast(decided))  # type: ignore[misc]
    return place.directory


def pin_run_directory(trainer: L.Trainer, directory: str | Path) -> None:
    """Chooses the directory for all runs of a trainer; a second run there is refused where the first left round files.

    Args:
        trainer: Not fitting yet.
        directory: Made if it does not exist.
    """
    _PLACES[trainer] = _Place(Path(directory), own=True, pinned=True)


def begin_run(trainer: L.Trainer) -> None:
    """Gives the next fit of a trainer a directory of its own, unless a logger or the user decides it."""
    place = _PLACES.get(trainer)
    if place is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    if place.begun and not place.pinned:
        for callback in place.placed:
            callback.dirpath = None
        del _PLACES[trainer]


def settle_run(trainer: L.Trainer) -> Path:
    """Decides the run's directory, and lets checkpoints go there that would go elsewhere; called by every process."""
    directory = run_directory(trainer)
    place = _PLACES.get(trainer)
    if place is None:  # a trial run
        return directory
    place.begun = True
    if not _lightning_saves_in(trainer, directory):
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(directory / CHECKPOINTS)
                place.placed.append(callback)
    return directory


def continue_run(trainer: L.Trainer) -> None:
    """Moves a resumed run into the directory of its checkpoint, if no logger writes elsewhere; by every process.

    Only a directory beside the one that was made for this run is taken, and only while that one is empty.
    """
    place, checkpoint = _PLACES.get(trainer), trainer.ckpt_path
    if place is None or not place.own or place.pinned or checkpoint is None:
        return
    earlier = directory_of_checkpoint(checkpoint)
    moved = False
    if trainer.is_global_zero and earlier is not None and _same(earlier.parent, place.directory.parent):
        with contextlib.suppress(OSError):
            place.directory.rmdir()
            moved = True
    if trainer.strategy.broadcast(moved):
        assert earlier is not None  # the first process found it
        place.directory = earlier
        for callback in place.placed:
            callback.dirpath = str(earlier / CHECKPOINTS)


def continue_from(trainer: L.Trainer, checkpoint: str | Path) -> None:
    """Lets a run that is about to be resumed write to its directory again, with its loggers.

    TensorBoard's and the CSV logger's directories are taken again where the options name the same folder of runs and no
    version. A directory that this run's options would not have given is left alone: the run gets a new one.

    Args:
        trainer: Before its fit.
        checkpoint: What it resumes from.
    """
    earlier = directory_of_checkpoint(checkpoint)
    if earlier is None or trainer.fast_dev_run or not earlier.is_dir():  # type: ignore[attr-defined]
        return
    for logger in trainer.loggers:
        if not isinstance(logger, TensorBoardLogger | CSVLogger) or not _may_choose(trainer, logger):
            continue
        if _same(Path(logger.root_dir), earlier.parent):
            # The version is an argument of the constructor only; nothing has asked for it yet.
            number = earlier.name.removeprefix("version_")
            logger._version = int(number) if number.isdigit() and number != earlier.name else earlier.name
            if isinstance(logger, CSVLogger) and trainer.is_global_zero:
                _keep_rows(logger)
    if not trainer.loggers and _same(_root_of_runs(trainer), earlier.parent):
        _PLACES[trainer] = _Place(earlier, own=True, pinned=True)


def directory_of_checkpoint(path: str | Path) -> Path | None:
    """The run's directory that a checkpoint lies in, as ``<directory>/checkpoints/…``; None if it lies elsewhere."""
    place = Path(os.path.abspath(path))
    return next((parent.parent for parent in place.parents if parent.name == CHECKPOINTS), None)


def name_of_directory(directory: Path) -> str:
    """What to call a run: the last two parts of its directory that tell it from others.

    Example:
        >>> name_of_directory(Path("runs/madpo/lightning_logs/version_0"))
        'madpo/version_0'
        >>> name_of_directory(Path("runs/long_training/version_2"))
        'long_training/version_2'
    """
    parts = [part for part in Path(os.path.abspath(directory)).parts if part != DEFAULT_NAME]
    return "/".join(parts[1:][-2:]) or str(directory)


def _decide(trainer: L.Trainer) -> tuple[Path, bool]:
    """The directory, and whether it is one of the run's own. By the first process."""
    for logger in trainer.loggers:
        if (given := _log_directory(logger)) is not None:
            return given, False
    numbered = _numbered(trainer)
    if numbered is not None:
        return numbered, False
    root = _root_of_runs(trainer)
    taken = [path.name.removeprefix("version_") for path in root.glob("version_*")] if root.is_dir() else []
    number = max((int(name) for name in taken if name.isdigit()), default=-1) + 1
    while True:
        try:
            (root / f"version_{number}").mkdir(parents=True)
            return root / f"version_{number}", True
        except FileExistsError:  # another run that starts at the same time
            pass
        except OSError as error:
            message = f"the directory of the run, {root / f'version_{number}'}, cannot be made: {error.strerror}"
            raise file_error(error, message) from error
        number += 1


def _log_directory(logger: Any) -> Path | None:
    """The directory that a logger has for this run alone; None if it has none, or it is on another machine."""
    directory = getattr(logger, "log_dir", None)
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory) or "://" in os.fspath(directory):
        return None
    return Path(directory)


def _numbered(trainer: L.Trainer) -> Path | None:
    """Where Lightning saves the checkpoints of a run whose first logger gives it a number or an id."""
    if not trainer.loggers:
        return None
    logger = trainer.loggers[0]
    _ = getattr(logger, "experiment", None)  # some ids exist only then
    name, version = logger.name, logger.version
    root = logger.save_dir or trainer.default_root_dir
    if version is None or name is None or "://" in str(root):
        return None
    return Path(root) / str(name) / (version if isinstance(version, str) else f"version_{version}")


def _lightning_saves_in(trainer: L.Trainer, directory: Path) -> bool:
    """True if the checkpoints of a run lie in this directory without our doing; asked by every process."""
    if not trainer.loggers:
        return False
    logger = trainer.loggers[0]
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        return _same(Path(logger.log_dir), directory)
    numbered = _numbered(trainer) if trainer.is_global_zero else None
    return bool(trainer.strategy.broadcast(numbered is not None and _same(numbered, directory)))


def _root_of_runs(trainer: L.Trainer) -> Path:
    return Path(trainer.default_root_dir) / (getattr(trainer, "run_name", None) or DEFAULT_NAME)


def _may_choose(trainer: L.Trainer, logger: Any) -> bool:
    """True if the user left the version of a logger open."""
    return logger._version is None or getattr(trainer, "has_default_logger", False)


def set_rows_aside(trainer: L.Trainer) -> None:
    """Opens CSV loggers whose version the user gave without losing an earlier ``metrics.csv``, which Lightning removes.

    Called before Lightning opens loggers, which is before it is known whether the run is resumed.
    """
    if not trainer.is_global_zero or trainer.fast_dev_run or trainer.state.fn != "fit":  # type: ignore[attr-defined]
        return
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and logger._version is not None and logger._experiment is None:
            _open_beside_rows(logger)


def settle_rows(trainer: L.Trainer, resumed: bool) -> None:
    """A resumed run's CSV loggers go on in the file with its rows; rows of another run get a file with a number.

    Args:
        trainer: The run's, before anything is logged.
        resumed: Whether the run goes on from a checkpoint.
    """
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and (kept := Path(logger.log_dir) / _KEPT_ROWS).is_file():
            if resumed:
                _put_back_rows(logger, kept)
            else:
                numbered = (kept.with_name(f"metrics_{number}.csv") for number in itertools.count(1))
                os.replace(kept, next(path for path in numbered if not path.exists()))


def _keep_rows(logger: CSVLogger) -> None:
    """Opens a CSV logger in a directory with an earlier ``metrics.csv``, and goes on in that file."""
    if _open_beside_rows(logger):
        _put_back_rows(logger, Path(logger.log_dir) / _KEPT_ROWS)


def _open_beside_rows(logger: CSVLogger) -> bool:
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.is_file():
        return False
    os.replace(path, path.with_name(_KEPT_ROWS))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*exists and is not empty")
        _ = logger.experiment
    return True


def _put_back_rows(logger: CSVLogger, kept: Path) -> None:
    path = kept.with_name("metrics.csv")
    os.replace(kept, path)
    with path.open(encoding="utf-8", newline="") as file:
        logger.experiment.metrics_keys = next(csv.reader(file), [])


def _same(first: Path, second: Path) -> bool:
    return first.expanduser().resolve() == second.expanduser().resolve()
