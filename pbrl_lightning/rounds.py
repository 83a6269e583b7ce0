"""The rounds of a run as callbacks and loggers see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from pbrl_lightning.curves import standard_error
from pbrl_lightning.samples import mean_lengths

if TYPE_CHECKING:
    from pbrl_lightning.preferences.collector import Collection


@dataclass
class RoundRecord:
    """What happened in one round.

    Attributes:
        round: 1-based.
        collected_pairs: Pairs of this round's collection.
        train_pairs: Pairs that replay selected for training.
        reward_mean: Mean score of the current agents' candidates; None if nothing was scored.
        comparator_reward_mean: The same of the comparator's; None in base runs.
        first_step: Optimizer steps made before this round's training.
        seconds: Time of the collection.
        tokens_per_second: Sampled tokens over that time.
        details: More of the collection by logged name: standard errors, win rate, lengths of responses.
    """

    round: int
    collected_pairs: int
    train_pairs: int
    reward_mean: float | None
    comparator_reward_mean: float | None
    first_step: int
    seconds: float
    tokens_per_second: float
    details: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """What loggers get; means that do not exist are left out."""
        metrics: dict[str, float] = {
            "iter/current_iteration": self.round,
            "iter/current_preference_pairs": self.collected_pairs,
            "iter/train_preference_pairs": self.train_pairs,
            "collect/seconds": self.seconds,
            "collect/tokens_per_second": self.tokens_per_second,
        }
        if self.reward_mean is not None:
            metrics["collect/reward_mean"] = self.reward_mean
        if self.comparator_reward_mean is not None:
            metrics["collect/comparator_reward_mean"] = self.comparator_reward_mean
        return metrics | self.details


def collection_details(collected: Collection) -> dict[str, float]:
    """What is logged of a collection besides its means.

    Standard errors of mean scores and of the win rate take scored responses and comparisons as independent.
    """
    outcomes = collected.outcomes
    errors = {
        "collect/reward_standard_error": standard_error(collected.actor_rewards),
        "collect/comparator_reward_standard_error": standard_error(collected.comparator_rewards),
        "collect/win_rate_standard_error": standard_error(outcomes),
    }
    details = {name: error for name, error in errors.items() if error is not None}
    if outcomes:
        details["collect/win_rate"] = fmean(outcomes)
        details["collect/tie_rate"] = outcomes.count(0.5) / len(outcomes)
    return details | {f"collect/{name}": mean for name, mean in mean_lengths(collected.response_tokens).items()}


@dataclass
class RunProgress:
    """Where a run stands; this, the round store and the pairs in training are the data side's state."""

    round: int = 0
    ended_round: int = 0
    skipped_rounds: int = 0
    env_step: int = 0
    total_pairs: int = 0
    fitted: bool = False


RoundHook = Literal[
    "on_round_start",
    "on_collection_progress",
    "on_collection_end",
    "on_round_scored",
    "on_round_collected",
    "on_round_prepared",
    "on_round_end",
]


class RoundCallback(L.Callback):
    """A callback that hears of rounds too. A passed-over round (no pairs to train on) starts and ends as well."""

    def on_round_start(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        """Before the collection of a round; the weights are those that the round before left."""

    def on_collection_progress(self, trainer: L.Trainer, pl_module: L.LightningModule, done: int, total: int) -> None:
        """During collection: how many of the item passes are done."""

    def on_collection_end(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        """When all is sampled and scored, and nothing of it is stored yet."""

    def on_round_scored(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        round_number: int,
        collected: Collection,
        reward_range: tuple[float, float] | None,
    ) -> None:
        """After a collection, when its round file is written: all scores and pairs, the same on every process.

        ``reward_range`` is that of the scores before ``reward_processor``, where the reward says it.
        """

    def on_round_collected(self, trainer: L.Trainer, pl_module: L.LightningModule, record: RoundRecord) -> None:
        """After collection and replay, before the first update of the round."""

    def on_round_prepared(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        """When all is ready for the first update of a round: its pairs chosen, what is renewed for it renewed."""

    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        """After the last update of a round, before anything of the next one."""


def notify(trainer: L.Trainer, hook: RoundHook, *arguments: Any) -> None:
    """Calls a round hook of every callback that has it."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RoundCallback):
            getattr(callback, hook)(trainer, trainer.lightning_module, *arguments)


def completed_epochs(trainer: L.Trainer) -> int:
    """Epochs that are over when a loader is asked for; ``trainer.current_epoch`` lags behind at the end of a fit."""
    return trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]


def batches_per_update(trainer: L.Trainer) -> int:
    """Batches per optimizer step of the epoch that begins; Lightning sets it after the epoch's loader is built."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(completed_epochs(trainer))
    return trainer.accumulate_grad_batches


def writes_logs(trainer: L.Trainer) -> bool:
    """True if a run has a logger; a trial run has only a stand-in."""
    return bool(trainer.loggers) and not trainer.fast_dev_run  # type: ignore[attr-defined]


def log_to(trainer: L.Trainer, metrics: Mapping[str, float], monitored: bool = True) -> None:
    """Writes numbers to every logger at the current optimizer step, outside of Lightning's logging interval.

    Args:
        trainer: Whose loggers.
        metrics: Numbers by name.
        monitored: ``ModelCheckpoint`` and ``EarlyStopping`` see them too.
    """
    if monitored:
        trainer.callback_metrics.update({name: torch.tensor(float(value)) for name, value in metrics.items()})
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=trainer.global_step)


def log_round(trainer: L.Trainer, record: RoundRecord, progress: RunProgress, num_dropped: int) -> None:
    """Writes what a round collected to every logger, and the counts of what was cut or dropped so far."""
    metrics = record.metrics()
    metrics["iter/total_preference_pairs"] = progress.total_pairs
    metrics["env_step"] = progress.env_step
    metrics["collect/dropped_candidates"] = num_dropped
    counts = trainer.lightning_module.counts()  # type: ignore[operator]
    metrics |= {f"collect/{name}": count for name, count in counts.items() if name != "greedy"}
    log_to(trainer, metrics)
