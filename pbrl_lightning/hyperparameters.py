"""The options of a run as loggers get them, so that runs can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from pbrl_lightning.data import PreferenceDataModule
from pbrl_lightning.durable import write_atomically
from pbrl_lightning.modules.base import LearnerModule, TeamModule
from pbrl_lightning.run_directory import run_directory
from pbrl_lightning.utils.options import encode, flat, given_options, readable

FILE = "hparams.yaml"

_TRAINER = ("precision", "accumulate_grad_batches", "gradient_clip_val", "max_steps", "world_size")


def run_options(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    """The options of module, team, data and trainer: numbers, texts, class names with their options, import paths.

    No key, no object and no list of task items is among them.
    """
    options: dict[str, Any] = {"module": {"class": type(module).__name__}}
    given = given_options(module)
    team = given.pop("team", None)
    options["module"] |= {name: readable(encode(value, name)) for name, value in given.items()}
    if team is not None:
        options["team"] = {name: readable(encode(value, name)) for name, value in given_options(team).items()}
    data = getattr(trainer, "datamodule", None)
    if isinstance(data, PreferenceDataModule):
        options["data"] = {
            name: _source(value, data.sources[name]) if name in data.sources else readable(encode(value, name))
            for name, value in _effective(data).items()
        }
    options["trainer"] = {name: readable(encode(getattr(trainer, name, None), name)) for name in _TRAINER}
    return options


def log_options(trainer: L.Trainer, module: LearnerModule) -> None:
    """Writes a run's options to every logger, and to ``hparams.yaml`` in the run's directory."""
    if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    options = run_options(trainer, module)
    _write(run_directory(trainer) / FILE, options)
    for logger in trainer.loggers:
        try:
            if isinstance(logger, TensorBoardLogger):
                _log_to_tensorboard(logger, options, list(_results(module)))
            elif isinstance(logger, CSVLogger):
                _write(Path(logger.log_dir) / FILE, options)
            else:
                logger.log_hyperparams(options)
        except NotImplementedError:  # a logger of numbers only
            continue
        except Exception as error:
            rank_zero_warn(f"{type(logger).__name__} did not take the run's options: {type(error).__name__}: {error}")


def _results(module: LearnerModule) -> tuple[str, ...]:
    """The logged numbers by which runs of a module are compared."""
    names: tuple[str, ...] = ("eval/turn_1/reward_mean",) if isinstance(module, TeamModule) else ()
    if module.policy_stage is not None:
        names += ("turn_1/reward_mean",)
    elif isinstance(module, TeamModule):
        names += ("train/loss", "train/preference_accuracy")
    if not isinstance(module, TeamModule):
        names += ("reward/val_accuracy", "reward/val_loss")
    return names


@rank_zero_only
def _log_to_tensorboard(logger: TensorBoardLogger, options: Mapping[str, Any], results: list[str]) -> None:
    """The HPARAMS tab, whose results are the curves of these names.

    Lightning's own method would write a point into each of them.
    """
    from torch.utils.tensorboard.summary import hparams

    logger.log_hyperparams(dict(options), metrics={})  # for its file
    cells = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in flat(options, "/").items()
    }
    writer = logger.experiment._get_file_writer()
    for summary in hparams(cells, dict.fromkeys(results, 0.0)):
        writer.add_summary(summary)


def _effective(data: PreferenceDataModule) -> dict[str, Any]:
    """What the data module was given, and the defaults that it chose where it was given nothing."""
    given = given_options(data)
    chosen = {name for name, value in given.items() if value in (None, "default") and hasattr(data, name)}
    return {name: getattr(data, name) if name in chosen else value for name, value in given.items()}


def _source(given: Any, words: str) -> Any:
    """Where items or pairs are from: a name as it was given, and of what was given in Python no entry."""
    if isinstance(given, str | Path) or (isinstance(given, list) and all(isinstance(name, str) for name in given)):
        return readable(encode(given))
    return f"{len(given)} {words}" if isinstance(given, list) else words


def _write(path: Path, options: Mapping[str, Any]) -> None:
    text = yaml.safe_dump(dict(options), sort_keys=False, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write(text.encode(errors="replace")))
