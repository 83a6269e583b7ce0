"""MADPOModule: multi-agent direct preference optimisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from pbrl_lightning.agents.at_once import for_each_agent
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import PairBatch
from pbrl_lightning.losses import joint_margins, madpo_losses, require_finite
from pbrl_lightning.modules.base import Metrics, TeamModule, by_agent
from pbrl_lightning.modules.held_out import held_out_metrics, log_and_reset, print_held_out
from pbrl_lightning.schedule import RoundSchedule
from pbrl_lightning.utils.errors import ConfigurationError


class MADPOModule(TeamModule):
    """Trains a team directly from preferences between its joint responses.

    The loss of a pair is ``-log sigmoid(beta * sum_i (log pi_i(winner_i) - log pi_i(loser_i)))``: every agent learns
    from the team's outcome. One backward gives each agent exactly the gradient of the agent-by-agent procedure with
    the other margins detached, because no trainable parameter belongs to two agents.

    Args:
        team: The agents.
        dpo_beta: Inverse temperature, above 0.
        num_iterations: Rounds of an iterative run; default 6.
        num_train_epochs: Passes over a round's pairs; default 20, in an iterative run 1.
        score_last_token: False leaves the last token of each response out of its log-probability; a centralised team's
            joint response is always scored whole.
        learning_rate: Of every agent; default 5e-6, for adapters 1e-4.
        weight_decay: AdamW's.
        lr_scheduler: Optimizer to learning-rate schedule, stepped after every update.

    Raises:
        ConfigurationError: If an option is out of range.
    """

    def __init__(
        self,
        team: AgentTeam,
        *,
        dpo_beta: float = 0.1,
        num_iterations: int | None = None,
        num_train_epochs: int | None = None,
        score_last_token: bool = False,
        learning_rate: float | None = None,
        weight_decay: float = 0.01,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        super().__init__(
            team,
            num_iterations=num_iterations,
            num_train_epochs=num_train_epochs,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            lr_scheduler=lr_scheduler,
        )
        if not dpo_beta > 0:
            raise ConfigurationError(f"`dpo_beta` must be > 0, got {dpo_beta}")
        self.dpo_beta = dpo_beta
        self.score_last_token = score_last_token
        self.held_out = held_out_metrics("val/", "preference_accuracy")
        self._measured = False

    measures_pairs = True
    held_out_names = ("val/loss", "val/preference_accuracy", "val/margin")

    @property
    @override
    def step_metrics(self) -> list[str]:
        sides = [f"train/{name}/{side}" for name in ("logps", "response_length") for side in ("chosen", "rejected")]
        rewards = ["turn_1/reward_mean", "turn_1/expected_return"]
        return ["train/loss", "train/margin", "train/preference_accuracy", *sides, *rewards]

    @override
    def make_schedule(self, iterative: bool) -> RoundSchedule:
        epochs = self.num_train_epochs or (1 if iterative else 20)
        return RoundSchedule(self.num_rounds(iterative), (("madpo", epochs),))

    @override
    def step(self, batch: PairBatch, where: str) -> tuple[Tensor, Metrics]:
        # 1. Summed log-probabilities of winners and losers, one forward per agent: (N, 2B).
        logps = self._response_logps(batch)
        winner_logps, loser_logps = logps.chunk(2, dim=1)
        # 2. The loss of each pair from the margin of the whole team.
        losses = madpo_losses(winner_logps, loser_logps, self.dpo_beta)
        # 3. The mean over all pairs of the optimizer step, whatever their split into ranks and batches.
        loss = (losses * batch.weights).sum() * batch.loss_scale
        require_finite(loss, {f"agent {i}'s log-probabilities": p for i, p in enumerate(logps)}, where)
        kept = batch.weights.nonzero().flatten()
        winner_logps, loser_logps = winner_logps.detach()[:, kept], loser_logps.detach()[:, kept]
        self.pair_margins = joint_margins(winner_logps, loser_logps)
        if not len(kept):
            return loss, {}
        return loss, _metrics(losses.detach()[kept], winner_logps, loser_logps, batch, kept)

    def _response_logps(self, batch: PairBatch) -> Tensor:
        last = self.score_last_token or self.team.roles is not None
        scored = for_each_agent(self.team, lambda i: (self.team.response_logps(i, batch.agents[i], last),))
        return torch.stack([sums for (sums,) in scored])

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if not isinstance(batch, PairBatch):
            super().validation_step(batch, batch_idx, dataloader_idx)
            return
        # What a forward keeps for later ones must be of use in training, so Lightning's inference mode ends here.
        with torch.inference_mode(False), torch.no_grad():
            kept = batch.weights > 0
            winner_logps, loser_logps = self._response_logps(batch).chunk(2, dim=1)
            self.pair_margins = margins = joint_margins(winner_logps, loser_logps)[kept]
            self.held_out["loss"].update(madpo_losses(winner_logps, loser_logps, self.dpo_beta)[kept])
            self.held_out["preference_accuracy"].update((margins > 0).float())
            self.held_out["margin"].update(margins)
        self._measured = True  # on every process, also on one without a pair: they add up together

    @override
    def on_validation_epoch_end(self) -> None:
        """Logs loss, accuracy and margin over all held-out pairs, and what an evaluation gave."""
        super().on_validation_epoch_end()
        if self._measured:
            log_and_reset(self, self.held_out)
        self._measured = False

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        print_held_out(self.trainer, "val/")


def _metrics(losses: Tensor, winner_logps: Tensor, loser_logps: Tensor, batch: PairBatch, kept: Tensor) -> Metrics:
    """What is logged of a batch's pairs.

    Args:
        losses: Shape ``(B',)``, of the pairs that do not only fill up.
        winner_logps: Shape ``(N, B')``.
        loser_logps: Shape ``(N, B')``.
        batch: The batch.
        kept: Which of its pairs these are, shape ``(B',)``.
    """
    margins = joint_margins(winner_logps, loser_logps)
    metrics: Metrics = {
        "train/loss": losses.mean(),
        "train/margin": margins.mean(),
        "train/preference_accuracy": (margins > 0).float().mean(),
        **by_agent("train/margin", (winner_logps - loser_logps).mean(1)),
    }
    lengths = torch.stack([rows.response_mask.sum(1) for rows in batch.agents]).float().chunk(2, dim=1)
    for side, logps, tokens in zip(("chosen", "rejected"), (winner_logps, loser_logps), lengths, strict=True):
        metrics[f"train/logps/{side}"] = logps.sum(0).mean()
        metrics |= by_agent(f"train/logps/{side}", logps.mean(1))
        metrics[f"train/response_length/{side}"] = tokens[:, kept].mean()
        metrics |= by_agent(f"train/response_length/{side}", tokens[:, kept].mean(1))
    rewards = batch.candidate_reward_means[kept]
    if not rewards.isnan().all():  # pairs of texts have none
        metrics["turn_1/reward_mean"] = metrics["turn_1/expected_return"] = rewards.nanmean().float()
    return metrics
