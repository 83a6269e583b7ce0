"""Keeps a run in one directory, and says where its parts are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from pbrl_lightning.checkpoints import checkpoint_directory
from pbrl_lightning.confinement import confine_checkpoint_paths
from pbrl_lightning.curves import CurveLogger
from pbrl_lightning.durable import write_atomically
from pbrl_lightning.hyperparameters import log_options
from pbrl_lightning.leftovers import remove_leftovers
from pbrl_lightning.reporting.runs import CURVES
from pbrl_lightning.rounds import RoundCallback
from pbrl_lightning.run_directory import directory_of_checkpoint, run_directory, settle_rows, settle_run


class RunDirectory(RoundCallback):
    """Decides the run's directory, logs its options there and to the loggers, and prints at the end where all is.

    See :func:`pbrl_lightning.run_directory.run_directory`. Checkpoints go there too, unless a ``ModelCheckpoint`` has a
    ``dirpath``. Added by itself.
    """

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            settle_run(trainer)

    @override
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        # Every callback's is called before any of them takes its state.
        confine_checkpoint_paths(trainer, checkpoint)
        settle_rows(trainer, resumed=True)

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        settle_rows(trainer, resumed=False)
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            _clear_up(trainer)
        log_options(trainer, pl_module)  # type: ignore[arg-type]

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            _keep_curves(trainer)
            rank_zero_info("\n".join(where(trainer)))


def _clear_up(trainer: L.Trainer) -> None:
    """Removes what an earlier start in the run's directory was killed in the middle of writing."""
    given = [getattr(callback, "dirpath", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    elsewhere = [Path(path) for path in given if isinstance(path, str | Path) and "://" not in str(path)]
    if removed := remove_leftovers(run_directory(trainer), elsewhere):
        names = ", ".join(path.name for path in removed[:3])
        rank_zero_info(f"removed {len(removed)} half-written files of an earlier start: {names}")


def _keep_curves(trainer: L.Trainer) -> None:
    """Writes the report's curves for later comparisons where no logger leaves files of numbers here."""
    if any(isinstance(logger, TensorBoardLogger | CSVLogger) for logger in trainer.loggers):
        return
    kept = next((logger for logger in trainer.loggers if isinstance(logger, CurveLogger)), None)
    if kept is not None:
        text = json.dumps({name: {"steps": list(c.steps), "values": list(c.values)} for name, c in kept.curves.items()})
        write_atomically(run_directory(trainer) / CURVES, lambda file: file.write(text.encode()))


def where(trainer: L.Trainer) -> list[str]:
    """Lines that say where a run's parts are: its directory, then what lies elsewhere. By the first process."""
    directory = run_directory(trainer)
    shows = any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers)
    lines = [f"run directory: {directory}" + (f"  (tensorboard --logdir {directory})" if shows else "")]
    lines += [f"  {what}: {path}" for what, path in parts_elsewhere(trainer).items()]
    if trainer.ckpt_path is not None and directory_of_checkpoint(trainer.ckpt_path) != Path(directory).absolute():
        lines.append(f"  earlier part of the run, with its logs: {_origin(trainer.ckpt_path)}")
    return lines


def parts_elsewhere(trainer: L.Trainer) -> dict[str, Path]:
    """The parts of a run that do not lie in its directory, by name."""
    parts: dict[str, Path | None] = {"checkpoints": checkpoint_directory(trainer)}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger | CSVLogger):
            parts[f"logs of the {type(logger).__name__}"] = Path(logger.log_dir)
    source = getattr(getattr(trainer, "datamodule", None), "pair_source", None)
    if source is not None:
        parts["round files"] = source.directory
        parts["history"] = source.history_dir
    names = {"AgentExport": "trained models", "RunReport": "report", "RewardDistribution": "reward distributions"}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        kind = next((names[base.__name__] for base in type(callback).__mro__ if base.__name__ in names), None)
        if kind is not None and callback.dirpath is not None:
            parts[kind] = Path(callback.dirpath)
    inside = run_directory(trainer).absolute()
    return {what: path for what, path in parts.items() if path is not None and not _lies_in(path.absolute(), inside)}


def _lies_in(path: Path, directory: Path) -> bool:
    directory, path = directory.resolve(), path.resolve()
    return path == directory or directory in path.parents


def _origin(checkpoint: str | Path) -> Path:
    return directory_of_checkpoint(checkpoint) or Path(checkpoint).parent
