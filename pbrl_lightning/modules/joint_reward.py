"""JointRewardModule: a reward model from preferences, by Bradley-Terry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.classification import BinaryCalibrationError
from typing_extensions import override

from pbrl_lightning.agents.prompts import render_messages
from pbrl_lightning.batches import PairBatch, PairTokens, PreferencePair
from pbrl_lightning.losses import bradley_terry_losses, require_finite
from pbrl_lightning.models.reward import JointRewardModel
from pbrl_lightning.modules.base import LearnerModule, Metrics
from pbrl_lightning.modules.held_out import held_out_metrics, log_and_reset, print_held_out
from pbrl_lightning.modules.run_dtype import DtypeHolder
from pbrl_lightning.schedule import RoundSchedule
from pbrl_lightning.utils.errors import ConfigurationError


class JointRewardModule(LearnerModule):
    """Fits a joint reward model to preference pairs.

    The loss of a pair is ``-log sigmoid(R(winner) - R(loser))``: it raises the winner's score above the loser's and
    does not regress onto the task rewards. Alone it trains from pair files (``data.pairs``) and reports accuracy,
    margin and calibration on held-out task items.

    Args:
        reward_model: What is fitted.
        num_train_epochs: Passes over the pairs; default 1.
        learning_rate: Default 1e-5.
        weight_decay: AdamW's.
        lr_scheduler: See :class:`LearnerModule`.

    Raises:
        ConfigurationError: If an option is out of range.
    """

    pair_batch_size = 1
    pair_margins_name = "reward/margins"
    val_margins_name = "reward/val_margins"
    measures_pairs = True
    held_out_names = ("reward/val_loss", "reward/val_accuracy", "reward/val_margin", "reward/val_calibration_error")
    val_fraction = 0.1

    def __init__(
        self,
        reward_model: JointRewardModel,
        *,
        num_train_epochs: int | None = None,
        learning_rate: float | None = None,
        weight_decay: float = 0.01,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        super().__init__(weight_decay=weight_decay, lr_scheduler=lr_scheduler)
        if num_train_epochs is not None and num_train_epochs < 1:
            raise ConfigurationError(f"`num_train_epochs` must be >= 1, got {num_train_epochs}")
        if learning_rate is not None and not learning_rate > 0:
            raise ConfigurationError(f"the reward model's `learning_rate` must be > 0, got {learning_rate}")
        self.reward_model = reward_model
        self.num_train_epochs = num_train_epochs
        self.learning_rate = learning_rate
        self.held_out = held_out_metrics("reward/val_", "accuracy")
        self.calibration = BinaryCalibrationError(n_bins=10)

    @property
    @override
    def step_metrics(self) -> list[str]:
        return ["reward/loss", "reward/accuracy", "reward/margin"]

    @override
    def make_schedule(self, iterative: bool) -> RoundSchedule:
        if iterative:
            raise ConfigurationError(
                "the JointRewardModule fits pair files and takes no `comparator`; MARLHFModule has rounds"
            )
        return RoundSchedule(1, (("reward", self.num_train_epochs or 1),))

    @override
    def check(self) -> None:
        if self.reward_model.shared:
            raise ConfigurationError(
                "`model: team` is for a MARLHFModule, whose team it stands on; name a model of its own here"
            )
        self.reward_model.bind(None)

    @override
    def load(self) -> None:
        self.reward_model.bind(None).load().set_trained(True)

    @override
    def restore(self, checkpoint: dict[str, Any]) -> None:
        super().restore(checkpoint)
        self.reward_model.fitted = checkpoint["global_step"] > 0

    @override
    def dtype_holders(self) -> list[DtypeHolder]:
        return [self.reward_model]

    @override
    def export(self, directory: Path) -> None:
        self.reward_model.save(directory / "reward_model")

    @override
    def parameter_groups(self) -> list[dict[str, Any]]:
        return [
            {
                "params": self.reward_model.trained_parameters(),
                "lr": self.learning_rate or 1e-5,
                "name": "reward",
            }
        ]

    @override
    def counts(self) -> dict[str, int]:
        return {"truncated_joint_texts": 0, "identical_pairs": 0} | self.reward_model.counts

    @override
    def encode_pairs(self, pairs: list[PreferencePair]) -> tuple[list[PreferencePair], list[PairTokens]]:
        return self.reward_model.encode_pairs(pairs)

    @override
    def pair_pad_ids(self) -> list[int]:
        return [self.reward_model.pad_id]

    @override
    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return render_messages(self.reward_model.tokenizer, messages, add_generation_prompt)

    @override
    def step(self, batch: PairBatch, where: str) -> tuple[Tensor, Metrics]:
        # 1. Scores of winners and losers in one forward: (2B,).
        winner, loser = self.reward_model(batch.agents[0]).chunk(2)
        # 2. Bradley-Terry, averaged over all pairs of the optimizer step.
        losses = bradley_terry_losses(winner, loser)
        loss = (losses * batch.weights).sum() * batch.loss_scale
        require_finite(loss, {"the winners' scores": winner, "the losers' scores": loser}, where)
        margins, kept = (winner - loser).detach(), batch.weights > 0
        self.pair_margins = margins[kept]
        return loss, _metrics(losses.detach(), margins, kept)

    @override
    def validation_step(self, batch: PairBatch, batch_idx: int) -> None:
        del batch_idx
        winner, loser = self.reward_model(batch.agents[0]).chunk(2)
        kept = batch.weights > 0
        self.pair_margins = margins = (winner - loser)[kept]
        self.held_out["loss"].update(bradley_terry_losses(winner, loser)[kept])
        self.held_out["accuracy"].update((margins > 0).float())
        self.held_out["margin"].update(margins)
        # The model's probability for the side that reads first in the order of token ids, so that both answers occur.
        first = torch.tensor(_winner_reads_first(batch), device=margins.device)[kept]
        self.calibration.update(torch.where(first, margins, -margins).float().sigmoid(), first.int())

    @override
    def on_validation_epoch_end(self) -> None:
        """Logs loss, accuracy and margin over all held-out pairs, and the expected calibration error."""
        self.log("reward/val_calibration_error", self.calibration.compute())
        log_and_reset(self, self.held_out, self.calibration)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.reward_model.fitted = True
        print_held_out(self.trainer, "reward/val_")


def _winner_reads_first(batch: PairBatch) -> list[bool]:
    """A side of each pair that does not depend on who won: the one whose token ids come first."""
    winners, losers = (ids.tolist() for ids in batch.agents[0].input_ids.chunk(2))
    return [winner < loser for winner, loser in zip(winners, losers, strict=True)]


def _metrics(losses: Tensor, margins: Tensor, kept: Tensor) -> Metrics:
    if not kept.any():
        return {}
    return {
        "reward/loss": losses[kept].mean(),
        "reward/accuracy": (margins[kept] > 0).float().mean(),
        "reward/margin": margins[kept].mean(),
    }
