"""Evaluates the current team on held-out items while it trains."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import WeightAveraging
from typing_extensions import override

from pbrl_lightning.curves import standard_error
from pbrl_lightning.media import log_table
from pbrl_lightning.monitoring import monitors_evaluation
from pbrl_lightning.rounds import log_to
from pbrl_lightning.samples import JointSample, evaluated_lengths, evaluated_samples, table_of
from pbrl_lightning.utils.errors import ConfigurationError


class JointEvaluation(L.Callback):
    """Scores one joint response of the current agents to each of a few held-out items with the task reward.

    Before the first update, every ``interval`` updates of the agents, and at the end; after each epoch too, where an
    ``EarlyStopping`` or a ``ModelCheckpoint`` monitors it. Always the same items and random
    numbers, so that differences come from the agents. It changes no training result.

    Args:
        interval: Updates of the agents (a reward model's do not count) from one to the next; 0 evaluates first and
            last only.
        num_samples: Evaluation items used.

    Attributes:
        results: Optimizer step and mean reward of each evaluation.
        first: Joint responses of the first evaluation, and ``last`` those of the last one.
    """

    def __init__(self, interval: int = 16, num_samples: int = 4) -> None:
        if interval < 0:
            raise ConfigurationError(f"`interval` must be >= 0 (0 = first and last only), got {interval}")
        if num_samples < 1:
            raise ConfigurationError(f"`num_samples` must be >= 1, got {num_samples}")
        self.interval = interval
        self.num_samples = num_samples
        self.results: list[tuple[int, float]] = []
        self.first: list[JointSample] = []
        self.last: list[JointSample] = []
        self._updates: int | None = None

    @property
    @override
    def state_key(self) -> str:
        return "JointEvaluation"

    @override
    def state_dict(self) -> dict[str, Any]:
        samples = {"first": [asdict(sample) for sample in self.first], "last": [asdict(sample) for sample in self.last]}
        return {"results": [list(result) for result in self.results], "updates": self._updates, **samples}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.results = [(step, value) for step, value in state_dict["results"]]
        self._updates = state_dict["updates"]
        self.first = [JointSample(**sample) for sample in state_dict.get("first", [])]
        self.last = [JointSample(**sample) for sample in state_dict.get("last", [])]

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0:
            self._evaluate(trainer)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        updates = pl_module.policy_updates
        if self.interval and updates and updates % self.interval == 0:  # type: ignore[operator]
            self._evaluate(trainer)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if monitors_evaluation(trainer):  # here they ask for it
            self._evaluate(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            self._updates = None  # other weights since the last update: the average, as exported
        self._evaluate(trainer)

    def _evaluate(self, trainer: L.Trainer) -> None:
        """Evaluates, unless there is nothing to evaluate or these agents were evaluated already."""
        updates = trainer.lightning_module.policy_updates
        if self._updates == updates:
            return
        self._updates = updates  # type: ignore[assignment]
        batch = trainer.datamodule.evaluate(self.num_samples)  # type: ignore[attr-defined]
        if batch is None:
            return
        scored = batch.rewards[~batch.rewards.isnan()]
        metrics = {f"eval/{name}": value for name, value in batch.metrics.items()}
        mean = float(scored.mean()) if len(scored) else None
        if mean is not None:
            self.results.append((trainer.global_step, mean))
            metrics |= {"eval/turn_1/reward_mean": mean, "eval/turn_1/expected_return": mean}
            if (error := standard_error(scored.tolist())) is not None:
                metrics["eval/turn_1/reward_standard_error"] = error
        metrics |= {f"eval/{name}": length for name, length in evaluated_lengths(batch).items()}
        # A checkpoint of later weights must not count as having the score of the first ones.
        monitored = trainer.global_step > 0
        log_to(trainer, {**metrics, "env_step": trainer.datamodule.env_step}, monitored)  # type: ignore[attr-defined]
        self.last = evaluated_samples(batch)
        self.first = self.first or self.last
        if trainer.is_global_zero:
            log_table(trainer, "eval/samples", *table_of(self.last))
