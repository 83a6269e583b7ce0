"""Preference pairs without training: ``pbrl collect``, and ``PreferenceTrainer(…).collect(module, data)``."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from pbrl_lightning.batches import PreferencePair
from pbrl_lightning.data import PreferenceDataModule
from pbrl_lightning.data_options import validate_items
from pbrl_lightning.modules.base import LearnerModule, TeamModule
from pbrl_lightning.modules.madpo import MADPOModule
from pbrl_lightning.rounds import log_to, notify
from pbrl_lightning.run_directory import begin_run
from pbrl_lightning.utils.errors import ConfigurationError, raise_together


class PreferenceTrainer(L.Trainer):
    """Lightning's Trainer, which can also name a run, and collect preference pairs without training on them.

    Args:
        run_name: What the run is called in its report and in comparisons. Runs of a name lie in
            ``<default_root_dir>/<run_name>/version_N``, unless a logger of the user's own says where.
        **kwargs: Those of Lightning's Trainer.

    Raises:
        ConfigurationError: If the name is none for a folder.
    """

    collecting = False
    """True while :meth:`collect` is at work."""

    log_interval_given = False
    """True if ``log_every_n_steps`` is the user's, even where it is Lightning's default."""

    def __init__(self, *, run_name: str | None = None, **kwargs: Any) -> None:
        if run_name is not None and not re.fullmatch(r"\w[\w.-]*", run_name):
            raise ConfigurationError(f"`run_name` must be letters, digits, `_`, `-` and `.`, got {run_name!r}")
        self.run_name = run_name
        self.has_default_logger = kwargs.get("logger") in (None, True)
        super().__init__(**kwargs)
        if run_name is not None and self.has_default_logger and isinstance(self.logger, TensorBoardLogger | CSVLogger):
            kind = type(self.logger)
            self.loggers = [kind(self.default_root_dir, name=run_name, version=SLURMEnvironment.job_id())]

    def collect(self, model: LearnerModule, datamodule: PreferenceDataModule) -> list[PreferencePair]:
        """Collects one round of preference pairs and writes its file; nothing is trained.

        The pairs are those that the first round of a fit would train on. The round file goes to ``replay`` in the run's
        directory or to the data module's ``replay_dir``, which must not hold another run's files. What is sampled
        and scored is journalled: a collection that was stopped goes on when the same command is given again.

        Args:
            model: Whose team answers; nothing else of it is loaded.
            datamodule: Task items, reward or judge, comparator, and how pairs are chosen.

        Returns:
            The pairs, the same on every process.

        Raises:
            ConfigurationError: If there is no team, or nothing to collect with; all problems are named at once.
        """
        _check(model, datamodule)
        assert isinstance(model, TeamModule)  # `_check`
        stage = CollectionStage(datamodule)
        self.callbacks = [callback for callback in self.callbacks if not isinstance(callback, Checkpoint)]  # type: ignore[has-type]
        self.collecting = True
        try:
            self.validate(_AskedTeam(model.team), datamodule=stage, verbose=False)
        finally:
            self.collecting = False
        return stage.pairs


class _AskedTeam(MADPOModule):
    """A team that only answers: nothing but the agents is loaded, and nothing waits for the end of a fit."""

    @override
    def wanted_callbacks(self) -> list[L.Callback]:
        from pbrl_lightning.callbacks import CollectionProgress, ComparatorHistory

        return [
            wanted
            for wanted in super().wanted_callbacks()
            if isinstance(wanted, CollectionProgress | ComparatorHistory)
        ]


class CollectionStage(L.LightningDataModule):
    """Collects the first round of a data module where Lightning would ask for validation batches, and has none.

    Args:
        data: The data module whose options decide the collection.
    """

    def __init__(self, data: PreferenceDataModule) -> None:
        super().__init__()
        self.data = data
        self.comparator = data.comparator
        self.pairs: list[PreferencePair] = []

    @property
    def pair_source(self) -> Any:
        """Where the round file and the journal are, as callbacks ask for it."""
        return self.data.pair_source

    @override
    def setup(self, stage: str) -> None:
        del stage
        data, trainer = self.data, self.trainer
        assert trainer is not None  # it calls
        module = trainer.lightning_module
        assert isinstance(module, TeamModule)
        data.trainer = trainer
        begin_run(trainer)
        data.start_afresh()
        validate_items(data, module)
        if data.comparator is not None:
            data.comparator.check(module.team)
        if data.oracle is not None:
            data.oracle.view = module.team.role_view

    @override
    def val_dataloader(self) -> list[Any]:
        trainer = self.trainer
        assert trainer is not None
        # Lightning evaluates in inference mode, whose tensors a later fit could not use.
        with torch.inference_mode(False), torch.no_grad():
            self._collect(trainer)
        return []

    def _collect(self, trainer: L.Trainer) -> None:
        data, source = self.data, self.data.pair_source
        source.open(trainer)  # a foreign directory is found before anything is saved
        notify(trainer, "on_round_start", 1)
        collected = source.collect(trainer, data.collector(), data.items, 1)
        self.pairs = collected.pairs
        record = source.records[-1]
        dropped = data.oracle.num_dropped if data.oracle is not None else 0
        log_to(trainer, {**record.metrics(), "collect/dropped_candidates": dropped})
        source.drop_journals()
        path = source.open(trainer).directory / "iteration_0001.json"
        place = "a trial run keeps no file" if trainer.fast_dev_run else str(path)  # type: ignore[attr-defined]
        reward = "no score" if record.reward_mean is None else f"mean reward {record.reward_mean:.3f}"
        rank_zero_info(f"{len(collected.pairs)} pairs collected from {len(data.items)} task items, {reward}: {place}")


def _check(model: LearnerModule, data: PreferenceDataModule) -> None:
    checks = [
        (not isinstance(model, TeamModule), f"a {type(model).__name__} has no team to collect with"),
        (data.given_pairs is not None, "`pairs` must be left out: collecting makes them"),
        (not data.items, "`items` must be given to collect"),
        (data.oracle is None and data.judge is None, "`reward_func` or `judge` must be given to collect"),
    ]
    problems = [message for wrong, message in checks if wrong]
    raise_together(problems)
