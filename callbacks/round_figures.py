"""Draws what a round's training looked like: margins, calibration, rewards and KL of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from pbrl_lightning.batches import PairBatch, RolloutBatch
from pbrl_lightning.figures import calibration_figure, histogram_figure
from pbrl_lightning.media import log_figure, log_histogram
from pbrl_lightning.modules.base import LearnerModule
from pbrl_lightning.rounds import RoundCallback

_LABELS = {
    "train/margins": "joint margin, nats",
    "val/margins": "joint margin, nats, held-out pairs",
    "reward/margins": "R(winner) − R(loser)",
    "reward/val_margins": "R(winner) − R(loser), held-out pairs",
    "rollout/rewards": "reward of a joint response",
    "policy/kls": "KL of a response against the reference, nats",
}


class RoundFigures(RoundCallback):
    """After each round, histograms and figures of its last epoch of each kind.

    Margins of the pairs, as they were before the update that each fed; a reward model's calibration, on held-out pairs
    where there are any; rewards of the rollouts, and their KL where there is a reference. Of the first process, and
    after a resume inside a round of what came since. Added by itself to runs with a logger.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, list[Tensor]]] = {}

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._found.clear()  # of an earlier fit

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero or not isinstance(pl_module, LearnerModule):
            return
        epoch = trainer.current_epoch
        if isinstance(batch, PairBatch) and pl_module.pair_margins is not None:
            self._keep(pl_module.pair_margins_name, epoch, pl_module.pair_margins)
        elif isinstance(batch, RolloutBatch):
            scored = batch.weights > 0
            self._keep("rollout/rewards", epoch, batch.rewards[scored])
            coef = pl_module.policy_stage.kl_coef if pl_module.policy_stage is not None else 0.0
            if coef:  # each agent's reward is the shared one less its share of the penalty
                self._keep("policy/kls", epoch, ((batch.rewards - batch.returns) / coef)[:, scored].flatten())

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(pl_module, LearnerModule):
            self._found.pop(pl_module.val_margins_name, None)

    @override
    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.is_global_zero and isinstance(batch, PairBatch) and isinstance(pl_module, LearnerModule):
            assert pl_module.pair_margins is not None  # of this batch
            self._keep(pl_module.val_margins_name, 0, pl_module.pair_margins)

    @override
    def on_round_end(self, trainer: L.Trainer, pl_module: L.LightningModule, round_number: int) -> None:
        together = {name: torch.cat(parts).double().cpu() for name, (_, parts) in self._found.items()}
        self._found.clear()
        values = {name: found[found.isfinite()].tolist() for name, found in together.items()}
        for name in [name for name, found in values.items() if found]:
            self._log(trainer, name, values[name], round_number)
        for name, which in (("reward/val_margins", "held-out pairs"), ("reward/margins", "pairs in training")):
            if margins := values.get(name):
                title = f"round {round_number}: {which}"
                log_figure(trainer, "figures/calibration", partial(calibration_figure, margins, title))
                return

    def _keep(self, name: str, epoch: int, values: Tensor) -> None:
        """Adds values of an epoch; those of an earlier one are dropped."""
        if name not in self._found or self._found[name][0] != epoch:
            self._found[name] = (epoch, [])
        self._found[name][1].append(values.detach())

    def _log(self, trainer: L.Trainer, name: str, values: Sequence[float], round_number: int) -> None:
        log_histogram(trainer, name, values)
        marked = 0.0 if "margin" in name else None
        draw = partial(histogram_figure, values, f"round {round_number}", _LABELS[name], marked)
        log_figure(trainer, f"figures/{name.replace('/', '_')}", draw)
