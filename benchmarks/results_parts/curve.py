"""The task reward of a team while it trains, against the joint responses that were sampled for it."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from pbrl_lightning.callbacks import JointEvaluation


class RewardCurve(JointEvaluation):
    """Scores joint responses to all evaluation items: at the start, after each epoch that moved the agents, at the end.

    In the place of the default evaluation, with more responses, and with time taken off. Like that one it changes no
    result of the run.

    Args:
        responses: To each evaluation item; the same random numbers each time.
        untrained: Rewards before training, where they are known already.

    Attributes:
        points: Joint responses sampled for training and mean reward, of each evaluation.
        before: Rewards of the untrained team, one per response.
        after: Those of the trained one.
        seconds: Of the whole fit without these evaluations.
    """

    def __init__(self, responses: int, untrained: Tensor | None = None) -> None:
        super().__init__(interval=0)
        self.responses = responses
        self.untrained = untrained
        self.points: list[tuple[int, float]] = []
        self.before = self.after = torch.empty(0)
        self.seconds = 0.0
        self._moved = 0
        self._spent = 0.0
        self._started = 0.0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._started = time.monotonic()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.before = self.after = self._rewards(trainer) if self.untrained is None else self.untrained
        self.points = [(0, self.before.mean().item())]

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Nothing: epochs count here."""

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.policy_updates == self._moved:
            return
        self._moved = int(pl_module.policy_updates)  # type: ignore[arg-type]
        self.after = self._rewards(trainer)
        samples = trainer.datamodule.env_step  # type: ignore[attr-defined]
        if self.points[-1][0] == samples:  # another epoch on the same pairs
            self.points.pop()
        self.points.append((samples, self.after.mean().item()))

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds = time.monotonic() - self._started - self._spent

    def _rewards(self, trainer: L.Trainer) -> Tensor:
        started = time.monotonic()
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        every = list(range(len(data.evaluator.items)))
        rewards = data.evaluator.evaluate(trainer.lightning_module.team, every, self.responses).rewards
        self._spent += time.monotonic() - started
        return rewards
