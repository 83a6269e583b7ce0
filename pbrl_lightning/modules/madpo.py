"""MADPOModule: multi-agent direct preference optimisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from pbrl_lightning.agents.at_once import for_each_agent
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import PairBatch
from pbrl_lightning.losses import joint_margins, madpo_losses, require_finite
from pbrl_lightning.modules.base import Metrics, TeamModule
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

    @property
    @override
    def step_metrics(self) -> list[str]:
        rewards = ["turn_1/reward_mean", "turn_1/expected_return"]
        return ["train/loss", "train/margin", "train/preference_accuracy", *rewards]

    @override
    def make_schedule(self, iterative: bool) -> RoundSchedule:
        epochs = self.num_train_epochs or (1 if iterative else 20)
        return RoundSchedule(self.num_rounds(iterative), (("madpo", epochs),))

    @override
    def step(self, batch: PairBatch, where: str) -> tuple[Tensor, Metrics]:
        # 1. Summed log-probabilities of winners and losers, one forward per agent: (N, 2B).
        last = self.score_last_token or self.team.roles is not None
        scored = for_each_agent(self.team, lambda i: (self.team.response_logps(i, batch.agents[i], last),))
        logps = torch.stack([sums for (sums,) in scored])
        winner_logps, loser_logps = logps.chunk(2, dim=1)
        # 2. The loss of each pair from the margin of the whole team.
        losses = madpo_losses(winner_logps, loser_logps, self.dpo_beta)
        # 3. The mean over all pairs of the optimizer step, whatever their split into ranks and batches.
        loss = (losses * batch.weights).sum() * batch.loss_scale
        require_finite(loss, {f"agent {i}'s log-probabilities": p for i, p in enumerate(logps)}, where)
        margins = joint_margins(winner_logps, loser_logps).detach()
        self.pair_margins = margins[batch.weights > 0]
        return loss, _metrics(losses.detach(), margins, batch)


def _metrics(losses: Tensor, margins: Tensor, batch: PairBatch) -> Metrics:
    kept = batch.weights > 0
    if not kept.any():
        return {}
    reward = batch.candidate_reward_means[kept].mean().float()
    return {
        "train/loss": losses[kept].mean(),
        "train/margin": margins[kept].mean(),
        "train/preference_accuracy": (margins[kept] > 0).float().mean(),
        "turn_1/reward_mean": reward,
        "turn_1/expected_return": reward,
    }
