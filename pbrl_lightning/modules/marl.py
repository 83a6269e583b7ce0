"""MARLModule: multi-agent policy gradients on a shared reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from pbrl_lightning.advantages import (
    GROUP_ALGORITHMS,
    RLAlgorithm,
    critic_advantages,
    group_advantages,
    normalise_by_group,
    normalise_over_batch,
)
from pbrl_lightning.agents.at_once import for_each_agent
from pbrl_lightning.agents.reference import ReferenceKL, ReferencePolicies
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.batches import RolloutBatch, TokenBatch
from pbrl_lightning.losses import KL_EXPONENT_LIMIT, k3_kl, policy_gradient_losses, require_finite, value_losses
from pbrl_lightning.models.critic import AttachedCritics, Critic, JointCritic, SeparateCritics, TextCritic
from pbrl_lightning.models.reward import JointRewardModel
from pbrl_lightning.modules.base import Metrics, TeamModule, by_agent
from pbrl_lightning.modules.run_dtype import DtypeHolder
from pbrl_lightning.rollouts import Rows
from pbrl_lightning.schedule import RoundSchedule
from pbrl_lightning.utils.errors import ConfigurationError, raise_together


class MARLModule(TeamModule):
    """Trains a team by policy gradients: every agent gets the shared reward of the joint response.

    The policy loss is ``-mean over responses of A_i * log pi_i(response_i | h_i)`` for each agent, on-policy, over all
    response tokens at temperature 1. The reward is the data module's ``reward_func``, or ``reward_model``.

    Args:
        team: The agents.
        rl_algorithm: The advantage of response g of an item: ``magrpo`` R_g − mean(R); ``mareinforce`` R_g; ``marloo``
            R_g − mean of the others (magrpo × G/(G−1)); ``maremax`` R_g − max(R); ``maac`` R_g − V(joint prompt);
            ``iac`` R_g − V_i(prompt_i).
        num_generations: Responses per agent and item, G; at least 2 without a critic or with ``critic_type="q"``.
        advantage_normalization: Divide by the population standard deviation of the group's rewards (with a critic: of
            the advantages over the rollout batch, and by no less than their mean's size), without re-centring.
        reward_model: A fitted reward model in the place of the task reward.
        critic: Default for ``maac`` a :class:`JointCritic`, for ``iac`` :class:`SeparateCritics`, each from the agents'
            own model; :class:`AttachedCritics` are heads on the actors.
        critic_learning_rate: Default: the first agent's.
        value_loss_coef: Weight of the critics' loss.
        reference_kl: A KL penalty against the start of the run; None for none.
        num_train_epochs: Passes over the task items; default 20.
        learning_rate: Of every agent; default 5e-6, for adapters 1e-4.
        weight_decay: AdamW's.
        lr_scheduler: See :class:`LearnerModule`.

    Raises:
        ConfigurationError: If options do not fit together; all problems are named at once.
    """

    collects_pairs = False

    def __init__(
        self,
        team: AgentTeam,
        *,
        rl_algorithm: RLAlgorithm = "magrpo",
        num_generations: int = 4,
        advantage_normalization: bool = True,
        reward_model: JointRewardModel | None = None,
        critic: Critic | None = None,
        critic_learning_rate: float | None = None,
        value_loss_coef: float = 0.6,
        reference_kl: ReferenceKL | None = None,
        num_train_epochs: int | None = None,
        learning_rate: float | None = None,
        weight_decay: float = 0.01,
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        super().__init__(
            team,
            num_train_epochs=num_train_epochs,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            lr_scheduler=lr_scheduler,
        )
        check_policy_options(rl_algorithm, num_generations, critic, critic_learning_rate, value_loss_coef)
        if critic is None and rl_algorithm not in GROUP_ALGORITHMS:
            critic = JointCritic() if rl_algorithm == "maac" else SeparateCritics()
        self.rl_algorithm: RLAlgorithm = rl_algorithm
        self.num_generations = num_generations
        self.advantage_normalization = advantage_normalization
        self.critic = critic
        self.critic_learning_rate = critic_learning_rate
        self.value_loss_coef = value_loss_coef
        self.reference_kl = reference_kl
        # Not registered: neither the frozen reward model nor the reference is trained or belongs into checkpoints.
        self._reward_model = (reward_model,)
        self._reference: tuple[ReferencePolicies, ...] = ()
        self._reference_used = False

    @property
    def reward_model(self) -> JointRewardModel | None:
        """The fitted reward model that scores rollouts, None for the task reward."""
        return self._reward_model[0]

    @property
    @override
    def step_metrics(self) -> list[str]:
        of_rollouts = [f"rollout/{name}" for name in ("scored_responses", "tokens_per_second")]
        of_rollouts += [f"turn_1/{name}" for name in ("reward_mean", "expected_return", "reward_standard_error")]
        if self.reference_kl is not None:
            of_rollouts += ["policy/kl", "policy/kl_clamped_tokens"]
        critics = ["value/loss"] if self.critic is not None else []
        return ["policy/loss", "policy/logp", "policy/response_length", *critics, *of_rollouts]

    @override
    def make_schedule(self, iterative: bool) -> RoundSchedule:
        if iterative:
            raise ConfigurationError(
                "the MARLModule compares nothing and takes no `comparator`; MARLHFModule has rounds"
            )
        return RoundSchedule(1, (("policy", self.num_train_epochs or 20),))

    @override
    def check(self) -> None:
        if self.critic is not None:
            self.critic.bind(self.team)
        if self.reward_model is not None:
            self.reward_model.bind(self.team)

    @property
    @override
    def policy_stage(self) -> MARLModule:
        return self

    @property
    @override
    def learned_reward(self) -> JointRewardModel | None:
        return self.reward_model

    @override
    def load(self) -> None:
        self.load_policy_stage()
        if self.reward_model is not None:
            if not self.reward_model.load().fitted:
                raise ConfigurationError(
                    "`reward_model` was never fitted: name a fitted one, such as the `export/reward_model` of a run, "
                    "or leave it out to learn from the task reward"
                )
            self.reward_model.set_trained(False)

    def load_policy_stage(self) -> None:
        """Loads agents and critics, and keeps the reference; does nothing the second time."""
        self.check()
        self.team.load()
        if self.critic is not None:
            self.critic.load(self.team)
        if self.reference_kl is not None and not self._reference:
            self._reference = (ReferencePolicies(self.team, self.reference_kl.devices),)
            self._reference_used = False

    @override
    def dtype_holders(self) -> list[DtypeHolder]:
        others = [model for model in (self.critic, self.reward_model) if model is not None]
        return [self.team, *others]

    @override
    def unload(self) -> None:
        super().unload()
        self._reference = ()

    def begin_fit(self, resumed: bool) -> None:
        """Takes the reference anew where an earlier fit used it; a resumed run keeps the one it began with."""
        if self.reference_kl is not None and self._reference_used and not resumed:
            self._reference = (ReferencePolicies(self.team, self.reference_kl.devices),)
        self._reference_used = True
        for reference in self._reference:
            reference.follow()

    def reference_state(self) -> list[dict[str, Tensor] | None] | None:
        """What a checkpoint holds of the reference."""
        return self._reference[0].state_dict() if self._reference else None

    def load_reference_state(self, state: list[dict[str, Tensor] | None] | None) -> None:
        """What :meth:`reference_state` gave."""
        if state is not None and self._reference:
            self._reference[0].load_state_dict(state)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["reference"] = self.reference_state()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.load_reference_state(checkpoint.get("reference"))

    @override
    def on_fit_start(self) -> None:
        self.begin_fit(self.trainer.ckpt_path is not None)
        if self.reward_model is not None:
            self.reward_model.to(next(self.team.parameters()).device)

    @override
    def parameter_groups(self) -> list[dict[str, Any]]:
        groups = super().parameter_groups()
        if self.critic is not None:
            rate = self.critic_learning_rate or self.agent_learning_rate(0)
            groups.append({"params": self.critic.trained_parameters(), "lr": rate, "name": "critic"})
        return groups

    @override
    def step(self, batch: RolloutBatch, where: str) -> tuple[Tensor, Metrics]:
        # 1. Summed log-probabilities of the sampled responses, one forward per agent: (N, R).
        attached = self.critic is not None and self.critic.attached
        scored = for_each_agent(self.team, lambda i: self._score(i, batch.agents[i], attached))
        logps = torch.stack([sums for sums, *_ in scored])
        # 2. Each agent's policy loss, summed; the advantages are constants.
        policy = policy_gradient_losses(logps, batch.advantages.to(logps.dtype))
        policy_loss = (policy * batch.weights).sum() * batch.loss_scale
        quantities = {f"agent {i}'s log-probabilities": p for i, p in enumerate(logps)}
        lengths = torch.stack([rows.response_mask.sum(1) for rows in batch.agents]).float()
        metrics: Metrics = {
            "policy/loss": policy_loss.detach(),
            "policy/logp": logps.detach().mean(),
            **by_agent("policy/logp", logps.detach().mean(1)),
            "policy/response_length": lengths.mean(),
            **by_agent("policy/response_length", lengths.mean(1)),
        }
        loss = policy_loss
        # 3. The critics' loss.
        if self.critic is not None:
            values = self._values([states for _, *some in scored for states in some], batch.agents, batch.critic_rows)
            value_loss = self._value_loss(values, batch)
            loss = loss + self.value_loss_coef * value_loss
            quantities |= {f"critic {i}'s values": v for i, v in enumerate(values)}
            metrics["value/loss"] = value_loss.detach()
        quantities |= {f"agent {i}'s advantages": a for i, a in enumerate(batch.advantages)}
        require_finite(loss, quantities, where)
        return loss, metrics if bool((batch.weights > 0).any()) else {}

    def _score(self, agent: int, rows: TokenBatch, with_states: bool) -> tuple[Tensor, ...]:
        """Summed log-probabilities of an agent's responses and, where critics read them, its hidden states."""
        responses = self.team.score_responses(agent, rows, with_states=with_states)
        return (responses.sums, responses.states) if with_states else (responses.sums,)

    def _values(self, states: list[Tensor], agents: list[TokenBatch], critic_rows: list[TokenBatch]) -> Tensor:
        """The critics' values, shape ``(C, R)``."""
        assert self.critic is not None
        if self.critic.attached:
            return torch.stack(
                [self.critic(i, s, rows) for i, (s, rows) in enumerate(zip(states, agents, strict=True))]
            )
        return self.critic(critic_rows, self.num_generations)

    def _value_loss(self, values: Tensor, batch: RolloutBatch) -> Tensor:
        """Mean squared error of each critic, summed over critics; the team's one critic meets the mean reward."""
        assert self.critic is not None
        targets = batch.returns if len(values) == len(batch.returns) else batch.returns.mean(0, keepdim=True)
        old_values = batch.old_values.to(values.dtype) if batch.old_values is not None else None
        losses = value_losses(values, targets.to(values.dtype), old_values, self.critic.value_clip_range)
        return (losses.sum(0) * batch.weights).sum() * batch.loss_scale

    def critic_rows(self, prompts: list[list[str]], completions: list[list[str]]) -> list[Rows]:
        """What critics with models of their own read of a rollout, per critic; empty without any."""
        if not isinstance(self.critic, TextCritic):
            return []
        return self.critic.rows(prompts, completions, self.num_generations)

    def critic_pad_ids(self) -> list[int]:
        """What fills up their rows."""
        return self.critic.pad_ids() if isinstance(self.critic, TextCritic) else []

    @torch.no_grad()
    def old_values(self, agents: list[TokenBatch], critic_rows: list[TokenBatch]) -> Tensor | None:
        """The critics' values now, shape ``(C, R)``; None without critics."""
        if self.critic is None:
            return None
        states = []
        if self.critic.attached:
            scored = for_each_agent(self.team, lambda i: self._score(i, agents[i], with_states=True))
            states = [states for _, states in scored]
        return self._values(states, agents, critic_rows)

    @property
    def kl_coef(self) -> float:
        """Reward per nat of KL against the reference; 0 without one."""
        return self.reference_kl.coef if self.reference_kl is not None else 0.0

    @torch.no_grad()
    def kl_to_reference(self, agents: list[TokenBatch]) -> tuple[Tensor, Tensor] | None:
        """KL of each response and how many of its tokens were clamped, both of shape ``(N, R)``; None without it."""
        if self.reference_kl is None:
            return None
        kls, clamped = zip(*for_each_agent(self.team, lambda i: self._kl(i, agents[i])), strict=True)
        return torch.stack(kls), torch.stack(clamped)

    def _kl(self, agent: int, rows: TokenBatch) -> tuple[Tensor, Tensor]:
        policy = self.team.score_responses(agent, rows)
        reference = self._reference[0].score_responses(agent, rows)
        too_far = reference.token_logps - policy.token_logps > KL_EXPONENT_LIMIT
        kl = policy.sum_by_row(k3_kl(policy.token_logps, reference.token_logps))
        return kl, policy.sum_by_row(too_far.to(policy.token_logps.dtype))

    def advantages(self, returns: Tensor, old_values: Tensor | None, scored: Tensor) -> Tensor:
        """Advantages of the global rollout batch.

        Args:
            returns: Shape ``(N, B, G)``.
            old_values: Shape ``(C, B, G)``, or None without critics.
            scored: Shape ``(B, G)``, bool.

        Returns:
            Shape ``(N, B, G)``.
        """
        if self.critic is None:
            advantages = group_advantages(returns, self.rl_algorithm, scored)  # type: ignore[arg-type]
            return normalise_by_group(advantages, returns, scored) if self.advantage_normalization else advantages
        assert old_values is not None
        advantages = critic_advantages(returns, old_values, self.critic.critic_type, scored)
        return normalise_over_batch(advantages, returns, scored) if self.advantage_normalization else advantages


