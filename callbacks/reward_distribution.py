"""Writes and draws how a round's rewards are distributed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import lightning as L
from typing_extensions import override

from pbrl_lightning.distributions import reward_distribution
from pbrl_lightning.durable import write_atomically
from pbrl_lightning.figures import reward_figure
from pbrl_lightning.media import log_figure, log_histogram
from pbrl_lightning.preferences.collector import Collection
from pbrl_lightning.rounds import RoundCallback
from pbrl_lightning.run_directory import run_directory


class RewardDistribution(RoundCallback):
    """After each collection, the rewards of all candidates and of the selected pairs, current agents and comparator.

    As ``reward_distributions/iteration_0001.json`` … in the run's directory
    (:func:`pbrl_lightning.distributions.reward_distribution`), and as histograms (``rewards/candidates`` …) and a
    figure (``figures/rewards``) to the loggers. Rewards are those before ``reward_processor``; the 16 bins span the
    ``reward_range`` of the reward function (an attribute, or a variable in the module of a function), or else the
    round's rewards.

    Args:
        dirpath: Where the files go; default ``reward_distributions`` in the run's directory.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        oracle = getattr(trainer.datamodule, "oracle", None)  # type: ignore[attr-defined]
        if oracle is not None:
            oracle.reward_range()  # a wrong one is found before anything is sampled

    @override
    def on_round_scored(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        round_number: int,
        collected: Collection,
        reward_range: tuple[float, float] | None,
    ) -> None:
        directory = Path(self.dirpath or run_directory(trainer) / "reward_distributions")
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        found = reward_distribution(round_number, collected.raw_rewards, reward_range)
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(found, indent=1, allow_nan=False)
        write_atomically(directory / f"iteration_{round_number:04d}.json", lambda file: file.write(text.encode()))
        for group, name in (("candidates", "candidates"), ("selected_pairs", "selected")):
            log_histogram(trainer, f"rewards/{name}", found[group]["current"]["values"])
            log_histogram(trainer, f"rewards/comparator_{name}", found[group]["comparator"]["values"])
        log_figure(trainer, "figures/rewards", partial(reward_figure, found))