def check_policy_options(
    rl_algorithm: str,
    num_generations: int,
    critic: Critic | None,
    critic_learning_rate: float | None,
    value_loss_coef: float,
) -> None:
    """Raises a ValueError that names every option of the policy stage that does not fit."""
    grouped = rl_algorithm in GROUP_ALGORITHMS
    wanted = {"maac": (JointCritic,), "iac": (SeparateCritics, AttachedCritics)}.get(rl_algorithm, ())
    names = " or ".join(kind.__name__ for kind in wanted)
    needs_group = grouped or (critic is not None and critic.critic_type == "q")
    checks = [
        (
            rl_algorithm not in get_args(RLAlgorithm),
            f"`rl_algorithm` must be one of {', '.join(get_args(RLAlgorithm))}, got {rl_algorithm!r}",
        ),
        (
            grouped and critic is not None,
            f"`rl_algorithm: {rl_algorithm}` compares an item's responses with each other and takes no `critic`",
        ),
        (
            bool(wanted) and critic is not None and not isinstance(critic, wanted),
            f"`rl_algorithm: {rl_algorithm}` takes a {names} as `critic`, got {type(critic).__name__}",
        ),
        (
            num_generations < (2 if needs_group else 1),
            f"`num_generations` must be >= {2 if needs_group else 1} with `rl_algorithm: {rl_algorithm}`"
            f"{' and critic_type q' if needs_group and not grouped else ''}, got {num_generations}",
        ),
        (
            grouped and critic_learning_rate is not None,
            f"`rl_algorithm: {rl_algorithm}` has no critic and takes no `critic_learning_rate`",
        ),
        (
            critic_learning_rate is not None and not critic_learning_rate > 0,
            f"`critic_learning_rate` must be > 0, got {critic_learning_rate}",
        ),
        (not value_loss_coef > 0, f"`value_loss_coef` must be > 0, got {value_loss_coef}"),
    ]
    problems = [message for wrong, message in checks if wrong]
    raise_together(problems)
